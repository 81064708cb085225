"""The import rules of ARCHITECTURE.md. Change their tables only on purpose, and have the change reviewed."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

PACKAGES = ("swarmd", "p2p", "judge")

# For each pair (importing package, imported package): prefixes of modules that may be imported. The empty
# prefix allows the whole package.
ALLOWED_ACROSS = {
    ("swarmd", "p2p"): [""],
    ("judge", "p2p"): [
        f"p2p.{name}"
        for name in (
            "durable",
            "errors",
            "identity",
            "latest",
            "netgroup",
            "peers.noise_probe",
            "rate_limit",
            "types",
        )
    ],
    ("judge", "swarmd"): [
        "swarmd.tasks",
        "swarmd.types",
        "swarmd.errors",
        "swarmd.state.logs",
        "swarmd.terminal",
        "swarmd.config.invitation",
        "swarmd.config.schema",
        "swarmd.config.addresses",
    ],
}

# Further modules that one module may import: it runs in the contained process that evaluates uploaded
# weights. The judge starts this process with `python -m` and never imports the module.
ALLOWED_HERE = {
    "judge/verified/worker.py": [
        "swarmd.policy.language_policy.",
        "swarmd.policy.models.device.",
        "swarmd.config.config.",
    ]
}

# The layers of each package, lowest first. A room is a module or folder at the top level of a package, and
# may only import rooms of lower layers.
LAYERS = {
    "swarmd": [
        "errors types terminal",
        "config state",
        "protocols",
        "tasks experience system",
        "exchange policy",
        "link",
        "trainer",
        "daemon",
        "lab library",
        "cli",
        "__main__",
        "__init__ trl",
    ],
    "p2p": [
        "latest",
        "errors topic durable rate_limit",
        "types sequence",
        "identity",
        "address envelope",
        "netgroup blobs",
        "peers",
        "admission",
        "engines",
        "member",
    ],
    "judge": [
        "errors types",
        "config",
        "logs figures",
        "store",
        "verified",
        "evaluation",
        "api",
        "pages",
        "app",
        "server",
        "cli",
        "__main__",
    ],
}

# Tables of allowed values: the configuration may import these although they are in higher layers.
TABLES = ("swarmd.experience.strategies.", "swarmd.policy.training.losses.")

PURE = """
    swarmd/types.py swarmd/state/status.py swarmd/experience/*.py
    swarmd/exchange/wire.py swarmd/exchange/serving.py
    swarmd/exchange/events.py swarmd/exchange/fetching.py swarmd/exchange/market.py
    swarmd/exchange/exchange.py swarmd/exchange/pacing.py swarmd/exchange/offers.py
    swarmd/exchange/virtual.py
    swarmd/trainer/round.py swarmd/daemon/local_api/status_words.py swarmd/daemon/local_api/roster.py
    swarmd/daemon/diagnosis/isolation.py swarmd/daemon/diagnosis/reachability_report.py
    swarmd/daemon/page/access.py swarmd/daemon/page/prometheus.py swarmd/daemon/page/rendering.py
    swarmd/daemon/supervision/watchdog.py
    swarmd/config/amounts.py
    judge/types.py judge/figures/*.py judge/evaluation/sessions.py judge/evaluation/receipts.py
    judge/api/signing.py judge/verified/weights_check.py judge/verified/messages.py
    p2p/topic.py p2p/envelope.py p2p/netgroup.py p2p/rate_limit.py p2p/latest.py
    p2p/admission/inbox.py p2p/admission/reputation.py p2p/admission/fair_queue.py p2p/admission/host_bans.py
    p2p/admission/inbound_slots.py p2p/admission/dials.py
    p2p/peers/buckets.py p2p/peers/addressbook.py p2p/peers/outbound.py p2p/peers/twins.py
    p2p/blobs/blobs.py engines/hivemind/swarmd_engine_hivemind/unexplained_bytes.py
"""
IO = {
    "asyncio",
    "datetime",
    "httpx2",
    "io",
    "os",
    "pathlib",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "trio",
}
MODELS = {"torch", "transformers", "peft", "safetensors"}

LONGEST = 300  # most statements per file; a longer file should probably be split
ROOMS = 14  # most modules and folders per folder, without __init__ and __main__
# Folders with another limit than ROOMS.
MOST_ROOMS = {
    "swarmd": 18,
    "p2p": 16,
    "swarmd/policy": 9,
    "p2p/engines": 6,
}

# Number of public functions and fields per module that still use a `dict[str, Any]`: settings, model files,
# requests, the survey of `doctor network`, results of the lab, lines of metrics.jsonl. Do not add to this
# list: status, metrics and events are structs.
LOOSE = {
    "swarmd/cli/replay_plan.py": 1,
    "swarmd/cli/settings.py": 4,
    "swarmd/config/invitation.py": 1,
    "swarmd/config/profiles.py": 1,
    "swarmd/config/schema.py": 2,
    "swarmd/config/sources.py": 3,
    "swarmd/daemon/diagnosis/isolation.py": 3,
    "swarmd/daemon/diagnosis/reachability_report.py": 2,
    "swarmd/daemon/diagnosis/reachability_survey.py": 4,
    "swarmd/daemon/guest/guest.py": 4,
    "swarmd/daemon/inviting.py": 1,
    "swarmd/daemon/judging/client.py": 1,
    "swarmd/daemon/judging/judging.py": 1,
    "swarmd/daemon/judging/reader.py": 3,
    "swarmd/daemon/local_api/control.py": 2,
    "swarmd/daemon/page/comparison.py": 2,
    "swarmd/daemon/page/opening.py": 2,
    "swarmd/daemon/tracking.py": 1,
    "swarmd/lab/figures.py": 1,
    "swarmd/lab/experiment.py": 1,
    "swarmd/lab/judged.py": 1,
    "swarmd/lab/play.py": 4,
    "swarmd/lab/results.py": 1,
    "swarmd/lab/statistics.py": 3,
    "swarmd/lab/torch_node.py": 1,
    "swarmd/library/joined_swarm.py": 1,
    "swarmd/policy/export.py": 1,
    "swarmd/policy/models/architecture.py": 1,
    "swarmd/policy/models/doctor.py": 2,
    "swarmd/policy/models/files/model_folder.py": 1,
    "swarmd/state/folder.py": 1,
    "swarmd/tasks/curriculum.py": 1,
    "swarmd/tasks/scoring/grading.py": 1,
    "swarmd/tasks/held_out.py": 2,
    "swarmd/trainer/trial.py": 1,
    "swarmd/types.py": 1,
}


@cache
def files(*folders: str) -> Mapping[str, ast.Module]:
    """Return each module in these folders, by its path from the root."""
    found = [
        file
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "build" not in file.parts
    ]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in found}


def ours() -> Mapping[str, ast.Module]:
    return files(*PACKAGES)


def plugins() -> Mapping[str, ast.Module]:
    """Return the modules of the engines, which are separate packages."""
    return files("engines")


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{name.name}" for name in node.names)


def tops(tree: ast.Module) -> set[str]:
    return {name.split(".")[0] for name in imported(tree)}


def none(faults: Iterable[str]) -> None:
    found = list(faults)
    assert not found, "\n".join(found)


def test_imports_follow_the_rules() -> None:
    rank = {
        (package, room): rank
        for package, layers in LAYERS.items()
        for rank, layer in enumerate(layers)
        for room in layer.split()
    }

    def faults() -> Iterator[str]:
        for path, tree in ours().items():
            here, *rest = Path(path).with_suffix("").parts
            for name in imported(tree):
                there, *inner = name.split(".")
                if there == "":
                    yield f"{path}: relative import"
                elif there in PACKAGES and there != here:
                    allowed = [*ALLOWED_ACROSS.get((here, there), ()), *ALLOWED_HERE.get(path, ())]
                    if not any(name.startswith(prefix) for prefix in allowed):
                        yield f"{path}: {here} must not import {name}"
                elif there == here and here in LAYERS and inner[0] != rest[0]:
                    if (here, rest[0]) not in rank or (here, inner[0]) not in rank:
                        yield f"{path}: add {rest[0]} and {inner[0]} to LAYERS"
                    elif rank[here, inner[0]] >= rank[here, rest[0]] and not (
                        rest[0] == "config" and name.startswith(TABLES)
                    ):
                        yield f"{path}: {here}.{rest[0]} must not import {name}, which is in no lower layer"

    none(faults())


def test_no_module_imports_a_module_with_special_permissions() -> None:
    alone = {path.removesuffix(".py").replace("/", ".") for path in ALLOWED_HERE}
    none(
        f"{path} imports {name}"
        for path, tree in ours().items()
        for name in imported(tree)
        if name.startswith(tuple(alone))
    )


def test_imports_have_no_cycles() -> None:
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, tree in ours().items()
    }
    arrows = {
        name: {
            there
            for n in imported(tree)
            if (there := n if n in modules else n.rpartition(".")[0]) in modules and there != name
        }
        for name, tree in modules.items()
    }
    while leaves := {name for name, there in arrows.items() if not there & arrows.keys()}:
        arrows = {name: there for name, there in arrows.items() if name not in leaves}
    none(f"{name} -> {', '.join(sorted(there & arrows.keys()))}" for name, there in arrows.items())


def test_pure_modules_do_no_io() -> None:
    pure = {str(file.relative_to(ROOT)) for pattern in PURE.split() for file in (ROOT).glob(pattern)}
    assert all(any((ROOT).glob(pattern)) for pattern in PURE.split()), "PURE names a file that does not exist"
    none(
        f"{path} imports {found}"
        for path in sorted(pure)
        if (found := tops((ours() | plugins())[path]) & (IO | {"torch"}))
    )
    # losses.py uses torch's types, so it is not in PURE; it must not do I/O either.
    assert not tops(ours()["swarmd/policy/training/losses.py"]) & IO


def test_only_the_policy_imports_torch() -> None:
    none(
        f"{path} imports {found}"
        for path, tree in ours().items()
        if "/policy/" not in path and path != "swarmd/trl.py" and (found := tops(tree) & MODELS)
    )


@pytest.mark.parametrize(
    "modules, banned",
    [
        ("swarmd.tasks.sandbox.verifier, swarmd.tasks.source, swarmd.tasks.curriculum", "torch matplotlib"),
        # The verifier starts before these modules are loaded.
        ("swarmd.trainer.__main__, swarmd.tasks.sandbox.client", "torch transformers reasoning_gym"),
        ("swarmd.trainer.trainer", "peft matplotlib libp2p"),
        (
            "p2p.member, p2p.engines, p2p.peers.addressbook, p2p.engines.memory",
            "torch libp2p hivemind swarmd",
        ),
        ("judge.app, judge.cli, judge.server", "torch libp2p hivemind trio"),
        ("swarmd.daemon.judging.client", "torch libp2p hivemind reasoning_gym fastapi"),
        ("swarmd.policy.models.doctor", "transformers"),
        ("p2p.engines.network_engine", "libp2p"),  # packages of other engines import it
        (
            "swarmd, swarmd.daemon.daemon, swarmd.library.joined_swarm,"
            " swarmd.daemon.local_api.control, swarmd.config.config",
            "torch transformers",
        ),
        (
            "swarmd.daemon.bootstrap, swarmd.daemon.diagnosis.reachability_survey, swarmd.cli.app",
            "torch transformers libp2p reasoning_gym",
        ),
    ],
)
def test_importing_modules_does_not_load_large_packages(modules: str, banned: str) -> None:
    program = f"import sys, {modules}; print(' '.join(m for m in {banned.split()} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "", f"{modules} loads {done.stdout}"


def test_an_engine_in_a_separate_package_imports_only_the_interface() -> None:
    interfaces = {
        "swarmd.engines": ("swarmd.policy.inference.engine.", "swarmd.errors."),
        "swarmd.p2p_engines": ("p2p.",),
    }
    allowed = {
        project.parent.name: interfaces[group]
        for project in (ROOT / "engines").glob("*/pyproject.toml")
        for group in tomllib.loads(project.read_text())["project"]["entry-points"]
    }
    none(
        f"{path} imports {name}"
        for path, tree in plugins().items()
        for name in imported(tree)
        if name.split(".")[0] in PACKAGES and not name.startswith(allowed[path.split("/")[1]])
    )


