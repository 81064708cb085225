"""Blobs by content id: the store, fetching from providers."""
