"""The memory plan: the memory that training a model takes, and settings with which it fits.

This module is integer arithmetic: no torch, no clock, no files.

A round has two phases. The larger of them must fit in addition to the memory that is always held:

    always      the weights; the adapter's weights, and a copy in the base's dtype (`lora.lora_factors`); the
                trained weights' gradients and Adam's two moments; a float32 copy of the weights, if all are
                trained in 16 bits (optimizer.py); a copy of the start's weights (learner.py)
    answering   keys and values of the current answers, and a row of logits for each; on a CPU in bfloat16 a
                packed copy of the weights (packed_weights.py)
    training    the tensors that the backward pass needs for a micro-batch's tokens, and a chunk of logits

The following formula gives the bytes that the backward pass needs per token and layer. s is the size of a
number in bytes, d the width, q and k the widths of queries and keys, f the inner width. It was found by
counting the tensors that autograd keeps for Qwen2, Qwen3, Llama and Gemma 2, in float32 and bfloat16, with
and without LoRA. The sum is 0.8 to 1.2 times the measured bytes of the packed update, and 0.9 to 1.3 times
the bytes of a plain forward pass (tests/swarmd/policy/test_plan.py).

    n d (4 + 2 s)        n norms (two in most models): input in float32, normalised input, and output; with
                         LoRA n d (4 + s), since a frozen norm does not keep its normalised input
    (6 q + 4 k) s        queries, keys, values and the attention's output; half of it is room for an
                         attention that makes copies
    4 f s                gate, its activation, up, and their product

A layer with a recurrent state (delta rule, Mamba) is counted as 2.5 attention layers in float32 and as 4 in
16 bits, since most of its tensors are float32 in both cases. Measured in Qwen3.5 and Granite 4 (transformers'
code, without fused kernels): 1.9 to 3.0 and 2.5 to 4.7 times, with the most for short completions.

With gradient checkpointing only each layer's input is kept, which is exactly d s, and one layer at a time is
computed again.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

# Bytes of a number in computations. nf4 stores the adapted layers' weights in fewer bits (NF4_BITS).
ITEMSIZE: Final = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "nf4": 2})
# Bits per weight: 4, plus an 8-bit scale per 64 weights, plus a 32-bit scale per 256 of these scales.
NF4_BITS: Final = 4 + 8 / 64 + 32 / (64 * 256)
# The share of free memory that is used, since allocators leave gaps.
USABLE_SHARE: Final = 0.9
# Memory that libraries take at the first step: 200 to 290 MB were measured on a CPU.
WORKSPACE_BYTES: Final = 2**28
# Maximum number of tokens of a micro-batch; larger ones are not faster.
MAX_TOKENS: Final = 8_192
# Checkpointing is switched on if a micro-batch without it would have fewer tokens than this.
ENOUGH_TOKENS: Final = 4_096
# Maximum bytes of keys and values held at the same time while answering.
CACHE_BYTES: Final = 2**31
# Numbers in a chunk of logits: 4 MiB in float32, which fit into CPU caches during several passes over them.
HEAD_NUMBERS: Final = 2**20
# Minimum number of tokens in a chunk, for any vocabulary: fewer would make matrix products slow.
HEAD_TOKENS: Final = 256
# A logit, its log-probability and its gradient, in float32.
LOGIT_BYTES: Final = 12
# Name of the item for packed weights.
PACKED: Final = "weights packed for oneDNN"
# Numbers of an 8-bit moment that share a scale.
BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an architecture that decide its memory; widths are per token."""

    parameters: int
    layers: int
    norms: int  # norms of a layer, as wide as the model
    width: int
    query_width: int
    key_width: int  # the width of keys, and of values
    inner_width: int
    vocabulary: int
    context: int | None  # tokens; None: the architecture names no limit
    adapted_inputs: int  # inputs of the layers that LoRA adapts, summed over the layers
    adapted_outputs: int
    recurrent: int = 0  # layers with a recurrent state
    # Weights of the adapted layers. 0: not counted, and a plan in 4 bits then assumes no savings.
    adapted_weights: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a round that decides the model's memory."""

    questions: int = 4
    completions: int = 8
    new_tokens: int = 256
    # Tokens of the longest question; 256 is assumed if none could be sampled.
    prompt_tokens: int = 256
    mean_prompt_tokens: int = 128
    micro_batch_tokens: int = 0  # as configured; 0: the plan decides
    optimizer: str = "adamw"  # or "adamw8bit"
    # Whether to keep a copy of the start's weights, if all weights are trained.
    start_copy: bool = False
    # Rollouts that a round trains on: this node's and other nodes'.
    batch: int = 8
    # Whether a CPU answers, which stores keys and values in float32.
    on_cpu: bool = False
    # Whether weights in bfloat16 can be packed for the answers (`inference.packed_weights`).
    packed: bool = False

    def within(self, context: int | None) -> "Workload":
        """Shorten the workload to a model's context of at most `context` tokens."""
        if context is None or self.row <= context:
            return self
        new_tokens = min(self.new_tokens, context)
        return replace(self, new_tokens=new_tokens, prompt_tokens=context - new_tokens)

    @property
    def row(self) -> int:
        """Tokens of one question with one completion: the least that can be trained on."""
        return self.prompt_tokens + self.new_tokens

    @property
    def rollout(self) -> int:
        """Tokens of the longest question, counted once, with all its completions."""
        return self.prompt_tokens + self.completions * self.new_tokens

    @property
    def mean_rollout(self) -> int:
        """Tokens of a question of mean length, counted once, with all its completions."""
        return self.mean_prompt_tokens + self.completions * self.new_tokens


