"""Every remedy ends the problem for which it is given; the tests check each row of each table of causes.

The tests fail for a new row without an example, and for a remedy that names a command or a setting that does
not exist. They do not check the wording.
"""

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.main import get_command

from judge.cli import app as judge_app
from p2p import engines
from p2p.errors import EngineMissing
from p2p.peers.introduction import Introduced
from p2p.types import _REMEDIES, Reason
from swarmd.cli.app import app
from swarmd.config.config import NodeConfig, WhenConfig
from swarmd.daemon.diagnosis import isolation, learning
from swarmd.daemon.diagnosis.isolation import BEHIND_S, Facts, certain, why_alone
from swarmd.daemon.guest.conditions import MachineFacts, PauseConditions, out_of_budget
from swarmd.policy.models.files import model_folder
from tests import ROOT

ALONE = Facts(name="main", curriculum="sapo-9", digest="ours")
DEAD = {"address": "/ip4/192.0.2.1/tcp/4001/p2p/x", "answers": False, "says": "nothing listens"}
LIVE = {"address": "/ip4/192.0.2.2/tcp/4001/p2p/y", "answers": True, "says": "answers"}


def peer(ahead: float = 0.0, *, refuses: bool = False, doing: str = "training") -> Introduced:
    return Introduced(1, 0, "ours", "sapo-9", "swarmd 9", doing, refuses, (), ahead)


# For each row of `isolation.CAUSES`: facts that cause it, and the changed facts after its remedy.
LONELY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"connected": 1, "introduced": [peer(BEHIND_S + 60)]}, {"introduced": [peer()]}),  # the clock is set
    ({"connected": 1, "introduced": [peer(refuses=True)]}, {"introduced": [peer()]}),  # it no longer refuses
    ({"offline": True}, {"offline": False}),  # connected to a network
    ({"bootstrap": [DEAD]}, {"bootstrap": [LIVE]}),  # the peer's current address
    (
        {"bootstrap": [LIVE], "others": {"tiny-9": 3}},
        {"others": {}, "curriculum": "tiny-9"},
    ),  # with the curriculum of these peers
    (
        {"connected": 1, "helpers": 1, "others": {"an unknown curriculum": 1}},
        {"others": {}},
    ),  # with the same tasks
    ({}, {"connected": 1, "companions": 1}),  # a peer was invited
    ({"bootstrap": [LIVE]}, {"connected": 1, "companions": 1}),  # peers came
    ({"connected": 2, "companions": 1, "refused": {Reason.UNKNOWN_KIND: 1}}, {"refused": {}}),  # updated
    (
        {"connected": 1, "companions": 1, "introduced": [peer(doing="paused")]},
        {"introduced": [peer()]},  # resumed
    ),
    ({"connected": 1, "helpers": 1}, {"helpers": 0, "companions": 1}),  # peers came
    ({"connected": 2, "refused": {Reason.STALE: 3}}, {"refused": {}}),  # the clock is set
    ({"connected": 1, "companions": 1}, {"heard": True}),  # a round was shared
]


def row_of(facts: Facts) -> int | None:
    """Return the row of `isolation.CAUSES` that applies to these facts; None if there is no problem."""
    if facts.heard and certain(facts) is None:
        return None
    rows = enumerate(isolation.CAUSES)
    return next(i for i, row in rows if row.stage is not None and row.fits(facts) is not None)


def test_every_remedy_for_hearing_no_peer_ends_its_cause() -> None:
    found = []
    for state, healed in LONELY:
        facts = replace(ALONE, **state)
        found.append(row_of(facts))
        assert row_of(replace(facts, **healed)) != found[-1], state
        trouble = why_alone(facts)
        assert trouble.remedy and "{" not in trouble.cause + trouble.remedy
    rows = [i for i, cause in enumerate(isolation.CAUSES) if cause.stage is not None]
    assert sorted(found) == rows, "LONELY needs one example per row"  # type: ignore[type-var]


