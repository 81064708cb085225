"""The repository's own packaging files, and its command lines, parsed by the real parsers."""

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
from swarmd.config.sources import FLAGS, load
from tests import ROOT

PROGRAMS = {"swarmd": swarmd.cli.app.app, "swarmd-judge": judge.cli.app}


def entrypoint() -> ModuleType:
    """packaging/entrypoint.py, which is no package: `packaging` is the name of somebody else's."""
    spec = importlib.util.spec_from_file_location("entrypoint", ROOT / "packaging" / "entrypoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(words: Sequence[str]) -> dict[str, object]:
    """The options as the program's own parser reads them, without running it.

    Raises its usage error if it refuses them.
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
    """The node's configuration from a `swarmd join` command line. Raises ConfigError if a value is
    refused."""
    parsed = parse(words)
    return load(None, {}, {flag: parsed[flag] for flag in FLAGS})
