"""Report whether models fit this machine: `swarmd doctor model` for one, `swarmd models` for the named ones.

The report has the memory plan, disk space and seconds per round, as text and as JSON. No weights are
downloaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from huggingface_hub import try_to_load_from_cache
from torch.utils.benchmark import Timer

from swarmd.config.config import NodeConfig
from swarmd.policy.models.chat import Chat
from swarmd.policy.models.device import (
    LORA_FROM_PARAMETERS,
    SLOW_AT_BF16,
    choose_device,
    dtype_name,
    free_memory,
    quick_at_bf16,
    use_threads,
)
from swarmd.policy.models.fit import (
    NAMED,
    Fit,
    FittedModel,
    fit,
    plan_on,
    spelled_out,
    work_of,
)
from swarmd.policy.models.hub import REPOSITORIES
from swarmd.policy.models.memory_plan import ITEMSIZE, PACKED, Plan, Shape, Workload
from swarmd.terminal import bytes_words, printable

SCHEMA = 1
# Memory of interpreter and libraries in the daemon, the trainer and the verifier, measured with the model
# tiny.
PROGRAM_BYTES: Final = 700_000_000


def document(fit: FittedModel, seconds: float) -> dict[str, Any]:
    """Return the findings of `swarmd doctor model` for programs.

    seconds: estimated duration of a round. `memory` (of the device; on CPU and MPS including the program's
    processes), `least`, `peak`, `expected`, `free` and the items' `bytes` are bytes; budgets are tokens.
    """
    return {
        "schema": SCHEMA,
        "model": fit.source,
        "revision": fit.place.revision,
        "device": str(fit.device),
        "parameters": fit.shape.parameters,
        "fits": fit.plan.fits,
        "message": fit.refusal,
        "memory": expected_memory(fit),
        "seconds_a_round": _two_digits(seconds),
        "ends": _ends(fit.chat) if fit.chat else [],
        "notes": list(fit.notes),
        "work": asdict(fit.work),
        "plan": asdict(fit.plan),
    }


def explain(fit: FittedModel, seconds: float) -> list[str]:
    """Return the same findings for people: the chosen settings, then the arithmetic."""
    plan = fit.plan
    products = (
        PACKED if plan.packed else "plain: no packed weights for this model, by this torch or in this memory"
    )
    program = f", with {bytes_words(PROGRAM_BYTES)} for the program's processes" * (fit.device.type != "cuda")
    rows = [
        ("dtype", _dtype(fit)),
        ("a round", f"about {_two_digits(seconds):g} s, with answers of full length"),
        ("trained", _trained(fit)),
        ("optimizer", plan.optimizer + (", on a float32 copy of the weights" if plan.master else "")),
        ("KL from the start", _kl(fit)),
        ("gradient checkpointing", "on" if plan.checkpointing else "off"),
        (
            "micro-batch",
            f"{plan.micro_batch_tokens:,} tokens, logits of {plan.head_tokens:,} of them at once",
        ),
        ("prompts", f"{fit.work.prompt_tokens:,} tokens at most, of the curriculum's questions"),
        (
            "answers",
            (
                f"{fit.work.new_tokens:,} new tokens; keys and values of {plan.cache_tokens:,} tokens at"
                " once, at most"
            ),
        ),
        *([("products", products)] if fit.device.type == "cpu" and plan.dtype == "bfloat16" else ()),
        *([("answers end at", " ".join(_ends(fit.chat)))] if fit.chat else ()),
        ("context", f"{plan.context:,} tokens, question and answer"),
    ]
    width = max(len(item.name) for item in plan.items)
    formulas = max(len(item.formula) for item in plan.items)
    lines = [f"{fit.source}: {fit.shape.parameters:,} parameters, on {fit.device}", ""]
    lines += [f"  {name:<24}{value}" for name, value in rows]
    for phase in ("always", "answering", "training"):
        lines += ["", f"  {phase}"]
        lines += [
            f"    {item.name:<{width}}  {item.formula:>{formulas}}  {bytes_words(item.bytes):>10}"
            for item in plan.items
            if item.phase == phase
        ]
    lines += [
        "",
        f"  a round   {bytes_words(expected_memory(fit)):>10}  with {fit.work.batch} rollouts{program}",
        f"  at most   {bytes_words(plan.peak):>10}  always, and the larger of answering and training",
        f"  at least  {bytes_words(plan.least):>10}  with one completion at a time",
        f"  free      {bytes_words(plan.free):>10}  of which {bytes_words(plan.usable)} are usable",
    ]
    notes = [*fit.notes]
    if fit.shape.context is not None and fit.work.new_tokens >= fit.shape.context:
        notes.append(
            f"Answers end with the model's context of {fit.shape.context:,} tokens, question included."
        )
    if plan.fits and plan.peak > plan.usable:
        notes.append(
            f"{plan.micro_batch_tokens:,} tokens, as train.micro_batch_tokens says, are too many: fewer will"
            " be tried."
        )
    return lines + [line for note in notes for line in ("", f"  {note}")]


def _ends(chat: Chat) -> list[str]:
    """Return the texts of the tokens that end an answer."""
    return [printable(chat.tokenizer.decode([end])) for end in sorted(chat.ends)]


def _trained(fit: Fit) -> str:
    """Describe the trained weights, and why they are an adapter's if they are."""
    plan = fit.plan
    if not plan.lora_rank:
        return "all weights"
    default = f", the default above {LORA_FROM_PARAMETERS / 1e6:.0f} M parameters"
    return (
        f"LoRA of rank {plan.lora_rank}, {plan.trained:,} weights"
        f'{default * (fit.shape.parameters > LORA_FROM_PARAMETERS)}; model.lora = "off" trains all weights'
    )


