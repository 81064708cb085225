"""The round with its real parts: the tiny model, the contained verifier, the in-memory swarm."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.member import Member
from p2p.types import PeerId, Reason
from swarmd.config.config import GenerateConfig, NodeConfig
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.exchange.virtual import VirtualNode
from swarmd.experience.advantages import within_group
from swarmd.experience.replay_schedule import GuardState
from swarmd.experience.usefulness import USELESS_IN_A_ROW
from swarmd.tasks.curriculum import TINY_9, TRAINING_TASKS
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import tasks_of
from swarmd.trainer.checkpoint import Checkpoints
from swarmd.trainer.node import resume, run_state
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import SCORED_PER_ROUND, cut_behind_answers, run_round, score_others, take_in
from swarmd.types import (
    AnswerFigures,
    Completion,
    Rollout,
    RoundReport,
    Scored,
    Task,
    TaskRef,
    UpdateReport,
    Weigh,
)
from tests.doubles import gossip
from tests.p2p.lossy import LossySwarm
from tests.swarmd.trainer.conftest import join, play, swarm_of, watched, weights, without_seconds


def config(local: int = 4, external: int = 4, max_age: int = 2, gate: str = "on") -> NodeConfig:
    sections = {"round": {"local": local, "external": external, "completions": 8, "max_age": max_age}}
    return NodeConfig.model_validate({**sections, "gate": {"mode": gate}, "model": {"device": "cpu"}})


def pair(verifier: Verifier, settings: NodeConfig) -> tuple[RoundParts, Member, Member]:
    """Return a node, its member, and another member of its swarm."""
    (node, _, member), (_, _, other) = swarm_of(verifier, settings, config())
    return node, member, other


def right_answer(task: Task) -> Completion:
    return Completion(
        f"<answer>{task.entry['answer'] or task.entry['metadata']['example_answer']}</answer>", True
    )


WRONG = Completion("no", True)


def round_with(
    node: RoundParts, other: Member, answers: Mapping[TaskRef, Sequence[Completion]], t: int = 1
) -> RoundReport:
    """Run a round in which the node receives the other member's answers to these tasks."""
    rollouts = [Rollout(ref, tuple(given), other.identity.peer_id) for ref, given in answers.items()]
    gossip(other, rollouts, t)
    return run_round(t, node)


def test_a_node_without_peers_trains_without_waiting(verifier: Verifier) -> None:
    node, _, _ = join(MemorySwarm(), 1, verifier, config())
    node = replace(node, clock=map(float, itertools.count()).__next__)  # one second per reading
    reports = [run_round(t, node) for t in range(1, 4)]
    for report in reports:
        assert report.seconds == {"generate": 1, "share": 1, "collect": 1, "score": 3, "train": 1}
    assert all((r.local, r.external) == (4, 0) for r in reports)
    assert all(r.tokens.trained > 0 and r.grad_norm > 0 for r in reports if 0 < r.reward_mean < 1)


def test_external_zero_in_a_swarm_equals_grpo_alone_bit_for_bit(verifier: Verifier, tmp_path: Path) -> None:
    settings = config(local=4, external=0)
    alone, alone_policy, _ = join(MemorySwarm(), 1, verifier, settings)
    alone_reports = [without_seconds(run_round(t, alone)) for t in range(1, 4)]

    (crowded, crowded_policy, _), (other, _, _) = swarm_of(verifier, settings, config())
    crowded_reports = []
    for t in range(1, 4):
        run_round(t, other)
        crowded_reports.append(without_seconds(run_round(t, crowded)))

    assert crowded_reports == alone_reports
    assert weights(crowded_policy, tmp_path / "a") == weights(alone_policy, tmp_path / "b")


