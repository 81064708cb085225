"""The scripts that a new user runs first.

They find the programs they need, report a missing program in one line, and repeat no finished work.
"""

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT

SCRIPTS = [ROOT / "scripts" / name for name in ("setup", "demo", "test")]
TOOLS = [
    "sh",
    "env",
    "dirname",
    "cat",
    "head",
    "tail",
    "sed",
    "tr",
    "sort",
    "uname",
    "id",
    "rm",
    "printf",
    "ls",
    "mkdir",
    "ln",
    "cp",
]
READ = (
    "scripts/setup",
    "scripts/test",
    "pyproject.toml",
    "constraints.txt",
    "overrides.txt",
    "engines/vllm/pyproject.toml",
    "engines/hivemind/pyproject.toml",
)
PYTHON = """case "$*" in
    "-m venv --clear .venv") mkdir -p .venv/bin
        cp "{folder}/pip" .venv/bin/pip; ln -sf "{folder}/python" .venv/bin/python ;;
    *) exec {real} "$@" ;;
esac"""
INSTALLER = 'echo "${{0##*/}} $*" >> "{folder}/log"; [ ! -e "{folder}/fails" ]'


def program(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout with the files that the scripts read.

    Next to it is a Python whose environments have a pip that only records its arguments.
    """
    for name in READ:
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    program(tmp_path / "python", PYTHON.format(folder=tmp_path, real=sys.executable))
    program(tmp_path / "pip", INSTALLER.format(folder=tmp_path))
    return tmp_path / "checkout"


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """Make a folder with only the most common tools: no Python, no compiler, no package manager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return folder


def run_setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"SWARMD_PYTHON": str(checkout.parent / "python"), "SWARMD_INSTALLER": "pip"}
    return subprocess.run(
        [str(checkout / "scripts" / "setup")],
        env={name: value for name, value in {**os.environ, **own, **environment}.items() if value},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def asked(checkout: Path, *, alone: bool = False) -> list[str]:
    """Return the recorded calls of pip or uv. alone: only the calls without dependencies; else the others."""
    log = checkout.parent / "log"
    return (
        [line for line in log.read_text().splitlines() if ("--no-deps" in line) == alone]
        if log.exists()
        else []
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.name))
def test_scripts_are_executable_and_posix_shell(script: Path) -> None:
    assert script.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    assert os.access(script, os.X_OK)
    for shell in filter(shutil.which, ("sh", "dash")):
        subprocess.run([shell, "-n", str(script)], check=True, timeout=TIMEOUT_S)


