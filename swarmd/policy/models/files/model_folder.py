"""Check the files of an untrusted model, and give libraries only the files that passed.

transformers obeys a folder's files: an index may name pickles or files elsewhere, an adapter in the folder is
attached, and a configuration may name further files or code. So no library ever reads a model's folder.
Libraries read a private folder (`checked_folder`) with links to the permitted files and our own copies of the
JSON files, without keys that lead elsewhere.

A config.json could also demand any number of layers, so sizes are checked before transformers reads it. This
module does not import torch.
"""

import json
import math
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgspec

from swarmd.config.messages import key_name, shown
from swarmd.errors import NoModel
from swarmd.policy.models.tiny import WEIGHTS as TINY
from swarmd.terminal import printable

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter_config.json"
TOKENIZER_FILES: Final = (
    "tokenizer*.json", "*.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template*.j*",
)  # fmt: skip
# The permitted files, except the weights.
SMALL_FILES: Final = ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES)
# A file name without a folder, and without characters that are special in the hub's patterns.
_SHARD: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.safetensors")
# Large tokenizers have 40 MB; the indexes of the largest models have 10 MB.
MAX_SMALL_BYTES: Final = 2**27
MAX_JSON_BYTES: Final = 2**24
# The header of a file with 100,000 tensors has 12 MB.
MAX_HEADER_BYTES: Final = 2**25
# The largest models have about 130 layers.
MAX_LAYERS: Final = 512
# Maximum of a width, a number of heads, or a vocabulary.
MAX_SIZE: Final = 2**22
_SIZES: Final = re.compile(r"size|dim|width|heads|n_head|n_embd|experts|depth|cycles")
# Keys that contain one of these words are left out, since swarmd chooses their values. A language model has
# no labels, and transformers would create a name for each of `num_labels`.
OURS: Final = (
    "attn_implementation", "experts_implementation", "use_kernels", "kernel_config", "num_labels",
    "transformers_weights", "fusion_config", "distributed_config",
)  # fmt: skip
# Keys of a tokenizer_config.json that name files or code, or that the tokenizer's class takes unchecked.
_ELSEWHERE: Final = re.compile(r"file|auto_map|init_inputs|tokenizer_object|_spm")


class Stored(NamedTuple):
    """The file that stores a tensor, and the tensor's shape."""

    file: str
    shape: tuple[int, ...]


@contextmanager
def checked_folder(folder: Path, source: str, *, weights: bool = False) -> Iterator[Path]:
    """Make a private folder with the permitted files of a model, and remove it at the end.

    source: the model's name in messages. weights: whether to include the weights. Raises NoModel.
    """
    files = small_files(folder, source)
    documents = {"config.json": read_config_json(folder, source)}
    if "tokenizer_config.json" in files:
        documents["tokenizer_config.json"] = {
            key: value
            for key, value in _read_object(folder / "tokenizer_config.json", source).items()
            if not _ELSEWHERE.search(key)
        }
    if weights:
        tensors = {name: stored.file for name, stored in weight_map(folder, source).items()}
        files |= {name: plain_file(folder / name, source) for name in set(tensors.values())}
        if WEIGHTS not in files:
            documents[INDEX] = {"metadata": {}, "weight_map": tensors}
    try:
        made = TemporaryDirectory(prefix="swarmd-model-")
        for name, path in files.items():
            if name not in documents:
                Path(made.name, name).symlink_to(path)
        for name, document in documents.items():
            Path(made.name, name).write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise NoModel(
            f"a temporary file cannot be written ({error}). Free some space, or set TMPDIR to a folder on"
            " another disk."
        ) from error
    with made as private:
        yield Path(private)


def small_files(folder: Path, source: str, patterns: Sequence[str] = SMALL_FILES) -> dict[str, Path]:
    """Return the files that match, except the index, by name. Raises NoModel for an invalid file."""
    return {
        name: plain_file(folder / name, source, MAX_SMALL_BYTES)
        for name in sorted(path.name for path in folder.glob("*"))
        if name != INDEX and any(fnmatch(name, pattern) for pattern in patterns)
    }


