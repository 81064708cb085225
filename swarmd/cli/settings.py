"""`swarmd config` and `swarmd identity`: the configuration and the key of a node."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmd.cli.options import AsJson, ConfigFile, StateDir, answer, as_state_dir, print_json
from swarmd.errors import ConfigError
from swarmd.state.folder import IDENTITY_FILE, StateFolder

if TYPE_CHECKING:
    from swarmd.config.config import NodeConfig
    from swarmd.config.sources import Resolved

config_app = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)
identity_app = typer.Typer(help="The node's key and peer id.", no_args_is_help=True)


def default_config_file() -> Path:
    """Return the user's configuration file: `~/.config/swarmd/node_config.toml` on Linux (XDG)."""
    from platformdirs import user_config_path

    return user_config_path("swarmd") / "node_config.toml"


def config_file(given: Path | None) -> Path | None:
    """Return the configuration file to read: `given`, which must exist, else the user's, if it exists."""
    if given is not None:
        return given.expanduser()
    # A RuntimeError means that there is no home folder, and so no user's file.
    with suppress(FileNotFoundError, NotADirectoryError, RuntimeError):
        # From Python 3.14 on, `exists` returns False for a file that may not be read; `stat` raises.
        (path := default_config_file()).stat()
        return path
    return None


def configured(
    config: Path | None, flags: Mapping[str, object], invited: Mapping[str, object] | None = None
) -> "Resolved":
    """Return the settings of file, environment, flags and invitation. Raises ConfigError."""
    from swarmd.config.sources import resolve

    return resolve(config_file(config), os.environ, flags, invited or {})


def joined(config: Path | None, folder: Path, flags: Mapping[str, object]) -> "NodeConfig":
    """Return the settings that `swarmd join` would use in this state folder, with these flags."""
    from swarmd.daemon.choices import recalled

    return recalled(configured(config, flags), folder)[0]


def with_origins(config: Path | None, folder: Path) -> dict[str, dict[str, object]]:
    """Return by key the value that `swarmd join` would use in this state folder, and its origin."""
    from swarmd.config.sources import flatten
    from swarmd.daemon.choices import recalled

    resolved = configured(config, {})
    read, used = flatten(resolved.config), flatten(recalled(resolved, folder)[0])
    return {
        key: {
            "value": value,
            "origin": resolved.origins[key] if value == read[key] else f"remembered in {folder}",
        }
        for key, value in used.items()
    }


@config_app.command("check", epilog="Example: swarmd config check node.toml")
def check_config(
    file: Annotated[
        Path | None,
        typer.Argument(help="The file to check.", show_default="the one `swarmd config path` names"),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check the configuration as `swarmd join` reads it, and list every mistake.

    Exit code 2 if there is one.
    """
    path = config_file(file or config)
    try:
        configured(path, {})
    except ConfigError as mistakes:
        if not as_json:
            raise
        print_json({"schema": 1, "file": str(path) if path else None, "mistakes": str(mistakes).splitlines()})
        raise typer.Exit(mistakes.exit_code) from None
    answer(
        {"schema": 1, "file": str(path) if path else None, "mistakes": []},
        f"{path}: no mistakes"
        if path
        else f"no file at {default_config_file()}: defaults and environment variables are used, without"
        " mistakes",
        as_json,
    )


@config_app.command("show", epilog="Example: swarmd config show --json")
def show_config(config: ConfigFile = None, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Show every key, the value that `swarmd join` would use, and where the value comes from."""
    keys = with_origins(config, as_state_dir(state_dir))
    lines = [
        f"{key} = {'(none)' if told['value'] is None else json.dumps(told['value'], ensure_ascii=False)}"
        for key, told in keys.items()
    ]
    width = max(map(len, lines))
    rows = (f"{line:<{width}}  # {told['origin']}" for line, told in zip(lines, keys.values(), strict=True))
    answer({"schema": 1, "keys": keys}, "\n".join(rows), as_json)


@config_app.command("path", epilog='Example: $EDITOR "$(swarmd config path)"')
def show_path(config: ConfigFile = None, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Print the path of the configuration file, whether it exists or not."""
    file = (config.expanduser() if config else default_config_file()).absolute()
    document = {
        "schema": 1,
        "file": str(file),
        "exists": file.exists(),
        "state_dir": str(as_state_dir(state_dir)),
    }
    answer(document, str(file), as_json)


@identity_app.command("show", epilog="Example: swarmd identity show --json")
def show_identity(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Show the node's peer id, its nickname and its key file."""
    from p2p.identity import Identity, nickname

    file = as_state_dir(state_dir) / IDENTITY_FILE
    peer_id = Identity.load(file).peer_id
    name = nickname(peer_id)
    answer(
        {"schema": 1, "peer_id": peer_id, "name": name, "file": str(file)},
        f"{peer_id}  {name}  {file}",
        as_json,
    )


@identity_app.command(epilog="Example: swarmd identity backup ~/swarmd-identity.key")
def backup(
    to: Annotated[Path, typer.Argument(help="A new file, or a folder to put it in.")],
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy the key to a file only you can read.

    Anybody who has the key can act as this node: keep it safe, and never run two nodes with it.

    To keep the training too, stop the node and copy its state folder.
    """
    from p2p.identity import Identity

    identity = Identity.load(as_state_dir(state_dir) / IDENTITY_FILE)
    to = to.expanduser().absolute()
    file = to / f"swarmd-{identity.peer_id}.key" if to.is_dir() else to
    identity.write(file)
    answer({"schema": 1, "peer_id": identity.peer_id, "file": str(file)}, str(file), as_json)


@identity_app.command(epilog="Example: swarmd identity restore ~/swarmd-identity.key")
def restore(
    file: Annotated[Path, typer.Argument(help="A file that `swarmd identity backup` wrote.")],
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Put a backup's key into the state folder. A copy of the old key is kept."""
    from p2p.identity import Identity, nickname

    with StateFolder.open(as_state_dir(state_dir)) as state:
        found, kept = Identity.restore(file.expanduser().absolute(), state.path / IDENTITY_FILE)
    line = f"restored {nickname(found.peer_id)} {found.peer_id}"
    answer(
        {"schema": 1, "peer_id": found.peer_id, "kept": str(kept) if kept else None},
        f"{line}\nthe old key was kept as {kept}" if kept else line,
        as_json,
    )
