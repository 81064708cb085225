"""Processes beside the trainer: generators, further trainers, their questions, weights and restarts."""
