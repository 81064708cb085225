"""`swarmd lab run --engine torch`: real processes that exchange over gloo and loopback; one that dies."""

import sys
from pathlib import Path

import psutil
import pytest

from swarmd.lab.experiment import parse_experiment
from swarmd.lab.report import markdown
from swarmd.lab.results import BadResults, Results, Run
from swarmd.lab.runs import RunsFailed, RunsProgress, play_all

RANKS = [sys.executable, "-m", "swarmd.lab.ranks"]
EXPERIMENT = parse_experiment(
    {
        "name": "short", "nodes": 2, "rounds": 3, "seeds": 2, "evaluation": {"questions": 1, "answers": 2},
        "setting": [{
            "name": "one", "round": {"local": 2, "external": 2}, "sharing": {"share": "all", "take": "unfiltered"},
            "churn": {"present": 3, "away": 1}, "hostile": {"liars": 0, "poisoners": 1},
        }],
    },
    "short.toml",
)  # fmt: skip


def kill_rank_1() -> None:
    for process in psutil.Process().children(recursive=True):
        if (line := process.cmdline())[1:3] == ["-m", "swarmd.lab.rank"] and line[-2] == "1":
            process.kill()


@pytest.mark.slow
@pytest.mark.net
def test_a_node_a_process_the_same_lines_each_time_and_a_death_is_told(tmp_path: Path) -> None:
    first, again = Run("one", 1), Run("one", 2)
    results = Results.create(tmp_path / "out", EXPERIMENT, "torch")

    def kill(progress: RunsProgress) -> None:
        if first in progress.playing:
            kill_rank_1()

    with pytest.raises(RunsFailed, match=r"(?s)1 of 2 runs failed.*one, seed 1: node 1 of 2: .*signal 9"):
        play_all(results, 1, kill, RANKS)
    assert results.missing == [first]  # the other went on
    other = Results.create(tmp_path / "other", EXPERIMENT, "torch")
    with other.writing(first) as file:
        file.append({"round": 1})
    play_all(other, 1, lambda _: None, RANKS)
    lines, same = ([{k: v for k, v in line.items() if k != "cpu"} for line in each.lines(again)] for each in (results, other))
    assert lines == same and [line["round"] for line in lines] == [0, 1, 2, 3]
    assert all(len(line["reward"]) == 2 for line in lines[1:]) and len(lines[3]["evaluation"]["right"]) == 2
    assert sum(sum(line["external"]) - sum(line["hostile"]) for line in lines[1:]) > 0  # of each other
    assert "| one |" in markdown(results)
    with pytest.raises(BadResults, match="engine torch, now memory"):
        results.resume(EXPERIMENT)
