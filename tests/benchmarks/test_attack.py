"""Every attack is known to `benchmarks.attack`, and says what came of it."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import attack

FOLDER = Path(__file__).parents[1] / "attacks"
VARIANTS = {"sybil_offers"}  # of another, and played with it


def test_every_attack_is_known() -> None:
    there = {path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py")}
    assert there - VARIANTS == set(attack.NAMES)


@pytest.mark.parametrize("name", attack.NAMES)
def test_every_attack_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(import_module(f"tests.attacks.test_{name}").figures)
    with pytest.raises(SystemExit) as ended:
        attack.main([name, "--help"])
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["replayer"], ["eclipse", "--restarts", "5", "--calm", "2"], ["forger", "--connections", "3"]])
def test_the_last_line_is_one_object(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    attack.main([argv[0], "--json", *argv[1:]])
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["schema"] == 1 and found["work"] == {"attack": argv[0], "options": argv[1:]}
    assert found["figures"] and all(value is not None for value in found["figures"].values())


def test_an_attack_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        attack.main(["gnome"])
    assert ended.value.code == 2 and "poisoner" in capsys.readouterr().err
