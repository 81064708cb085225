"""Rollouts that were scored here."""

from swarmd.types import Completion, PeerId, Rollout, Scored, TaskRef

ME, OTHER = PeerId("me"), PeerId("other")


def scored(n: int, *rewards: float, author: str = OTHER, specialty: str = "bf", heard: int = 1) -> Scored:
    """Return a rollout of task `n` with a completion for each reward."""
    completions = tuple(Completion(f"{n} {i}", True) for i in range(len(rewards)))
    return Scored(Rollout(TaskRef(specialty, n), completions, PeerId(author)), "?", rewards, heard)
