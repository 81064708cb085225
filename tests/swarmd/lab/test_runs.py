"""`swarmd lab`: real runs of two nodes, also interrupted and continued.

Results folders of other versions, damaged folders and other folders are tested, too.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import parquet

from p2p.types import PeerId
from swarmd.cli.app import main
from swarmd.config import own_strategy
from swarmd.config.own_strategy import load_take
from swarmd.errors import ConfigError
from swarmd.experience.strategies import TAKES
from swarmd.lab.experiment import Evaluation, Experiment, parse_experiment, read_experiment
from swarmd.lab.parent_watch import LabFailed
from swarmd.lab.play import PlayedSwarm, held_out, lines_of, play
from swarmd.lab.report import _node_figure, _reward_figure, facts, markdown, pictures_of, write_report
from swarmd.lab.results import FILE, TABLE, BadResults, Results, Run, export, versions
from swarmd.lab.runs import RunsProgress, play_all
from swarmd.lab.statistics import columns, gain
from swarmd.tasks import own_tasks
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Rollout, Scored, TaskRef
from tests import ROOT
from tests.p2p.real import SECONDS
from tests.processes import ended, killed_after, wait_until
from tests.swarmd.lab.conftest import but_for_cpu

pytestmark = pytest.mark.slow


def experiment(rounds: int = 2, seeds: int = 1) -> Experiment:
    return parse_experiment(
        {
            "name": "short",
            "nodes": 2,
            "rounds": rounds,
            "seeds": seeds,
            "evaluation": {"questions": 1, "answers": 2},
            "base": {"model": {"name": "tiny"}},
            "setting": [
                {"name": "2/0", "baseline": True, "round": {"local": 2, "external": 0}},
                {
                    "name": "1/1",
                    "round": {"local": 1, "external": 1},
                    "sharing": {"share": "all", "take": "unfiltered", "weigh": "right"},
                },
            ],
        },
        "short.toml",
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results = Results.create(tmp_path_factory.mktemp("lab") / "out", experiment())
    for run in results.runs:
        play(results, run, lambda _: None)
    return results


def test_playing_a_run_twice_gives_the_same_run(played: Results, tmp_path: Path) -> None:
    again = Results.create(tmp_path / "out", played.experiment)
    run = Run("1-of-1", 1)
    play(again, run, lambda _: None)
    lines = but_for_cpu(played.lines(run))
    assert lines == but_for_cpu(again.lines(run)) and [line["round"] for line in lines] == [0, 1, 2]
    assert sum(lines[2]["external"]) > 0  # rollouts were shared


def test_the_exported_table_has_a_row_for_each_node_and_round_and_a_card(
    played: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "export", str(played.folder), str(tmp_path / "data")]) == 0
    assert "12 rows" in capsys.readouterr().err
    rows = parquet.read_table(tmp_path / "data" / TABLE).to_pylist()
    lines = played.lines(Run("1-of-1", 1))
    mine = [row for row in rows if row["setting"] == "1/1" and row["round"] == 2]
    assert [row["node"] for row in mine] == [0, 1]
    for row, tokens in zip(mine, lines[2]["tokens"], strict=True):
        assert row["tokens"] == tokens
    assert len(set(lines[2]["tokens"])) == 2, "choose a seed with which the nodes differ"
    assert [row["right"] for row in mine] == lines[2]["evaluation"]["right"]
    for name in lines[2].keys() - {"evaluation"}:
        assert all(row[name] is not None for row in mine), f"the table has no {name}"
    card = (tmp_path / "data" / "README.md").read_text()
    assert all(f"- `{name}`: " in card for name in rows[0]) and "2 of 2 runs" in card
    assert main(["lab", "export", str(played.folder), str(tmp_path / "data")]) == 2
    assert "is not empty" in capsys.readouterr().err
    empty = Results.create(tmp_path / "empty", played.experiment)
    assert main(["lab", "export", str(empty.folder), str(tmp_path / "more")]) == 2
    assert "no run is finished" in capsys.readouterr().err


def of_one(nodes: int, rounds: int, take: str, local: int = 2, **document: object) -> Experiment:
    """Return an experiment with one setting; its nodes share all and train on one external rollout."""
    setting = {
        "name": "one",
        "model": {"name": "tiny"},
        "round": {"local": local, "external": 1},
        "sharing": {"share": "all", "take": take},
    }
    given = {"name": "own", "nodes": nodes, "rounds": rounds, "setting": [setting]}
    return parse_experiment(given | document, "own.toml")


def test_nodes_can_play_own_tasks() -> None:
    tasks = ROOT / "docs" / "examples" / "sums.py"
    base = {"swarm": {"curriculum": str(tasks)}, "tasks": {"specialties": ["add"]}}
    played = of_one(2, 2, "unfiltered", 1, base=base, evaluation={"questions": 2, "answers": 1})
    assert versions(played)["tasks sums"] == find_curriculum(str(tasks)).digest
    lines = list(lines_of(played, played.settings[0], 1))
    assert [line["round"] for line in lines] == [0, 1, 2] and len(lines[2]["evaluation"]["right"]) == 2
    assert sum(lines[2]["external"]) > 0 and lines[2]["generated"] == [1, 1]


PARITY = """
import random
specialties, limits = ["parity"], {"turns": 2}
def reset(specialty, seed):
    rng = random.Random(seed)
    return f"Calculate {rng.randint(0, 9)} + {rng.randint(0, 9)}.", []
