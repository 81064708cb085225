"""The work that both sides of a comparison do: a model in a folder, questions, and lengths of completions.

The model is Qwen2 with random weights and tied embeddings, made here; nothing is downloaded. Its weights
determine the lengths of completions: one hidden dimension has the same value for every token, no layer writes
to it, and the end-of-sequence row of the embeddings has a slightly larger value in it than the other rows. So
both sides get the same distribution of lengths from the same model, without changes to either side's code:

    full     the end-of-sequence token is never sampled; every completion has exactly `max_new_tokens`
    varied   end-of-sequence has the same chance at each token: 1 in 23 if `max_new_tokens` is 64 (mean about
    22); the mean grows with `max_new_tokens`

The questions are ReasoningGYM's, of one of two sets:

    trials   one question from each of eight data sets, seed 0, as when swarmd's goals were set
    sapo-9   eight questions drawn from all nine specialties of the curriculum SAPO-9, seed 0
"""

import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Bpe
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils import logging

from swarmd.tasks.curriculum import SAPO_9
from swarmd.tasks.gym import reasoning_gym
from swarmd.tasks.source import CurriculumTasks

VOCABULARY = 4096
POSITIONS = 2048
PAD, END = "<|endoftext|>", "<|im_end|>"
SYSTEM = (
    "Given a problem, reason step by step and then give the final answer between <answer> and </answer> tags."
    " Do not explain your reasoning inside the answer tags, provide only the final answer."
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "1.25m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384},
    "2.4m": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 512},
    "14m": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1024},
    # The layers of Qwen2.5-0.5B with a smaller vocabulary.
    "360m": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
}
TRIALS = (
    "chain_sum",
    "basic_arithmetic",
    "leg_counting",
    "spell_backward",
    "simple_equations",
    "letter_counting",
    "gcd",
    "number_sorting",
)
SETS = ("trials", "sapo-9")
COUNT = 8  # questions a round
CORPUS = 2000  # questions of each set from which the tokenizer is trained


@dataclass(frozen=True)
class Work:
    """One round: eight questions, `completions` completions of each, one update on all of them."""

    size: str
    lengths: str  # "full" or "varied"
    questions: str = "trials"  # one of SETS
    max_new_tokens: int = 64
    device: str = "cpu"  # or "cuda"
    completions: int = 8
    learning_rate: float = 1e-6
    temperature: float = 1.0
    lora: bool = False  # an adapter of rank 16 on every linear layer, alpha 32
    dtype: str = ""  # "": float32 on a CPU, else bfloat16

    @property
    def torch_dtype(self) -> str:
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


def make(work: Work, folder: Path, seed: int = 0) -> None:
    """Write model, tokenizer, questions and the work's own description into an empty folder."""
    logging.disable_progress_bar()
    questions = draw(work.questions, COUNT, seed)
    tokenizer = _tokenizer(
        [SYSTEM, *(question for name in SETS for question in draw(name, CORPUS, seed + 7))]
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
            **SIZES[work.size],
        )
    )
    chance = 64 / (23 * work.max_new_tokens) if work.lengths == "varied" else 0.0
    _shape_lengths(model, tokenizer.convert_tokens_to_ids(END), min(chance, 0.9))
    model.save_pretrained(folder)
    _describe(work, folder, questions, tokenizer)


def lay(work: Work, folder: Path, model: Path, count: int, seed: int = 0) -> None:
    """Copy a model into a new folder, and write `count` questions and the work's description there."""
    shutil.copytree(model, folder)
    _describe(work, folder, draw(work.questions, count, seed), AutoTokenizer.from_pretrained(model))


def _describe(work: Work, folder: Path, questions: list[str], tokenizer: Any) -> None:
    messages = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in questions
    ]
    texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
    document = {
        "work": asdict(work) | {"torch_dtype": work.torch_dtype},
        "questions": questions,
        "system": SYSTEM,
        "prompts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
    }
    (folder / "work.json").write_text(json.dumps(document))


def read(folder: Path) -> tuple[Work, list[str]]:
    document = json.loads((folder / "work.json").read_text())
    del document["work"]["torch_dtype"]
    return Work(**document["work"]), document["questions"]


def draw(name: str, count: int, seed: int) -> list[str]:
    """Draw questions of one of SETS."""
    if name == "sapo-9":
        return [task.question for task in CurriculumTasks(SAPO_9).draw(count, random.Random(seed))]
    each = -(-count // len(TRIALS))
    sets = [reasoning_gym.create_dataset(trial, size=each, seed=seed) for trial in TRIALS]
    return [sets[i % len(TRIALS)][i // len(TRIALS)]["question"] for i in range(count)]


def _tokenizer(corpus: list[str]) -> Qwen2Tokenizer:
    bpe = Bpe(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(m) for m in trained["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _shape_lengths(model: Qwen2ForCausalLM, end: int, chance: float) -> None:
    """Give the end-of-sequence token this probability at every position (see the module's docstring)."""
    constant, width = 40.0, model.config.hidden_size  # large compared with the values that the layers write
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = constant
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        # After the last norm the constant is near sqrt(width), since the other dimensions are comparatively
        # small.
        logit = (
            -30.0
            if chance == 0
            else torch.logit(torch.tensor(chance)).item() + torch.tensor(float(len(embeddings))).log().item()
        )
        embeddings[end, 0] = constant + logit / width**0.5
