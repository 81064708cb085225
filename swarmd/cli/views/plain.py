"""Views of a running node: plain lines, log lines, and JSON lines (the live page is in live.py).

Data goes to standard output, messages to standard error. A view never stops the node: if its reader is gone,
it stops writing, and while a pipe is full, lines are dropped.
"""

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Final

from msgspec import structs, to_builtins

from swarmd.daemon.local_api.status_words import (
    many,
    round_sentence,
    sentence,
    so_far,
    state_sentence,
    who,
)
from swarmd.protocols import View
from swarmd.state.status import NodeState, Status
from swarmd.terminal import printable, tell
from swarmd.types import RoundLine

log = logging.getLogger(__name__)

# Minimum seconds between two lines about rounds: a small model plays several rounds a second.
ROUNDS_EVERY_S: Final = 60.0
# Minimum seconds between two lines about a start in progress.
STARTING_EVERY_S: Final = 5.0


class Lines:
    """One line for the rounds of each minute, for each change of state, and for each event.

    The first round has a line at once; later lines give the number of rounds since the last one.
    """

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._write, self._clock = write, clock
        self._said: dict[str, str] = {}
        self._talked = ""  # the last message of `talk`
        self._told = clock()  # when the last line was written
        self._status = Status()
        self._round: RoundLine | None = None  # the newest round without a line
        self._count, self._last = 0, -ROUNDS_EVERY_S  # rounds since the last such line, and its time

    def status(self, status: Status) -> None:
        self._status = status
        self._once("who", who(status))
        self._once("where", "reachable at " + " ".join(status.addresses) if status.addresses else "")
        if status.state not in (NodeState.TRAINING, NodeState.STARTING):
            # Report the rounds before the event that ends them.
            self._tell_rounds()
        self._once("state", state_sentence(status))
        # At growing intervals: the first round of a large model takes a quarter of an hour.
        quiet = max(STARTING_EVERY_S, (time.time() - (status.since or 0.0)) / 4)
        if (longer := so_far(status, time.time())) and self._clock() >= self._told + quiet:
            self._line(f"{status.state}: {status.cause}{longer}")
        if status.state is not NodeState.STOPPED and not status.away:
            self._once(
                "trouble",
                sentence(status.trouble) or "no problem with the swarm any more" * ("trouble" in self._said),
            )
        self._once("learning", sentence(status.learning))
        self._tell_rounds(every=ROUNDS_EVERY_S)

    def round(self, line: RoundLine) -> None:
        self._round, self._count = line, self._count + 1
        self._tell_rounds(every=ROUNDS_EVERY_S)

    def talk(self, text: str) -> None:
        self._talked = text
        self._line(text)

    def close(self) -> None:
        self._tell_rounds()

    def _tell_rounds(self, every: float = 0.0) -> None:
        if self._round is None or self._clock() < self._last + every:
            return
        saved, judge = self._status.saved, self._status.judge
        parts = [
            round_sentence(self._round),
            f"{self._count} rounds since the last line" if self._count > 1 else "",
            f"saved up to round {saved}" if saved else "",
            ""
            if judge is None or judge.score is None
            else f"judged {judge.score:.3f} over {many(judge.n, 'question')}",
        ]
        self._round, self._count, self._last = None, 0, self._clock()
        self._line("; ".join(filter(None, parts)))

    def _once(self, what: str, text: str) -> None:
        if text and self._said.get(what) != text:
            self._said[what] = text
            if text != self._talked:
                self._line(text)

    def _line(self, text: str) -> None:
        self._told = self._clock()
        self._write(text)


class PlainView(Lines):
    """Lines on a stream."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        super().__init__(self._print, clock)

    def _print(self, text: str) -> None:
        # If the reader is gone, or the stream closed, the node continues.
        with contextlib.suppress(OSError, ValueError):
            if not _full(self._stream):
                tell(printable(text), self._stream)


class LogView(Lines):
    """Lines in swarmd.log; everything is passed on to the view on the terminal."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view, self._begun = view, threading.Event()  # begun: set by the first status
        super().__init__(partial(log.info, "%s"), clock)

    def say_that_it_starts(self, every: float = STARTING_EVERY_S - 1) -> None:
        """Report every few seconds, from a thread, that the node still starts, until its first status.

        Until then the process imports modules, which takes half a minute on a busy machine.
        """
        threading.Thread(target=self._wait, args=(every, time.monotonic()), daemon=True).start()

    def _wait(self, every: float, since: float) -> None:
        while not self._begun.wait(every):
            self._view.talk(
                f"starting: loading the network and the questions, for {time.monotonic() - since:.0f} s"
            )

    def status(self, status: Status) -> None:
        self._begun.set()
        self._view.status(status)
        # `IsolationWatch` logs trouble itself, because it has no view in a program that imports swarmd.
        super().status(structs.replace(status, trouble=None))

    def round(self, line: RoundLine) -> None:
        self._view.round(line)
        super().round(line)

    def talk(self, text: str) -> None:
        self._view.talk(text)
        super().talk(text)

    def close(self) -> None:
        self._begun.set()
        super().close()
        self._view.close()


class JsonView(PlainView):
    """Each round's line on `out`, with "schema"; messages for people go to `people`."""

    def __init__(self, out: IO[str], people: IO[str]) -> None:
        super().__init__(people)
        self._out: IO[str] | None = out
        self._left_out = 0  # lines dropped since the last written one

    def round(self, line: RoundLine) -> None:
        if self._out is None:
            return
        if _full(self._out):
            if not self._left_out:
                self.talk(
                    "nobody reads standard output, and it is full: rounds are left out; metrics.jsonl has"
                    " them all"
                )
            self._left_out += 1
            return
        if self._left_out:
            self.talk(f"standard output is read again; rounds left out: {self._left_out}")
            self._left_out = 0
        try:
            print(json.dumps({"schema": 1, **to_builtins(line)}), file=self._out, flush=True)
        except (OSError, ValueError):
            self._out = None
            self.talk(
                "nobody reads standard output any more; the node keeps running, and metrics.jsonl has every"
                " round"
            )
            # Otherwise the interpreter would fail at exit, when it flushes to a closed pipe.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _full(stream: IO[str]) -> bool:
    """Return whether a write would block: a pipe with under PIPE_BUF (4 KiB) free, or a stopped terminal."""
    try:
        return not select.select([], [stream], [], 0)[1]
    except (OSError, ValueError):
        # The stream is closed, or is not a file: the write itself will raise.
        return False
