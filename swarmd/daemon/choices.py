"""Choices that a state folder remembers, so that the next `swarmd join` needs no flags.

choices.json holds swarm, curriculum, bootstrap addresses, judge and model, as last set by a flag, an
environment variable or an invitation. It is written once the model is loaded, so a choice that fails is not
remembered. If there is a checkpoint, its model is used, and a different model is refused before anything is
loaded, unless only an invitation names it. Configuration overrides remembered values; the node then prints a
note.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from swarmd.config.config import NodeConfig
from swarmd.config.messages import shown
from swarmd.config.schema import INVITED, Given
from swarmd.config.sources import FLAGS, NODE, Resolved, flatten
from swarmd.errors import ConfigError
from swarmd.policy.models.hub import REPOSITORIES, is_folder
from swarmd.state.folder import CHOICES_FILE, write_atomically
from swarmd.trainer.checkpoint import saved_in

# The flags whose values are remembered.
REMEMBERED: Final[Sequence[str]] = ("swarm", "curriculum", "bootstrap", "judge", "model")


def recalled(resolved: Resolved, folder: Path) -> tuple[NodeConfig, Sequence[str]]:
    """Return the configuration to join with, and notes for the operator.

    Raises ConfigError if the folder's checkpoint was trained from another model than the operator chose.
    """
    config, notes = resolved.config, []
    trained, revision = trained_from(folder)
    if trained is not None:
        origin = resolved.origins["model.name"]
        # An invitation only suggests a model: nodes of one swarm may train different ones.
        if origin in ("default", INVITED) and trained != config.model.name:
            config = _with(
                _with(config, "model.name", trained), "model.revision", config.model.revision or revision
            )
            notes.append(f"going on with the model {trained}: the checkpoint in {folder} was trained from it")
        elif _is_another(config.model.name, trained):
            raise ConfigError(
                f"{origin}: the model is {config.model.name}, and the checkpoint in {folder} was trained from"
                f" {trained}. Give --model {trained} to go on with that one, or another folder with"
                " --state-dir."
            )
    again = []
    remembered, damaged = _remembered(folder)
    notes += [
        f"{flag} {shown(value)} in {folder / CHOICES_FILE} cannot be used any more, and is not"
        for flag, value in damaged.items()
    ]
    for flag, before in remembered.items():
        key = FLAGS[flag]
        now, origin = flatten(config)[key], resolved.origins[key]
        if now == before or (flag == "model" and trained is not None):
            continue
        if origin == "default":
            config = _with(config, key, tuple(before) if isinstance(before, list) else before)
            again.append(f"{flag} {words(before)}")
        else:
            notes.append(f"{flag} {words(now)}, as {origin} says; before it was {words(before)}")
    if again:
        without = ", as --judge '' for no judge" if any(each.startswith("judge ") for each in again) else ""
        notes.append(f"as before: {', '.join(again)}; what is configured overrides it{without}")
    return config, notes


def remember(resolved: Resolved, folder: Path) -> None:
    """Remember the values that came from flags, environment variables or an invitation.

    Values from a configuration file are not remembered, because the file is read at every start.
    """
    values, (kept, _) = flatten(resolved.config), _remembered(folder)
    chosen = {
        flag: values[FLAGS[flag]]
        for flag in REMEMBERED
        if resolved.origins[FLAGS[flag]].startswith(("--", "SWARMD_", INVITED))
    }
    if not chosen.items() <= kept.items():
        write_atomically(folder / CHOICES_FILE, {"schema": 1, **kept, **chosen})


def _remembered(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read choices.json and split it, by flag, into values that can be used and values that cannot.

    Raises ConfigError if the file cannot be read: with the defaults the node would join another swarm.
    """
    path, document = folder / CHOICES_FILE, dict[str, Any]()
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        # The second: `StateFolder.open` refuses the folder.
        pass
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}). It says which swarm this node is in: restore it, or remove it"
            " and give --swarm, --bootstrap, --judge and --model again."
        ) from None
    found = {flag: document[flag] for flag in REMEMBERED if flag in document}
    usable = {flag: value for flag, value in found.items() if NODE.accepts(Given(FLAGS[flag], value, ""), [])}
    return usable, {flag: value for flag, value in found.items() if flag not in usable}


def _with(config: NodeConfig, key: str, value: object) -> NodeConfig:
    section, _, name = key.partition(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})


def words(value: object) -> str:
    """Format a setting's value for people."""
    return " ".join(value) if isinstance(value, list) else str(value or "none")


class _Base(msgspec.Struct):
    source: Annotated[str, msgspec.Meta(min_length=1)]
    revision: str | None = None


class _PolicyFile(msgspec.Struct):
    base: _Base


def trained_from(folder: Path) -> tuple[str | None, str | None]:
    """Return the model and revision that the newest checkpoint was trained from.

    Returns (None, None) if there is no checkpoint, or if it does not name its model.
    """
    try:
        newest = saved_in(folder / "checkpoints")[-1]
        base = msgspec.json.decode((newest / "policy.json").read_bytes(), type=_PolicyFile).base
    except (IndexError, OSError, ValueError, RecursionError):
        return None, None
    return base.source, base.revision or None


def _is_another(name: str, trained: str) -> bool:
    """Return whether the two names certainly mean different models.

    A folder may hold a copy of the trained model. Only loading could tell, so a folder counts as the same.
    """
    return not is_folder(name) and not is_folder(trained) and REPOSITORIES.get(name, name) != trained
