"""One SAPO round. Reads as Algorithm 1 of the paper (arXiv 2509.08721, section 3.2), top to bottom."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import mul
from typing import Any

from p2p.types import PeerId
from swarmd.experience.caps import first
from swarmd.experience.credit import Useless, useful
from swarmd.experience.fitting import Fitting
from swarmd.experience.outliers import Gate, part
from swarmd.experience.pool import Kept, Pool
from swarmd.experience.replay_schedule import ReplaySchedule
from swarmd.experience.sampling import shuffled
from swarmd.experience.strategies import Sharing
from swarmd.protocols import Answers, Policy, Reward, Sampler, Swarm, TaskSource
from swarmd.types import STAGES, Generation, Rollout, RoundReport, Scored, Task, Tokens, UpdateReport

SCORED_PER_ROUND = 256  # external rollouts; the newest that the caps allow. bounds what many authors can cost us
SCORED_OF_ONE = 2  # times as many completions as we ask ourselves for are scored of an external rollout; half of them may be trained on


@dataclass
class Node:
    """Everything a round needs, already built. Built by `trainer/node.py`."""

    me: PeerId
    tasks: TaskSource
    policy: Policy
    reward: Reward
    swarm: Swarm
    sample: Sampler
    pool: Pool
    task_rng: random.Random  # two streams, so that what the swarm sends never changes what we ask ourselves
    batch_rng: random.Random
    clock: Callable[[], float]  # seconds, any epoch
    questions: int = 4  # I
    external: int = 4  # J
    completions: int = 8  # L
    resample: int = 0  # times that we ask again in place of what has no advantage
    trains: bool = True  # False: a frozen policy that answers and shares
    schedule: ReplaySchedule = field(default_factory=ReplaySchedule)  # updates a round; one, unless replay is on
    remember: Callable[[Sequence[Scored]], Sequence[Tokens]] | None = None  # log-probabilities of first use, for what replay reuses
    generators: Answers | None = None  # None: a round generates its own answers
    sharing: Sharing = field(default_factory=Sharing)  # what is shared, and how others' rollouts are weighed
    useless: Useless = field(default_factory=Useless)  # counts each author's useless rollouts
    fitting: Fitting | None = None  # asked by `sample` what our model can be trained on; None: all
    gate: Gate | None = None  # asked by `sample` what may be trained on; None: all that has an advantage


def run_round(t: int, node: Node) -> RoundReport:
    watch = _Stopwatch(node.clock)

    local = _own(t, node, watch)  # B^n; R^n(q), q in B^n

    with watch("share"):
        # Communicate(C^n(q)), q in S^n: of B^n what has an advantage. All others would drop the rest, for their rewards are the same.
        node.swarm.share([s.rollout for s in node.sharing.to_share(local, node.batch_rng)], t)
    with watch("collect"):
        received, rejected = node.swarm.collect()  # C^m(q), m != n: what is here now; never waits for more
    with watch("score"):
        theirs = _score_others(t, node, received) if node.external and node.trains else []  # rewards are ours, never the author's
    node.sharing.saw(local, theirs, t)
    node.pool.forget(t)
    earned = useful(theirs, [*node.pool, *local])
    node.swarm.vouch(earned)
    node.swarm.charge(node.useless.charge(theirs, earned))
    fresh = node.pool.add(theirs)
    node.pool.add_own(local)  # nothing, unless replay is on

    resting = node.schedule.state.resting
    best = sorted(local, key=lambda s: not s.informative)[: node.questions] if node.resample else local
    steps = [_step(node, watch, best) for _ in range(node.schedule.updates if node.trains else 0)]
    whole = _merged([step.update for step in steps])
    node.schedule.observe(whole.clip_fraction, whole.drift)
    return _report(t, node, watch, local, theirs, fresh, steps, whole, resting, Counter(rejected))


def _own(t: int, node: Node, watch: "_Stopwatch") -> list[Scored]:
    """Our own rollouts, scored. With `resample` further ones are asked in place of those without an advantage (DAPO, arXiv 2503.14476)."""
    local: list[Scored] = []
    for again in range(1 if node.generators else 1 + node.resample):
        missing = node.questions - sum(s.informative for s in local)
        if again and not missing:
            break
        tasks, answers = _answered(node, watch, missing)
        with watch("score"):
            local += _score_own(t, node, tasks, answers)
    return local


def _answered(node: Node, watch: "_Stopwatch", questions: int) -> tuple[Sequence[Task], Sequence[Generation]]:
    """Our own questions, asked and answered now; or those that generators beside the rounds have finished since."""
    if node.generators is None:
        tasks = node.tasks.draw(questions, node.task_rng)
        with watch("generate"):
            return tasks, node.policy.generate([task.question for task in tasks], node.completions)
    finished = node.generators.take()
    return [task for task, _ in finished], [answers for _, answers in finished]


@dataclass(frozen=True)
class _Step:
    """One update and what it was made of."""

    batch: Sequence[Scored]
    before: Sequence[Kept]  # what those of the pool had been through
    update: UpdateReport


def _step(node: Node, watch: "_Stopwatch", local: Sequence[Scored]) -> _Step:
    with watch("score"):
        batch = node.sample(local, node.pool.snapshot(), node.batch_rng)  # T^n: I^n local, J^n external with an advantage
    before = node.pool.use(batch)
    with watch("train"):
        if node.remember is not None:
            batch = node.pool.remember(batch, node.remember)
        # The policy gradient on T^n. The loss and `weigh` together say which of it has one (`experience.advantages`).
        update = node.policy.update(batch, node.sharing.weighing(batch, node.me)) if batch else UpdateReport()
    return _Step(batch, before, update)


def _score_own(t: int, node: Node, tasks: Sequence[Task], answers: Sequence[Generation]) -> list[Scored]:
    rewards = node.reward([(task.ref, answer.completions) for task, answer in zip(tasks, answers, strict=True)])
    return [
        Scored(Rollout(task.ref, answer.completions, node.me), task.question, r, t, answer.tokens)
        for task, answer, r in zip(tasks, answers, rewards, strict=True)
    ]


def _score_others(t: int, node: Node, rollouts: Sequence[Rollout]) -> list[Scored]:
    """Regenerate each question from its reference, and score its completions ourselves."""
    new = [r for r in rollouts if (r.author, r.ref) not in node.pool and not node.pool.too_old(_heard_in(r, t), t)]
    if len(new) > SCORED_PER_ROUND:  # under caps, or a crowd's would be all that we look at
        newest = range(len(new) - 1, -1, -1)
        chosen = first(newest, SCORED_PER_ROUND, lambda i: node.swarm.author(new[i].author), node.batch_rng)
        new = [new[i] for i in sorted(chosen)]
    tasks = [(rollout, node.tasks.task(rollout.ref)) for rollout in new]
    known = [(_scored_part(node, rollout), task) for rollout, task in tasks if task is not None and node.tasks.trains_on(task)]
    rewards = node.reward([(rollout.ref, rollout.completions) for rollout, _ in known])
    scored = [Scored(rollout, task.question, r, _heard_in(rollout, t)) for (rollout, task), r in zip(known, rewards, strict=True)]
    return [node.sharing.judged(_trained_part(node, s)) for s in scored]


def _scored_part(node: Node, rollout: Rollout) -> Rollout:
    """Where it has more completions than ours: some, drawn at random, so that scoring it does not cost more than it is worth."""
    if len(rollout.completions) <= node.completions:
        return rollout
    return replace(rollout, completions=shuffled(rollout.completions, node.me)[: SCORED_OF_ONE * node.completions])


def _trained_part(node: Node, scored: Scored) -> Scored:
    """As many completions as ours have, so that nobody has more of a batch than of its rollouts. Advantages are of all that was scored."""
    if len(scored.rewards) <= node.completions:
        return scored
    return replace(part(scored, range(node.completions)), whole=scored.rewards)


def _heard_in(rollout: Rollout, t: int) -> int:
    """Our round in which it was heard; this one where that is unknown, or still to come (it was counted before a restart)."""
    return min(rollout.heard or t, t)


class _Stopwatch:
    """Seconds per stage, added up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self.clock()
        yield
        self.seconds[stage] += self.clock() - start