SEEN = learning.Lately(
    rounds=2, trained=0, skipped=0, made=16, cut=0, in_form=16, limit=0, tokens=64, rewards=3.0
)
TAUGHT_NOTHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"skipped": 2}, {"skipped": 0}),  # with a lower learning rate
    (
        {"made": 0, "tokens": 0, "in_form": 0},
        {"made": 16, "tokens": 64, "in_form": 16},
    ),  # questions are asked
    ({"tokens": 0}, {"tokens": 64}),  # with a longer context
    ({"cut": 16, "in_form": 0}, {"cut": 0, "in_form": 16}),  # with more tokens per answer
    ({"in_form": 0}, {"in_form": 16}),  # with an example of the form
    ({"rewards": 0.0}, {"rewards": 3.0}),  # with easier questions
    ({"rewards": 16.0}, {"rewards": 3.0}),  # with harder questions
    ({}, {"trained": 9}),  # with more completions
]


def test_every_remedy_for_learning_nothing_ends_its_cause() -> None:
    def row(seen: learning.Lately) -> int | None:
        return None if seen.trained else next(i for i, each in enumerate(learning.CAUSES) if each[2](seen))

    found = [row(replace(SEEN, **state)) for state, _ in TAUGHT_NOTHING]
    assert found == list(range(len(learning.CAUSES)))
    for (state, healed), before in zip(TAUGHT_NOTHING, found, strict=True):
        assert row(replace(replace(SEEN, **state), **healed)) != before


NOON = datetime(2026, 7, 1, 12).timestamp()
ALL = {"battery": "pause", "metered": "pause", "load": "50 %", "gpu": "50 %"}
CALM = MachineFacts(on_battery=False, load=0.0, metered=False, gpu=0.0)
# For each kind of pause: facts that cause it.
PAUSES: dict[str, dict[str, Any]] = {
    "battery": {"on_battery": True},
    "metered": {"metered": True},
    "load": {"load": 0.9},
    "gpu": {"gpu": 0.9},
    "hours": {},
}


def kinds() -> set[str]:
    """Return the kinds of PauseCause in the product's code."""
    return {ast.literal_eval(call.args[0]) for _, call in calls() if called(call) == "PauseCause"}


def test_every_pause_ends_with_its_cause() -> None:
    assert kinds() == {*PAUSES, "month", "user"}
    for kind, state in PAUSES.items():
        when = WhenConfig.model_validate(ALL | {"hours": ("20:00-23:00",)} if kind == "hours" else ALL)
        (cause,) = PauseConditions(when).check(replace(CALM, **state), NOON)
        assert cause.kind == kind and cause.remedy and cause.ends
        evening = NOON + 9 * 3600
        assert not [*PauseConditions(when).check(CALM, evening if kind == "hours" else NOON)]
    month = out_of_budget(10, 10, NOON)
    assert month is not None and month.until is not None and out_of_budget(11, 10, NOON) is None, (
        "a raised limit does not end the pause"
    )


def test_every_rejection_reason_is_reported_with_its_remedy() -> None:
    for reason, remedy in _REMEDIES.items():
        facts = replace(ALONE, connected=2, companions=1, refused={reason: 9})
        said = why_alone(facts)
        assert said.remedy == remedy or reason in isolation._NOT_A_CAUSE, reason


# `scripts/messages` extracts the product's texts.
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "messages"))
TREES: dict[str, ast.Module] = SCRIPT["trees"]()
written, called, is_error = SCRIPT["written"], SCRIPT["called"], SCRIPT["is_error"]
ERRORS = {*filter(is_error, SCRIPT["classes"]())}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield f"{file}:{node.lineno}", node


def texts() -> Iterator[tuple[str, str]]:
    """Yield each complete text of the product, and each docstring that users see, with its place."""
    for file, tree in TREES.items():
        shown = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in ERRORS]
        yield from ((f"{file}:{node.lineno}", ast.get_docstring(node) or "") for node in shown)
        parts = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Expr)
            for part in ast.iter_child_nodes(node)
        }
        for node in ast.walk(tree):
            text = isinstance(node, ast.JoinedStr | ast.BinOp) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            )
            if text and id(node) not in parts and " " in (said := written(node)):
                yield f"{file}:{node.lineno}", said  # type: ignore[attr-defined]


