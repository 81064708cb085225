"""One training step: its gradient equals a naive reference, and failures are handled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmd.config.config import TrainConfig
from swarmd.errors import NoModel
from swarmd.experience.advantages import shifted, within_group
from swarmd.policy.attention import NAME, shared_prefix
from swarmd.policy.models.chat import Chat
from swarmd.policy.training import losses
from swarmd.policy.training.chunked_head import logits_gradient, token_logprobs
from swarmd.policy.training.learner import Diverged, Learner, Learning
from swarmd.policy.training.packing import Row, micro_batches, pack, packed_tokens, padded_micro_batches
from swarmd.policy.training.packing import rows_of as all_rows_of
from swarmd.types import Completion, Generation, Scored, Tokens, UpdateReport
from tests.swarmd.policy.conftest import (
    ALL_FAMILIES,
    VOCABULARY,
    answered,
    chat_of,
    external,
    local,
    network_of,
    open_policy,
    plainly,
)

CPU = torch.device("cpu")
LIMIT, CONTEXT = 12, 128


def learning(
    budget: int = 16_384,
    temperature: float = 1.0,
    rate: float = 1e-3,
    clip: float = 1e9,
    cap: float = 0,
    checkpointing: bool = False,
    head_tokens: int = 0,
    **more: Any,
) -> Learning:
    train = TrainConfig(learning_rate=rate, max_grad_norm=clip, importance_cap=cap, kl_every=0, **more)
    return Learning(train, temperature, budget, checkpointing, head_tokens)


def rows_of(
    batch,
    chat: Chat,
    limit: int = LIMIT,
    context: int = CONTEXT,
    mean=losses.token_mean,
    shift: float | None = None,
):
    """Return the batch's rows, with GRPO's advantages if `shift` is None, else with AsymRE's."""
    advantages = [within_group(s) if shift is None else shifted(s, shift) for s in batch]
    return all_rows_of(batch, advantages, chat, limit, context, mean)


def mixed_batch(folder: Path) -> list[Scored]:
    """Return a batch of local and external texts: empty, truncated, too long, and without advantage."""
    policy = open_policy(folder)
    own, dull = policy.generate(["short?", "a question that is a good deal longer than the other one"], 4)
    stale = Tokens(
        own.tokens.ids,
        tuple(tuple(p + 0.4 * math.sin(i) for i, p in enumerate(ps)) for ps in own.tokens.logprobs),
    )
    return [
        local("short?", Generation(own.completions, stale), (1.0, 0.0, 0.0, 1.0)),
        local("a question that is a good deal longer than the other one", dull, (0.0, 0.0, 0.0, 0.0)),
        external(
            "what?",
            [("", True), ("", False), ("x", True), ("far longer than twelve tokens", True)],
            (1.0, 0.0, 0.0, 1.0),
        ),
        external(
            "and?",
            [("yes", False), ("<answer>no</answer>", True), ("yes", False), ("<answer>yes", True)],
            (0.0, 1.0, 0.0, 1.0),
        ),
        external("all right", [("yes", True), ("no", True)], (1.0, 1.0)),
    ]


@pytest.fixture
def ragged(folders: dict[str, Path]) -> list[Row]:
    return rows_of(mixed_batch(folders["qwen2"]), chat_of(folders["qwen2"]))


def gradients(learner: Learner, rows: list[Row]) -> tuple[dict[str, torch.Tensor], UpdateReport]:
    found: dict[str, torch.Tensor] = {}

    hooks = [
        weight.register_post_accumulate_grad_hook(
            lambda p, name=name: found.__setitem__(name, p.grad.clone())
        )
        for name, weight in learner.weights.items()
    ]
    report = learner.step(rows)
    for hook in hooks:
        hook.remove()
    return found, report


def naive_grpo(lp: torch.Tensor, old: torch.Tensor, a: float) -> torch.Tensor:
    ratio = torch.exp(lp - old)
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a)


def naive_importance(lp: torch.Tensor, old: torch.Tensor, a: float) -> torch.Tensor:
    return -(torch.exp(lp - old).clamp(max=1.1).detach() * torch.exp(lp - lp.detach()) * a)


@dataclass(frozen=True)
class Case:
    """A loss: its settings and its definition."""

    asked: dict[str, Any]
    naive: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    shift: float | None = None  # AsymRE's shift; None for GRPO's advantages
    by_sequence: bool = False


