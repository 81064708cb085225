"""Admission of frames: inbox, reputation, replay protection, host bans, fair queue."""
