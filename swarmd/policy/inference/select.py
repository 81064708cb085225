"""Selects and opens the inference engine that `generate.engine` names.

Where it is "auto", a benchmark finds this device's quickest by a small real round, and caches what it found.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from platformdirs import user_cache_path

from p2p import durable
from swarmd.config.config import NodeConfig
from swarmd.errors import SwarmdError
from swarmd.policy.inference.continuous import ContinuousEngine
from swarmd.policy.inference.decode import Sampling
from swarmd.policy.inference.engine import (
    BUILT_IN,
    FOREIGN_CAP,
    EngineOptions,
    InferenceEngine,
    NoEngine,
    open_plugin,
)
from swarmd.policy.inference.own import OwnEngine
from swarmd.policy.models import hub
from swarmd.policy.models.device import dtype_name, seeded
from swarmd.policy.models.hub import first_line
from swarmd.policy.models.load import Loaded
from swarmd.policy.models.lora import NF4
from swarmd.policy.training.losses import LOSSES
from swarmd.state.logs import installed_version

log = logging.getLogger(__name__)

# The context of a model that names none.
NO_LIMIT_TOKENS: Final = 2**30
SCHEMA: Final = 1
# Timed rounds of each engine; the better counts. One more, not timed, comes first.
ROUNDS: Final = 2
# An engine replaces the first only if it takes at most this share of its time.
MARGIN: Final = 0.9
COPIES: Final = 8
NEW_TOKENS: Final = 64
# The lengths of eight ReasoningGYM questions in a chat.
PROMPT_TOKENS: Final = (81, 95, 108, 117, 130, 152, 180, 225)


@dataclass(frozen=True, slots=True)
class Conditions:
    """Cache key of a choice: a change of any of these triggers a new benchmark."""

    device: str  # the device's name
    torch: str
    transformers: str
    swarmd: str
    model: str  # fingerprint of the base weights
    dtype: str

    @property
    def key(self) -> str:
        return " | ".join(asdict(self).values())


def conditions_of(device: torch.device, fingerprint: str, dtype: torch.dtype, swarmd: str) -> Conditions:
    """Return the conditions of this machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Conditions(
        name, torch.__version__, transformers.__version__, swarmd, fingerprint, dtype_name(dtype)
    )


def choose(seconds: Mapping[str, float | None]) -> str:
    """Return the quickest engine.

    seconds: of engines by name, in order of preference; None where one failed. The first keeps its place
    against one that is hardly quicker: a measurement has noise, and the first is better tested. If all failed
    it is the first, which will say why.
    """
    first = next(iter(seconds))
    took = {name: s for name, s in seconds.items() if s is not None and math.isfinite(s)}
    if not took:
        return first
    best = min(took, key=lambda name: took[name])
    return first if first in took and took[best] > MARGIN * took[first] else best


def cache_file() -> Path:
    """Return the file of remembered choices: `~/.cache/swarmd/engines.json` on Linux (XDG, platformdirs)."""
    return user_cache_path("swarmd", appauthor=False) / "engines.json"


def recall(file: Path, asked: Conditions, names: Sequence[str]) -> str | None:
    """Return the engine chosen before under these conditions, if it is in `names` and can be read."""
    entry = _entries(file).get(asked.key)
    engine = entry.get("engine") if isinstance(entry, dict) else None
    return engine if isinstance(engine, str) and engine in names else None


def remember(file: Path, asked: Conditions, engine: str, seconds: Mapping[str, float | None]) -> None:
    """Store the choice of an engine.

    A file that cannot be written is logged, and the next start measures again.
    """
    entries = {**_entries(file), asked.key: {"engine": engine, "seconds": dict(seconds)}}
    try:
        durable.replace(file, json.dumps({"schema": SCHEMA, "choices": entries}, indent=1).encode(), 0o666)
    except OSError as error:
        log.warning(
            "the choice of an engine cannot be kept in %s (%s): it is measured again at the next start",
            file,
            error,
        )


