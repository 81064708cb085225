"""The loop that each side of a comparison runs.

A side is a child process. It plays one round for each line that it reads, and answers with one JSON line.

This module uses the standard library only, because it is imported in the peers' environments.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.round.meter import Meter


def wait_for_turn() -> None:
    """Block until the driver asks for a round; exit when the driver hangs up."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def say(document: dict[str, Any]) -> None:
    # Libraries print, too, so the driver reads only lines that begin with "@".
    print("@" + json.dumps(document), flush=True)


def serve(play: Callable[[], dict[str, Any]], meter: Meter) -> None:
    """Play one round per turn, until the driver hangs up.

    play: returns the round's figures, among them "seconds" if only part of the round's time counts.
    """
    say({"ready": True})
    while True:
        wait_for_turn()
        begun = meter.begin()
        figures = play()
        say({"seconds": meter.now() - begun, **figures, "peak_mib": meter.peak_mib()})
