"""A whole round (generate and one update) beside a peer's, on the same model, questions, completions and lengths.

    python -m benchmarks.compare --peer trl [--size 1.25m|2.4m|14m] [--lengths full|varied] [--pairs 5] [--tokens 64]
                                 [--environment FOLDER] [--checkpointing] [--json]

The peer runs from its published package in an environment of its own, made at the first run (--environment keeps it for the next). The two
sides play in turn, one torch thread each; the ratio is the median over the pairs of peer's / our CPU seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from benchmarks import workload

PACKAGES = {"trl": ["torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"]}
WARM_UP = 1  # rounds of each side


class Side:
    """One child that plays rounds."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log = (folder / f"{Path(command[-1]).name or 'side'}-{len(command)}.log").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        self._hear()

    def play(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        raise SystemExit(f"a side of the comparison ended; see {self.log.name}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--peer", choices=sorted(PACKAGES), required=True)
    parser.add_argument("--size", choices=sorted(workload.SIZES), default="2.4m")
    parser.add_argument("--lengths", choices=["full", "varied"], default="varied")
    parser.add_argument("--tokens", type=int, default=64, help="the longest completion")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--environment", type=Path, help="folder of the peer's virtual environment; made where it is missing")
    parser.add_argument("--checkpointing", action="store_true", help="the peer's gradient checkpointing on")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    work = workload.Work(arguments.size, arguments.lengths, max_new_tokens=arguments.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        python = environment_of(arguments.peer, arguments.environment or Path(scratch) / "environment")
        folder = Path(scratch) / "work"
        folder.mkdir()
        workload.make(work, folder)
        ours = Side([sys.executable, "-m", "benchmarks.peers.ours", str(folder)], Path(scratch))
        script = [str(python), f"benchmarks/peers/{arguments.peer}.py", str(folder)]
        peer = Side(script + (["--checkpointing"] if arguments.checkpointing else []), Path(scratch))
        for _ in range(WARM_UP):
            ours.play()
            peer.play()
        pairs = [(ours.play(), peer.play()) for _ in range(arguments.pairs)]
        ours.close()
        peer.close()
    report(arguments, pairs)


def environment_of(peer: str, folder: Path) -> Path:
    """The peer's Python, in an environment that holds its published package."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making an environment for {peer} in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES[peer]], check=True)
    return python


def report(arguments: argparse.Namespace, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    def median(side: int, figure: str) -> float:
        return statistics.median(pair[side][figure] for pair in pairs)

    ratio = statistics.median(theirs["cpu"] / ours["cpu"] for ours, theirs in pairs)
    out = sys.stderr if arguments.json else sys.stdout
    what = f"median of {len(pairs)} pairs, size {arguments.size}, lengths {arguments.lengths}, at most {arguments.tokens} tokens"
    print(f"{'CPU seconds a round':22} {'swarmd':>9} {arguments.peer:>9}   {what}", file=out)
    rows = {"generate": "generate", "whole round": "cpu", "tokens generated": "tokens", "peak memory, MiB": "peak_mib"}
    for name, figure in rows.items():
        print(f"{name:22} {median(0, figure):9.2f} {median(1, figure):9.2f}", file=out)
    ratios = sorted(theirs["cpu"] / ours["cpu"] for ours, theirs in pairs)
    print(f"{'ratio':22} {ratio:9.2f}             {ratios[0]:.2f} to {ratios[-1]:.2f}", file=out)
    if arguments.json:
        work = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        print(json.dumps({"schema": 1, "work": work, "ours": median(0, "cpu"), "peer": median(1, "cpu"), "ratio": ratio}))


if __name__ == "__main__":
    main()
