"""`swarmd config`: the configuration of a node."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmd.cli.options import AsJson, ConfigFile, StateDir, answer, as_state_dir, print_json
from swarmd.errors import ConfigError

if TYPE_CHECKING:
    from swarmd.config.config import NodeConfig
    from swarmd.config.sources import Resolved

config_app = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)


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
    answer(
        {
            "schema": 1,
            "file": str(file),
            "exists": file.exists(),
            "state_dir": str(as_state_dir(state_dir)),
        },
        str(file),
        as_json,
    )