def _merged(updates: Sequence[UpdateReport]) -> UpdateReport:
    """Several updates as one report: counts are summed, other figures averaged over tokens."""
    if len(updates) < 2:
        return updates[0] if updates else UpdateReport()
    figures: dict[str, Any] = {}
    for name in (f.name for f in fields(UpdateReport)):
        there = [(value, u.tokens) for u in updates if (value := getattr(u, name)) is not None]  # not every update measures all
        if not there:
            continue
        values, weights = zip(*there, strict=True)
        if isinstance(values[0], int):
            figures[name] = sum(values)
        else:
            figures[name] = sum(map(mul, values, weights)) / max(1, sum(weights))
    return UpdateReport(**figures)


def _report(
    t: int, node: Node, watch: _Stopwatch, local: list[Scored], theirs: list[Scored], fresh: int,
    steps: Sequence[_Step], whole: UpdateReport, resting: int, rejected: Counter[str],
) -> RoundReport:  # fmt: skip
    batch = [s for step in steps for s in step.batch]
    external = [s for s in batch if s.rollout.author != node.me]
    before = [kept for step in steps for kept in step.before]
    staleness = [t - kept.scored.round for kept in before]
    # Step i of this round is update `began` + i.
    idle = [node.pool.began + i - kept.last_use for i, step in enumerate(steps, 1) for kept in step.before if kept.uses]
    off_policy = [node.pool.began + i - kept.since for i, step in enumerate(steps) for kept in step.before]
    rewards = [r for s in local for r in s.rewards]
    return RoundReport(
        round=t,
        seconds=watch.seconds,
        tokens_generated=sum(len(ids) for s in local if s.tokens for ids in s.tokens.ids),
        update=whole,
        local=len(batch) - len(external),
        external=len(external),
        external_by_specialty=dict(sorted(Counter(s.ref.specialty for s in external).items())),
        pool_size=len(node.pool),
        pool_fresh=fresh,
        zero_advantage_dropped=sum(not s.informative for s in theirs),
        rejected=dict(rejected),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        reward_sum=sum(rewards),
        staleness_mean=_mean(staleness) or 0.0,
        staleness_max=max(staleness, default=0),
        replays_mean=_mean([kept.uses for kept in before]) or 0.0,
        external_authors=tuple(s.rollout.author for s in external),
        first_used=tuple(author for kept in before if not kept.uses and (author := kept.scored.rollout.author) != node.me),
        updates=len(steps),
        since_use_mean=_mean(idle),
        resting=resting,
        generated=len(local),
        informative=sum(s.informative for s in local),
        off_policy_mean=_mean(off_policy) or 0.0,
        off_policy_max=max(off_policy, default=0),
        unfit=node.fitting.take_refused() if node.fitting else {},
        **_refused(node.gate),
    )


def _refused(gate: Gate | None) -> dict[str, Mapping[str, int]]:
    return {} if gate is None else {"gated" if gate.acts else "gate_reported": gate.take_refused()}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
