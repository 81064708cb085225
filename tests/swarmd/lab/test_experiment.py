"""Experiment files: how they are read, and the messages about mistakes."""

import random
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from swarmd.cli.app import main
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.lab import EXPERIMENTS
from swarmd.lab.experiment import BadExperiment, Churn, Hostile, parse_experiment, read_experiment
from swarmd.lab.surroundings import absences
from tests import ROOT

PLAIN: dict[str, Any] = {
    "name": "one",
    "nodes": 2,
    "rounds": 3,
    "setting": [{"name": "8/0"}, {"name": "4/4", "baseline": True}],
}


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_all_shipped_experiments_can_be_read(path: Path) -> None:
    read = read_experiment(path)
    assert read.name == path.stem and read.question and read.expects
    assert any(setting.baseline for setting in read.settings)


def test_the_families_experiment_puts_both_families_in_one_swarm() -> None:
    read = read_experiment(ROOT / "benchmarks" / "lab" / "families.toml")
    assert {curriculum_of(node).name for setting in read.settings for node in setting.nodes} == {"tiny-9"}
    assert {node.generate.max_new_tokens for setting in read.settings for node in setting.nodes} == {16}


def test_the_example_in_the_document_is_a_valid_experiment() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text()
    read = parse_experiment(
        tomllib.loads(page[page.index('    name = "mine"') :].partition("\n## ")[0]), "mine.toml"
    )
    assert [len(setting.nodes) for setting in read.settings] == [8] * 3 and read.baseline.name == "8/0"
    assert [node.model.name for node in read.settings[2].nodes] == ["tiny"] + ["tiny-latent"] * 7


def test_later_layers_override_earlier_ones_key_by_key() -> None:
    document = PLAIN | {
        "base": {"model": {"name": "tiny-latent"}, "round": {"local": 6, "external": 1}},
        "setting": [
            {
                "name": "mixed",
                "round": {"external": 2},
                "group": [{"nodes": 1}, {"nodes": 2, "round": {"external": 3}}],
            }
        ],
    }
    (setting,) = parse_experiment(document, "x.toml").settings
    assert [(n.model.name, n.round.local, n.round.external) for n in setting.nodes] == [
        ("tiny-latent", 6, 2), ("tiny-latent", 6, 3), ("tiny-latent", 6, 3),
    ]  # fmt: skip


def test_a_sweep_has_every_combination_for_each_setting_except_the_baseline() -> None:
    sweep = {"round": {"external": [4, 12]}, "sharing": {"take": ["uniform", "right"]}}
    mine = {"name": "mine", "round": {"local": 2, "external": 1}}
    read = parse_experiment(PLAIN | {"setting": [PLAIN["setting"][1], mine], "sweep": sweep}, "x.toml")
    assert read.baseline.name == "4/4" and [setting.name for setting in read.settings[1:]] == [
        f"mine, external {external}, take {take}" for external in (4, 12) for take in ("uniform", "right")
    ]
    assert [(s.nodes[0].round.local, s.nodes[0].round.external) for s in read.settings] == [
        (4, 4), (2, 4), (2, 4), (2, 12), (2, 12),
    ]  # fmt: skip
    alone = parse_experiment({"name": "one", "sweep": sweep}, "x.toml")
    assert next(setting.name for setting in alone.settings) == "external 4, take uniform"


def test_names_of_settings_may_use_any_alphabet() -> None:
    named = parse_experiment(PLAIN | {"setting": [{"name": "独自 8/0"}, {"name": "共享 4/4"}]}, "x.toml")
    assert [setting.slug for setting in named.settings] == ["独自-8-of-0", "共享-4-of-4"]