def options() -> dict[str, set[str]]:
    """Return the options of each command, such as `swarmd doctor model`."""
    found: dict[str, set[str]] = {}

    def add(name: str, command: Any) -> None:
        found[name] = {"--help", *(o for each in command.params for o in (*each.opts, *each.secondary_opts))}
        for below, more in getattr(command, "commands", {}).items():
            add(f"{name} {below}", more)

    add("swarmd", get_command(app))
    add("swarmd-judge", get_command(judge_app))
    return found


COMMANDS = options()
GROUPS = {name.rpartition(" ")[0] for name in COMMANDS}
# Options of other programs that remedies name.
OTHERS = {"--outfile", "--no-deps"}


def command_of(words: list[str]) -> str:
    """Return the longest command with which the words begin."""
    name = words[0]
    for word in words[1:]:
        if f"{name} {word}" not in COMMANDS:
            break
        name += f" {word}"
    return name


def test_a_remedy_names_only_commands_and_options_that_exist() -> None:
    unknown = []
    for place, text in texts():
        for quoted in re.findall(r"`(swarmd(?:-judge)?(?: [^`]*)?)`", text):
            words = quoted.split()
            name = command_of(words)
            rest = words[len(name.split()) :]
            unknown += [f"{place}: {quoted}"] * (name in GROUPS and bool(rest) and rest[0].isalpha())
            given = {re.split("[={]", word)[0] for word in rest if word.startswith("--")}
            unknown += [f"{place}: {quoted}: {word}" for word in given - COMMANDS[name]]
        # Modules such as `swarmd/terminal.py` serve both programs.
        known = {word for each in COMMANDS.values() for word in each}
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"`[^`]*`", "", text))):
            unknown += [f"{place}: {option}"] * (option not in known | OTHERS)
    assert not unknown, "\n".join(unknown)


FILES = {"jsonl", "gguf", "md", "json", "py", "toml", "safetensors", "jinja", "key", "log", "com", "sh", "co"}


