"""Every supported architecture samples and learns correctly.

swarmd's batched sampling and learning equal transformers' computation of single sequences.
"""

import contextlib
import copy
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PeftModel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from swarmd.config.config import ModelConfig, NodeConfig, TrainConfig
from swarmd.errors import ConfigError, NoModel
from swarmd.policy.attention import COVERED, adopt, covers
from swarmd.policy.export import export
from swarmd.policy.inference.decode import Sampling, decode
from swarmd.policy.inference.padded import agrees_with_itself
from swarmd.policy.models.architecture import PADDED
from swarmd.policy.models.device import seeded
from swarmd.policy.models.doctor import examine
from swarmd.policy.training.learner import Learner, Learning
from swarmd.policy.training.packing import Row
from tests.swarmd.policy.conftest import (
    VOCABULARY,
    chat_of,
    edit_json,
    external,
    files_of,
    make_tokenizer,
    network_of,
    open_policy,
    plain_logprobs,
    plainly,
)

CPU = torch.device("cpu")

# Small sizes with the real structure: layers of each kind, windows and chunks shorter than the prompts,
# scales and caps other than 1.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEADS = SIZES | {"head_dim": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GRANITE = {
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0,
}
SHARED = GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
GEMMA = HEADS | WINDOWS | {"final_logit_softcapping": 5.0}
PER_LAYER = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
DELTA = HEADS | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CONVOLUTIONS = SIZES | {"layer_types": ["conv", "full_attention"] * 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 2.1, 2.2],
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Return RoPE settings for a context that was extended from 16 positions, fewer than the prompts have."""
    return {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        **more,
    }


SEEING = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**HEADS),
    # As in Llama 3.2 and SmolLM2.
    "llama, llama3": lambda: hf.LlamaConfig(
        **HEADS,
        tie_word_embeddings=True,
        rope_parameters=rope("llama3", low_freq_factor=1, high_freq_factor=4),
    ),
    "mistral": lambda: hf.MistralConfig(**HEADS, sliding_window=8),
    "ministral": lambda: hf.MinistralConfig(**HEADS, **WINDOWS),
    "ministral3": lambda: hf.Ministral3Config(**HEADS),
    "ministral3, yarn": lambda: hf.Ministral3Config(
        **HEADS,
        tie_word_embeddings=True,
        rope_parameters=rope("yarn", llama_4_scaling_beta=0.1, beta_fast=32.0, beta_slow=1.0),
    ),
    "mixtral": lambda: hf.MixtralConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 1, 0]),
    "apertus": lambda: hf.ApertusConfig(**SIZES),
    "arcee": lambda: hf.ArceeConfig(**HEADS),
    "nanochat": lambda: hf.NanoChatConfig(**SIZES, final_logit_softcapping=5.0),
    "helium": lambda: hf.HeliumConfig(**HEADS),
    "seed_oss": lambda: hf.SeedOssConfig(**HEADS),
    "starcoder2": lambda: hf.Starcoder2Config(**SIZES, sliding_window=8),
    "phi3": lambda: hf.Phi3Config(**SIZES, sliding_window=8),
    # As in Phi-4-mini.
    "phi3, longrope": lambda: hf.Phi3Config(
        **SIZES, original_max_position_embeddings=64, rope_parameters=dict(LONG)
    ),
    "glm4": lambda: hf.Glm4Config(**HEADS),
    "exaone4": lambda: hf.Exaone4Config(**HEADS, **WINDOWS),
    "ernie4_5": lambda: hf.Ernie4_5Config(**HEADS),
    "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, untied": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3": lambda: hf.Qwen3Config(**HEADS, tie_word_embeddings=True),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**HEADS, **EXPERTS),
    "gemma": lambda: hf.GemmaConfig(**HEADS),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA, query_pre_attn_scalar=8),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=8),
    "gemma3n_text": lambda: hf.Gemma3nTextConfig(
        **GEMMA | PER_LAYER, laurel_rank=4, activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0]
    ),
    "gemma4_text": lambda: hf.Gemma4TextConfig(
        **GEMMA | PER_LAYER, global_head_dim=16, num_global_key_value_heads=1, use_double_wide_mlp=True
    ),
    "olmo": lambda: hf.OlmoConfig(**SIZES, clip_qkv=2.0),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "olmo3": lambda: hf.Olmo3Config(**SIZES, **WINDOWS),
    "olmo3, yarn": lambda: hf.Olmo3Config(**SIZES, **WINDOWS, rope_parameters=rope("yarn")),
    "olmoe": lambda: hf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "granite": lambda: hf.GraniteConfig(**SIZES, **GRANITE),
    "granitemoe": lambda: hf.GraniteMoeConfig(**SIZES, **GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(**SIZES, **SHARED),
    "granitemoehybrid, attention": lambda: hf.GraniteMoeHybridConfig(
        **SIZES, **SHARED, **MAMBA, layer_types=["attention"] * 4, position_embedding_type="rope"
    ),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**HEADS),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**DELTA, tie_word_embeddings=True),
    "qwen3_5_text, untied": lambda: hf.Qwen3_5TextConfig(
        **DELTA | {"head_dim": 32, "linear_num_key_heads": 4}, tie_word_embeddings=False
    ),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(
        **DELTA, **EXPERTS, shared_expert_intermediate_size=16
    ),
    # Decoded in padded batches.
    "qwen3_next": lambda: hf.Qwen3NextConfig(**DELTA, **EXPERTS, shared_expert_intermediate_size=16),
    "lfm2": lambda: hf.Lfm2Config(**CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(**CONVOLUTIONS, **EXPERTS, num_dense_layers=1),
    "lfm3": lambda: hf.Lfm3Config(
        **HEADS
        | {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "sliding_window": 8}
    ),
    "falcon_h1": lambda: hf.FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=64),
    "bamba": lambda: hf.BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1, 3]),
    "jamba": lambda: hf.JambaConfig(
        **SIZES,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(**SIZES | DELTA),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **SIZES, **SHARED, **MAMBA, layer_types=["mamba", "attention"] * 2
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**HEADS, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**SIZES | LATENT),
    "cohere2": lambda: hf.Cohere2Config(**SIZES, **WINDOWS, logit_scale=0.5),
    "gemma4_unified_text": lambda: hf.Gemma4UnifiedTextConfig(**GEMMA, hidden_size_per_layer_input=0),
}


def make(config: PreTrainedConfig) -> Any:
    """Return a network of this configuration, in which no weight is initialised to 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    return network


