"""Notifications on the desktop (`notify = "on"`): the node failed, was paused for long, or has finished."""

import contextlib
import html
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from swarmd.daemon.local_api.status_words import state_sentence
from swarmd.protocols import View
from swarmd.terminal import printable

LONG_PAUSE_S: Final = 1800.0
NOTIFY_TIMEOUT_S: Final = 5.0
# An AppleScript.
_SCRIPT: Final = (
    "on run argv",
    "display notification (item 2 of argv) with title (item 1 of argv)",
    "end run",
)


Send = Callable[[str, str], subprocess.Popen[bytes] | None]  # called with title and text; does not wait


class NotifyView:
    """A view that watches what is shown, and passes it on."""

    def __init__(self, view: View, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._view, self._send, self._clock = view, send, clock
        self._paused_at: float | None = None
        self._told = False  # whether this pause was told
        self._document: Mapping[str, Any] = {}
        self._sent: subprocess.Popen[bytes] | None = None  # what shows the last notification

    def status(self, document: Mapping[str, Any]) -> None:
        self._view.status(document)
        self._document = document
        if document.get("state") != "paused":
            self._paused_at, self._told = None, False
            return
        self._paused_at = self._clock() if self._paused_at is None else self._paused_at
        if not self._told and self._clock() >= self._paused_at + LONG_PAUSE_S:
            self._told = True
            self._sent = self._send(
                f"swarmd has been paused for {LONG_PAUSE_S / 60:.0f} minutes", state_sentence(document)
            )

    def round(self, line: Mapping[str, Any]) -> None:
        self._view.round(line)

    def talk(self, text: str) -> None:
        self._view.talk(text)

    def close(self) -> None:
        self._view.close()

    def ended(self, error: str | None) -> None:
        """Notify that the node has ended, and wait until the notification is shown.

        error: why it failed; None if it did not.
        """
        rounds = self._document.get("rounds")
        if error is not None:
            self._sent = self._send("swarmd stopped with an error", error)
        elif rounds and self._document.get("round", 0) >= rounds:
            self._sent = self._send("swarmd has finished", f"{rounds} rounds")
        if self._sent is not None:
            # A desktop that does not answer is no fault of the node.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sent.wait(NOTIFY_TIMEOUT_S)


def notifier() -> Send | None:
    """Return a function that shows a desktop notification; None if no program can."""
    linux, mac = shutil.which("notify-send"), shutil.which("osascript")
    if linux:
        return lambda title, text: _start(
            [linux, "--app-name=swarmd", "--", title, html.escape(printable(text), quote=False)]
        )
    if mac:
        lines = [word for line in _SCRIPT for word in ("-e", line)]
        return lambda title, text: _start([mac, *lines, title, printable(text)])
    return None


def nothing(_title: str, _text: str) -> None:
    """Show nothing."""


def _start(command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return None