def step(state, text):
    state.append(text)
    return "go on", float(len(state) == 2 and len(text) % 2 == 0), len(state) == 2
"""


def test_nodes_share_and_train_on_answers_of_several_turns(tmp_path: Path) -> None:
    (tasks := tmp_path / "parity.py").write_text(PARITY)
    base = {"swarm": {"curriculum": str(tasks)}, "generate": {"max_new_tokens": 48}}
    played = of_one(2, 3, "uniform", 1, base=base, evaluation={"questions": 2, "answers": 2})
    lines = list(lines_of(played, played.settings[0], 1))
    assert sum(sum(line["external"]) for line in lines[1:]) > 0
    assert all(share == 1.0 for line in lines[1:] for share in line["in_form"])
    assert sum(sum(line["trained"]) for line in lines[1:]) > 0


EASY = """
specialties, limits = ["a"], {"whole": True}
def generate(specialty, seed):
    return f"Say {seed}.", 1
def score(facts, answer):
    return 1.0
"""
HALF = "def reward(facts, answer, score):\n    return score / 2\n"


def test_evaluations_use_the_tasks_score_and_not_a_custom_reward(tmp_path: Path) -> None:
    (tasks := tmp_path / "easy.py").write_text(EASY)
    (reward := tmp_path / "half.py").write_text(HALF)
    base = {"swarm": {"curriculum": str(tasks)}, "tasks": {"reward": str(reward)}}
    one = of_one(1, 1, "uniform", base=base, evaluation={"questions": 2, "answers": 1})
    before, line = lines_of(one, one.settings[0], 1)
    assert line["reward"] == [0.5]
    assert before["evaluation"]["right"] == line["evaluation"]["right"] == [[1, 1]]


def test_rewards_and_strategies_with_the_same_name_are_distinguished(tmp_path: Path) -> None:
    (tasks := tmp_path / "easy.py").write_text(EASY)
    files = [tmp_path / name / "mine.py" for name in ("first", "second")]
    for file in files:
        file.parent.mkdir()
        file.write_text(HALF + f"# {file}")
    settings = [
        {"name": file.parent.name, "tasks": {"reward": str(file)}, "sharing": {"take": str(file)}}
        for file in files
    ]
    given = {"name": "two", "base": {"swarm": {"curriculum": str(tasks)}}, "setting": settings}
    before = versions(parse_experiment(given, "two.toml"))
    assert versions(parse_experiment({**given, "setting": settings[::-1]}, "two.toml")) == before
    files[0].write_text(HALF)
    own_tasks._rewarded.cache_clear()
    now = versions(parse_experiment(given, "two.toml"))
    assert {name for name in now if now[name] != before[name]} == {"reward mine.py", "strategy mine.py"}


def test_a_custom_strategy_is_played(tmp_path: Path) -> None:
    """It chooses offers and pool rollouts. One strategy is uniform (equal weights), one takes nothing."""
    found = {}
    for name, weight in (("uniform", None), ("same", 1.0), ("none", 0.0)):
        file = tmp_path / f"{name}.py"
        file.write_text(f"WEIGHT = {weight}\ndef weights(all):\n    return [WEIGHT] * len(all)\n")
        one = of_one(2, 4, "uniform" if weight is None else str(file))
        found[name] = [line["external"] for line in lines_of(one, one.settings[0], 1)]
        assert (f"strategy {name}.py" in versions(one)) == (weight is not None)
    assert found["uniform"] == found["same"] != found["none"] and not any(map(sum, found["none"]))


def test_results_with_a_changed_strategy_cannot_be_continued(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def weights(all):\n    return [1.0] * len(all)\n")
    one = of_one(2, 4, str(file))
    results = Results.create(tmp_path / "results", one)
    file.write_text("def weights(all):\n    return [2.0] * len(all)\n")
    with pytest.raises(BadResults, match=r"with the strategy mine\.py before it was changed: its runs"):
        results.resume(one)
    with pytest.raises(BadResults, match=r"with the strategy mine\.py before it was changed: its runs"):
        play(results, results.runs[0], lambda _: None)
    assert results.missing == results.runs and not (tmp_path / "results" / "runs").exists()


@pytest.mark.parametrize(
    "weights, said", [("1 / 0", "ZeroDivisionError"), ("[1.0]", "each of"), ("[-1.0] * len(all)", "from 0")]
)
def test_a_strategy_that_returns_no_weights_gives_a_message(tmp_path: Path, weights: str, said: str) -> None:
    """The error occurs inside trio, where offers are chosen."""
    file = tmp_path / "mine.py"
    file.write_text(f"def weights(all):\n    return {weights}\n")
    one = of_one(3, 4, str(file))
    with pytest.raises(ConfigError, match=f"mine.py cannot be used: .*{said}"):
        list(lines_of(one, one.settings[0], 1))


@pytest.mark.parametrize(
    "content, said", [(None, "FileNotFoundError"), ("1 / 0", "ZeroDivisionError"), ("", "'weights'")]
)
def test_a_file_without_a_strategy_gives_a_message(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"sharing.take: .*mine.py cannot be used: .*{said}"):
        load_take(str(file))


def test_the_example_strategy_can_be_copied(tmp_path: Path) -> None:
    example = str(own_strategy.__doc__).partition("\n\n")[2]
    (tmp_path / "mine.py").write_text(example)
    load_take(mine := str(tmp_path / "mine.py"))
    candidates = [
        Scored(Rollout(TaskRef(name, 1), (), PeerId("other")), "", (), 1) for name in ("bf", "arc_1d")
    ]
    assert TAKES[mine].weights(candidates) == [1.0, 0.1]
    assert not TAKES[mine].keeps(candidates[0])


def test_a_mistake_in_a_strategys_saved_state_gives_a_message(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def weights(all):\n    return []\ndef keeps(scored):\n    return scored.reward > 0\n")
    load_take(str(file))
    with pytest.raises(ConfigError, match=r"mine.py cannot be used: AttributeError: .*'reward'"):
        TAKES[str(file)].keeps(Scored(Rollout(TaskRef("a", 1), (), PeerId("other")), "", (), 1))


def test_an_evaluation_does_not_change_later_rounds(verifier: Verifier) -> None:
    (_, setting) = experiment().settings
    swarms = [PlayedSwarm(setting, 1, verifier) for _ in range(2)]
    swarms[0].evaluate(
        CurriculumTasks(swarms[0].curriculum).draw_held_out(2, random.Random(0)), Evaluation(), 0
    )
    assert swarms[0].round(1) == swarms[1].round(1)


def test_the_report_has_every_setting_and_loads_nothing_from_the_network(played: Results) -> None:
    page = write_report(played, pictures_of(played)).read_text()
    assert "://" not in page and 'src="data:' in page
    assert "1 seed: this decides nothing" in page
    assert markdown(played).count("\n") == 3 and "| 1/1 |" in markdown(played)
    narrow = facts(played).splitlines()
    assert "1/1" in narrow and max(map(len, narrow)) <= 80
    assert facts(played).count("CPU s") == markdown(played).count("\n") - 1
    alone, together = columns(played)
    assert gain(alone, alone).mean == 0 and together.pass_at(2).n == 1 and together.pass_at(8).n == 0


def test_figure_2_has_the_mean_agent_and_the_range_of_all_agents(played: Results) -> None:
    """An agent's reward is the mean over its last 100 rounds, or all so far; an absent agent has none."""
    column = columns(played)[0]
    rewards = [(1.0, None)] * 100 + [(0.0, 0.5)] * 50
    runs = {seed: replace(column.runs[1], rewards=tuple(rewards)) for seed in (1, 2)}
    (axes,) = _reward_figure([replace(column, runs=runs)]).axes
    (line,), (band,) = axes.lines, axes.collections
    assert line.get_ydata().tolist() == pytest.approx(
        [1.0] * 100 + [((100 - n) / 100 + 0.5) / 2 for n in range(1, 51)]
    )
    ends = band.get_paths()[0].vertices
    last = sorted({round(y, 6) for x, y in ends if x == 150})
    assert last == [0.5, 0.5] or last == [0.5], "the agents' last rewards are not 0.5"
    assert sorted({round(y, 6) for x, y in ends if x == 110}) == [0.5, 0.9]


