"""Rounds with experience replay and real parts.

These are the tiny model, the contained verifier and the in-memory swarm.
"""

from pathlib import Path

from p2p.engines.memory import MemorySwarm
from swarmd.config.config import NodeConfig
from swarmd.policy.training.policy_files import FILES
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.checkpoint import Checkpoints
from swarmd.trainer.node import build, resume, run_state
from swarmd.trainer.round import run_round
from swarmd.types import RoundReport, Tokens
from tests.played import PlayedPolicy
from tests.swarmd.trainer.conftest import join, swarm_of, weights, without_seconds


def config(local: int = 4, external: int = 0, rate: float = 0.0, **replay: object) -> NodeConfig:
    sections = {
        "round": {"local": local, "external": external},
        "model": {"device": "cpu"},
        "train": {"learning_rate": rate},
    }
    return NodeConfig.model_validate({**sections, "replay": {"mode": "on", **replay}})


def test_a_round_trains_several_times_on_a_pool_of_local_rollouts(verifier: Verifier) -> None:
    node, _, _ = join(MemorySwarm(), 1, verifier, config(size=10, updates_per_round=3, positive_bias=0.0))
    reports = [run_round(t, node) for t in range(1, 5)]
    assert [r.pool.size for r in reports] == [4, 8, 10, 10]
    assert all((r.updates, r.local, r.external, r.generated) == (3, 12, 0, 4) for r in reports)
    first, last = reports[0], reports[-1]
    assert (first.staleness.max, first.replays_mean) == (
        0,
        1.0,
    ), "the three updates did not use the same four rollouts"
    assert last.staleness.mean > 0 and 1 <= last.staleness.max <= 3 and last.replays_mean > 1
    assert last.since_use_mean is not None and last.since_use_mean >= 1


def test_replayed_rollouts_keep_their_log_probabilities_from_generation(verifier: Verifier) -> None:
    """So the ratio is 1 in the first update on new rollouts, and differs in later updates on them."""
    node, policy, _ = join(MemorySwarm(), 1, verifier, config(rate=1e-3))
    kept = []
    for t in range(1, 5):
        run_round(t, node)
        kept.append([s for s in node.pool if s.informative])
    drawn_with = {s.rollout.ref: s.tokens for s in kept[0]}
    for s in kept[-1]:
        assert s.tokens is not None and s.tokens == drawn_with.get(s.rollout.ref, s.tokens)
    assert policy.update([s for s in node.pool if s.round < 4]).drift > 0


def test_external_rollouts_share_the_pool_within_their_limits(verifier: Verifier) -> None:
    settings = config(local=2, external=2, size=16, author_share=0.2, updates_per_round=2)
    node, *others = (parts for parts, *_ in swarm_of(verifier, settings, *[config(updates_per_round=1)] * 2))
    reports = []
    for t in range(1, 6):
        for other in others:
            run_round(t, other)
        reports.append(run_round(t, node))
        by = [s.rollout.author for s in node.pool]
        assert len(by) <= 16 and by.count(node.me) >= min(8, 2 * t) - 2
        assert all(by.count(other.me) <= 3 for other in others), (
            "an author has more than a fifth of the 16 places"
        )
        assert all(s.informative and t - s.round < 2 for s in node.pool if s.rollout.author != node.me)
    assert any(r.external for r in reports)
    first = [author for r in reports for author, _ in r.first_used]
    assert node.me not in first and 0 < len(first) < sum(r.external for r in reports), (
        "replayed rollouts were counted more than once, or local ones were counted"
    )


def test_external_rollouts_are_kept_longer_only_if_the_policy_has_log_probabilities(
    verifier: Verifier,
) -> None:
    settings = config(local=2, external=2, max_age=5)
    node, _, _ = join(MemorySwarm(), 1, verifier, settings)
    forgetful = build(settings, 1, node.me, node.swarm, PlayedPolicy(lambda _: ["x"]), verifier)
    assert (node.pool.max_age, forgetful.pool.max_age) == (5, settings.round.max_age)


def test_a_restored_pool_keeps_only_texts_if_the_prompts_have_changed(
    verifier: Verifier, tmp_path: Path
) -> None:
    """Token ids and log-probabilities would belong to the earlier prompt."""
    node, policy, _ = join(MemorySwarm(), 1, verifier, config(local=2))
    run_round(1, node)
    checkpoints = Checkpoints(tmp_path, FILES)
    checkpoints.save(run_state(1, 1, node), policy.files())
    for opening, keeps in (("", True), ("<answer>", False)):
        settings = config(local=2)
        model = settings.model.model_copy(update={"opening": opening})
        opened = settings.model_copy(update={"model": model})
        again, other, _ = join(MemorySwarm(), 1, verifier, opened)
        assert resume(checkpoints, again, other, 1)[0] == 1
        assert [s.tokens is not None for s in again.pool] == [keeps] * 2
        assert [s.rollout for s in again.pool] == [s.rollout for s in node.pool]


def test_with_replay_off_a_round_follows_the_paper(verifier: Verifier, tmp_path: Path) -> None:
    """The other keys of the section have no effect while replay is off."""
    plain = NodeConfig.model_validate({"round": {"local": 2, "external": 0}, "model": {"device": "cpu"}})
    off = config(local=2, mode="off", size=99, updates_per_round=9, positive_bias=0.5)
    ends = []
    for name, settings in (("plain", plain), ("off", off)):
        node, policy, _ = join(MemorySwarm(), 1, verifier, settings)
        reports = [without_seconds(run_round(t, node)) for t in (1, 2)]
        ends.append((reports, weights(policy, tmp_path / name), len(node.pool)))
    assert ends[0] == ends[1] and ends[0][2] == 0


def test_replay_pauses_if_the_policy_drifts_too_far(verifier: Verifier) -> None:
    """The learning rate is ten times too high, so the drift becomes large.

    After that, a round follows the paper, with one update on new rollouts.
    """
    node, _, _ = join(MemorySwarm(), 1, verifier, config(rate=3e-3, updates_per_round=6))
    reports: list[RoundReport] = []
    while not (reports and reports[-1].replay_resting) and len(reports) < 12:
        reports.append(run_round(len(reports) + 1, node))
    rested = reports[-1]
    assert (
        rested.replay_resting == 8 and (rested.updates, rested.local) == (1, 4) and rested.staleness.max == 0
    )
    assert reports[-2].updates == 6 and reports[-2].drift > 1.0


def test_replayed_external_text_keeps_the_log_probabilities_of_its_first_use(
    verifier: Verifier,
) -> None:
    settings = config(
        local=2, external=2, size=12, author_share=1.0, max_clip_fraction=1.0, max_kl=100.0, rate=3e-3
    )
    (node, policy, _), (other, _, _) = swarm_of(verifier, settings, config(updates_per_round=1))
    assert node.pool.max_age == settings.replay.max_age > settings.round.max_age
    first: dict[object, Tokens] = {}
    for t in range(1, 6):
        run_round(t, other)
        run_round(t, node)
        theirs = [
            kept.scored for kept in node.pool.kept() if kept.uses and kept.scored.rollout.author == other.me
        ]
        assert all(
            s.tokens is not None and first.setdefault(s.rollout.ref, s.tokens) == s.tokens for s in theirs
        )
    now = policy.logprobs(theirs)
    assert now and [n.ids for n in now] == [s.tokens.ids for s in theirs if s.tokens]
    assert all(n.logprobs != s.tokens.logprobs for n, s in zip(now, theirs, strict=True) if s.tokens), (
        "the policy has not changed since, so this test shows nothing"
    )