def test_no_code_evaluates_strings_or_unpickles_data() -> None:
    def faults() -> Iterator[str]:
        for path, tree in (ours() | plugins()).items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    if name in {"eval", "exec", "torch.load"} or name.startswith("pickle."):
                        yield f"{path}:{node.lineno}: {name}"
                if (
                    isinstance(node, ast.keyword)
                    and node.arg == "trust_remote_code"
                    and ast.unparse(node.value) != "False"
                ):
                    yield f"{path}: trust_remote_code"

    none(faults())


def test_folders_and_files_stay_small() -> None:
    def rooms(folder: str) -> int:
        entries = [
            p for p in (ROOT / folder).iterdir() if (p.is_dir() and any(p.rglob("*.py"))) or p.suffix == ".py"
        ]
        return sum(p.name not in {"__init__.py", "__main__.py", "__pycache__"} for p in entries)

    folders = {str(parent) for path in ours() | files("benchmarks") for parent in Path(path).parents} - {"."}
    none(
        f"{folder} has {found} modules and folders"
        for folder in sorted(folders)
        if (found := rooms(folder)) > MOST_ROOMS.get(folder, ROOMS)
    )
    lengths = {
        path: sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) for path, tree in ours().items()
    }
    none(f"{path} has {count} statements" for path, count in lengths.items() if count > LONGEST)