def test_ci_runs_all_tests_in_a_clone() -> None:
    ci = ROOT / ".ci" / "run"
    text = ci.read_text(encoding="utf-8")
    assert os.access(ci, os.X_OK) and "git clone" in text
    assert text.count("scripts/test --all") == 3  # with a time limit, without one, and in the text
    assert "\nscripts/test " in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words, lanes",
    [
        ("", ["ruff check .", "mypy", "pytest -m not slow and not net and not gpu"]),
        ("--quick", ["pytest -m not slow and not net and not gpu"]),
        ("--all", ["ruff check .", "mypy", "pytest -m"]),
        ("-k one tests/p2p", ["pytest -k one tests/p2p"]),
    ],
)
def test_the_test_script_runs_the_named_tests(checkout: Path, words: str, lanes: list[str]) -> None:
    """If a tool fails, the next tools still run; types are checked in parallel with the tests."""
    tools = checkout / ".venv" / "bin"
    tools.mkdir(parents=True)
    program(checkout / "scripts" / "setup", "true")
    (checkout.parent / "fails").touch()
    for tool in ("ruff", "mypy", "pytest"):
        program(tools / tool, INSTALLER.format(folder=checkout.parent))
    done = subprocess.run(
        [checkout / "scripts" / "test", *words.split()],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    ran = [re.sub(r"-n \d --dist worksteal | --durations \d+", "", line).strip() for line in asked(checkout)]
    assert (done.returncode, sorted(ran)) == (1, sorted(lanes))
    assert done.stderr == ("failed: ruff pytest mypy\n" if len(lanes) > 1 else "")


def test_torch_is_pinned_in_the_same_command_as_the_other_packages(checkout: Path) -> None:
    done = run_setup(checkout, SWARMD_PIP_ARGS="--index-url http://192.0.2.1:1")
    assert done.returncode == 0 and done.stderr.count("\n") < 12, done.stderr
    (line,) = asked(checkout)
    assert re.fullmatch(
        r"pip install torch==[\d.]+ -e \.\[dev\] -e engines/vllm -c constraints\.txt --index-url"
        r" http://192\.0\.2\.1:1",
        line,
    )


def test_uv_installs_from_pips_configured_index(checkout: Path, bare_path: Path) -> None:
    """A missing uv is installed as a package. GMP's headers may be missing: fastecdsa is overridden."""
    own = checkout.parent
    program(
        own / "uv",
        f'{INSTALLER.format(folder=own)}; echo "$UV_FIND_LINKS $UV_INDEX $UV_DEFAULT_INDEX" > "{own}/looks"',
    )
    program(
        own / "pip",
        f"""case "$1" in
            config) printf '%s\\n' "global.find-links='\\\\n/wheels\\\\n/more'"
                printf '%s\\n' ":env:.extra-index-url='file:///index'" ;;
            install) {INSTALLER.format(folder=own)}; cp "{own}/uv" .venv/bin/uv ;;
        esac""",
    )
    program(bare_path / "cc", "exit 1")  # a compiler that does not find gmp.h
    done = run_setup(checkout, SWARMD_INSTALLER="", PATH=str(bare_path))
    assert done.returncode == 0, done.stderr
    itself, line = asked(checkout)
    assert itself == "pip install --quiet -c constraints.txt uv"
    assert line.startswith("uv pip install --python .venv/bin/python --compile-bytecode ")
    assert re.search(
        r" --override overrides\.txt torch==[\d.]+ -e \.\[dev\] -e engines/vllm -c constraints\.txt$", line
    )
    assert (own / "looks").read_text().split() == ["/wheels,/more", "file:///index"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have only one build of PyTorch")
@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({}, "cpu"),
        ({"UV_TORCH_BACKEND": "cu128"}, "cu128"),
        ({"UV_INDEX": "file:///index"}, ""),
        ({"SWARMD_PIP_ARGS": "--offline"}, ""),
    ],
)
def test_without_a_gpu_pytorch_is_installed_without_cuda(
    checkout: Path, bare_path: Path, environment: Mapping[str, str], taken: str
) -> None:
    """The backend is chosen only if no setting names one, and is shown before the installation."""
    own = checkout.parent
    program(own / "uv", f'{INSTALLER.format(folder=own)}; echo "$UV_TORCH_BACKEND" > "{own}/backend"')
    program(own / "pip", f'[ "$1" != install ] || cp "{own}/uv" .venv/bin/uv')
    program(bare_path / "cc", "exit 1")
    done = run_setup(checkout, SWARMD_INSTALLER="", PATH=str(bare_path), **environment)
    assert done.returncode == 0 and "GB" in done.stderr, done.stderr
    if not [found for name in ("nvidia[0-9]*", "dxg", "kfd") for found in Path("/dev").glob(name)]:
        assert (own / "backend").read_text().strip() == taken


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="hivemind's p2pd is for Linux on x86-64"
)
def test_hivemind_is_installed_without_dependencies_and_setup_works_without_it(
    checkout: Path,
) -> None:
    program(
        checkout.parent / "pip",
        f'{INSTALLER.format(folder=checkout.parent)}; case "$*" in *--no-deps*) exit 1 ;; esac',
    )
    done = run_setup(checkout)
    assert done.returncode == 0 and "py-libp2p alone" in done.stderr
    assert asked(checkout, alone=True) == [
        "pip install --no-deps -e engines/hivemind hivemind -c constraints.txt"
    ]
    pin = f"hivemind=={pins('constraints.txt')['hivemind']}"
    package = ROOT / "engines" / "hivemind"
    for file in ("pyproject.toml", "README.md", "swarmd_engine_hivemind/p2pd.py"):
        assert pin in (package / file).read_text(encoding="utf-8")


