"""Rollouts as bytes: the wire format, offers, and fetching the chosen rollouts."""
