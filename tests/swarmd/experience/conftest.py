"""Scored rollouts for the tests."""

from swarmd.types import Completion, PeerId, Rollout, Scored, TaskRef

ME, OTHER = PeerId("me"), PeerId("other")


def scored(n: int, *rewards: float, author: str = OTHER, specialty: str = "bf", heard: int = 1) -> Scored:
    """Return a scored rollout of task `n` with one completion for each reward."""
    completions = tuple(Completion(f"{n} {i}", True) for i in range(len(rewards)))
    return Scored(Rollout(TaskRef(specialty, n), completions, PeerId(author)), "?", rewards, heard)
