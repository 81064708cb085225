"""The memory plan: what training a model costs, and which settings make it fit.

Integer arithmetic: no torch, no clock, no files.

A round has two phases, and the larger of them has to fit beside what is always held:

    always      weights; the adapter's, and a copy in the base's dtype (`lora.lora_factors`); gradients and
                Adam's two moments of what is trained; with weights in 16 bits that are all trained a float32
                copy of them (optimizer.py); what they were at the start (learner.py)
    answering   keys and values of the answers in hand, and a row of logits for each of them; on a CPU in
                bfloat16 a packed copy of the weights (packed_weights.py)
    training    what the backward pass needs of a micro-batch's tokens, and of a chunk of its logits

What the backward pass needs of one token in one layer, where s is the size of a number, d the width, q and k
the widths of queries and keys, f the inner width. It was found by counting what autograd keeps, of Qwen2,
Qwen3, Llama and Gemma 2, in float32 and bfloat16, with LoRA and without: the sum below is 0.8 to 1.2
times the packed update's, and 0.9 to 1.3 times a plain forward's (tests/swarmd/policy/test_plan.py).

    n d (4 + 2 s)        n norms (two in most models): their input in float32, its normalised form and their
                         output; with LoRA n d (4 + s), as a frozen norm keeps no normalised form
    (6 q + 4 k) s        queries, keys, values and the attention's output; half of it is room for an
                         attention that makes copies
    4 f s                gate, its activation, up, and their product

A layer with a recurrent state (a delta rule's, Mamba's) keeps 2.5 times as much as one of attention in
float32, 4 times in 16 bits, as most of it is in float32 either way: 1.9 to 3.0 and 2.5 to 4.7 times in
Qwen3.5 and Granite 4 (transformers' own code, without fused kernels), the most where completions are short.

With gradient checkpointing only each layer's input is kept, exactly d s, and one layer at a time is computed
again.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

# Bytes of a number that is computed with. In nf4 the adapted layers' weights are kept in less (NF4_BITS).
ITEMSIZE: Final = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "nf4": 2})
# Bits of a weight, with a scale of 8 bits for 64 weights, and one of 32 for 256 of these scales.
NF4_BITS: Final = 4 + 8 / 64 + 32 / (64 * 256)
# The share of free memory that is used: allocators leave gaps.
USABLE_SHARE: Final = 0.9
# What libraries take at the first step, besides: 200 to 290 MB where it was measured, on a CPU.
WORKSPACE_BYTES: Final = 2**28
# Tokens of a micro-batch: a larger one is no quicker.
MAX_TOKENS: Final = 8_192
# Tokens of a micro-batch below which checkpointing costs less than it saves.
ENOUGH_TOKENS: Final = 4_096
# Keys and values held at once while answering, at most.
CACHE_BYTES: Final = 2**31
# Numbers in one chunk of logits: 4 MiB in float32, which caches hold while it is gone over several times.
HEAD_NUMBERS: Final = 2**20
# Tokens of a chunk, however large the vocabulary: fewer make poor matrix products.
HEAD_TOKENS: Final = 256
# A logit, its log-probability and its gradient, in float32.
LOGIT_BYTES: Final = 12
# The item of packed weights.
PACKED: Final = "weights packed for oneDNN"
# Numbers of an 8-bit moment that share a scale.
BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an architecture that cost memory; widths are per token."""

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
    # Weights of these layers; 0: not counted, so that nothing is gained by keeping them in 4 bits.
    adapted_weights: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a round, as far as it costs the model memory."""

    questions: int = 4
    completions: int = 8
    new_tokens: int = 256
    # The longest question; 256 is assumed where none could be sampled.
    prompt_tokens: int = 256
    mean_prompt_tokens: int = 128
    micro_batch_tokens: int = 0  # as configured; 0: the plan decides
    optimizer: str = "adamw"  # or "adamw8bit"
    # Whether to keep a copy of the start's weights, where all are trained.
    start_copy: bool = False
    # Rollouts that a round trains on: own ones, and those of other nodes.
    batch: int = 8
    # Whether a CPU answers: keys and values are in float32.
    on_cpu: bool = False
    # Whether weights in bfloat16 can be packed for the answers (`inference.packed_weights`).
    packed: bool = False

    def within(self, context: int | None) -> "Workload":
        """Shorten the workload to a model that takes at most `context` tokens."""
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
        """Tokens of the longest question, once, with all its completions."""
        return self.prompt_tokens + self.completions * self.new_tokens

    @property
    def mean_rollout(self) -> int:
        """Tokens of a question of mean length, once, with all its completions."""
        return self.mean_prompt_tokens + self.completions * self.new_tokens


@dataclass(frozen=True, slots=True)
class Item:
    phase: str  # "always", "answering" or "training"
    name: str
    formula: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The budgets that will be used, and whether they fit. Bytes and tokens are whole numbers."""

    dtype: str
    lora_rank: int | None  # None: all weights are trained
    trained: int  # number of trained weights
    checkpointing: bool  # gradient checkpointing
    micro_batch_tokens: int  # unpadded tokens of one micro-batch's forward pass
    head_tokens: int  # completion tokens whose logits are held at once
    cache_tokens: int  # tokens whose keys and values are held at once while answering
    # Longest question and answer, in tokens, that the model takes and that can be trained on here.
    context: int
    free: int  # free bytes
    usable: int  # free bytes that the plan counts on
    least: int  # bytes without which training is not possible
    peak: int  # bytes that the plan needs
    # Bytes that a round of `Workload.batch` rollouts takes, with answers of full length.
    expected: int
    items: tuple[Item, ...]
    optimizer: str = "adamw"
    packed: bool = False  # whether answers use packed weights

    @property
    def fits(self) -> bool:
        return self.least <= self.usable

    @property
    def master(self) -> bool:
        """Whether steps are taken on a float32 copy of the weights; adapters are float32 themselves."""
        return self.lora_rank is None and ITEMSIZE[self.dtype] < 4


