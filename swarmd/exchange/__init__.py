"""Rollouts as bytes and back: the wire format, offers, fetching what is chosen."""
