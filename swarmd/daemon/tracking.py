"""Starts and ends the processes that hand the node's figures to experiment trackers."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import trio

LEAVES = 10.0  # seconds that a tracker gets at the end to write what it has
LOG_FILE = "tracking.log"

log = logging.getLogger(__name__)


async def run_tracker(name: str, folder: Path, peer: str, talk: Callable[[str], None]) -> None:
    """Run it until cancelled.

    One that fails is told once and not started again: the figures are in metrics.jsonl.
    """
    command = [sys.executable, "-m", "swarmd.state.tracking", str(folder), peer, name]
    try:
        with (folder / LOG_FILE).open("ab") as output:
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
    except OSError as error:
        talk(f"{name} gets no figures: its process cannot be started: {error}")
        log.warning("the tracker %s cannot be started: %s", name, error)
        return
    try:
        await process.wait()
        talk(
            f"{name} gets no more figures: its process ended with status {process.returncode}; see"
            f" {folder / LOG_FILE}"
        )
        log.warning("the tracker %s ended with status %s", name, process.returncode)
    finally:
        if process.returncode is None:
            process.terminate()
            with trio.CancelScope(shield=True), trio.move_on_after(LEAVES):
                await process.wait()
            if process.returncode is None:
                process.kill()
