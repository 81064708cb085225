"""Loads models: hub, architecture, tokenizer, chat template, LoRA, device, memory plan."""

import os

from swarmd.config.hub_access import HUB, fault_of
from swarmd.errors import SwarmdError

# Set if the hub's library cannot read an environment variable. Only a model of the hub needs this library.
hub_fault: SwarmdError | None = None
try:
    # The library reads its variables at its first import; later imports, as by transformers, reuse the
    # result.
    import huggingface_hub.constants
except ValueError as error:
    hub_fault = fault_of("the model", error, "correct them")
    kept = {name: os.environ.pop(name) for name in HUB if name in os.environ}
    import huggingface_hub.constants  # noqa: F401

    # The variables are restored, so that a child process finds the same fault.
    os.environ.update(kept)