def expected_memory(fit: Fit) -> int:
    """Return the bytes that a round takes on the device; except on CUDA, with the program's processes."""
    # CUDA's memory is separate from main memory, which the processes use.
    return fit.plan.expected + PROGRAM_BYTES * (fit.device.type != "cuda")


def _kl(fit: Fit) -> str:
    """Describe the weights from which the KL divergence is measured."""
    if not fit.work.start_copy:
        return "not measured"
    if fit.plan.lora_rank:
        return "measured against the model without its adapter"
    return "measured against a copy of the weights as they were" + (
        ", in main memory" if fit.device.type == "cuda" else ""
    )


def _dtype(fit: Fit) -> str:
    """Return the data type in words, with the reason if a large model is in float32."""
    dtype = fit.plan.dtype
    if dtype != "float32" or fit.shape.parameters <= LORA_FROM_PARAMETERS or quick_at_bf16(fit.device):
        return dtype
    return f"{dtype}: {SLOW_AT_BF16[fit.device.type]}"


def examine(config: NodeConfig, free: Callable[[torch.device], int] = free_memory) -> FittedModel:
    """Find how the configured model fits. Downloads only its configuration and tokenizer.

    free: returns the free bytes of a device. Raises NoModel and Unreachable.
    """
    # Its import takes half a second, and `list_models` does not need it.
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return fit(spelled_out(config).model, work_of(config), free)


# Duration of each measurement of the device.
MEASURE_S: Final = 0.1
# Most models on the hub are stored in bfloat16.
HUB_BYTES_PER_WEIGHT: Final = 2
# A model with fewer than 60 rounds an hour is called slow: its progress is too slow to watch.
SLOW_ROUND_S: Final = 60.0
KEPT_CHECKPOINTS: Final = 2


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of a device in one data type."""

    flops: float  # floating-point operations per second, in a matrix product
    bandwidth: float  # bytes per second, read from its memory


@dataclass(frozen=True, slots=True)
class ListedModel:
    fit: Fit
    download: int  # bytes still to be fetched
    checkpoints: int  # bytes
    seconds: float  # duration of a round, estimated from the device's speed

    @property
    def rounds_an_hour(self) -> float:
        return 3600 / max(self.seconds, 1e-3)

    def document(self) -> dict[str, Any]:
        plan = self.fit.plan
        return {
            "name": self.fit.source,
            "parameters": self.fit.shape.parameters,
            "fits": plan.fits,
            "dtype": plan.dtype,
            "lora_rank": plan.lora_rank,
            "memory": {
                "expected": expected_memory(self.fit),
                "least": plan.least,
                "peak": plan.peak,
                "usable": plan.usable,
            },
            "disk": {"download": self.download, "checkpoints": self.checkpoints},
            "seconds_a_round": _two_digits(self.seconds),
            "rounds_an_hour": _two_digits(self.rounds_an_hour),
        }


def list_models(
    config: NodeConfig,
    free: Callable[[torch.device], int] = free_memory,
    speed: Callable[[torch.device, torch.dtype], DeviceSpeed] | None = None,
) -> tuple[str, list[ListedModel]]:
    """Return the device and the fits of the named models on it, smallest model first.

    free: returns the free bytes of a device. Raises NoModel if the device is absent.
    """
    device = choose_device(config.model.device)
    speed, there, speeds = speed or measure_speed, free(device), dict[tuple[torch.dtype, int], DeviceSpeed]()
    listed = []
    for name, shape in NAMED.items():
        work = work_of(config.model_copy(update={"model": config.model.model_copy(update={"name": name})}))
        dtype, plan = plan_on(config.model, shape, device, there, work)
        use_threads(config, device, shape.parameters)
        if (way := (dtype, torch.get_num_threads())) not in speeds:
            speeds[way] = speed(device, dtype)
        found = Fit(source=name, shape=shape, device=device, dtype=dtype, work=work, plan=plan)
        fetched = name not in REPOSITORIES or isinstance(
            try_to_load_from_cache(REPOSITORIES[name], "model.safetensors"), str
        )
        download = 0 if fetched else HUB_BYTES_PER_WEIGHT * shape.parameters
        listed.append(
            ListedModel(found, download, _checkpoints(plan), estimate(shape, plan, work, speeds[way]))
        )
    return str(device), listed[::-1]


def round_seconds(config: NodeConfig, fit: Fit) -> float:
    """Estimate the seconds of a round of this fit, from a measurement of the device's speed."""
    use_threads(config, fit.device, fit.shape.parameters)
    return estimate(fit.shape, fit.plan, fit.work, measure_speed(fit.device, fit.dtype))


