"""Experiment files: what they mean, and what is said of a wrong one."""

from pathlib import Path
from typing import Any

import pytest

from swarmd.lab import EXPERIMENTS
from swarmd.lab.experiment import BadExperiment, parse_experiment, read_experiment

PLAIN: dict[str, Any] = {"name": "one", "nodes": 2, "rounds": 3, "setting": [{"name": "8/0"}, {"name": "4/4", "baseline": True}]}


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_what_comes_with_swarmd_can_be_read(path: Path) -> None:
    read = read_experiment(path)
    assert read.name == path.stem and read.question and read.expects
    assert any(setting.baseline for setting in read.settings)


def test_later_layers_win_key_by_key() -> None:
    document = PLAIN | {
        "base": {"model": {"name": "tiny-latent"}, "round": {"local": 6, "external": 1}},
        "setting": [{"name": "mixed", "round": {"external": 2}, "group": [{"nodes": 1}, {"nodes": 2, "round": {"external": 3}}]}],
    }
    (setting,) = parse_experiment(document, "x.toml").settings
    assert [(n.model.name, n.round.local, n.round.external) for n in setting.nodes] == [
        ("tiny-latent", 6, 2), ("tiny-latent", 6, 3), ("tiny-latent", 6, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rouns": 3}, "rouns: .*did you mean rounds"),
        ({"setting": []}, "setting: "),
        ({"nodes": 0}, "nodes: "),
        ({"base": {"modle": {}}}, "modle is no section.*did you mean model"),
        ({"base": {"model": {"nmae": "tiny"}}}, r"setting 1 \(8/0\): model.nmae"),
        ({"base": {"sharing": {"take": "best"}}}, "sharing.take"),
        ({"base": {"judge": {"url": ""}}}, "judge is no section"),
        ({"setting": [{"name": "4/4"}, {"name": "4 of 4"}]}, "same name"),
        ({"setting": [{"name": "a", "baseline": True}, {"name": "b", "baseline": True}]}, "more than one"),
        ({"setting": [{"name": "a", "group": [{"nodes": 1}, {}]}]}, "group 2: `nodes` is missing"),
    ],
)
def test_a_mistake_is_told_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadExperiment, match=f"(?s)^x.toml: .*{said}"):
        parse_experiment(PLAIN | change, "x.toml")


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(BadExperiment, match="swarmd lab list"):
        read_experiment(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(BadExperiment, match=r"bad\.toml: no TOML"):
        read_experiment(tmp_path / "bad.toml")
