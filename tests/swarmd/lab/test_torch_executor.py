"""`swarmd lab run --engine torch`: real processes that exchange over gloo on loopback, and one that dies.

`--executor ray` is tested on a local cluster of two workers, and its message without Ray.
"""

import importlib.util
import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from swarmd.cli.app import main
from swarmd.lab.experiment import parse_experiment
from swarmd.lab.parent_watch import LabFailed
from swarmd.lab.play import lines_of
from swarmd.lab.ray_executor import play_on_ray
from swarmd.lab.report import markdown
from swarmd.lab.results import BadResults, Results, Run
from swarmd.lab.runs import PLAY_NODE, RunsProgress, play_all
from tests.swarmd.lab.conftest import but_for_cpu

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
        with suppress(psutil.Error):  # the process has ended
            if (line := process.cmdline())[1:4] == ["-P", "-m", "swarmd.lab.torch_node"] and line[-2] == "1":
                process.kill()


@pytest.mark.slow
@pytest.mark.net
def test_runs_with_a_process_for_each_node_are_repeatable_and_report_a_death(tmp_path: Path) -> None:
    run = Run("one", 1)
    results = Results.create(tmp_path / "out", EXPERIMENT, "torch")
    play_all(results, 1, lambda _: None, PLAY_NODE, apart=True)
    lines = but_for_cpu(results.lines(run))
    assert [line["round"] for line in lines] == list(range(EXPERIMENT.rounds + 1))
    assert all(len(line["reward"]) == 2 for line in lines[1:]) and len(lines[-1]["evaluation"]["right"]) == 2
    assert sum(sum(line["external"]) - sum(line["hostile"]) for line in lines[1:]) > 0  # not hostile
    assert "| one |" in markdown(results)
    with pytest.raises(BadResults, match="engine torch, now memory"):
        results.resume(EXPERIMENT)

    def kill(progress: RunsProgress) -> None:
        if progress.playing.get(run, 0) >= 2:
            kill_rank_1()

    again = Results.create(tmp_path / "again", EXPERIMENT, "torch")
    with pytest.raises(LabFailed, match=r"(?s)1 of 1 runs failed.*one, seed 1: node 1 of 2: .*signal 9"):
        play_all(again, 1, kill, PLAY_NODE, apart=True)
    assert again.missing == [run]
    until_then = but_for_cpu(
        [json.loads(line) for line in again.path(run).with_suffix(".part").read_text().splitlines()]
    )
    assert len(until_then) >= 3 and until_then == lines[: len(until_then)]


SHORT = {
    "name": "short",
    "nodes": 2,
    "rounds": 1,
    "seeds": 2,
    "setting": [{"name": "1/1", "round": {"local": 1, "external": 1}}],
}
THERE = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(THERE, reason="Ray is installed")
def test_without_ray_a_message_says_what_to_install_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "run", "churn", "--executor", "ray", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'swarmd[ray]'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_option_jobs_is_rejected_with_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["lab", "run", "churn", "--executor", "ray", "--jobs", "2", "--out", str(tmp_path / "out")]) == 2
    )
    assert "--jobs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.skipif(not THERE, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore")
def test_two_ray_workers_play_the_same_experiment_as_one_process(tmp_path: Path) -> None:
    experiment = parse_experiment(SHORT, "x.toml")
    results, said = Results.create(tmp_path / "out", experiment), list[str]()
    play_on_ray(results, lambda progress: said.append(progress.sentence()), num_cpus=2)
    assert not results.missing and said[-1].startswith("2 of 2 runs done")
    for run in results.runs:
        here = list(lines_of(experiment, experiment.settings[0], run.seed))
        assert but_for_cpu(results.lines(run)) == but_for_cpu(here)
