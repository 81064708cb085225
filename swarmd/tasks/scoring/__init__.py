"""Decide which answers to ReasoningGYM's tasks are right."""
