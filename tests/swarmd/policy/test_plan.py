"""The memory plan is compared with the real memory of models and with machines of known size."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)

from swarmd.config.config import GenerateConfig, ModelConfig, NodeConfig, RoundConfig, TrainConfig
from swarmd.errors import NoModel
from swarmd.policy.attention import adopt
from swarmd.policy.inference import packed_weights
from swarmd.policy.inference.decode import Sampling, groups
from swarmd.policy.models import device
from swarmd.policy.models.architecture import shape_of, skeleton_of
from swarmd.policy.models.doctor import document, examine, explain
from swarmd.policy.models.fit import (
    Fit,
    estimated_tokens,
    fit,
    longest_questions,
    plan_on,
    spelled_out,
    work_of,
)
from swarmd.policy.models.load import with_adapter
from swarmd.policy.models.memory_plan import MAX_TOKENS, Plan, Workload, make_plan
from swarmd.policy.training.chunked_head import Decoder, recomputing
from swarmd.policy.training.packing import Row, pack
from swarmd.tasks.curriculum import LADDER_9
from testbed.model_configurations import CONFIGURATIONS
from tests import ROOT
from tests.swarmd.policy.conftest import BITSANDBYTES, FAMILIES, QWEN_05B, VOCABULARY, make_model

GB = 10**9
LENGTH = 32  # tokens per sequence, few enough that eager attention's quadratic part is small


SMOL = shape_of(
    skeleton_of(
        AutoConfig.for_model(**CONFIGURATIONS["smollm2-135m"]),
        "135m",
    )
)
# A model with half a billion weights.
HALF = shape_of(skeleton_of(AutoConfig.for_model(**QWEN_05B), "0.5b"))


def network_of(family: str, dtype: torch.dtype, layers: int, rank: int | None) -> Any:
    config = FAMILIES[family]()
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.head_dim = (
        layers,
        128,
        320,
        32,
    )
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * layers
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return with_adapter(network, rank, 0) if rank else network


def kept_for_backward(network: Any, forward: Callable[[], object]) -> int:
    """Return the number of bytes that autograd keeps from a forward pass, without the weights.

    Every storage is counted once.
    """
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    storages: dict[int, int] = {}
    held = []  # keeps storages alive; a freed one's address may be reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [None, 4])
def test_the_planned_memory_of_weights_gradients_and_moments_is_exact(family: str, rank: int | None) -> None:
    network = network_of(family, torch.float32, 2, rank)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    network(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    held = sum(p.numel() * p.element_size() for p in network.parameters()) + sum(
        p.grad.nbytes for p in trained
    )
    held += sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    # The adapter is multiplied in the dtype of its base, which takes a copy.
    held += sum(p.nbytes for p in trained) if rank else 0
    plan = make_plan(shape_of(network_of(family, torch.float32, 2, None)), "float32", rank, GB, Workload())
    assert plan.trained == sum(p.numel() for p in trained)
    assert sum(item.bytes for item in plan.items if item.phase == "always") == held


def plain(network: Any, length: int = LENGTH) -> tuple[int, int]:
    """Return the tokens of one sequence and the bytes kept by transformers' model without its head."""
    ids = torch.arange(length)[None] % VOCABULARY
    return length, kept_for_backward(network, lambda: network.model(input_ids=ids, use_cache=False))


def packed(network: Any, checkpointing: bool) -> tuple[int, int]:
    """Return both for two questions with four completions each, packed as in an update."""
    rows = [
        Row(tuple(range(6 + q, 38 + q)), tuple(range(6, 54)), 1.0, None, 1.0)
        for q in range(2)
        for _ in range(4)
    ]
    batch = pack(rows, torch.device("cpu"))
    assert adopt(network)
    decoder = Decoder(network, torch.device("cpu"))
    with recomputing(network) if checkpointing else nullcontext():
        return len(batch.ids), kept_for_backward(network, lambda: decoder.hidden(batch))


