"""NAT: dial-back, and the handshake that learns who listens at an address."""
