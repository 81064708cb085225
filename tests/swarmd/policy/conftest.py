"""Small models of real architectures, with random weights and a small tokenizer, in model folders."""

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from p2p.types import PeerId
from swarmd.config.config import GenerateConfig, ModelConfig, NodeConfig, TrainConfig
from swarmd.policy.attention import NAME
from swarmd.policy.export import FILES
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.chat import Chat
from swarmd.policy.models.files.progress import Download
from swarmd.types import Completion, Generation, Rollout, Scored, TaskRef, Tokens
from testbed.model_configurations import CONFIGURATIONS

BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs pip install 'swarmd[bitsandbytes]'"
)
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_SYSTEM_ROLE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT
)
THINKING = CHAT + "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}{% endif %}"
SPECIALS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCABULARY = len(SPECIALS) + 2 + 256

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large, else all distributions are almost flat and argmax is random
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 16}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        tie_word_embeddings=False,
        sliding_window=16,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
    ),
}
# Further models with rarer features: windows, scaled logits, unsupported features.
ALL_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = FAMILIES | {
    "qwen2-window": lambda: Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        **WINDOW,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "mistral": lambda: MistralConfig(**SIZES, tie_word_embeddings=False, **WINDOW),
    "gemma": lambda: GemmaConfig(**SIZES, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        tie_word_embeddings=False,
        **WINDOW,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": lambda: GraniteConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        logits_scaling=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
    ),
    "olmo2": lambda: Olmo2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3_5": lambda: Qwen3_5TextConfig(  # has a recurrent layer that can read a stream
        **SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "lfm2": lambda: Lfm2Config(  # not covered by the fast paths: padded batches, a recurrent layer
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
}


QWEN_05B = CONFIGURATIONS["qwen2.5-0.5b"]


def make_tokenizer(
    chat_template: str | None = CHAT, eos: str | None = "<|endoftext|>"
) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with four control tokens, and with <answer> and </answer> as added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, "<answer>", "</answer>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(["<answer>", "</answer>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=chat_template)


def make_model(
    folder: Path,
    family: str = "qwen2",
    *,
    chat_template: str | None = CHAT,
    eos: str | None = "<|endoftext|>",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Make a model's folder. changes: to the architecture's configuration."""
    config = ALL_FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder)
    make_tokenizer(chat_template, eos).save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make one model of each family; tests must not change them."""
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in ALL_FAMILIES}


def config_of(
    folder: Path | str,
    *,
    temperature: float = 1.0,
    new_tokens: int = 12,
    train: dict[str, Any] | None = None,
    **model: Any,
) -> NodeConfig:
    return NodeConfig(
        model=ModelConfig(
            name=str(folder), **{"device": "cpu", "dtype": "float32", "system_prompt": "", **model}
        ),
        generate=GenerateConfig(max_new_tokens=new_tokens, temperature=temperature),
        train=TrainConfig(**(train or {})),
    )


def open_policy(
    folder: Path | str,
    seed: int = 0,
    rest: Callable[[], object] = lambda: None,
    between: Callable[[], int] | None = None,
    report: Callable[[Download], None] = lambda _: None,
    **changes: Any,
) -> LanguagePolicy:
    return LanguagePolicy.open(config_of(folder, **changes), seed, report=report, rest=rest, between=between)


def files_of(policy: LanguagePolicy) -> dict[str, bytes]:
    """Return the policy's files in a checkpoint, which an export reads."""
    return {name: bytes(content) for name, content in policy.files() if name in FILES}


def network_of(folder: Path) -> Any:
    """Return the network as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def chat_of(folder: Path) -> Chat:
    return Chat(AutoTokenizer.from_pretrained(folder), "")


@contextmanager
def plainly(network: Any) -> Iterator[None]:
    """Let a network compute as in transformers until the block ends."""
    of = getattr(network.config, "_attn_implementation", None)
    streams = [(m, type(m)) for m in network.modules() if type(m).__name__.endswith("OnStream")]
    if of == NAME:
        network.set_attn_implementation("eager")
    for module, kind in streams:
        module.__class__ = kind.__bases__[1]
    try:
        yield
    finally:
        if of == NAME:
            network.set_attn_implementation(NAME)
        for module, kind in streams:
            module.__class__ = kind


def plain_logprobs(
    network: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probabilities of the tokens after a prompt, by transformers' forward pass."""
    with torch.no_grad(), plainly(network):
        logits = (
            network(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        )
    return torch.log_softmax(logits / temperature, -1)[
        torch.arange(len(ids)), torch.tensor(ids, dtype=torch.long)
    ]


def local(question: str, generation: Generation, rewards: tuple[float, ...], round_number: int = 1) -> Scored:
    rollout = Rollout(TaskRef("test", 0), generation.completions, PeerId("me"))
    return Scored(rollout, question, rewards, round_number, generation.tokens)


def answered(
    policy: LanguagePolicy,
    questions: Sequence[str],
    rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0),
    round_number: int = 1,
) -> list[Scored]:
    """Return the policy's answers to the questions, with these rewards for each group."""
    answers = policy.generate(questions, len(rewards))
    return [local(q, a, rewards, round_number) for q, a in zip(questions, answers, strict=True)]


def flat(tokens: Iterable[Tokens]) -> torch.Tensor:
    """Return the log-probabilities of all tokens in one flat tensor."""
    return torch.tensor([p for each in tokens for row in each.logprobs for p in row])


def external(
    question: str, texts: list[tuple[str, bool]], rewards: tuple[float, ...], round_number: int = 1
) -> Scored:
    """Return an external rollout. texts: (text, whether it ended by itself)."""
    rollout = Rollout(TaskRef("test", 0), tuple(Completion(t, e) for t, e in texts), PeerId("other"))
    return Scored(rollout, question, rewards, round_number)