def test_tests_and_benchmarks_do_not_import_each_other() -> None:
    """Both may import the testbed. tests/benchmarks tests the benchmarks, so it may import them."""
    banned = {
        "benchmarks": {"tests"},
        "testbed": {"benchmarks", "tests", "tiny_models"},
        "tiny_models": {"benchmarks", "tests"},
        "tests": {"benchmarks"},
    }
    none(
        f"{path} imports {found}"
        for folder, those in banned.items()
        for path, tree in files(folder).items()
        if not path.startswith("tests/benchmarks/") and (found := tops(tree) & those)
    )


def public(body: Iterable[ast.stmt]) -> Iterator[ast.expr | None]:
    """Yield the annotations of public functions, methods and fields, and public type aliases."""
    for node in body:
        match node:
            case ast.ClassDef(name=name) if name[0] != "_":
                yield from public(node.body)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                name[0] != "_" or name == "__init__"
            ):
                given = node.args
                yield from (each.annotation for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))
                yield node.returns
            case ast.AnnAssign(target=ast.Name(id=name)) if name[0] != "_":
                yield node.annotation
            case ast.Assign(targets=[ast.Name(id=name)]) if name[0] != "_":
                yield node.value


def test_public_functions_and_fields_use_no_unlisted_untyped_mapping() -> None:
    loose = re.compile(r"\b(?:dict|Mapping)\[str, (?:Any|object)\]")
    found = {
        path: count
        for path, tree in ours().items()
        if path.startswith("swarmd/")
        if (count := sum(bool(each and loose.search(ast.unparse(each))) for each in public(tree.body)))
    }
    none(
        f"{path}: {found.get(path, 0)} untyped mappings, not {LOOSE.get(path, 0)}: "
        + ("make them structs" if found.get(path, 0) > LOOSE.get(path, 0) else "shorten LOOSE")
        for path in sorted({*found, *LOOSE})
        if found.get(path, 0) != LOOSE.get(path, 0)
    )