def planned(network: Any, dtype: torch.dtype, rank: int | None, tokens: int, room: int) -> int:
    plan = make_plan(
        shape_of(network), str(dtype).removeprefix("torch."), rank, room, Workload(micro_batch_tokens=tokens)
    )
    return next(item.bytes for item in plan.items if item.name == "activations")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "way, low, high", [(plain, 0.9, 1.3), (partial(packed, checkpointing=False), 0.75, 1.2)]
)
def test_planned_activations_are_close_to_the_measured_ones(
    family: str,
    rank: int | None,
    dtype: torch.dtype,
    way: Callable[[Any], tuple[int, int]],
    low: float,
    high: float,
) -> None:
    """Measured is autograd's memory for three layers minus its memory for one layer.

    The planned value is never far below or above the measured one.
    """
    (tokens, one), (_, three) = (way(network_of(family, dtype, layers, rank)) for layers in (1, 3))
    less, more = (
        planned(network_of(family, dtype, layers, None), dtype, rank, tokens, GB) for layers in (1, 3)
    )
    assert low < (more - less) / (three - one) < high


def test_attention_masks_are_kept_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are aligned, because CUDA's attention would keep a copy of an unaligned mask."""
    masks: list[torch.Tensor] = []
    attend = F.scaled_dot_product_attention

    def noting(*args: Any, attn_mask: torch.Tensor, **more: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    places = []
    for layers in (2, 6):
        masks.clear()
        packed(network_of("qwen2", torch.float32, layers, None), checkpointing=False)
        places.append(len({mask.data_ptr() for mask in masks}))
    assert places[0] == places[1] < len(masks)
    assert all(stride % 8 == 0 for mask in masks for stride in mask.stride()[:-1])


WIDTHS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HYBRIDS: dict[str, Callable[[int], PreTrainedConfig]] = {
    "qwen3_5": lambda blocks: Qwen3_5TextConfig(
        **WIDTHS,
        head_dim=64,
        num_hidden_layers=4 * blocks,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * blocks,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "granite4": lambda blocks: GraniteMoeHybridConfig(
        **WIDTHS,
        num_hidden_layers=4 * blocks,
        layer_types=(["mamba"] * 3 + ["attention"]) * blocks,
        shared_intermediate_size=896,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_chunk_size=128,
    ),
}


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_activations_of_recurrent_layers_are_close_to_the_measured_ones(
    family: str, dtype: torch.dtype
) -> None:
    found = [AutoModelForCausalLM.from_config(HYBRIDS[family](blocks), dtype=dtype) for blocks in (1, 2)]
    (tokens, one), (_, two) = (plain(network, 256) for network in found)  # 256 tokens: two Mamba chunks
    less, more = (planned(network, dtype, None, tokens, GB) for network in found)
    assert 0.95 < (more - less) / (two - one) < 1.6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_keeps_exactly_one_input_per_layer(family: str, dtype: torch.dtype) -> None:
    (tokens, one), (_, three) = (
        packed(network_of(family, dtype, layers, None), checkpointing=True) for layers in (1, 3)
    )
    less, more = (
        planned(network_of(family, dtype, layers, None), dtype, None, tokens, 1000) for layers in (1, 3)
    )
    assert three - one == more - less == 2 * tokens * 128 * dtype.itemsize


def test_checkpointing_is_used_if_memory_is_short() -> None:
    work = Workload()
    with_room, without = (
        make_plan(HALF, "float32", None, 80 * GB, work),
        make_plan(HALF, "float32", None, 12 * GB, work),
    )
    assert (with_room.checkpointing, without.checkpointing) == (False, True)
    of_token = [p.items[-2].bytes / p.micro_batch_tokens for p in (with_room, without)]
    assert of_token[0] > 8 * of_token[1]
    deeper = make_plan(replace(HALF, layers=25), "float32", None, 12 * GB, work)
    assert deeper.items[-2].bytes / deeper.micro_batch_tokens - of_token[1] == 4 * HALF.width


@pytest.mark.parametrize("tokens", [0, 1000])
def test_a_four_bit_base_is_always_recomputed_in_the_backward_pass(tokens: int) -> None:
    """Otherwise autograd would keep every layer's unpacked weights for the backward pass."""
    plan = make_plan(HALF, "nf4", 16, 80 * GB, Workload(micro_batch_tokens=tokens))
    assert plan.checkpointing and plan.micro_batch_tokens == (tokens or MAX_TOKENS)
    held = {item.name: item.bytes for item in plan.items}
    assert held["embeddings, head and norms"] == 2 * (HALF.parameters - HALF.adapted_weights)
    assert held["one layer's weights, unpacked"] == 2 * HALF.adapted_weights // 24


def test_the_plan_for_half_a_billion_weights_on_eight_gigabytes() -> None:
    assert (HALF.parameters, HALF.adapted_inputs + HALF.adapted_outputs) == (494_032_768, 549_888)
    plan = make_plan(HALF, "bfloat16", 16, 8 * GB, Workload())
    assert (plan.fits, plan.trained, plan.checkpointing) == (True, 8_798_208, False)
    assert [i.bytes for i in plan.items[:4]] == [988_065_536, 70_385_664, 17_596_416, 70_385_664]
    assert 2 * GB < plan.peak <= plan.usable and 2048 <= plan.micro_batch_tokens < plan.context <= 32_768
    less = make_plan(HALF, "bfloat16", 16, 4 * GB, Workload())
    assert less.fits and less.checkpointing and less.micro_batch_tokens >= 4096
    assert not make_plan(HALF, "float32", None, 8 * GB, Workload()).fits
    roomy = make_plan(HALF, "bfloat16", 16, 80 * GB, Workload())
    assert (roomy.checkpointing, roomy.micro_batch_tokens, roomy.context) == (False, MAX_TOKENS, 32_768)
    assert roomy.cache_tokens == 2**31 // (24 * 2 * 128 * 2) > less.cache_tokens >= 8 * Workload().row


TRAINED = 494_032_768  # all weights of HALF
WHOLE = {  # bytes per weight that are always held: weight, gradient, float32 copy, Adam's two moments
    ("float32", "adamw"): 4 + 4 + 0 + 8,
    ("bfloat16", "adamw"): 2 + 2 + 4 + 8,
    ("float32", "adamw8bit"): 4 + 4 + 0 + 2,
    ("bfloat16", "adamw8bit"): 2 + 2 + 4 + 2,
}


@pytest.mark.parametrize("way", WHOLE)
def test_training_all_weights_takes_the_memory_of_the_optimizer(way: tuple[str, str]) -> None:
    dtype, kind = way
    plan = make_plan(HALF, dtype, None, 80 * GB, Workload(optimizer=kind))
    scales = -(-TRAINED // 256) * 8 if kind == "adamw8bit" else 0
    assert sum(item.bytes for item in plan.items if item.phase == "always") == TRAINED * WHOLE[way] + scales
    assert (plan.optimizer, plan.master) == (kind, dtype == "bfloat16")


@pytest.mark.parametrize(
    ("gigabytes", "kind", "fits"), [(16, "adamw", True), (8, "adamw", False), (8, "adamw8bit", True)]
)
def test_training_all_bfloat16_weights_has_a_float32_copy(gigabytes: int, kind: str, fits: bool) -> None:
    plan = make_plan(HALF, "bfloat16", None, gigabytes * GB, Workload(optimizer=kind))
    assert (plan.fits, plan.master) == (fits, True)
    assert not make_plan(HALF, "bfloat16", 16, gigabytes * GB, Workload(optimizer=kind)).master, (
        "an adapter, which is float32 already, has a float32 copy"
    )


def test_many_questions_are_answered_in_turn_if_memory_is_short() -> None:
    """The engine holds the logits of the current group of answers only (`decode.groups`)."""

    def plan(questions: int, free: int) -> Plan:
        return make_plan(HALF, "bfloat16", 16, free, Workload(questions=questions))

    assert plan(1024, 16 * GB).least == plan(4, 16 * GB).least < 3 * GB
    assert plan(1024, 3 * GB).fits and plan(1024, 3 * GB).peak <= plan(1024, 3 * GB).usable
    work = Workload(questions=1024)
    for free in (3 * GB, 16 * GB):
        found = plan(1024, free)
        one = [0] * work.prompt_tokens
        first = next(
            groups([one] * 1024, 8, Sampling(256, 10**6, frozenset(), 1.0), found.cache_tokens, True)
        )
        (logits,) = [item for item in found.items if (item.phase, item.name) == ("answering", "logits")]
        assert logits.formula.startswith(f"{8 * len(first):,} rows")


def test_the_plan_has_a_copy_of_the_initial_weights_unless_an_adapter_is_trained() -> None:
    wanted = Workload(start_copy=True)

    def kept(plan: Plan) -> list[int]:
        return [item.bytes for item in plan.items if "start" in item.name]

    assert kept(make_plan(HALF, "float32", None, 16 * GB, wanted)) == [4 * TRAINED]
    assert kept(make_plan(HALF, "bfloat16", 16, 80 * GB, wanted)) == []
    config, places = ModelConfig(lora="off", dtype="float32"), map(torch.device, ("cpu", "cuda"))
    on = [kept(plan_on(config, HALF, place, 16 * GB, wanted)[1]) for place in places]
    assert on == [[4 * TRAINED], []], "on CUDA the copy is in main memory, and the plan must not count it"


def test_an_initial_copy_that_does_not_fit_is_rejected_with_a_remedy() -> None:
    config, work, cpu = (
        ModelConfig(lora="off", dtype="float32"),
        Workload(start_copy=True),
        torch.device("cpu"),
    )
    dtype, plan = plan_on(config, HALF, cpu, 10 * GB, work)
    found = Fit(source="half", shape=HALF, device=cpu, dtype=dtype, work=work, plan=plan)
    assert found.refusal is not None and "would fit: this model with train.kl_every = 0." in found.refusal


@pytest.mark.parametrize(
    ("gigabytes", "changes", "said"),
    [
        (8, {}, ["LoRA of rank 16", "against the model without its adapter"]),
        (4, {}, ["LoRA of rank 16", "gradient checkpointing  on"]),
        (
            20,
            {"lora": "off"},
            ["adamw, on a float32 copy of the weights", "against a copy of the weights as they were"],
        ),
        pytest.param(
            8,
            {"lora": "off", "bits": 8},
            ["adamw8bit, on a float32 copy of the weights", "not measured", "their scales"],
            marks=BITSANDBYTES,
        ),
    ],
)
def test_the_doctor_shows_the_plan_for_half_a_billion_weights(
    gigabytes: int, changes: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    train = TrainConfig(optimizer="adamw8bit", kl_every=0) if changes.pop("bits", None) else TrainConfig()
    config = NodeConfig(
        model=ModelConfig(name=str(write_config(tmp_path)), device="cpu", dtype="bfloat16", **changes),
        train=train,
    )
    found = examine(config, lambda _: gigabytes * GB)
    text = "\n".join(explain(found, 1.0))
    assert found.plan.fits and "494,032,768 parameters" in text
    for words in (*said, "micro-batch", "always", "training", "answering"):
        assert words in text, text
    said_to_programs = json.loads(json.dumps(document(found, 1.0)))
    assert [said_to_programs[key] for key in ("schema", "fits", "plan")] == [
        1,
        True,
        json.loads(json.dumps(asdict(found.plan))),
    ]


@pytest.mark.parametrize("there", [True, False])
def test_packed_weights_are_planned_and_the_doctor_says_whether_answers_use_them(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "packs", lambda: there)
    config = NodeConfig(model=ModelConfig(name=str(write_config(tmp_path)), device="cpu", dtype="bfloat16"))
    found = examine(config, lambda _: 16 * GB)
    text = "\n".join(explain(found, 1.0))
    assert ("products                weights packed for oneDNN" in text) is there
    assert ("products                plain: " in text) is not there
    held = {item.name: item.bytes for item in found.plan.items if item.phase == "answering"}
    assert held.get("weights packed for oneDNN", 0) == there * 2 * (HALF.parameters + found.plan.trained)
    assert found.plan.packed is there
    assert f"× {2 * 24 * 128 * 4:,} B" in text, "the cache of keys and values is not float32"
    for dtype, free in (("float32", 16), ("bfloat16", 2.4)):
        plan = make_plan(HALF, dtype, 16, int(free * GB), replace(found.work, packed=there))
        assert plan.fits and not plan.packed, (
            "weights of another dtype, or without room for a packed copy, are packed"
        )
        assert "weights packed for oneDNN" not in {item.name for item in plan.items}


def test_a_round_of_eight_questions_is_answered_as_one_group() -> None:
    """The machine has 8 GB; the models have 135 and 494 million weights; the answers have full length."""
    work = Workload(questions=8, prompt_tokens=512, packed=True, on_cpu=True)
    for shape in (SMOL, HALF):
        plan = make_plan(shape, "bfloat16", 16, 8 * GB, work)
        asked = Sampling(work.new_tokens, 2048, frozenset(), 1.0)
        prompts = [[1] * work.prompt_tokens] * work.questions
        assert len(list(groups(prompts, work.completions, asked, plan.cache_tokens, shared=True))) == 1


def test_the_doctor_says_why_a_large_model_uses_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = NodeConfig(model=ModelConfig(name=str(write_config(tmp_path)), device="cpu"))
    for quick, said in (
        (False, "float32: this CPU is slow at bfloat16"),
        (True, "bfloat16"),
    ):
        monkeypatch.setattr(device, "_cpu_gains_from_bf16", lambda quick=quick: quick)
        rows = [
            line.split(maxsplit=1)
            for line in explain(examine(config, lambda _: 40 * GB), 1.0)
            if line.strip().startswith("dtype")
        ]
        assert rows == [["dtype", said]]


def test_all_weights_of_a_large_model_are_trained_in_bfloat16_if_it_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_cpu_gains_from_bf16", lambda: True)
    large = fit(
        ModelConfig(name=str(write_config(tmp_path)), device="cpu", lora="off"), Workload(), lambda _: 40 * GB
    )
    assert (large.plan.dtype, large.plan.master) == ("bfloat16", True)
    small = fit(ModelConfig(name="tiny", device="cpu"), Workload(), lambda _: 40 * GB)
    assert (small.plan.dtype, small.plan.master) == ("float32", False)


@settings(derandomize=True, max_examples=100)
@given(
    gigabytes=st.floats(1, 50),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    rank=st.sampled_from([16, None]),
    work=st.builds(Workload, st.integers(1, 16), st.integers(2, 32), st.sampled_from([16, 64, 256, 1024])),
)
def test_a_fitting_plan_stays_within_usable_memory(
    gigabytes: float, dtype: str, rank: int | None, work: Workload
) -> None:
    plan = make_plan(HALF, dtype, rank, int(gigabytes * GB), work)
    if plan.fits:
        assert plan.least <= plan.peak <= plan.usable < plan.free
        assert min(plan.micro_batch_tokens, plan.context) >= work.row
        more = make_plan(HALF, dtype, rank, int(2 * gigabytes * GB), work)
        assert more.fits and more.checkpointing <= plan.checkpointing
        assert more.micro_batch_tokens >= plan.micro_batch_tokens or more.checkpointing < plan.checkpointing
    assert all(item.bytes > 0 for item in plan.items)
    by_phase = {
        phase: sum(i.bytes for i in plan.items if i.phase == phase)
        for phase in ("always", "answering", "training")
    }
    assert plan.peak == by_phase["always"] + max(by_phase["answering"], by_phase["training"])


@pytest.mark.parametrize("work", [Workload(), Workload(completions=64, new_tokens=1024)])
def test_a_plans_minimum_memory_is_its_peak_if_almost_no_memory_is_free(work: Workload) -> None:
    """In the first workload, training needs more memory; in the second, answering does."""
    plan = make_plan(HALF, "bfloat16", 16, 1000, work)
    assert plan.least == plan.peak and not plan.fits
    sums = [sum(i.bytes for i in plan.items if i.phase == phase) for phase in ("training", "answering")]
    assert (sums[0] > sums[1]) is (work == Workload())


def test_every_formula_gives_its_number_of_bytes() -> None:
    for plan in (
        make_plan(HALF, "bfloat16", 16, 8 * GB, Workload()),
        make_plan(HALF, "float32", None, 32 * GB, Workload()),
    ):
        for item in plan.items:
            numbers = [int("".join(c for c in part if c.isdigit())) for part in item.formula.split("×")]
            assert math.prod(numbers) == item.bytes, item


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN_05B | changes))
    return folder


def test_a_configured_token_budget_is_used(tmp_path: Path) -> None:
    assert (
        make_plan(HALF, "bfloat16", 16, 80 * GB, Workload(micro_batch_tokens=1000)).micro_batch_tokens == 1000
    )
    too_many = make_plan(HALF, "bfloat16", 16, 4 * GB, Workload(micro_batch_tokens=100_000))
    assert too_many.fits and too_many.checkpointing and too_many.peak > too_many.usable
    config = NodeConfig(
        model=ModelConfig(name=str(write_config(tmp_path)), device="cpu", dtype="bfloat16"),
        train=TrainConfig(micro_batch_tokens=100_000),
    )
    assert any("too many" in line for line in explain(examine(config, lambda _: 4 * GB), 1.0))


WHOLE_FLOAT32 = {"lora": "off", "dtype": "float32"}


@pytest.mark.parametrize(
    ("gigabytes", "settings", "remedy"),
    [
        (6, WHOLE_FLOAT32, "this model with model.lora = 'on' (rank 16)."),
        (4, WHOLE_FLOAT32, "model.lora = 'on' (rank 16) and generate.max_new_tokens = 128."),
        (2.6, WHOLE_FLOAT32, "(rank 16) and generate.max_new_tokens = 128 and model.dtype = 'bfloat16'."),
        (8, {"lora": "off"}, "this model with train.optimizer = 'adamw8bit'."),
        (2.15, {}, "this model with train.optimizer = 'adamw8bit' and generate.max_new_tokens = 128."),
        (1.95, {}, "this model with generate.max_new_tokens = 128 and model.dtype = 'nf4'."),
        (2.3, {"lora_rank": 64}, "this model with generate.max_new_tokens = 128 and model.dtype = 'nf4'."),
        (1, {}, "fit: --model tiny."),
        (1, {"lora": "off"}, "fit: --model tiny."),
        (1e-6, {}, "no known model would fit."),
    ],
)
def test_an_error_about_a_model_that_does_not_fit_names_the_best_alternative(
    tmp_path: Path, gigabytes: float, settings: dict[str, Any], remedy: str
) -> None:
    config = ModelConfig(name=str(write_config(tmp_path)), device="cpu", **({"dtype": "bfloat16"} | settings))
    found = fit(config, Workload(new_tokens=4096), lambda _: int(gigabytes * GB))
    with pytest.raises(NoModel) as caught:
        found.require()
    assert str(caught.value).endswith(remedy)
    assert f"cpu has {f'{gigabytes:.2f} GB' if gigabytes >= 1 else '0.0 MB'} free" in str(caught.value)
    method = "all weights" if "lora" in settings else f"a LoRA adapter of rank {config.lora_rank}"
    assert f"training {method} in" in str(caught.value) and "Close other programs" in str(caught.value)
    there = replace(found, device=torch.device("mps")).refusal or ""
    assert "would fit" in there and "nf4" not in there and "adamw8bit" not in there, (
        "the message names settings that do not run on MPS"
    )


def test_an_error_about_a_large_model_names_the_largest_listed_model_that_fits(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    config = ModelConfig(name=str(tmp_path), device="cpu", dtype="bfloat16")
    answers = {
        12: r"this model with model\.dtype = 'nf4'",
        6: r"fit: --model qwen3-1\.7b\.$",
        3: "--model qwen",
    }
    for free, answer in answers.items():
        with pytest.raises(NoModel, match=answer):
            fit(config, Workload(), lambda _, free=free: free * GB).require()
    whole = config.model_copy(update={"lora": "off"})
    with pytest.raises(NoModel, match=r"--model qwen3-1\.7b with model\.lora = 'on'\.$"):
        fit(whole, Workload(), lambda _: 6 * GB).require()


# Number of Qwen2.5 tokens in the longest of 400 questions (with the vocabulary in dashscope 2.0.2).
LONGEST_IN_QWEN = {
    "arc_1d": 523,
    "binary_matrix": 271,
    "propositional_logic": 165,
    "decimal_arithmetic": 67,
    "base_conversion": 56,
}


def test_planned_prompts_are_as_long_as_the_curriculums_questions(tmp_path: Path) -> None:
    """Their lengths are estimated, because there is no tokenizer before the download."""
    longest = dict(zip(LADDER_9.specialties, longest_questions("auto"), strict=True))
    assert longest_questions("ladder-9") == longest_questions("auto") and longest_questions("own.jsonl") == ()
    for specialty, tokens in LONGEST_IN_QWEN.items():
        # The estimate is of the longest of 32 questions instead of 400.
        assert 0.85 * tokens <= estimated_tokens(longest[f"{specialty}.4"]) <= 1.06 * tokens, specialty
    make_model(tmp_path, max_position_embeddings=4096)
    plain = {"system_prompt": "Be short.", "examples": "off", "opening": ""}
    config = NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu", **plain))
    work = work_of(config)
    assert 523 + 32 <= work.prompt_tokens <= 523 + 32 + 2 * 64 and work.mean_prompt_tokens == 32 + 3 + sum(
        map(estimated_tokens, longest.values())
    ) // len(longest)
    found = fit(config.model, work, lambda _: 40 * GB)
    assert found.plan.least > fit(config.model, Workload(), lambda _: 40 * GB).plan.least


def test_planned_prompts_with_the_default_system_prompt_have_the_counted_length() -> None:
    system, template = 42, 12  # tokens of the default system prompt and the template in Qwen2.5
    work = work_of(NodeConfig(model=ModelConfig(name="qwen2.5-0.5b", examples="off", opening="")))
    assert 0 <= work.prompt_tokens - (system + template + LONGEST_IN_QWEN["arc_1d"]) < 64


def test_examples_and_an_opening_make_planned_prompts_longer() -> None:
    def tokens(**model: object) -> int:
        config = NodeConfig.model_validate({"model": {"name": "qwen2.5-0.5b", **model}})
        return work_of(config).mean_prompt_tokens

    plain, longest = tokens(examples="off", opening=""), tokens(examples="on", opening="<answer>")
    # In Qwen2.5's tokenizer, the examples, their turns and the opening are 67 tokens.
    assert 0.8 * 67 <= longest - plain <= 1.2 * 67
    assert tokens() == longest, "the plan ignores that a trial may choose examples and opening"


def test_examples_are_rejected_for_own_tasks_without_any(tmp_path: Path) -> None:
    own = tmp_path / "whole.py"
    # Scores whole texts, so the built-in examples, which show <answer>…</answer>, do not fit.
    sums = (ROOT / "docs" / "examples" / "sums.py").read_text()
    own.write_text(f"{sums}\nlimits = {{'whole': True}}\n")
    given = {"model": {"examples": "on"}, "swarm": {"curriculum": str(own)}}
    with pytest.raises(NoModel, match=r"own tasks \S*whole\.py bring no examples\. Set it to a list of"):
        spelled_out(NodeConfig.model_validate(given))


def test_the_workload_follows_the_configuration() -> None:
    assert work_of(NodeConfig()) == Workload(4, 8, 16, start_copy=True)
    others = NodeConfig(round=RoundConfig(local=0), train=TrainConfig(kl_every=0))
    assert work_of(others) == Workload(1, 8, 16, batch=4)
    config = NodeConfig(model=ModelConfig(name="qwen2.5-0.5b"), generate=GenerateConfig(max_new_tokens=99))
    assert work_of(config).new_tokens == 99
    assert work_of(NodeConfig(model=ModelConfig(name="a/b"))).new_tokens == 256


@pytest.mark.parametrize(
    ("family", "asked", "dtype"),
    [
        ("qwen2", "auto", torch.float16),
        ("gemma3", "auto", torch.float32),
        ("gemma3", "nf4", torch.bfloat16),  # bfloat16 is emulated, because the plan does not allow float32
    ],
)
def test_a_gpu_without_bfloat16_uses_float16_only_if_the_models_activations_allow_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, asked: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("swarmd.policy.models.fit.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("swarmd.policy.models.fit.require_nf4", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    make_model(tmp_path, family)
    found = fit(ModelConfig(name=str(tmp_path), lora="on", dtype=asked), Workload(), lambda _: GB)
    assert found.dtype == dtype


def test_a_short_context_limits_the_planned_memory(tmp_path: Path) -> None:
    make_model(tmp_path)  # with a context of 128 tokens
    found = fit(ModelConfig(name=str(tmp_path), device="cpu"), Workload(), lambda _: GB)
    assert found.plan.context == 128
    assert (
        found.plan.least
        < make_plan(replace(found.shape, context=None), "float32", None, GB, Workload()).least
    )
    assert Workload().within(128).row == 128
    assert Workload().within(300) == Workload(new_tokens=256, prompt_tokens=44)
