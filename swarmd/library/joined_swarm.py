"""Joins a swarm from another program: `import swarmd`. Loads no torch.

    with swarmd.join("swarm:main,curriculum=tiny-9,at=…") as swarm:
        for task in swarm.tasks.draw(4):
            swarm.share(task, my_model(task.question))
        for group in swarm.collect(4):
            my_update(group.question, group.completions, group.advantages)

Two threads work beside the program. The network's (`network.py`) is the member of the swarm. The scorer's
does with others' rollouts what a trainer does (`trainer.round`): it regenerates their questions, and a
contained process scores them. Neither `share` nor `collect` waits for them, and what fails there is told by
`report`, not raised: the program's own work goes on.
"""

import atexit
import logging
import os
import random
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import trio
from msgspec import to_builtins

from swarmd.config.config import NodeConfig
from swarmd.config.invitation import read_invitation
from swarmd.config.sources import resolve
from swarmd.errors import SwarmdError
from swarmd.exchange import wire
from swarmd.exchange.swarm_id import curriculum_of, require_same_swarm
from swarmd.experience.advantages import advantages, within_group
from swarmd.experience.batch import BatchBuilder, Fitting, SharingSampler
from swarmd.experience.pool import Pool
from swarmd.experience.strategies import SHARES, Sharing
from swarmd.library.network import MAX_HELD, Network
from swarmd.state.folder import StateFolder, default_state_dir
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import DrawnTasks
from swarmd.tasks.grading import solution
from swarmd.tasks.own_tasks import OwnTasks
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks, open_tasks
from swarmd.trainer.parts import ReceivingParts
from swarmd.trainer.round import score_others, take_in
from swarmd.types import Completion, Rollout, Scored, Task, TaskRef

# How long `close` waits for answers that are still being scored.
CLOSE_S = 10.0

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer and what our own verifier says of it."""

    completion: Completion
    score: ScoredAnswer


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Another node's answers to one question, with the rewards that our own verifier gave them."""

    ref: TaskRef
    question: str
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]  # from 0 to 1, one per completion
    advantages: tuple[float, ...]  # of GRPO, weighed by `[sharing] weigh`
    author: str  # peer id


class _Given(NamedTuple):
    """What the program shared, not yet scored."""

    task: Task
    completions: tuple[Completion, ...]


class Questions:
    """The training questions of a swarm's curriculum."""

    def __init__(self, source: DrawnTasks, rng: random.Random) -> None:
        self.source, self._rng = source, rng

    def draw(self, count: int = 1, *, all_levels: bool = False) -> Sequence[Task]:
        """Draw tasks, subject uniform with replacement (SAPO section 5).

        Each is of the level that the answers which were shared so far lead to, or with `all_levels` of any.
        """
        return self.source.draw(count, self._rng, all_levels=all_levels)

    def task(self, ref: TaskRef) -> Task | None:
        """Return the task of a reference, the same on every node; None where there is none."""
        return self.source.task(ref)

    def truth(self, task: Task) -> str | None:
        """Return a right answer; None for own tasks that do not tell one."""
        if isinstance(self.source, CurriculumTasks):
            return solution(self.source, task)
        return self.source.solution(task.ref) if isinstance(self.source, OwnTasks) else None


