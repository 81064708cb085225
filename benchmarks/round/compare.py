"""Compares a whole round (generate and one update) with another trainer: `benchmarks.round.cost --peer`.

The two sides are child processes that play rounds in turn, each on one torch thread. The peer, which is the
other trainer, runs from its published package.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.round import workload
from benchmarks.round.pairs import Plan, report
from testbed import ROOT
from testbed.environments import default_environment, environment_of

TRAINERS = ("genrl", "trl")
WARM_UP = 1  # rounds of each side that do not count


class Side:
    """A child process that plays rounds."""

    def __init__(self, name: str, command: list[str], folder: Path, device: str) -> None:
        self._name, self._log = name, folder / f"{name}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # some trainers use the GPU without being asked
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        self._answer()

    def play(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        status = self._process.wait()
        self.close()
        raise SystemExit(
            f"The side {self._name!r} of the comparison ended with status {status}. It last said:\n{last}"
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def beside(arguments: Namespace, plan: Plan) -> None:
    """Play both sides. arguments: peer, environment (or None), defaults, json."""
    python = environment_of(arguments.peer, arguments.environment or default_environment(arguments.peer))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "work"
        folder.mkdir()
        workload.make(plan.work(), folder)
        script = [str(python), f"benchmarks/peers/{arguments.peer}.py", str(folder)]
        script += ["--defaults"] if arguments.defaults else []
        sides: list[Side] = []
        try:
            sides.append(
                Side(
                    "swarmd",
                    [sys.executable, "-m", "benchmarks.peers.ours", str(folder)],
                    Path(scratch),
                    plan.device,
                )
            )
            sides.append(Side(arguments.peer, script, Path(scratch), plan.device))
            rounds = [[side.play() for side in sides] for _ in range(WARM_UP + plan.pairs)][WARM_UP:]
        finally:
            for side in sides:
                side.close()

    def medians(figure: str) -> tuple[float, float]:
        ours, peer = (statistics.median(pair[side][figure] for pair in rounds) for side in (0, 1))
        return ours, peer

    more = {
        "generate": medians("generate"),
        "tokens_generated": medians("tokens"),
        "peak_MiB": medians("peak_mib"),
    }
    report(
        arguments, plan, arguments.peer, [(ours["seconds"], peer["seconds"]) for ours, peer in rounds], more
    )
