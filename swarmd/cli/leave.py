"""`swarmd leave`, `swarmd logs` and `swarmd bug-report`.

Leave a swarm, read the node's log, report a fault.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, StateDir, as_state_dir, print_json
from swarmd.errors import ConfigError, NotRunning, SwarmdError
from swarmd.terminal import printable, tell

if TYPE_CHECKING:
    from swarmd.state.leaving import Leaving

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def leave(
    everything: Annotated[
        bool, typer.Option("--everything", help="Also remove the key, the training and the logs.")
    ] = False,
    yes: Yes = False,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Stop the node and forget the swarm: what was joined, and who was met.

    The key, the training and its figures stay.
    """
    from swarmd.daemon import control
    from swarmd.state.folder import StateFolder, in_use
    from swarmd.state.leaving import leaving

    folder = as_state_dir(state_dir)
    if not folder.is_dir():
        raise NotRunning(
            f"{folder}: there is no state folder, so nothing to leave. Name another with --state-dir."
        )
    _refuse_a_service(folder)
    plan = leaving(folder, everything=everything)
    if not yes:
        _show(plan, running=in_use(folder))
        _ask("Leave?")
    elif in_use(folder):
        tell("the node stops: it finishes its round and saves")
    if in_use(folder):
        control.call(folder, "stop")
        control.wait_until_gone(folder, 660.0)
    with StateFolder.open(folder):
        plan = leaving(folder, everything=everything)
        plan.carry_out()
    if as_json:
        print_json(
            {
                "schema": 1,
                "removed": [path.name for path in plan.removed],
                "stays": [path.name for path in plan.stays],
            }
        )
    else:
        tell(printable(f"{folder}: removed {_names(plan.removed)}"))
        tell("You left the swarm.")


def _show(plan: "Leaving", *, running: bool) -> None:
    """Say what would happen."""
    if running:
        tell("the node would stop: it finishes its round and saves")
    tell(printable(f"in {plan.folder}"))
    tell(printable(f"would be removed: {_names(plan.removed)}"))
    tell(printable(f"would stay: {_names(plan.stays)}"))
    tell("downloaded models stay in the hub's cache (`hf cache ls`), settings in `swarmd config path`")
    if any(path.name == "identity.key" for path in plan.removed):
        tell(
            "without its key nobody is this node again: `swarmd identity backup FILE` first, if you may want"
            " it back"
        )


def _names(paths: Any) -> str:
    return ", ".join(path.name for path in paths) or "nothing"


def _refuse_a_service(folder: Path) -> None:
    """Raise ConfigError if a service is installed: it would start the node again, in the default swarm."""
    from swarmd.cli.service import installed_for

    if (file := installed_for(folder)) is not None:
        raise ConfigError(f"{file} starts the node again. Run `swarmd service uninstall` first.")


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            "nothing was done: there is no terminal to ask at. Add --yes to go on without a question."
        )
    typer.confirm(question, abort=True, err=True)


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.", min=0)] = 50,
    trainer: Annotated[
        bool, typer.Option("--trainer", help="The trainer's log in place of the node's.")
    ] = False,
    state_dir: StateDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Lines as they are: the node's log is JSON lines.")
    ] = False,
) -> None:
    """Show the node's log."""
    from swarmd.state import log_reader
    from swarmd.state.folder import LOG_FILE

    path = as_state_dir(state_dir) / ("trainer.log" if trainer else LOG_FILE)
    for line in log_reader.follow(path, lines) if follow else log_reader.last_lines(path, lines):
        print(line if as_json else log_reader.for_people(line), flush=follow)


def bug_report(
    out: Annotated[
        Path | None, typer.Option(help="File to write, a new one.", show_default="swarmd-bug-report.zip")
    ] = None,
    hide_addresses: Annotated[
        bool, typer.Option("--hide-addresses", help="Leave out IP addresses and host names.")
    ] = False,
    yes: Yes = False,
    state_dir: StateDir = None,
    config: ConfigFile = None,
) -> None:
    """Put versions, settings, status, figures and logs into one file, without secrets, and send nothing.

    A terminal shows it first.
    """
    from swarmd.state.bug_report import collect, write_report

    folder = as_state_dir(state_dir)
    files = collect(folder, _said(folder, config), Path.home(), addresses=hide_addresses)
    to = (out or Path("swarmd-bug-report.zip")).expanduser().absolute()
    listing = [f"{len(text.encode()):>9,} bytes  {name}" for name, text in files.items()]
    if not yes and sys.stdin.isatty() and sys.stdout.isatty():
        import pydoc

        shown = "\n".join([*listing, *(f"\n=== {name}\n{text.rstrip()}" for name, text in files.items())])
        pydoc.pager("\n".join(map(printable, shown.splitlines())) + "\n")
        _ask(f"Write these {len(files)} files to {to}?")
    else:
        print("\n".join(listing))
    write_report(files, to)
    tell(
        printable(
            f"{to}: written, for you alone to read; nothing was sent. Look through it before you hand it on."
        )
    )


def _said(folder: Path, config: Path | None) -> dict[str, str]:
    """Collect versions, settings and, where a node runs, its status, as files by name."""
    import platform

    from swarmd.config.sources import flatten, resolve
    from swarmd.daemon import control
    from swarmd.state.logs import installed_version

    packages = ("swarmd", "torch", "transformers", "libp2p", "hivemind", "reasoning-gym", "huggingface_hub")
    versions = {"system": platform.platform(), "python": sys.version} | {
        name: installed_version(name) for name in packages
    }
    found = {"versions.json": json.dumps(versions, indent=1)}
    try:
        resolved = resolve(config_file(config), os.environ, {})
        values = {
            key: {"value": value, "origin": resolved.origins[key]}
            for key, value in flatten(resolved.config).items()
        }
        found["settings.json"] = json.dumps(values, indent=1)
    except SwarmdError as error:
        found["settings.json"] = str(error)
    for operation in ("status", "peers"):
        try:
            found[f"{operation}.json"] = json.dumps(control.call(folder, operation), indent=1)
        except SwarmdError as error:
            found[f"{operation}.json"] = str(error)
    return found
