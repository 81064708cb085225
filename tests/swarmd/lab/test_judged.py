"""`swarmd lab run --judge`: simulated nodes ask a real judge, and the report shows its comparison."""

from functools import partial
from pathlib import Path

import pytest

from swarmd.lab import EXPERIMENTS
from swarmd.lab.experiment import parse_experiment, read_experiment
from swarmd.lab.judged import JudgedSwarm, judged_beside, judging
from swarmd.lab.play import play
from swarmd.lab.report import pictures_of, write_report
from swarmd.lab.results import JUDGE, BadResults, Results, Run, judged
from tests.swarmd.lab.conftest import but_for_cpu

pytestmark = [pytest.mark.slow, pytest.mark.net]


def test_judged_nodes_play_the_same_rounds_as_unjudged_nodes(tmp_path: Path) -> None:
    """Nodes are judged by the rounds they trained; a node that is absent half the time has half as many."""
    churn = {"present": 6, "away": 3}
    document = {
        "name": "judged", "nodes": 2, "rounds": 10, "seeds": 1, "base": {"model": {"name": "tiny"}},
        "setting": [
            {"name": "1/0", "baseline": True, "round": {"local": 1, "external": 0, "completions": 2}},
            {"name": "1/1", "round": {"local": 1, "external": 1, "completions": 2}, "churn": churn},
        ],
    }  # fmt: skip
    experiment = parse_experiment(document, "judged.toml")
    run = Run("1-of-1", 1)
    results, without = (Results.create(tmp_path / name, experiment) for name in ("judged", "without"))
    with judging(results) as (*_, url):
        play(results, run, lambda _: None, made=partial(JudgedSwarm, url=url, compared="over 1/0"))
    play(without, run, lambda _: None)
    lines = but_for_cpu(results.lines(run))
    assert lines == but_for_cpu(without.lines(run))
    (found,) = judged(results)
    there = [sum(line["reward"][node] is not None for line in lines) for node in range(2)]
    assert found["model"] == "tiny: over 1/0" and min(there) < max(there) == 10
    assert (found["swarm"]["round"], found["swarm"]["peers"]) == ([5, 10], [1, 1]) and found["solo"][
        "peers"
    ] == []
    assert write_report(results, pictures_of(results)).with_name("judge.png").exists()
    (results.folder / JUDGE).write_text("[")
    with pytest.raises(BadResults, match="damaged"):
        judged(results)


def test_each_pair_of_settings_is_judged_separately() -> None:
    """The baseline of a pair may itself be compared with the experiment's baseline."""
    experiment = read_experiment(EXPERIMENTS / "churn.toml")
    pairs = [judged_beside(experiment, setting) for setting in experiment.settings]
    assert pairs == [
        "8/0",
        "8/0",
        "8/0, a fifth away",
        "8/0, a fifth away",
        "8/0, half away",
        "8/0, half away",
    ]
