"""The work that both sides of a comparison do: a model in a folder, questions, completions and their lengths.

The model is Qwen2 with random weights and tied embeddings, made here; nothing is downloaded. Its lengths are part of its weights: one
hidden dimension is the same for every token and is written by no layer, and the end-of-sequence row of the embeddings has a little more
of it than the others. So both sides draw the same distribution of lengths from the same model, without a hook in either:

    full     end-of-sequence never comes; every completion has exactly `max_new_tokens`
    varied   end-of-sequence has a chance of 1 in 23 at each token; mean about 22, cut at `max_new_tokens`
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer as Bpe
from tokenizers import models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from swarmd.tasks.curriculum import SAPO_9
from swarmd.tasks.source import CurriculumTasks

VOCABULARY = 4096
PAD, END = "<|endoftext|>", "<|im_end|>"
SYSTEM = (
    "Given a problem, reason step by step and then give the final answer between <answer> and </answer> tags. "
    "Do not explain your reasoning inside the answer tags, provide only the final answer."
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "1.25m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384},
    "2.4m": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 512},
    "14m": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1024},
}
SPECIALTIES = ("base_conversion", "basic_arithmetic", "fraction_simplification", "decimal_arithmetic", "calendar_arithmetic", "bf")


@dataclass(frozen=True)
class Work:
    """One round: `questions` questions, `completions` completions of each, one update on all of them."""

    size: str
    lengths: str  # "full" or "varied"
    questions: int = 8
    completions: int = 8
    max_new_tokens: int = 64
    learning_rate: float = 1e-6
    temperature: float = 1.0


def make(work: Work, folder: Path, seed: int = 0) -> None:
    """Write model, tokenizer, questions and the work's own description into an empty folder."""
    questions = draw(work.questions, seed)
    tokenizer = _tokenizer(seed)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.convert_tokens_to_ids(END), pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
            **SIZES[work.size],
        )
    )  # fmt: skip
    _shape_lengths(model, tokenizer.convert_tokens_to_ids(END), 1 / 23 if work.lengths == "varied" else 0.0)
    model.save_pretrained(folder)
    (folder / "work.json").write_text(json.dumps({"work": asdict(work), "questions": questions, "system": SYSTEM}))


def read(folder: Path) -> tuple[Work, list[str]]:
    document = json.loads((folder / "work.json").read_text())
    return Work(**document["work"]), document["questions"]


def draw(count: int, seed: int) -> list[str]:
    tasks, rng = CurriculumTasks(SAPO_9), random.Random(seed)
    questions: list[str] = []
    while len(questions) < count:
        task = tasks.draw(1, rng)[0]
        if task.ref.specialty in SPECIALTIES:
            questions.append(task.question)
    return questions


def _tokenizer(seed: int) -> Qwen2Tokenizer:
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, "<|im_start|>", END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator([SYSTEM, *draw(2000, seed + 1)], trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"], merges=[tuple(m) for m in trained["merges"]], unk_token=PAD, pad_token=PAD, eos_token=END,
        extra_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _shape_lengths(model: Qwen2ForCausalLM, end: int, chance: float) -> None:
    """Give end-of-sequence this chance at every position (see the module's text)."""
    constant, width = 40.0, model.config.hidden_size  # large beside all that the layers write
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = constant
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        # After the last norm the constant is near sqrt(width), since the other dimensions are small beside it.
        logit = -30.0 if chance == 0 else torch.logit(torch.tensor(chance)).item() + torch.tensor(float(len(embeddings))).log().item()
        embeddings[end, 0] = constant + logit / width**0.5