def test_each_node_of_a_swarm_trains_on_four_local_and_four_external_rollouts(verifier: Verifier) -> None:
    nodes = [node for node, _, _ in swarm_of(verifier, *[config()] * 3)]
    reports = [run_round(t, node) for t in range(1, 6) for node in nodes]
    later = reports[6:]
    assert all(r.local == 4 for r in reports) and sum(r.external == 4 for r in later) >= 0.8 * len(later)
    assert all(r.staleness.max <= 2 for r in reports), "a rollout is older than round.max_age"
    for node, report in zip(nodes * 5, reports, strict=False):
        assert node.me not in report.external_authors
        authors, specialties = zip(*report.first_used, strict=True) if report.first_used else ((), ())
        assert sorted(authors) == sorted(report.external_authors), (
            "an external rollout was used more than once"
        )
        assert Counter(specialties) == report.external_by_specialty


def test_the_same_seed_gives_the_same_reports_despite_loss_and_duplication(verifier: Verifier) -> None:
    def history() -> list[RoundReport]:
        swarm = LossySwarm(seed=7, loss=0.3, duplicate=0.3)
        nodes = [join(swarm, i, verifier, config(local=2, external=2))[0] for i in (1, 2)]
        return [without_seconds(run_round(t, node)) for t in range(1, 4) for node in nodes]

    assert history() == history()


def test_questions_and_rewards_of_external_rollouts_are_computed_by_the_node(verifier: Verifier) -> None:
    """A peer's answers get the rewards of the node's own verifier, whatever the peer claims."""
    node, _, liar = pair(verifier, config())
    wrong = Completion("<answer>I am right, trust me</answer>", True)
    tasks = node.tasks.draw(4, random.Random(0))
    report = round_with(node, liar, {task.ref: [right_answer(task), wrong] for task in tasks})
    assert report.pool.fresh == 4 and report.external == 4 and report.zero_advantage_dropped == 0
    for scored in node.pool:
        assert scored.question == node.tasks.task(scored.rollout.ref).question
        assert scored.rewards == (1.0, 0.0)


def test_a_node_that_does_not_train_shares_rollouts_and_keeps_its_weights(
    verifier: Verifier, tmp_path: Path
) -> None:
    settings = config()
    settings = settings.model_copy(update={"round": settings.round.model_copy(update={"train": "off"})})
    (node, policy, _), (other, _, _) = swarm_of(verifier, settings, config())
    before, heard = weights(policy, tmp_path / "before"), 0
    for t in range(1, 5):
        report = run_round(t, node)
        heard += run_round(t, other).pool.fresh
        assert (report.generated, report.updates, report.external, report.useful) == (4, 0, 0, 0)
    assert (
        heard > 0
        and weights(policy, tmp_path / "after")["weights.safetensors"] == before["weights.safetensors"]
    )


def test_rollouts_without_advantage_are_dropped_and_counted(verifier: Verifier) -> None:
    node, _, other = pair(verifier, config())
    report = round_with(node, other, {TaskRef("bf", n): [WRONG] * 8 for n in range(6)})
    assert (report.external, report.zero_advantage_dropped, report.pool.fresh) == (0, 6, 6)


@pytest.mark.parametrize(
    ("weigh", "replay"), [("positive", "off"), ("positive", "on"), ("paper", "off"), ("paper", "on")]
)
def test_a_group_of_one_answer_is_trained_on_only_if_it_is_right(
    verifier: Verifier, weigh: str, replay: str
) -> None:
    settings = NodeConfig.model_validate(
        {**config(gate="off").model_dump(), "sharing": {"weigh": weigh}, "replay": {"mode": replay}}
    )
    node, _, person = pair(verifier, settings)
    right, wrong, both = node.tasks.draw(3, random.Random(0))
    answers = {
        right.ref: [right_answer(right)],
        wrong.ref: [Completion("<answer>no</answer>", True)],
        both.ref: [right_answer(both)] * 2,
    }
    trained: dict[TaskRef, Sequence[float]] = {}
    update = node.policy.update

    def watched(batch: Sequence[Scored], weigh: Weigh) -> UpdateReport:
        given = [(s, weigh(s, within_group(s))) for s in batch]
        trained.update((s.rollout.ref, of) for s, of in given if s.rollout.author != node.me)
        return update(batch, weigh)

    node.policy.update = watched  # type: ignore[method-assign]
    report = round_with(node, person, answers)
    assert report.external >= len(trained)  # replay may use a rollout more than once
    assert list(trained) == ([right.ref] if weigh == "positive" else []) and all(
        min(of) > 0.25 for of in trained.values()
    )
    assert report.zero_advantage_dropped == 3 - len(trained)


