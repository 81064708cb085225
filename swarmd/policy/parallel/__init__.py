"""Processes beside the trainer: generators, further trainers, their questions and weights."""