def test_setup_reinstalls_only_changed_packages(checkout: Path) -> None:
    assert run_setup(checkout).returncode == 0
    again = run_setup(checkout)
    assert (again.returncode, again.stderr, len(asked(checkout))) == (0, "setup: nothing to do\n", 1)
    for times, name in enumerate(("pyproject.toml", "constraints.txt", "overrides.txt"), 2):
        with (checkout / name).open("a", encoding="utf-8") as file:
            file.write("# another line\n")
        assert (run_setup(checkout).returncode, len(asked(checkout))) == (0, times)
    assert (run_setup(checkout, SWARMD_PIP_ARGS="--verbose").returncode, len(asked(checkout))) == (0, 5)


def test_a_failed_installation_is_reported_and_retried(checkout: Path) -> None:
    """The installation is retried even if the files are the same as at the last successful installation."""
    assert run_setup(checkout).returncode == 0
    (checkout.parent / "fails").touch()
    failed = run_setup(checkout, SWARMD_PIP_ARGS="--verbose")
    assert failed.returncode == 1 and "the installation failed" in failed.stderr
    (checkout.parent / "fails").unlink()
    assert (run_setup(checkout).returncode, len(asked(checkout))) == (0, 3)


@pytest.mark.parametrize(
    "environment, said",
    [
        (
            {"SWARMD_PYTHON": ""},
            "setup: swarmd needs Python 3.11, 3.12 or 3.13: install one and run this again\n",
        ),
        ({"SWARMD_PYTHON": "python-of-old"}, "setup: python-of-old is not it; swarmd needs Python 3.11"),
        ({"CC": ""}, "setup: no C compiler found"),
    ],
)
def test_a_missing_python_or_compiler_gives_a_one_line_message(
    checkout: Path, bare_path: Path, environment: Mapping[str, str], said: str
) -> None:
    told = run_setup(checkout, PATH=str(bare_path), **environment)
    assert told.returncode == 1 and told.stderr.startswith(said) and told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("manager", "package"),
    [("apt-get", "libgmp-dev"), ("dnf", "gmp-devel"), ("pacman", "gmp"), ("apk", "gmp-dev"), ("", "gmp")],
)
def test_missing_headers_that_cannot_be_installed_give_a_one_line_message(
    checkout: Path, bare_path: Path, manager: str, package: str
) -> None:
    """The compiler does not find gmp.h, the user is not root, and there is no sudo."""
    for name, text in {"cc": "exit 1", "id": "echo 1000", manager: "exit 1"}.items():
        if name:
            program(bare_path / name, text)
    told = run_setup(checkout, PATH=str(bare_path), CC="")
    assert re.search(rf"\b{package}\b", told.stderr)
    assert (told.returncode, told.stderr.count("\n"), asked(checkout)) == (1, 1, []), told.stderr


def test_missing_headers_are_installed_if_possible(checkout: Path, bare_path: Path) -> None:
    """apt-get runs as root, and updates a stale package list once. Then the compiler finds gmp.h."""
    installed, listed, log = checkout.parent / "gmp", checkout.parent / "list", checkout.parent / "apt.log"
    apt = (
        f'echo "$*" >> "{log}"; case "$*" in *update) echo > "{listed}" ;; *) [ -e "{listed}" ] && echo >'
        f' "{installed}" ;; esac'
    )
    for name, text in {"cc": f'[ -e "{installed}" ]', "id": "echo 0", "apt-get": apt}.items():
        program(bare_path / name, text)
    done = run_setup(checkout, PATH=str(bare_path), CC="")
    assert done.returncode == 0, done.stderr
    first, update, second = log.read_text().splitlines()
    assert (update, first) == ("-qq update", second) and first.endswith("libgmp-dev")
    assert len(asked(checkout)) == 1


