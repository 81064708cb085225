"""Finding and choosing peers: address book, outbound selection, mDNS, dial-back, twin detection."""
