"""Options shared by several commands, and JSON output."""

import json
import sys
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import typer
from typer.core import TyperOption

from swarmd.errors import ConfigError
from swarmd.state.folder import default_state_dir
from swarmd.terminal import tell

R = TypeVar("R")
HELP = ["-h", "--help"]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="SWARMD_STATE_DIR",
        help="Folder of the node's key, checkpoints, metrics and logs. One node per folder.",
        show_default="the user's",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="SWARMD_CONFIG",
        help="A TOML file; see `swarmd config path`.",
        show_default="the user's",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="tiny, qwen2.5-0.5b, …, a Hugging Face repository, a local folder or a GGUF file.",
        show_default="tiny",
    ),
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="auto, cuda, mps or cpu.", show_default="auto")
]
SwarmName = Annotated[
    str | None,
    typer.Option(
        "--swarm", help="Name of the swarm. Swarms with other names are separate.", show_default="main"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, with a `schema` number.")]


def without_flag_types(command: Any) -> None:
    """Remove "<bool>" from the help of flags, of this command and its subcommands: flags take no value."""
    for parameter in command.get_params(typer.Context(command, help_option_names=HELP)):
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        without_flag_types(below)


def as_state_dir(given: Path | None) -> Path:
    """Return the state folder: --state-dir, else SWARMD_STATE_DIR (typer reads it), else the user's."""
    return (given or default_state_dir()).expanduser().absolute()


def ask(folder: Path, operation: str, kind: type[R], *, timeout: float = 10.0, **arguments: Any) -> R:
    """Ask the node that runs in the folder; return its answer. Raises NotRunning, Unreachable."""
    from swarmd.daemon.local_api import control

    return control.call(folder, operation, kind, timeout=timeout, **arguments)


def answer(
    document: object, text: str, as_json: bool, indent: str = "", people: IO[str] | None = None
) -> None:
    """Print a command's result, as JSON for programs or as text for people.

    JSON goes to standard output. people: the stream for the text, by default standard output. indent: prefix
    of the continuation lines that wrapping adds on a terminal.
    """
    if as_json:
        print_json(document)
    else:
        tell(text, people or sys.stdout, indent)


def print_json(document: object) -> None:
    """Print one document on one line of standard output, and flush it."""
    print(json.dumps(msgspec.to_builtins(document)), flush=True)


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("nothing was done: there is no terminal for the question. Add --yes to skip it.")
    typer.confirm(question, abort=True, err=True)
