"""Nodes with different architectures and tokenizers are in one swarm.

Each trains on the other's text as far as its model allows.
"""

import itertools
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from p2p.engines.memory import MemorySwarm
from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api.status_words import round_sentence
from swarmd.experience.batch import ANSWER_TOO_LONG, QUESTION_TOO_LONG, UNKNOWN_CHARACTERS, UNOPENED
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Rollout, RoundReport, Scored, Task
from tests.doubles import gossip, identity, memory_member
from tests.swarmd.policy.conftest import ALL_FAMILIES, CHAT, SPECIALS, make_model
from tests.swarmd.trainer.conftest import join

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a two-layer Llama model with random weights and one token per byte."""
    return make_model(
        tmp_path_factory.mktemp("other"), "llama", max_position_embeddings=1024, initializer_range=0.02
    )


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with tokens for ASCII characters only, and a context of 128 tokens."""
    folder = tmp_path_factory.mktemp("narrow")
    letters = [*SPECIALS, "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIALS)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIALS[0], chat_template=CHAT
    ).save_pretrained(folder)
    AutoModelForCausalLM.from_config(ALL_FAMILIES["llama"]()).save_pretrained(folder)
    return folder


def joined(
    swarm: MemorySwarm,
    number: int,
    verifier: Verifier,
    model: Path | str,
    *,
    new_tokens: int = 24,
    opening: str = "",
) -> tuple[RoundParts, LanguagePolicy]:
    sections = {
        "model": {"name": str(model), "device": "cpu", "system_prompt": "", "opening": opening},
        "generate": {"max_new_tokens": new_tokens},
        "swarm": {"curriculum": "tiny-9"},
        "tasks": {"specialties": ("basic_arithmetic",)},
        "gate": {"mode": "off"},
        "train": {} if model == "tiny" else {"learning_rate": 0.01},
    }
    return join(swarm, number, verifier, NodeConfig.model_validate(sections), whole=2**18)[:2]


def teach_the_form(policy: LanguagePolicy) -> None:
    """Train a random model until some of its answers are right, because all-wrong groups are not shared."""
    tasks, rng = CurriculumTasks(TINY_9, ("basic_arithmetic",)), random.Random(1)
    for _ in range(60):
        answered = [
            (task, Rollout(task.ref, (right(task),), identity(9).peer_id)) for task in tasks.draw(8, rng)
        ]
        policy.update(
            [Scored(rollout, task.question, (1.0,), 1) for task, rollout in answered],
            weigh=lambda scored, _: scored.rewards,
        )


def right(task: Task, before: str = "", after: str = "") -> Completion:
    return Completion(f"{before}<answer>{task.entry['answer']}</answer>{after}", True)


def test_nodes_of_two_architectures_and_tokenizers_exchange_rollouts(verifier: Verifier, other: Path) -> None:
    swarm = MemorySwarm()
    (ours, tiny), (theirs, strange) = joined(swarm, 1, verifier, "tiny"), joined(swarm, 2, verifier, other)
    assert type(tiny.network) is not type(strange.network)
    teach_the_form(strange)
    reports = [[run_round(t, node) for node in (ours, theirs)] for t in range(1, 7)]
    for node, author, place in ((ours, theirs.me, 0), (theirs, ours.me, 1)):
        of_one = [row[place] for row in reports]
        assert sum(author in report.external_authors for report in of_one) >= 3, (
            "fewer than three rounds trained on the other node's rollouts"
        )
        assert all(report.tokens.trained > 0 and not report.skipped for report in of_one if report.external)
        assert all(not report.unfit and not report.rejected for report in of_one)
        assert node.pool.used


def heard(node: RoundParts, swarm: MemorySwarm, *rollouts: tuple[Task, list[Completion]]) -> RoundReport:
    """Run a round in which the node receives these rollouts from a peer."""
    peer = memory_member(swarm, 8, map(float, itertools.count(1_700_000_000)).__next__)
    sent = [Rollout(task.ref, tuple(completions), peer.identity.peer_id) for task, completions in rollouts]
    gossip(peer, sent)
    report = run_round(1, node)
    assert peer.identity.peer_id not in node.swarm.member.rejected  # type: ignore[attr-defined]
    assert node.swarm.member.reputation.score(peer.identity.peer_id, 0.0) == 0  # type: ignore[attr-defined]  # the peer is not charged
    return report


