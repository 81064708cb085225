"""The node's judge: being evaluated by it, and reading what judges publish."""
