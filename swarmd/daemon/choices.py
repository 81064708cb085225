"""Choices a state folder remembers (model and judge), so that the next `swarmd join` needs no flags.

The model is the one that the newest checkpoint was trained from. The judge is the last that a flag or a variable named (choices.json).
What is configured overrides what is remembered, and that is said. Another model than the checkpoint's is refused before anything is loaded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from swarmd.config.config import NodeConfig
from swarmd.config.sources import Resolved
from swarmd.errors import ConfigError
from swarmd.state.folder import write_atomically
from swarmd.trainer.checkpoint import saved_in

FILE: Final = "choices.json"


def recalled(resolved: Resolved, folder: Path) -> tuple[NodeConfig, Sequence[str]]:
    """The configuration to join with, and notes for the operator. ConfigError if the folder's checkpoint is of another model."""
    config, notes = resolved.config, []
    trained, revision = trained_from(folder)
    if trained is not None:
        if resolved.origins["model.name"] == "default" and trained != config.model.name:
            kept = {"name": trained, "revision": config.model.revision or revision}
            config = config.model_copy(update={"model": config.model.model_copy(update=kept)})
            notes.append(f"going on with the model {trained}: the checkpoint in {folder} was trained from it")
        elif _is_another(config.model.name, trained):
            origin = resolved.origins["model.name"]
            raise ConfigError(
                f"{origin}: the model is {config.model.name}, and the checkpoint in {folder} was trained from {trained}. "
                "Leave the model out to go on with that one, or give another folder with --state-dir."
            )
    judge = _read(folder / FILE).get("judge")
    if isinstance(judge, str) and judge != config.judge.url:
        if resolved.origins["judge.url"] == "default":
            config = config.model_copy(update={"judge": config.judge.model_copy(update={"url": judge})})
            notes.append(f"judged by {judge}, as before; --judge '' is for none")
        else:
            origin = resolved.origins["judge.url"]
            notes.append(f"judged by {config.judge.url or 'nobody'}, as {origin} says; before it was {judge or 'nobody'}")
    return config, notes


def remember(resolved: Resolved, folder: Path) -> None:
    """Remember what flags and variables chose. A file's choices are not remembered: it is read again."""
    if resolved.origins["judge.url"].startswith(("--", "SWARMD_")):
        try:
            write_atomically(folder / FILE, {"schema": 1, "judge": resolved.config.judge.url})
        except OSError as error:
            raise ConfigError(f"{folder / FILE}: cannot be written: {error.strerror or error}. Mend the folder's permissions.") from None


def trained_from(folder: Path) -> tuple[str | None, str | None]:
    """Model and revision the newest checkpoint was trained from; (None, None) if there is none, or it does not say."""
    saved = saved_in(folder / "checkpoints")
    base = _read(saved[-1] / "policy.json").get("base") if saved else None
    if not isinstance(base, dict) or not isinstance(base.get("source"), str) or not base["source"]:
        return None, None
    revision = base.get("revision")
    return base["source"], revision if isinstance(revision, str) and revision else None


def _is_another(name: str, trained: str) -> bool:
    """False also if only loading could tell: a folder may be a copy of the model that was trained."""
    from swarmd.policy.models.hub import REPOSITORIES, find_local
    from swarmd.policy.models.tiny import WEIGHTS

    def is_folder(model: str) -> bool:
        return model not in WEIGHTS and (model.startswith((".", "/", "~")) or find_local(model) is not None)

    return not is_folder(name) and not is_folder(trained) and REPOSITORIES.get(name, name) != trained


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