def plain_file(path: Path, source: str, most: int | None = None, begins: bytes = b"") -> Path:
    """Return the path of a model's file, with links resolved.

    most: the largest permitted size in bytes. begins: the first bytes, if they are known. Raises NoModel if
    the file is not a plain file inside the model's folder.
    """
    of = f"{path.name} of {source}"
    try:
        place, root = path.resolve(strict=True), path.parent.resolve()
        found = place.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NoModel(f"{of} is not a plain file. {again(path.parent)}, or choose another model.")
        with place.open("rb") as file:
            head = file.read(40)
    except OSError as error:
        raise NoModel(
            f"{of} cannot be read: {error.strerror or error}. Correct its permissions, or choose another"
            " model."
        ) from None
    # In the hub's cache, files are links to the blobs of the same repository.
    roots = (root, (root.parents[1] / "blobs").resolve()) if root.parent.name == "snapshots" else (root,)
    if source not in TINY and not any(place.is_relative_to(inside) for inside in roots):
        raise NoModel(
            f"{of} is a link to {printable(str(place))}, outside the model's folder. Copy the file there, or"
            " choose another model."
        )
    if head.startswith(b"version https://git-lfs"):
        raise NoModel(
            f"{of} is a pointer of Git LFS, not the file itself. Run `git lfs pull` in its folder, or"
            " download the model again."
        )
    if not head.startswith(begins):
        raise NoModel(f"{of} does not begin as its format does: it is empty or damaged. Download it again.")
    if head.startswith(b"GGUF") and not begins:
        raise gguf(of)
    if most is not None and found.st_size > most:
        raise NoModel(f"{of} is too large: over {most:,} bytes. Choose another model.")
    header = int.from_bytes(head[:8], "little")
    if path.suffix == ".safetensors" and header > min(MAX_HEADER_BYTES, found.st_size):
        raise _not_whole(path, source, "its header is longer than the file, or than any model's")
    return place


def gguf(what: str) -> NoModel:
    return NoModel(
        f"{what}: a GGUF file is given by its own path on this machine. Download it first (`hf download"
        " OWNER/NAME FILE.gguf --local-dir .`), or give the safetensors model that it was made from: a"
        " folder, or a repository of the hub (owner/name, without -GGUF)."
    )


def no_model(folder: Path, source: str, missing: str) -> NoModel:
    """Return why a folder without config.json or weights cannot be used, judged by the files in it."""
    others = sorted(path.name for path in folder.glob("*"))
    named = [name for name in others if name.endswith(".safetensors")]
    if ADAPTER in others:
        base = _read_object(folder / ADAPTER, source).get("base_model_name_or_path")
        model = f", --model {printable(str(base))}," if base else ""
        return NoModel(
            f"{source} holds an adapter, not a model. Give its base model{model} to start from that, or merge"
            " the two first with peft's `merge_and_unload`."
        )
    if any(name.lower().endswith(".gguf") for name in others) or "gguf" in source.lower():
        return gguf(source)
    if missing == "config.json":
        return NoModel(
            f"{source} holds no config.json, so it is no transformers model. Give the folder that"
            " `save_pretrained` wrote, or another repository."
        )
    if named:
        return NoModel(
            f"{source} has neither {WEIGHTS} nor {INDEX}: its weights are called {printable(named[0])}."
            " Rename them in a local copy, or choose another model."
        )
    return NoModel(
        f"{source} has no weights in safetensors format. Pickled weights (.bin, .pt) can run code when"
        " they are opened and are never loaded. Choose another model, or convert them with"
        " `save_pretrained`."
    )


def again(folder: Path) -> str:
    """Return how to download a model again. The hub's cache keeps a damaged file until it is removed."""
    cached = folder.parent.name == "snapshots"
    return f"Remove {folder.parents[1]} and start again" if cached else "Download the model again"


def notes(folder: Path, source: str) -> tuple[str, ...]:
    """Return notes for the operator about files that are left out."""
    if not (folder / ADAPTER).exists():
        return ()
    return (
        f"{source} also holds an adapter, which is left out: the base weights alone are used. To train both,"
        " merge them first with peft's `merge_and_unload`.",
    )