def test_no_two_classes_have_the_same_name() -> None:
    names = Counter(
        node.name
        for tree in ours().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        if node.name[0] != "_"
    )
    none(f"{count} classes are called {name}" for name, count in names.items() if count > 1)


def test_documents_and_comments_name_existing_files() -> None:
    folders = (*PACKAGES, "engines", "testbed", "tiny_models", "benchmarks", "tests", "docs", "packaging")
    there = [f"/{file.relative_to(ROOT)}" for folder in folders for file in (ROOT / folder).rglob("*.py")]
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / path for path in ours())]
    none(
        f"{document.relative_to(ROOT)} names {named}"
        for document in documents
        if document.name != "CHANGELOG.md"  # which describes the past
        for named in re.findall(r"(?<![\w/.-])(?:[\w-]+/)+[\w-]+\.py\b", document.read_text())
        if named != "tests/attacks/test_NAME.py" and not any(path.endswith(f"/{named}") for path in there)
    )


def test_commands_in_documents_name_existing_modules() -> None:
    folders = ("benchmarks", "testbed", "tiny_models", "tests")
    told = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / path for path in files(*folders))]
    none(
        f"{document.relative_to(ROOT)} runs {module}"
        for document in told
        if document.name != "CHANGELOG.md"
        for module in re.findall(r"python -m ([\w.{]*\w)", document.read_text())
        if module.startswith(folders) and "{" not in module
        for place in [ROOT / module.replace(".", "/")]
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists()
    )


def test_links_lead_to_existing_files_and_headings() -> None:
    others = {".venv", "build", "node_modules"}
    documents = [path for path in ROOT.rglob("*.md") if not others & {*path.relative_to(ROOT).parts}]
    none(
        f"{document.relative_to(ROOT)} links to {path}#{heading}"
        for document in documents
        for path, heading in [
            *re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", document.read_text()),
            *re.findall(r'<(?:img|source)\b[^>]*?\bsrc(?:set)?="([^"#]*)(#?)"', document.read_text()),
        ]
        for target in [document.parent / path if path else document]
        if not target.exists() or (heading and heading not in headings(target))
    )


def headings(document: Path) -> set[str]:
    """Return a document's headings in the form that links use."""
    without_code = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}