def counted(node: RoundParts) -> tuple[RoundParts, list[list[TaskRef]]]:
    """Return the node, changed so that it records the references of each call to its reward."""
    calls: list[list[TaskRef]] = []
    reward = node.reward

    def score(items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
        calls.append([ref for ref, _ in items])
        return reward(items)

    return replace(node, reward=score), calls


@pytest.mark.parametrize("external", [4, SCORED_PER_ROUND + 20])
def test_only_the_latest_of_many_rollouts_are_scored_up_to_a_limit(verifier: Verifier, external: int) -> None:
    node, _, other = pair(verifier, config(external=external))
    refs = [TaskRef("binary_matrix", n) for n in range(SCORED_PER_ROUND + 44)]  # no text is held out
    flood = [Rollout(ref, (WRONG,), other.identity.peer_id) for ref in refs]
    node, calls = counted(node)
    for start in range(0, len(flood), 50):
        gossip(other, flood[start : start + 50])
    run_round(1, node)
    own, theirs = calls
    assert len(own) == 4 and theirs == [rollout.ref for rollout in flood[-max(external, SCORED_PER_ROUND) :]]


def test_rollouts_in_the_pool_are_not_scored_again(verifier: Verifier) -> None:
    node, _, other = pair(verifier, config(gate="off"))
    (task,) = node.tasks.draw(1, random.Random(0))
    node, calls = counted(node)
    for t in (1, 2):
        assert round_with(node, other, {task.ref: [right_answer(task), WRONG]}, t).pool.size == 1
    assert calls[1] == [task.ref] and task.ref not in calls[3]


def test_a_peers_rollout_with_a_held_out_text_is_not_trained_on(verifier: Verifier) -> None:
    node, _, other = pair(verifier, config())
    held = [n for n in range(40) if TINY_9.holds_out(node.tasks.task(TaskRef("bf", n)))]
    node, calls = counted(node)
    round_with(node, other, {TaskRef("bf", n): [WRONG] for n in range(40)})
    assert held and [ref.n for ref in calls[1]] == [n for n in range(40) if n not in held]


def test_a_reference_without_a_task_is_skipped(verifier: Verifier) -> None:
    node, _, other = pair(verifier, config())
    refs = [TaskRef("bf", TRAINING_TASKS), TaskRef("nothing", 1), TaskRef("bf", -1), TaskRef("bf", 1)]
    assert [TINY_9.trains_on(ref) for ref in refs] == [False, False, False, True]
    known = node.tasks.task
    node.tasks.task = lambda ref: None if ref.n == 5 else known(ref)  # type: ignore[method-assign]  # upstream is too slow to make it
    node, calls = counted(node)
    round_with(node, other, {TaskRef("bf", n): [WRONG] for n in (5, 6)})
    assert calls[1] == [TaskRef("bf", 6)]


def test_external_rollouts_are_dropped_after_their_maximum_age(verifier: Verifier) -> None:
    (node, _, _), (other, _, _) = swarm_of(verifier, config(max_age=2), config())
    run_round(1, other)
    sizes = [run_round(t, node).pool.size for t in (1, 2, 3, 4)]
    assert sizes[0] == sizes[1] == sizes[2] > 0 and sizes[3] == 0


def test_the_age_of_a_rollout_counts_from_the_round_in_which_it_was_heard(verifier: Verifier) -> None:
    """The age does not count from the arrival over the link.

    The trainer may have been in a long round, or the fetch may have taken long.
    """
    node, _, other = pair(verifier, config(local=0, external=1, gate="off"))
    node, calls = counted(node)
    ages = []
    for task, heard, t in zip(node.tasks.draw(3, random.Random(0)), (2, 2, 900), (4, 5, 6), strict=True):
        rollout = Rollout(task.ref, (right_answer(task), WRONG), other.identity.peer_id)
        assert isinstance(node.swarm, VirtualNode)
        node.swarm.arrived.put(replace(rollout, heard=heard), rollout.author, "", rollout.size)
        report = run_round(t, node)
        ages.append((report.external, report.staleness.max, report.off_policy.max))
    assert ages == [
        (1, 2, 0),
        (0, 0, 0),
        (1, 0, 0),
    ], "expected: used at max_age; older, and not scored; heard in a later round of a lost trainer, and used"
    assert [len(call) for call in calls if call] == [1, 1]


def test_only_a_part_of_a_large_group_is_trained_on(verifier: Verifier) -> None:
    """Twice as many completions are scored as trained on, and advantages are computed over all scored ones.

    So each advantage has the same sign as in the whole group.
    """
    node, _, other = pair(verifier, config(local=0, gate="off"))
    (task,) = node.tasks.draw(1, random.Random(0))
    wrong = [Completion(f"<answer>no {n}</answer>", True) for n in range(32)]
    completions: list[int] = []
    reward = node.reward
    node = replace(
        node, reward=lambda items: completions.extend(len(texts) for _, texts in items) or reward(items)
    )
    report = round_with(node, other, {task.ref: [right_answer(task)] * 32 + wrong})
    assert (report.external, completions) == (1, [16])
    (scored,) = node.pool
    assert len(scored.rollout.completions) == len(scored.rewards) == 8 and len(scored.group) == 16
    mean = sum(scored.group) / 16
    assert 0 < mean < 1 and all(
        (a > 0) == (r > mean) for a, r in zip(within_group(scored), scored.rewards, strict=True)
    )


@pytest.mark.parametrize("loss, trains", [("grpo", False), ("asymre", True)])
def test_the_loss_determines_whether_groups_of_equal_rewards_are_trained_on(
    verifier: Verifier, loss: str, trains: bool
) -> None:
    settings = NodeConfig.model_validate({"model": {"device": "cpu"}, "train": {"loss": loss}})
    node, policy, _ = join(MemorySwarm(), 1, verifier, settings)
    node = replace(node, reward=lambda items: [(0.0,) * len(completions) for _, completions in items])
    report = run_round(1, node)
    assert (report.tokens.trained > 0, policy.version) == (trains, int(trains))


def test_only_authors_of_useless_rollouts_are_charged(verifier: Verifier) -> None:
    (node, _, member), (_, _, useless), (_, _, useful) = swarm_of(
        verifier, config(gate="off"), config(), config()
    )
    (task,) = node.tasks.draw(1, random.Random(0))
    refs = [TaskRef("binary_matrix", n) for n in range(64)]
    for peer, answers in (
        (useless, [(ref, (WRONG,) * 2) for ref in refs]),
        (useful, [(task.ref, (right_answer(task), WRONG)), *((ref, (WRONG,) * 2) for ref in refs[:63])]),
    ):
        sent = [Rollout(ref, given, peer.identity.peer_id) for ref, given in answers]
        for half in (sent[:32], sent[32:]):
            gossip(peer, half)
    run_round(1, node)
    assert member.rejected == {Reason.USELESS: 1}
    assert member.score(useless.identity.peer_id) == 0, (
        "useless rollouts changed the author's reputation instead of its quota"
    )


RIGHT = "<answer>1</answer>"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (RIGHT, RIGHT),
        (f"evil {RIGHT}", f"evil {RIGHT}"),  # the gate checks text before the answer
        (f"{RIGHT} evil", RIGHT),
        (f"{RIGHT}\n", RIGHT),
        (f"{RIGHT}</answer>", RIGHT),
        (f"{RIGHT}<answer> evil", RIGHT),
        (
            f"{RIGHT} evil <answer> 1\n</answer> evil",
            RIGHT,
        ),  # a repeated answer has the same score
        (f"<answer>2</answer> so {RIGHT} evil", f"<answer>2</answer> so {RIGHT}"),
        ("evil <answer>1", "evil <answer>1"),  # without an answer, the reward is 0
        ("evil", "evil"),
    ],
)
def test_external_text_is_kept_up_to_the_end_of_its_scored_answer(text: str, kept: str) -> None:
    sent = Rollout(TaskRef("bf", 1), (Completion(text, True), Completion(text, False)), PeerId("other"))
    found = cut_behind_answers(sent, TINY_9)
    # A truncated text does not count as ended, because the model did not end it there.
    assert found.completions == (Completion(kept, text == kept), Completion(kept, False))
    assert (found.ref, found.author) == (sent.ref, sent.author)
    assert TINY_9.read("bf", kept) == TINY_9.read("bf", text)


