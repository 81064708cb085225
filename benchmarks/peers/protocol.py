"""The driver of one side of a comparison.

A child process plays one round for each line it reads, and answers with one JSON line.

Standard library only: the peers' environments import it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.round.meter import Meter


def wait_for_turn() -> None:
    """Block until the driver says go; leave when it hangs up."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def say(document: dict[str, Any]) -> None:
    # Libraries print too; the driver reads only lines that begin like this
    print("@" + json.dumps(document), flush=True)


def serve(play: Callable[[], dict[str, Any]], meter: Meter) -> None:
    """Play one round per turn, until the driver hangs up.

    play: returns the round's figures; with "seconds" if only part of the round's time counts.
    """
    say({"ready": True})
    while True:
        wait_for_turn()
        begun = meter.begin()
        figures = play()
        say({"seconds": meter.now() - begun, **figures, "peak_mib": meter.peak_mib()})
