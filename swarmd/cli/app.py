"""The `swarmd` command line: one function per command, listed here with its example and its panel.

A command reads settings (`swarmd/config/`), then asks the running daemon over its control socket
(`daemon/local_api/`), runs a node itself (`join`, `bootstrap`), or reads the state folder. It makes no
decisions: it prints results of the other parts. Each command imports its modules when it runs, so --help
stays fast.

Data goes to standard output, messages to standard error. Exit codes: 0 done, 2 usage or configuration, 3 no
usable device or model, 4 a needed machine cannot be reached, 5 another node owns the state folder, 6 not
running, 130 interrupted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer
from typer.main import get_command

from swarmd.cli import join, judge, lab, machine, peers, service, settings, status, tasks
from swarmd.cli.options import HELP, without_flag_types
from swarmd.terminal import explained

app = typer.Typer(
    name="swarmd",
    epilog="Example: swarmd join --model tiny. Every command has --help, and most have --json.",
    no_args_is_help=True,
    context_settings={"help_option_names": HELP},
)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    command = get_command(app)
    without_flag_types(command)
    return explained("swarmd", lambda: command(arguments, prog_name="swarmd"))


# By panel, in the order of `swarmd --help`: first the commands that a volunteer needs first, groups of
# commands last.
COMMANDS: Mapping[str, Mapping[str, typer.Typer | tuple[Callable[..., None], str]]] = {
    "Take part": {
        "join": (
            join.join,
            "swarmd join --model qwen2.5-0.5b --judge https://judge.example --bootstrap"
            " /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
        ),
        "invite": (join.invite, "swarmd invite --json"),
        "status": (status.status, "swarmd status --watch"),
        "peers": (status.peers, "swarmd peers --json"),
        "leaderboard": (judge.leaderboard, "swarmd leaderboard --judge https://judge.example"),
        "verify": (
            judge.verify,
            "swarmd verify 0123456789abcdef0123456789abcdef, or swarmd verify --upload",
        ),
        "ui": (status.ui, "swarmd ui --no-browser"),
        "pause": (status.pause, "swarmd pause --for 2h"),
        "resume": (status.resume, "swarmd resume"),
        "stop": (status.stop, "swarmd stop"),
        "leave": (join.leave, "swarmd leave --yes"),
        "logs": (status.logs, "swarmd logs -f"),
        "service": service.app,
    },
    "Your model": {
        "chat": (machine.chat, "swarmd chat"),
        "serve": (machine.serve, "swarmd serve --listen 8000"),
        "export": (machine.export, "swarmd export my-model"),
    },
    "This machine": {
        "models": (machine.models, "swarmd models"),
        "bug-report": (status.bug_report, "swarmd bug-report --hide-addresses"),
        "config": settings.config_app,
        "doctor": machine.doctor_app,
        "plan": machine.plan_app,
    },
    "For operators and researchers": {
        "bootstrap": (peers.bootstrap, "swarmd bootstrap --listen /ip4/0.0.0.0/tcp/4001"),
        "answer": (
            peers.answer_by_hand,
            "swarmd answer --bootstrap /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
        ),
        "task": tasks.app,
        "lab": lab.app,
    },
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            function, example = command
            app.command(name, epilog=f"Example: {example}", rich_help_panel=panel)(function)
