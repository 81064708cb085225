"""Choose device, precision and memory plan for a model before its weights are downloaded.

The choice needs the model's config.json, the free memory, and the length of the curriculum's prompts. For the
latter, questions are sampled and their tokens estimated from the text, since `swarmd models` downloads no
tokenizer. The estimate counts a word, a digit, a run of punctuation, and white space before anything but a
word as one token each, similar to byte-pair tokenizers. For sapo-9's longest question (arc_1d) it gives 526
tokens; Qwen2.5's tokenizer makes 523.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import torch

from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.errors import NoModel
from swarmd.policy.models import hub
from swarmd.policy.models.chat import SYSTEM_PROMPT, Chat, ends_of
from swarmd.policy.models.device import (
    LORA_FROM_PARAMETERS,
    choose_device,
    choose_dtype,
    dtype_name,
    free_memory,
    require_bitsandbytes,
)
from swarmd.policy.models.files import model_folder
from swarmd.policy.models.lora import NF4, require_nf4
from swarmd.policy.models.memory_plan import Plan, Shape, Workload, make_plan
from swarmd.policy.models.tiny import WEIGHTS as TINY
from swarmd.tasks.curriculum import CURRICULA, LADDER_9
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.terminal import bytes_words, printable

# Values for generate.max_new_tokens = 0.
NEW_TOKENS_TINY, NEW_TOKENS, NEW_TOKENS_THINKING = 16, 256, 4096

# The models with a short name, largest first, chosen on 2026-11-25 (docs/engines.md lists the cards for
# each). The shapes are the results of `shape_of`, stored here so that a model can be recommended
# without building its network and without importing transformers, which takes longer than the rest of
# `swarmd models`.
# fmt: off
NAMED: Mapping[str, Shape] = MappingProxyType(
    {
        "qwen3-8b": Shape(
            8_190_735_360, 36, 2, 4096, 4096, 1024, 12_288, 151_936, 40_960,
            1_327_104, 1_400_832, 0, 6_945_767_424,
        ),
        "qwen3.5-4b": Shape(
            4_205_751_296, 32, 2, 2560, 4096, 1024, 9216, 248_320, 262_144,
            897_024, 1_132_032, 24, 3_569_090_560,
        ),
        "qwen3-4b": Shape(
            4_022_468_096, 36, 2, 2560, 4096, 1024, 9728, 151_936, 40_960,
            958_464, 1_105_920, 0, 3_633_315_840,
        ),
        "qwen3.5-2b": Shape(
            1_881_825_088, 24, 2, 2048, 2048, 512, 6144, 248_320, 262_144,
            479_232, 571_968, 18, 1_372_717_056,
        ),
        "qwen3-1.7b": Shape(
            1_720_574_976, 28, 2, 2048, 2048, 1024, 6144, 151_936, 40_960,
            516_096, 573_440, 0, 1_409_286_144,
        ),
        "qwen2.5-1.5b": Shape(
            1_543_714_304, 28, 2, 1536, 1536, 256, 8960, 151_936, 32_768,
            508_928, 645_120, 0, 1_310_195_712,
        ),
        "qwen3.5-0.8b": Shape(
            752_393_024, 24, 2, 1024, 2048, 512, 3584, 248_320, 262_144,
            276_480, 399_936, 18, 497_614_848,
        ),
        "qwen3-0.6b": Shape(
            596_049_920, 28, 2, 1024, 2048, 1024, 3072, 151_936, 40_960,
            286_720, 344_064, 0, 440_401_920,
        ),
        "qwen2.5-0.5b": Shape(
            494_032_768, 24, 2, 896, 896, 128, 4864, 151_936, 32_768,
            245_760, 304_128, 0, 357_826_560,
        ),
        "smollm2-360m": Shape(
            361_821_120, 32, 2, 960, 960, 320, 2560, 49_152, 8192,
            266_240, 276_480, 0, 314_572_800,
        ),
        "smollm2-135m": Shape(
            134_515_008, 30, 2, 576, 576, 192, 1536, 49_152, 8192,
            149_760, 155_520, 0, 106_168_320,
        ),
        "tiny": Shape(
            851_584, 4, 2, 128, 128, 64, 384, 492, 1024,
            4608, 5120, 0, 786_432,
        ),
    }
)
# fmt: on


# Sampled questions per specialty.
SAMPLES: Final = 32
# Estimate of the tokens that a chat template adds around a question.
FRAME_TOKENS: Final = 32
# Estimate of the tokens that it adds around each turn of an example.
TURN_TOKENS: Final = 6
# Prompt lengths are rounded up to a multiple of this.
STEP_TOKENS: Final = 64
_PIECE: Final = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s+|_")


@lru_cache(maxsize=4)
def longest_questions(curriculum: str) -> tuple[str, ...]:
    """Return the longest of SAMPLES questions of each specialty.

    curriculum: `swarm.curriculum` of a model that is not tiny. Returns nothing for own tasks, since only
        their contained process can generate questions.
    """
    known = LADDER_9 if curriculum == "auto" else CURRICULA.get(curriculum)
    if known is None:
        return ()
    # Imported here, since importing ReasoningGYM takes a second.
    from swarmd.tasks.source import TaskRef, tasks_of

    def longest(specialty: str) -> str:
        found = (tasks_of(known.name).task(TaskRef(specialty, n)) for n in range(SAMPLES))
        return max((task.question for task in found if task), key=estimated_tokens)

    return tuple(longest(specialty) for specialty in known.specialties)


def estimated_tokens(text: str) -> int:
    return len(_PIECE.findall(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model, the device, and the memory plan for the two.

    `plan.fits` says whether the model fits into the memory.
    """

    source: str
    shape: Shape
    device: torch.device
    dtype: torch.dtype
    work: Workload
    plan: Plan
    # The fault of tokenizer or template that makes training impossible on any machine.
    fault: str | None = None
    # Notes for the operator about the model's files.
    notes: tuple[str, ...] = ()

    @property
    def refusal(self) -> str | None:
        """The reason why the model cannot be trained here, with the largest that could be; None if it can."""
        return self.fault if self.plan.fits else _too_large(self)

    def require(self) -> None:
        """Raise NoModel if the model cannot be trained here.

        The message names the largest model that could be trained, if any.
        """
        if refusal := self.refusal:
            raise NoModel(refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel(Fit):
    """A fit, with the parts of the model that were read to find it."""

    place: hub.Place
    architecture: Any  # transformers' configuration
    # Whether our tests compare its architecture with transformers' forward pass.
    tried: bool
    tokenizer: Any  # None if there is a fault
    chat: Chat | None  # None if there is a fault


def work_of(config: NodeConfig) -> Workload:
    """Estimate the work that a round of this node needs from its model.

    Prompt lengths are estimated from the curriculum's questions. For a tiny model the defaults of `Workload`
    are used, which exceed its prompts, since sampling questions would take a second.
    """
    tiny, lengths = config.model.name in TINY, dict[str, Any]()
    if not tiny and (asked := [*map(estimated_tokens, longest_questions(config.swarm.curriculum))]):
        model = spelled_out(config, longest=True).model
        shown = [text for example in model.examples for text in example]
        words = (system_prompt_of(model), *shown, model.opening)
        around = FRAME_TOKENS + sum(map(estimated_tokens, words)) + TURN_TOKENS * len(shown)
        lengths["prompt_tokens"] = -(-(around + max(asked)) // STEP_TOKENS) * STEP_TOKENS
        lengths["mean_prompt_tokens"] = around + sum(asked) // len(asked)
    default = NEW_TOKENS_THINKING if config.model.thinking == "on" else NEW_TOKENS
    return Workload(
        questions=max(1, config.round.local),
        batch=config.round.local + config.round.wanted,
        completions=config.round.completions,
        new_tokens=config.generate.max_new_tokens or (NEW_TOKENS_TINY if tiny else default),
        micro_batch_tokens=config.train.micro_batch_tokens,
        optimizer=config.train.optimizer,
        start_copy=config.train.kl_every > 0,
        **lengths,
    )


def fit(
    config: ModelConfig, work: Workload, free: Callable[[torch.device], int] = free_memory
) -> FittedModel:
    """Choose device, dtype, adapter and budgets. Raises NoModel, Unreachable.

    Downloads only configuration and tokenizer. free: returns the free bytes of a device.
    """
    # Imported here, since these modules load transformers.
    from transformers import GenerationConfig

    from swarmd.policy.inference.fused_decoder import FAMILIES
    from swarmd.policy.inference.packed_weights import packs
    from swarmd.policy.models.architecture import is_tried, read_config, shape_of, skeleton_of
    from swarmd.policy.models.tokenizer import load_tokenizer

    device = choose_device(config.device)
    if work.optimizer == "adamw8bit":
        require_bitsandbytes("train.optimizer = 'adamw8bit'", device, "set train.optimizer = 'adamw'")
    place = hub.locate(config.name, config.revision)
    architecture = read_config(place)
    skeleton = skeleton_of(architecture, place.source)
    tried, shape = is_tried(skeleton, place.source), shape_of(skeleton, place.source)
    work = replace(work, packed=device.type == "cpu" and architecture.model_type in FAMILIES and packs())
    tokenizer, chat, fault = None, None, None
    try:
        tokenizer = load_tokenizer(place, skeleton)
        with suppress(Exception), model_folder.checked_folder(place.folder, place.source) as folder:
            # The file is untrusted or missing: transformers may raise anything.
            skeleton.generation_config = GenerationConfig.from_pretrained(folder)
        chat = chat_of(config, config.name, tokenizer, skeleton)
    except NoModel as error:
        fault = str(error)
    dtype, plan = plan_on(config, shape, device, free(device), work, architecture.model_type)
    return FittedModel(
        source=place.source,
        shape=shape,
        device=device,
        dtype=dtype,
        work=work,
        plan=plan,
        fault=fault,
        notes=(*model_folder.notes(place.folder, place.source), *map(printable, chat.notes if chat else ())),
        place=place,
        architecture=architecture,
        tried=tried,
        tokenizer=tokenizer,
        chat=chat,
    )


def system_prompt_of(config: ModelConfig) -> str:
    """Return the configured system prompt, else the default; "" for a tiny model, trained without one."""
    if config.system_prompt is not None:
        return config.system_prompt
    return "" if config.name in TINY else SYSTEM_PROMPT


def spelled_out(config: NodeConfig, *, longest: bool = False) -> NodeConfig:
    """Replace the keywords of `model.examples` and `model.opening` by their values.

    longest: let "auto" stand for the longest examples and opening that a trial may choose, instead of none.

    Raises NoModel if the curriculum has no examples.
    """
    model, curriculum = config.model, config.swarm.curriculum
    examples, opening = model.examples, model.opening
    if opening == "auto":
        opening = "<answer>" if longest else ""
    if examples == "on" or (examples == "auto" and longest):
        known = LADDER_9 if curriculum == "auto" else find_curriculum(curriculum)
        if examples == "on" and not known.examples:
            raise NoModel(
                f'model.examples = "on": the own tasks {curriculum} bring no examples. Set it to a list of'
                " [question, answer] pairs."
            )
        examples = known.examples
    update = {"examples": () if isinstance(examples, str) else examples, "opening": opening}
    return config.model_copy(update={"model": model.model_copy(update=update)})


def chat_of(config: ModelConfig, source: str, tokenizer: Any, network: Any, *, plain: bool = False) -> Chat:
    """Return the chat of a loaded network. Raises NoModel.

    Args:
        config: examples and opening are used if they are spelled out (`spelled_out`).
        source: the name of the network's weights.
        tokenizer: the model's tokenizer.
        network: the model, for its generation settings.
        plain: use neither examples nor opening.
    """
    left_out = plain or isinstance(config.examples, str)
    shown: dict[str, Any] = {} if left_out else {"examples": config.examples, "opening": config.opening}
    return Chat(
        tokenizer,
        system_prompt_of(config),
        ends_of(network.generation_config),
        ours=source in TINY,
        thinking=config.thinking == "on",
        **shown,
    )


def plan_on(
    config: ModelConfig, shape: Shape, device: torch.device, free: int, work: Workload, kind: str = ""
) -> tuple[torch.dtype, Plan]:
    """Return precision and plan of a model of this shape and model type, on a device with `free` bytes."""
    rank = _lora_rank(config, shape)
    if config.dtype == NF4:
        require_nf4(device, adapter=rank is not None)
    # A large model is trained in bfloat16 if the device computes it fast, even if all weights are trained:
    # the optimizer steps float32 copies.
    dtype = choose_dtype(
        config.dtype,
        device,
        trained_whole=rank is None and shape.parameters <= LORA_FROM_PARAMETERS,
        adapter=rank is not None,
        kind=kind,
    )
    name = config.dtype if config.dtype == NF4 else dtype_name(dtype)
    return dtype, make_plan(shape, name, rank, free, _on(device, work))


def _on(device: torch.device, work: Workload) -> Workload:
    """Return the part of the work that uses the device's memory.

    With CUDA, the copy of the start's weights is in main memory instead.
    """
    return replace(work, start_copy=work.start_copy and device.type != "cuda", on_cpu=device.type == "cpu")


def _too_large(fit: Fit) -> str:
    plan = fit.plan
    method = f"a LoRA adapter of rank {plan.lora_rank}" if plan.lora_rank else "all weights"
    would = next(_alternatives(fit), None)
    return (
        f"not enough memory for {fit.source}: training {method} in {plan.dtype} takes at least"
        f" {bytes_words(plan.least)}, and {fit.device} has {bytes_words(plan.free)} free, of which"
        f" {bytes_words(plan.usable)} are usable. Close other programs"
        + (
            f", or use the largest option that would fit: {would}."
            if would
            else "; no known model would fit."
        )
    )


def _lora_rank(config: ModelConfig, shape: Shape) -> int | None:
    on = config.lora == "on" or (config.lora == "auto" and shape.parameters > LORA_FROM_PARAMETERS)
    return config.lora_rank if on else None


def _alternatives(fit: Fit) -> Iterator[str]:
    """Yield descriptions of fitting choices: this model with few changes, then smaller models."""
    plan, work = fit.plan, _on(fit.device, fit.work)
    # bitsandbytes is not supported on MPS.
    has_bits = fit.device.type != "mps"
    rank_there = plan.lora_rank or ModelConfig().lora_rank
    ways = dict.fromkeys(
        (
            (plan.lora_rank, work.optimizer),
            *[(plan.lora_rank, "adamw8bit")] * has_bits,
            (rank_there, work.optimizer),
        )
    )
    lengths = dict.fromkeys((work.new_tokens, *(n for n in (128, 64) if n < work.new_tokens)))
    # nf4 needs an adapter. An adapter in bfloat16 is tried before, and training all weights takes more than
    # that.
    dtypes = dict.fromkeys((plan.dtype, "bfloat16", *[NF4] * has_bits))
    copies = dict.fromkeys((work.start_copy, False))
    for dtype, length, (rank, kind), copy in product(dtypes, lengths, ways, copies):
        changed = replace(work, new_tokens=length, micro_batch_tokens=0, optimizer=kind, start_copy=copy)
        if make_plan(fit.shape, dtype, rank, plan.free, changed).fits:
            changes = {
                f"train.optimizer = '{kind}'": kind != work.optimizer,
                f"model.lora = 'on' (rank {rank})": rank != plan.lora_rank,
                f"generate.max_new_tokens = {length}": length != work.new_tokens,
                f"model.dtype = '{dtype}'": dtype != plan.dtype,
                "train.kl_every = 0": copy != work.start_copy,
            }
            yield f"this model with {' and '.join(words for words, needed in changes.items() if needed)}"
    for name, shape in NAMED.items():
        its_work = replace(
            work, micro_batch_tokens=0, new_tokens=NEW_TOKENS_TINY if name in TINY else work.new_tokens
        )
        rank = _lora_rank(ModelConfig(lora_rank=rank_there), shape)
        smaller = shape.parameters < fit.shape.parameters
        if smaller and make_plan(shape, plan.dtype, rank, plan.free, its_work).fits:
            # If the larger model has no adapter, the configuration has LoRA switched off.
            yield f"--model {name}" + (" with model.lora = 'on'" if rank and not plan.lora_rank else "")