CASES = {
    "grpo": Case({}, naive_grpo),
    "grpo, mean of sequences": Case({}, naive_grpo, by_sequence=True),
    "asymre": Case({"loss": "asymre"}, lambda lp, _, a: -a * lp, shift=-0.1),
    "asymre, mean of sequences": Case(
        {"loss": "asymre"}, lambda lp, _, a: -a * lp, shift=0.0, by_sequence=True
    ),
    "importance weights": Case({"cap": 1.1}, naive_importance),
}


def test_each_loss_is_in_the_test_cases() -> None:
    cases = {case.asked.get("loss", "grpo") for case in CASES.values()}
    assert cases == set(losses.LOSSES), "add the new loss and its definition to CASES"


def reference(network, chat: Chat, batch: list[Scored], temperature: float, case: Case = CASES["grpo"]):
    """Compute the loss straight from its definition.

    Each rollout is computed separately, padded on both sides as in TRL, with all logits.
    """
    weights = [p for p in network.parameters() if p.requires_grad]
    total = torch.zeros(())
    entropy, trained, lengths = 0.0, 0, []
    for s in batch:
        prompt = chat.prompt(s.question)
        room = min(LIMIT, CONTEXT - len(prompt))
        ids = (
            [list(x) for x in s.tokens.ids]
            if s.tokens
            else [chat.encode(c, room) for c in s.rollout.completions]
        )
        lengths += map(len, ids)
        width = max(map(len, ids)) + 3
        full = torch.tensor([[7] * 5 + prompt + c + [7] * (width - len(c)) for c in ids])
        mask = torch.tensor([[0] * 5 + [1] * (len(prompt) + len(c)) + [0] * (width - len(c)) for c in ids])
        logits = (
            network(full, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
            / temperature
        )
        logp = torch.log_softmax(logits, -1)
        for i, c in enumerate(ids):
            a = (
                within_group(s)[i]
                if case.shift is None
                else s.rewards[i] - sum(s.rewards) / len(s.rewards) - case.shift
            )
            start = 5 + len(prompt) - 1
            for t, token in enumerate(c):
                lp = logp[i, start + t, token]
                old = torch.tensor(s.tokens.logprobs[i][t]) if s.tokens else lp.detach()
                total = total + case.naive(lp, old, a) / (len(c) if case.by_sequence else 1)
                if a:
                    entropy -= float((logp[i, start + t].exp() * logp[i, start + t]).sum().detach())
                    trained += 1
    loss = total / (len(lengths) if case.by_sequence else sum(lengths))
    grads = torch.autograd.grad(loss, weights)
    names = [n for n, p in network.named_parameters() if p.requires_grad]
    return dict(zip(names, grads, strict=True)), loss.item(), entropy / trained, trained


def adapted(folder: Path) -> Any:
    """Return a network with an adapter after one update; before, half of the gradients are zero."""
    policy = open_policy(folder, lora="on", lora_rank=4, train={"learning_rate": 1e-2})
    policy.update(answered(policy, ["1+1?"], (1.0, 0.0, 1.0, 0.0)))
    return policy.network


def check_gradient(
    folder: Path, case: Case, temperature: float = 1.0, of: Callable[[Path], Any] = network_of, **asked: Any
) -> UpdateReport:
    """Compare swarmd's gradient with the naive gradient of the mixed batch."""
    network, chat, batch = of(folder), chat_of(folder), mixed_batch(folder)
    with plainly(network):
        expected, loss, entropy, tokens = reference(network, chat, batch, temperature, case)
    mean = losses.sequence_mean if case.by_sequence else losses.token_mean
    learner = Learner(network, learning(temperature=temperature, **asked, **case.asked), CPU)
    got, report = gradients(learner, rows_of(batch, chat, mean=mean, shift=case.shift))
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert norm > 0.01
    assert (report.loss, report.tokens) == (pytest.approx(loss, abs=1e-5), tokens)
    assert (report.entropy, report.grad_norm) == pytest.approx((entropy, norm), rel=1e-4)
    assert (network.config._attn_implementation == NAME) is (network.config.model_type != "lfm2")
    return report


WAYS = [
    *((family, "grpo", {"budget": budget}) for family in ALL_FAMILIES for budget in (16_384, 60, 1)),
    *(
        (family, name, {"temperature": 0.7, "budget": 100})
        for family in ("qwen2", "gemma2", "qwen3_5", "lfm2")
        for name in CASES
    ),
    *((family, "grpo", {"checkpointing": True}) for family in ("qwen2", "gemma3", "qwen3_5", "lfm2")),
    *((family, "grpo", {"of": adapted}) for family in ("llama", "qwen3_5")),
    ("gemma2", "grpo", {"head_tokens": 5}),
]


@pytest.mark.parametrize(("family", "name", "asked"), WAYS)
def test_the_gradient_equals_the_naive_one(
    family: str, name: str, asked: dict[str, Any], folders: dict[str, Path]
) -> None:
    report = check_gradient(folders[family], CASES[name], **asked)
    assert name != "grpo" or 0 < report.clip_fraction < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_trains_only_the_adapter(dtype: str, folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen3"], lora="on", lora_rank=4, dtype=dtype, train={"learning_rate": 1e-2})
    assert policy.description.lora == 4
    weights = policy.learner.weights
    assert weights and not any("lm_head" in name or "embed" in name for name in weights)
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in weights.items())
    frozen = {n: p.clone() for n, p in policy._loaded.network.named_parameters() if not p.requires_grad}
    for _ in range(3):
        report = policy.update(answered(policy, ["1+1?"], (1.0, 0.0, 1.0, 0.0)))
    assert report.grad_norm > 0 and report.clip_fraction < (0.2 if dtype == "bfloat16" else 1e-9)
    after = dict(policy._loaded.network.named_parameters())
    assert all(torch.equal(p, after[n]) for n, p in frozen.items())


def test_rewarded_answers_become_more_likely(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen2"], train={"learning_rate": 3e-3})
    for _ in range(60):
        policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    assert policy.answer("1+1?") == Completion("two", ended=True)


def test_without_advantages_nothing_is_computed_and_no_weight_changes(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen2"])
    before = {n: p.clone() for n, p in policy.learner.weights.items()}
    policy._loaded.network.base_model.register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    equal = external("?", [("a", True), ("b", True)], (1.0, 1.0))
    empty = external("?", [("", False), ("", False)], (1.0, 0.0))
    assert [policy.update(batch) for batch in ([equal], [empty], [])] == [UpdateReport()] * 3
    assert all(torch.equal(p, before[n]) for n, p in policy.learner.weights.items())


def test_rows_hold_only_completions_with_an_advantage(folders: dict[str, Path]) -> None:
    chat = chat_of(folders["qwen2"])
    batch = [
        external("?", [("abc", True), ("", False), ("abcdef", True)], (1.0, 0.0, 0.0)),
        external("!", [("x", True)] * 2, (0.0, 0.0)),
    ]
    rows = rows_of(batch, chat, 5, CONTEXT)
    assert [1 / r.weight for r in rows] == pytest.approx([4 + 0 + 5 + 2 + 2] * 2)
    assert [len(r.completion) for r in rows] == [4, 5] and rows[0].completion[-1] == 0
    assert 0 not in rows[1].completion
    prompt = len(chat.prompt("?"))
    assert [len(r.completion) for r in rows_of(batch, chat, 5, prompt + 2)] == [2, 2]
    assert rows_of(batch, chat, 5, prompt) == []
    assert [r.weight for r in rows_of(batch, chat, 5, mean=losses.sequence_mean)] == pytest.approx(
        [1 / (5 * 4), 1 / (5 * 5)]
    )


rows = st.builds(
    lambda prompt, length: Row((1,) * prompt, (2,) * length, 1.0, None, 1.0),
    st.integers(1, 7),
    st.integers(1, 5),
)


@given(st.lists(rows, min_size=1, max_size=50), st.integers(1, 200), st.integers(1, 50))
def test_micro_batches_hold_every_row_once_and_respect_their_budgets(
    rows: list[Row], budget: int, head: int
) -> None:
    packed, padded = list(micro_batches(rows, budget)), list(padded_micro_batches(rows, budget, head))
    for groups in (packed, padded):
        assert sorted(map(id, (r for g in groups for r in g))) == sorted(map(id, rows))
    assert all(len(g) == 1 or packed_tokens(g) <= budget for g in packed)
    assert all(len(g) == 1 or len(g) * max(map(len, g)) <= budget for g in padded)
    assert all(len(g) == 1 or sum(len(r.completion) for r in g) <= head for g in padded)
    assert len(list(micro_batches(rows, packed_tokens(rows)))) == 1


def test_completions_of_a_prompt_share_a_micro_batch_if_they_fit() -> None:
    fifty = [Row((1,) * (1 + i % 7), (2,) * (1 + i % 5), 1.0, None, 1.0) for i in range(50)]
    prompts = [prompt for group in micro_batches(fifty, 60) for prompt in {row.prompt for row in group}]
    assert len(prompts) == 7


def test_rows_are_padded_into_one_batch_only_if_they_need_little_padding() -> None:
    def groups(*lengths: int) -> list[list[int]]:
        rows = [Row((1,), (2,) * (n - 1), 1.0, None, 1.0) for n in lengths]
        return [[len(row) for row in group] for group in padded_micro_batches(rows, 9999, 9999)]

    assert groups(400, 600, 500) == [[600, 500], [400]] and groups(20, 200, 100) == [[200, 100, 20]]


completions = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


@given(st.dictionaries(completions, st.lists(completions, min_size=1, max_size=6), min_size=1, max_size=3))
def test_each_packed_token_sees_the_tokens_before_it_in_its_row(
    asked: dict[tuple[int, ...], list[tuple[int, ...]]],
) -> None:
    rows = [
        Row(prompt, completion, 1.0, None, 1.0) for prompt, answers in asked.items() for completion in answers
    ]
    packed, before = pack(rows, CPU), {}
    ids = packed.ids.tolist()
    for span in packed.spans:
        seen = [token for part in span.prefix for token in ids[part.start : part.start + part.length]]
        before |= {
            place: (*seen, *ids[span.start : place + 1])
            for place in range(span.start, span.start + span.length)
        }
    starts = [(r.prompt, r.completion[:i]) for r in rows for i in range(len(r.completion))]
    assert [before[place] for place in packed.sources.tolist()] == [
        prompt + start for prompt, start in starts
    ]
    assert packed.positions.tolist() == [len(before[place]) - 1 for place in range(len(ids))]
    assert len(ids) <= len({start for start in starts if start[1]}) + sum(map(len, asked))  # no duplicates


@pytest.mark.parametrize(
    ("prompts", "common"),
    [
        ([[1, 2], [1, 2, 3]], 1),
        ([[1, 2]], 0),
        ([[1, 2], [3, 2]], 0),
        ([[1, 2, 3], [1, 2, 4], [1, 5, 6]], 1),
        ([[], [1]], 0),
    ],
)
def test_the_common_beginning_of_prompts_is_found(prompts: list[list[int]], common: int) -> None:
    assert shared_prefix(prompts) == common


def test_the_gradient_is_clipped_but_its_unclipped_norm_is_reported(
    ragged: list[Row], folders: dict[str, Path]
) -> None:
    free = Learner(network_of(folders["qwen2"]), learning(), CPU)
    tight = Learner(network_of(folders["qwen2"]), learning(clip=1e-3), CPU)
    assert free.step(ragged).grad_norm == pytest.approx(tight.step(ragged).grad_norm)
    first_moment = [t for name, t in tight.optimizer.tensors().items() if name.startswith("exp_avg/")]
    assert math.sqrt(sum(float(m.square().sum()) for m in first_moment)) == pytest.approx(
        0.1 * 1e-3, rel=1e-3
    )


def test_five_non_finite_steps_in_a_row_end_the_run(ragged: list[Row], folders: dict[str, Path]) -> None:
    learner = Learner(network := network_of(folders["qwen2"]), learning(), CPU)
    learner.step(ragged)
    weight = network.model.norm.weight
    good = weight.detach().clone()
    before = {n: p.clone() for n, p in learner.weights.items()}

    weight.data.copy_(good * math.nan)
    for _ in range(4):
        assert learner.step(ragged) == UpdateReport(skipped=1)
    weight.data.copy_(good)
    assert all(torch.equal(p, before[n]) for n, p in learner.weights.items())
    assert learner.step(ragged).tokens > 0  # one good step resets the count
    weight.register_hook(lambda gradient: gradient * math.inf)  # while the loss is finite
    for _ in range(4):
        learner.step(ragged)
    with pytest.raises(Diverged, match=r"5 times in a row.*learning_rate") as diverged:
        learner.step(ragged)
    assert "float32" not in str(diverged.value)  # the run uses float32 already


def scarce(network, tokens: int, error: Exception):
    """Make the forward pass run out of memory above `tokens` tokens.

    It stands for a small memory, which a test could not really exhaust.
    """

    def check(_, args, kwargs):
        if kwargs["input_ids"].numel() > tokens:
            raise error

    return network.base_model.register_forward_pre_hook(check, with_kwargs=True)


SHORT = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    MemoryError(),
]


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
def test_micro_batches_become_smaller_if_memory_runs_out(
    error: Exception, ragged: list[Row], folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    longest = max(map(len, ragged))
    expected, _ = gradients(Learner(network_of(folders["qwen2"]), learning(), CPU), ragged)
    network = network_of(folders["qwen2"])
    scarce(network, 2 * longest, error)
    got, report = gradients(Learner(network, learning(), CPU), ragged)
    assert report.tokens == sum(len(r.completion) for r in ragged)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4)
    assert caplog.text.index("recomputed") < caplog.text.index("micro-batches of at most")


@pytest.mark.parametrize("family", ["lfm2", "qwen2"])  # lfm2 is padded, qwen2 is packed
def test_the_number_of_logits_held_at_once_is_limited(
    family: str, ragged: list[Row], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nevertheless, the CPU waits for the device only once, for the metrics of all parts."""
    most, held, waits, read = 20 * VOCABULARY, list[int](), list[None](), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda of: (waits.append(None), read(of))[1])
    monkeypatch.setattr("swarmd.policy.training.learner.MAX_PADDED_LOGITS", most)
    network = network_of(folders[family])
    network.lm_head.register_forward_hook(lambda _module, _inputs, logits: held.append(logits.numel()))
    learner = Learner(network, learning(head_tokens=20), CPU)
    assert learner.step(ragged).tokens * VOCABULARY == sum(held)
    assert most / 2 < max(held) <= most
    assert len(waits) == 1 < len(held)
    waits.clear()
    assert sum(map(len, learner.logprobs(ragged).values())) > 20
    assert len(waits) == len(list(learner._micro_batches(ragged))) < len(ragged)


def test_checkpointing_recomputes_layers_and_leaves_training_mode_after_an_update(
    ragged: list[Row], folders: dict[str, Path]
) -> None:
    """In transformers 5.22, a layer in training mode gets no cache during generation."""
    network, calls = network_of(folders["qwen2"]), list[None]()
    learner = Learner(network, learning(checkpointing=True), CPU)
    network.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    learner.step(ragged)
    assert len(calls) == 2 and not any(module.training for module in network.modules())


def test_a_single_row_that_does_not_fit_gives_an_error(ragged: list[Row], folders: dict[str, Path]) -> None:
    network = network_of(folders["qwen2"])
    scarce(network, 3, SHORT[0])
    words = rf"not enough memory.*one completion of {max(map(len, ragged))} tokens.*max_new_tokens"
    with pytest.raises(NoModel, match=words):
        Learner(network, learning(), CPU).step(ragged)


def test_other_runtime_errors_do_not_count_as_out_of_memory(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen2"])

    def broken(*_):
        raise RuntimeError("a bug")

    policy._loaded.network.base_model.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="a bug"):
        policy.update([external("?", [("a", True), ("b", True)], (1.0, 0.0))])
    with pytest.raises(RuntimeError, match="a bug"):
        policy.generate(["?"], 2)


LOGPROB = st.floats(-8, 0, allow_nan=False, width=32)


@settings(max_examples=200)
@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3, width=32)), min_size=1, max_size=6))
@example(
    [
        (math.log(ratio), 0.0, advantage)
        for ratio in (0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0)
        for advantage in (-1.0, 1.0)
    ]
)
def test_grpo_equals_the_clipped_surrogate_and_clipped_terms_have_no_gradient(
    tokens: list[tuple[float, float, float]],
) -> None:
    new, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    ours = losses.surrogate(new.requires_grad_(), old, advantages, 0.2, 0.28)
    ours.sum().backward()
    clipped = losses.clipped(new.detach(), old, advantages, 0.2, 0.28).tolist()
    for got, gradient, is_clipped, (n, o, a) in zip(
        ours.tolist(), new.grad.tolist(), clipped, tokens, strict=True
    ):
        ratio = math.exp(n - o)
        assert got == pytest.approx(-min(ratio * a, min(max(ratio, 0.8), 1.28) * a), rel=1e-6, abs=1e-9)
        assert is_clipped == (ratio > 1.28 if a > 0 else ratio < 0.8 and a < 0)
        assert gradient == pytest.approx(0.0 if is_clipped else -ratio * a, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_logprobs_entropy_and_gradient_equal_torchs(temperature: float) -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 4, 5, 10])
    got, entropy, probabilities = token_logprobs(logits, targets, temperature)
    there = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(got, there.log_prob(targets).detach())
    torch.testing.assert_close(entropy, there.entropy().detach())
    upstream = torch.linspace(-1, 2, 7)
    (expected,) = torch.autograd.grad(there.log_prob(targets), logits, upstream)
    torch.testing.assert_close(logits_gradient(probabilities, targets, upstream, temperature), expected)


def test_importance_weights_are_capped_only_from_above_and_have_no_gradient() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old, settings = torch.tensor([-1.0, -5.0, -0.5]), losses.LossSettings(importance_cap=2.0)
    each, clipped = losses.grpo(new, old, torch.ones(3), settings)
    (gradient,) = torch.autograd.grad(each.sum(), new)
    assert each.tolist() == gradient.tolist() == pytest.approx([-1.0, -2.0, -math.exp(-0.5)])
    assert clipped is None
