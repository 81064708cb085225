"""Joins a swarm from another program: `import swarmd`. Loads no torch.

    with swarmd.join("swarm:main,curriculum=tiny-9,at=…") as swarm:
        for task in swarm.tasks.draw(4):
            swarm.share(task, my_model(task.question))
        for group in swarm.collect(4):
            my_update(group.question, group.completions, group.advantages)

Two background threads run. The network thread (`network.py`) is the member of the swarm. The scorer thread
treats other nodes' rollouts as a trainer does (`trainer.round`): it regenerates their questions, and a
contained process scores them. Neither `share` nor `collect` waits for these threads. Their failures are not
raised, so that the program goes on; `report` shows them.
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
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

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
from swarmd.tasks.own_tasks import OwnTasks
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks, open_tasks
from swarmd.trainer.parts import ReceivingParts
from swarmd.trainer.round import score_others, take_in
from swarmd.types import Completion, Rollout, Scored, Task, TaskRef

# Maximum seconds that `close` waits for answers that are still being scored.
CLOSE_S = 10.0

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer and our own verifier's score of it."""

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


class Questions:
    """The training questions of a swarm's curriculum."""

    def __init__(self, source: DrawnTasks, rng: random.Random) -> None:
        self.source, self._rng = source, rng

    def draw(self, count: int = 1, *, all_levels: bool = False) -> Sequence[Task]:
        """Draw tasks, subject uniform with replacement (SAPO section 5).

        The level follows from the answers shared so far; with `all_levels` it is any level.
        """
        return self.source.draw(count, self._rng, all_levels=all_levels)

    def task(self, ref: TaskRef) -> Task | None:
        """Return the task of a reference, the same on every node; None if there is no such task."""
        return self.source.task(ref)

    def truth(self, task: Task) -> str | None:
        """Return a right answer; None for own tasks without a known solution."""
        if isinstance(self.source, CurriculumTasks):
            return solution(self.source, task)
        texts = self.source.solution(task.ref) if isinstance(self.source, OwnTasks) else None
        return "\n".join(texts) if texts else None


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
    """Join a swarm, and return once other nodes can reach us: a second or two.

    Under torchrun only rank 0 joins; the other ranks draw and score, and get the groups that rank 0 collects.

    Args:
        invitation: the text that `swarmd invite` prints; the other arguments override it.
        name: the swarm's name.
        curriculum: the swarm's curriculum, as in `swarmd join --curriculum`.
        bootstrap: addresses of peers to connect to first.
        listen: addresses to listen on; by default all interfaces, at a port derived from the key.
        external: maximum number of other nodes' rollouts that you can use between two calls of `collect`.
        completions: maximum number of answers to one question that you can use.
        seed: seed of the questions that are drawn.
        folder: keeps the key and the known peers; used by one program or node at a time. The default is next
            to the node's folder.
        config: a configuration file, as in `swarmd join --config`; SWARMD_* variables count, too.
        author: a name that other nodes are told instead of a model's name.

    Raises:
        swarmd.errors.SwarmdError: the settings cannot be used, or the swarm cannot be joined; the message
            gives cause and remedy.
    """
    rank = int(os.environ.get("RANK") or 0) if int(os.environ.get("WORLD_SIZE") or 1) > 1 else 0
    accepted = read_invitation(invitation) if invitation else None
    flags = {
        "swarm": name,
        "curriculum": curriculum,
        "bootstrap": tuple(bootstrap),
        "listen": tuple(listen),
        "external": external,
        "round.completions": completions,
        "seed": seed,
    }
    settings = resolve(
        None if config is None else Path(config), os.environ, flags, accepted.settings() if accepted else {}
    ).config
    if accepted:
        require_same_swarm(accepted, curriculum_of(settings))
    if rank:
        return JoinedSwarm(settings, None, author)
    place = Path(folder) if folder is not None else default_state_dir().with_name("library")
    return JoinedSwarm(settings, StateFolder.open(place), author).open()


