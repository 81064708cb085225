"""The policy's distance from its start and from the policy that sampled the tokens.

Log-probabilities of first use and the learning rate by update number are tested, too.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.config.config import ReplayConfig, WorkersConfig
from swarmd.experience.pool import Pool
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.chat import Chat
from swarmd.policy.models.lora import lora_layers
from swarmd.policy.training.learner import ReferencePolicy
from swarmd.policy.training.losses import k3
from swarmd.types import Scored
from tests.swarmd.policy.conftest import (
    answered,
    chat_of,
    config_of,
    external,
    flat,
    network_of,
    open_policy,
    plain_logprobs,
)

RATE = 1e-2
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapter": {"lora": "on", "lora_rank": 4},
    "master": {"dtype": "bfloat16"},
}


def batch_of(policy: LanguagePolicy) -> list[Scored]:
    return answered(policy, ["one and one?", "a longer question, two and two?"])


def remembered(policy: LanguagePolicy, scored: Scored) -> Scored:
    """Return an external rollout in the form that replay keeps after its first use."""
    pool = Pool(1)
    pool.add([scored])
    return pool.remember([scored], policy.logprobs)[0]


def by_transformers(network: Any, chat: Chat, batch: Sequence[Scored]) -> torch.Tensor:
    asked = [
        (chat.prompt(s.question), ids)
        for s in batch
        for ids in (s.tokens.ids if s.tokens else [chat.encode(c, 12) for c in s.rollout.completions])
    ]
    return torch.cat([plain_logprobs(network, prompt, ids) for prompt, ids in asked])


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_still_gives_the_first_weights_log_probabilities(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"train": {"learning_rate": RATE}, **KINDS[kind]}
    policy, question = open_policy(folders["qwen2"], **settings), "one and one?"
    assert policy.description.keeps_first
    first = policy.answer(question)
    for _ in range(3):
        policy.update(batch_of(policy))
    now = policy.answer(question)
    assert now != first, "the training changed no answer, so this test shows nothing"
    assert (policy.first_answer(question), policy.answer(question)) == (first, now)
    policy.save(tmp_path)
    resumed = open_policy(folders["qwen2"], seed=1, **settings)
    resumed.restore(tmp_path)
    assert (resumed.first_answer(question), resumed.answer(question)) == (first, now)
    assert not open_policy(folders["qwen2"], train={"kl_every": 0}).description.keeps_first


def test_the_model_computes_two_dimensional_products_without_its_adapter(folders: dict[str, Path]) -> None:
    """So are products with the adapter, because MPS computes three-dimensional products wrongly."""
    policy, seen = open_policy(folders["qwen2"], **KINDS["adapter"], train={"kl_every": 1}), list[int]()
    for _, layer in lora_layers(policy.network):
        layer.base_layer.register_forward_pre_hook(lambda _, read: seen.append(read[0].dim()))
    assert policy.update(batch_of(policy)).kl is not None
    assert set(seen) == {2}


@pytest.mark.parametrize("kind", ["whole", "adapter"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "lfm2"])
def test_kl_is_measured_against_the_loaded_model(
    kind: str, family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "train": {"learning_rate": RATE, "kl_every": 3, "micro_batch_tokens": 40},
        **KINDS[kind],
    }
    policy = open_policy(folders[family], **settings)
    first = [policy.update(batch_of(policy)) for _ in range(3)]
    assert first[0].kl == pytest.approx(0.0, abs=1e-6), "the KL before training is not 0"
    assert [r.kl for r in first[1:]] == [None, None]
    policy.save(tmp_path)
    resumed = open_policy(folders[family], seed=1, **settings)
    resumed.restore(tmp_path)
    network, chat = network_of(folders[family]), chat_of(folders[family])
    foreign = external("other?", [("yes", True), ("no", True)], (1.0, 0.0))
    for one in (policy, resumed):  # a restart does not change the start
        batch = batch_of(one)
        before = {name: p.detach().clone() for name, p in one.trained.items()}
        expected = k3(by_transformers(network, chat, batch), flat(one.logprobs(batch))).mean()
        report = one.update([*batch, foreign])
        assert report.kl == pytest.approx(float(expected), rel=1e-3)
        assert report.kl is not None and report.kl > 1e-4
        moved = {name: p.detach() - before[name] for name, p in one.trained.items()}
        assert 0 < max(float(m.abs().max()) for m in moved.values()) < 3 * RATE, (
            "the KL was not measured against the start"
        )
    for read in (foreign, remembered(one, foreign)):
        one.learner.updates = 6
        assert one.update([read]).kl is None, "a KL was computed over other nodes' text"
    one.learner.updates = 6
    batch = batch_of(one)
    expected = k3(by_transformers(network, chat, batch), flat(one.logprobs(batch))).mean()
    assert one.update([*batch, remembered(one, foreign)]).kl == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_the_distance_does_not_change_the_training(kind: str, folders: dict[str, Path]) -> None:
    ends = []
    for every in (0, 1):
        policy = open_policy(
            folders["qwen3"], train={"learning_rate": RATE, "kl_every": every}, **KINDS[kind]
        )
        reports = [policy.update(batch_of(policy)) for _ in range(3)]
        ends.append({name: p.detach().clone() for name, p in policy.trained.items()})
        assert [r.kl is not None for r in reports] == [every == 1] * 3
    assert all(torch.equal(p, ends[1][name]) for name, p in ends[0].items())


NARROW = {"clip_low": 1e-9, "clip_high": 1e-9}  # so narrow that half of the 16-bit noise is clipped


@pytest.mark.parametrize(
    ("sections", "clips"),
    [
        ({}, False),
        ({"replay": ReplayConfig(mode="on")}, True),
        ({"workers": WorkersConfig(generators=1, apart="on")}, True),
    ],
)
def test_text_sampled_by_the_current_weights_has_ratio_1(
    sections: dict[str, Any], clips: bool, folders: dict[str, Path]
) -> None:
    """The gradient is the same as without old log-probabilities; the drift still shows the noise."""
    config = config_of(
        folders["llama"], dtype="bfloat16", train={"learning_rate": RATE, "importance_cap": 0.0, **NARROW}
    )

    def opened() -> LanguagePolicy:
        return LanguagePolicy.open(config.model_copy(update=sections), 0)

    policy, bare = opened(), opened()
    batch = batch_of(policy)
    first = policy.update(batch)
    assert (first.clip_fraction > 0.1) is clips and first.drift > 0
    plain = bare.stepping(
        lambda learner, rows: learner.step([replace(row, old=None) for row in rows])
    ).update(batch)
    assert (first.loss == plain.loss and first.grad_norm == plain.grad_norm) is not clips
    stale = policy.update(batch)
    assert stale.clip_fraction > 0.1, "the weights have changed, but the ratio is still 1"
    fresh = batch_of(policy)
    policy.load_weights(bytes(dict(bare.files())["weights.safetensors"]))
    assert policy.update(fresh).clip_fraction > 0.1, (
        "other weights with the same number of updates counted as the same"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_drift_is_measured_from_the_policy_that_sampled(temperature: float, folders: dict[str, Path]) -> None:
    """Log-probabilities recorded at decoding equal the values in the first update, at any temperature."""
    narrow = {"clip_low": 1e-4, "clip_high": 1e-4}
    policy = open_policy(
        folders["qwen2"], temperature=temperature, train={"learning_rate": RATE, "kl_every": 0, **narrow}
    )
    batch = batch_of(policy)
    foreign = external("other?", [("yes", True), ("no", True)], (1.0, 0.0))
    first = policy.update([*batch, foreign])
    assert (first.drift, first.clip_fraction) == (pytest.approx(0.0, abs=1e-6), 0)
    expected = float(k3(flat(policy.logprobs(batch)), flat(s.tokens for s in batch)).mean())
    assert expected > 1e-3
    assert policy.update([*batch, foreign]).drift == pytest.approx(expected, rel=1e-3), (
        "external text counted in the drift"
    )
    assert policy.update([foreign]).drift == 0.0


def test_k3_is_unbiased_and_never_negative() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    assert (k3(p, q) >= 0).all()
    assert float((q.exp() * k3(p, q)).sum()) == pytest.approx(float((q.exp() * (q - p)).sum()), rel=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "lfm2"])
def test_log_probabilities_of_first_use_equal_a_plain_forward_pass(
    family: str, folders: dict[str, Path]
) -> None:
    policy = open_policy(folders[family], train={"micro_batch_tokens": 30})
    texts = [
        ("", True),
        ("", False),
        ("x", True),
        ("far longer than twelve tokens", True),
        ("far longer than twelve tokens", True),
    ]
    two = [("yes", False), ("<answer>no</answer>", True)]
    empty = external("?", [("", False)] * 2, (0.0, 1.0))
    assert policy.logprobs([]) == [] and policy.logprobs([empty])[0].ids == ((), ())
    batch = [external("what?", texts, (0.0,) * 5), external("and a longer one?", two, (1.0, 1.0))]
    found = policy.logprobs(batch)
    assert found[0].ids[1] == () and found[0].logprobs[1] == ()
    assert [len(ids) for ids in found[0].ids] == [1, 0, 2, 12, 12], (
        "not truncated at the place at which sampling would end"
    )
    assert [[len(p) for p in t.logprobs] for t in found] == [[len(ids) for ids in t.ids] for t in found]
    plain = by_transformers(network_of(folders[family]), chat_of(folders[family]), batch)
    torch.testing.assert_close(flat(found), plain, atol=1e-5, rtol=1e-4)


def test_remembered_log_probabilities_are_on_policy_at_first_use(folders: dict[str, Path]) -> None:
    """An update on remembered text equals the update on the same text without memory."""
    text = external("what?", [("yes", True), ("far longer than twelve tokens", True)], (1.0, 0.0))
    one, other = (open_policy(folders["qwen2"], train={"learning_rate": RATE}) for _ in range(2))
    (tokens,) = one.logprobs([text])
    remembered = Scored(text.rollout, text.question, text.rewards, text.round, tokens)
    a, b = one.update([remembered]), other.update([text])
    assert (a.loss, a.grad_norm, a.tokens) == pytest.approx((b.loss, b.grad_norm, b.tokens), rel=1e-4)
    assert a.clip_fraction == 0.0 and a.drift == pytest.approx(0.0, abs=1e-6)
    assert one.update([remembered]).drift > 0


def test_the_learning_rate_depends_on_the_number_of_the_step(folders: dict[str, Path]) -> None:
    """Adam's first step moves every weight with a gradient by the learning rate."""
    policy = open_policy(folders["qwen2"], train={"learning_rate": RATE})
    before = {name: p.detach().clone() for name, p in policy.trained.items()}
    report = policy.update(batch_of(policy))
    assert report.learning_rate == RATE
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in policy.trained.items())
    assert moved == pytest.approx(RATE, rel=0.01)


class Elsewhere(torch.nn.Parameter):
    """A weight that reports an accelerator as its device."""

    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("room", [True, False])
def test_a_memory_error_leaves_no_weight_swapped(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {
        "wide": Elsewhere(torch.ones(3, 4)),
        "16 bits": Elsewhere(torch.ones(5, dtype=torch.bfloat16)),
    }
    reference = ReferencePolicy(torch.nn.Module(), weights)
    for weight in weights.values():
        weight.data.fill_(2)
    calls: list[int] = []

    def short(make: Callable[..., Any], allowed: int) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if not room and len(calls) > allowed:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return make(*args, **options)

        return made

    monkeypatch.setattr(torch.Tensor, "to", short(torch.Tensor.to, 1))
    monkeypatch.setattr(torch, "empty", short(torch.empty, 0))
    with nullcontext() if room else pytest.raises(RuntimeError), reference.in_place():
        assert all(bool((weight.data == 1).all()) for weight in weights.values())
    monkeypatch.undo()
    assert all(bool((weight.data == 2).all()) for weight in weights.values())