def _entries(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The file is missing or damaged: measure anew and overwrite it.
        return {}
    choices = (
        document.get("choices") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    )
    return choices if isinstance(choices, dict) else {}


def measure(
    engines: Mapping[str, InferenceEngine],
    vocabulary: int,
    sampling: Sampling,
    device: torch.device,
    clock: Callable[[], float],
) -> dict[str, float | None]:
    """Measure the seconds of a small round with each engine, in turns; None for one that fails.

    It uses random numbers of its own.
    """
    source, longest = seeded(torch.device("cpu"), 0), max(1, sampling.context // 2)
    prompts = [
        torch.randint(vocabulary, (min(n, longest),), generator=source).tolist() for n in PROMPT_TOKENS
    ]
    # No answer ends before its time, so that all engines do the same work.
    asked = Sampling(
        max(1, min(NEW_TOKENS, sampling.limit)),
        sampling.context,
        frozenset({vocabulary}),
        sampling.temperature,
    )
    best: dict[str, float | None] = dict.fromkeys(engines, math.inf)
    for attempt in range(1 + ROUNDS):
        for name, engine in engines.items():
            so_far = best[name]
            if so_far is None:
                continue
            begun = clock()
            try:
                engine.generate(prompts, COPIES, asked, seeded(device, attempt))
            except (SwarmdError, RuntimeError) as error:
                # The engine is left out, and the log says so.
                log.warning(
                    "the engine %s failed while it was tried out, and is left out: %s",
                    name,
                    first_line(error),
                )
                best[name] = None
                continue
            if attempt:
                best[name] = min(so_far, clock() - begun)
    return best


def pick(
    engines: Mapping[str, InferenceEngine],
    asked: Conditions,
    file: Path,
    measured: Callable[[Mapping[str, InferenceEngine]], Mapping[str, float | None]],
) -> str:
    """Return the engine to use: the remembered one, else the quickest as `measured` now."""
    known = recall(file, asked, list(engines))
    if known is not None:
        return known
    seconds = measured(engines)
    chosen = choose(seconds)
    remember(file, asked, chosen, seconds)
    shown = ", ".join(f"{name} {'failed' if s is None else f'{s:.2f} s'}" for name, s in seconds.items())
    log.info("answers come from the engine %s: a small round took %s", chosen, shown)
    return chosen


def open_engine(
    config: NodeConfig,
    loaded: Loaded,
    sampling: Sampling,
    memory_file: Path | None = None,
    rest: Callable[[], object] = lambda: None,
    between: Callable[[], int] | None = None,
) -> InferenceEngine:
    """Open the configured inference engine. Raises NoEngine and EngineFailed.

    With "auto" it is on CUDA the quicker of the built-in ones, tried out once and remembered in `memory_file`
    (default: `cache_file`); elsewhere it is `own`, which continuous batching was never quicker than.
    """
    name, tokens = config.generate.engine, loaded.plan.cache_tokens
    if name == "auto":
        tried = loaded.device.type == "cuda"
        name = quickest(loaded, sampling, tokens, memory_file or cache_file()) if tried else "own"
    if name == "own":
        return OwnEngine(loaded.network, tokens, rest, between)
    if name == "continuous":
        return ContinuousEngine(loaded.network, tokens, rest)
    if loaded.plan.dtype == NF4:
        raise NoEngine(
            f"{name} would answer with other weights than the base in 4 bits that is trained. Set"
            " generate.engine to \"auto\", or model.dtype to 'bfloat16'."
        )
    return open_plugin(name, _asked(config, loaded, sampling))


def quickest(loaded: Loaded, sampling: Sampling, tokens: int, memory_file: Path) -> str:
    """Return the name of the quickest of the built-in engines on this device."""
    engines: dict[str, InferenceEngine] = {"own": OwnEngine(loaded.network, tokens)}
    try:
        engines["continuous"] = ContinuousEngine(loaded.network, tokens)
    except NoEngine as error:
        log.debug("left out: %s", error)
    if len(engines) == 1:
        return "own"
    network: Any = loaded.network
    vocabulary = network.get_input_embeddings().num_embeddings
    measured = partial(
        measure,
        vocabulary=vocabulary,
        sampling=sampling,
        device=loaded.device,
        clock=time.perf_counter,
    )
    conditions = conditions_of(loaded.device, loaded.fingerprint, loaded.dtype, installed_version())
    return pick(engines, conditions, memory_file, measured)


def importance_cap(config: NodeConfig) -> float:
    """Return train.importance_cap, or its default: FOREIGN_CAP if another implementation answers, else 0.

    The default is 0 with replay, whose guard needs the clip: there the clip alone bounds what a difference
    can do. It is 0 with a loss without ratios, too.
    """
    if config.train.importance_cap is not None:
        return config.train.importance_cap
    foreign = config.generate.engine not in ("auto", *BUILT_IN)
    if not foreign or config.replay.mode == "on" or not LOSSES[config.train.loss].uses_ratio:
        return 0.0
    log.info(
        "answers come from another implementation than the trainer's (%s): importance weights of at most %g"
        " make up for the difference (train.importance_cap)",
        config.generate.engine,
        FOREIGN_CAP,
    )
    return FOREIGN_CAP


def _asked(config: NodeConfig, loaded: Loaded, sampling: Sampling) -> EngineOptions:
    generate = config.generate
    return EngineOptions(
        model=hub.with_weights(hub.locate(loaded.source, loaded.revision)).resolve(),
        device=loaded.device.type,
        dtype=str(loaded.dtype).removeprefix("torch."),
        lora_rank=loaded.lora_rank,
        context=sampling.context if sampling.context < NO_LIMIT_TOKENS else None,
        url=generate.engine_url,
        python=generate.engine_python,
        memory=generate.engine_memory,
        start_seconds=generate.engine_start_seconds,
        arguments=generate.engine_args,
    )
