"""`swarmd bootstrap`: a node that only helps others find each other."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.cli_inspect import config_file
from swarmd.cli_options import AsJson, ConfigFile, print_json

if TYPE_CHECKING:
    from swarmd.bootstrap import Bootstrapped


def bootstrap(
    swarm: Annotated[str | None, typer.Option(help="The swarm's name; others never meet.", show_default="main")] = None,
    model: Annotated[
        str | None, typer.Option(help="What the swarm's nodes train: it decides the curriculum, as in `swarmd join`.", show_default="tiny")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Listen here, /ip4/…/tcp/<port>. May be given again.", show_default="port 4001, everywhere"),
    ] = None,
    other: Annotated[
        list[str] | None, typer.Option("--bootstrap", help="Another bootstrap node or member, to be one swarm with. May be given again.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", envvar="SWARMD_STATE_DIR", help="The folder it keeps its key in.", show_default="one of its own"),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Help others find each other, and relay for those behind NAT, until stopped. Trains nothing. Prints the addresses to give away."""
    from swarmd.bootstrap import PORT, run_bootstrap
    from swarmd.config import NodeConfig, resolve
    from swarmd.state_folder import StateFolder, default_state_dir

    flags: dict[str, object] = {"swarm": swarm, "model": model, "listen": listen, "bootstrap": other}
    resolved = resolve(config_file(config), os.environ, flags)
    node_config: NodeConfig = resolved.config
    if resolved.origins["swarm.listen"] == "default":
        port = (f"/ip4/0.0.0.0/tcp/{PORT}",)
        node_config = node_config.model_copy(update={"swarm": node_config.swarm.model_copy(update={"listen": port})})
    with StateFolder.open(state_dir or default_state_dir().with_name("bootstrap")) as state:

        def announce(node: "Bootstrapped") -> None:
            _announce(node.document(), as_json)

        code = run_bootstrap(node_config, state, announce)
    if not as_json:
        print("it is gone", file=sys.stderr)
    raise typer.Exit(code)


def _announce(document: Mapping[str, Any], as_json: bool) -> None:
    """The addresses on standard output, to paste; what else there is to know on standard error."""
    from swarmd.bootstrap import announcement

    if as_json:
        print_json(document)
        return
    for line in announcement(document):
        print(line, file=sys.stderr, flush=True)
    for entry in document["addresses"]:
        print(entry["address"], flush=True)
