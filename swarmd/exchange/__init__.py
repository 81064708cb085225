"""Rollouts as bytes: the wire format, offers, and fetching what is chosen."""
