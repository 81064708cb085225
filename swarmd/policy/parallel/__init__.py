"""Processes in addition to the trainer: generators, further trainers, their questions and weights."""
