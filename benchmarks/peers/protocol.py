"""How a side of a comparison is driven: a child process plays one round for each line it reads, and answers with one JSON line.

Standard library only: the peers' environments import it. CPU seconds are the process's own, all threads, so that waiting for its
turn does not count.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def wait_for_turn() -> None:
    """Block until the driver says go; leave when it hangs up."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def say(document: dict[str, Any]) -> None:
    print("@" + json.dumps(document), flush=True)  # libraries print too; the driver reads only lines that begin like this


def serve(play: Callable[[], dict[str, Any]]) -> None:
    """One round a turn, for ever."""
    say({"ready": True})
    while True:
        wait_for_turn()
        begun = time.process_time()
        figures = play()
        say({**figures, "cpu": time.process_time() - begun, "peak_mib": peak_mib()})


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
