"""The interface of inference engines, which turn prompts into samples (docs/engines.md).

The engine `own` is built in and uses the trainer's network. Other engines are separate packages, found by
their entry point in the group `swarmd.engines`: a callable that takes `EngineOptions` and returns an
`InferenceEngine`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol

import torch

from swarmd.errors import SwarmdError
from swarmd.policy.inference.decode import Sample, Sampling

__all__ = [
    "GROUP",
    "EngineFailed",
    "EngineOptions",
    "InferenceEngine",
    "NoEngine",
    "Sample",
    "Sampling",
    "Weights",
    "checked",
    "draw_seed",
    "open_plugin",
]

GROUP: Final = "swarmd.engines"
OWN: Final = "own"
# The default of train.importance_cap for engines other than `own`: the cap C of truncated importance sampling
# that is usual between vLLM and a trainer (Yao et al. 2025, "Your efficient RL framework secretly brings you
# off-policy RL training"). Measurements with replay gave the same value (docs/performance.md).
DEFAULT_CAP: Final = 2.0
# The largest log-probability above 0 that is accepted as a rounding error.
_SLACK: Final = 1e-3


class NoEngine(SwarmdError):
    """The engine cannot be used.

    Set generate.engine to "own", or install and configure the one you want (docs/engines.md).
    """

    exit_code = 3


class EngineFailed(SwarmdError):
    """The engine failed. Join again; if it comes back, set generate.engine to "own"."""

    exit_code = 3


class Weights(Protocol):
    """The policy's weights at the moment of the call. Valid only during `InferenceEngine.sync`."""

    @property
    def version(self) -> int:
        """The number of updates that led to the weights. It rises, except when a run is resumed."""

    @property
    def lora_rank(self) -> int | None:
        """The adapter's rank; None if all weights are trained, so that there is no adapter to write."""

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter in peft's format into an existing folder.

        Raises OSError.
        """

    def write_model(self, folder: Path) -> None:
        """Write the whole model in transformers' format into an existing folder, without a tokenizer.

        An adapter is folded in, in float32. Raises OSError.
        """


class InferenceEngine(Protocol):
    """Turns prompts into samples of the policy. Called from one thread; every method blocks.

    Log-probabilities are natural logarithms, of the distribution that each token was drawn from:
    softmax(logits / temperature) over the whole vocabulary, without truncation or penalties; at temperature 0
    (greedy), of softmax(logits). They differ a little from the trainer's log-probabilities, since other
    kernels round differently; truncated importance weights correct for this (`train.importance_cap`). So an
    engine must return the log-probabilities that it sampled with, neither recomputed nor rounded.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, generator: torch.Generator
    ) -> list[list[Sample]]:
        """Draw `copies` samples of each prompt, in order, with the weights of the last `sync`.

        A prompt that fills the context gets empty samples.

        generator: the source of all randomness (`draw_seed`); greedy decoding draws nothing from it.

        Raises EngineFailed, and NoModel if memory runs out.
        """

    def sync(self, weights: Weights) -> None:
        """Answer with these weights from now on. Raises EngineFailed.

        Called before the first `generate` and after every change of the weights.
        """

    def sleep(self) -> None:
        """Free the device's memory for an update, as far as possible. Raises EngineFailed."""

    def wake(self) -> None:
        """Take the memory back. Called before `sync` and `generate` if `sleep` was called."""

    def close(self) -> None:
        """End everything that the engine started. Never raises; may be called again."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that an engine of another package is built from."""

    model: Path  # the base model's folder: configuration, tokenizer and weights
    device: str  # cpu, cuda or mps
    dtype: str  # float32, bfloat16 or float16
    lora_rank: int | None  # None: all weights are trained
    # Maximum number of tokens of prompt and answer together; None: the model names no limit.
    context: int | None
    url: str = ""  # URL of a running server; "": the engine starts one
    python: str = ""  # the interpreter of the engine's own environment
    memory: float = 0.4  # the share of the device's memory that it may use
    start_seconds: float = 600.0  # timeout for its start
    arguments: tuple[str, ...] = ()  # further arguments for the server that it starts


def open_plugin(name: str, asked: EngineOptions) -> InferenceEngine:
    """Open the engine that an installed package offers under this name.

    Raises NoEngine with cause and remedy.
    """
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        raise NoEngine(
            f"generate.engine is {name!r}, and no such engine is installed. There are:"
            f" {', '.join((OWN, *sorted(offered)))}. Choose one of them, or install its"
            ' package (for "vllm": swarmd-engine-vllm) into the environment of swarmd.'
        )
    point = offered[name]
    try:
        engine: InferenceEngine = point.load()(asked)
    except SwarmdError:
        raise
    except Exception as error:
        # The package's code may raise anything during import or construction; the operator sees the cause.
        package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
        raise NoEngine(
            f"the engine {name!r}{package} cannot be loaded ({type(error).__name__}: {error}). "
            'Install the package again, or set generate.engine to "own".'
        ) from error
    return engine


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed below 2**62, for an engine with its own random generator."""
    return int(torch.randint(2**62, (1,), generator=generator, device=generator.device))


def checked(
    answers: Sequence[Sequence[Sample]],
    prompts: Sequence[Sequence[int]],
    copies: int,
    sampling: Sampling,
    vocabulary: int,
) -> list[list[Sample]]:
    """Return an engine's answers if they are valid.

    Raises EngineFailed if they are not.
    """
    wrong = (
        ""
        if [len(a) for a in answers] == [copies] * len(prompts)
        else f"not {copies} answers to each of {len(prompts)} prompts"
    )
    for i, (prompt, samples) in enumerate(zip(prompts, answers, strict=False)):
        room = sampling.room(i, prompt)
        wrong = wrong or next(
            (why for sample in samples if (why := _fault(sample, room, sampling.ends, vocabulary))), ""
        )
    if wrong:
        raise EngineFailed(
            f"the engine returned {wrong}. Upgrade the engine and its swarmd package, or set generate.engine"
            ' to "own".'
        )
    return [list(samples) for samples in answers]


def _fault(sample: Sample, room: int, ends: frozenset[int], vocabulary: int) -> str:
    faults: Mapping[str, bool] = {
        f"more than {room} tokens": len(sample.ids) > room,
        "different numbers of tokens and log-probabilities": len(sample.ids) != len(sample.logprobs),
        "tokens that the model does not have": not all(0 <= i < vocabulary for i in sample.ids),
        "invalid log-probabilities": not all(math.isfinite(p) and p <= _SLACK for p in sample.logprobs),
        "tokens after the end of an answer": any(i in ends for i in sample.ids[:-1]),
        "a sample whose `ended` does not match its last token": (
            sample.ended != (bool(sample.ids) and sample.ids[-1] in ends)
        ),
    }
    return next((what for what, there in faults.items() if there), "")