def estimate(shape: Shape, plan: Plan, work: Workload, speed: DeviceSpeed) -> float:
    """Estimate the seconds of a round with answers of full length.

    Operations per token and weight: two for the forward pass, four more for training. An adapter saves two of
    these (the base's weight gradients), and gradient checkpointing costs two more. A decoding step reads all
    weights once for all answers. Attention, sampling and the verifier are ignored.
    """
    work = work.within(shape.context)
    weights, rows = shape.parameters, work.questions * work.completions
    prefill = 2 * weights * work.questions * work.mean_prompt_tokens / speed.flops
    step = max(2 * weights * rows / speed.flops, weights * ITEMSIZE[plan.dtype] / speed.bandwidth)
    operations = 6 - 2 * (plan.lora_rank is not None) + 2 * plan.checkpointing
    return (
        prefill + work.new_tokens * step + operations * weights * work.batch * work.mean_rollout / speed.flops
    )


def measure_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """Measure a device's speed; each of the two figures takes a tenth of a second."""
    side, size = 512 if device.type == "cpu" else 4096, 2**26
    square, long = (
        torch.ones(shape, dtype=dtype, device=device)
        for shape in ((side, side), (size // ITEMSIZE[dtype_name(dtype)],))
    )
    return DeviceSpeed(2 * side**3 / _seconds(lambda: square @ square), size / _seconds(long.sum))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Return the shortest time among the runs in MEASURE_S seconds, after the libraries' set-up."""
    # Reading a number waits for the device to finish.
    timer = Timer("work().reshape(-1)[0].item()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=MEASURE_S).times)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _checkpoints(plan: Plan) -> int:
    """Return the bytes of all kept checkpoints: trained weights, Adam's two moments, float32 copies."""
    moments = 2 * (1 if plan.optimizer == "adamw8bit" else 4) + 4 * plan.master
    return KEPT_CHECKPOINTS * plan.trained * ((4 if plan.lora_rank else ITEMSIZE[plan.dtype]) + moments)


def lines(device: str, models: Sequence[ListedModel]) -> list[str]:
    """Format the models for people: one per line, then a legend."""
    rows = [("MODEL", "WEIGHTS", "MEMORY", "DISK", "A ROUND", "HERE")]
    for model in models:
        plan, size = model.fit.plan, model.fit.shape.parameters
        weights = f"{size / 1e9:.1f} B" if size >= 1e9 else f"{size / 1e6:.1f} M"
        rounds = f"slow: {_two_digits(model.rounds_an_hour):g} an hour" * (model.seconds > SLOW_ROUND_S)
        fits = (rounds or "yes") + ", LoRA" * bool(plan.lora_rank)
        rows.append(
            (
                model.fit.source,
                weights,
                bytes_words(expected_memory(model.fit)),
                bytes_words(model.download + model.checkpoints),
                f"~{_two_digits(model.seconds):g} s",
                fits if plan.fits else f"no, {bytes_words(plan.usable)} usable",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        "",
        (
            f"On {device}. Memory: of a round with answers of full length, with all processes; with less"
            " free, rounds are slower. Disk: the remaining download, and"
            f" {KEPT_CHECKPOINTS} checkpoints. A round: estimated from this machine's speed, with answers of"
            " full length. Slow: the number of rounds an hour. LoRA: trains an adapter instead of the"
            " weights."
        ),
        (
            "`swarmd doctor model --model NAME` shows the plan; other models: a repository of the hub, or a"
            " folder."
        ),
    ]