def test_the_report_of_unfinished_runs_is_drawn_from_the_recorded_rounds(
    played: Results, tmp_path: Path
) -> None:
    """No compared run is finished, and a setting's name must not be read as a formula by matplotlib."""
    name = r"$\foo$ is a name that is much wider than its panel in the figure"
    settings = [{"name": name, "replay": {"mode": "on"}}, {"name": "2/0", "against": name}]
    document = {
        "name": "cut",
        "nodes": 2,
        "rounds": 1,
        "seeds": 1,
        "base": {"model": {"name": "tiny"}},
        "setting": settings,
    }
    results = Results.create(tmp_path / "out", parse_experiment(document, "cut.toml"))
    results.path(results.runs[0]).parent.mkdir(parents=True)
    lines = [
        {**line, "local": [0, 0]} if line["round"] else line for line in played.lines(played.runs[0])[:2]
    ]
    results.path(results.runs[0]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write_report(results, pictures_of(results)).with_name("nodes.png").exists()
    (panel,) = _node_figure(columns(results)).axes
    assert max(map(len, panel.get_title().split("\n"))) <= 36
    # With one round, there is a point for each node and no line.
    assert [line.get_marker() for line in panel.lines if len(line.get_xdata())] == [".", "."]


def test_figure_1_shows_the_nodes_of_each_seed_in_the_seeds_colour(played: Results) -> None:
    column = columns(played)[0]
    figure = _node_figure([replace(column, runs=dict.fromkeys((1, 2, 3), column.runs[1]))])
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata())]
    assert len(lines) == 2 * 3 and len({line.get_color() for line in lines}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["seed 1", "seed 2", "seed 3"]


def test_single_settings_can_be_played_with_another_model_and_the_rest_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        'name = "two"\nnodes = 1\nrounds = 1\nseeds = 2\n[base.round]\nlocal = 1\nexternal = 0\n'
        '[[setting]]\nname = "8/0"\nbaseline = true\n[[setting]]\nname = "4/4"\n'
    )
    asked = ["lab", "run", str(file), "--out", str(tmp_path / "out"), "--model", "tiny-latent", "--resume"]
    assert main([*asked, "--setting", "8/1"]) == 2
    assert "two has no setting '8/1'; did you mean 8/0? Its settings: 8/0, 4/4" in capsys.readouterr().err
    assert main([*asked, "--setting", "4/4"]) == 0
    results = Results.open(tmp_path / "out")
    assert [run.setting for run in results.missing] == ["8-of-0"] * 2
    assert {node.model.name for s in results.experiment.settings for node in s.nodes} == {"tiny-latent"}
    assert "2 of 2 runs done" in capsys.readouterr().err
    assert main([*asked, "--seeds", "1"]) == 0
    assert results.missing == [Run("8-of-0", 2)]
    # The results folder belongs to that model.
    assert main(["lab", "run", str(file), "--out", str(tmp_path / "out"), "--resume"]) == 2
    assert main(asked) == 0 and not results.missing


