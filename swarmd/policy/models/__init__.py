"""Loading a model: hub, architecture, tokenizer, chat template, LoRA, device, memory plan."""

from swarmd.config.hub_access import fault_of

try:
    # It reads its variables now, and so for all that import it later, as transformers does.
    import huggingface_hub.constants  # noqa: F401
except ValueError as error:
    raise fault_of("the model", error, "correct them") from error
