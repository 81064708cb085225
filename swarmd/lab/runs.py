"""Play the runs of an experiment, several at a time, each in a separate process.

With `--engine torch`, a run has a process for each node, and one failure ends them all. It shows the progress
and estimates the time left.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Self

import trio

from swarmd.daemon import membership
from swarmd.lab.parent_watch import LabFailed
from swarmd.lab.results import Results, Run
from swarmd.terminal import duration_words, interruptible

# The command that plays a run in one process, and the one that plays a node of a run (`--engine torch`).
PLAY = (sys.executable, "-P", "-m", "swarmd.lab.play")
PLAY_NODE = (sys.executable, "-P", "-m", "swarmd.lab.torch_node")
# The exit code of a node that lost another node; the lost one's last words are reported instead.
LOST_EXIT_CODE = 75
# Characters of a run's standard error that are kept.
LAST_CHARACTERS = 2000

log = logging.getLogger(__name__)


@dataclass
class RunsProgress:
    """Progress of the runs, and the causes of failures.

    It counts rounds of virtual time, because all runs of an experiment have about the same number of rounds.
    """

    total: int  # all runs, including those finished earlier
    rounds: int  # rounds of each run
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    failures: dict[Run, str] = field(default_factory=dict)  # the last words of each failed run
    playing: dict[Run, int] = field(default_factory=dict)  # rounds finished in each run in progress
    _played: int = 0  # rounds played since `_begun`
    _begun: float | None = None

    @classmethod
    def of(cls, results: Results) -> Self:
        total, missing = len(results.runs), len(results.missing)
        return cls(total, results.experiment.rounds, done=total - missing)

    def advanced(self, run: Run, number: int) -> None:
        # The pace is measured from the first finished round on, without the start of its process.
        if self._begun is None:
            self._begun = self.clock()
        else:
            self._played += number - self.playing.get(run, number - 1)
        self.playing[run] = number

    def finished(self, run: Run, failure: str | None) -> None:
        self.playing.pop(run, None)
        if failure is None:
            self.done += 1
        else:
            self.failures[run] = failure

    def require_whole(self) -> None:
        """Raise LabFailed if a run failed; it names each."""
        if self.failures:
            said = [f"{run.setting}, seed {run.seed}: {why}" for run, why in sorted(self.failures.items())]
            raise LabFailed(
                "\n".join(
                    [
                        f"{len(said)} of {self.total} runs failed. Finished runs stay; remove the causes,"
                        " then use --resume:",
                        *said,
                    ]
                )
            )

    @property
    def share(self) -> float:
        behind = (self.done + len(self.failures)) * self.rounds + sum(self.playing.values())
        return behind / max(1, self.total * self.rounds)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left; None until enough rounds were played for an estimate."""
        if self._begun is None or self._played < self.rounds // 20 + 2:
            return None
        return self.total * self.rounds * (1 - self.share) * (self.clock() - self._begun) / self._played

    def sentence(self) -> str:
        left = self.seconds_left
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{self.done} of {self.total} runs done{failed}, {100 * self.share:.0f} %" + (
            f", {duration_words(left)} left" if left is not None else ""
        )


def play_all(
    results: Results,
    jobs: int,
    told: Callable[[RunsProgress], None],
    command: Sequence[str] = PLAY,
    *,
    apart: bool = False,
) -> None:
    """Play the missing runs. After a failure the other runs continue; LabFailed then names each failed run.

    jobs: runs at a time. told: called after each round of any run. apart: `command` plays one node of a run.
    Ctrl-C and SIGTERM end the runs in progress, which start from the beginning the next time.
    """
    progress, missing = RunsProgress.of(results), list(results.missing)[::-1]

    async def work() -> None:
        while missing:
            run = missing.pop()
            progress.finished(run, await _play_run(results, run, progress, told, command, apart))
            told(progress)

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(min(jobs, len(missing))):
                nursery.start_soon(work)

    membership.run(partial(interruptible, play))
    progress.require_whole()


async def _play_run(
    results: Results,
    run: Run,
    progress: RunsProgress,
    told: Callable[[RunsProgress], None],
    command: Sequence[str],
    apart: bool,
) -> str | None:
    """Play one run; return the last words of a process that failed, else log its output and return None."""
    command = [*command, str(results.folder), run.setting, str(run.seed)]
    nodes = len(results.experiment.setting(run.setting).nodes)
    ended: dict[str, tuple[int, str]] = {}  # exit code and last words of each process

    def hear(line: bytes) -> None:
        if line.isdigit():
            progress.advanced(run, int(line))
            told(progress)

    async def play(name: str, *arguments: str) -> None:
        ended[name] = await _run_process([*command, *arguments], hear)
        if ended[name][0] not in (0, LOST_EXIT_CODE):
            nursery.cancel_scope.cancel()

    with TemporaryDirectory(prefix="swarmd-") as private:
        async with trio.open_nursery() as nursery:
            if apart:
                for rank in range(nodes):
                    nursery.start_soon(play, f"node {rank} of {nodes}: ", str(rank), f"{private}/meeting")
            else:
                nursery.start_soon(play, "")
    # A process that failed comes first, but after it those that only lost it.
    name, (code, words) = min(ended.items(), key=lambda each: (not each[1][0], each[1][0] == LOST_EXIT_CODE))
    # The run may be finished nevertheless: another process that plays into this folder may have finished it
    # first.
    if code and not results.path(run).exists():
        return name + last_words(code, words)
    if words:
        # Own tasks or strategies may report errors without failing the run.
        log.warning("%s, seed %d: %s", run.setting, run.seed, words)
    return None


async def _run_process(command: Sequence[str], hear: Callable[[bytes], None]) -> tuple[int, str]:
    """Run a process; return its exit code and its last words. hear: called with each line of its output."""
    said = bytearray()
    start = partial(
        trio.run_process,  # ends the process if this task is cancelled
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # runs share the cores
    )

    async def listen(stream: trio.abc.ReceiveStream) -> None:
        async for chunk in stream:
            said.extend(chunk)
            del said[:-LAST_CHARACTERS]

    async with trio.open_nursery() as nursery:
        process = await nursery.start(start)
        nursery.start_soon(listen, process.stderr)
        rest = b""
        async for chunk in process.stdout:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                hear(line)
    return process.returncode, said.decode(errors="replace").strip()


def last_words(code: int, words: str) -> str:
    """Return why a process failed: the signal that ended it, else the last line that it wrote."""
    if code < 0:
        return (
            f"its process was ended by signal {-code}. Is the memory short? Run fewer at a time (--jobs),"
            " then use --resume."
        )
    return words.splitlines()[-1] if words else f"exit code {code}, without a message"
