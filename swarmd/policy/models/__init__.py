"""Loading a model: hub, architecture, tokenizer, chat template, LoRA, device, memory plan."""

import os

from swarmd.config.hub_access import HUB, fault_of
from swarmd.errors import SwarmdError

# The fault of a variable that the hub's library cannot read. Only a model of the hub needs it.
hub_fault: SwarmdError | None = None
try:
    # It reads its variables now, and so for all that import it later, as transformers does.
    import huggingface_hub.constants
except ValueError as error:
    hub_fault = fault_of("the model", error, "correct them")
    kept = {name: os.environ.pop(name) for name in HUB if name in os.environ}
    import huggingface_hub.constants  # noqa: F401

    # A process that this one starts is to find the same fault.
    os.environ.update(kept)
