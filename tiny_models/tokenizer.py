"""The tiny models' own tokenizers: a byte-level BPE for Qwen2, and one like SentencePiece's for Llama.

The Qwen2 tokenizer has one token per digit and one per fixed phrase of the questions. Any text in Unicode's
normal form C is unchanged by encoding and decoding. Most questions of tiny-9 take only 8-16 tokens (arc_1d:
47), which is the main reason for the models' speed.

`AutoTokenizer` loads every tokenizer in a Qwen2 model's folder as a Qwen2Tokenizer: vocabulary, merges and
added tokens come from the folder; normaliser and pre-tokenizer are Qwen2's. So this tokenizer follows the
same rules: a text that must be a single token is a phrase, or is within one piece of Qwen2's pre-tokenizer.

The Llama tokenizer has characters as its alphabet, with bytes for all other characters, and a mark in place
of the space. It splits numbers into pairs of digits, counted from the right, and words (also days and months)
into three letters. So an answer of more than two digits rarely has the same tokens in both tokenizers.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

PAD, END, USER, ASSISTANT = "<|pad|>", "<|endoftext|>", "<|user|>", "<|assistant|>"

# System messages are ignored, because the model has learned only one way to answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}{%"
    " elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|endoftext|>' }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_LOGIC = """The following question is a propositional logic reasoning question.

In the question we provide a list of premises. The task is to infer a correct conclusion from the premise.

FORMAT INSTRUCTIONS:
- Return the conclusion logic statement, as your final answer.
- Use the following notation to denote symbols
    - OR = ∨
    - AND = ∧
    - IMPLIES = →
    - IFF = ↔
    - NOT = ¬

Here is the question:
Given:
1. """
_ARC = """

Below is a test input grid. Predict the corresponding output grid by applying the rule you found. \
Describe how you derived the rule and your overall reasoning process in detail before you submit your \
answer. \
Your final answer should be just the test output grid itself.

Input:
"""
_MATRIX = """Given a square matrix, your job is to find the taxicab (Manhattan) distance of the nearest 0 \
for each cell.

The output should be a matrix of the same size as the input matrix, where each cell contains the distance \
to the nearest 0.

Find the distance to the nearest 0 for each cell in the matrix below:
"""
_BASE = """Your task is to convert a number between two different bases.

If the target base is > 10, use lowercase letters a-z for digits above 9.

Now, convert the """

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

_WORDS = (*(f" {digit}" for digit in range(10)), *_DAYS, *(f", {month} " for month in _MONTHS))

PHRASES = (
    "<answer>",
    "</answer>",
    *_WORDS,
    _BASE,
    "binary",
    "base-",
    " number ",
    " to ",
    "Calculate ",
    (
        "Find the common rule that maps an input grid to an output grid, given the examples below.\n\nExample"
        " 1:\nInput:  "
    ),
    "\nOutput: ",
    "\n\nExample 2:\nInput:  ",
    "\n\nExample 3:\nInput:  ",
    _ARC,
    "This is a BF (Brainf*ck) computer program. What is the output?\n\n",
    "\n\nRespond only with the exact output of the program.",
    "Consider the following BF (Brainf*ck) code. What would it output?\n\n",
    "\n\nProvide only the exact output of the code.",
    _LOGIC,
    "\n.2. ",
    "\n.3. ",
    "\n.4. ",
    "\n.What can we conclude from the above statements?",
    "Simplify the fraction ",
    " to its lowest terms. Give only the simplified fraction as your final answer.",
    "Please solve this problem to a maximum of ",
    " significant digits, rounding up from the half. Only reply with the final value.\n",
    " = ?",
    "If today is ",
    "Starting from ",
    "Count forward ",
    "Count backward ",
    " days from ",
    ", 2022",
    ", what day of the week will it be in ",
    " days? ",
    ", which weekday falls after a ",
    "-day jump? ",
    " - what's the weekday? ",
    ", what day of the week was it ",
    " days ago? ",
    ", which weekday was it ",
    " days before? ",
    "Answer with the weekday's name (e.g., Monday, Tuesday, etc.).",
    "Provide the full name of the weekday.",
    "State the weekday (Monday through Sunday).",
    "Give the weekday name in full.",
    "Reply with just the weekday name.",
    "Write out the full weekday name.",
    "Respond with the weekday (Monday-Sunday).",
    "Answer using the complete weekday name.",
    "Name the day of the week in full.",
    _MATRIX,
)

# BPE merges only within these pieces: a word; an operator with its space; the part of a BF program that
# prints one character.
_PIECES = Regex(r"[-+<>\[\]]{2,}\.?|[-+]\.| ?[-+*/=∧∨¬→↔(]| ?[A-Za-z]+|[^A-Za-z]")


def outside_phrases(text: str, phrases: Iterable[str] = PHRASES) -> list[str]:
    """Return the parts of a text that remain after the phrases, longest first, are removed."""
    parts = [text]
    for phrase in sorted(phrases, key=len, reverse=True):
        parts = [piece for part in parts for piece in part.split(phrase)]
    return [part for part in parts if part]


# Options of both tokenizers.
_OPTIONS: Mapping[str, Any] = {
    "eos_token": END,
    "pad_token": PAD,
    "extra_special_tokens": [USER, ASSISTANT],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
    "padding_side": "left",
    "chat_template": CHAT_TEMPLATE,
}


def _ordinary(phrases: Iterable[str]) -> list[AddedToken]:
    """Return ordinary tokens; decoding with skip_special_tokens must not remove <answer>."""
    return [AddedToken(phrase, special=False, normalized=False) for phrase in phrases]


def train_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """Train a tokenizer on `texts`. The same texts in the same order give the same tokenizer."""
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_PIECES, "isolated"), byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # never reached: merging ends when every piece that occurs twice is one token
        min_frequency=2,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((part for text in texts for part in outside_phrases(text)), trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=END,  # never used: every byte is in the vocabulary
        **_OPTIONS,
    )
    tokenizer.add_tokens(_ordinary(PHRASES))
    return tokenizer


# Numbers are split into pairs of digits from the right, with the space before them, and words into three
# letters; all other text is split as in `_PIECES`.
_PAIRS = Regex(
    r" ?\d{1,2}(?=(?:\d\d)*(?!\d))|[-+<>\[\]]{2,}\.?|[-+]\.| ?[-+*/=∧∨¬→↔(]| ?[A-Za-z]{1,3}|[^A-Za-z\d]"
)


def train_llama_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the Llama tokenizer on `texts`, with the same control tokens and chat template."""
    phrases = [phrase for phrase in PHRASES if phrase not in _WORDS]
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PAIRS, "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        ]
    )
    seed = Tokenizer(models.BPE(byte_fallback=True))
    seed.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(
        vocab_size=2048,  # never reached
        min_frequency=2,
        special_tokens=[PAD, END, USER, ASSISTANT, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    seed.train_from_iterator((part for text in texts for part in outside_phrases(text, phrases)), trainer)
    learned = json.loads(seed.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    bpe = Tokenizer(models.BPE(vocab=learned["vocab"], merges=merges, byte_fallback=True))
    bpe.pre_tokenizer = pieces
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **_OPTIONS,
    )
    tokenizer.add_tokens(_ordinary(phrases))
    return tokenizer
