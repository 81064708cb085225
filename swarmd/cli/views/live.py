"""The live page of `swarmd join` and `swarmd status --watch`, drawn with rich.

It is drawn at most twice a second, and rarely while nothing changes.
"""

import contextlib
import io
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from statistics import fmean
from textwrap import wrap
from typing import IO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmd.daemon.diagnosis.isolation import FIRST_HERE
from swarmd.daemon.local_api.status_words import (
    NAME_COLUMNS,
    SMOOTH_ROUNDS,
    number,
    recent,
    round_words,
    so_far,
    status_facts,
    time_words,
)
from swarmd.state.status import MeasuredKl, NodeState, Status
from swarmd.terminal import printable
from swarmd.types import RoundLine

EVENTS = 6
# A page with fewer rows shows no hint.
HINT_ROWS = 20
# How long the last page waits for a terminal that accepts no output.
LAST_PAGE_S = 1.0
# Minimum seconds between two drawings while the node is paused and the page would only count the time:
# drawing costs 10 ms of CPU, and the daemon reports its status every half second.
DRAW_PAUSED_S = 5.0
# The facts of `swarmd status` that the page shows.
SHOWN = ("paused", "now", "learning", "model", "peers", "refused", "judge", "trainer", "workers", "away")
# The commands that a person needs next, within 76 columns.
HINT = "another terminal: swarmd ui, invite, stop"
_MARKS = {
    NodeState.TRAINING: "green",
    NodeState.STARTING: "cyan",
    NodeState.PAUSED: "yellow",
    NodeState.WAITING: "yellow",
    NodeState.STUCK: "red",
    NodeState.RESTARTING: "red",
    NodeState.STOPPING: "magenta",
    NodeState.STOPPED: "magenta",
}


class _Screen(io.TextIOBase):
    """The terminal of standard error, written without blocking: pending output is buffered."""

    def __init__(self) -> None:
        # Opened again: non-blocking mode on the shared descriptor would also affect the shell. Raises
        # OSError.
        self._to = os.open(os.ttyname(2), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        self._left = b""

    def write(self, text: str) -> int:
        self._left += text.encode(errors="backslashreplace")
        return len(text)

    def fileno(self) -> int:
        return self._to

    def flush(self) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._to, self._left) :]
        except BlockingIOError:
            # The terminal was stopped by Ctrl-S, or its connection hangs.
            pass
        except OSError:
            # The terminal is gone.
            self._left = b""

    def is_behind(self, patience: float = 0.0) -> bool:
        """Return whether output is pending. patience: seconds to wait for the terminal to accept more."""
        self.flush()
        while self._left and patience and select.select([], [self._to], [], patience)[1]:
            self.flush()
        return bool(self._left)


def _console() -> Console:
    try:
        return Console(file=cast("IO[str]", _Screen()), force_terminal=True)
    except OSError:
        # The terminal may belong to another user.
        return Console(stderr=True)


