"""Attention over packed rows without padding."""
