"""Access to the repository's packaging files, and parsing of their command lines by the real parsers."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import typer
from typer.core import TyperGroup
from typer.main import get_command

import judge.cli
import swarmd.cli.app
from swarmd.config.config import NodeConfig
from swarmd.config.sources import FLAGS, resolve
from tests import ROOT

PROGRAMS = {"swarmd": swarmd.cli.app.app, "swarmd-judge": judge.cli.app}


def entrypoint() -> ModuleType:
    """Import packaging/entrypoint.py by its path, because `packaging` is the name of another package."""
    spec = importlib.util.spec_from_file_location("entrypoint", ROOT / "packaging" / "entrypoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(words: Sequence[str]) -> dict[str, object]:
    """Parse the options with the program's own parser, without running the program.

    Raise the parser's usage error if it rejects them.
    """
    name, *rest = words
    program = Path(name).name
    app: typer.Typer = PROGRAMS[program]
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.make_context(program, rest, resilient_parsing=True)
    _, command, left = group.resolve_command(context, rest)
    assert command is not None
    return dict(command.make_context(command.name, left, parent=context).params)


def node_config(words: Sequence[str]) -> NodeConfig:
    """Return the configuration of a node from a `swarmd join` command line.

    Raise ConfigError if a value is invalid.
    """
    parsed = parse(words)
    return resolve(None, {}, {flag: parsed[flag] for flag in FLAGS}).config
