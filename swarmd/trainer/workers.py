"""`[workers]`: starts and joins the generator processes and further trainers.

The trainer keeps its role: it owns the link, the verifier, the pool, checkpoints and metrics, and is rank 0
of the trainers.

    generators   answer questions continuously, and load new weights between two tokens
                 (policy/parallel/weight_sync.py)
    trainers     compute shares of every update (policy/parallel/data_parallel.py)
"""

import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError
from swarmd.policy.inference.select import importance_cap
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import choose_device, count_devices, environment
from swarmd.policy.models.preflight import cores
from swarmd.policy.parallel.data_parallel import Trainers
from swarmd.policy.parallel.generator_pool import Generators
from swarmd.policy.parallel.messages import Begin
from swarmd.policy.parallel.question_queue import QuestionQueue
from swarmd.policy.parallel.weight_sync import WeightWriter, private_folder
from swarmd.policy.parallel.worker import WorkerProcess
from swarmd.types import Ages, Scored, Task, WorkerCounts, WorkerFigures

# Rounds whose questions a generator holds: the one it answers and the next one.
ROUNDS_AHEAD: Final = 2
# Maximum number of rollouts that wait for a trainer with replay. Without replay, one round's rollouts wait,
# in addition to those that are being generated.
MAX_STORED: Final = 1024
# Tokens per second are averaged over this many rounds.
RATE_ROUNDS: Final = 32
# With more processes per core, they only wait for each other.
PROCESSES_PER_CORE: Final = 4


def check_workers(config: NodeConfig) -> None:
    """Raise ConfigError if these workers cannot run here; it names settings that can."""
    workers, device = config.workers, choose_device(config.model.device).type
    if workers.trainers > 1 and device == "mps":
        raise ConfigError(
            "workers.trainers: torch cannot sum gradients on MPS. Set workers.trainers to 1, or"
            " model.device to 'cpu'."
        )
    if device == "cuda" and workers.trainers > count_devices():
        raise ConfigError(
            f"workers.trainers is {workers.trainers}, and each needs a separate CUDA device: there are"
            f" {count_devices()}. Lower workers.trainers, or name more devices in CUDA_VISIBLE_DEVICES."
        )
    processes, available = workers.processes, max(1, int(cores(logical=True)))
    if device == "cpu" and processes > PROCESSES_PER_CORE * available:
        raise ConfigError(
            f"workers: {workers.generators} generators and {workers.trainers} trainers are"
            f" {processes} processes on {available} cores (limit {PROCESSES_PER_CORE * available})."
            " Lower workers.generators or workers.trainers; a process for each core is best."
        )


def for_trainer(config: NodeConfig) -> NodeConfig:
    """Return the configuration of a process that trains, and generates only if there are no generators.

    Else it answers only the judge's questions, so the built-in engine is enough.
    """
    if config.workers.processes == 1:
        return config
    train = config.train.model_copy(update={"importance_cap": importance_cap(config)})
    return config.model_copy(
        update={"generate": config.generate.model_copy(update={"engine": "own"}), "train": train}
    )


@dataclass
class WorkerGroup:
    policy: LanguagePolicy  # its update is a step of all trainers
    generators: Generators
    trainers: Trainers | None
    handover: WeightWriter
    # Pairs of (tokens generated so far, time).
    _read: deque[tuple[int, float]] = field(default_factory=partial(deque, maxlen=RATE_ROUNDS))
    # Of the local completions since the last report: the mean age of each one's weights, in updates, and the
    # age of the oldest weights.
    _lags: list[float] = field(default_factory=list)
    _largest_lag: int = 0

    def note(self, batch: Sequence[Scored]) -> None:
        """Measure the age of the weights that generated a batch's local tokens."""
        now = self.policy.version
        for versions in (v for s in batch if s.tokens for v in s.tokens.versions if v):
            self._lags.append(now - fmean(versions))
            self._largest_lag = max(self._largest_lag, now - min(versions))

    def report(self, now: float) -> WorkerFigures:
        """Return the workers' part of the round's line of metrics.jsonl. now: seconds, any epoch."""
        generators, flow, trainers = self.generators, self.generators.flow, self.trainers
        self._read.append((flow.tokens, now))
        tokens, since = self._read[0]
        lag = Ages(fmean(self._lags) if self._lags else 0.0, self._largest_lag)
        self._lags, self._largest_lag = [], 0
        further = trainers.pids if trainers else []
        return WorkerFigures(
            generators=WorkerCounts(len(generators.working), len(generators.pids), generators.pids),
            trainers=WorkerCounts(trainers.alive if trainers else 1, 1 + len(further), further),
            version=self.handover.version,
            lag=lag,
            tokens_per_second=(flow.tokens - tokens) / (now - since) if now > since else None,
            questions={"in_flight": flow.in_flight},
            waiting=len(flow.finished),
            overtaken=flow.overtaken,
        )


@contextmanager
def open_workers(
    config: NodeConfig,
    policy: LanguagePolicy,
    seed: int,
    state_dir: Path,
    draw: Callable[[int], Sequence[Task]],
) -> Iterator[WorkerGroup]:
    """Start all workers.

    policy: already resumed. draw: draws tasks, from any thread.
    """
    workers, asked = config.workers, config.round.local
    # All workers load the model with the device, dtype and revision that this process chose.
    description = policy.description
    found = {
        "device": description.device.partition(":")[0],
        "dtype": description.dtype,
        "revision": description.revision,
    }
    settled = config.model_copy(update={"model": config.model.model_copy(update=found)})
    replay = config.replay.mode == "on"
    with ExitStack() as stack:
        size = sum(w.nbytes for w in policy.trained.values())
        # Room for the weights; with several trainers, also for Adam's two moments, which each rank reads
        # once.
        folder = private_folder(state_dir, size if workers.trainers == 1 else 2 * size)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        handover = WeightWriter(folder)

        def start(module: str, config: NodeConfig, seed: int, place: int) -> WorkerProcess:
            begin = Begin(config.model_dump_json(), seed, str(folder), sharing(config, place))
            return WorkerProcess(module, begin, environment(config.model, place))

        # Generators never train, so they keep no copy of the initial weights.
        answering = settled.model_copy(update={"train": settled.train.model_copy(update={"kl_every": 0})})

        def start_generator(number: int) -> WorkerProcess:
            drawn = random.Random(f"{seed} generator {number} {policy.version}").getrandbits(62)
            return start("swarmd.policy.parallel.generator", answering, drawn, workers.trainers + number)

        trainers = None
        if workers.trainers > 1:
            rank_process = partial(
                start, "swarmd.policy.parallel.further_trainer", for_trainer(settled), seed
            )
            trainers = stack.enter_context(Trainers(workers.trainers, policy, rank_process, folder))

        def step(learner: Any, rows: Any) -> Any:
            report = trainers.step(learner, rows) if trainers else learner.step(rows)
            handover.publish(policy.version, policy.trained)
            return report

        handover.publish(policy.version, policy.trained)
        enough = (workers.generators + 1) * asked
        flow = QuestionQueue(draw, ROUNDS_AHEAD * asked, max(enough, MAX_STORED) if replay else enough)
        generators = stack.enter_context(
            Generators(workers.generators, start_generator, flow, None if replay else asked)
        )
        yield WorkerGroup(
            policy.stepping(step),
            generators,
            trainers,
            handover,
        )


def sharing(config: NodeConfig, place: int) -> int:
    """Count the processes of this run on the device of this place: they are dealt to the devices in turn."""
    devices = count_devices() if choose_device(config.model.device).type == "cuda" else 1
    return len(range(place % devices, config.workers.processes, devices))
