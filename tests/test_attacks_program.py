"""`python -m tests.attacks` knows every attack and writes results for other programs."""

import json
from pathlib import Path

import pytest

from tests.attacks import __main__ as attack
from tests.attacks.harness import Attack

FOLDER = Path(__file__).parent / "attacks"
VARIANTS = {"sybil_offers"}  # variants of another attack, which runs them
TESTS_ALONE = {"limits", "model_folder"}  # test cases without measured values


def test_the_program_knows_every_attack() -> None:
    there = {path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py")}
    assert there - VARIANTS - TESTS_ALONE == {name.replace("-", "_") for name in attack.NAMES}


@pytest.mark.parametrize("name", attack.NAMES)
def test_every_attack_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        attack.main([name, "--help"])
    assert left.value.code == 0 and "usage: " in capsys.readouterr().out


def test_the_output_is_a_json_object_and_the_exit_code_tells_whether_bounds_held(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--restarts", "5", "--calm", "2"]
    with pytest.raises(SystemExit) as left:
        attack.main(["eclipse", "--json", *options])
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["work"] == {"attack": "eclipse", "options": options}
    assert found["bounds"].keys() <= found["figures"].keys()
    assert found["held"] is all(found["figures"][name] <= most for name, most in found["bounds"].items())
    assert left.value.code == (0 if found["held"] else 1)


def test_a_broken_bound_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, code in ((10, 0), (-1, 1)):
        played = Attack(lambda folder, times=1: {"let_in": times}, {"let_in": most})
        monkeypatch.setattr(attack, "attack_named", lambda name, played=played: played)
        with pytest.raises(SystemExit) as left:
            attack.main(["forger", "--times", "3", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (left.value.code, found["held"], found["figures"]) == (code, code == 0, {"let_in": 3})


def test_an_unknown_attack_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        attack.main(["gnome"])
    assert left.value.code == 2 and "poisoner" in capsys.readouterr().err


def test_an_option_with_the_value_0_is_passed_on() -> None:
    def play(folder: Path, calm: int = 10, lies: bool = False) -> dict[str, float]:
        return {"calm": calm, "lies": lies}

    assert Attack(play, {}).figures("NAME", ["--calm", "0"]) == {"calm": 0, "lies": False}
