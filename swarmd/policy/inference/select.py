"""Selects and opens the inference engine that `generate.engine` names."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from swarmd.config.config import NodeConfig
from swarmd.policy.inference import benchmark
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
from swarmd.policy.models.load import Loaded
from swarmd.policy.training.losses import LOSSES
from swarmd.state.logs import installed_version

log = logging.getLogger(__name__)

NO_LIMIT: Final = 2**30  # context of a model that names none


def open_engine(
    config: NodeConfig, loaded: Loaded, sampling: Sampling, memory_file: Path | None = None
) -> InferenceEngine:
    """Open the configured inference engine.

    auto: on CUDA the quicker of the built-in ones, tried out once and remembered in `memory_file` (default:
        `benchmark.cache_file`); elsewhere `own`, which continuous batching was never quicker than.

    Raises NoEngine and EngineFailed.
    """
    name, tokens = config.generate.engine, loaded.plan.cache_tokens
    if name == "auto" and loaded.device.type == "cuda":
        return quickest(loaded, sampling, tokens, memory_file or benchmark.cache_file())
    if name in ("auto", "own"):
        return OwnEngine(loaded.network, tokens)
    if name == "continuous":
        return ContinuousEngine(loaded.network, tokens)
    return open_plugin(name, _asked(config, loaded, sampling))


def quickest(loaded: Loaded, sampling: Sampling, tokens: int, memory_file: Path) -> InferenceEngine:
    """Return the quickest of the built-in engines on this device."""
    engines: dict[str, InferenceEngine] = {"own": OwnEngine(loaded.network, tokens)}
    try:
        engines["continuous"] = ContinuousEngine(loaded.network, tokens)
    except NoEngine as error:
        log.debug("left out: %s", error)
    if len(engines) == 1:
        return engines["own"]
    network: Any = loaded.network
    vocabulary = network.get_input_embeddings().num_embeddings
    measured = partial(
        benchmark.measure,
        vocabulary=vocabulary,
        sampling=sampling,
        device=loaded.device,
        clock=time.perf_counter,
    )
    conditions = benchmark.conditions(loaded.device, loaded.fingerprint, loaded.dtype, installed_version())
    return engines[benchmark.pick(engines, conditions, memory_file, measured)]


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
        context=sampling.context if sampling.context < NO_LIMIT else None,
        url=generate.engine_url,
        python=generate.engine_python,
        memory=generate.engine_memory,
        start_seconds=generate.engine_start_seconds,
        arguments=generate.engine_args,
    )
