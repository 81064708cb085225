"""What makes the node a good guest of its machine: what it costs, its limits, and when it pauses (docs/guest.md)."""
