"""The node's judge: finding it, being evaluated by it, and reading what judges publish."""