class LiveView:
    """Shows the page on the terminal's alternate screen, so that a resize leaves no torn frames.

    At the end the last page stays on the normal screen. In the background (Ctrl-Z, bg) nothing is drawn.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
        *,
        hint: str = HINT,
        verbose: bool = False,
    ) -> None:
        """Draw the first page.

        hint: a line with the next commands. verbose: show technical figures, too.
        """
        self._page, self._clock = LivePage(clock, hint, verbose=verbose), clock
        self._console = console or _console()
        self._live = Live(
            self._page, console=self._console, auto_refresh=False, redirect_stdout=False, screen=True
        )
        # Time of the last drawing, and the values whose change is drawn at once.
        self._drawn: tuple[float, object] = (-math.inf, None)
        self._draw()
        if isinstance(self._console.file, _Screen):
            signal.signal(signal.SIGTSTP, self._stop)

    def _draw(self) -> None:
        """Draw the page, unless the process is in the background or the terminal accepts no output."""
        with contextlib.suppress(OSError):
            # OSError: it is not the terminal of this process's session.
            if os.tcgetpgrp(self._console.file.fileno()) != os.getpgrp():
                return
        if not self._is_behind():
            self._live.start()
            self._live.refresh()

    def _stop(self, *_: object) -> None:
        """Give the terminal back to the shell before Ctrl-Z stops this process."""
        self._live.stop()
        self._is_behind(LAST_PAGE_S)
        os.kill(os.getpid(), signal.SIGSTOP)

    def status(self, status: Status) -> None:
        self._page.status = status
        at, before = self._drawn
        shown = (status.state, status.cause, status.trouble, self._page.said, self._console.size)
        changed = status.state is not NodeState.PAUSED or shown != before
        if changed or not 0 <= self._clock() - at < DRAW_PAUSED_S:
            self._drawn = self._clock(), shown
            self._draw()

    def round(self, line: RoundLine) -> None:
        """Ignore the round: the status contains the last one and the curve."""

    def talk(self, text: str) -> None:
        self._page.say(text)
        if self._page.status is None:
            self._draw()

    def close(self) -> None:
        if self._live.is_started:
            with contextlib.suppress(OSError, ValueError):
                # The terminal is gone.
                self._live.stop()
                self._console.print(self._page)
            self._is_behind(LAST_PAGE_S)

    def _is_behind(self, patience: float = 0.0) -> bool:
        """Return whether the terminal accepts no output at the moment; the node does not wait for it."""
        return isinstance(self._console.file, _Screen) and self._console.file.is_behind(patience)


class LivePage:
    """A status and the last events, as a rich renderable that fits the terminal."""

    def __init__(self, clock: Callable[[], float], hint: str = HINT, *, verbose: bool = False) -> None:
        self._hint, self._verbose = hint, verbose
        self.status: Status | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self._clock = clock
        self.said = 0  # events so far

    def say(self, text: str) -> None:
        self._events.append((self._clock(), printable(text)))
        self.said += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if (status := self.status) is None:
            yield Text(self._events[-1][1] if self._events else "starting …")
            return
        width, height = options.max_width - 4, options.size.height
        header = _header(status, self._clock(), width)
        # Lines that the frame and the header take.
        hint = self._hint if height >= HINT_ROWS else ""
        fixed = 2 + header.plain.count("\n") + 1 + bool(hint)
        columns = max(1, width - NAME_COLUMNS - 1)
        rows = _rows(_facts(status, columns, verbose=self._verbose), columns, height - fixed)
        room = height - fixed - len(rows) - 1
        events = self._newest_events(width, min(EVENTS, room - 4)) if room > 4 else []
        curve_rows = max(0, min(8, room - len(events) - 3))
        parts: list[RenderableType] = [header]
        if (rewards := [reward for reward in status.rewards if reward is not None]) and curve_rows >= 2:
            parts.append(_curve(rewards, status.round, width, curve_rows))
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True, min_width=NAME_COLUMNS)
        # Truncated with an ellipsis, because half an address looks like a whole one.
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=columns)
        for name, text in rows:
            table.add_row(name, text)
        parts.append(table)
        if events:
            parts += [Text(), *events]
        if hint:
            parts.append(Text(hint, style="dim", no_wrap=True, overflow="ellipsis"))
        yield Panel(
            Group(*parts),
            title=Text.assemble((f"swarmd {status.name}", "bold"), no_wrap=True),
            subtitle=Text(f"swarm {status.swarm.name} {status.swarm.digest[:8]}", style="dim"),
            title_align="left",
            subtitle_align="right",
            border_style="dim",
            padding=(0, 1),
        )

    def _newest_events(self, width: int, most: int) -> list[Text]:
        """Return the newest events in at most `most` lines, wrapped to `width` columns."""
        lines: list[Text] = []
        for at, text in reversed(self._events):
            first, *others = wrap(text, max(1, width - 10)) or [""]
            pieces = [Text.assemble((f"{datetime.fromtimestamp(at):%H:%M:%S}  ", "dim"), first)]
            pieces += [Text(" " * 10 + other) for other in others]
            if len(lines) + len(pieces) > most:
                break
            lines = [*pieces, *lines]
        return lines


def _header(status: Status, now: float, width: int) -> Text:
    """Format state, round, reward and uptime on one line, then cause and remedy on as many as they need."""
    colour = _MARKS.get(status.state, "white")
    text = Text.assemble(("● ", colour), (status.state, f"bold {colour}"), no_wrap=True, overflow="ellipsis")
    if rounds := round_words(status):
        text.append(f"   round {rounds}", "bold")
    if newest := recent(status.rewards):
        text.append(f"   reward {fmean(newest):.3f}", "bold green")
    if status.started_at:
        up = str(timedelta(seconds=max(0, int(now - status.started_at)))).removeprefix("0:")
        text.append(f"   up {up}", "dim")
    trouble = status.trouble if status.state is NodeState.TRAINING else None
    if trouble and not trouble.cause.startswith(FIRST_HERE):
        colour = "yellow"
    told = trouble or status
    cause, remedy = printable(told.cause), printable(told.remedy)
    cause += "" if trouble else so_far(status, now)
    lines = wrap(cause + f" → {remedy}" * bool(remedy), max(1, width), break_on_hyphens=False) or [""]
    text.append("\n" + "\n".join(lines))
    begin = len(text) - sum(map(len, lines)) - len(lines) + 1
    text.stylize(colour, begin, begin + len(cause))  # a line break replaces a space
    return text


def _facts(status: Status, width: int, *, verbose: bool) -> list[tuple[str, str]]:
    addresses = status.addresses or [""]
    # The first address is the one that most peers can reach. If it is too long, it is broken before the peer
    # id.
    best = printable(addresses[0])
    best = best if len(best) <= width else best.replace("/p2p/", " /p2p/")
    more = f" and {len(addresses) - 1} more: swarmd status" * (len(addresses) > 1)
    facts = [("address", best + more) if best else ("node", status.peer_id)]
    if status.last:
        facts += _of_round(status.last, status.kl if verbose else None)
    return facts + [(name, text) for name, text in status_facts(status) if name in SHOWN]


def _of_round(last: RoundLine, kl: MeasuredKl | None) -> list[tuple[str, str]]:
    batch = [
        f"{last.local} local + {last.external} external",
        f"pool {last.pool.size}, {last.pool.fresh} new",
        f"{last.zero_advantage_dropped} without advantage dropped",
        f"age {last.staleness.mean:.1f} rounds" if last.external else "",
    ]
    update = [
        f"loss {number(last.loss)}",
        f"gradient {number(last.grad_norm)}",
        f"entropy {number(last.entropy)}",
        # The last measured KL, because not every update measures it.
        f"KL from the start {number(kl.value)}" if kl else "",
        f"{last.skipped} steps left out: not finite" if last.skipped else "",
        f"{last.tokens.generated} tokens made, {last.tokens.trained} trained",
    ]
    return [
        ("time", time_words(last.seconds)),
        ("batch", ", ".join(filter(None, batch))),
        ("update", ", ".join(filter(None, update))),
    ]


def _rows(facts: Sequence[tuple[str, str]], width: int, most: int) -> list[tuple[str, str]]:
    """Wrap facts to lines of `width` columns, at most `most` lines; without room, a fact is one long line."""
    rows: list[tuple[str, str]] = []
    more = max(0, most - 1 - len(facts))
    for name, text in facts:
        lines = wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        kept, rest = lines[: 1 + more], lines[1 + more :]
        more -= len(kept) - 1
        kept[-1] = " ".join([kept[-1], *rest])
        rows += [(name, kept[0]), *(("", line) for line in kept[1:])]
    return rows[: max(0, most)]


def _curve(rewards: Sequence[float], last_round: int, width: int, rows: int) -> Text:
    """Draw the running mean of the reward over rounds: `rows` lines with a scale, and one of labels."""
    means = [fmean(recent(rewards[: at + 1])) for at in range(len(rewards))]
    high = max(0.1, math.ceil(max(means) * 20) / 20)
    text = Text.assemble(
        (f"reward, mean of the last {min(SMOOTH_ROUNDS, len(means))} rounds", "dim"),
        no_wrap=True,
    )
    for row, line in enumerate(area(means, width - 6, rows, high)):
        label = f"{high:.2f} " if row == 0 else "0.00 " if row == rows - 1 else " " * 5
        text.append("\n" + label, "dim")
        text.append("│", "dim")
        text.append(line, "green")
    first = f"round {last_round - len(rewards) + 1}"
    text.append("\n" + " " * 6 + first + str(last_round).rjust(max(1, width - 6 - len(first))), "dim")
    return text


def area(values: Sequence[float], width: int, rows: int, high: float) -> list[str]:
    """Draw the area from 0 to a curve through `values` as `rows` lines of `width` characters, in eighths."""
    places = [round(at * (len(values) - 1) / max(1, width - 1)) for at in range(width)]
    heights = [max(1, round(8 * rows * min(1.0, values[place] / high))) for place in places]
    return [
        "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, height - 8 * row))] for height in heights)
        for row in reversed(range(rows))
    ]