def test_a_moved_checkout_gets_a_new_environment(checkout: Path) -> None:
    assert run_setup(checkout).returncode == 0
    (checkout / ".venv" / "of-old").touch()
    moved = checkout.rename(checkout.parent / "moved")
    told = run_setup(moved)
    assert told.returncode == 0 and "this checkout was moved" in told.stderr
    assert not (moved / ".venv" / "of-old").exists()
    assert len(asked(moved)) == 2


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return {
        canonical(name): version
        for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }


def declared(project: Path) -> dict[str, set[str]]:
    """Return the packages that a pyproject.toml requires, by extra ("" for no extra)."""
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": table["dependencies"], **table.get("optional-dependencies", {})}
    return {
        extra: {canonical(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines} - {"swarmd"}
        for extra, lines in groups.items()
    }


# Packages of optional extras, which the setup does not install.
BY_CHOICE = {"trackio", "wandb", "trl", "datasets", "verifiers", "lm-eval"}


def test_constraints_pin_every_required_package() -> None:
    pinned, overridden = pins("constraints.txt"), pins("overrides.txt")
    names = set().union(*declared(ROOT).values())
    assert names - BY_CHOICE - pinned.keys() == set()
    # Also the dependencies of these packages, as installed here.
    for name in names - BY_CHOICE - {"bitsandbytes", "mkdocs-material", "ray"}:
        further = {
            canonical(re.split(r"[\[<>=!~; (]", line)[0]) for line in requires(name) or () if ";" not in line
        }
        assert further - pinned.keys() - overridden.keys() == set(), name
    assert pinned.keys() & overridden.keys() == set()  # otherwise uv would apply both
    # No local versions, because "+cpu" is for one platform only.
    assert all(re.fullmatch(r"[\w.]+", version) for version in pinned.values())
    of_torch = [name for name in pinned if name.startswith(("nvidia", "cuda", "triton"))]
    assert of_torch == ["nvidia-ml-py"]  # pure Python, and required by swarmd


# Required but not imported: a separate program, modules imported by a name in a string, and a package that
# reasoning-gym imports without requiring it.
UNSEEN = {"hivemind", "bitsandbytes", "ray", "trackio", "wandb", "python-dateutil"}
RUN = {"mypy", "ruff", "pytest-trio", "pytest-xdist", "xllamacpp"}  # programs that are run, not imported
NEWER = {"compression"}  # in the standard library since Python 3.14
OURS = {"swarmd", "p2p", "judge", "testbed", "tiny_models", "tests", "benchmarks"}
OURS |= {"swarmd_engine_vllm", "swarmd_engine_hivemind"}


def imported(folders: str) -> set[str]:
    """Return the packages, by their names in the index, that the code in these folders imports.

    Code of the peers' environments in benchmarks is left out, because it has separate requirements.
    """
    known, found = packages_distributions(), set[str]()
    for path in (
        path
        for folder in folders.split()
        for path in (ROOT / folder).rglob("*.py")
        if "benchmarks/peers" not in str(path)
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    return {canonical(known.get(name, [name])[0]) for name in found - sys.stdlib_module_names - NEWER - OURS}


@pytest.mark.parametrize(
    "project, folders, extras",
    [
        (
            ".",
            "swarmd p2p",
            ["", "bitsandbytes", "gguf", "math", "research", *(BY_CHOICE - {"datasets"})],
        ),
        (".", "judge", ["judge"]),
        (".", "testbed tiny_models tests benchmarks packaging", ["dev"]),
        ("engines/vllm", "engines/vllm", [""]),
        ("engines/hivemind", "engines/hivemind", [""]),
    ],
)
def test_imports_and_declared_dependencies_agree(project: str, folders: str, extras: list[str]) -> None:
    groups, wanted = declared(ROOT / project), imported(folders)
    of_extras = set().union(*(groups[extra] for extra in extras))
    tested = ("judge", "judge-postgres", "math", "research", "trl")
    may = of_extras.union(groups[""], *(groups[extra] for extra in tested if extras == ["dev"]))
    assert wanted - may - UNSEEN == set(), "imported but not declared"
    assert of_extras - wanted - UNSEEN - RUN == set(), "declared but not imported"
