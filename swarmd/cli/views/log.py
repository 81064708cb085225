"""Writes to swarmd.log what the view shows: each event, and one line about rounds a minute."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from swarmd.cli.views.plain import MinuteOfRounds
from swarmd.daemon.local_api.status_words import many, state_sentence, who
from swarmd.protocols import View

log = logging.getLogger(__name__)


class LogView:
    """A view that logs, and passes everything on to the view on the terminal."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._known: dict[str, str] = {}  # the node's addresses and state as last printed
        self._document: Mapping[str, Any] = {}
        self._last = ""  # what was written last
        self._rounds = MinuteOfRounds(clock)

    def status(self, document: Mapping[str, Any]) -> None:
        self._view.status(document)
        self._document = document
        engine = document.get("engine")
        self._on_change("node", who(document) + (f", engine {engine}" if engine else ""))
        self._on_change(
            "addresses",
            "listening on " + " ".join(document["addresses"]) if document.get("addresses") else "",
        )
        self._on_change("state", state_sentence(document))
        if self._rounds.due():
            self._write_rounds()

    def round(self, line: Mapping[str, Any]) -> None:
        self._view.round(line)
        self._rounds.add(line)

    def talk(self, text: str) -> None:
        self._view.talk(text)
        self._write(text)

    def close(self) -> None:
        self._write_rounds()
        self._view.close()

    def _write_rounds(self) -> None:
        if not (more := self._rounds.due_lines()):
            return
        more += [f"saved up to round {saved}"] if (saved := self._document.get("saved")) else []
        judge = self._document.get("judge") or {}
        more += (
            [f"judged {judge['score']:.3f} over {many(judge['n'], 'question')}"]
            if judge.get("score") is not None
            else []
        )
        log.info("%s", "; ".join(more))

    def _on_change(self, what: str, text: str) -> None:
        if text and self._known.get(what) != text:
            self._known[what] = text
            if text != self._last:
                self._write(text)

    def _write(self, text: str) -> None:
        self._last = text
        log.info("%s", text)
