"""Start a process for each node of a run of `swarmd lab run --engine torch`; one failure ends them all.

`python -m swarmd.lab.torch_executor FOLDER SETTING SEED`. Prints the number of each finished round; after a
failure, the failed node and its last words.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from swarmd.lab.parent_watch import run_program
from swarmd.lab.results import Results
from swarmd.lab.runs import LAST_CHARACTERS, last_words
from swarmd.terminal import interruptible

# The exit code of a rank that lost another rank; the lost one's last words are reported instead.
LOST_EXIT_CODE: Final = 75


async def _play(command: Sequence[str], nodes: int, meeting: str) -> dict[int, tuple[int, str]]:
    """Run the ranks; return exit code and last words of the failed ones."""
    failed: dict[int, tuple[int, str]] = {}

    async def run_rank(rank: int, nursery: trio.Nursery) -> None:
        # The process ends if this task is cancelled.
        done = await trio.run_process(
            [*command, str(rank), meeting],
            stdout=None if rank == 0 else subprocess.DEVNULL,
            capture_stderr=True,
            check=False,
        )
        if done.returncode:
            failed[rank] = done.returncode, done.stderr[-LAST_CHARACTERS:].decode(errors="replace").strip()
            if done.returncode != LOST_EXIT_CODE:
                nursery.cancel_scope.cancel()

    async def run_all() -> None:
        async with trio.open_nursery() as nursery:
            for rank in range(nodes):
                nursery.start_soon(run_rank, rank, nursery)

    await interruptible(run_all)
    return {rank: how for rank, how in failed.items() if how[0] != LOST_EXIT_CODE} or failed


def main(folder: str, setting: str, seed: str) -> None:
    command = [sys.executable, "-P", "-m", "swarmd.lab.torch_node", folder, setting, seed]
    nodes = len(Results.open(Path(folder)).experiment.setting(setting).nodes)
    with tempfile.TemporaryDirectory(prefix="swarmd-") as private:
        failed = trio.run(_play, command, nodes, str(Path(private) / "meeting"))
    for rank, (code, words) in failed.items():
        print(f"node {rank} of {nodes}: {last_words(code, words)}", file=sys.stderr)
        sys.exit(code if code > 0 else 1)


if __name__ == "__main__":
    run_program(main)
