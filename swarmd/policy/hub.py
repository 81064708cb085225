"""Files of a model: from a folder, from this package, or from the Hugging Face hub. Every way that can fail has its message.

Imports no torch, so that looking for a model costs nothing.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from swarmd.errors import NoModel, Unreachable
from swarmd.policy.models.tiny import WEIGHTS as TINY

REPOSITORIES: Mapping[str, str] = MappingProxyType(
    {
        "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    }
)

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration and tokenizer
WEIGHT_FILES = ("*.safetensors",)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's files are. `folder` holds the small ones; the weights may still have to be fetched."""

    source: str  # what a checkpoint remembers: a tiny name, a repository id, or a folder
    folder: Path
    repository: str | None = None  # None: the folder is all there is
    revision: str | None = None  # the commit, where there is a repository


def find_local(name: str) -> Place | None:
    """The model's place where `name` is a tiny model or a folder; None where it is a repository's. NoModel. Asks nobody."""
    if name in TINY:
        if not (TINY[name] / "config.json").is_file():
            raise NoModel(f"the embedded model is missing from {TINY[name]}: this installation is not whole. Install swarmd again.")
        return Place(name, TINY[name])
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NoModel(_no_model_in(path))
        return Place(str(path.resolve()), path)
    if name.startswith((".", "/", "~")):
        raise NoModel(f"there is no folder {path}. {_choices()}")
    return None


def locate(name: str, revision: str | None) -> Place:
    """The model's small files, downloaded if they have to be. NoModel, Unreachable."""
    if (place := find_local(name)) is not None:
        return place
    repository = REPOSITORIES.get(name, name)
    folder = _fetch(repository, revision, SMALL_FILES)
    if not (folder / "config.json").is_file():
        raise NoModel(f"the repository {repository} has no config.json, so no transformers model. Choose another one.")
    return Place(repository, folder, repository, folder.name)


def _no_model_in(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return f"the folder {folder} holds no config.json, so no model. Give the folder that `save_pretrained` wrote."
    named = f", --model {base}," if base else ""
    return (
        f"the folder {folder} holds an adapter, not a model. Give its base model{named} to begin anew, or merge the two first: "
        "`swarmd export` without --adapter writes a whole model."
    )


def with_weights(place: Place) -> Path:
    """The folder once the weights are in it. NoModel where there are none that are safe to load."""
    folder = _fetch(place.repository, place.revision, WEIGHT_FILES) if place.repository else place.folder
    require_weights(folder, place.source)
    return folder


def require_weights(folder: Path, source: str) -> None:
    """NoModel where there are none that are safe to load."""
    if not any(folder.glob("*.safetensors")):
        raise NoModel(
            f"{source} has no weights in safetensors format. Pickled weights (.bin, .pt) can run code when they are opened and are "
            "never loaded. Choose another revision or repository, or convert them with `save_pretrained`."
        )


def _fetch(repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Top-level files of a repository that match. The folder's name is the commit."""
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repository} at {revision}" if revision else repository
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except HFValidationError:
        raise NoModel(f"{repository!r} is no model's name. {_choices()}") from None
    except GatedRepoError:
        raise NoModel(f"{repository} is gated: accept its terms on huggingface.co, then log in with `hf auth login`.") from None
    except RepositoryNotFoundError:
        raise NoModel(f"the hub has no repository {repository}, or it is private (then: `hf auth login`). {_choices()}") from None
    except RevisionNotFoundError:
        raise NoModel(f"{repository} has no revision {revision!r}. Correct model.revision, or leave it out.") from None
    except (LocalEntryNotFoundError, httpx2.HTTPError) as error:
        raise Unreachable(
            f"cannot fetch {at} from the Hugging Face hub, and it is not in the local cache ({first_line(error)}). "
            "Check the connection and HF_HUB_OFFLINE, or give --model a local folder; `--model tiny` needs no download."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoModel(f"no room on the disk to download {at}. Free some space, or set HF_HOME to another disk.") from error
        raise NoModel(f"cannot store {at}: {first_line(error)}. Check the folder that HF_HOME names.") from error


def _choices() -> str:
    return f"Use one of {', '.join((*TINY, *REPOSITORIES))}, a repository of the Hugging Face hub (owner/name), or a local folder."


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
