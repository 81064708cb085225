"""The trainer: opens the parts of a node, runs rounds, saves checkpoints and answers the judge.

    link         `TrainerLink`: everything from the daemon (rollouts, peers, stop, pause) and back to it
    policy       the model, the only part with torch
    verifier     scores answers, in a contained process
    parts        the parts of a round, built from the above by `node.build`
    timetable, metrics           when checkpoints are due, and one line for each round
    workers      `[workers]`: generators and further trainers; None in one process

`open_trainer` builds them all; none of them knows the trainer. Only `swarmd stop --now` interrupts a round:
stop, pause, saves and the judge's questions are handled between rounds.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from p2p.types import PeerId
from swarmd import link
from swarmd.config.amounts import size
from swarmd.config.config import CheckpointConfig, NodeConfig
from swarmd.errors import CannotRecord
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import release_cached, unused_gpu
from swarmd.policy.models.files.progress import Download
from swarmd.policy.training.policy_files import FILES
from swarmd.state.folder import METRICS_FILE
from swarmd.state.logs import log_with
from swarmd.state.metrics import MetricsFile
from swarmd.state.status import NodeState
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.trainer.checkpoint import Checkpoints, Timetable
from swarmd.trainer.node import build, resume, run_state
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.progress import RoundProgress
from swarmd.trainer.round import run_round
from swarmd.trainer.trainer_link import RoundCut, TrainerLink
from swarmd.trainer.trial import SECONDS, PromptStyle, StyleFigures, settled, styles_of, tried
from swarmd.trainer.workers import (
    WorkerGroup,
    check_workers,
    for_trainer,
    open_workers,
    sharing,
)
from swarmd.types import Score, transcript

log = logging.getLogger(__name__)

RETRY_FULL_DISK_S = 10.0
# Longest wait; the daemon can end a wait at any moment.
MAX_WAIT_S = 60.0
# After a round longer than LONG_ROUND_S, wait QUESTION_S for the judge's question. The daemon asks for a
# question when it hears of the round, and the question's deadline would pass during another round of this
# length. Seconds.
LONG_ROUND_S, QUESTION_S = 30.0, 2.0
# Seconds between two looks at the daemon's messages while waiting for generators.
POLL_S = 0.1


@dataclass
class Trainer:
    """A node's rounds with their surroundings: the link to the daemon, checkpoints, metrics."""

    config: NodeConfig
    seed: int
    parts: RoundParts
    policy: LanguagePolicy
    verifier: Verifier
    link: TrainerLink
    checkpoints: Checkpoints
    metrics: MetricsFile
    round: int  # number of finished rounds
    timetable: Timetable
    saved: int  # number of rounds in the newest checkpoint
    progress: RoundProgress
    save_seconds: float = 0.0  # seconds that saves blocked the loop since the last round
    starved: bool = False  # whether waiting for external rollouts was reported
    slowed: bool = False  # whether it was reported that checkpoints come less often than configured
    workers: WorkerGroup | None = None  # processes that generate or train (`[workers]`)
    waited: float = 0.0  # seconds waited for the workers' rollouts since the last round

    def run(self, after_first: Callable[[], None] = lambda: None) -> None:
        """Run rounds until the limit is reached or the daemon says stop; then save and return.

        An interrupted round does not count: its answers are lost, and other questions take its place.

        after_first: called once the first round is finished.
        """
        limit, begun_at = self.config.round.rounds, self.round
        self.link.tell(
            link.TrainerState(
                NodeState.TRAINING, "the first round since the start", "wait: it is often the longest"
            )
        )
        with suppress(RoundCut):
            while not self.link.stopping and not (limit and self.round >= limit):
                if self.link.paused:
                    self._pause()
                elif self._supplied():
                    begun = time.monotonic()
                    self._one_round()
                    if self.round == begun_at + 1:
                        after_first()
                    asked = self.config.judge.url and self.round % self.config.judge.every == 0
                    if asked and time.monotonic() - begun > LONG_ROUND_S:
                        self.link.wait(QUESTION_S)
                    self._between_rounds()
                    self._rest(begun + self.config.round.pace)
        self._save()
        self.link.tell(link.Stopped(self.round))

    def _one_round(self) -> None:
        log_with(round=self.round + 1)
        rested = self.parts.schedule.state.rests
        self.progress.begin()
        report = run_round(self.round + 1, self.parts)
        self.round += 1
        self.progress.before = report.seconds
        if (guard := self.parts.schedule.state).rests > rested:
            log.warning(
                "the policy has moved too far from the one that generated the replayed rollouts"
                " (clip fraction above %g or drift above %g): one update a round for %d rounds. If this"
                " recurs, lower replay.updates_per_round or train.learning_rate.",
                self.parts.schedule.limit,
                self.parts.schedule.drift_limit,
                guard.resting,
            )
        seconds = {**report.seconds, "checkpoint": self.save_seconds}
        if self.workers:
            # Generators answer while a round trains, so the round's seconds of generation are the seconds
            # that it waited for them.
            seconds["generate"] = self.waited
        judged = self.link.judged
        line = structs.replace(
            report.line,
            time=time.time(),
            seconds=seconds,
            peers=self.link.peers,
            judge=Score(judged.score, judged.n) if judged else None,
            workers=self.workers.report(time.monotonic() - self.link.rested) if self.workers else None,
        )
        self.waited, self.save_seconds = 0.0, 0.0
        # The line is written before the checkpoint: a resumed run drops the lines of lost rounds and writes
        # them again, so none is missing or duplicated.
        self._write_when_room(partial(self.metrics.append, line))
        affordable = self.timetable.affordable(time.monotonic())
        used, rates = report.first_used, self.parts.sharing.pass_rates
        self.link.tell(
            link.RoundDone(line, self.verifier.pid, self.saved, affordable, used, rates, report.shown)
        )

    def _supplied(self) -> bool:
        """Return whether there are rollouts to train on; wait a moment for generators if not.

        With replay the pool is enough, so the round does not wait. Without it, and during a cooldown of the
        guard, a round needs as many local rollouts as in one process.
        """
        if self.config.round.local == 0:
            return self._others_are_here()
        if self.workers is None:
            return True
        reuse = (
            self.config.replay.mode == "on"
            and not self.parts.schedule.resting
            and any(s.informative for s in self.parts.pool)
        )
        begun = time.monotonic()
        there = self.workers.generators.wait(0 if reuse else self.config.round.local, POLL_S)
        self.waited += time.monotonic() - begun
        if not there:
            self._between_rounds()
        return there

    def _others_are_here(self) -> bool:
        """Return whether external rollouts suffice for a round of a node that asks nothing; else wait."""
        self.parts.pool.forget(self.round + 1)
        oldest = self.round + 1 - self.config.round.max_age if self.parts.schedule.resting else 0
        if self.link.waiting or any(s.informative and s.round >= oldest for s in self.parts.pool.snapshot()):
            if self.starved:
                self._say_training()
            return True
        if not self.starved:
            self.starved = True
            self.link.tell(
                link.TrainerState(
                    NodeState.WAITING,
                    "no rollouts of other nodes to train on, and round.local is 0",
                    "wait until peers share (`swarmd peers` lists them), or set round.local above 0",
                )
            )
        self.link.wait(self._until_save(MAX_WAIT_S), rollouts=True)
        self._between_rounds()
        return False

    def _say_training(self) -> None:
        self.starved = False
        self.link.tell(link.TrainerState(NodeState.TRAINING))

    def _until_save(self, seconds: float) -> float:
        """Return how long the loop may wait: `seconds`, or less if a checkpoint is due earlier."""
        return (
            min(seconds, self.timetable.until_due(time.monotonic())) if self.saved < self.round else seconds
        )

    def _let_generators(self, rest: bool) -> None:
        if self.workers is not None:
            self.workers.generators.rest(rest, "the round's pace")

    def _between_rounds(self) -> None:
        """Save if due, and answer the judge; called between rounds and whenever the loop waits."""
        if self.timetable.until_due(time.monotonic()) == 0:
            self._save()
        if (question := self.link.question()) is not None:
            # Save first: the judge must grade weights that cannot be lost.
            self._save()
            answer = self.policy.next_text(question.text, question.turns)
            self.link.tell(link.JudgeAnswer(question.id, answer.text, answer.ended))
        if self.link.compares:
            self._compare()

    def _save(self) -> None:
        """Save if needed; on return every finished round is in a checkpoint."""
        if self.saved == self.round:
            return
        begun = time.perf_counter()
        # Every round in a checkpoint must have its metrics line, even after a power cut.
        self._write_when_room(self.metrics.sync)
        state = run_state(self.round, self.seed, self.parts)
        self._write_when_room(lambda: self.checkpoints.save(state, self.policy.files()))
        self.timetable.wrote(self.checkpoints.size, time.monotonic())
        interval = self.timetable.interval(self.checkpoints.size)
        if interval > self.config.checkpoint.every and not self.slowed:
            self.slowed = True
            self.link.tell(link.Note(slower(self.checkpoints.size, interval, self.config.checkpoint)))
        self.saved = self.round
        self.save_seconds += time.perf_counter() - begun

    def _write_when_room(self, write: Callable[[], object]) -> None:
        """Write; while the disk is full, pause and retry.

        If the daemon says stop meanwhile, the run ends with the last intact checkpoint.
        """
        said = ""
        while True:
            try:
                write()
            except CannotRecord as error:
                if self.link.stopping:
                    raise
                # Logged once; the state that is set below keeps showing it.
                if said != (said := str(error)):
                    log.warning("%s", said)
                self.link.tell(
                    link.TrainerState(
                        NodeState.PAUSED,
                        said.removesuffix("."),
                        f"it is tried again every {RETRY_FULL_DISK_S:.0f} s",
                    )
                )
                # The judge's question has to wait: it is answered only after a save, and would end each wait
                # at once.
                self.link.wait(RETRY_FULL_DISK_S, questions=False)
            else:
                if said:
                    self._say_training()
                return

    def _compare(self) -> None:
        """Answer a question with the current and the initial weights, without the run's random numbers."""
        self.link.compares = False
        (task,) = self.parts.tasks.draw(1, random.Random())
        asked = task.question, self.parts.tasks.observer([task.ref])
        answers = self.policy.answer(*asked), self.policy.first_answer(*asked)
        (scores,) = self.verifier.judge([(task.ref, answers)])
        now, first = (
            (transcript(answer.texts, score.observations), score.reward)
            for answer, score in zip(answers, scores, strict=True)
        )
        self.link.tell(link.ComparedAnswers(task.question, self.round, now, first))

    def _pause(self) -> None:
        """Pause between two rounds; a pause within a round is waited for in `TrainerLink.rest`."""
        self._save()
        self.link.rest()
        # The last reported state is "training", so waiting has to be reported again.
        self.starved = False

    def _rest(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self.link.stopping and not self.link.paused:
            self._let_generators(rest=True)
            self.link.wait(self._until_save(left))
            self._between_rounds()
        self._let_generators(rest=False)


@contextmanager
def open_trainer(start: link.StartTrainer, daemon: TrainerLink, verifier: Verifier) -> Iterator[Trainer]:
    """Build everything; resume from the newest intact checkpoint, without asking."""
    config = NodeConfig.model_validate_json(start.config)
    state_dir = Path(start.state_dir)
    checkpoints = Checkpoints(
        state_dir / "checkpoints", FILES, size(config.limits.state) if config.limits.state else None
    )
    loading = link.TrainerState(NodeState.STARTING, f"loading the model {config.model.name}", "wait")
    daemon.tell(loading)

    def report(download: Download) -> None:
        fetching = link.TrainerState(
            NodeState.STARTING,
            download.words,
            "wait; Ctrl-C exits at once, and the same command resumes the download",
        )
        daemon.tell(loading if download.seconds_left == 0 else fetching)

    check_workers(config)
    policy = LanguagePolicy.open(
        for_trainer(config), start.seed, sharing(config, 0), report=report, rest=daemon.rest
    )
    daemon.give_back = partial(release_cached, policy.device)
    with closing(policy):
        clock = lambda: time.perf_counter() - daemon.rested  # noqa: E731  # a stage's seconds are those it computed
        config, policy, asked = _asking_well(config, policy, start, daemon, verifier, clock)
        progress = RoundProgress(lambda progress: daemon.tell(link.RoundGoesOn(progress)), clock)
        policy.watch(progress.done)
        parts = replace(
            build(config, start.seed, PeerId(start.peer_id), daemon, policy, verifier, clock),
            enter=progress.enter,
        )
        behind, notes = resume(checkpoints, parts, policy, start.seed)
        metrics = MetricsFile(state_dir / METRICS_FILE, resumed_round=behind)
        notes += [*asked, *policy.notes, *metrics.notes, *unused_gpu(config.model.device, policy.device)]
        daemon.tell(link.TrainerReady(policy.description, behind, notes))
        timetable = Timetable(
            config.checkpoint.every, config.checkpoint.gigabytes_a_day * 1e9, time.monotonic()
        )
        apart: AbstractContextManager[WorkerGroup | None] = (
            open_workers(config, policy, start.seed, state_dir, partial(parts.tasks.draw, rng=parts.task_rng))
            if config.workers.processes > 1
            else nullcontext()
        )
        with apart as workers:
            if workers is not None:
                # The update of this policy is a step of all trainers.
                parts = replace(
                    parts,
                    policy=workers.policy,
                    generators=workers.generators,
                    build_batch=replace(parts.build_batch, built=workers.note),
                )
                daemon.rest_along(lambda resting: workers.generators.rest(resting, "the daemon says so"))
            yield Trainer(
                config, start.seed, parts, policy, verifier, daemon, checkpoints, metrics, behind,
                timetable, saved=behind, progress=progress, workers=workers,
            )  # fmt: skip


def _asking_well(
    config: NodeConfig,
    policy: LanguagePolicy,
    start: link.StartTrainer,
    daemon: TrainerLink,
    verifier: Verifier,
    clock: Callable[[], float],
) -> tuple[NodeConfig, LanguagePolicy, list[str]]:
    """Return configuration and policy with the prompt style to train with, and notes; see `trial`."""
    curriculum = curriculum_of(config)

    def clock_until_stop() -> float:
        if daemon.stopping:
            raise RoundCut
        return clock()

    def trial() -> Mapping[PromptStyle, StyleFigures]:
        daemon.tell(
            link.TrainerState(
                NodeState.STARTING,
                "asking the model some questions, to choose a prompt style",
                f"wait: {SECONDS:.0f} s at most",
            )
        )
        tasks = open_tasks(curriculum, verifier, config.tasks.specialties)
        return tried(policy, config, tasks, verifier, start.seed, clock_until_stop)

    style, notes = styles_of(config, curriculum)[0], list[str]()
    with suppress(RoundCut):
        style, notes = settled(config, curriculum, Path(start.state_dir), trial)
    config = config.model_copy(update={"model": config.model.model_copy(update=asdict(style))})
    return config, policy.showing(style.examples, style.opening), notes


def slower(size: int, interval: float, limits: CheckpointConfig) -> str:
    """Explain that checkpoints come less often than configured, why, and which setting to change."""
    return (
        f"a checkpoint has {size / 1e9:.2g} GB: one is written every {interval / 60:.1f} min, not every"
        f" {limits.every:g} s, so that a day writes {limits.gigabytes_a_day:g} GB at most. kill -9 loses work"
        " since the last one. Raise checkpoint.gigabytes_a_day to save more often."
    )
