"""The report of a round (`RoundReport`), computed from the round's data. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from msgspec.structs import asdict

from swarmd.experience.pool import PoolEntry
from swarmd.tasks.curriculum import Curriculum
from swarmd.trainer.parts import RoundParts
from swarmd.types import (
    Ages,
    AnswerFigures,
    PoolFigures,
    RoundReport,
    Scored,
    ShownRollout,
    TokenCounts,
    UpdateReport,
    transcript,
)

# Limits of a question or an answer that is shown to people.
SHOWN_CHARACTERS, SHOWN_ANSWERS = 2000, 8


@dataclass(frozen=True)
class Step:
    """One update with its input."""

    batch: Sequence[Scored]
    before: Sequence[PoolEntry]  # the pool's entries before this update
    update: UpdateReport


def merged(updates: Sequence[UpdateReport]) -> UpdateReport:
    """Merge several updates into one report: counts are summed, other figures averaged over tokens."""
    if len(updates) < 2:
        return updates[0] if updates else UpdateReport()
    figures: dict[str, Any] = {}
    for name in UpdateReport.__struct_fields__:
        # Not every update measures every figure.
        there = [(value, u.tokens) for u in updates if (value := getattr(u, name)) is not None]
        if there:
            values, weights = zip(*there, strict=True)
            mean = sum(value * tokens for value, tokens in there) / max(1, sum(weights))
            figures[name] = sum(values) if isinstance(values[0], int) else mean
    return UpdateReport(**figures)


def report_of(
    t: int,
    parts: RoundParts,
    seconds: dict[str, float],
    local: list[Scored],
    theirs: list[Scored],
    fresh: int,
    steps: Sequence[Step],
    whole: UpdateReport,
    resting: int,
    rejected: Counter[str],
) -> RoundReport:
    """Return the report of a round.

    theirs: external rollouts that were scored; fresh: how many of them were new in the pool. whole: the
    updates of the steps, merged. resting: remaining cooldown rounds of the schedule when the round began.
    """
    batch = [s for step in steps for s in step.batch]
    external = [s for s in batch if s.rollout.author != parts.me]
    before = [kept for step in steps for kept in step.before]
    staleness = [t - kept.scored.round for kept in before]
    # Step i of this round is update number `began` + i.
    idle = [
        parts.pool.began + i - kept.last_use
        for i, step in enumerate(steps, 1)
        for kept in step.before
        if kept.uses
    ]
    off_policy = [parts.pool.began + i - kept.since for i, step in enumerate(steps) for kept in step.before]
    rewards = [r for s in local for r in s.rewards]
    lengths = [len(ids) for s in local if s.tokens for ids in s.tokens.ids]
    figures, gate = asdict(whole), parts.gate
    trained = figures.pop("tokens")
    odd = gate.take_refused() if gate else {}
    return RoundReport(
        round=t,
        **figures,
        seconds=seconds,
        tokens=TokenCounts(sum(lengths), trained),
        local=len(batch) - len(external),
        external=len(external),
        external_by_specialty=dict(sorted(Counter(s.ref.specialty for s in external).items())),
        pool=PoolFigures(len(parts.pool), fresh, parts.pool.external_share),
        zero_advantage_dropped=sum(not s.informative for s in theirs),
        rejected=dict(rejected),
        reward_mean=_mean(rewards),
        reward_sum=sum(rewards),
        staleness=_ages(staleness),
        replays_mean=_mean([kept.uses for kept in before]) or 0.0,
        external_authors=tuple(s.rollout.author for s in external),
        first_used=tuple(
            (author, kept.scored.ref.specialty)
            for kept in before
            if not kept.uses and (author := kept.scored.rollout.author) != parts.me
        ),
        updates=len(steps),
        since_use_mean=_mean(idle),
        replay_resting=resting,
        generated=len(local),
        informative=sum(s.informative for s in local),
        levels=parts.tasks.staircase.levels,
        answers=_answer_figures(local, lengths, parts.tasks.curriculum, parts.limits.given),
        shown=_shown(local[0]) if local else None,
        off_policy=_ages(off_policy),
        unfit=parts.fitting.take_refused() if parts.fitting else {},
        gated=odd if gate and gate.acts else {},
        gate_reported=odd if gate and not gate.acts else {},
    )


def _answer_figures(
    local: Sequence[Scored],
    lengths: Sequence[int],
    curriculum: Curriculum,
    limits: Sequence[int],
) -> AnswerFigures:
    """Return how this node's completions ended, and whether they give an answer.

    lengths: of the completions, in tokens. limits: `AnswerLimits.given`.
    """
    in_form = [
        formed
        for s in local
        for formed in curriculum.in_form(s.ref.specialty, s.rollout.completions, s.rewards, s.observations)
    ]
    return AnswerFigures(
        len(in_form),
        cut=_mean([not completion.ended for s in local for completion in s.rollout.completions]),
        in_form=_mean(in_form),
        turns=_mean([len(c.texts) for s in local for c in s.rollout.completions])
        if curriculum.turns > 1
        else None,
        length=_mean(lengths),
        limit=_mean([limit for limit in limits if limit]),
    )


def _shown(scored: Scored) -> ShownRollout:
    replies = scored.observations or repeat(())
    texts = [transcript(c.texts, seen) for c, seen in zip(scored.rollout.completions, replies, strict=False)]
    return ShownRollout(
        scored.round,
        scored.ref.specialty,
        scored.question[:SHOWN_CHARACTERS],
        tuple(
            (text[:SHOWN_CHARACTERS], reward, answer.ended)
            for text, reward, answer in zip(texts, scored.rewards, scored.rollout.completions, strict=True)
        )[:SHOWN_ANSWERS],
    )


def _ages(values: Sequence[int]) -> Ages:
    return Ages(_mean(values) or 0.0, max(values, default=0))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
