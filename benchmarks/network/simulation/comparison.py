"""Plays the scenarios on two commits and prints their figures side by side.

The other commit is checked out in a temporary git worktree, and *this* simulation is copied into it, so both
sides play the same scenarios. Each side is a separate process, which imports swarmd and p2p from its tree.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.network.simulation.play import CPU, Figures, means

ROOT = Path(__file__).resolve().parents[3]
HERE = Path("benchmarks", "network", "simulation")
# A difference is bold if it exceeds the range over the seeds and this share of the larger figure.
MARKED = 0.05
ERRORS = ".errors"  # suffix of the file for a side's errors

Runs = Mapping[str, Sequence[Figures]]  # for each scenario, the figures of each seed


class NotComparable(Exception):
    """This simulation cannot run the other commit's exchange."""


def compare(base: str, options: Sequence[str]) -> str:
    """Return the comparison of this tree with a commit, as markdown.

    base: any name of a commit. options: of `python -m benchmarks.network.simulation`; they choose the
    scenarios.

    Raises:
        NotComparable: the other commit is unknown, or cannot be played.
    """
    with _worktree(base) as tree, tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, side) for side in ("base", "here")]
        started = [_start(root, options, file) for root, file in zip((tree, ROOT), files, strict=True)]
        codes = [process.wait() for process in started]
        if codes[1]:
            raise NotComparable(f"the scenarios fail on this tree: {_last_line(files[1])}")
        if codes[0]:
            raise NotComparable(
                f"{base} cannot be played: {_last_line(files[0])}. This simulation drives"
                " swarmd.exchange.exchange.Exchange by swarmd.exchange.events, so only commits that have both"
                " as they are now can be compared"
            )
        before, after = (_read(file) for file in files)
    return f"{_name(base)} → {_name('HEAD')} and uncommitted changes\n\n{table(before, after)}"


def table(before: Runs, after: Runs) -> str:
    """Return the figures of both sides as a markdown table.

    A figure that differs is shown as "base → here (difference)", in bold if the difference is clear (MARKED).
    """
    names = list(next(iter(after.values()))[0])
    lines = ["| scenario | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    equal, clear = [], 0
    for scenario, runs in after.items():
        cells = [_cell(name, before[scenario], runs) for name in names]
        lines.append(f"| {scenario} | " + " | ".join(cells) + " |")
        clear += sum(cell.startswith("**") for cell in cells)
        if not any("→" in cell for name, cell in zip(names, cells, strict=True) if name != CPU):
            equal.append(scenario)
    return "\n".join(
        [
            *lines,
            "",
            f"{clear} figures differ by more than the seeds do and by over {MARKED:.0%} (bold)."
            f" Scenarios without any difference: {', '.join(equal) or 'none'}. CPU is not judged.",
        ]
    )


def number(value: float) -> str:
    """Format a figure with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cell(name: str, before: Sequence[Figures], after: Sequence[Figures]) -> str:
    base, here = means(before)[name], means(after)[name]
    if number(base) == number(here):
        return number(here)
    cell = f"{number(base)} → {number(here)} ({'+' if here > base else '−'}{number(abs(here - base))})"
    spread = max(max(run[name] for run in runs) - min(run[name] for run in runs) for runs in (before, after))
    least = max(spread, MARKED * max(abs(base), abs(here)))
    return f"**{cell}**" if abs(here - base) > least and name != CPU else cell


@contextmanager
def _worktree(base: str) -> Iterator[Path]:
    """Check out a commit, and replace its simulation with this tree's."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "base")
        if _git("worktree", "add", "--quiet", "--detach", str(tree), base).returncode:
            raise NotComparable(f"{base} is not a commit of this repository; in CI fetch the whole history")
        try:
            shutil.rmtree(tree / HERE, ignore_errors=True)
            shutil.copytree(ROOT / HERE, tree / HERE)
            for package in (HERE.parent.parent, HERE.parent):
                (tree / package / "__init__.py").touch()
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _start(tree: Path, options: Sequence[str], file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", ".".join(HERE.parts), "--json", *options]
    # A fixed hash seed, so that sets of strings have the same order on both sides.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    with file.open("wb") as out, file.with_suffix(ERRORS).open("wb") as errors:
        return subprocess.Popen(command, cwd=tree, env=environment, stdout=out, stderr=errors)


def _last_line(file: Path) -> str:
    """Return the last line of a side's errors."""
    return file.with_suffix(ERRORS).read_text().strip().rpartition("\n")[2]


def _read(file: Path) -> Runs:
    found: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
    return {run["scenario"]: run["figures"] for run in found["runs"]}


def _name(commit: str) -> str:
    return _git("log", "-1", "--format=%h %s", commit).stdout.strip()


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