def join(
    invitation: str | None = None,
    *,
    name: str | None = None,
    curriculum: str | None = None,
    bootstrap: Sequence[str] = (),
    listen: Sequence[str] = (),
    external: int | None = None,
    completions: int | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    config: str | Path | None = None,
    author: str = "a program",
) -> "JoinedSwarm":
    """Join a swarm, and return once others can reach us: a second or two.

    Under torchrun only rank 0 joins; the other ranks draw and score, and get what rank 0 collects.

    Args:
        invitation: what `swarmd invite` prints; the rest overrides it.
        name: of the swarm.
        curriculum: what it asks, as in `swarmd join --curriculum`.
        bootstrap: addresses of peers to connect to first.
        listen: addresses to listen on; by default everywhere, at a port that follows from the key.
        external: others' rollouts that you can use between two calls of `collect`, at most.
        completions: answers to one question that you can use, at most.
        seed: of the questions that are drawn.
        folder: keeps the key and the known peers. One program or node at a time; the default is next to the
            node's.
        config: a configuration file, as `swarmd join --config`; SWARMD_* variables count, too.
        author: what others are told in place of a model's name.

    Raises:
        swarmd.errors.SwarmdError: the settings cannot be used, or the swarm cannot be joined; says why, and
            what to do.
    """
    rank = int(os.environ.get("RANK") or 0) if int(os.environ.get("WORLD_SIZE") or 1) > 1 else 0
    accepted = read_invitation(invitation) if invitation else None
    flags: dict[str, object] = {"swarm": name, "curriculum": curriculum, "bootstrap": tuple(bootstrap)}
    flags |= {"listen": tuple(listen), "external": external, "seed": seed}
    wanted = {} if completions is None else {"SWARMD_ROUND_COMPLETIONS": str(completions)}
    settings = resolve(
        None if config is None else Path(config),
        os.environ | wanted,
        flags,
        accepted.settings() if accepted else {},
    ).config
    if accepted:
        require_same_swarm(accepted, curriculum_of(settings))
    if rank:
        return JoinedSwarm(settings, None, author)
    place = Path(folder) if folder is not None else default_state_dir().with_name("library")
    return JoinedSwarm(settings, StateFolder.open(place), author).open()