WRONG = Completion("<answer>no</answer>", True)


def test_a_right_answer_above_the_nodes_length_limit_is_dropped_and_counted(
    verifier: Verifier, other: Path
) -> None:
    """If it were truncated, a part of the text would get the reward of the whole.

    A model with a higher limit trains on it.
    """
    tasks = CurriculumTasks(TINY_9, ("basic_arithmetic",)).draw(2, random.Random(3))
    long = [
        (task, [right(task, before="Let me think about this for a while. " * 3), WRONG]) for task in tasks[:1]
    ]
    short = [
        (task, [right(task, after=" That was easy." * 9), Completion("x" * 300, False)]) for task in tasks[1:]
    ]
    for model, room, unfit in (("tiny", 16, {ANSWER_TOO_LONG: 1}), (other, 200, {})):
        swarm = MemorySwarm()
        node, _ = joined(swarm, 1, verifier, model, new_tokens=room)
        report = heard(node, swarm, *long, *short)
        assert (report.unfit, report.external, report.zero_advantage_dropped) == (unfit, 2 - len(unfit), 0)
        assert (f"not for our model: 1 {ANSWER_TOO_LONG}" in round_sentence(report.line)) == bool(unfit)


def test_text_that_the_tokenizer_cannot_encode_is_dropped(verifier: Verifier, narrow: Path) -> None:
    tasks = CurriculumTasks(TINY_9, ("basic_arithmetic",)).draw(2, random.Random(4))
    foreign = (tasks[0], [right(tasks[0], before="∴ "), WRONG])
    plain = (tasks[1], [right(tasks[1]), WRONG])
    swarm = MemorySwarm()
    report = heard(joined(swarm, 1, verifier, narrow)[0], swarm, foreign, plain)
    assert (report.unfit, report.external) == ({UNKNOWN_CHARACTERS: 1}, 1)


def test_a_rollout_whose_question_exceeds_the_models_context_is_dropped(
    verifier: Verifier, narrow: Path
) -> None:
    (task,) = CurriculumTasks(TINY_9, ("arc_1d",)).draw(1, random.Random(5))
    swarm = MemorySwarm()
    report = heard(joined(swarm, 1, verifier, narrow)[0], swarm, (task, [right(task), WRONG]))
    assert len(task.question) > 128 and (report.unfit, report.external) == ({QUESTION_TOO_LONG: 1}, 0)


def test_a_node_with_an_opening_trains_on_text_that_begins_with_it(verifier: Verifier, other: Path) -> None:
    """Local answers are shared with the opening. Right answers without it do not fit after the prompt."""
    tasks = CurriculumTasks(TINY_9, ("basic_arithmetic",)).draw(2, random.Random(6))
    prose = Completion("I do not know", True)
    swarm = MemorySwarm()
    node, policy = joined(swarm, 1, verifier, other, opening="<answer>")
    report = heard(
        node,
        swarm,
        (tasks[0], [right(tasks[0], before="It is "), WRONG]),
        (tasks[1], [right(tasks[1]), prose, WRONG]),
    )
    assert (report.unfit, report.external) == ({UNOPENED: 1}, 1)
    assert report.shown is not None
    assert all(text.startswith("<answer>") for text, *_ in report.shown.answers)
    task, rewards = tasks[1], (1.0, 0.0, 0.0)
    scored = Scored(Rollout(task.ref, (right(task), prose, WRONG), node.me), task.question, rewards, 1)
    (tokens,) = policy.logprobs([scored])
    lengths = [len(each) for each in tokens.ids]
    assert lengths[1] == 0 and lengths[0] == len(f"{task.entry['answer']}") + 2, (
        "the tokens are not the answer, the closing tag and the end"
    )
    # Local answers keep their sampled tokens, and are scored after the prompt with which they were sampled.
    (generation,) = policy.generate([task.question], 2, seed=1)
    own = Rollout(task.ref, generation.completions, node.me)
    (again,) = policy.logprobs([Scored(own, task.question, (1.0, 0.0), 1, generation.tokens)])
    assert again.ids == generation.tokens.ids
    for now, drawn in zip(again.logprobs, generation.tokens.logprobs, strict=True):
        assert now == pytest.approx(drawn, abs=1e-4)
    assert all(c.text.startswith("<answer>") for c in [*generation.completions, policy.answer("1+1?")])
