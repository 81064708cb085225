"""Saves of a run under way: a run that was cut off goes on from the last, with the lines it would have had.

    OUT/runs/<setting>/seed-<n>.saved/said             a line for each round: what the nodes sent
    OUT/runs/<setting>/seed-<n>.saved/round-00000120/  one save; the two newest are kept
        swarm.json                   round, CPU seconds, and how far the run's lines and `said` were (sizes
                                     and SHA-256)
        node-0/round-00000120/       the node's own checkpoint (`swarmd.trainer.checkpoint`)

The network itself is not saved: it does the same each time it is given the same. So a resumed run first gives
it again what the nodes gave it, round by round, which takes a few milliseconds each.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from p2p import durable
from p2p.types import PeerId
from swarmd.errors import SwarmdError
from swarmd.lab.results import Journal, Mark
from swarmd.trainer.checkpoint import Checkpoints, saved_in
from swarmd.types import Lead, Rollout

# The time between two saves where one takes SLOW_S at most. It is longer for slower ones, so that saves take
# no more than 5 % of the time.
SAVE_EVERY_S = 60.0
SLOW_S = 3.0
KEPT_SAVES = 2
SCHEMA = 1

log = logging.getLogger(__name__)


class NodeOutput(msgspec.Struct, array_like=True):
    """A node's output to the network in one round."""

    shared: Sequence[Rollout] = ()
    charged: Sequence[PeerId] = ()
    informative: int = 0  # own rollouts with an advantage
    lead: Lead = Lead()  # others' lead over it after the round


RoundOutput = Sequence[NodeOutput | None]  # the nodes' outputs in one round; None: away
_decoder = msgspec.json.Decoder(list[NodeOutput | None])


class SavedRun(msgspec.Struct, frozen=True):
    """A save without the nodes' checkpoints."""

    round: int
    cpu: float  # CPU seconds so far
    nodes: int
    lines: Mark
    said: Mark
    schema: int = SCHEMA


class Saveable(Protocol):
    """What can be saved: `play.PlayedSwarm`."""

    @property
    def nodes(self) -> Sequence[object]: ...

    @property
    def said(self) -> RoundOutput:
        """Return the output of all nodes in the last round."""

    def replay(self, number: int, said: RoundOutput) -> None:
        """Play one round again as far as the network is concerned."""

    def save(self, number: int, folders: Iterable[Path]) -> None:
        """Save a checkpoint of each node."""

    def restore(self, folders: Iterable[Path]) -> None: ...


class RunSaves:
    """The saves of one run. Use as a context manager: `resume` once, then `after` each round."""

    def __init__(
        self,
        folder: Path,
        lines: Journal,
        every: float = SAVE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open a run's saves. Raises OSError.

        lines: of the run, cut back to where a resumed run goes on. every: seconds.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lines, self._every, self._clock = folder, lines, every, clock
        self._said = Journal(folder / "said")
        self._due = clock() + every

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._said.close()

    def resume(self, swarm: Saveable) -> tuple[int, float]:
        """Restore the newest whole save; return rounds played and CPU seconds spent, or (0, 0.0)."""
        for folder in reversed(saved_in(self._folder)):
            try:
                saved = self._whole(folder, len(swarm.nodes))
            except (OSError, ValueError, SwarmdError) as error:
                log.warning(
                    "the save %s cannot be used (%s): going on from an older one, or from the beginning",
                    folder,
                    error,
                )
                continue
            for number, line in enumerate(self._said.lines(), 1):
                swarm.replay(number, _decoder.decode(line))
            swarm.restore(_checkpoints(folder, saved.nodes))
            return saved.round, saved.cpu
        self._lines.back_to(Mark())
        self._said.back_to(Mark())
        return 0, 0.0

    def _whole(self, folder: Path, nodes: int) -> SavedRun:
        """Read a save and cut the files back to it.

        Raises OSError, ValueError or SwarmdError where it is not whole.
        """
        saved = msgspec.json.decode((folder / "swarm.json").read_bytes(), type=SavedRun)
        if saved.schema != SCHEMA or saved.nodes != nodes:
            raise ValueError("it is of another version")
        for each in _checkpoints(folder, nodes):
            if (found := Checkpoints(each).newest()) is None or found[0].round != saved.round:
                raise ValueError(f"{each.name} is missing")
        self._lines.back_to(saved.lines)
        self._said.back_to(saved.said)
        return saved

    def after(self, number: int, swarm: Saveable, cpu: float) -> None:
        """Save, if that is due, after round `number` whose line is written.

        Raises DiskFull and OSError.
        """
        self._said.append(swarm.said)
        began = self._clock()
        if began < self._due:
            return
        draft = self._folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        nodes = len(swarm.nodes)
        swarm.save(number, _checkpoints(draft, nodes))
        saved = SavedRun(number, cpu, nodes, self._lines.mark(), self._said.mark())
        (draft / "swarm.json").write_bytes(msgspec.json.encode(saved))
        durable.name_folder(draft, self._folder / f"round-{number:08d}", replacing=True)
        for old in saved_in(self._folder)[:-KEPT_SAVES]:
            shutil.rmtree(old, ignore_errors=True)
        now = self._clock()
        self._due = now + self._every * max(1.0, (now - began) / SLOW_S)


def _checkpoints(folder: Path, nodes: int) -> Sequence[Path]:
    return [folder / f"node-{place}" for place in range(nodes)]
