"""Select and open the inference engine that `generate.engine` names."""

import atexit
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from swarmd.config.config import NodeConfig
from swarmd.policy.inference.decode import Sampling
from swarmd.policy.inference.engine import (
    DEFAULT_CAP,
    OWN,
    EngineOptions,
    InferenceEngine,
    NoEngine,
    open_plugin,
)
from swarmd.policy.inference.own_engine import OwnEngine
from swarmd.policy.models import hub
from swarmd.policy.models.device import dtype_name
from swarmd.policy.models.files.model_folder import checked_folder
from swarmd.policy.models.load import Loaded
from swarmd.policy.models.lora import NF4
from swarmd.policy.training.losses import LOSSES

log = logging.getLogger(__name__)

# Stands for the context of a model that names no limit.
NO_LIMIT_TOKENS: Final = 2**30


def open_engine(
    config: NodeConfig,
    loaded: Loaded,
    sampling: Sampling,
    rest: Callable[[], object] = lambda: None,
    between: Callable[[], int] | None = None,
) -> OwnEngine | InferenceEngine:
    """Open the configured inference engine. Raises NoEngine and EngineFailed."""
    generate = config.generate
    if generate.engine == OWN:
        plan = loaded.plan
        return OwnEngine(loaded.network, plan.cache_tokens, rest, between, packed=plan.packed)
    if loaded.plan.dtype == NF4:
        raise NoEngine(
            f"generate.engine = {generate.engine!r} cannot answer with weights in 4 bits (model.dtype ="
            " 'nf4'). Set generate.engine to \"own\", or model.dtype to 'bfloat16'."
        )
    # The folder with links to the model's permitted files exists as long as this process.
    stack = ExitStack()
    atexit.register(stack.close)
    folder = hub.with_weights(hub.locate(loaded.source, loaded.place.revision))
    asked = EngineOptions(
        model=stack.enter_context(checked_folder(folder, loaded.source, weights=True)),
        device=loaded.device.type,
        dtype=dtype_name(loaded.dtype),
        lora_rank=loaded.plan.lora_rank,
        context=sampling.context if sampling.context < NO_LIMIT_TOKENS else None,
        url=generate.engine_url,
        python=generate.engine_python,
        memory=generate.engine_memory,
        start_seconds=generate.engine_start_seconds,
        arguments=generate.engine_args,
    )
    return open_plugin(generate.engine, asked)


def importance_cap(config: NodeConfig) -> float:
    """Return train.importance_cap, or its default: DEFAULT_CAP if another policy drew the answers, else 0.

    Another policy is a foreign engine's, or with replay an older one. The default is 0 if the loss has no
    ratio.
    """
    if config.train.importance_cap is not None:
        return config.train.importance_cap
    foreign = config.generate.engine != OWN
    if not LOSSES[config.train.loss].uses_ratio or not (foreign or config.replay.mode == "on"):
        return 0.0
    if foreign:
        log.info(
            "answers come from another implementation than the trainer's (%s): importance weights of at most"
            " %g make up for the difference (train.importance_cap)",
            config.generate.engine,
            DEFAULT_CAP,
        )
    return DEFAULT_CAP
