"""Products with packed weights equal plain products and always use the latest weights.

If packing is unavailable, plain products replace them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmd.policy.attention import adopt
from swarmd.policy.inference import fused_decoder, packed_weights
from swarmd.policy.inference.decode import PACKED_FROM_STEPS
from swarmd.policy.inference.fused_decoder import Blocks, blocks_of
from swarmd.policy.inference.packed_weights import PackedLinear, packable, packs
from swarmd.policy.inference.prefix_cache import SharedPrefix
from swarmd.policy.models.device import compile_nothing
from tests.swarmd.policy.conftest import answered, flat, make_model, open_policy

PROMPTS = [[20, 30, 40, 50] * 4, [60, 70], [80, 90, 100] * 9]
COPIES, STEPS = 3, 8
needs_packing = pytest.mark.skipif(not packs(), reason="this CPU or torch has no packed bfloat16 products")
ODD: dict[str, Any] = {"hidden_size": 36, "intermediate_size": 51}


@pytest.fixture(autouse=True)
def tried_again() -> Iterator[None]:
    packs.cache_clear()
    yield
    packs.cache_clear()


def logits_of(network: Any, blocks: Blocks | None) -> Tensor:
    """Return the logits of fixed tokens, step by step; some rows and a whole question end early."""
    with torch.inference_mode():
        rows = SharedPrefix(network, PROMPTS, COPIES, STEPS, torch.device("cpu"), blocks=blocks)
        found = [rows.first().float()]
        for step in range(STEPS - 1):
            if step == 3:
                rows.keep([0, 2, 3, 4, 5])
            tokens = (torch.arange(len(found[-1]) if step != 3 else 5) * 7 + step) % 250 + 6
            found.append(rows.next(tokens).float())
    return torch.cat(found)


@needs_packing
@pytest.mark.parametrize("rank", [0, 1, 5, 16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {**ODD, "head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ("qwen2", {}),  # with biases and a tied head
        ("qwen3", {**ODD, "num_hidden_layers": 1, "layer_types": ["full_attention"]}),  # with norms per head
        ("mistral", {"tie_word_embeddings": True}),  # with a window
    ],
)
def test_decoding_steps_with_packed_weights_equal_plain_products(
    family: str, changes: dict[str, Any], rank: int, tmp_path: Path
) -> None:
    way = {"lora": "on", "lora_rank": rank} if rank else {"lora": "off"}
    policy = open_policy(make_model(tmp_path, family, **changes), dtype="bfloat16", **way)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.network.named_parameters():
            if "lora_B" in name or "bias" in name:
                weight.normal_(std=0.1, generator=generator)
    assert adopt(policy.network)
    packed = blocks_of(policy.network, rows=9)
    assert packed is not None and isinstance(packed._head, PackedLinear)
    parts = [part for layer in packed._layers for part in (layer._project, layer._gated)]
    assert all(isinstance(part, PackedLinear) for part in parts)
    ours, plain = logits_of(policy.network, packed), logits_of(policy.network, blocks_of(policy.network))
    modules = logits_of(policy.network, None)
    noise = float((plain - modules).square().mean().sqrt())
    assert 0 < noise < 0.2 and float((ours - modules).square().mean().sqrt()) < 1.5 * noise


@needs_packing
@pytest.mark.parametrize("lora", ["on", "off"])
def test_packed_products_use_the_latest_weights(
    lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    pack = packed_weights._pack
    monkeypatch.setattr(packed_weights, "_pack", lambda *x: made.append(x) or pack(*x))
    make_model(tmp_path / "m", initializer_range=0.1)

    def opened(**changes: Any) -> Any:
        train = {"learning_rate": 0.02}
        return open_policy(
            tmp_path / "m", dtype="bfloat16", lora=lora, new_tokens=PACKED_FROM_STEPS, train=train, **changes
        )

    def apart(policy: Any) -> float:
        made.clear()
        batch = answered(policy, ["1+1?", "a longer question"])
        assert made
        return float((flat(s.tokens for s in batch) - flat(policy.logprobs(batch))).abs().mean())

    policy = opened()
    noise = apart(policy)
    assert 0 < noise < 0.05
    for _ in range(3):
        batch = answered(policy, ["1+1?", "a longer question"])
        policy.update(batch)
        assert apart(policy) < 0.05
    then = flat(policy.logprobs(batch))
    other = opened(seed=1)
    assert float((then - flat(other.logprobs(batch))).abs().mean()) > 0.2, (
        "the updates did not change the weights enough for this test"
    )
    apart(other)
    other.load_weights(bytes(dict(policy.files())["weights.safetensors"]))
    assert apart(other) < 0.05
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    third = opened(seed=2)
    apart(third)
    third.restore(tmp_path / "saved")
    assert apart(third) < 0.05


def test_plain_products_are_used_if_packing_is_absent_wrong_or_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not packs(False)
    layer = nn.Linear(4, 4).bfloat16()
    assert packable([layer]) == packs()
    assert not packable([nn.Linear(4, 4)]) and not packable([layer, nn.Linear(4, 4)])
    compile_nothing()
    assert not packable([layer])
    torch.backends.mkldnn.set_flags(_enabled=True)

    def absent(*_: object) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    policy = open_policy(make_model(tmp_path), dtype="bfloat16", new_tokens=PACKED_FROM_STEPS)
    for product in (absent, lambda x, weight, bias: torch.zeros(3, 21, dtype=x.dtype)):
        packs.cache_clear()
        monkeypatch.setattr(packed_weights, "_product", product)
        assert not packs()
        assert len(policy.generate(["1+1?"], 2)[0].tokens.ids) == 2


@needs_packing
def test_weights_are_not_packed_for_short_answers_or_if_they_change_between_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    blocks = Blocks.__init__

    def noted(self: Blocks, network: nn.Module, frozen: bool, rows: int = 0) -> None:
        asked.append(rows)
        blocks(self, network, frozen, rows)

    monkeypatch.setattr(fused_decoder.Blocks, "__init__", noted)
    make_model(tmp_path)
    for tokens, between in ((PACKED_FROM_STEPS, None), (PACKED_FROM_STEPS - 1, None), (20, lambda: 0)):
        open_policy(tmp_path, dtype="bfloat16", new_tokens=tokens, between=between).generate(["?", "!"], 3)
    assert asked == [6, 0, 0]
