"""One SAPO round, in the order of Algorithm 1 of the paper (arXiv 2509.08721, section 3.2).

It differs from the paper in four points:

1. Rewards are never sent. External questions are regenerated from their numbers, and the answers scored here.
2. A pool keeps external rollouts for `round.max_age` rounds, so a round never waits for a slow peer.
3. A batch draws each external rollout once, under caps by author and network group, and through filters.
4. By default, wrong external answers are not pushed down (`sharing.weigh`; "paper" does push them down, as
   the paper does).

The round knows protocols only (`RoundParts`): no torch, files or sockets, and no clock except `parts.clock`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from swarmd.experience.caps import choose
from swarmd.experience.outliers import part
from swarmd.experience.pool import heard_in, too_old
from swarmd.experience.sampling import shuffled
from swarmd.experience.usefulness import useful
from swarmd.tasks.curriculum import Curriculum
from swarmd.trainer.parts import ReceivingParts, RoundParts
from swarmd.trainer.report import Step, merged, report_of
from swarmd.types import STAGES, Generation, Rollout, RoundReport, Scored, Task

# Maximum number of external rollouts scored per round, the newest that the caps allow; more only if a batch
# takes more. This limit bounds the cost that many authors can cause.
SCORED_PER_ROUND = 256
# Of one external rollout, at most this multiple of `parts.completions` is scored; at most `parts.completions`
# are trained on.
SCORED_OF_ONE = 2


def run_round(t: int, parts: RoundParts) -> RoundReport:
    watch = _Stopwatch(parts.clock, parts.enter)

    local = _own(t, parts, watch)  # B^n; R^n(q), q in B^n

    with watch("share"):
        # Communicate(C^n(q)), q in S^n: the rollouts of B^n with an advantage. Receivers would drop the other
        # rollouts, because all rewards in such a rollout are the same.
        parts.swarm.share([s.rollout for s in parts.sharing.to_share(local)], t)
    with watch("collect"):
        received, rejected = parts.swarm.collect()  # C^m(q), m != n: the rollouts received so far
    with watch("score"):
        # Rewards are computed here, never taken from the author.
        heard = score_others(t, parts, received) if parts.external and parts.trains else []
    theirs, fresh = take_in(t, parts, local, heard)
    # Adds nothing, unless replay is on.
    parts.pool.add_own(local)

    resting = parts.schedule.state.resting
    best = sorted(local, key=lambda s: not s.informative)[: parts.questions] if parts.resample else local
    if parts.gate is not None:
        parts.gate.learn(best)
        parts.sharing.pass_rates = dict(parts.gate.pass_rates)
    steps = [_step(parts, watch, best) for _ in range(parts.schedule.updates if parts.trains else 0)]
    whole = merged([step.update for step in steps])
    parts.schedule.observe(whole.clip_fraction, whole.drift)
    return report_of(t, parts, watch.seconds, local, theirs, fresh, steps, whole, resting, Counter(rejected))


def _own(t: int, parts: RoundParts, watch: "_Stopwatch") -> list[Scored]:
    """Return this node's rollouts, scored.

    With `resample`, further questions replace those without an advantage (DAPO, arXiv 2503.14476).
    """
    local: list[Scored] = []
    for again in range(1 + parts.resample):
        missing = parts.questions - sum(s.informative for s in local)
        if again and not missing:
            break
        tasks, answers = _answered(parts, watch, missing)
        with watch("score"):
            items = [(task.ref, a.completions) for task, a in zip(tasks, answers, strict=True)]
            new = [
                Scored(
                    Rollout(task.ref, a.completions, parts.me),
                    task.question,
                    r,
                    t,
                    a.tokens,
                    observations=seen,
                )
                for task, a, r, seen in zip(
                    tasks, answers, parts.reward(items), parts.tasks.play(items), strict=True
                )
            ]
        parts.tasks.staircase.saw(new)
        parts.limits.saw(new, parts.tasks.curriculum)
        local += new
    return local


def _answered(
    parts: RoundParts, watch: "_Stopwatch", questions: int
) -> tuple[Sequence[Task], Sequence[Generation]]:
    """Return this node's questions with answers: generated now, or by generators since the last round."""
    if parts.generators is None:
        tasks = parts.tasks.draw(questions, parts.task_rng)
        with watch("generate"):
            return tasks, parts.policy.generate(
                [task.question for task in tasks],
                parts.completions,
                parts.limits.of(tasks),
                observe=parts.tasks.observer([task.ref for task in tasks]),
            )
    finished = parts.generators.collect()
    return [task for task, _ in finished], [answers for _, answers in finished]


