"""The output of benchmarks that other programs read.

With --json, the last line is one JSON object, and nothing follows it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import replay
from benchmarks.round import compare, cost, workload
from testbed import environments

SMALL = ["--size", "1.25m", "--tokens", "4", "--completions", "1", "--pairs", "1", "--json"]


def last_line(
    main: Callable[[Sequence[str]], None], argv: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    main(argv)
    out = capsys.readouterr().out
    assert out.endswith("}\n")
    return dict(json.loads(out.splitlines()[-1]))


def test_cost_prints_the_figures_of_a_round_alone_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = last_line(cost.main, ["--local", "1", "--completions", "2", "--rounds", "1", "--json"], capsys)
    assert found["work"] == {"model": "tiny", "local": 1, "external": 0, "completions": 2, "rounds": 1}
    assert found["ours"] == found["seconds"]["round"]["cpu"] > 0
    assert found["peer"] is found["ratio"] is None


@pytest.mark.slow
@pytest.mark.parametrize("peer", compare.TRAINERS)
def test_cost_prints_the_figures_of_a_comparison_as_json(
    peer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not environments.holds(environments.default_environment(peer), peer):
        pytest.skip(f"no environment of {peer}; `python -m benchmarks.round.cost --peer {peer}` makes one")
    small = [option if option != "1" else "2" for option in SMALL]  # groups of one have no advantages
    found = last_line(cost.main, ["--peer", peer, "--lengths", "full", *small], capsys)
    assert found["tokens_generated"]["ours"] == found["tokens_generated"]["peer"] == workload.COUNT * 2 * 4
    assert found["ratio"] > 0


@pytest.mark.slow
def test_replay_prints_the_runs_of_both_sides_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "1", "--every", "1", "--items", "1", "--answers", "1", "--seeds", "1"]
    found = last_line(replay.main, [*small, "--importance-cap", "0", "--unguarded", "--json"], capsys)
    assert [len(found["runs"][side]) for side in ("plain", "replay")] == [1, 1]
    assert found["work"]["updates"] == 4


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--peer", "trl", "--size", "7b"], "choose from 1.25m, 2.4m, 14m, 360m"),
        (["--peer", "vllm"], "choose from genrl, trl"),
        (["--peer", "trl", "--tokens", "0"], "'0' is not a whole number above 0"),
        (["--peer", "trl", "--tokens", "2000"], "at most 1024"),
        (["--peer", "trl", "--rounds", "3"], "--rounds goes without --peer"),
        (["--tokens", "16"], "--tokens goes with --peer"),
    ],
)
def test_invalid_options_of_cost_give_a_message(
    argv: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cost.main(argv)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err.replace(
        "'1.25m', '2.4m', '14m', '360m'", "1.25m, 2.4m, 14m, 360m"
    ).replace("'genrl', 'trl'", "genrl, trl")


def test_without_a_network_the_message_says_how_to_create_the_environment(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")  # fails, as pip does without a network
    python.chmod(0o700)
    with pytest.raises(SystemExit, match=r"(?s)could not be made.*pip install .*trl==1.16.0.*--environment"):
        environments.environment_of("trl", tmp_path)


def test_a_side_that_ends_early_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)'broken'.*status 3.*no such model"):
        compare.Side("broken", ["sh", "-c", "echo no such model >&2; exit 3"], tmp_path, "cpu")


def test_the_set_trials_has_the_same_eight_questions_as_always() -> None:
    questions = workload.draw("trials", workload.COUNT, 0)
    assert (
        questions[6]
        == "Find the Greatest Common Divisor (GCD) of these numbers: 777, 912. Give only the GCD as your"
        " final answer."
    )
    assert questions[0].startswith("State the final answer to the following arithmetic problem: 1663 - 5242")
    assert len(set(questions)) == 8
