"""Validates a model's config.json before transformers reads it.

Sizes are bounded, and settings that are ours are removed. No torch.

The file came with the model. transformers would build as many layers as it asks for, and load an attention
from the hub that it names; a file like that costs us a message.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from swarmd.config.messages import key_name, shown
from swarmd.errors import NoModel

MAX_BYTES: Final = 2**22
MOST_LAYERS: Final = 512  # the largest models have some 130
LARGEST_SIZE: Final = 2**22  # of a width, a number of heads, a vocabulary
# Parts of keys' names
OURS: Final = ("attn_implementation", "experts_implementation", "use_kernels", "kernel_config")


def read_config_json(folder: Path, source: str) -> dict[str, Any]:
    """Read a model's config.json, without the keys that name an implementation.

    Raises NoModel where it is no such file, or describes a model too large to be built.
    """
    try:
        with (folder / "config.json").open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise NoModel(
                f"the config.json of {source} has more than {MAX_BYTES:,} bytes: it is no model's. Choose"
                " another model."
            )
        document = json.loads(text)
    except OSError as error:
        raise NoModel(
            f"the config.json of {source} cannot be read: {error.strerror or error}. Mend its permissions."
        ) from None
    except (ValueError, RecursionError):
        # Not UTF-8 or not JSON; numbers of thousands of digits; lists nested thousands deep
        raise not_json(source) from None
    if not isinstance(document, dict):
        raise not_json(source)
    for section in _sections(document):
        if section.get("quantization_config"):
            raise NoModel(
                f"the weights of {source} are quantised, and cannot be trained. Choose the model that they"
                " were made from."
            )
        for key in [key for key in section if any(part in key for part in OURS)]:
            del section[key]
        for key, value in section.items():
            limit = _limit(key)
            if limit is not None and isinstance(value, int | float) and value > limit:
                asked = f"{key_name(key)} = {shown(value)}"
                raise NoModel(
                    f"the config.json of {source} has {asked}; more than {limit:,} is not built. Choose"
                    " another model."
                )
    return document


def not_json(source: str) -> NoModel:
    return NoModel(f"the config.json of {source} is not a JSON object. Download the model again.")


def _sections(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document and every object inside it."""
    waiting: list[Any] = [document]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _limit(key: str) -> int | None:
    """Return the largest value that a number of this name may have, or None for no limit."""
    if "layer" in key:
        return MOST_LAYERS
    return (
        LARGEST_SIZE
        if any(
            part in key for part in ("size", "dim", "width", "heads", "n_head", "n_embd", "experts", "depth")
        )
        else None
    )
