"""`swarmd bootstrap`: run a bootstrap node.

`swarmd doctor network`: check whether others can reach this node.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, StateDir, SwarmName, answer, as_state_dir, print_json
from swarmd.errors import Unreachable
from swarmd.terminal import printable

if TYPE_CHECKING:
    from swarmd.daemon.bootstrap import Bootstrapped
    from swarmd.daemon.reachability_report import Diagnosis


def bootstrap(
    swarm: SwarmName = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of the nodes that --judge evaluates. Nodes of all models are helped.",
            show_default="tiny",
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Address to listen on, /ip4/…/tcp/<port>. Repeatable.", show_default="port 4001, everywhere"
        ),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--bootstrap", help="Address of another node of the swarm to connect to. Repeatable."),
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="URL of a judge to advertise, https://…. Repeatable.", show_default="none"),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir", envvar="SWARMD_STATE_DIR", help="Folder of its key.", show_default="one of its own"
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a bootstrap node: others find each other through it, and it relays for nodes behind NAT."""
    from swarmd.config.config import NodeConfig
    from swarmd.config.sources import resolve
    from swarmd.daemon.bootstrap import PORT, run_bootstrap
    from swarmd.daemon.judge_discovery import advertised
    from swarmd.state.folder import StateFolder, default_state_dir

    judges = advertised(judge or ())
    flags: dict[str, object] = {"swarm": swarm, "model": model, "listen": listen, "bootstrap": other}
    resolved = resolve(config_file(config), os.environ, flags)
    node_config: NodeConfig = resolved.config
    if resolved.origins["swarm.listen"] == "default":
        port = (f"/ip4/0.0.0.0/tcp/{PORT}",)
        node_config = node_config.model_copy(
            update={"swarm": node_config.swarm.model_copy(update={"listen": port})}
        )
    with StateFolder.open(state_dir or default_state_dir().with_name("bootstrap")) as state:

        def announce(node: "Bootstrapped") -> None:
            _announce(node.document(), as_json)

        code = run_bootstrap(node_config, state, announce, judges)
    if not as_json:
        print("Node stopped.", file=sys.stderr)
    raise typer.Exit(code)


def doctor_network(
    state_dir: StateDir = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            help="If no node runs: a peer to connect to first, /ip4/…/tcp/…/p2p/<peer id>. Repeatable."
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="If no node runs: address to listen on, /ip4/…/tcp/<port>.", show_default="as configured"
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check whether others can reach this node, and what to change.

    If no node runs, joins for some seconds. Exit code 4 if it cannot.
    """
    diagnosis, found = _examine(as_state_dir(state_dir), config, {"bootstrap": bootstrap, "listen": listen})
    answer(diagnosis.document(found), "\n".join(map(printable, diagnosis.lines())), as_json)
    if not diagnosis.takes_part:
        raise typer.Exit(Unreachable.exit_code)


def _examine(
    folder: Path, config: Path | None, flags: Mapping[str, object]
) -> "tuple[Diagnosis, Mapping[str, Any]]":
    """Return the running node's survey; if none runs, make one with the folder's key, if it has one."""
    from p2p.errors import CannotListen, PortInUse
    from p2p.identity import Identity
    from swarmd.config.sources import load
    from swarmd.daemon.control import call
    from swarmd.daemon.reachability_report import diagnose, no_network, no_port
    from swarmd.daemon.reachability_survey import survey_alone
    from swarmd.state.folder import IDENTITY_FILE, StateFolder, in_use

    if in_use(folder):
        found = call(folder, "network", timeout=45.0)
        return (diagnose(found) if found["engine"] is not None else no_network()), found
    node_config = load(config_file(config), os.environ, flags)
    if node_config.swarm.engine == "none":
        return no_network(), {}
    with ExitStack() as stack:
        if (folder / IDENTITY_FILE).exists():
            folder = stack.enter_context(StateFolder.open(folder)).path
        else:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="swarmd-doctor-")))
        try:
            found = survey_alone(node_config, folder, Identity.load_or_create(folder / IDENTITY_FILE))
        except (PortInUse, CannotListen) as error:
            return no_port(error, node_config.swarm.listen), {}
    return diagnose(found), found


def _announce(document: Mapping[str, Any], as_json: bool) -> None:
    """Print the addresses to standard output, for copying, and everything else to standard error."""
    from swarmd.daemon.bootstrap import announcement

    if as_json:
        print_json(document)
        return
    for line in announcement(document):
        print(line, file=sys.stderr, flush=True)
    for entry in document["addresses"]:
        print(entry["address"], flush=True)