def named_settings(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield section, key, and the value (or "") of each setting that a text names."""
    form = r"(?<![\w./{-])([a-z]+)\.([a-z_]+)(?![\w(/-])(?:(?: =| to)? ([\"'][^\"']*[\"']|\[[^\]]*\]|\d+))?"
    yield from re.findall(form, text)


def test_a_remedy_names_only_settings_and_values_that_exist() -> None:
    settings, unknown = NodeConfig().model_dump(), []
    for place, text in texts():
        for section, key, value in named_settings(re.sub(r"\{[^{}]*\}", "{}", text)):
            if key in FILES or not isinstance(settings.get(section), dict):
                continue
            if key not in settings[section]:
                unknown.append(f"{place}: {section}.{key}")
            elif value and "{}" not in value:
                given = ast.literal_eval(value)
                try:
                    given = tuple(given) if isinstance(given, list) else given
                    NodeConfig.model_validate({section: {key: given}})
                except ValueError as error:
                    unknown.append(f"{place}: {section}.{key} = {value}: {error}")
    assert not unknown, "\n".join(unknown)


# Functions whose remedies name a setting that the function does not read, and why this is right.
ALWAYS = {
    "swarmd/policy/models/device.py:": "the caller found the part that needs the change",
    "swarmd/daemon/diagnosis/": "tables, which the tests above check",
    "swarmd/cli/": "examples",
    "p2p/peers/mdns.py:run": "runs only if the setting is on",
    "swarmd/policy/models/fit.py:_alternatives": "tries each change",
    "swarmd/policy/models/lora.py:require_nf4": "called only for nf4",
    "swarmd/policy/training/learner.py:step": "reported only if there is no adapter",
    "swarmd/policy/training/optimizer.py:_adam": "called only for adamw8bit",
}


def test_a_remedy_sets_a_setting_only_if_the_code_reads_that_setting() -> None:
    """Otherwise a user who has already chosen this setting could get a remedy that does not help."""
    blind = []
    for file, tree in TREES.items():
        functions = [
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for function in functions:
            names = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
            names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            names |= {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)} | {function.name}
            said = [written(n) for n in ast.walk(function) if isinstance(n, ast.JoinedStr | ast.Constant)]
            for section, key, value in (each for text in said for each in named_settings(text)):
                known = isinstance(NodeConfig().model_dump().get(section), dict)
                seen = any(key.split("_")[0] in name.lower() for name in names)
                place = f"{file}:{function.name}"
                if known and value and not seen and not place.startswith(tuple(ALWAYS)):
                    blind.append(f"{place}: {section}.{key} = {value}")
    assert not blind, "\n".join(blind)


@pytest.mark.parametrize("name", ["libp2p", "another"])
def test_the_remedy_for_a_broken_engine_names_another_engine_if_there_is_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {name: EntryPoint(name, "no_such_module:Engine", engines.GROUP)}
    monkeypatch.setattr(engines, "offered", lambda: broken)
    if name in engines.BUILT_IN:
        monkeypatch.setattr(engines, "BUILT_IN", broken)
    with pytest.raises(EngineMissing, match="Reinstall its package") as found:
        engines.engine(name)
    assert ("set swarm.engine" in str(found.value)) == (name != "libp2p")


def test_the_remedy_for_a_damaged_file_in_the_hub_cache_is_to_remove_it(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--small" / "snapshots" / "c0ffee"
    assert model_folder.again(cached) == f"Remove {tmp_path / 'models--owner--small'} and start again"
    assert model_folder.again(tmp_path / "a folder") == "Download the model again"


def test_a_remedy_names_only_extras_packages_variables_and_files_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {path.parent.name for path in ROOT.glob("engines/*/pyproject.toml")}
    hub = Path(constants.__file__).read_text()
    wanted = [
        (place, call.args[0].value)
        for place, call in calls()
        if ast.unparse(call.func).endswith("command_for") and isinstance(call.args[0], ast.Constant)
    ]
    unknown = [
        f"{place}: {extra}" for place, extra in wanted if extra not in project["optional-dependencies"]
    ]
    for place, text in texts():
        for extra in re.findall(r"swarmd\[([a-z-]+)\]", text):
            unknown += [f"{place}: {extra}"] * (extra not in project["optional-dependencies"])
        for engine in re.findall(r"swarmd-engine-([a-z]+)", text):
            unknown += [f"{place}: {engine}"] * (engine not in packages)
        for variable in re.findall(r"\bHF_[A-Z_]+", text):
            unknown += [f"{place}: {variable}"] * (variable not in hub)
        for file in re.findall(r"(?:docs|packaging|scripts)/[\w/-]+\.(?:md|sh)", text):
            unknown += [f"{place}: {file}"] * (not (ROOT / file).exists())
    assert wanted and not unknown, "\n".join(unknown)


# Errors that need no remedy, each with the reason.
PLAIN = {
    "LabFailed": "about programs that the lab starts; the message names their logs, or includes each run's",
    "EngineFailed": "see `engine.checked`",
    "BadExperiment": "names a mistake in a file and its place",
    "BadResults": "names a file of results that cannot be written, with the system's reason",
    "NoQuestion": "occurs only while the judge stops",
}


def handed_on(cause: str) -> bool:
    """Return whether a message ends with the message of another part, which has its own remedy."""
    return cause.endswith(("}", "}.")) and (cause.startswith("{") or ": {" in cause or "; {" in cause)


def test_each_message_that_ends_a_program_has_a_remedy() -> None:
    silent = [
        f"{each.place}: {each.cause}"
        for each in SCRIPT["messages"]()
        if not each.remedy and not handed_on(each.cause) and each.name not in PLAIN
    ]
    assert not silent, "\n".join(silent)


def test_numbers_with_a_unit_have_thousands_separators() -> None:
    form = re.compile(r"\{([^{}:]+)(:[^{}]*)?\} (bytes|tokens|characters|MB)\b")
    bare = [
        f"{each.place}: {found[0]}"
        for each in SCRIPT["messages"]()
        for found in form.finditer(f"{each.cause} {each.remedy}")
        if "," not in (found[2] or "")
    ]
    assert not bare, "\n".join(bare)
