"""Which frames are accepted: the inbox, reputation, replay protection, bans by host, the fair queue."""