class JoinedSwarm:
    """A swarm that this program has joined, by `swarmd.join`, until the end of a `with` or of the program.

    Thread-safe. In a forked child it draws and scores, but shares and collects nothing: the parent does.
    """

    def __init__(
        self,
        config: NodeConfig,
        state: StateFolder | None,
        author: str,
        *,
        share: str | None = None,
        talk: Callable[[str], None] = log.info,
        stopped: Callable[[], None] | None = None,
    ) -> None:
        """Build the member, without running it.

        state: closed with the swarm; None for a rank that does not join. share: of SHARES, in place of the
        configured one. talk: gets events. stopped: called by a thread when `swarmd stop` asks for it, or an
        error has ended the network's; by default the swarm is left.

        Raises ConfigError where the configuration cannot be used.
        """
        self._state, self._talk, self._share = state, talk, SHARES[share or config.sharing.share]
        self.curriculum = curriculum = curriculum_of(config)
        self._verifier = Verifier(curriculum)
        rng = random.Random(secrets.randbits(64) if config.seed is None else config.seed)
        self.tasks = Questions(open_tasks(curriculum, self._verifier, config.tasks.specialties), rng)
        self._changed, self._pid, self._forked = threading.Condition(), os.getpid(), 0
        self._closed, self._round, self._collected = False, 1, 0
        self._given: deque[_Given] = deque(maxlen=MAX_HELD)
        self._scorer = threading.Thread(target=self._score_all, name="swarmd-scorer", daemon=True)
        self._network: Network | None = None
        if state is None:
            return
        try:
            self._network = Network(config, state, author, self._changed, talk, stopped or self._close_soon)
        except BaseException:
            state.close()
            raise
        sharing = Sharing(config.sharing)
        self._parts = ReceivingParts(
            me=self._network.peer_id,
            tasks=self.tasks.source,
            reward=self._verifier,
            swarm=self._network,
            pool=Pool(config.round.max_age),
            batch_rng=random.Random(secrets.randbits(64)),
            external=config.round.external,
            completions=config.round.completions,
            sharing=sharing,
        )
        self._sampler = SharingSampler(sharing, 0, 0, len(curriculum.specialties) > 1)

    def open(self) -> Self:
        """Start both threads, and return once others can reach us. Raises OperatorError where they cannot."""
        assert self._network is not None
        try:
            self._verifier.__enter__()
            self._scorer.start()
            self._network.start()
            atexit.register(self.close)
            self._network.ready.wait()
        except BaseException:  # a signal
            self.close()
            raise
        if self._network.error is not None:
            self.close()
            raise self._network.error
        return self

    # What the program uses.

    @property
    def network(self) -> Network | None:
        """The member of the swarm; None where this process is none: another rank, a forked child, closed."""
        network = self._network
        # No thread lives in a forked child.
        return network if network is not None and network.lives and not self._closed else None

    @property
    def joined(self) -> bool:
        """Whether this process is a member of the swarm now."""
        return self.network is not None

    def share(self, task: Task, completions: Sequence[str | Completion]) -> None:
        """Share the answers to one question, signed, as soon as the pace allows it. Never waits.

        They are scored here first: by default a group whose rewards are all the same is not sent, for nobody
        learns from it. Text counts as ended by the model; say otherwise with `Completion(text, ended=False)`.
        """
        answers = _completions(completions)[: wire.MAX_COMPLETIONS]
        if answers and self.joined:
            with self._changed:
                self._given.append(_Given(task, answers))
                self._changed.notify_all()

    def share_judged(self, task: Task, answers: Sequence[Judged]) -> bool:
        """Share answers that `judge` has scored. False where nobody could learn from them."""
        given = _Given(task, tuple(answer.completion for answer in answers))
        scored = self._scored(given, tuple(answer.score.reward for answer in answers))
        self.tasks.source.staircase.saw([scored])
        return self._offer(scored)

    def collect(
        self, count: int, wait: float = 0.0, unfit: Callable[[ScoredGroup], str | None] = lambda _: None
    ) -> Sequence[ScoredGroup]:
        """Return others' rollouts to train on, each once: at most `count`, by `[sharing] take` and its caps.

        A call is a step of yours: what the next can use is fetched from then on, and what was not taken for
        `round.max_age` steps is forgotten. Under torchrun all ranks call it, and get the same.

        Args:
            count: groups wanted.
            wait: seconds to wait for a first one; by default none.
            unfit: says why your model cannot be trained on one, or None; another is taken in its place.
        """
        network = self.network
        return _from_first_rank(self._collect(network, count, wait, unfit) if network else [])

    async def collect_soon(self, count: int, wait: float = 5.0) -> Sequence[ScoredGroup]:
        """Do what `collect` does, in asyncio or trio, without holding up other tasks."""
        return await _in_thread(partial(self.collect, count, wait))

    def score(
        self, items: Sequence[tuple[TaskRef, Sequence[str | Completion]]]
    ) -> Sequence[tuple[float, ...]]:
        """Return one tuple of rewards per item, by our own verifier: a contained process. Waits for it."""
        return self._own_verifier().score([(ref, _completions(texts)) for ref, texts in items])

    def judge(self, task: Task, text: str) -> Judged:
        """Score one answer, and say why. Tags, <answer>, are put around it where they are due and missing."""
        completion = _completion(self.curriculum.tagged(task.ref.specialty, text))
        ((score,),) = self._own_verifier().judge([(task.ref, [completion])])
        return Judged(completion, score)

    def report(self) -> Mapping[str, Any]:
        """Return what `swarmd status --json` shows: peers, counts, and what is wrong. `collected`: groups."""
        if self._network is None:
            return {"schema": 1, "role": "library", "state": "another rank has joined"}
        status: dict[str, Any] = to_builtins(self._network.status())
        return status | {"collected": self._collected, "curriculum": self.curriculum.name}

    def close(self) -> None:
        """Send what waits, and leave the swarm. A second call does nothing."""
        if os.getpid() != self._pid:
            return  # of a forked child: the threads, the verifier and the connections are the parent's
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
        if first and self._network is not None:
            atexit.unregister(self.close)
            if self._scorer.is_alive():
                self._scorer.join(CLOSE_S)
            self._network.leave()
            if self._state is not None:
                self._state.close()
        self._verifier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _in_thread(self.close)

    def __reduce__(self) -> Any:
        raise SwarmdError(
            "a swarm cannot be sent to another process. Join in one, and send what it collects."
        )

    def _own_verifier(self) -> Verifier:
        """Return the verifier; in a forked child one of its own, as the parent reads the other's pipe."""
        if os.getpid() not in (self._pid, self._forked):
            self._verifier, self._forked = Verifier(self.curriculum), os.getpid()
        return self._verifier

    def _close_soon(self) -> None:
        """Leave the swarm, from its own thread."""
        threading.Thread(target=self.close, name="swarmd-close").start()

    def _collect(
        self,
        network: Network,
        count: int,
        wait: float,
        unfit: Callable[[ScoredGroup], str | None],
    ) -> Sequence[ScoredGroup]:
        parts, pool = self._parts, self._parts.pool
        fitting = Fitting(lambda scored: unfit(_group(scored, scored.rewards)))
        with self._changed:
            if wait > 0 and count > 0:
                # What was collected stays in the pool until it is too old.
                self._changed.wait_for(
                    lambda: self._closed or any(s.informative for s in pool.snapshot()), wait
                )
            batch = BatchBuilder(replace(self._sampler, n_external=count), pool, parts.me, (fitting,))(
                (), parts.batch_rng
            )
            pool.use(batch)
            weigh, lead = parts.sharing.weighing(parts.me), parts.sharing.lead
            self._round, self._collected = self._round + 1, self._collected + len(batch)
            pool.forget(self._round)
        network.next_round(self._round, [(scored.author, scored.ref.specialty) for scored in batch], lead)
        return [_group(scored, advantages(scored, within_group, weigh)) for scored in batch]

    # The scorer's thread.

    def _score_all(self) -> None:
        assert self._network is not None
        network = self._network
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._given or network.arrived)
                given = [self._given.popleft() for _ in range(len(self._given))]
                if self._closed and not given:
                    return
            try:
                self._score(given)
            except Exception as error:
                log.exception("answers could not be scored")
                self._talk(f"answers could not be scored: {error}")

    def _score(self, given: Sequence[_Given]) -> None:
        """Score what the program shared and what came of others, and put each where it belongs."""
        rewards = self._verifier.score([(g.task.ref, g.completions) for g in given]) if given else []
        local = [self._scored(g, r) for g, r in zip(given, rewards, strict=True)]
        self.tasks.source.staircase.saw(local)
        for scored in local:
            self._offer(scored)
        received, _ = self._parts.swarm.collect()
        theirs = score_others(self._round, self._parts, received)
        with self._changed:
            take_in(self._round, self._parts, local, theirs)
            self._changed.notify_all()

    def _scored(self, given: _Given, rewards: tuple[float, ...]) -> Scored:
        return Scored(
            Rollout(given.task.ref, given.completions, self._parts.me),
            given.task.question,
            rewards,
            self._round,
        )

    def _offer(self, scored: Scored) -> bool:
        chosen = self._network is not None and self._share(scored)
        if chosen and self._network is not None:
            self._network.share([scored.rollout], scored.round)
        return chosen


def _group(scored: Scored, found: Sequence[float]) -> ScoredGroup:
    return ScoredGroup(
        scored.ref,
        scored.question,
        scored.rollout.completions,
        scored.rewards,
        tuple(found),
        scored.author,
    )


def _completions(answers: Sequence[str | Completion]) -> tuple[Completion, ...]:
    if isinstance(answers, str):
        # It is a sequence too, and each letter would be an answer.
        raise TypeError("the answers to a question are a list, also where there is one: [text]")
    return tuple(map(_completion, answers))


def _completion(text: str | Completion) -> Completion:
    """Return a completion whose text has no lone surrogates: they cannot be sent."""
    given = text if isinstance(text, Completion) else Completion(text, ended=True)
    return replace(given, text=given.text.encode(errors="replace").decode())


def _from_first_rank(found: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    """Return what rank 0 has, in every rank of a torch.distributed run."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return found
    everybody: list[Sequence[ScoredGroup]] = [found]
    distributed.broadcast_object_list(everybody, src=0)
    return everybody[0]


async def _in_thread(what: Callable[[], T]) -> T:
    """Run it in a thread of whichever of asyncio and trio runs here."""
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        import asyncio

        return await asyncio.to_thread(what)
    return await trio.to_thread.run_sync(what)
