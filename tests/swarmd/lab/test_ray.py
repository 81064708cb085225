"""`--executor ray` on a local cluster of two workers; without Ray, what is said."""

import importlib.util
from pathlib import Path

import pytest

from swarmd.cli.app import main
from swarmd.lab.experiment import parse_experiment
from swarmd.lab.play import lines_of
from swarmd.lab.ray_executor import NoRay, play_on_ray
from swarmd.lab.results import Results
from tests.swarmd.lab.conftest import but_for_cpu

EXPERIMENT = {
    "name": "short",
    "nodes": 2,
    "rounds": 1,
    "seeds": 2,
    "setting": [{"name": "1/1", "round": {"local": 1, "external": 1}}],
}
THERE = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(THERE, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(NoRay, match=r"pip install 'swarmd\[ray\]'"):
        play_on_ray(Results.create(tmp_path / "out", parse_experiment(EXPERIMENT, "x.toml")), lambda _: None)


def test_jobs_with_ray_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["lab", "run", "churn", "--executor", "ray", "--jobs", "2", "--out", str(tmp_path / "out")]) == 2
    )
    assert "--jobs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.skipif(not THERE, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore")
def test_two_workers_play_what_one_process_would(tmp_path: Path) -> None:
    experiment = parse_experiment(EXPERIMENT, "x.toml")
    results, said = Results.create(tmp_path / "out", experiment), list[str]()
    play_on_ray(results, lambda progress: said.append(progress.sentence()), num_cpus=2)
    assert not results.missing and said[-1].startswith("2 of 2 runs done")
    for run in results.runs:
        here = list(lines_of(experiment, experiment.settings[0], run.seed))
        assert but_for_cpu(results.lines(run)) == but_for_cpu(here)