def weight_names(folder: Path, source: str) -> tuple[str, ...]:
    """Return the names of the weights' files, from the index if there is one. Raises NoModel."""
    return tuple(sorted(set(_index(folder, source).values()))) or (WEIGHTS,)


def weight_map(folder: Path, source: str) -> dict[str, Stored]:
    """Return the file and shape of each tensor of the weights, by its name.

    Raises NoModel if a file is missing, damaged or not permitted.
    """
    index, found = _index(folder, source), dict[str, Stored]()
    if not index and not (folder / WEIGHTS).exists():
        raise no_model(folder, source, WEIGHTS)
    for name in weight_names(folder, source):
        for tensor, shape in _shapes(plain_file(folder / name, source), source).items():
            if tensor in found:
                raise _bad_index(
                    folder, source, f"{shown(tensor)} is in both {found[tensor].file} and {name}"
                )
            found[tensor] = Stored(name, shape)
    for tensor, name in index.items():
        if tensor not in found or found[tensor].file != name:
            raise _bad_index(folder, source, f"the index has {shown(tensor)} in {name}, which lacks it")
    return found


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header, without its dtype. `__metadata__` has neither field."""

    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def _shapes(path: Path, source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file, from its header.

    The library would load numpy, which takes 16 MB of the daemon's memory. It checks the file once more when
    the trainer loads it. Raises NoModel.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(length), type=dict[str, _Tensor])
    except (OSError, ValueError, RecursionError) as error:
        raise _not_whole(path, source, str(error)) from None
    end = max((tensor.data_offsets[1] for tensor in header.values()), default=0)
    if 8 + length + end != path.stat().st_size:
        raise _not_whole(path, source, "its tensors do not end where the file ends")
    return {name: tensor.shape for name, tensor in header.items() if name != "__metadata__"}


def _index(folder: Path, source: str) -> dict[str, str]:
    """Return the file name of each tensor from the index; nothing if the weights are one file."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return {}
    files = _read_object(folder / INDEX, source).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise _bad_index(folder, source, "it has no weight_map")
    for name in files.values():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise _bad_index(
                folder, source, f"it names {shown(name)}, which is no safetensors file of the folder"
            )
    return files


def _bad_index(folder: Path, source: str, why: str) -> NoModel:
    return NoModel(f"the {INDEX} of {source} is wrong: {why}. {again(folder)}, or choose another model.")


def _not_whole(path: Path, source: str, why: str) -> NoModel:
    return NoModel(
        f"the weights of {source} cannot be loaded: {path.name} is not a whole safetensors file"
        f" ({printable(why)}). {again(path.parent)}, or choose another model."
    )


def read_config_json(folder: Path, source: str) -> dict[str, Any]:
    """Read a model's config.json, without the keys that name an implementation or files.

    Raises NoModel if the file is invalid, or describes a model that is too large to build.
    """

    def checked(section: dict[str, Any]) -> dict[str, Any]:
        if section.get("quantization_config"):
            raise NoModel(
                f"the weights of {source} are quantised, and cannot be trained. Choose the model that they"
                " were made from."
            )
        kept = {key: value for key, value in section.items() if not any(part in key for part in OURS)}
        for key, value in kept.items():
            limit = MAX_LAYERS if "layer" in key else MAX_SIZE if _SIZES.search(key) else math.inf
            if isinstance(value, int | float) and value > limit:
                raise NoModel(
                    f"the config.json of {source} has {key_name(key)} = {shown(value)}; more than {limit:,}"
                    " is not built. Choose another model."
                )
        return kept

    return _read_object(folder / "config.json", source, checked)


def _read_object(
    path: Path, source: str, checked: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Read a JSON object from a model's folder. Raises NoModel.

    checked: called for each object in the file, inner ones first; returns the object to keep.
    """
    try:
        document = json.loads(plain_file(path, source, MAX_JSON_BYTES).read_bytes(), object_hook=checked)
    except (ValueError, RecursionError):
        # Not UTF-8 or not JSON, or a number of thousands of digits, or lists nested thousands deep.
        document = None
    if not isinstance(document, dict):
        raise NoModel(
            f"the {path.name} of {source} is not a JSON object. {again(path.parent)}, or choose another"
            " model."
        )
    return document
