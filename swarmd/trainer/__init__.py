"""The trainer process: the round, checkpoints, and the loop around them."""
