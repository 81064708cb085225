"""The README's first command, the demo, at a tenth of its length."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from swarmd.state.metrics import read_metrics
from swarmd.types import RoundLine
from testbed.demo import duration, main
from testbed.demo_figure import Curve, moving_mean, reward_figure
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.processes import ended, killed_after, wait_until

ROUNDS = 8


@pytest.mark.slow
@pytest.mark.net
def test_the_demo_runs_until_its_final_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--nodes", "2", "--rounds", str(ROUNDS), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "testbed.demo", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["schema"] == 1
    nodes = document["nodes"]
    assert len({node["peer_id"] for node in nodes}) == 3
    assert [node["rounds"] for node in nodes] == [ROUNDS] * 3
    assert [node["rejoined"] for node in nodes].count(True) == 1
    assert [node["alone"] for node in nodes] == [False, False, True]
    shared, alone = [node["reward"] for node in nodes[:2]], nodes[2]["reward"]
    assert document["gain"] == pytest.approx(sum(shared) / 2 / alone - 1)
    for node in nodes:
        lines = read_metrics(Path(node["state_dir"]) / "metrics.jsonl")
        assert [line.round for line in lines] == list(range(1, ROUNDS + 1))
        assert node["external_trained"] == sum(line.external for line in lines)
        assert node["generated"] == nodes[0]["generated"]
        assert 0 <= node["reward_first"] <= 1 and 0 <= node["reward_last"] <= 1
    external = [node["external_trained"] for node in nodes]  # may be few, since most groups get no reward
    assert sum(external[:2]) > 0 and external[2] == 0
    assert document["judge"]["evaluations"] > 0
    (figure,) = document["figures"]
    assert Path(figure).read_bytes().startswith(b"\x89PNG")
    assert "killed with SIGKILL" in " ".join(done.stderr.split()) and "is back" in done.stderr
    first, *lines = [line for line in done.stderr.splitlines() if str(tmp_path) not in line]
    assert first.startswith(f"This takes about {duration(ROUNDS)}") and max(map(len, lines)) <= 80
    assert "3 nodes: training" in done.stderr  # each step of the start is printed

    assert main(command) == 2 and "--out" in capsys.readouterr().err, "an earlier demo was overwritten"


STARTS = """
import sys
from pathlib import Path
from swarmd.lab.local_judge import local_judge
from testbed.local_swarm import local_swarm
with local_judge(Path(sys.argv[1])), local_swarm(Path(sys.argv[1]), 1, ["--model", "tiny"]) as (node,):
    node.start()
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.mark.net
def test_kill_9_of_the_demo_ends_its_judge_and_nodes(tmp_path: Path) -> None:
    started: list[psutil.Process] = []
    try:
        command = [sys.executable, "-c", STARTS, str(tmp_path)]
        with killed_after(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as demo:
            assert demo.stdout is not None and demo.stdout.readline() == b"started\n"
            started = psutil.Process(demo.pid).children()
        wait_until(lambda: all(map(ended, started)), TIMEOUT_S)
        assert len(started) == 2
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_the_moving_mean_of_short_runs() -> None:
    assert moving_mean([1, 0, 1, 1], 2) == [0.5, 0.5, 1]


@pytest.mark.parametrize("nodes", [3, 16])
def test_curves_of_the_figure_overlap_neither_legend_nor_edges(nodes: int) -> None:
    lines = [RoundLine(round=number, reward_mean=0.5, time=0.8 * number) for number in range(1, 31)]
    curves = [Curve("fancy-crocodile", lines)] * (nodes - 1) + [
        Curve("proud-pelican", lines, 15),
        Curve("glad-robin", lines, alone=True),
    ]
    figure = reward_figure(curves, f"{nodes} nodes that share, and one alone that answers as many questions")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, page = legend.get_window_extent(), figure.bbox
    parts = [*figure.texts, *figure.axes]
    assert figure.get_suptitle() in {text.get_text() for text in figure.texts}
    assert not any(box.overlaps(part.get_tightbbox()) for part in parts)
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
