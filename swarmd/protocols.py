"""Protocols of the plug-in points: reward, policy, sampler, swarm, view."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from p2p.types import PeerId
from swarmd.state.status import Status
from swarmd.types import (
    Completion,
    Generation,
    Observe,
    Rollout,
    RoundLine,
    Scored,
    Task,
    TaskRef,
    Tokens,
    UpdateReport,
    Weigh,
)


class Reward(Protocol):
    def __call__(self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
        """Return one tuple of rewards, from 0 to 1, per item, in order.

        Never raises because of a completion's content.
        """


class Policy(Protocol):
    def generate(
        self,
        questions: Sequence[str],
        completions: int,
        limits: Sequence[int] = (),
        *,
        observe: Observe | None = None,
    ) -> Sequence[Generation]:
        """Sample `completions` answers to each question, in order.

        limits: the maximum number of tokens of an answer to each question, if it is lower than the configured
            limit; 0, or no limits, leaves the configured one.
        observe: replies to the texts of tasks with several turns; None: an answer has one text.
        """

    def answer(self, question: str, observe: Observe | None = None) -> Completion:
        """Return one greedy answer, which the judge scores."""

    def update(self, batch: Sequence[Scored], weigh: Weigh) -> UpdateReport:
        """Take one policy-gradient step on the batch.

        If nothing in the batch has a gradient, nothing changes and the report says 0 tokens.

        weigh: turns the advantages by the policy's loss into the advantages to train on, for a rollout's
        completions.
        """


@runtime_checkable
class LogprobPolicy(Protocol):
    """Optional in a policy: log-probabilities, so that external rollouts can be replayed like local ones."""

    def logprobs(self, batch: Sequence[Scored]) -> Sequence[Tokens]:
        """Return each rollout's completions as this policy's tokens, with its current log-probabilities.

        Trains nothing. Completions are truncated as in `update`, which treats the log-probabilities in
        `Scored.tokens` as the policy's log-probabilities of first use.
        """

    @property
    def parameters(self) -> int:
        """Return the number of parameters; above a limit the gate only reports (`experience.outliers`)."""


@runtime_checkable
class SelectivePolicy(Protocol):
    """Optional in a policy: names external rollouts that it cannot be trained on."""

    def unfit(self, scored: Scored) -> str | None:
        """Return why the policy cannot be trained on this rollout, for operators, or None if it can."""


class Answers(Protocol):
    """Generation in separate processes, concurrent with the rounds (`[workers]`)."""

    def collect(self) -> Sequence[tuple[Task, Generation]]:
        """Return newly finished rollouts, as many as a round takes, each once; never wait."""


class Sampler(Protocol):
    def __call__(
        self, local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random
    ) -> Sequence[Scored]:
        """Choose the batch from this round's local rollouts and the external ones in the pool."""


class Swarm(Protocol):
    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        """Publish local rollouts. Never waits."""

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        """Return rollouts received since the last call, and rejected ones counted by reason; never wait."""

    def charge(self, authors: Iterable[PeerId]) -> None:
        """Admit less from these authors, because their rollouts were useless for a long time."""


class View(Protocol):
    def status(self, status: Status) -> None:
        """Show the status; called when it may have changed, at most a few times a second."""

    def round(self, line: RoundLine) -> None:
        """Show a finished round."""

    def talk(self, text: str) -> None:
        """Show an event to the operator."""

    def close(self) -> None: ...
