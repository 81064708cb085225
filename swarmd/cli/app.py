"""The `swarmd` command line: one function a command, listed here with its example and its panel.

A command reads settings (`swarmd/config/`), then asks the running daemon over its control socket
(`daemon/local_api/`), runs a node itself (`join`, `bootstrap`), or reads the state folder. It holds no rule
of its own: what it shows was decided below. Each imports what it needs when it runs: --help stays quick.

Data goes to standard output, messages to standard error. Exit codes: 0 done, 2 usage or configuration, 3 no
usable device or model, 4 cannot reach what was asked for, 5 another node owns the state folder, 6 not
running, 130 interrupted.
"""

import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.models import CommandInfo

from p2p.errors import OperatorError
from swarmd.cli import join, judge, lab, machine, peers, service, settings, status, tasks
from swarmd.cli.options import AsJson, answer, without_flag_types
from swarmd.terminal import printable, tell

app = typer.Typer(
    name="swarmd",
    epilog="Example: swarmd join --model tiny. Every command has --help, and most have --json.",
    no_args_is_help=True,
    # A fault of ours shows an ordinary traceback, without the values of variables.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(settings.config_app, name="config")
app.add_typer(settings.identity_app, name="identity")
app.add_typer(tasks.app, name="task")
app.add_typer(machine.doctor_app, name="doctor")
app.command(
    epilog=(
        "Example: swarmd join --model qwen2.5-0.5b --judge https://judge.example --bootstrap"
        " /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
    )
)(join.join)
app.command(epilog="Example: swarmd status --watch")(status.status)
app.command(epilog="Example: swarmd peers --json")(status.peers)
app.command(epilog="Example: swarmd stop")(status.stop)
app.command(epilog="Example: swarmd pause --for 2h")(status.pause)
app.command(epilog="Example: swarmd resume")(status.resume)
app.command(epilog="Example: swarmd export --out my-model")(machine.export)
app.command(epilog="Example: swarmd chat")(machine.chat)
app.command(epilog="Example: swarmd serve --listen 8000")(machine.serve)
machine.doctor_app.command("network", epilog="Example: swarmd doctor network --json")(machine.doctor_network)
app.command(epilog="Example: swarmd bootstrap --listen /ip4/0.0.0.0/tcp/4001")(peers.bootstrap)
app.command("answer", epilog="Example: swarmd answer --bootstrap /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…")(
    peers.answer_by_hand
)
app.command(epilog="Example: swarmd models")(machine.models)
app.command(epilog="Example: swarmd invite --qr")(join.invite)
app.command(epilog="Example: swarmd ui --no-browser")(status.ui)
app.command(epilog="Example: swarmd verify 0123456789abcdef0123456789abcdef, or swarmd verify --upload")(
    judge.verify
)
app.add_typer(service.app, name="service")
app.command(epilog="Example: swarmd leaderboard --judge https://judge.example")(judge.leaderboard)
app.command(epilog="Example: swarmd leave --yes")(join.leave)
app.command(epilog="Example: swarmd logs -f")(status.logs)
app.command("bug-report", epilog="Example: swarmd bug-report --hide-addresses")(status.bug_report)
app.add_typer(machine.plan_app, name="plan")
app.add_typer(lab.app, name="lab")


def _say_version(wanted: bool) -> None:
    if wanted:
        from swarmd.state.logs import installed_version

        print(f"swarmd {installed_version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train a language model with a peer-to-peer swarm.

    Your node trains its own copy, and nodes share their rollouts.
    """


# Errors of a path that was given, wherever it is used first.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    An OperatorError prints its message; anything else is a bug and keeps its traceback.
    """
    try:
        app(arguments, prog_name="swarmd")
    except OperatorError as error:
        # It may quote a stranger, in every line.
        lines = [printable(line) for line in str(error).split("\n")]
        tell("\n".join(lines) if len(lines) > 1 else f"swarmd: {lines[0]}")
        return error.exit_code
    except OSError as error:
        if error.filename is None or error.errno not in _UNUSABLE:
            raise
        tell(
            printable(
                f"swarmd: {error.filename}: {error.strerror}. Mend its permissions, or name another path."
            )
        )
        return OperatorError.exit_code
    except RuntimeError as error:
        # What pathlib says of a path that begins with "~" and the name of nobody here.
        if str(error) != "Could not determine home directory.":
            raise
        tell("swarmd: a path begins with ~, and that names no home folder here. Write the path in full.")
        return OperatorError.exit_code
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    return 0


@app.command(epilog="Example: swarmd demo --nodes 4 --rounds 120")
def demo(
    nodes: Annotated[
        int, typer.Option(help="Number of nodes that share; one more is alone.", min=2, max=16)
    ] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds each node trains.", min=2)] = 120,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the demo's files.", show_default="demo-<time>")
    ] = None,
) -> None:
    """Run a swarm on this machine beside one node alone, and a judge.

    One is killed halfway and restarted. Ends with a table and a plot.
    """
    from swarmd.lab.demo.demo import run

    raise typer.Exit(run(nodes, rounds, out, as_json))


@app.command(epilog="Example: swarmd version --json")
def version(as_json: AsJson = False) -> None:
    """Print the versions that a bug report should name."""
    from swarmd.state.logs import installed_version

    packages = ("swarmd", "torch", "transformers", "libp2p", "reasoning-gym")
    versions = {"python": sys.version.split()[0]} | {
        package: installed_version(package) for package in packages
    }
    text = "\n".join(f"{package} {number}" for package, number in versions.items())
    answer({"schema": 1, "versions": versions}, text, as_json)


# The order in which `swarmd --help` shows them: what a volunteer does first comes first.
_PANELS = {
    "Take part": "join invite status peers leaderboard verify ui pause resume stop leave logs service demo",
    "What you trained": "chat serve export",
    "This machine": "models doctor plan config identity bug-report version",
    "For operators and researchers": "bootstrap answer task lab",
}


def _arrange_help() -> None:
    panels = {name: panel for panel, names in _PANELS.items() for name in names.split()}
    without_flag_types(app)

    def name_of(command: CommandInfo) -> str:
        return str(command.name or getattr(command.callback, "__name__", ""))

    named = {*map(name_of, app.registered_commands), *(str(group.name) for group in app.registered_groups)}
    if unplaced := named - panels.keys():
        raise LookupError(f"give {', '.join(unplaced)} a place in _PANELS, for `swarmd --help`")
    app.registered_commands.sort(key=lambda command: list(panels).index(name_of(command)))
    for command in app.registered_commands:
        command.rich_help_panel = panels[name_of(command)]
    for group in app.registered_groups:
        group.rich_help_panel = panels[str(group.name)]


_arrange_help()