def test_an_evaluation_uses_its_own_specialties_and_temperature(verifier: Verifier) -> None:
    wanted = Evaluation(questions=6, answers=2, temperature=0.5, specialties=("bf", "arc_1d"))
    asked = held_out(CurriculumTasks(find_curriculum("tiny-9")), wanted)
    assert len(asked) == 6 and {task.ref.specialty for task in asked} == {"bf", "arc_1d"}
    config = {"name": "one", "nodes": 1, "setting": [{"name": "one", "generate": {"temperature": 5.0}}]}
    swarm = PlayedSwarm(parse_experiment(config, "one.toml").settings[0], 1, verifier)
    at, generate = list[float](), swarm.policies[0]._driver.generate

    def noted(prompts: Any, copies: int, sampling: Any, *more: Any) -> Any:
        at.append(sampling.temperature)
        return generate(prompts, copies, sampling, *more)

    swarm.policies[0]._driver.generate = noted  # type: ignore[method-assign]
    swarm.evaluate(asked, wanted, 0)
    swarm.round(1)
    assert at == [0.5, 5.0]
    with pytest.raises(ConfigError, match="nope is not in tiny-9"):
        held_out(
            CurriculumTasks(find_curriculum("tiny-9")), wanted.model_copy(update={"specialties": ("nope",)})
        )


