"""`python -m tests.attacks` knows every attack; the output that other programs read."""

import json
from pathlib import Path

import pytest

from tests.attacks import __main__ as attack
from tests.attacks.harness import Attack

FOLDER = Path(__file__).parent / "attacks"
VARIANTS = {"sybil_offers"}  # of another, and played with it
TESTS_ALONE = {"limits", "model_folder"}  # cases without a figure


def test_every_attack_is_known() -> None:
    there = {path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py")}
    assert there - VARIANTS - TESTS_ALONE == {name.replace("-", "_") for name in attack.NAMES}


@pytest.mark.parametrize("name", attack.NAMES)
def test_every_attack_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        attack.main([name, "--help"])
    assert left.value.code == 0 and "usage: " in capsys.readouterr().out


def test_the_last_line_is_one_object_and_the_exit_code_says_whether_the_bounds_held(
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


def test_an_unknown_attack_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        attack.main(["gnome"])
    assert left.value.code == 2 and "poisoner" in capsys.readouterr().err


def test_an_option_of_0_is_given() -> None:
    def play(folder: Path, calm: int = 10, lies: bool = False) -> dict[str, float]:
        return {"calm": calm, "lies": lies}

    assert Attack(play, {}).figures("NAME", ["--calm", "0"]) == {"calm": 0, "lies": False}
