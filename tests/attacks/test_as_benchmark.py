"""What other programs read of `python -m benchmarks.attack`."""

import json

import pytest

from benchmarks import attack


def test_the_last_line_is_one_object_and_the_exit_code_says_whether_the_bounds_held(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        attack.main(["bomb", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["schema"] == 1 and found["work"] == {"attack": "bomb", "seed": 1} and found["bounds"].keys() <= found["figures"].keys()
    assert found["held"] is all(found["figures"][name] <= most for name, most in found["bounds"].items())
    assert left.value.code == (0 if found["held"] else 1)


def test_a_bound_that_does_not_hold_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "ATTACKS", {"lost": (lambda seed: {"let_in": seed}, {"let_in": 1})})
    for seed, code in ((1, 0), (2, 1)):
        with pytest.raises(SystemExit) as left:
            attack.main(["lost", "--seed", str(seed), "--json"])
        assert left.value.code == code and json.loads(capsys.readouterr().out.splitlines()[-1])["held"] is (code == 0)
