"""One SAPO round. Reads as Algorithm 1 of the paper (arXiv 2509.08721, section 4), top to bottom."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from p2p.types import PeerId
from swarmd.experience.pool import Pool
from swarmd.seams import Policy, Reward, Sampler, Swarm, TaskSource
from swarmd.types import Generation, Rollout, RoundReport, Scored, Task, UpdateReport

SCORED_PER_ROUND = 256  # external rollouts; the newest. Bounds what a crowd of authors can cost us


@dataclass
class Node:
    """Everything a round needs, already built. `node.py` is the only place that builds one."""

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


def run_round(t: int, node: Node) -> RoundReport:
    watch = _Stopwatch(node.clock)

    tasks = node.tasks.draw(node.questions, node.task_rng)  # B^n
    with watch("generate"):
        answers = node.policy.generate([task.question for task in tasks], node.completions)  # R^n(q), q in B^n
    with watch("score"):
        local = _score_own(t, node, tasks, answers)

    with watch("share"):
        node.swarm.share([s.rollout for s in local], t)  # Communicate(C^n(q)), q in S^n = B^n
    with watch("collect"):
        received, rejected = node.swarm.collect()  # C^m(q), m != n: what is here now; never waits for more
    with watch("score"):
        theirs = _score_others(t, node, received) if node.external else []  # rewards are ours, never the author's
    node.pool.forget(t)
    fresh = node.pool.add(theirs)

    batch = node.sample(local, node.pool.snapshot(), node.batch_rng)  # T^n: I^n local, J^n external with an advantage
    replays = node.pool.use(batch)
    with watch("train"):
        update = node.policy.update(batch) if any(s.informative for s in batch) else UpdateReport()  # policy gradient on T^n
    return _report(t, node, watch, local, theirs, fresh, batch, replays, update, Counter(rejected))


def _score_own(t: int, node: Node, tasks: Sequence[Task], answers: Sequence[Generation]) -> list[Scored]:
    rewards = node.reward([(task.ref, answer.completions) for task, answer in zip(tasks, answers, strict=True)])
    return [
        Scored(Rollout(task.ref, answer.completions, node.me), task.question, r, t, answer.tokens)
        for task, answer, r in zip(tasks, answers, rewards, strict=True)
    ]


def _score_others(t: int, node: Node, rollouts: Sequence[Rollout]) -> list[Scored]:
    """Regenerate each question from its reference, and score its completions ourselves."""
    new = [r for r in rollouts if (r.author, r.ref) not in node.pool][-SCORED_PER_ROUND:]
    known = [(rollout, task) for rollout in new if (task := node.tasks.task(rollout.ref)) is not None]
    rewards = node.reward([(rollout.ref, rollout.completions) for rollout, _ in known])
    return [Scored(rollout, task.question, r, t) for (rollout, task), r in zip(known, rewards, strict=True)]


class _Stopwatch:
    """Seconds per stage, added up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = dict.fromkeys(("generate", "score", "share", "collect", "train"), 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self.clock()
        yield
        self.seconds[stage] += self.clock() - start


def _report(
    t: int, node: Node, watch: _Stopwatch, local: list[Scored], theirs: list[Scored], fresh: int,
    batch: Sequence[Scored], replays: Sequence[int], update: UpdateReport, rejected: Counter[str],
) -> RoundReport:  # fmt: skip
    external = [s for s in batch if s.rollout.author != node.me]
    staleness = [t - s.round for s in external]
    rewards = [r for s in local for r in s.rewards]
    return RoundReport(
        round=t,
        seconds=watch.seconds,
        tokens_generated=sum(len(ids) for s in local if s.tokens for ids in s.tokens.ids),
        update=update,
        local=len(batch) - len(external),
        external=len(external),
        pool_size=len(node.pool),
        pool_fresh=fresh,
        zero_advantage_dropped=sum(not s.informative for s in theirs),
        rejected=dict(rejected),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        reward_sum=sum(rewards),
        staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        replays_mean=sum(replays) / len(replays) if replays else 0.0,
        external_authors=tuple(s.rollout.author for s in external),
    )
