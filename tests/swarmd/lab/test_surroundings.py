"""The surroundings of a setting's nodes, played for a few rounds.

They include absences, hostile peers and repeated questions.
"""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from swarmd.lab.experiment import BadExperiment, Evaluation, Setting, parse_experiment
from swarmd.lab.play import PlayedSwarm
from swarmd.lab.statistics import figures
from swarmd.lab.surroundings import MARK
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks

pytestmark = pytest.mark.slow


def setting(**keys: Any) -> Setting:
    around = {
        "name": "one",
        "round": {"local": 2, "external": 2, "completions": 4},
        "gate": {"mode": "off"},
    } | keys
    return parse_experiment({"name": "short", "nodes": 3, "setting": [around]}, "short.toml").settings[0]


def lines(verifier: Verifier, one: Setting, rounds: int) -> tuple[PlayedSwarm, list[Mapping[str, Any]]]:
    swarm = PlayedSwarm(one, 1, verifier)
    return swarm, [swarm.round(number) for number in range(1, rounds + 1)]


def test_nodes_with_different_curricula_give_a_message_with_a_remedy(verifier: Verifier) -> None:
    groups = [{"nodes": 1, "model": {"name": name}} for name in ("tiny", "./another")]
    with pytest.raises(BadExperiment, match=r"\(ladder-9, tiny-9\).*Set swarm.curriculum"):
        PlayedSwarm(setting(group=groups), 1, verifier)


def test_absent_nodes_neither_ask_nor_hear_and_do_not_count_in_figures(verifier: Verifier) -> None:
    swarm, played = lines(verifier, setting(churn={"present": 2, "away": 2}), 6)
    away = [[reward is None for reward in line["reward"]] for line in played]
    assert any(map(any, away)) and not any(map(all, away))
    for line, gone in zip(played, away, strict=True):
        assert all(
            (generated == 0) == absent for generated, absent in zip(line["generated"], gone, strict=True)
        )
    found = figures(played, [2] * 3, [2] * 3, [4] * 3)
    there = [reward for line in played for reward in line["reward"] if reward is not None]
    assert found.cumulative == pytest.approx(sum(there)) and len(found.rewards) == 6
    swarm.close()


def test_figures_of_a_round_cover_all_its_updates(verifier: Verifier) -> None:
    replay = {"mode": "on", "updates_per_round": 3, "max_clip_fraction": 1.0, "max_kl": 100.0}
    swarm, played = lines(verifier, setting(replay=replay), 4)
    assert max(max(line["local"]) + max(line["external"]) for line in played) > 4
    found = figures(played, [2] * 3, [2] * 3, [4] * 3)
    assert 0 < found.useful <= 4
    assert found.external * 36 == pytest.approx(sum(sum(line["external"]) for line in played))
    swarm.close()


def test_nodes_fetch_only_chosen_offers_but_get_whole_sets_completely(verifier: Verifier) -> None:
    everything = {"share": "all", "take": "unfiltered"}
    heard = {}
    for sets in ("offered", "whole"):
        swarm, played = lines(verifier, setting(sets=sets, sharing=everything), 3)
        assert [line["external"] for line in played[1:]] == [[2] * 3] * 2
        heard[sets] = max(len(node.pool) for node in swarm.nodes)
        swarm.close()
    # In three rounds: two rollouts each if fetched, all rollouts of two other nodes if sent whole.
    assert heard["offered"] <= 6 < heard["whole"]


def test_rollouts_of_hostile_peers_are_trained_on_and_counted(verifier: Verifier) -> None:
    swarm, played = lines(verifier, setting(hostile={"poisoners": 1, "liars": 1, "steerers": 1}), 3)
    assert sum(sum(line["hostile"]) for line in played) > 0
    poisoner, liar, steerer = swarm.hostile
    assert {task.ref.specialty for task in steerer._tasks.draw(9, random.Random(1))} == {
        swarm.curriculum.specialties[0]
    }
    tasks = CurriculumTasks(swarm.curriculum).draw(4, random.Random(1))
    for peer, right in ((poisoner, 2), (liar, 1), (steerer, 2)):
        texts = [peer._make(task) for task in tasks]
        assert all(sum(MARK in text for text in each) == (right if peer is poisoner else 0) for each in texts)
    questions = CurriculumTasks(swarm.curriculum).draw_held_out(2, random.Random(0))
    assert len(swarm.evaluate(questions, Evaluation(), 0)["marked"]) == 3
    swarm.close()


def test_further_questions_are_asked_while_groups_have_no_advantage(verifier: Verifier) -> None:
    swarm, played = lines(
        verifier, setting(round={"local": 3, "external": 0, "completions": 4, "resample": 8}), 2
    )
    for line in played:
        # All asked questions count as generated; the batch has I local rollouts.
        assert max(line["generated"]) > 3 and line["local"] == [3] * 3
        assert line["useful"] == [min(3, informative) for informative in line["informative"]]
    swarm.close()
