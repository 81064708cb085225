"""The gate against unusual text works in a real node, with the tiny model's own log-probabilities."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api.status_words import round_sentence
from swarmd.experience.outliers import MEASURED_PARAMETERS
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.node import build
from swarmd.types import RoundLine, Scored, Tokens
from tests.swarmd.trainer.conftest import play, swarm_of, watched


def config(**sections: object) -> NodeConfig:
    return NodeConfig.model_validate({"model": {"device": "cpu"}, **sections})


def test_right_answers_with_unlikely_text_are_not_trained_on(verifier: Verifier) -> None:
    (node, _, _), (_, _, other) = swarm_of(verifier, config(), config())
    first, second, third = play(node, other, (1, 2, 3))
    assert (first.external, first.gated) == (4, {}), (
        "the gate judged after 32 local completions, which are too few"
    )
    assert (second.external, third.external) == (0, 0)
    assert sum(second.gated.values()) == sum(third.gated.values()) == 4
    (fourth,) = play(node, other, (4,), prefix="")
    assert (fourth.external, fourth.gated) == (4, {})
    assert third.rejected == fourth.rejected == {}, "an author was charged for text that the gate left out"


@pytest.mark.parametrize("mode", ["on", "report", "off"])
def test_text_after_an_answer_is_removed_in_every_gate_mode(verifier: Verifier, mode: str) -> None:
    (node, _, _), (_, _, other) = swarm_of(verifier, config(gate={"mode": mode}), config())
    batches: list[Scored] = []
    reports = play(watched(node, batches.extend), other, (1, 2, 3), prefix="", suffix=" evil" * 20)
    assert [(r.external, r.gated, r.gate_reported) for r in reports] == [(4, {}, {})] * 3
    texts = [c.text for s in batches if s.rollout.author != node.me for c in s.rollout.completions]
    assert len(texts) == 24 and all(text.endswith("</answer>") for text in texts)


@pytest.mark.parametrize(
    "gate, parameters, gated, reported",
    [
        ({"mode": "auto"}, MEASURED_PARAMETERS, 4, 0),
        ({"mode": "auto"}, MEASURED_PARAMETERS + 1, 0, 4),  # for unmeasured sizes the gate only reports
        ({"mode": "on"}, MEASURED_PARAMETERS + 1, 4, 0),
        ({"mode": "report"}, 1, 0, 4),
        ({"mode": "off"}, 1, 0, 0),
        ({"margin": 20.0}, 1, 0, 0),
    ],
)
def test_each_gate_mode_acts_as_documented(
    verifier: Verifier, gate: dict[str, object], parameters: int, gated: int, reported: int
) -> None:
    (plain, policy, _), (_, _, other) = swarm_of(verifier, config(gate={"mode": "off"}), config())
    of_size = SimpleNamespace(
        generate=policy.generate,
        answer=policy.answer,
        update=policy.update,
        logprobs=policy.logprobs,
        parameters=parameters,
    )
    node = build(config(gate=gate), 1, plain.me, plain.swarm, of_size, verifier)
    for played in play(node, other, (9, 10, 20))[1:]:
        assert (played.external, sum(played.gated.values()), sum(played.gate_reported.values())) == (
            4 - gated,
            gated,
            reported,
        )
    assert (node.gate is None) == (gate == {"mode": "off"})


def test_with_replay_the_log_probabilities_of_a_rollout_are_computed_once(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate computes the log-probabilities, and training takes them from the gate."""
    asked: list[Scored] = []
    logprobs = LanguagePolicy.logprobs

    def counted(policy: LanguagePolicy, batch: Sequence[Scored]) -> Sequence[Tokens]:
        asked.extend(batch)
        return logprobs(policy, batch)

    monkeypatch.setattr(LanguagePolicy, "logprobs", counted)
    replay = {"mode": "on", "size": 64, "batch": 16, "author_share": 1.0}
    (node, _, _), (_, _, other) = swarm_of(verifier, config(replay=replay), config())
    reports = play(node, other, (1, 2, 3), prefix="") + play(node, other, (4,))
    assert sum(r.external for r in reports[:3]) > 12 and all(r.gated == {} for r in reports[:3])
    assert sum(reports[3].gated.values()) > 0
    refs = [s.rollout.ref for s in asked]
    assert len(refs) == len(set(refs)) > 12


@pytest.mark.parametrize(
    ("field", "said"),
    [("gated", "not trained on"), ("gate_reported", "odd, but trained on (of one round in ten)")],
)
def test_gated_rollouts_are_recorded_and_shown(field: str, said: str) -> None:
    line = RoundLine(round=1, **{field: {"an unlikely token": 2}})
    assert f"{said}: 2 an unlikely token" in round_sentence(line)