def sequences(*lengths: int, seed: int = 1) -> list[tuple[int, ...]]:
    return [
        tuple(torch.randint(1, VOCABULARY, (length,), generator=seeded(CPU, seed + i)).tolist())
        for i, length in enumerate(lengths)
    ]


def rows_of(prompts: Sequence[tuple[int, ...]]) -> list[Row]:
    """Return three completions of each prompt, two of which begin with the same tokens."""
    return [
        Row(prompt, completion, advantage, None, 0.1)
        for i, prompt in enumerate(prompts)
        for a, b, c in [sequences(9, 4, 3, seed=9 + i)]
        for completion, advantage in ((a, 1.0), (b, -0.5), ((*a[:3], *c), 0.25))
    ]


def test_every_named_architecture_is_compared_here() -> None:
    assert {make().model_type for make in ARCHITECTURES.values()} == COVERED | PADDED


class Waits(TorchDispatchMode):
    """Counts, on any device, the operations that would wait for a GPU to finish its work.

    `tolist` and `numpy` appear as `resolve_neg`; on a CPU, only `Copies` sees `cpu`.
    """

    OPERATIONS = frozenset(
        (
            "_local_scalar_dense", "item", "is_nonzero", "nonzero", "where", "masked_select", "equal",
            "allclose", "unique_dim", "unique_consecutive", "_unique2", "bincount", "resolve_neg", "isin",
        )
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, chosen = func.overloadpacket.__name__, args[1] if len(args) > 1 else None
        masks = chosen if name in {"index", "index_put", "index_put_"} else ()
        self.count += bool(
            (name in self.OPERATIONS and (name != "where" or len(args) == 1))
            or any(x is not None and x.dtype == torch.bool for x in masks)
            or (name == "repeat_interleave" and isinstance(chosen, torch.Tensor))
            or (name == "to" and kwargs.get("device", args[0].device) != args[0].device)
        )
        return func(*args, **kwargs)


class Copies(TorchFunctionMode):
    """Counts calls of `cpu` on tensors that are already on the CPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.cpu
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batches_give_the_same_values_as_single_sequences(name: str) -> None:
    """Compares the sampler's log-probabilities and likeliest tokens, and the learner's values and gradients.

    Each batch has questions and answers of several lengths; all questions have a common prefix. The whole
    batch waits for the device once a token, to see which rows remain; removing rows, masks and windows need
    no further wait. transformers' masks wait once more to check for padding. Gemma 3n checks a distribution's
    parameters twice in each of its two sparse layers.
    """
    plain, passes = make(ARCHITECTURES[name]()), list[int]()
    network, prompts = copy.deepcopy(plain), [(7, 8, 9, *prompt) for prompt in sequences(20, 11, 2)]
    packed = plain.config.model_type in COVERED and name != "granitemoehybrid"
    assert (adopt(network), covers(plain.config)) == (packed, packed)

    sampling = Sampling(10, 64, frozenset(range(1, VOCABULARY, 8)), 1.0)
    with Waits() as waits, Copies() as copies:
        answers = decode(
            network,
            prompts,
            3,
            sampling,
            seeded(CPU, 0),
            9999,
            rest=lambda: passes.append(waits.count + copies.count),
        )
    assert len({len(s.ids) for samples in answers for s in samples}) > 1, (
        "all rows ended at the same step, so none was removed early"
    )
    each = list(map(operator.sub, passes[2:], passes[1:]))
    assert min(each) >= 1 and max(each) <= 1 + (4 if name == "gemma3n_text" else not packed)
    for prompt, samples in zip(prompts, answers, strict=True):
        for s in samples:
            torch.testing.assert_close(
                torch.tensor(s.logprobs), plain_logprobs(plain, prompt, s.ids), atol=1e-4, rtol=0
            )
    greedy = decode(network, prompts, 1, Sampling(10, 64, frozenset(), 0.0), seeded(CPU, 0), 9999)
    for prompt, (s,) in zip(prompts, greedy, strict=True):
        wanted = plain(input_ids=torch.tensor([[*prompt, *s.ids]]), use_cache=False).logits[0].argmax(-1)
        assert s.ids == tuple(wanted[len(prompt) - 1 : -1].tolist())

    rows = rows_of(prompts)
    learner = Learner(
        network, Learning(TrainConfig(max_grad_norm=1e9, kl_every=0), 1.0, 16_384, checkpointing=True), CPU
    )
    found = learner.logprobs(rows)
    for row in rows:
        torch.testing.assert_close(
            torch.tensor(found[row]), plain_logprobs(plain, row.prompt, row.completion), atol=1e-4, rtol=0
        )
        ids = torch.tensor([[*row.prompt, *row.completion]])
        logprobs = plain(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        (-row.weight * row.advantage * logprobs.gather(1, ids[0, len(row.prompt) :, None]).sum()).backward()
    got: dict[str, torch.Tensor] = {}
    for key, weight in learner.weights.items():
        weight.register_post_accumulate_grad_hook(lambda p, key=key: got.__setitem__(key, p.grad.clone()))
    learner.step(rows)
    for key, weight in plain.named_parameters():
        if weight.grad is not None and weight.grad.any():
            # Gemma 3n's sparse layers have kinks, where a rounded input has a different gradient.
            scale = float(weight.grad.abs().max()) * (1e-3 if name == "gemma3n_text" else 1e-4)
            torch.testing.assert_close(got[key], weight.grad, atol=scale + 1e-7, rtol=1e-2, msg=key)


def folder_of(network: Any, folder: Path, **changes: Any) -> Path:
    network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    edit_json(folder / "config.json", **changes)
    return folder


def test_an_untested_architecture_is_used_if_batches_agree_with_single_sequences(tmp_path: Path) -> None:
    """StableLM passes; Git does not, because its forward pass ignores left padding."""
    stable = make(hf.StableLmConfig(**SIZES))
    (generation,) = open_policy(folder_of(stable, tmp_path / "stable")).generate(["1+1?"], 4)
    prompt = chat_of(tmp_path / "stable").prompt("1+1?")
    torch.testing.assert_close(
        torch.tensor(generation.tokens.logprobs[0]),
        plain_logprobs(stable, prompt, generation.tokens.ids[0]),
        atol=1e-4,
        rtol=1e-3,
    )
    with pytest.raises(
        NoModel,
        match=r"\(git\) computes other results in batched decoding than in one pass.*Choose another",
    ):
        open_policy(folder_of(make(hf.GitConfig(**SIZES, vision_config=SEEING)), tmp_path / "git"))


def test_a_network_that_cannot_compute_batches_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    network = make(hf.StableLmConfig(**SIZES))
    assert agrees_with_itself(network)
    forward = hf.StableLmForCausalLM.forward

    def of_one(self, input_ids=None, past_key_values=None, **more: Any) -> Any:  # type: ignore[no-untyped-def]
        if len(input_ids) > 1:
            raise RuntimeError("one sequence alone")
        return forward(self, input_ids, past_key_values=past_key_values, **more)

    monkeypatch.setattr(hf.StableLmForCausalLM, "forward", of_one)
    assert not agrees_with_itself(network)


def test_the_cache_parameters_name_in_transformers_5_24_is_supported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = make(hf.StableLmConfig(**SIZES))
    forward = hf.StableLmForCausalLM.forward

    def newer(  # type: ignore[no-untyped-def]
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **more: Any
    ) -> Any:
        return forward(self, input_ids, attention_mask, position_ids, cache, **more)

    monkeypatch.setattr(hf.StableLmForCausalLM, "forward", newer)
    (generation,) = open_policy(folder_of(network, tmp_path)).generate(["1+1?"], 2)
    found = plain_logprobs(network, chat_of(tmp_path).prompt("1+1?"), generation.tokens.ids[0])
    torch.testing.assert_close(torch.tensor(generation.tokens.logprobs[0]), found, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"model_type": "mamba"},
            r"\(mamba\) keeps its states in a form that several answers to one prompt cannot share",
        ),
        ({"model_type": "rwkv"}, r"\(rwkv\) keeps its states in a form"),
        ({"model_type": "bert"}, r"does not write from left to right \(bert\)"),
        ({"model_type": "bart"}, r"\(bart\) keeps its states in a form"),
        ({"model_type": "qwen2_5_vl"}, r"is no causal language model \(Qwen2_5_VLTextConfig\)"),
        (
            {"model_type": "qwen2", "quantization_config": {"quant_method": "fp8"}},
            r"are quantised, and cannot be trained\. Choose the model",
        ),
        ({"model_type": "gemma3", "text_config": {"quantization_config": {"bits": 4}}}, r"are quantised"),
    ],
)
def test_untrainable_models_are_refused_by_their_configuration(
    document: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(NoModel, match=said):
        examine(NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu")))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "falcon_h1", "gemma4_text"])
def test_an_adapter_gives_the_same_values_before_and_after_export(name: str, tmp_path: Path) -> None:
    """peft has special rules for experts and Falcon-H1's kernels; Gemma 4 has layers of different widths."""
    base = folder_of(make(ARCHITECTURES[name]()), tmp_path / "base")
    policy = open_policy(base, lora="on", lora_rank=4, train={"learning_rate": 0.02})
    policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    files, ids = files_of(policy), torch.arange(24)[None]
    merged = export(files, [], "tiny-9", tmp_path / "merged").folder
    adapter = export(files, [], "tiny-9", tmp_path / "adapter", adapter_only=True).folder
    with torch.inference_mode():
        with plainly(policy.network):
            here, start = policy.network(ids).logits, network_of(base)(ids).logits
        assert (here - start).abs().max() > 0.1
        for network in (network_of(merged), PeftModel.from_pretrained(network_of(base), adapter)):
            torch.testing.assert_close(network.eval()(ids).logits, here, atol=1e-3, rtol=0)


def test_the_language_model_of_a_vision_model_is_trained_and_exported(tmp_path: Path) -> None:
    """Gemma 3, Ministral 3 and Qwen3.5 in the form on the hub.

    There the tensors have other names, and the whole model's setting ties the head.
    """
    wholes = {
        "gemma3": hf.Gemma3Config(
            text_config=HEADS | WINDOWS | {"query_pre_attn_scalar": 8},
            vision_config=SEEING,
            mm_tokens_per_image=1,
        ),
        "mistral3": hf.Mistral3Config(
            text_config=HEADS | {"model_type": "ministral3"},
            vision_config=SEEING | {"model_type": "pixtral"},
            tie_word_embeddings=True,
        ),
        "qwen3_5": hf.Qwen3_5Config(
            text_config=DELTA,
            vision_config=SEEING | {"depth": 1, "num_heads": 2, "out_hidden_size": DELTA["hidden_size"]},
            tie_word_embeddings=True,
        ),
    }
    for kind, config in wholes.items():
        whole = hf.AutoModelForImageTextToText.from_config(config).eval()
        policy = open_policy(folder_of(whole, tmp_path / kind))
        assert policy.parameters < sum(p.numel() for p in whole.parameters())
        prompt = chat_of(tmp_path / kind).prompt("1+1?")
        (generation,) = policy.generate(["1+1?"], 4)
        for ids, logprobs in zip(generation.tokens.ids, generation.tokens.logprobs, strict=True):
            torch.testing.assert_close(
                torch.tensor(logprobs), plain_logprobs(whole, prompt, ids), atol=1e-4, rtol=1e-3
            )
        policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
        out = export(files_of(policy), [], "tiny-9", tmp_path / f"{kind}-exported").folder
        for name, tensor in network_of(out).state_dict().items():
            torch.testing.assert_close(tensor, policy.network.state_dict()[name], msg=name)

        # Of these models, transformers can load only Qwen3.5's language model as a causal language model.
        files = files_of(open_policy(tmp_path / kind, lora="on", lora_rank=4))
        known = (
            contextlib.nullcontext()
            if kind == "qwen3_5"
            else pytest.raises(ConfigError, match="has further parts")
        )
        with known:
            export(files, [], "tiny-9", tmp_path / f"{kind}-adapter", adapter_only=True)
