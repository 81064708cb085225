"""The gate in a real node: tiny's own log-probabilities, a checkpoint between, and what an operator reads."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2p.engines.memory import MemorySwarm
from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api.status_words import round_sentence
from swarmd.experience.outliers import MEASURED_PARAMETERS
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.state.metrics import NodeReport, metrics_line
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.node import build
from swarmd.types import Scored, Tokens
from tests.swarmd.state.test_metrics import report
from tests.swarmd.trainer.conftest import join, play, watched


class OfSize:
    """A policy that says it has so many parameters."""

    def __init__(self, policy: LanguagePolicy, parameters: int) -> None:
        self.generate, self.answer, self.update, self.logprobs = (
            policy.generate,
            policy.answer,
            policy.update,
            policy.logprobs,
        )
        self.parameters = parameters


def config(**sections: object) -> NodeConfig:
    return NodeConfig.model_validate({"model": {"device": "cpu"}, **sections})


def test_right_answers_with_something_in_them_are_not_trained_on(verifier: Verifier) -> None:
    swarm = MemorySwarm()
    node, _, _ = join(swarm, 1, verifier, config())
    _, _, other = join(swarm, 2, verifier, config())
    first, second, third = play(node, other, (1, 2, 3))
    assert (first.external, first.gated) == (4, {}), (
        "of its own it has seen 32 completions, which is too few to judge by"
    )
    assert (second.external, third.external) == (0, 0)
    assert sum(second.gated.values()) == sum(third.gated.values()) == 4
    (fourth,) = play(node, other, (4,), prefix="")
    assert (fourth.external, fourth.gated) == (4, {})
    assert third.rejected == fourth.rejected == {}, "nobody is blamed"


def test_what_comes_after_an_answer_is_left_out(verifier: Verifier) -> None:
    swarm = MemorySwarm()
    node, _, _ = join(swarm, 1, verifier, config())
    _, _, other = join(swarm, 2, verifier, config())
    batches: list[Scored] = []
    node = watched(node, batches.extend)
    assert all(
        (r.external, r.gated) == (4, {}) for r in play(node, other, (1, 2, 3), prefix="", suffix=" evil" * 20)
    )
    texts = [c.text for s in batches if s.rollout.author != node.me for c in s.rollout.completions]
    assert len(texts) == 24 and all(text.endswith("</answer>") for text in texts)


@pytest.mark.parametrize(
    "gate, parameters, gated, reported",
    [
        ({"mode": "auto"}, MEASURED_PARAMETERS, 4, 0),
        ({"mode": "auto"}, MEASURED_PARAMETERS + 1, 0, 4),  # where nothing was measured it only reports
        ({"mode": "on"}, MEASURED_PARAMETERS + 1, 4, 0),
        ({"mode": "report"}, 1, 0, 4),
        ({"mode": "off"}, 1, 0, 0),
        ({"margin": 20.0}, 1, 0, 0),
    ],
)
def test_each_gate_mode_acts_as_documented(
    verifier: Verifier, gate: dict[str, object], parameters: int, gated: int, reported: int
) -> None:
    swarm = MemorySwarm()
    plain, policy, _ = join(swarm, 1, verifier, config(gate={"mode": "off"}))
    _, _, other = join(swarm, 2, verifier, config())
    node = build(config(gate=gate), 1, plain.me, plain.swarm, OfSize(policy, parameters), verifier)
    for played in play(node, other, (1, 2, 3))[1:]:
        assert (played.external, sum(played.gated.values()), sum(played.gate_reported.values())) == (
            4 - gated,
            gated,
            reported,
        )
    assert (node.gate is None) == (gate == {"mode": "off"})


def test_with_replay_each_rollout_is_computed_once(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate computes them, and its log-probabilities serve as those of first use."""
    asked: list[Scored] = []
    logprobs = LanguagePolicy.logprobs

    def counted(policy: LanguagePolicy, batch: Sequence[Scored]) -> Sequence[Tokens]:
        asked.extend(batch)
        return logprobs(policy, batch)

    monkeypatch.setattr(LanguagePolicy, "logprobs", counted)
    swarm = MemorySwarm()
    node, _, _ = join(
        swarm, 1, verifier, config(replay={"mode": "on", "size": 64, "batch": 16, "author_share": 1.0})
    )
    _, _, other = join(swarm, 2, verifier, config())
    reports = play(node, other, (1, 2, 3), prefix="") + play(node, other, (4,))
    assert sum(r.external for r in reports[:3]) > 12 and all(r.gated == {} for r in reports[:3])
    assert sum(reports[3].gated.values()) > 0
    refs = [s.rollout.ref for s in asked]
    assert len(refs) == len(set(refs)) > 12


def test_gated_rollouts_are_recorded_and_shown() -> None:
    line = metrics_line(replace(report(1), gated={"an unlikely token": 2}), NodeReport(0.0, 1, None, 1.0))
    assert (line["gated"], line["gate_reported"]) == ({"an unlikely token": 2}, {})
    assert "not trained on: 2 an unlikely token" in round_sentence(line)
    line = metrics_line(
        replace(report(1), gate_reported={"an unlikely token": 2}), NodeReport(0.0, 1, None, 1.0)
    )
    assert (line["gated"], line["gate_reported"]) == ({}, {"an unlikely token": 2})
    assert "odd, but trained on: 2 an unlikely token" in round_sentence(line)
