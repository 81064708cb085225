"""The gate in a real node: tiny's own log-probabilities, a checkpoint between, and what an operator reads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.member import Member
from swarmd.cli.view import round_sentence
from swarmd.config.config import NodeConfig
from swarmd.exchange import wire
from swarmd.experience.outliers import MEASURED_TO
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.state.metrics import NodeReport, metrics_line
from swarmd.tasks.scoring import Verifier
from swarmd.trainer.checkpoint import Checkpoints
from swarmd.trainer.node import build, resume, run_state
from swarmd.trainer.round import Node, run_round
from swarmd.types import Completion, Rollout, RoundReport, Scored, TaskRef, Tokens
from tests.cli.test_metrics import report
from tests.node.test_round import join, without_seconds


class OfSize:
    """A policy that says it has so many parameters."""

    def __init__(self, policy: LanguagePolicy, parameters: int) -> None:
        self.generate, self.answer, self.update, self.logprobs = policy.generate, policy.answer, policy.update, policy.logprobs
        self.parameters = parameters


def config(**sections: object) -> NodeConfig:
    return NodeConfig.model_validate({"model": {"device": "cpu"}, **sections})


def share(member: Member, node: Node, t: int, count: int, prefix: str = "", suffix: str = "") -> None:
    """Right sums, and as many wrong ones, to other questions each round."""
    tasks = [task for n in range(count) if (task := node.tasks.task(TaskRef("basic_arithmetic", 100 * t + n))) is not None]
    right = [int(task.entry["answer"]) for task in tasks]
    texts = [(f"{prefix}<answer>{n}</answer>{suffix}", f"<answer>{n + 1}</answer>") for n in right]
    completions = [(Completion(good, True), Completion(bad, True)) for good, bad in texts]
    rollouts = [Rollout(task.ref, both, member.identity.peer_id) for task, both in zip(tasks, completions, strict=True)]
    member.publish(wire.KIND, wire.encode(rollouts, t, "tiny"))


def play(node: Node, other: Member, rounds: Sequence[int], prefix: str = "evil ", suffix: str = "") -> list[RoundReport]:
    reports = []
    for t in rounds:
        share(other, node, t, 4, prefix, suffix)
        reports.append(without_seconds(run_round(t, node)))
    return reports


def test_right_answers_with_something_in_them_are_not_trained_on(verifier: Verifier) -> None:
    swarm = MemorySwarm()
    node, _, _ = join(swarm, 1, verifier, config())
    _, _, other = join(swarm, 2, verifier, config())
    first, second, third = play(node, other, (1, 2, 3))
    assert (first.external, first.gated) == (4, {}), "of its own it has seen 32 completions, which is too few to judge by"
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
    sample = node.sample
    node.sample = lambda *given: batches.extend(batch := sample(*given)) or batch
    assert all((r.external, r.gated) == (4, {}) for r in play(node, other, (1, 2, 3), prefix="", suffix=" evil" * 20))
    texts = [c.text for s in batches if s.rollout.author != node.me for c in s.rollout.completions]
    assert len(texts) == 24 and all(text.endswith("</answer>") for text in texts)


@pytest.mark.parametrize("mode, parameters, acts", [("auto", MEASURED_TO, True), ("auto", MEASURED_TO + 1, False),
    ("on", MEASURED_TO + 1, True), ("report", 1, False)])  # fmt: skip
def test_where_nothing_was_measured_it_only_reports(verifier: Verifier, mode: str, parameters: int, acts: bool) -> None:
    swarm = MemorySwarm()
    plain, policy, _ = join(swarm, 1, verifier, config(gate={"mode": "off"}))
    _, _, other = join(swarm, 2, verifier, config())
    node = build(config(gate={"mode": mode}), 1, plain.me, plain.swarm, OfSize(policy, parameters), verifier)
    _, second, third = play(node, other, (1, 2, 3))
    if acts:
        assert (second.external, third.external) == (0, 0) and third.gated and not third.gate_reported
    else:
        assert (second.external, third.external) == (4, 4) and sum(third.gate_reported.values()) == 4 and not third.gated


@pytest.mark.parametrize("gate", [{"mode": "off"}, {"margin": 20.0}])
def test_switched_off_or_with_a_wide_margin_it_lets_everything_in(verifier: Verifier, gate: dict[str, object]) -> None:
    swarm = MemorySwarm()
    node, _, _ = join(swarm, 1, verifier, config(gate=gate))
    _, _, other = join(swarm, 2, verifier, config())
    assert all((r.external, r.gated) == (4, {}) for r in play(node, other, (1, 2, 3)))
    assert (node.gate is None) == ("mode" in gate)


def test_a_resumed_node_judges_as_one_that_never_stopped(verifier: Verifier, tmp_path: Path) -> None:
    swarm = MemorySwarm()
    node, policy, _ = join(swarm, 1, verifier, config())
    _, _, other = join(swarm, 2, verifier, config())
    checkpoints = Checkpoints(tmp_path)
    play(node, other, (1, 2))
    checkpoints.save(run_state(2, 1, node), policy.files())
    reports = play(node, other, (3, 4))
    assert sum(sum(r.gated.values()) for r in reports) == 8

    swarm = MemorySwarm()
    again, again_policy, _ = join(swarm, 1, verifier, config())
    _, _, other = join(swarm, 2, verifier, config())
    assert resume(checkpoints, again, again_policy)[0] == 2
    assert play(again, other, (3, 4)) == reports
    assert node.gate is not None and again.gate is not None and again.gate.state == node.gate.state


def test_with_replay_each_rollout_is_computed_once(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the gate, and then no more: what it saw are the log-probabilities of first use."""
    asked: list[Scored] = []
    logprobs = LanguagePolicy.logprobs

    def counted(policy: LanguagePolicy, batch: Sequence[Scored]) -> Sequence[Tokens]:
        asked.extend(batch)
        return logprobs(policy, batch)

    monkeypatch.setattr(LanguagePolicy, "logprobs", counted)
    swarm = MemorySwarm()
    node, _, _ = join(swarm, 1, verifier, config(replay={"mode": "on", "size": 64, "batch": 16, "author_share": 1.0}))
    _, _, other = join(swarm, 2, verifier, config())
    reports = play(node, other, (1, 2, 3), prefix="") + play(node, other, (4,))
    assert sum(r.external for r in reports[:3]) > 12 and all(r.gated == {} for r in reports[:3])
    assert sum(reports[3].gated.values()) > 0
    refs = [s.rollout.ref for s in asked]
    assert len(refs) == len(set(refs)) > 12


def test_what_was_gated_is_written_down_and_shown() -> None:
    line = metrics_line(replace(report(1), gated={"an unlikely token": 2}), NodeReport(0.0, 1, None, 1.0))
    assert (line["gated"], line["gate_reported"]) == ({"an unlikely token": 2}, {})
    assert "not trained on: 2 an unlikely token" in round_sentence(line)
    line = metrics_line(replace(report(1), gate_reported={"an unlikely token": 2}), NodeReport(0.0, 1, None, 1.0))
    assert (line["gated"], line["gate_reported"]) == ({}, {"an unlikely token": 2})
    assert "odd, but trained on: 2 an unlikely token" in round_sentence(line)