def test_a_copy_of_a_local_text_is_found_even_if_text_after_the_answer_is_removed(
    verifier: Verifier,
) -> None:
    (node, _, member), (_, _, thief) = swarm_of(verifier, config(gate="off"), config())
    (task,) = node.tasks.draw(1, random.Random(0))
    right = replace(right_answer(task), text=right_answer(task).text + " as you see")
    own = Scored(Rollout(task.ref, (right, WRONG), node.me), task.question, (1.0, 0.0), 1)
    for n in range(USELESS_IN_A_ROW):
        copy = Rollout(task.ref, (right, WRONG), thief.identity.peer_id, heard=n + 1)
        take_in(n + 1, node, [own], score_others(n + 1, node, [copy]))
        node.pool.drop([(copy.author, copy.ref)])
    assert member.rejected == {Reason.USELESS: 1}


def test_an_external_rollout_is_trained_on_only_once(verifier: Verifier) -> None:
    """If fewer than J rollouts arrive in a round, fewer are used. `replays_mean` is always 0."""
    (node, _, _), (other, _, _) = swarm_of(verifier, config(gate="off"), config(local=2, external=0))
    used: list[tuple[str, TaskRef]] = []
    me = node.me
    node = watched(node, lambda batch: used.extend((s.author, s.ref) for s in batch if s.author != me))
    reports = []
    for t in range(1, 13):
        run_round(t, other)
        reports.append(run_round(t, node))
    assert len(used) > 6 and len(set(used)) == len(used)
    assert all(r.replays_mean == 0 and r.external <= 2 for r in reports)