def make_plan(shape: Shape, dtype: str, lora_rank: int | None, free: int, work: Workload) -> Plan:
    """Plan a model's memory on a device with `free` bytes.

    A plan that does not fit says so (`fits`), and is the least there is.
    """
    size, work = ITEMSIZE[dtype], work.within(shape.context)
    always = _always(shape, size, lora_rank, work)
    if dtype == "nf4":
        always = [*_in_four_bits(shape, size), *always[1:]]
    held, usable = sum(item.bytes for item in always), max(0, int(USABLE_SHARE * free) - WORKSPACE_BYTES)
    room = max(0, usable - held)

    head_tokens = chunk_of(shape.vocabulary)
    head = head_tokens * shape.vocabulary * LOGIT_BYTES
    plain, thrifty = (
        _token_bytes(shape, size, lora_rank is not None, recompute) for recompute in (False, True)
    )
    most_plain, most = max(0, room - head) // plain, max(0, room - head) // thrifty
    if work.micro_batch_tokens:
        tokens = work.micro_batch_tokens
        checkpointing = dtype == "nf4" or tokens > most_plain
    else:
        checkpointing = most_plain < max(work.row, min(ENOUGH_TOKENS, work.rollout))
        # Else the backward pass would hold every layer's weights as they are computed with.
        checkpointing |= dtype == "nf4"
        fitting = most if checkpointing else most_plain
        # A power of two: so what happens to be free seldom changes the micro-batches, and with them the last
        # digit of a sum.
        tokens = max(work.row, min(MAX_TOKENS, 1 << fitting.bit_length() >> 1))

    # Of one token, in all layers; and the tokens of one question's answers.
    key_value = 2 * shape.layers * shape.key_width * (4 if work.on_cpu else size)
    one = work.completions * work.row
    logits = work.completions * shape.vocabulary * LOGIT_BYTES  # of one question's answers
    # Numbers of packed weights, if there is room: those of the layers and the head, and of a joined adapter.
    copied = shape.parameters + (_trained(shape, lora_rank) if lora_rank else 0)
    packed = work.packed and dtype == "bfloat16" and logits + one * key_value + copied * size <= room
    copied *= packed
    cache_tokens = CACHE_BYTES // key_value

    def at_once() -> int:
        """Return how many questions are answered at once: those whose keys and values are held."""
        return max(1, min(work.questions, cache_tokens // work.rollout))

    while cache_tokens > one and cache_tokens * key_value + at_once() * logits + copied * size > room:
        # Halved from a fixed figure, so that what happens to be free seldom changes which random number meets
        # which row.
        cache_tokens //= 2
    cache_tokens = max(cache_tokens, one)
    cached, rows = min(cache_tokens, work.questions * one), at_once() * work.completions
    head_rows = f"{rows:,} rows × {shape.vocabulary:,} × {LOGIT_BYTES} B"
    answering = [
        Item("answering", "logits", head_rows, at_once() * logits),
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
    """Return how many tokens' logits the update holds at once."""
    return max(HEAD_TOKENS, HEAD_NUMBERS // vocabulary)


def _trained(shape: Shape, lora_rank: int | None) -> int:
    """Count the trained weights: a LoRA pair of rank r on a layer of n inputs and m outputs has r (n + m)."""
    return lora_rank * (shape.adapted_inputs + shape.adapted_outputs) if lora_rank else shape.parameters


def _always(shape: Shape, size: int, lora_rank: int | None, work: Workload) -> list[Item]:
    trained = _trained(shape, lora_rank)
    items = [Item("always", "weights", f"{shape.parameters:,} × {size} B", shape.parameters * size)]

    def of_trained(name: str, numbers: int, each: int) -> None:
        items.append(Item("always", name, f"{trained:,} × {numbers} × {each} B", trained * numbers * each))

    if lora_rank:
        # An adapter is float32, whatever its base is.
        of_trained("adapter and its gradient", 2, 4)
        of_trained("copy of the adapter in the base's dtype", 1, size)
    else:
        of_trained("gradient", 1, size)
    if not lora_rank and size < 4:
        of_trained("float32 copy", 1, 4)
    if work.optimizer == "adamw8bit":
        of_trained("Adam's two moments, in 8 bits", 2, 1)
        scales = -(-trained // BLOCK)
        items.append(Item("always", "their scales", f"{scales:,} × 2 × 4 B", scales * 8))
    else:
        of_trained("Adam's two moments", 2, 4)
    if work.start_copy and not lora_rank:
        of_trained("weights at the start, for the KL", 1, size)
    return items


def _in_four_bits(shape: Shape, size: int) -> list[Item]:
    """Return what a frozen base takes whose adapted layers are kept in 4 bits."""
    packed, layer = shape.adapted_weights, shape.adapted_weights // shape.layers
    rest = shape.parameters - packed
    return [
        Item("always", "weights in 4 bits", f"{packed:,} × {NF4_BITS:.3f} / 8 B", int(packed * NF4_BITS / 8)),
        Item("always", "embeddings, head and norms", f"{rest:,} × {size} B", rest * size),
        Item("always", "one layer's weights, unpacked", f"{layer:,} × {size} B", layer * size),
    ]


def _token_bytes(shape: Shape, size: int, adapted: bool, checkpointing: bool) -> int:
    """Return the bytes that the backward pass needs for one token, all layers, without the logits.

    See the head of this file.
    """
    norm = shape.width * (4 + (1 if adapted else 2) * size)
    layer = shape.norms * norm + (6 * shape.query_width + 4 * shape.key_width + 4 * shape.inner_width) * size
    largest = layer * (5 if size == 4 else 8) // 2 if shape.recurrent else layer
    kept = (
        shape.layers * shape.width * size
        if checkpointing
        else shape.layers * layer + shape.recurrent * (largest - layer)
    )
    # A layer that is computed again, and the gradients inside one.
    return kept + (2 * largest if checkpointing else largest) + norm
