"""Answers of several turns: decoding goes on after each reply, and only the model's tokens are trained on."""

from collections.abc import Sequence
from itertools import compress, groupby
from pathlib import Path

import pytest
import torch

from swarmd.policy.inference.decode import Reply, Sampling, decode
from swarmd.policy.training.learner import Learner
from swarmd.policy.training.packing import Row, rows_of
from swarmd.types import Completion, Scored
from tests.swarmd.policy.conftest import (
    ALL_FAMILIES,
    VOCABULARY,
    chat_of,
    external,
    network_of,
    open_policy,
    plain_logprobs,
    plainly,
)
from tests.swarmd.policy.test_update import gradients, learning

CPU = torch.device("cpu")
PROMPTS = [[1, 80, 81, 82], [1, 80, 90], [1] * 12]
# Half of the vocabulary ends a turn.
ENDS = frozenset(range(VOCABULARY // 2))
TURNS = 3
# The first token of a reply ends a turn if a model writes it.
REPLY = [5, 200, 201, 6, 202]


def replying(calls: list[tuple[int, list[int], list[bool]]]) -> Reply:
    """Reply to the first texts of each answer, with a token that tells the prompt, and note the calls."""

    def reply(asked: Sequence[tuple[int, Sequence[int], Sequence[bool]]]) -> Sequence[Sequence[int]]:
        calls.extend((i, list(ids), list(drawn)) for i, ids, drawn in asked)
        turns = [sum(t in ENDS for t in compress(ids, drawn)) for _, ids, drawn in asked]
        return [[*REPLY, 210 + i] if n < TURNS else [] for (i, _, _), n in zip(asked, turns, strict=True)]

    return reply


@pytest.mark.parametrize("cache_tokens", [10_000, 1])
@pytest.mark.parametrize("family", list(ALL_FAMILIES))
def test_decoding_goes_on_after_each_reply(folders: dict[str, Path], family: str, cache_tokens: int) -> None:
    policy = open_policy(folders[family])
    calls: list[tuple[int, list[int], list[bool]]] = []
    sampling = Sampling(32, 128, ENDS, 1.0, limits=(32, 20, 9), reply=replying(calls))
    answers = decode(policy.network, PROMPTS, 4, sampling, torch.Generator().manual_seed(1), cache_tokens)
    network, several = network_of(folders[family]), 0
    for i, (prompt, samples) in enumerate(zip(PROMPTS, answers, strict=True)):
        for sample in samples:
            drawn = list(compress(sample.ids, sample.drawn))
            assert len(sample.ids) == len(sample.drawn) <= sampling.limits[i]
            assert len(sample.logprobs) == len(drawn) and sample.drawn[0] and sample.drawn[-1]
            read = [t for t, own in zip(sample.ids, sample.drawn, strict=True) if not own]
            times = len(read) // (len(REPLY) + 1)
            assert read == [*REPLY, 210 + i] * times and times < TURNS
            several += times == TURNS - 1
            ended = sum(t in ENDS for t in drawn)
            assert sample.ended == (drawn[-1] in ENDS) and ended in (times, times + 1)
            # A turn is followed by a reply, unless it was the last or there is no room for another.
            assert ended in (times, TURNS) or len(sample.ids) + len(REPLY) + 1 >= sampling.limits[i]
            exact = plain_logprobs(network, prompt, sample.ids)
            found = torch.tensor(sample.logprobs)
            torch.testing.assert_close(exact[torch.tensor(sample.drawn)], found, atol=2e-4, rtol=1e-4)
    assert several >= 3
    # Each call has the tokens of one row so far, the last of which ended a turn.
    assert all(drawn[-1] and ids[-1] in ENDS and len(ids) == len(drawn) for _, ids, drawn in calls)


def of_turns(question: str, answers: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Scored:
    """Return an external rollout from texts and replies; the first answer is right."""
    one = external(question, [("", True)], (0.0,))
    completions = tuple(Completion(texts[-1], True, tuple(texts[:-1])) for texts, _ in answers)
    return Scored(
        type(one.rollout)(one.rollout.ref, completions, one.rollout.author),
        question,
        (1.0, *[0.0] * (len(answers) - 1)),
        1,
        observations=tuple(tuple(replies) for _, replies in answers),
    )


BATCH = [
    of_turns("1+1?", [(("ab", "c", "d"), ("xy", "z")), (("ab", "e"), ("xy", "left over")), (("d",), ())]),
    of_turns("2?", [(("a <|user|>", "b"), ("<|assistant|>",)), (("", ""), ("q",))]),
]


@pytest.mark.parametrize("family", ["qwen2", "lfm2", "qwen3_5"])
def test_only_the_models_tokens_are_trained_on(folders: dict[str, Path], family: str) -> None:
    chat, network = chat_of(folders[family]), network_of(folders[family])
    advantages = [[1.0, -0.5, 0.25], [0.7, -1.0]]
    rows = rows_of(BATCH, advantages, chat, 40, 128, lambda lengths: [1 / sum(lengths)] * len(lengths))
    texts = [text for s in BATCH for c in s.rollout.completions for text in c.texts]
    # One token for each byte, and an end.
    assert sum(len(row.targets) for row in rows) == sum(len(text) + 1 for text in texts)
    learner = Learner(open_policy(folders[family], lora="off").network, learning(), CPU)
    found, report = gradients(learner, rows)
    with plainly(network):
        loss = -sum(row.weight * row.advantage * masked_logprobs(network, row).sum() for row in rows)
        loss.backward()
    assert report.tokens == sum(len(row.targets) for row in rows)
    for name, weight in network.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], weight.grad, atol=2e-5, rtol=1e-3)


def masked_logprobs(network, row: Row) -> torch.Tensor:
    logits = network(torch.tensor([[*row.prompt, *row.completion]]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits[len(row.prompt) - 1 : -1].float(), -1)
    each = logp[torch.arange(len(row.completion)), torch.tensor(row.completion)]
    return each[torch.tensor(row.mask)] if row.mask else each


def test_the_policy_reads_the_texts_of_several_turns(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen2"], new_tokens=60)
    # A model with random weights hardly ever ends a turn, so other tokens end it.
    policy._sampling = type(policy._sampling)(60, 128, frozenset({0, *range(40, 120)}), 1.0)
    seen: list[tuple[int, tuple[str, ...]]] = []

    def observe(asked: Sequence[tuple[int, tuple[str, ...]]]) -> Sequence[str | None]:
        seen.extend(asked)
        return ["<|user|> reply" if len(texts) < 3 else None for _, texts in asked]

    (answer,) = policy.generate(["1+1?"], 8, observe=observe)
    assert {len(c.earlier) for c in answer.completions} >= {2} and {i for i, _ in seen} == {0}
    for completion, drawn in zip(answer.completions, answer.tokens.sampled, strict=True):
        runs = [own for own, _ in groupby(drawn)]
        assert len(completion.texts) == sum(runs) and "reply" not in completion.whole


def test_a_text_without_the_opening_or_with_unknown_letters_is_unfit(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen2"], new_tokens=40, opening="<answer>")
    good = of_turns("1?", [(("<answer>a", "<answer>b"), ("x",)), (("<answer>",), ())])
    assert policy.unfit(good) is None
    assert policy.unfit(of_turns("1?", [(("a", "<answer>b"), ("x",))])) is not None
    long = of_turns("1?", [(("<answer>a", "<answer>b"), ("x" * 50,))])
    assert policy.unfit(long) is not None
    (tokens,) = policy.logprobs([good])
    assert [sum(mask) for mask in tokens.sampled] == [len(p) for p in tokens.logprobs]


def test_the_next_text_follows_the_texts_and_replies_before_it(folders: dict[str, Path]) -> None:
    """A judge's environment is answered text by text, perhaps after updates in between."""
    policy, chat = open_policy(folders["qwen2"]), chat_of(folders["qwen2"])
    ids = [*chat.prompt("1?"), *chat.encode(Completion("ab", ended=True), 9), *chat.turn("xy")]
    written: list[int] = []
    with torch.no_grad(), plainly(network := network_of(folders["qwen2"])):
        while len(written) < 12 and not set(written) & chat.ends:
            written.append(int(network(torch.tensor([[*ids, *written]])).logits[0, -1].argmax()))
    found = policy.next_text("1?", [("ab", "xy")])
    assert found == chat.read(written, ended=written[-1] in chat.ends) and found != policy.answer("1?")
    assert policy.next_text("1?", ()) == policy.answer("1?")