class JoinedSwarm(
    AbstractContextManager["JoinedSwarm", None], AbstractAsyncContextManager["JoinedSwarm", None]
):
    """A swarm that this program has joined, by `swarmd.join`, until the end of a `with` or of the program.

    Thread-safe. In a forked child it draws and scores, but only the parent shares and collects.
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

        state: closed with the swarm; None for a rank that does not join. share: one of SHARES, instead of the
        configured one. talk: called with events. stopped: called by a thread after `swarmd stop`, or after an
        error has ended the network thread; by default the swarm is left.

        Raises ConfigError if the configuration cannot be used.
        """
        self._talk, self._share = talk, SHARES[share or config.sharing.share]
        self.curriculum = curriculum = curriculum_of(config)
        self._verifier = Verifier(curriculum)
        rng = random.Random(secrets.randbits(64) if config.seed is None else config.seed)
        self.tasks = Questions(open_tasks(curriculum, self._verifier, config.tasks.specialties), rng)
        self._changed, self._pid, self._forked = threading.Condition(), os.getpid(), 0
        self._closed, self._round, self._collected = False, 1, 0
        # Answers that the program shared and that are not scored yet.
        self._given: deque[tuple[Task, tuple[Completion, ...]]] = deque(maxlen=MAX_HELD)
        self._network: Network | None = None
        if state is None:
            return
        try:
            network = Network(config, state, author, self._changed, talk, stopped or self._close_soon)
        except BaseException:
            state.close()
            raise
        self._network = network
        self._scorer = threading.Thread(
            target=self._score_all, args=(network,), name="swarmd-scorer", daemon=True
        )
        sharing = Sharing(config.sharing)
        self._parts = ReceivingParts(
            me=network.peer_id,
            tasks=self.tasks.source,
            reward=self._verifier,
            swarm=network,
            pool=Pool(config.round.max_age),
            batch_rng=random.Random(secrets.randbits(64)),
            external=config.round.external,
            completions=config.round.completions,
            sharing=sharing,
        )
        self._sampler = SharingSampler(sharing, 0, 0, len(curriculum.specialties) > 1)

    def open(self) -> Self:
        """Start both threads, and return once other nodes can reach us; else raise OperatorError."""
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

    # The public methods.

    @property
    def network(self) -> Network | None:
        """The member of the swarm; None in another rank, in a forked child, and after `close`."""
        network = self._network
        # A forked child has no thread but its own.
        return network if network is not None and network.lives and not self._closed else None

    @property
    def joined(self) -> bool:
        """Whether this process is a member of the swarm now."""
        return self.network is not None

    def share(self, task: Task, completions: Sequence[str | Completion]) -> None:
        """Share the answers to one question, signed, as soon as the pace allows it. Never waits.

        Our verifier scores the answers first: by default a group whose rewards are all the same is not sent,
        as no node learns from it. A plain text counts as ended by the model; pass
        `Completion(text, ended=False)` for a truncated one.
        """
        if (answers := _completions(completions)[: wire.MAX_COMPLETIONS]) and self.joined:
            with self._changed:
                self._given.append((task, answers))
                self._changed.notify_all()

    def share_judged(self, task: Task, answers: Sequence[Judged]) -> bool:
        """Share answers that `judge` has scored. Returns False if no node could learn from them."""
        scored = self._scored(
            task,
            tuple(answer.completion for answer in answers),
            tuple(answer.score.reward for answer in answers),
        )
        self.tasks.source.staircase.saw([scored])
        return self._offer(scored)

    def collect(
        self, count: int, wait: float = 0.0, unfit: Callable[[ScoredGroup], str | None] = lambda _: None
    ) -> Sequence[ScoredGroup]:
        """Return other nodes' rollouts to train on, each once: at most `count`, by `[sharing] take`, caps.

        Each call begins a step: rollouts for the next call are fetched from then on, and rollouts that were
        not returned within `round.max_age` steps are dropped. Under torchrun all ranks call `collect` and
        get the same groups.

        Args:
            count: groups wanted.
            wait: seconds to wait for a first group; by default none.
            unfit: returns why your model cannot be trained on a group, or None; another group replaces it.
        """
        network = self.network
        return _from_first_rank(self._collect(network, count, wait, unfit) if network else [])

    async def collect_soon(self, count: int, wait: float = 5.0) -> Sequence[ScoredGroup]:
        """Call `collect` in a thread, so that other tasks of asyncio or trio go on."""
        return await _in_thread(partial(self.collect, count, wait))

    def score(
        self, items: Sequence[tuple[TaskRef, Sequence[str | Completion]]]
    ) -> Sequence[tuple[float, ...]]:
        """Return one tuple of rewards per item. Waits for our own verifier, a contained process."""
        return self._own_verifier().score([(ref, _completions(texts)) for ref, texts in items])

    def judge(self, task: Task, answer: str | Completion) -> Judged:
        """Score one answer, with the reason. Adds <answer> tags that a text needs and lacks."""
        tagged = partial(self.curriculum.tagged, task.ref.specialty)
        completion = _completion(tagged(answer) if isinstance(answer, str) else answer)
        ((score,),) = self._own_verifier().judge([(task.ref, [completion])])
        return Judged(completion, score)

    def report(self) -> Mapping[str, Any]:
        """Return the status, as `swarmd status --json` shows it, with `collected`: the groups so far."""
        if self._network is None:
            return {"schema": 1, "role": "library", "state": "another rank has joined"}
        status: dict[str, Any] = to_builtins(self._network.status())
        return status | {"collected": self._collected, "curriculum": self.curriculum.name}

    def close(self) -> None:
        """Send waiting rollouts, and leave the swarm. A second call does nothing."""
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
            self._network.state.close()
        self._verifier.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aexit__(self, *_error: object) -> None:
        await _in_thread(self.close)

    def __reduce__(self) -> Any:
        raise SwarmdError(
            "a swarm cannot be sent to another process. Join in one, and send what it collects."
        )

    def _own_verifier(self) -> Verifier:
        """Return the verifier; a forked child gets a new one, as the parent reads the first one's pipe."""
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
                # Returned groups stay in the pool until they are too old.
                self._changed.wait_for(
                    lambda: self._closed or any(s.informative for s in pool.snapshot()), wait
                )
            batch = BatchBuilder(replace(self._sampler, n_external=count), pool, parts.me, (fitting,))(
                (), parts.batch_rng
            )
            pool.use(batch)
            weigh, rates = parts.sharing.weighing(parts.me), parts.sharing.pass_rates
            self._round, self._collected = self._round + 1, self._collected + len(batch)
            pool.forget(self._round)
        network.next_round(self._round, [(scored.author, scored.ref.specialty) for scored in batch], rates)
        return [_group(scored, advantages(scored, within_group, weigh)) for scored in batch]

    # The scorer's thread.

    def _score_all(self, network: Network) -> None:
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

    def _score(self, given: Sequence[tuple[Task, tuple[Completion, ...]]]) -> None:
        """Score the program's answers and the received rollouts; share the former, and fill the pool."""
        rewards = self._verifier.score([(task.ref, texts) for task, texts in given]) if given else []
        local = [self._scored(*answers, r) for answers, r in zip(given, rewards, strict=True)]
        self.tasks.source.staircase.saw(local)
        for scored in local:
            self._offer(scored)
        received, _ = self._parts.swarm.collect()
        theirs = score_others(self._round, self._parts, received)
        with self._changed:
            take_in(self._round, self._parts, local, theirs)
            self._changed.notify_all()

    def _scored(self, task: Task, completions: tuple[Completion, ...], rewards: tuple[float, ...]) -> Scored:
        return Scored(Rollout(task.ref, completions, self._parts.me), task.question, rewards, self._round)

    def _offer(self, scored: Scored) -> bool:
        if chosen := self._share(scored):
            self._parts.swarm.share([scored.rollout], scored.round)
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
        # A str is a sequence too: each letter would become an answer.
        raise TypeError("the answers to a question are a list, also where there is one: [text]")
    return tuple(map(_completion, answers))


def _completion(text: str | Completion) -> Completion:
    """Return a completion whose texts have no lone surrogates: they cannot be sent."""
    given = text if isinstance(text, Completion) else Completion(text, ended=True)
    *earlier, last = (each.encode(errors="replace").decode() for each in given.texts)
    return Completion(last, given.ended, tuple(earlier))


def _from_first_rank(found: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    """Return rank 0's groups in every rank of a torch.distributed run."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return found
    everybody: list[Sequence[ScoredGroup]] = [found]
    distributed.broadcast_object_list(everybody, src=0)
    return everybody[0]


async def _in_thread(what: Callable[[], T]) -> T:
    """Run a function in a worker thread of asyncio or trio, whichever is running."""
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        import asyncio

        return await asyncio.to_thread(what)
    return await trio.to_thread.run_sync(what)
