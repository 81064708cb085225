"""The scripts a newcomer runs first: they find what they need, say what is missing in one line, and do nothing twice."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

from p2p.engines.hivemind.p2pd import INSTALL
from tests.packaging.checkout import ROOT

SCRIPTS = [ROOT / "scripts" / name for name in ("setup", "demo", "test")]
TOOLS = ["sh", "env", "dirname", "cat", "head", "tr", "sort", "uname", "id", "rm", "printf", "ls"]
PIP = """#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
[ ! -e "{fails}" ]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what `scripts/setup` reads, and a virtual environment whose pip only writes down what it was asked."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", folder / "scripts")
    (folder / "engines" / "vllm").mkdir(parents=True)
    for name in ("pyproject.toml", "engines/vllm/pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True, timeout=60)
    pip = folder / ".venv" / "bin" / "pip"
    pip.write_text(PIP.format(log=tmp_path / "pip.log", fails=tmp_path / "pip-fails"))
    pip.chmod(0o755)
    return folder


@pytest.fixture
def bare_path(tmp_path: Path) -> Iterator[Path]:
    """A folder with the commonest tools alone: no Python, no compiler, no package manager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    yield folder


def run_setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"SWARMD_PYTHON": sys.executable, "SWARMD_PIP_ARGS": "--quiet"}  # arguments: no look for torch's CPU page
    return subprocess.run(
        [str(checkout / "scripts" / "setup")],
        env={name: value for name, value in {**os.environ, **own, **environment}.items() if value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def asked(checkout: Path, *, alone: bool = False) -> list[str]:
    """Of pip. alone: what was to come without its dependencies; else the rest."""
    log = checkout.parent / "pip.log"
    return [line for line in log.read_text().splitlines() if ("--no-deps" in line) == alone] if log.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.name))
def test_scripts_are_posix_shell_that_can_be_run(script: Path) -> None:
    assert script.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    assert os.access(script, os.X_OK)
    for shell in filter(shutil.which, ("sh", "dash")):
        subprocess.run([shell, "-n", str(script)], check=True, timeout=10)


def test_ci_runs_the_readmes_test_command_in_a_clone() -> None:
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    text = ci.read_text(encoding="utf-8")
    assert "git clone" in text
    assert text.count("scripts/test --all") == 3  # with a limit, without one, and in words
    assert "\nscripts/test " in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words, lanes",
    [
        ("", ["ruff check .", "mypy", "pytest -m not slow and not net and not gpu"]),
        ("--all", ["ruff check .", "mypy", "pytest -m "]),
        ("-k one tests/p2p", ["pytest -k one tests/p2p"]),
    ],
)
def test_what_scripts_test_runs(tmp_path: Path, words: str, lanes: list[str]) -> None:
    """Every tool stands in for itself and writes down how it was called; a failing one does not keep the next from running."""
    log, tools = tmp_path / "log", tmp_path / ".venv" / "bin"
    (tmp_path / "scripts").mkdir()
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    for tool in (tmp_path / "scripts" / "setup", tools / "ruff", tools / "mypy", tools / "pytest"):
        tool.write_text(f'#!/bin/sh\n[ "${{0##*/}}" = setup ] || {{ echo "${{0##*/}} $*" >> "{log}"; exit 1; }}\n')
        tool.chmod(0o755)
    done = subprocess.run([tmp_path / "scripts" / "test", *words.split()], capture_output=True, text=True, timeout=60, check=False)
    ran = [re.sub(r"-n \d --dist worksteal | --durations \d+", "", line).strip() for line in log.read_text().splitlines()]
    assert (done.returncode, ran) == (1, [lane.strip() for lane in lanes])
    assert done.stderr == ("failed: ruff mypy pytest\n" if len(lanes) > 1 else "")


def test_one_pip_command_pins_torch_with_the_rest(checkout: Path) -> None:
    done = run_setup(checkout, SWARMD_PIP_ARGS="--proxy http://192.0.2.1:1")
    assert done.returncode == 0, done.stderr
    (line,) = asked(checkout)
    assert re.search(r"^install .*--proxy http://192\.0\.2\.1:1 -c constraints\.txt torch==[\d.]+ -e \.\[dev\] -e engines/vllm$", line)


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="hivemind's p2pd is for Linux on x86-64")
def test_hivemind_comes_without_its_dependencies_and_is_not_missed_where_it_does_not(checkout: Path) -> None:
    pip = checkout / ".venv" / "bin" / "pip"
    pip.write_text(pip.read_text() + 'case "$*" in *--no-deps*) exit 1 ;; esac\n')
    done = run_setup(checkout)
    assert done.returncode == 0 and "py-libp2p alone" in done.stderr
    assert [line.split()[-2:] for line in asked(checkout, alone=True)] == [["--no-deps", "hivemind"]]
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line.startswith("hivemind==")]
    assert pin in (ROOT / "pyproject.toml").read_text(encoding="utf-8") and pin in INSTALL


def test_nothing_changed_is_nothing_to_do(checkout: Path) -> None:
    assert run_setup(checkout).returncode == 0
    again = run_setup(checkout)
    assert (again.returncode, again.stderr) == (0, "setup: nothing to do\n")
    assert len(asked(checkout)) == 1


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt", "SWARMD_PIP_ARGS"])
def test_what_changed_is_installed_again(checkout: Path, changed: str) -> None:
    run_setup(checkout)
    if changed == "SWARMD_PIP_ARGS":
        assert run_setup(checkout, SWARMD_PIP_ARGS="--verbose").returncode == 0
    else:
        with (checkout / changed).open("a", encoding="utf-8") as file:
            file.write("# another line\n")
        assert run_setup(checkout).returncode == 0
    assert len(asked(checkout)) == 2


def test_a_failed_install_is_told_and_tried_again(checkout: Path) -> None:
    """Also where the files are as they were at the last install that went well: what is installed is not."""
    assert run_setup(checkout).returncode == 0
    (checkout.parent / "pip-fails").touch()
    failed = run_setup(checkout, SWARMD_PIP_ARGS="--verbose")
    assert failed.returncode == 1
    assert "pip failed" in failed.stderr
    (checkout.parent / "pip-fails").unlink()
    assert run_setup(checkout).returncode == 0
    assert len(asked(checkout)) == 3


def test_no_python_is_one_clear_line(checkout: Path, bare_path: Path) -> None:
    told = run_setup(checkout, PATH=str(bare_path), SWARMD_PYTHON="")
    assert told.returncode == 1
    assert told.stderr == "setup: swarmd needs Python 3.11, 3.12 or 3.13: install one and run this again\n"


def test_a_python_that_is_none_is_named(checkout: Path, bare_path: Path) -> None:
    told = run_setup(checkout, PATH=str(bare_path), SWARMD_PYTHON="python-of-old")
    assert told.returncode == 1
    assert told.stderr.startswith("setup: python-of-old is not it; swarmd needs Python 3.11")


def test_no_compiler_is_one_clear_line(checkout: Path, bare_path: Path) -> None:
    told = run_setup(checkout, PATH=str(bare_path), CC="")
    assert told.returncode == 1
    assert told.stderr.startswith("setup: no C compiler found")
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("manager", "package"), [("apt-get", "libgmp-dev"), ("dnf", "gmp-devel"), ("pacman", "gmp"), ("apk", "gmp-dev"), ("", "gmp")]
)
def test_missing_headers_nobody_may_install_are_named_in_one_line(checkout: Path, bare_path: Path, manager: str, package: str) -> None:
    """A compiler that finds no gmp.h, a user who is not root, and no sudo."""
    for name, text in {"cc": "exit 1", "id": "echo 1000", manager: "exit 1"}.items():
        if name:
            (bare_path / name).unlink(missing_ok=True)
            (bare_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (bare_path / name).chmod(0o755)
    told = run_setup(checkout, PATH=str(bare_path), CC="")
    assert told.returncode == 1
    assert re.search(rf"\b{package}\b", told.stderr)
    assert told.stderr.count("\n") == 1, told.stderr
    assert asked(checkout) == []


def test_missing_headers_are_installed_where_that_is_possible(checkout: Path, bare_path: Path) -> None:
    """apt-get as root: a stale list of packages is renewed once, and then the compiler finds gmp.h."""
    installed, log = checkout.parent / "gmp-installed", checkout.parent / "apt.log"
    for name, text in {
        "cc": f'[ -e "{installed}" ]',
        "id": "echo 0",
        "apt-get": f'echo "$*" >> "{log}"; case "$*" in update) touch "{installed}-list" ;; '
        f'*install*) [ -e "{installed}-list" ] && touch "{installed}" ;; esac',
        "touch": f'exec {shutil.which("touch")} "$@"',
    }.items():
        (bare_path / name).unlink(missing_ok=True)
        (bare_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (bare_path / name).chmod(0o755)
    done = run_setup(checkout, PATH=str(bare_path), CC="")
    assert done.returncode == 0, done.stderr
    first, update, second = log.read_text().splitlines()
    assert (update, first) == ("update", second)
    assert first.endswith("libgmp-dev")
    assert len(asked(checkout)) == 1


def test_a_moved_checkout_gets_a_new_environment(checkout: Path, bare_path: Path) -> None:
    assert run_setup(checkout).returncode == 0
    moved = checkout.rename(checkout.parent / "moved")
    told = run_setup(moved, PATH=f"{bare_path}:{os.environ['PATH']}", SWARMD_PIP_ARGS="--no-such-option-of-pip")
    assert "this checkout was moved" in told.stderr
    assert told.returncode == 1  # the new environment's pip is the real one
    assert len(asked(moved)) == 1


def test_constraints_pin_everything_that_is_asked_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonical(name) for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {canonical(re.split(r"[\[<>=!~; ]", line)[0]) for line in wanted} - {"swarmd"}
    assert names - pinned == set()
    for name in names - {"hivemind", "bitsandbytes"}:  # and what those want in turn, here; hivemind comes alone, the other not at all
        further = {canonical(re.split(r"[\[<>=!~; (]", line)[0]) for line in requires(name) or () if ";" not in line}
        assert further - pinned == set(), name
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values())  # no local versions: "+cpu" is one platform's
    assert not any(name.startswith(("nvidia", "cuda", "triton")) for name in pinned)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
