"""Locate a model's files: in a folder, a GGUF file, this package or on the Hugging Face hub.

Each failure has its own message. This module does not import torch, so that a look-up is cheap.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from swarmd.config.messages import nearest, shown
from swarmd.errors import NoModel
from swarmd.policy.models import hub_fault
from swarmd.policy.models.files import gguf, model_folder
from swarmd.policy.models.files.progress import Download
from swarmd.policy.models.tiny import WEIGHTS as TINY
from swarmd.terminal import printable

REPOSITORIES: Mapping[str, str] = MappingProxyType(
    {
        "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "qwen3-1.7b": "Qwen/Qwen3-1.7B",
        "qwen3-4b": "Qwen/Qwen3-4B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
        "qwen3.5-2b": "Qwen/Qwen3.5-2B",
        "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a model's files.

    `folder` holds the small files; the weights may still have to be downloaded.
    """

    source: str  # the name stored in checkpoints: a tiny name, a repository id, a folder or a GGUF file
    folder: Path
    repository: str | None = None  # None: there is only the folder
    revision: str | None = None  # the commit, if there is a repository
    gguf: Path | None = None  # the GGUF file from which `folder`, in the cache, is made


def find_local(name: str) -> Place | None:
    """Return the place of a tiny model, a local folder or a GGUF file; None for a repository's name.

    Uses no network. Raises NoModel, also for an unknown name that is not owner/name, such as a misspelt short
    name. Raises ConfigError for a repository if the hub's library cannot read its variables.
    """
    if name in TINY:
        if not (TINY[name] / "config.json").is_file():
            raise NoModel(
                f"the embedded model is missing from {TINY[name]}: this installation is incomplete. Install"
                " swarmd again."
            )
        return Place(name, TINY[name])
    # `os.path` does not raise for a path that is too long, or for "~" with an unknown user.
    path = Path(os.path.expanduser(name))  # noqa: PTH111
    if (file := gguf.file_of(path)) is not None:
        return Place(str(file.resolve()), gguf.folder_for(file), gguf=file)
    if os.path.isdir(path):  # noqa: PTH112
        if not (path / "config.json").exists():
            raise model_folder.no_model(path, f"the folder {path}", "config.json")
        return Place(str(path.resolve()), path)
    if name.lower().endswith(".gguf"):
        raise model_folder.gguf(shown(name))
    if os.path.isfile(path):  # noqa: PTH113
        raise NoModel(f"{path} is a file. Give a GGUF file, or the folder that holds the model's files.")
    if name.startswith((".", "/", "~")):
        raise NoModel(f"there is no folder {path}. {_choices()}")
    if name.count("/") != 1 and name not in REPOSITORIES:
        raise NoModel(
            "there is no model called"
            f" {shown(name)}{nearest(name, (*TINY, *REPOSITORIES)) or '.'} {_choices()}"
        )
    if hub_fault is not None:
        raise hub_fault
    return None


def is_folder(name: str) -> bool:
    """Return whether a model's name refers to a folder or a GGUF file on this machine.

    A path does, even if it does not exist.
    """
    # As in `find_local`; a path with "~" counts in any case.
    return name not in TINY and (name.startswith((".", "/", "~")) or os.path.exists(name))  # noqa: PTH110


def locate(name: str, revision: str | None) -> Place:
    """Return the place of a model, after downloading its small files if needed.

    Raises NoModel and Unreachable.
    """
    if (place := find_local(name)) is not None:
        if place.gguf is not None:
            gguf.convert(place.gguf, place.folder, "config.json")
        return place
    repository = REPOSITORIES.get(name, name)
    from swarmd.policy.models.files import download

    # An adapter's file is fetched only so that `model_folder.notes` can report it; it is never loaded.
    names = (*model_folder.SMALL_FILES, model_folder.ADAPTER)
    folder = download.fetch(repository, revision, names, _choices())
    if not (folder / "config.json").exists():
        raise model_folder.no_model(folder, f"the repository {repository}", "config.json")
    return Place(repository, folder, repository, folder.name)


def has_weights(place: Place) -> bool:
    """Return whether a model's weights are on this machine."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = place.repository, place.revision
    return repository is None or all(
        isinstance(try_to_load_from_cache(repository, name, revision=revision), str)
        for name in model_folder.weight_names(place.folder, place.source)
    )


def with_weights(place: Place, report: Callable[[Download], None] = lambda _: None) -> Path:
    """Return the folder with a model's weights, after downloading them if needed.

    A GGUF file's weights are converted. report: receives the progress. Raises NoModel if there are no weights
    that are safe to load.
    """
    folder = place.folder
    if place.gguf is not None:
        gguf.convert(place.gguf, folder, model_folder.WEIGHTS, report)
    if place.repository is not None and place.revision is not None:
        from swarmd.policy.models.files import download

        names = model_folder.weight_names(folder, place.source)
        folder = download.fetch(place.repository, place.revision, names, _choices(), report)
    model_folder.weight_map(folder, place.source)
    return folder


def _choices() -> str:
    return (
        f"Use one of {', '.join((*TINY, *REPOSITORIES))}, a repository of the Hugging Face hub (owner/name),"
        " a local folder or a GGUF file."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, made printable, as it may quote an untrusted file."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])
