"""`swarmd lab run --engine torch`: real processes that exchange over gloo and loopback; one that dies."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from swarmd.lab.experiment import parse_experiment
from swarmd.lab.report import markdown
from swarmd.lab.results import BadResults, Results, Run
from swarmd.lab.runs import RunsFailed, RunsProgress, play_all
from tests.swarmd.lab.conftest import but_for_cpu

RANKS = [sys.executable, "-m", "swarmd.lab.ranks"]
EXPERIMENT = parse_experiment(
    {
        "name": "short",
        "nodes": 2,
        "rounds": 8,
        "seeds": 1,
        "evaluation": {"questions": 1, "answers": 2},
        "setting": [
            {
                "name": "one",
                "round": {"local": 2, "external": 2},
                "sharing": {"share": "all", "take": "unfiltered"},
                "churn": {"present": 3, "away": 1},
                "hostile": {"liars": 0, "poisoners": 1},
            }
        ],
    },
    "short.toml",
)


def kill_rank_1() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended since
            if (line := process.cmdline())[1:3] == ["-m", "swarmd.lab.rank"] and line[-2] == "1":
                process.kill()


@pytest.mark.slow
@pytest.mark.net
def test_runs_of_one_process_a_node_repeat_and_report_a_death(tmp_path: Path) -> None:
    run = Run("one", 1)
    results = Results.create(tmp_path / "out", EXPERIMENT, "torch")
    play_all(results, 1, lambda _: None, RANKS)
    lines = but_for_cpu(results.lines(run))
    assert [line["round"] for line in lines] == list(range(EXPERIMENT.rounds + 1))
    assert all(len(line["reward"]) == 2 for line in lines[1:]) and len(lines[-1]["evaluation"]["right"]) == 2
    assert sum(sum(line["external"]) - sum(line["hostile"]) for line in lines[1:]) > 0  # of each other
    assert "| one |" in markdown(results)
    with pytest.raises(BadResults, match="engine torch, now memory"):
        results.resume(EXPERIMENT)

    def kill(progress: RunsProgress) -> None:
        if progress.playing.get(run, 0) >= 2:
            kill_rank_1()

    again = Results.create(tmp_path / "again", EXPERIMENT, "torch")
    with pytest.raises(RunsFailed, match=r"(?s)1 of 1 runs failed.*one, seed 1: node 1 of 2: .*signal 9"):
        play_all(again, 1, kill, RANKS)
    assert again.missing == [run]
    until_then = but_for_cpu(
        [json.loads(line) for line in again.path(run).with_suffix(".part").read_text().splitlines()]
    )
    assert len(until_then) >= 3 and until_then == lines[: len(until_then)]
