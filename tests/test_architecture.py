"""The import arrows of DESIGN and ARCHITECTURE.md, as a test. Change a table in review, never in passing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarmd", "p2p", "judge")
FILES = [f for p in PACKAGES for f in sorted((ROOT / p).rglob("*.py"))]
PLUGINS = sorted((ROOT / "engines").rglob("*.py"))  # packages of their own

# Between the packages. The empty prefix is the whole package.
ALLOWED_ACROSS = {
    ("swarmd", "p2p"): [""],
    ("judge", "p2p"): ["p2p.identity", "p2p.errors", "p2p.types"],
    ("judge", "swarmd"): ["swarmd.tasks", "swarmd.types", "swarmd.errors"],
}

# Inside swarmd, lowest first: a module may import from lower lines only, or from its own folder.
LAYERS = [
    "errors types addresses mistakes",
    "seams config state_folder roster",
    "tasks experience telemetry",
    "workers",
    "exchange policy control judging checkpoint view",
    "round link view_live journal snapshot choices crew",
    "watchdog",
    "node status evaluation supervision membership network_doctor judge_records",
    "isolation",
    "network_survey",
    "lookout",
    "daemon bootstrap",
    "lab",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer.split()}

PURE = ["swarmd/types.py", "swarmd/exchange/wire.py", "swarmd/round.py", "p2p/envelope.py", "p2p/inbox.py", "p2p/topic.py"]
PURE += ["swarmd/roster.py", "swarmd/isolation.py", "p2p/twins.py", "swarmd/watchdog.py"]
PURE += ["swarmd/network_doctor.py", "p2p/netgroup.py", "p2p/addresstable.py", "p2p/addressfile.py", "p2p/outbound.py", "p2p/shards.py"]
PURE += ["p2p/toll.py", "p2p/doorstep.py", "p2p/reputation.py", "p2p/fairqueue.py", "p2p/holders.py", "p2p/unexplained.py"]
PURE += [str(f.relative_to(ROOT)) for f in (ROOT / "swarmd" / "experience").glob("*.py")]
IMPURE = {"asyncio", "datetime", "httpx2", "io", "os", "pathlib", "secrets", "socket", "subprocess", "threading", "time", "trio"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{a.name}" for a in node.names)
    return names


def place(path: Path) -> str:
    """`swarmd/exchange/wire.py` -> "exchange", `swarmd/cli_task.py` -> "cli"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "cli" if parts[1].startswith("cli") else parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_arrows(path: Path) -> None:
    here = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        there = name.split(".")[0]
        if there not in PACKAGES:
            continue
        if there != here:
            allowed = ALLOWED_ACROSS.get((here, there))
            assert allowed is not None, f"{here} must not import {name}"
            assert any(not prefix or name.startswith(prefix) for prefix in allowed), f"{here} must not import {name}"
        elif here == "swarmd" and path.name != "__init__.py":
            target = name.split(".")[1]
            assert place(path) in RANK, f"{path}: give it a place in LAYERS"
            if target in RANK and target != place(path):
                assert RANK[target] < RANK[place(path)], f"swarmd.{place(path)} reaches up or sideways to {name}"


@pytest.mark.parametrize("name", PURE)
def test_pure_files_do_no_io(name: str) -> None:
    assert not {n.split(".")[0] for n in imported(ROOT / name)} & (IMPURE | {"torch"}), name


def test_losses_are_pure() -> None:
    assert not {n.split(".")[0] for n in imported(ROOT / "swarmd/policy/losses.py")} & IMPURE


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_policy_imports_torch(path: Path) -> None:
    if "policy" not in path.parts:
        assert not {n.split(".")[0] for n in imported(path)} & {"torch", "transformers", "peft", "safetensors"}, path


@pytest.mark.parametrize(
    "modules, banned",
    [
        ("swarmd.tasks.scoring, swarmd.tasks.source, swarmd.tasks.curriculum", ["torch", "matplotlib"]),
        ("swarmd.node", ["peft", "matplotlib", "libp2p"]),
        ("p2p.member, p2p.identity, p2p.inbox, p2p.engines.memory", ["torch", "libp2p"]),
        ("judge.app, judge.cli", ["torch", "libp2p"]),
        ("swarmd.daemon, swarmd.control, swarmd.judging", ["torch", "transformers"]),
        ("swarmd.bootstrap, swarmd.network_survey, swarmd.cli", ["torch", "transformers", "libp2p", "reasoning_gym"]),
        ("swarmd.cli", ["torch", "libp2p", "reasoning_gym", "transformers"]),
    ],
)
def test_what_an_import_loads(modules: str, banned: list[str]) -> None:
    program = f"import sys, {modules}; print(' '.join(m for m in {banned} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "", f"{modules} loads {done.stdout}"


@pytest.mark.parametrize("path", PLUGINS, ids=lambda p: str(p.relative_to(ROOT)))
def test_an_engine_of_its_own_package_knows_the_seam_alone(path: Path) -> None:
    ours = {name for name in imported(path) if name.split(".")[0] in PACKAGES}
    assert all(name.startswith(("swarmd.policy.engine.", "swarmd.errors.")) for name in ours), ours


@pytest.mark.parametrize("path", [*FILES, *PLUGINS], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_evaluated_or_unpickled(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in {"eval", "exec", "torch.load"} and not name.startswith("pickle."), f"{path}:{node.lineno}: {name}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{path}: trust_remote_code"