def test_without_matplotlib_the_report_says_how_to_install_it(
    played: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = played.folder / "report.html"
    page.unlink(missing_ok=True)
    assert main(["lab", "report", str(played.folder)]) == 0
    assert "Run `pip install 'swarmd[research]'`" in capsys.readouterr().err and "1/1" in page.read_text()
    # As if installed by uv as a tool, which has no pip.
    (tmp_path / "uv-receipt.toml").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main(["lab", "report", str(played.folder)]) == 0
    assert "Run `SWARMD_EXTRAS=research packaging/install.sh`" in capsys.readouterr().err


def test_the_figures_are_available_as_numbers(played: Results, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "report", str(played.folder), "--json"]) == 0
    alone, together = json.loads(capsys.readouterr().out)["settings"]
    other, column = columns(played)
    over = gain(column, other)
    assert together["over_baseline"] == ({"mean": over.mean, "half": None, "n": 1} if over.n else None)
    assert alone["over_baseline"] is None and together["pass@8"] is None and together["seeds"] == [1]
    assert together["cumulative"] == {"mean": column.runs[1].cumulative, "half": None, "n": 1}


def test_an_interrupted_run_starts_again(tmp_path: Path) -> None:
    results = Results.create(tmp_path / "out", experiment())
    run = results.runs[0]
    with suppress(KeyboardInterrupt), results.writing(run) as append:
        append({"round": 1})
        raise KeyboardInterrupt
    assert run in results.missing
    with results.writing(run) as append:
        append({"round": 2})
    assert results.path(run).read_text() == '{"round":2}\n'


def test_two_processes_do_not_play_the_same_run(tmp_path: Path) -> None:
    results = Results.create(tmp_path / "out", experiment())
    run, said = results.runs[0], []

    def second() -> None:
        with pytest.raises(BadResults, match="is finished: another process"), results.writing(run):
            said.append("began")

    with results.writing(run) as append:
        other = threading.Thread(target=second)
        other.start()
        append({"round": 1})
    other.join()
    assert said == [] and results.path(run).read_text() == '{"round":1}\n'