def _step(parts: RoundParts, watch: "_Stopwatch", local: Sequence[Scored]) -> Step:
    with watch("score"):
        batch = parts.build_batch(local, parts.batch_rng)  # T^n: I^n local, J^n external with an advantage
    before = parts.pool.use(batch)
    with watch("train"):
        if parts.remember is not None:
            batch = parts.pool.remember(batch, parts.remember)
        # The policy gradient on T^n. The loss and `weigh` together decide which completions have one
        # (`experience.advantages`).
        update = parts.policy.update(batch, parts.sharing.weighing(parts.me))
    return Step(batch, before, update)


def score_others(t: int, parts: ReceivingParts, rollouts: Sequence[Rollout]) -> list[Scored]:
    """Regenerate each question from its reference, and score its completions with this node's verifier.

    Text after an answer is removed first, so no node, program or experiment can train on it.
    """
    new = [
        r
        for r in rollouts
        if (r.author, r.ref) not in parts.pool and not too_old(r.heard, t, parts.pool.max_age)
    ]
    most = max(SCORED_PER_ROUND, parts.external)
    if len(new) > most:
        # Capped, because otherwise a crowd of authors could fill the whole budget.
        chosen = choose(range(len(new)), lambda i: -i, most, lambda i: new[i].origin)
        new = [new[i] for i in sorted(chosen)]
    known = [
        (_scored_part(parts, cut_behind_answers(rollout, parts.tasks.curriculum)), task)
        for rollout in new
        if (task := parts.tasks.task(rollout.ref)) is not None and parts.tasks.trains_on(task)
    ]
    items = [(rollout.ref, rollout.completions) for rollout, _ in known]
    return [
        _trained_part(parts, Scored(rollout, task.question, r, heard_in(rollout.heard, t), observations=seen))
        for (rollout, task), r, seen in zip(known, parts.reward(items), parts.tasks.play(items), strict=True)
    ]


def cut_behind_answers(rollout: Rollout, curriculum: Curriculum) -> Rollout:
    """Remove the text after each answer, because the reward does not judge it.

    A removed text means that the model did not stop there, so such a completion is marked as not ended.
    """
    ends = [curriculum.answer_end(completion.text) for completion in rollout.completions]
    cut = tuple(
        replace(c, text=c.text[:end], ended=c.ended and end in (None, len(c.text)))
        for c, end in zip(rollout.completions, ends, strict=True)
    )
    return replace(rollout, completions=cut)


def take_in(
    t: int, parts: ReceivingParts, local: Sequence[Scored], heard: Sequence[Scored]
) -> tuple[list[Scored], int]:
    """Put external scored rollouts into the pool, and charge authors of useless ones.

    Returns them in the groups that give their advantages, and how many were new.
    """
    theirs = [parts.sharing.judged(s) for s in heard]
    parts.sharing.success.saw(local)
    parts.pool.forget(t)
    # Peers' copies of local text arrive without the text after the answer, so it is removed here too.
    known = [
        replace(s, rollout=cut_behind_answers(s.rollout, parts.tasks.curriculum))
        if s.author == parts.me
        else s
        for s in [*parts.pool, *local]
    ]
    parts.swarm.charge(parts.useless.charge(theirs, useful(theirs, known)))
    return theirs, parts.pool.add(theirs)


def _scored_part(parts: ReceivingParts, rollout: Rollout) -> Rollout:
    """Choose at most SCORED_OF_ONE times `parts.completions` of the completions; the rest is not scored."""
    most = SCORED_OF_ONE * parts.completions
    return (
        replace(rollout, completions=shuffled(rollout.completions, parts.me)[:most])
        if len(rollout.completions) > parts.completions
        else rollout
    )


def _trained_part(parts: ReceivingParts, scored: Scored) -> Scored:
    """Keep at most `parts.completions` completions, so that a longer rollout gets no more of a batch.

    Advantages are still taken over all scored completions.
    """
    return part(scored, range(parts.completions)) if len(scored.rewards) > parts.completions else scored


class _Stopwatch:
    """Adds up seconds per stage, and reports which one begins."""

    def __init__(self, clock: Callable[[], float], enter: Callable[[str], object]) -> None:
        self.clock, self.enter = clock, enter
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self.clock()
        self.enter(stage)
        yield
        self.enter("")
        self.seconds[stage] += self.clock() - start