@dataclass(frozen=True, slots=True)
class Item:
    phase: str  # "always", "answering" or "training"
    name: str
    formula: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen budgets, and whether they fit. Bytes and tokens are whole numbers."""

    dtype: str
    lora_rank: int | None  # None: all weights are trained
    trained: int  # number of trained weights
    checkpointing: bool  # gradient checkpointing
    micro_batch_tokens: int  # unpadded tokens of one micro-batch's forward pass
    head_tokens: int  # completion tokens whose logits are held at once
    cache_tokens: int  # tokens whose keys and values are held at once while answering
    # The most tokens of question and answer that the model accepts and that can be trained on here.
    context: int
    free: int  # free bytes
    usable: int  # free bytes that the plan counts on
    least: int  # bytes without which training is impossible
    peak: int  # the most bytes that this plan takes
    # Bytes of a round with `Workload.batch` rollouts and answers of full length.
    expected: int
    items: tuple[Item, ...]
    optimizer: str = "adamw"
    packed: bool = False  # whether answers use packed weights

    @property
    def fits(self) -> bool:
        return self.least <= self.usable

    @property
    def master(self) -> bool:
        """Whether steps are taken on float32 copies of the weights; adapters are float32 themselves."""
        return self.lora_rank is None and ITEMSIZE[self.dtype] < 4


def make_plan(shape: Shape, dtype: str, lora_rank: int | None, free: int, work: Workload) -> Plan:
    """Plan a model's memory on a device with `free` bytes.

    If even the smallest plan does not fit, that plan is returned, with `fits` False.
    """
    size, work = ITEMSIZE[dtype], work.within(shape.context)
    always = [*_weights(shape, dtype), *_for_training(shape, size, lora_rank, work)]
    held, usable = sum(item.bytes for item in always), max(0, int(USABLE_SHARE * free) - WORKSPACE_BYTES)
    room = max(0, usable - held)

    head_tokens = chunk_of(shape.vocabulary)
    head = head_tokens * shape.vocabulary * LOGIT_BYTES
    plain, thrifty = (
        _token_bytes(shape, size, lora_rank is not None, recompute) for recompute in (False, True)
    )
    most_plain, most = max(0, room - head) // plain, max(0, room - head) // thrifty
    enough = work.micro_batch_tokens or max(work.row, min(ENOUGH_TOKENS, work.rollout))
    # nf4 always uses checkpointing: otherwise the backward pass would hold every layer's unpacked weights.
    checkpointing = dtype == "nf4" or most_plain < enough
    fitting = most if checkpointing else most_plain
    # A power of two, so that small changes of the free memory rarely change the micro-batches, and with them
    # the last digits of sums.
    tokens = work.micro_batch_tokens or max(work.row, min(MAX_TOKENS, 1 << fitting.bit_length() >> 1))

    # Bytes of one token in all layers, and the tokens of one question's answers.
    key_value = 2 * shape.layers * shape.key_width * (4 if work.on_cpu else size)
    one = work.completions * work.row
    logits = work.completions * shape.vocabulary * LOGIT_BYTES  # of one question's answers
    # Numbers in packed weights, if they fit: all weights, and the joined adapter.
    copied = shape.parameters + (_trained(shape, lora_rank) if lora_rank else 0)
    packed = work.packed and dtype == "bfloat16" and logits + one * key_value + copied * size <= room
    copied *= packed
    cache_tokens = CACHE_BYTES // key_value

    def at_once() -> int:
        """Return how many questions are answered at once, so that their keys and values fit."""
        return max(1, min(work.questions, cache_tokens // work.rollout))

    while cache_tokens > one and cache_tokens * key_value + at_once() * logits + copied * size > room:
        # Halved from a constant, so that small changes of the free memory rarely change which random number
        # is drawn for which row.
        cache_tokens //= 2
    cache_tokens = max(cache_tokens, one)
    cached, rows = min(cache_tokens, work.questions * one), at_once() * work.completions
    answering = [
        Item(
            "answering",
            "logits",
            f"{rows:,} rows × {shape.vocabulary:,} × {LOGIT_BYTES} B",
            at_once() * logits,
        ),
        Item("answering", "keys and values", f"{cached:,} tokens × {key_value:,} B", cached * key_value),
    ]
    if copied:
        answering.append(Item("answering", PACKED, f"{copied:,} × {size} B", copied * size))

    per_token = thrifty if checkpointing else plain
    training = [
        Item("training", "activations", f"{tokens:,} tokens × {per_token:,} B", tokens * per_token),
        Item("training", "logits", f"{head_tokens:,} tokens × {shape.vocabulary:,} × {LOGIT_BYTES} B", head),
    ]
    return Plan(
        dtype=dtype,
        lora_rank=lora_rank,
        trained=_trained(shape, lora_rank),
        checkpointing=checkpointing,
        micro_batch_tokens=tokens,
        head_tokens=head_tokens,
        cache_tokens=cache_tokens,
        context=most if shape.context is None else min(shape.context, most),
        free=free,
        usable=usable,
        least=held + max(logits + one * key_value, work.row * thrifty + head),
        peak=held + max(sum(item.bytes for item in phase) for phase in (answering, training)),
        expected=held
        + max(
            sum(item.bytes for item in answering),
            min(tokens, work.batch * work.mean_rollout) * per_token + head,
        ),
        items=(*always, *answering, *training),
        packed=packed,
        optimizer=work.optimizer,
    )


def chunk_of(vocabulary: int) -> int:
    """Return the number of tokens whose logits the update holds at once."""
    return max(HEAD_TOKENS, HEAD_NUMBERS // vocabulary)


def _trained(shape: Shape, lora_rank: int | None) -> int:
    """Count the trained weights: LoRA of rank r has r (n + m) for a layer of n inputs and m outputs."""
    return lora_rank * (shape.adapted_inputs + shape.adapted_outputs) if lora_rank else shape.parameters


def _weights(shape: Shape, dtype: str) -> list[Item]:
    """Return the items of the weights; with nf4 the adapted layers of a frozen base are stored in 4 bits."""
    size = ITEMSIZE[dtype]
    if dtype != "nf4":
        return [Item("always", "weights", f"{shape.parameters:,} × {size} B", shape.parameters * size)]
    packed, layer = shape.adapted_weights, shape.adapted_weights // shape.layers
    rest = shape.parameters - packed
    return [
        Item("always", "weights in 4 bits", f"{packed:,} × {NF4_BITS:.3f} / 8 B", int(packed * NF4_BITS / 8)),
        Item("always", "embeddings, head and norms", f"{rest:,} × {size} B", rest * size),
        Item("always", "one layer's weights, unpacked", f"{layer:,} × {size} B", layer * size),
    ]


def _for_training(shape: Shape, size: int, lora_rank: int | None, work: Workload) -> list[Item]:
    """Return the items that training always holds in addition to the weights."""
    trained = _trained(shape, lora_rank)
    # Rows of a name, a count of weights or scales, the numbers for each of them, and the bytes of a number.
    # An adapter is float32 for any base.
    weights = (
        [
            ("adapter and its gradient", trained, 2, 4),
            ("copy of the adapter in the base's dtype", trained, 1, size),
        ]
        if lora_rank
        else [("gradient", trained, 1, size), *[("float32 copy", trained, 1, 4)] * (size < 4)]
    )
    moments = (
        [("Adam's two moments, in 8 bits", trained, 2, 1), ("their scales", -(-trained // BLOCK), 2, 4)]
        if work.optimizer == "adamw8bit"
        else [("Adam's two moments", trained, 2, 4)]
    )
    start = [("weights at the start, for the KL", trained, 1, size)] * (work.start_copy and not lora_rank)
    return [
        Item("always", name, f"{count:,} × {numbers} × {each} B", count * numbers * each)
        for name, count, numbers, each in (*weights, *moments, *start)
    ]


def _token_bytes(shape: Shape, size: int, adapted: bool, checkpointing: bool) -> int:
    """Return the bytes that the backward pass needs per token, in all layers, without the logits.

    See the module's docstring for the formula.
    """
    norm = shape.width * (4 + (1 if adapted else 2) * size)
    layer = shape.norms * norm + (6 * shape.query_width + 4 * shape.key_width + 4 * shape.inner_width) * size
    largest = layer * (5 if size == 4 else 8) // 2 if shape.recurrent else layer
    kept = (
        shape.layers * shape.width * size
        if checkpointing
        else shape.layers * layer + shape.recurrent * (largest - layer)
    )
    # With checkpointing, one layer is computed again, and its gradients are held.
    return kept + (2 * largest if checkpointing else largest) + norm