def test_missing_runs_are_played_and_a_death_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the working folder must not shadow a module."""
    monkeypatch.chdir(tmp_path)
    Path("statistics.py").write_text("raise ImportError")
    results = Results.create(tmp_path / "out", experiment(seeds=2))
    for run in results.runs[1:]:
        with results.writing(run) as append:
            append({"round": 1})
    said: list[str] = []
    play_all(results, 2, lambda progress: said.append(progress.sentence()))
    assert not results.missing and said[-1].startswith("4 of 4 runs done")

    for run in results.runs[2:]:
        results.path(run).unlink()
    with pytest.raises(
        LabFailed,
        match=r"(?s)2 of 4 runs failed.*1-of-1, seed 2: .*signal 9.*2-of-0, seed 2: .*signal 9.*--jobs",
    ):
        play_all(results, 1, lambda _: None, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert len(results.missing) == 2  # the other run continued


def test_a_runs_output_is_logged_even_if_it_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = "import sys; print('the task plug-in sums: score: oh', file=sys.stderr)"
    play_all(Results.create(tmp_path / "out", experiment()), 1, lambda _: None, [sys.executable, "-c", said])
    assert "2-of-0, seed 1: the task plug-in sums: score: oh" in caplog.messages


def test_a_run_that_another_process_finished_in_the_meantime_has_not_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = (
        "import pathlib, sys; folder, setting, seed = sys.argv[1:];"
        " file = pathlib.Path(folder, 'runs', setting, f'seed-{seed}.jsonl');"
        " file.parent.mkdir(parents=True); file.touch(); sys.exit('it is finished')"
    )
    results = Results.create(tmp_path / "out", experiment())
    play_all(results, 1, lambda _: None, [sys.executable, "-c", first])
    assert not results.missing and "2-of-0, seed 1: it is finished" in caplog.messages


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_processes_and_report_an_interrupt(
    tmp_path: Path, by: signal.Signals
) -> None:
    results = Results.create(tmp_path / "out", experiment())
    script = (
        f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); print(1, flush=True);"
        " os.read(os.pipe()[0], 1)"
    )
    endless = [sys.executable, "-c", script]

    def interrupt(_: RunsProgress) -> None:
        os.kill(os.getpid(), by)

    with pytest.raises(KeyboardInterrupt):
        play_all(results, 1, interrupt, endless)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


STARTS = (
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid,"
    " flush=True); sys.stdin.read()"
)


@pytest.mark.net
def test_after_kill_9_of_the_lab_its_runs_end_before_their_next_line(tmp_path: Path) -> None:
    """Otherwise this run, whose output nobody reads, would continue for days."""
    results = Results.create(tmp_path / "out", experiment(rounds=10**6))
    run = results.runs[0]
    command = [
        sys.executable,
        "-c",
        STARTS,
        sys.executable,
        "-m",
        "swarmd.lab.play",
        str(results.folder),
        run.setting,
        str(run.seed),
    ]
    runs: list[psutil.Process] = []
    try:
        with killed_after(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as lab:
            runs.append(psutil.Process(int(lab.stdout.readline())))
            part = results.path(run).with_suffix(".part")
            wait_until(lambda: part.exists() and part.stat().st_size)
            runs += runs[0].children(recursive=True)
        wait_until(lambda: all(map(ended, runs)), SECONDS)
    finally:
        for process in runs:
            with suppress(psutil.NoSuchProcess):
                process.kill()


TWO_CURRICULA = """
name = "two"
nodes = 1
rounds = 1
seeds = 1
setting = [
    { name = "a", swarm = { curriculum = "tiny-9" } },
    { name = "b", swarm = { curriculum = "tiny-9-strict" } },
]
"""


def test_failed_runs_are_reported_even_without_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two.toml").write_text(TWO_CURRICULA)
    results = Results.create(tmp_path / "out", read_experiment(tmp_path / "two.toml"))
    damaged = results.path(results.runs[0])
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    assert (
        main(["lab", "run", str(tmp_path / "two.toml"), "--out", str(results.folder), "--judge", "--resume"])
        == 2
    )
    assert "one judge asks one curriculum" in capsys.readouterr().err


def test_a_results_folder_that_does_not_match_is_rejected(played: Results, tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("")
    reopened = Results.open(played.folder)
    assert reopened.experiment == played.experiment
    reopened.resume(played.experiment)
    for said, refused in {
        r"holds results.*--resume": lambda: Results.create(played.folder, played.experiment),
        r"no results. Give another folder": lambda: Results.create(tmp_path, played.experiment),
        "no results": lambda: Results.open(tmp_path),
        "is of 2 rounds": lambda: reopened.resume(experiment(rounds=3)),
        "not of these rounds": lambda: reopened.resume(
            experiment().model_copy(update={"question": "another"})
        ),
    }.items():
        with pytest.raises(BadResults, match=said):
            refused()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema": 99}, "schema 99"),
        ({"experiment": 3}, "damaged"),
        ({"schema": "\x1b[2J"}, r"schema '\\x1b"),
        ({"versions": []}, "damaged"),
        (
            {
                "experiment": {
                    "name": 3,
                    "question": "",
                    "expects": "",
                    "rounds": 1,
                    "seeds": 1,
                    "settings": [],
                }
            },
            "damaged",
        ),
        ({"versions": {"torch": "0.1"}}, r"torch 0\.1, now"),
    ],
)
def test_results_of_another_version_are_refused(
    played: Results, tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    document = json.loads((played.folder / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(document | changed))
    with pytest.raises(BadResults, match=said):
        Results.open(tmp_path).resume(played.experiment)


@pytest.mark.parametrize("cut", [-9, "{}\n", 0])
def test_a_damaged_results_file_is_named(played: Results, tmp_path: Path, cut: int | str) -> None:
    results, run = Results.create(tmp_path / "out", played.experiment), played.runs[0]
    whole = played.path(run).read_text()
    results.path(run).parent.mkdir(parents=True)
    results.path(run).write_text(
        whole + cut if isinstance(cut, str) else whole[: cut or whole.rindex("\n", 0, -1) + 1]
    )
    with pytest.raises(BadResults, match=r"seed-1\.jsonl is damaged.*Remove it and go on with --resume"):
        results.lines(run)


@pytest.mark.parametrize(
    "odd", [{"reward": "x"}, {"reward": [0.5]}, {"generated": [None, "x"]}, {"cpu": "x"}]
)
def test_figures_of_a_wrong_type_give_a_message_with_the_file(
    played: Results, tmp_path: Path, odd: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(played.folder, tmp_path / "out"))
    results, run = Results.open(folder), played.runs[0]
    *lines, last = played.lines(run)
    results.path(run).write_text("".join(json.dumps(line) + "\n" for line in [*lines, last | odd]))
    for read in (lambda: columns(results), lambda: export(results, tmp_path / "data")):
        with pytest.raises(BadResults, match=r"seed-1\.jsonl is damaged"):
            read()
    assert list((tmp_path / "data").iterdir()) == []  # no partial table blocks the next attempt


def test_more_seeds_can_be_added_later(tmp_path: Path) -> None:
    Results.create(tmp_path / "out", experiment(seeds=2))
    for wanted, seeds in ((3, 3), (2, 3)):  # with fewer seeds, existing runs are kept
        reopened = Results.open(tmp_path / "out")
        reopened.resume(experiment(seeds=wanted))
        assert {run.seed for run in reopened.missing} == set(range(1, seeds + 1))
        assert Results.open(tmp_path / "out").experiment.seeds == seeds
    reopened.seeds = 2  # of three, the first two are played now
    assert {run.seed for run in reopened.missing} == {1, 2}


def test_the_remaining_time_is_estimated_from_the_pace() -> None:
    now = [0.0]
    progress = RunsProgress(total=2, rounds=100, clock=lambda: now[0])
    run = Run("a", 1)
    progress.advanced(run, 1)
    assert progress.seconds_left is None
    now[0] = 49.0
    progress.advanced(run, 50)
    assert progress.share == 0.25 and progress.seconds_left == pytest.approx(150)


def test_output_printed_by_a_strategy_does_not_count_as_a_round() -> None:
    program = (
        "from swarmd.lab.parent_watch import run_program, tell_round\n"
        "def main():\n    print(400)\n    tell_round(1)\nrun_program(main)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "400\n")
