"""Prints disk size and import time of each package that swarmd needs.

    python -m benchmarks.node.weights [--least 5] [--python 3.14]

Run it with the interpreter of an installation; it reads the packages installed there. "MB" is the size of the
package's files; "import, ms" is the CPU time of the import in a new process; "for" names one of the packages
that require it. Below the table are the sums with and without torch. With --python the program instead prints
the packages that have no wheel for that version of Python; uv resolves them without downloading.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

from testbed import ROOT

TIMER = """
import importlib, sys, time
begun = time.process_time()
importlib.import_module(sys.argv[1])
print((time.process_time() - begun) * 1000)
"""


def needed(root: str) -> Iterator[tuple[Distribution, str]]:
    """Yield `root` and the installed packages that it needs, each with one package that requires it."""
    waiting, seen = [(root, "")], {root}
    while waiting:
        name, asked_by = waiting.pop(0)
        try:
            found = distribution(name)
        except ModuleNotFoundError:
            continue  # for another platform, or not installed
        yield found, asked_by
        for line in found.requires or ():
            wanted = re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; (]", line)[0]).lower()
            if "extra ==" not in line and wanted not in seen:
                seen.add(wanted)
                waiting.append((wanted, name))


def size_mb(of: Distribution) -> float:
    paths = [Path(str(of.locate_file(file))) for file in of.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def import_ms(module: str) -> float | None:
    """Return CPU milliseconds of the module's import; None if the module cannot be imported."""
    done = subprocess.run([sys.executable, "-c", TIMER, module], capture_output=True, text=True, check=False)
    return float(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None


def modules() -> dict[str, str]:
    """Return a module for each package: the one with the package's name, or else its first public module."""
    found: dict[str, list[str]] = {}
    for module, owners in packages_distributions().items():
        for owner in owners:
            found.setdefault(owner.lower(), []).append(module)
    return {
        owner: min(
            names, key=lambda name: (name.lower() != owner.replace("-", "_"), name.startswith("_"), name)
        )
        for owner, names in found.items()
    } | {"reasoning_gym": "swarmd.tasks.gym"}  # swarmd imports it through this module


def table(least: float) -> None:
    print("| package | MB | import, ms | for |\n|---|---|---|---|")
    total = torch = count = 0.0
    owners = modules()
    rows = [(size_mb(found), found, asked_by) for found, asked_by in needed("swarmd")]
    for mb, found, asked_by in sorted(rows, key=lambda row: -row[0]):
        name = found.metadata["Name"]
        total, count = total + mb, count + 1
        torch += mb * bool(re.match("torch$|nvidia-(?!ml)|cuda|triton", name))
        if mb >= least:
            taken = import_ms(owners[name.lower()]) if name.lower() in owners else None
            ms = "" if taken is None else f"{taken:.0f}"
            print(f"| {name} {found.version} | {mb:.1f} | {ms} | {asked_by} |")
    print(f"\n{count:.0f} packages, {total:.0f} MB; without torch and its CUDA {total - torch:.0f} MB")


def without_wheels(version: str, folder: Path) -> Iterator[str]:
    """Yield the packages without a wheel for this version of Python; leave each out and resolve again."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project, overrides = folder / "pyproject.toml", folder / "overrides.txt"
    project.write_text(re.sub(r"requires-python = .*", 'requires-python = ">=3.11"', text), encoding="utf-8")
    # Pure Python packages, which build without a compiler.
    pure = [f"--no-binary={name}" for name in ("python-baseconv", "varint", "zss")]
    lines = (ROOT / "overrides.txt").read_text(encoding="utf-8")
    while True:
        overrides.write_text(lines, encoding="utf-8")
        words = [
            "--python-version",
            version,
            "--only-binary=:all:",
            *pure,
            "--overrides",
            str(overrides),
            str(project),
        ]
        done = subprocess.run(
            [shutil.which("uv") or Path(sys.executable).with_name("uv"), "pip", "compile", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return
        missing = re.search(
            r"Because (?:only )?([\w.-]+)\S* (?:has no usable wheels|.*is available)", done.stderr
        )
        if missing is None:
            raise SystemExit(done.stderr)
        yield missing[1]
        lines = re.sub(rf"(?m)^{missing[1]}==.*\n", "", lines) + f'{missing[1]}==0; python_version < "3"\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--least", type=float, default=5.0, help="smallest size of a package in the table, in MB"
    )
    parser.add_argument(
        "--python", metavar="VERSION", help="print the packages without a wheel for this version of Python"
    )
    given = parser.parse_args()
    if given.python is None:
        table(given.least)
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(f"no wheels for Python {given.python}:", end=" ", flush=True)
            print(", ".join(without_wheels(given.python, Path(folder))) or "everything has one")


if __name__ == "__main__":
    main()
