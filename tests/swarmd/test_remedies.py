"""Every remedy applies to the state that brings it: each table of causes is walked, row by row.

A new row without a state fails here, and so does a remedy that names a command or a setting that does not
exist. What the words are is not looked at.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from typer.main import get_command

from p2p.peers.introduction import Introduced
from p2p.types import _REMEDIES, Reason
from swarmd.cli.app import app
from swarmd.config.config import NodeConfig, WhenConfig
from swarmd.daemon.diagnosis import isolation, learning
from swarmd.daemon.diagnosis.isolation import BEHIND_S, Facts, certain, why_alone
from swarmd.daemon.guest.conditions import MachineFacts, PauseConditions, out_of_budget
from tests import ROOT

ALONE = Facts(name="main", curriculum="sapo-9", digest="ours")
DEAD = {"address": "/ip4/192.0.2.1/tcp/4001/p2p/x", "answers": False, "says": "nothing listens"}
LIVE = {"address": "/ip4/192.0.2.2/tcp/4001/p2p/y", "answers": True, "says": "answers"}


def peer(ahead: float = 0.0, *, refuses: bool = False, doing: str = "training") -> Introduced:
    return Introduced(1, 0, "ours", "sapo-9", "swarmd 9", doing, refuses, (), ahead)


# What brings each row of `isolation.CAUSES`, and what is otherwise once its remedy was followed.
LONELY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"connected": 1, "introduced": [peer(BEHIND_S + 60)]}, {"introduced": [peer()]}),  # the clock is set
    ({"connected": 1, "introduced": [peer(refuses=True)]}, {"introduced": [peer()]}),  # it is forgotten
    ({"offline": True}, {"offline": False}),  # connected to a network
    ({"bootstrap": [DEAD]}, {"bootstrap": [LIVE]}),  # its address as it is now
    (
        {"bootstrap": [LIVE], "others": {"tiny-9": 3}},
        {"others": {}, "curriculum": "tiny-9"},
    ),  # trains with them
    (
        {"connected": 1, "helpers": 1, "others": {"an unknown curriculum": 1}},
        {"others": {}},
    ),  # the same tasks
    ({}, {"connected": 1, "companions": 1}),  # somebody was invited
    ({"bootstrap": [LIVE]}, {"connected": 1, "companions": 1}),  # others came
    ({"connected": 2, "companions": 1, "refused": {Reason.UNKNOWN_KIND: 1}}, {"refused": {}}),  # updated
    (
        {"connected": 1, "companions": 1, "introduced": [peer(doing="paused")]},
        {"introduced": [peer()]},  # resumed
    ),
    ({"connected": 1, "helpers": 1}, {"helpers": 0, "companions": 1}),  # others came
    ({"connected": 2, "refused": {Reason.STALE: 3}}, {"refused": {}}),  # the clock is set
    ({"connected": 1, "companions": 1}, {"heard": True}),  # a round was shared
]


def row_of(facts: Facts) -> int | None:
    """Return the row of `isolation.CAUSES` that is told of these facts; None: no trouble."""
    if facts.heard and certain(facts) is None:
        return None
    rows = enumerate(isolation.CAUSES)
    return next(i for i, row in rows if row.stage is not None and row.fits(facts) is not None)


def test_every_cause_of_hearing_nobody_ends_when_its_remedy_is_followed() -> None:
    found = []
    for state, healed in LONELY:
        facts = replace(ALONE, **state)
        found.append(row_of(facts))
        assert row_of(replace(facts, **healed)) != found[-1], state
        trouble = why_alone(facts)
        assert trouble.remedy and "{" not in trouble.cause + trouble.remedy
    rows = [i for i, cause in enumerate(isolation.CAUSES) if cause.stage is not None]
    assert sorted(found) == rows, "each row has one state here"  # type: ignore[type-var]


SEEN = learning.Lately(rounds=2, trained=0, skipped=0, made=16, cut=0, in_form=16, tokens=64, rewards=3.0)
TAUGHT_NOTHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"skipped": 2}, {"skipped": 0}),  # a lower rate
    (
        {"made": 0, "tokens": 0, "in_form": 0},
        {"made": 16, "tokens": 64, "in_form": 16},
    ),  # questions are asked
    ({"tokens": 0}, {"tokens": 64}),  # a longer context
    ({"cut": 16, "in_form": 0}, {"cut": 0, "in_form": 16}),  # more room
    ({"in_form": 0}, {"in_form": 16}),  # the form was shown
    ({"rewards": 0.0}, {"rewards": 3.0}),  # easier questions
    ({"rewards": 16.0}, {"rewards": 3.0}),  # harder questions
    ({}, {"trained": 9}),  # more completions
]


def test_every_cause_of_learning_nothing_ends_when_its_remedy_is_followed() -> None:
    def row(seen: learning.Lately) -> int | None:
        return None if seen.trained else next(i for i, each in enumerate(learning.CAUSES) if each[2](seen))

    found = [row(replace(SEEN, **state)) for state, _ in TAUGHT_NOTHING]
    assert found == list(range(len(learning.CAUSES)))
    for (state, healed), before in zip(TAUGHT_NOTHING, found, strict=True):
        assert row(replace(replace(SEEN, **state), **healed)) != before


NOON = datetime(2026, 7, 1, 12).timestamp()
ALL = {"battery": "pause", "metered": "pause", "load": "50 %", "gpu": "50 %"}
CALM = MachineFacts(on_battery=False, load=0.0, metered=False, gpu=0.0)
# What brings each pause, by its kind.
PAUSES: dict[str, dict[str, Any]] = {
    "battery": {"on_battery": True},
    "metered": {"metered": True},
    "load": {"load": 0.9},
    "gpu": {"gpu": 0.9},
    "hours": {},
}


def kinds() -> set[str]:
    """Return the kinds of PauseCause that the code makes."""
    calls = (
        node
        for path in (ROOT / "swarmd" / "daemon" / "guest").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "PauseCause"
    )
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_every_pause_has_a_state_and_ends_with_it() -> None:
    assert kinds() == {*PAUSES, "month", "user"}
    for kind, state in PAUSES.items():
        when = WhenConfig.model_validate(ALL | {"hours": ("20:00-23:00",)} if kind == "hours" else ALL)
        (cause,) = PauseConditions(when).check(replace(CALM, **state), NOON)
        assert cause.kind == kind and cause.remedy and cause.ends
        evening = NOON + 9 * 3600
        assert not PauseConditions(when).check(CALM, evening if kind == "hours" else NOON)
    month = out_of_budget(10, 10, NOON)
    assert month is not None and month.until is not None and out_of_budget(11, 10, NOON) is None, "raised"


def test_every_reason_with_a_remedy_is_told_with_it() -> None:
    for reason, remedy in _REMEDIES.items():
        facts = replace(ALONE, connected=2, companions=1, refused={reason: 9})
        said = why_alone(facts)
        assert said.remedy == remedy or reason in isolation._NOT_A_CAUSE, reason


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text of the product that is no docstring, with its file."""
    for folder in ("swarmd", "p2p", "judge"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                    yield str(path.relative_to(ROOT)), node.value


def commands() -> set[str]:
    found = set()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        found |= {name, *(f"{name} {below}" for below in getattr(command, "commands", {}))}
    return found


def test_a_remedy_names_only_commands_and_settings_that_exist() -> None:
    known, unknown = commands(), []
    settings = NodeConfig().model_dump()
    for file, text in texts():
        for name, below in re.findall(r"`swarmd ([a-z-]+)(?: ([a-z-]+))?", text):
            grouped = any(each.startswith(f"{name} ") for each in known)
            if name not in known or (grouped and below and f"{name} {below}" not in known):
                unknown.append(f"{file}: swarmd {name} {below}")
        if file.startswith("judge"):
            continue
        for section, key in re.findall(r"(?<![\w./-])([a-z]+)\.([a-z_]+)(?![\w./(-])", text):
            is_file = key in {"jsonl", "gguf", "md", "json", "py", "toml", "safetensors"}
            is_key = " " in text and not is_file
            if is_key and isinstance(settings.get(section), dict) and key not in settings[section]:
                unknown.append(f"{file}: {section}.{key}")
    assert not unknown, "\n".join(unknown)
