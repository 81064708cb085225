"""Runs that were cut off go on with the lines of a run that never was.

They are cut off by kill -9 of real processes, and resumed from damaged saves too.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmd.lab.experiment import Experiment, parse_experiment
from swarmd.lab.play import lines_of, play
from swarmd.lab.results import BadResults, Journal, Mark, Results, Run
from tests.processes import killed_after

RUN = Run("one", 1)


def experiment(nodes: int = 2, rounds: int = 4, **keys: Any) -> Experiment:
    """Return an experiment of nodes that share, whose gate can judge after four rounds."""
    setting = {"name": "one", "round": {"local": 4, "external": 4, "completions": 4}} | keys
    look = {"every": 3, "questions": 1, "answers": 2}
    return parse_experiment(
        {"name": "short", "nodes": nodes, "rounds": rounds, "evaluation": look, "setting": [setting]},
        "x.toml",
    )


def but_for_cpu(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{key: value for key, value in line.items() if key != "cpu"} for line in lines]


def never_cut(of: Experiment) -> Sequence[Mapping[str, Any]]:
    return but_for_cpu(list(lines_of(of, of.settings[0], 1)))


class Cut(Exception):
    """The power went."""


def play_until(results: Results, last: int | None) -> list[int]:
    """Play until that round, saving after each; return the rounds that were played."""
    played: list[int] = []

    def told(number: int) -> None:
        played.append(number)
        if number == last:
            raise Cut

    try:
        play(results, RUN, told, save_every=0.0)
    except Cut:
        assert last is not None
    return played


def saved(results: Results) -> list[Path]:
    return sorted(results.saves(RUN).glob("round-*"))


def flip(path: Path) -> None:
    """Flip one bit of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.net
def test_a_run_cut_off_twice_has_the_lines_of_one_that_was_not(tmp_path: Path) -> None:
    """Once by kill -9, and once more where it had gone on."""
    one = experiment(3, 6, churn={"present": 3, "away": 2}, hostile={"liars": 1, "poisoners": 1})
    results = Results.create(tmp_path / "out", one)
    command = [sys.executable, "-m", "swarmd.lab.play", str(results.folder), RUN.setting, str(RUN.seed), "0"]
    with killed_after(subprocess.Popen(command, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert 2 in (int(line) for line in process.stdout)
        process.kill()
    for last in (5, None):
        assert play_until(results, last)[0] >= (2 if last else 5)
    assert not results.saves(RUN).exists()
    lines = results.lines(RUN)
    assert but_for_cpu(lines) == never_cut(one)
    assert sum(sum(line["external"]) for line in lines[3:]) and sum(
        sum(line["hostile"]) for line in lines[3:]
    )
    assert any(None in line["reward"] for line in lines[1:])
    assert [line["cpu"] for line in lines[1:]] == sorted(line["cpu"] for line in lines[1:])


@pytest.mark.slow
def test_damaged_saves_and_those_of_other_versions_are_passed_over(tmp_path: Path) -> None:
    one = experiment(rounds=5, replay={"mode": "on", "updates_per_round": 2, "max_age": 4})
    results = Results.create(tmp_path / "out", one)
    part = results.path(RUN).with_suffix(".part")
    part.parent.mkdir(parents=True)
    part.write_text(json.dumps({"round": 1}) + "\n")  # of a version without saves
    assert play_until(results, 4) == [0, 1, 2, 3, 4]
    assert [path.name for path in saved(results)] == ["round-00000002", "round-00000003"]
    flip(next(saved(results)[1].glob("node-1/*/weights.safetensors")))
    assert play_until(results, 5) == [3, 4, 5]  # from the older one
    flip(part)
    assert play_until(results, None) == [0, 1, 2, 3, 4, 5]  # from the beginning
    assert but_for_cpu(results.lines(RUN)) == never_cut(one) and not results.saves(RUN).exists()


def test_a_journal_waits_for_another_process(tmp_path: Path) -> None:
    results = Results.create(tmp_path / "out", experiment())
    said: list[str] = []

    def second() -> None:
        try:
            with results.writing(RUN):
                said.append("began")
        except BadResults as error:
            said.append(str(error))

    with results.writing(RUN) as lines:
        other = threading.Thread(target=second)
        other.start()
        lines.append({"round": 4, "reward": [0.0, 0.0]})
    other.join()
    assert (
        len(said) == 1
        and "is finished" in said[0]
        and results.lines(RUN) == [{"round": 4, "reward": [0.0, 0.0]}]
    )


def test_a_journal_goes_back_to_its_mark_and_to_no_other_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "lines") as journal:
        journal.append(1)
        mark = journal.mark()
        journal.append(2)
        journal.back_to(mark)
        journal.append(3)
    with Journal(tmp_path / "lines") as journal:
        journal.back_to(mark)
        assert list(journal.lines()) == [b"1\n"]
        with pytest.raises(ValueError, match="begin"):
            journal.back_to(Mark(2, "another"))