def test_rollouts_that_are_shared_again_after_a_restart_do_no_harm(
    verifier: Verifier, tmp_path: Path
) -> None:
    """An author was killed, lost two rounds and shares the same rollouts again.

    None is rejected, the author is not charged, and no rollout is added to the pool twice.
    """
    (listener, _, member), (author, policy, _) = swarm_of(verifier, config(max_age=8), config(external=0))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(run_state(0, 2, author), policy.files())
    first = [report for t in (1, 2) if (run_round(t, author), report := run_round(t, listener))]
    assert resume(checkpoints, author, policy, 2)[0] == 0
    again = [report for t in (1, 2) if (run_round(t, author), report := run_round(t + 2, listener))]
    assert sum(report.pool.fresh for report in first) > 0 and [report.pool.fresh for report in again] == [
        0,
        0,
    ]
    assert all(report.rejected == {} for report in [*first, *again])
    assert member.rejected == {} and member.score(author.me) == 0


REPLAY = {"mode": "on", "size": 12, "updates_per_round": 2, "author_share": 1.0}


@pytest.mark.parametrize(
    "sections, prefix", [({}, ""), ({}, "evil "), ({"replay": REPLAY}, "")], ids=["plain", "gated", "replay"]
)
def test_a_resumed_run_equals_an_uninterrupted_run(
    verifier: Verifier, tmp_path: Path, sections: dict[str, Any], prefix: str
) -> None:
    """The checkpoint has everything on which a round depends.

    These are weights, optimizer, random states, pool, replay schedule and gate.
    """
    settings = NodeConfig.model_validate({"model": {"device": "cpu"}, **sections})

    (node, policy, _), (_, _, other) = swarm_of(verifier, settings, settings)
    play(node, other, (1, 2), prefix)
    if sections:
        node.schedule.state = replace(node.schedule.state, clip_fraction=0.03, rests=2)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(run_state(2, 1, node), policy.files())
    reports = play(node, other, (3, 4), prefix)
    assert sum(sum(r.gated.values()) for r in reports) == (8 if prefix else 0)
    assert set(node.sharing.pass_rates) == ({other.identity.peer_id} if prefix else set())

    (again, again_policy, _), (_, _, other) = swarm_of(verifier, settings, settings)
    assert resume(checkpoints, again, again_policy, 1) == (2, ["resumed after round 2"])
    assert play(again, other, (3, 4), prefix) == reports
    assert weights(again_policy, tmp_path / "a") == weights(policy, tmp_path / "b")
    assert (again.schedule.state, again.pool.updates) == (node.schedule.state, node.pool.updates)
    assert node.gate is not None and again.gate is not None and again.gate.state == node.gate.state
    assert again.sharing.success == node.sharing.success and node.sharing.success.seen
    again.schedule.configured, again.schedule.state = 1, GuardState()
    assert "seed 7 has no effect" in resume(checkpoints, again, again_policy, 7)[1][0]
    assert again.schedule.state == GuardState(), (
        "the guard is active although there is only one update per round"
    )


