"""`profile = "sapo-paper"` sets the paper's values, can be overridden, and gives rounds as in Algorithm 1.

The paper is SAPO, arXiv 2509.08721.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.config.profiles import PROFILES
from swarmd.config.sources import resolve
from swarmd.errors import ConfigError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.experience.advantages import unweighed, within_group
from swarmd.experience.strategies import SharingSettings
from swarmd.lab import EXPERIMENTS
from swarmd.lab.experiment import BadExperiment, parse_experiment, read_experiment
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.training.losses import LOSSES, surrogate
from swarmd.protocols import Reward
from swarmd.tasks.curriculum import SAPO_9
from swarmd.trainer.node import build
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Rollout, Scored, TaskRef, UpdateReport, Weigh
from tests.doubles import Clock, memory_node
from tests.played import PlayedPolicy

I, J, L = 4, 4, 8
PAPER = resolve(None, {}, {"profile": "sapo-paper"}).config


def test_the_profile_sets_the_papers_values_and_explicit_keys_override_them(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('profile = "sapo-paper"\n[train]\nlearning_rate = 3e-4\n')
    resolved = resolve(path, {"SWARMD_SHARING_WEIGH": "positive"}, {"external": 12})
    config = resolved.config
    assert (config.train.learning_rate, config.sharing.weigh, config.round.external) == (3e-4, "positive", 12)
    assert (config.round.local, config.train.clip_high, config.gate.mode, config.profile) == (
        I,
        0.28,
        "off",
        "sapo-paper",
    )
    assert (
        resolved.origins["round.local"] == "profile sapo-paper"
        and resolved.origins["round.external"] == "--external"
    )
    # A profile in the environment overrides the one in the file.
    assert (
        resolve(path, {"SWARMD_PROFILE": "default"}, {}).config
        == resolve(None, {"SWARMD_TRAIN_LEARNING_RATE": "3e-4"}, {}).config
    )


def test_an_experiment_may_set_a_profile() -> None:
    document = {
        "name": "one", "base": {"profile": "sapo-paper", "train": {"learning_rate": 3e-4}},
        "setting": [{"name": "paper"}, {"name": "own", "profile": "default", "round": {"local": 8}}],
    }  # fmt: skip
    paper, own = (setting.nodes[0] for setting in parse_experiment(document, "x.toml").settings)
    assert (paper.profile, paper.gate.mode, paper.train.learning_rate) == ("sapo-paper", "off", 3e-4)
    assert (own.profile, own.gate.mode, own.round.local) == ("default", NodeConfig().gate.mode, 8)
    for wrong in ("sapo", ["sapo-paper"]):
        with pytest.raises(
            BadExperiment, match=r"setting 1 \(8/0\): profile: expected one of \"default\", \"sapo-paper\""
        ):
            parse_experiment({"name": "one", "setting": [{"name": "8/0", "profile": wrong}]}, "x.toml")


def test_an_error_about_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            '--profile: profile: expected one of "default", "sapo-paper", found \'sapo-papr\'; did you mean'
        ),
    ):
        resolve(None, {}, {"profile": "sapo-papr"})


def test_a_profile_sets_each_key_that_matters_to_it() -> None:
    """So a changed default does not change the profile."""
    said = PROFILES["sapo-paper"]
    assert set(said["sharing"]) == set(SharingSettings.model_fields)
    assert {"local", "external", "completions", "resample", "max_age", "train"} == set(said["round"])
    assert {
        "loss",
        "loss_mean",
        "clip_low",
        "clip_high",
        "importance_cap",
        "learning_rate",
        "optimizer",
    } <= set(said["train"])
    assert said["replay"] == said["gate"] == {"mode": "off"}


def test_the_profile_matches_the_paper() -> None:
    """Each assertion is a statement of SAPO, sections 4 and 5."""
    nine = {
        "base_conversion", "basic_arithmetic", "arc_1d", "bf", "propositional_logic",
        "fraction_simplification", "decimal_arithmetic", "calendar_arithmetic", "binary_matrix",
    }  # fmt: skip
    assert (curriculum_of(PAPER).name, set(curriculum_of(PAPER).specialties)) == ("sapo-9", nine)
    assert PAPER.tasks.specialties == () and not PAPER.tasks.reward  # all nine, scored as in ReasoningGYM
    assert (PAPER.round.local, PAPER.round.external, PAPER.round.completions) == (4, 4, 8)
    assert PAPER.round.train == "on" and PAPER.round.resample == 0  # no further questions
    # All weights of the policy are trained with GRPO and Adam, with default hyper-parameters.
    assert PAPER.model.lora == "off"
    train = PAPER.train
    assert (train.loss, train.clip_low, train.clip_high, train.importance_cap) == ("grpo", 0.2, 0.28, 0.0)
    assert (train.optimizer, train.learning_rate) == ("adamw", 1e-3)
    assert (PAPER.generate.temperature, PAPER.generate.max_new_tokens) == (1.0, 256)
    # Rollouts without advantage are dropped first. The choice among the rest is uniform, without weights,
    # caps or gate.
    papers = {"share": "informative", "take": "uniform", "weigh": "paper", "caps": "off"}
    assert PAPER.sharing.model_dump() == papers
    assert PAPER.gate.mode == PAPER.replay.mode == "off"


def test_the_sapo_table_experiment_uses_the_papers_settings() -> None:
    """Only the model, the curriculum, the learning rate and the length of answers differ."""
    for setting in read_experiment(EXPERIMENTS / "sapo-table.toml").settings:
        for node in setting.nodes:
            assert (node.profile, node.sharing, node.gate) == ("sapo-paper", PAPER.sharing, PAPER.gate)
            assert (node.model.lora, node.round.max_age, node.train.importance_cap) == ("off", 1, 0.0)
            assert (node.swarm.curriculum, node.train.learning_rate) == ("tiny-9", 6e-4)
            assert node.generate.max_new_tokens == 16


def right_or_wrong(items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
    return [
        tuple(float(completion.text == "right") for completion in completions) for _, completions in items
    ]


class Seen(PlayedPolicy):
    """A policy whose answers are right by chance; it records its questions and batches."""

    def __init__(self, rng: random.Random) -> None:
        def texts(_: str) -> list[str]:
            share = rng.choice([0.0, 0.3, 0.6, 1.0])
            return ["right" if rng.random() < share else "wrong" for _ in range(L)]

        super().__init__(texts)
        self.asked: list[tuple[int, int]] = []  # (questions, completions) per round
        self.batches: list[Sequence[Scored]] = []

    def generate(self, questions, completions, limits=(), observe=None):  # type: ignore[no-untyped-def]
        self.asked.append((len(questions), completions))
        return super().generate(questions, completions)

    def update(self, batch: Sequence[Scored], weigh: Weigh = unweighed) -> UpdateReport:
        self.batches.append(batch)
        return super().update(batch, weigh)


def test_rounds_with_the_papers_profile_follow_algorithm_1() -> None:
    """Four nodes run twelve rounds.

    Each training set T^n must be SampleSelf(C^n, I) and SampleExternal(C^m of other nodes without zero
    advantages, J).
    """
    swarm, clock, rng = MemorySwarm(), Clock(), random.Random(1)
    policies = [Seen(random.Random(number)) for number in range(4)]
    nodes = []
    reward: Reward = right_or_wrong
    for number, policy in enumerate(policies):
        # The rule must hold for each sharing rule of the other nodes.
        share = PAPER.sharing.model_copy(update={"share": "all" if number % 2 else "informative"})
        config = PAPER.model_copy(update={"sharing": share})
        joined = memory_node(swarm, number, clock, curriculum=SAPO_9, config=config, whole=2**18)
        nodes.append(
            build(
                config,
                number,
                joined.member.identity.peer_id,
                joined,
                policy,
                reward,
            )
        )
    shared: dict[tuple[PeerId, TaskRef], tuple[str, ...]] = {}  # C^m of all nodes
    # The rollouts that each node has heard, and in which of its rounds
    heard: dict[PeerId, dict[tuple[PeerId, TaskRef], int]] = {node.me: {} for node in nodes}
    used: dict[PeerId, set[tuple[PeerId, TaskRef]]] = {node.me: set() for node in nodes}
    most = 0
    for t in range(1, 13):
        clock.now += 5
        for number in rng.sample(range(4), 4):
            node, policy = nodes[number], policies[number]
            heard[node.me] |= {key: t for key in shared if key not in heard[node.me]}
            run_round(t, node)
            batch = policy.batches[-1]
            assert policy.asked[-1] == (I, L)
            own = [s for s in batch if s.rollout.author == node.me]
            theirs = [s for s in batch if s.rollout.author != node.me]
            shared |= {(node.me, s.rollout.ref): tuple(c.text for c in s.rollout.completions) for s in own}
            # Local rollouts without advantage stay in the batch, because they count in the mean.
            assert len(own) == len({s.rollout.ref for s in own}) == I
            taken = {(s.rollout.author, s.rollout.ref) for s in theirs}
            candidates = {
                key
                for key, when in heard[node.me].items()
                if key[0] != node.me
                and len(set(shared[key])) > 1
                and when >= t - 1
                and key not in used[node.me]
            }
            assert taken <= candidates and len(taken) == min(J, len(candidates))
            used[node.me] |= taken
            most = max(most, len(taken))
            for s in batch:
                texts = [c.text for c in s.rollout.completions]
                assert len(texts) == L and (s.rollout.author, s.rollout.ref) in shared
                rewards = [float(text == "right") for text in texts]
                assert s.rewards == tuple(rewards)
                advantages = [(r - fmean(rewards)) / (pstdev(rewards) + 1e-4) for r in rewards]
                assert LOSSES[PAPER.train.loss].advantages(s, PAPER.train) == pytest.approx(advantages)
    assert most == J and all(node.gate is None and node.schedule.updates == 1 for node in nodes)


def test_the_papers_profile_uses_the_clipped_surrogate_without_kl() -> None:
    current, old = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.5, -0.5, -1.1])
    advantages = torch.tensor([1.0, 2.0, -1.0, -0.5])
    each, _ = LOSSES[PAPER.train.loss].per_token(current, old, advantages, PAPER.train)
    assert torch.equal(each, surrogate(current, old, advantages, 0.2, 0.28))


def test_the_papers_profile_uses_adam_with_the_papers_learning_rate() -> None:
    config = resolve(None, {"SWARMD_DEVICE": "cpu"}, {"profile": "sapo-paper"}).config
    policy = LanguagePolicy.open(config, seed=1)
    texts = ["<answer>1</answer>", "<answer>12 and more</answer>", "no"]
    rollout = Rollout(TaskRef("bf", 1), tuple(Completion(text, True) for text in texts), PeerId("other"))
    scored = Scored(rollout, "What is 1?", (1.0, 0.0, 0.0), 1)
    lengths = [len(ids) for ids in policy.logprobs([scored])[0].ids]
    report = policy.update([scored])
    assert report.learning_rate == 1e-3
    assert report.loss == pytest.approx(
        -sum(a * n for a, n in zip(within_group(scored), lengths, strict=True)) / sum(lengths), rel=1e-4
    )