def test_rollouts_are_offered_unless_the_file_or_a_setting_says_otherwise() -> None:
    settings = [{"name": "a"}, {"name": "b", "sets": "whole"}, {"name": "c", "sets": "offered"}]
    for said, whole in (({}, [False, True, False]), ({"sets": "whole"}, [True, True, False])):
        assert [
            s.whole for s in parse_experiment(PLAIN | {"setting": settings} | said, "x.toml").settings
        ] == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rouns": 3}, "rouns: .*did you mean rounds"),
        ({"setting": []}, r"no \[\[setting\]\] and no \[sweep\]"),
        ({"sweep": {"round": {"local": []}}}, "sweep.round.local: "),
        ({"sweep": {"rond": {"local": [1]}}}, r"setting 1 \(8/0, local 1\): rond is not a section"),
        (
            {"sweep": {"round": {"local": [1]}}, "setting": [{"name": "a", "round": 5}]},
            "round: expected a section, found 5",
        ),
        ({"base": {"limits": {"cpu": "1 %"}}}, "limits is not a section"),
        ({"nodes": 0}, "nodes: "),
        ({"evaluation": {"question": 9}}, r"evaluation.question: .*did you mean evaluation.questions\?"),
        ({"sets": "gossiped"}, "sets: .*'whole'.*, found 'gossiped'"),
        ({"base": {"\x1b[2J": {}}}, r"'\\x1b\[2J' is not a section"),
        ({"base": {"modle": {}}}, "modle is not a section.*did you mean model"),
        (
            {"base": {"model": {"nmae": "tiny"}}},
            r"setting 1 \(8/0\): model.nmae: unknown key; did you mean model.name\?",
        ),
        ({"base": {"sharing": {"take": "best"}}}, "sharing.take: expected .*right.*, found .best."),
        ({"base": {"judge": {"url": ""}}}, "judge is not a section"),
        ({"base": {"round": {"pace": 5.0}}}, "round.pace has no effect in an experiment"),
        ({"base": {"swarm": {"mdns": "on"}}}, "swarm.mdns has no effect in an experiment"),
        ({"setting": [{"name": "4/4"}, {"name": "4 of 4"}]}, "same name"),
        ({"setting": [{"name": "a", "baseline": True}, {"name": "b", "baseline": True}]}, "more than one"),
        ({"setting": [{"name": "a", "group": [{"nodes": 1}, {}]}]}, "group 2: `nodes` is missing"),
        (
            {"setting": [{"name": "b", "against": "9/0"}]},
            r"`against` does not name another setting.* Name one of ",
        ),
        ({"setting": [{"name": "b", "churn": {"present": 1}}]}, "churn.away: it is missing$"),
        ({"setting": [{"name": "b", "churn": 1}]}, "churn: expected a section, found 1$"),
        ({"setting": [{"round": {}}]}, "setting 1: name: expected a text of 1 to 64 printable .*, found ''$"),
        ({"name": "My Table"}, "name: expected at most 64 lower-case letters.*, found 'My Table'$"),
        ({"rounds": 0}, "rounds: expected at least 1, found 0$"),
        ({"rounds": 10**9}, "rounds: expected at most 1,000,000, found 1000000000$"),
        ({"seeds": "3"}, "seeds: expected a whole number, found '3'$"),
        ({"sets": "all"}, "sets: expected 'offered' or 'whole', found 'all'$"),
        ({"sweep": {"round": {"local": 3}}}, "sweep.round.local: expected a list, found 3$"),
        ({"sweep": {"round": {"local": []}}}, r"expected at least one value, found \[\]$"),
        (
            {"setting": [{"name": "b", "hostile": {"liar": 1}}]},
            r"hostile.liar: .*did you mean hostile.liars\?",
        ),
    ],
)
def test_the_message_about_a_mistake_names_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=f"(?s)^x.toml: .*{said}"):
        parse_experiment(PLAIN | change, "x.toml")


def test_a_missing_or_malformed_file_gives_a_message_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(BadExperiment, match=r"directory\. `swarmd lab list"):
        read_experiment(tmp_path / "missing.toml")
    for mistaken in ("sapo", "sapotable"):
        with pytest.raises(BadExperiment, match=f"{mistaken}: .*; did you mean sapo-table"):
            read_experiment(tmp_path / mistaken)
    for text in ("name = ", "nodes = " + "9" * 5000):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(BadExperiment, match=r"bad\.toml: not valid TOML"):
            read_experiment(tmp_path / "bad.toml")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('name = "x"\n[[setting]]\nname = "a"\n', "utf-8-sig")
    assert read_experiment(tmp_path / "x.toml").name == "x"


def test_a_name_means_the_shipped_experiment_even_if_a_results_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "churn").mkdir()
    (tmp_path / "churn" / "theirs.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert (
        main(["lab", "run", "churn"]) == 2
        and "churn is not empty, and holds no results" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ('sharing = { take = "none.py" }', "none.py cannot be used"),
        ('model = { name = "tny" }', "called 'tny'"),
    ],
)
def test_errors_of_later_runs_are_reported_before_the_first_run(
    base: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "x.toml", tmp_path / "out"
    file.write_text(f'name = "x"\n[base]\n{base}\n[[setting]]\nname = "4/4"\n')
    assert main(["lab", "run", str(file), "--out", str(out)]) in (2, 3)
    assert said in capsys.readouterr().err and not out.exists()


def test_the_surroundings_of_a_setting_are_read() -> None:
    setting = {
        "name": "b",
        "against": "8/0",
        "churn": {"present": 9, "away": 3},
        "hostile": {"liars": 1, "poisoners": 2},
    }
    read = parse_experiment(PLAIN | {"setting": [*PLAIN["setting"], setting]}, "x.toml")
    one = read.settings[2]
    assert (one.churn, one.hostile) == (Churn(present=9, away=3), Hostile(liars=1, poisoners=2))
    assert read.baseline_of(one).name == "8/0" and read.baseline_of(read.settings[0]).name == "4/4"


def test_absences_depend_on_the_seed_and_one_node_is_always_present() -> None:
    def drawn(seed: int) -> list[frozenset[int]]:
        return list(islice(absences(4, Churn(present=6, away=3), random.Random(seed)), 3000))

    gone = drawn(1)
    assert gone == drawn(1) != drawn(2) and max(map(len, gone)) < 4
    assert sum(map(len, gone)) / 12000 == pytest.approx(1 / 3, abs=0.03)  # absent in 3 of 9 rounds
    assert next(absences(4, None, random.Random(1))) == frozenset()


def test_another_model_can_be_given_only_if_all_nodes_have_the_same_model() -> None:
    read = parse_experiment({"name": "one", "setting": [{"name": "a"}, {"name": "b"}]}, "one.toml")
    assert {n.model.name for s in read.with_model("./mine").settings for n in s.nodes} == {"./mine"}
    groups = [{"nodes": 1, "model": {"name": "tiny-latent"}}, {"nodes": 1}]
    mixed = parse_experiment({"name": "one", "setting": [{"name": "a", "group": groups}]}, "one.toml")
    with pytest.raises(BadExperiment, match=r"several models \(tiny, tiny-latent\)\. Leave --model out"):
        mixed.with_model("./mine")