def said(answer: str) -> Completion:
    return Completion(f"<answer>{answer}</answer>", True)


def whole_of(task: Task) -> str:
    """Return a conclusion that says as much as all premises together."""
    return " ∧ ".join(task.entry["metadata"]["premises"])


def test_nodes_with_different_scoring_share_a_swarm_and_score_by_their_own_rules(verifier: Verifier) -> None:
    """The nodes have the same questions and different rewards (SAPO's rho^n).

    P ∨ Q follows from the premises but says less than they do.
    """
    strict = NodeConfig.model_validate(
        {**config(local=2).model_dump(), "swarm": {"curriculum": "tiny-9-strict"}}
    )
    swarm, scores = MemorySwarm(), {}
    with Verifier("tiny-9-strict") as strictly:
        nodes = {
            "faithful": join(swarm, 1, verifier, config(local=2)),
            "strict": join(swarm, 2, strictly, strict),
        }
        assert len({swarm_digest(curriculum_of(settings)) for settings in (config(), strict)}) == 1, (
            "the nodes are in different swarms"
        )
        tasks = [tasks_of("tiny-9").task(TaskRef("propositional_logic", n)) for n in range(8)]
        _, _, other = join(swarm, 3, verifier, config())
        rollouts = [
            Rollout(task.ref, (said("P ∨ Q"), said(whole_of(task))), other.identity.peer_id) for task in tasks
        ]
        for rollout in rollouts:
            gossip(other, [rollout])
        for name, (node, _, _) in nodes.items():
            run_round(1, node)
            scores[name] = [
                scored.rewards for scored in node.pool if scored.rollout.author == other.identity.peer_id
            ]
    assert [len(each) for each in scores.values()] == [8, 8]
    assert sum(rewards == (1, 1) for rewards in scores["faithful"]) >= 4 and all(
        weak == 0 for weak, _ in scores["strict"]
    )
    assert any(whole for _, whole in scores["strict"])


def test_a_round_counts_truncated_answers_and_answers_in_the_asked_form(verifier: Verifier) -> None:
    """Two tokens are too few for `<answer>`, an answer and `</answer>`."""
    settings = config(external=0)
    short = settings.model_copy(update={"generate": GenerateConfig(max_new_tokens=2)})
    for of, ended in ((settings, True), (short, False)):
        node, _, _ = join(MemorySwarm(), 1, verifier, of)
        report = run_round(1, node)
        assert report.answers is not None and report.answers.made == 32
        assert report.answers.length == report.tokens.generated / 32
        if ended:
            assert report.answers.cut is not None and report.answers.cut < 0.5
            assert report.answers.in_form is not None and report.answers.in_form > 0.9
        else:
            assert (report.answers.cut, report.answers.in_form, report.answers.length) == (1.0, 0.0, 2.0)
        assert report.shown is not None and len(report.shown.answers) == 8 and report.shown.question
    silent, _, _ = join(MemorySwarm(), 1, verifier, config(local=0))
    report = run_round(1, silent)
    assert report.answers == AnswerFigures(0, None, None, None) and report.shown is None
