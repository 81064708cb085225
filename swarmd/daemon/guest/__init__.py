"""Usage, limits and pauses, so that the node is a good guest of its machine (docs/guest.md)."""
