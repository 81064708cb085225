"""The `swarmd` command line. Each command imports what it needs, so that --help is quick.

Data goes to standard output, messages to standard error. Exit codes: 0 done, 2 usage or configuration, 3 no
usable device or model, 4 cannot reach what was asked for, 5 another node owns the state folder, 6 not
running, 130 interrupted.
"""

import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import CommandInfo

from p2p.errors import OperatorError
from swarmd.cli import (
    inspect,
    invite,
    judged,
    lab,
    leave,
    model,
    network,
    page,
    pausing,
    person,
    plan,
    service,
    tasks,
    verify,
)
from swarmd.cli.options import (
    AsJson,
    ConfigFile,
    DeviceName,
    ModelName,
    StateDir,
    SwarmName,
    answer,
    as_state_dir,
    print_json,
    without_flag_types,
)
from swarmd.terminal import printable, tell

if TYPE_CHECKING:
    from swarmd.cli.view_notify import Send
    from swarmd.config.invitation import Invitation
    from swarmd.config.sources import Resolved
    from swarmd.protocols import View

app = typer.Typer(
    name="swarmd",
    epilog="Example: swarmd join --model tiny. Every command has --help, and most have --json.",
    no_args_is_help=True,
    # A fault of ours shows an ordinary traceback, without the values of variables
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(inspect.config_app, name="config")
app.add_typer(inspect.identity_app, name="identity")
app.add_typer(tasks.app, name="task")
app.add_typer(model.doctor_app, name="doctor")
app.command(epilog="Example: swarmd pause --for 2h")(pausing.pause)
app.command(epilog="Example: swarmd resume")(pausing.resume)
app.command(epilog="Example: swarmd export --out my-model")(model.export)
model.doctor_app.command("network", epilog="Example: swarmd doctor network --json")(network.doctor_network)
app.command(epilog="Example: swarmd bootstrap --listen /ip4/0.0.0.0/tcp/4001")(network.bootstrap)
app.command(epilog="Example: swarmd answer --bootstrap /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…")(person.answer)
app.command(epilog="Example: swarmd models")(model.models)
app.command(epilog="Example: swarmd invite --qr")(invite.invite)
app.command(epilog="Example: swarmd ui --no-browser")(page.ui)
app.command(epilog="Example: swarmd verify 0123456789abcdef0123456789abcdef, or swarmd verify --upload")(
    verify.verify
)
app.add_typer(service.app, name="service")
app.command(epilog="Example: swarmd leaderboard --judge https://judge.example")(judged.leaderboard)
app.command(epilog="Example: swarmd leave --yes")(leave.leave)
app.command(epilog="Example: swarmd logs -f")(leave.logs)
app.command("bug-report", epilog="Example: swarmd bug-report --hide-addresses")(leave.bug_report)
app.add_typer(plan.app, name="plan")
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


# Of paths that were given; wherever they are looked at first
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    An OperatorError prints its message; anything else is a bug and keeps its traceback.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # Questions hold ∧ and →; a terminal may have no such letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(arguments, prog_name="swarmd")
    except OperatorError as error:
        text = str(error)
        tell(text if "\n" in text else f"swarmd: {text}")
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
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    return 0


@app.command(
    epilog=(
        "Example: swarmd join --model qwen2.5-0.5b --judge https://judge.example --bootstrap"
        " /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
    )
)
def join(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="[swarm:…]", help="An invitation, as `swarmd invite` prints it.", show_default=False
        ),
    ] = None,
    model: ModelName = None,
    swarm: SwarmName = None,
    curriculum: Annotated[
        str | None,
        typer.Option(
            help="What the swarm asks: sapo-9, tiny-9, -strict, or own tasks: a .py or .jsonl file.",
            show_default="auto",
        ),
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(help="Address of a peer to connect to first, /ip4/…/tcp/…/p2p/<peer id>. Repeatable."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="URL of the judge that evaluates this node.", show_default="none")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Stop after this many rounds; 0: run until stopped.", show_default="0")
    ] = None,
    local: Annotated[
        int | None, typer.Option(help="Own questions to answer each round.", show_default="4")
    ] = None,
    external: Annotated[
        int | None,
        typer.Option(help="Rollouts of other nodes to train on each round, at most.", show_default="4"),
    ] = None,
    device: DeviceName = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random choices.", show_default="drawn once and kept")
    ] = None,
    state_dir: StateDir = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Address to listen on, /ip4/…/tcp/<port>. Repeatable.", show_default="any free port"
        ),
    ] = None,
    config: ConfigFile = None,
    pace: Annotated[
        float | None,
        typer.Option(
            help="Shortest time of a round, in seconds. Leaves the machine to other programs.",
            show_default="0",
        ),
    ] = None,
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--no-train",
            help="Train; or answer and share with a frozen model.",
            show_default="--train",
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Set of settings: default, or sapo-paper.", show_default="default")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per round on standard output.")
    ] = False,
) -> None:
    """Join the swarm and train until stopped.

    Ctrl-C finishes the round, saves and exits; the next join resumes.
    """
    if sys.stderr.isatty():
        tell("starting swarmd …")
    from swarmd.config.sources import resolve

    flags: dict[str, object] = {
        "model": model,
        "swarm": swarm,
        "bootstrap": bootstrap,
        "judge": judge,
        "rounds": rounds,
        "local": local,
    }
    flags |= {
        "external": external,
        "device": device,
        "seed": seed,
        "listen": listen,
        "pace": pace,
        "profile": profile,
    }
    flags["curriculum"] = curriculum
    flags["train"] = None if train is None else "on" if train else "off"
    accepted = invite.accept(invitation) if invitation is not None else None
    resolved = resolve(
        inspect.config_file(config), os.environ, flags, accepted.settings() if accepted else {}
    )
    raise typer.Exit(_join(resolved, accepted, as_state_dir(state_dir), as_json))


def _join(resolved: "Resolved", accepted: "Invitation | None", folder: Path, as_json: bool) -> int:
    from swarmd.daemon.choices import recalled, remember, require_tasks
    from swarmd.policy.models import preflight
    from swarmd.state.folder import StateFolder

    node_config, notes = recalled(resolved, folder)
    for note in notes:
        tell(note)
    require_tasks(resolved, node_config, folder)
    if accepted:
        invite.say_what_is_joined(accepted, resolved, node_config)
    preflight.check(node_config.model)
    with StateFolder.open(folder) as state:
        state.require_room()
        from swarmd.cli.view_log import LogView
        from swarmd.cli.view_notify import NotifyView
        from swarmd.cli.view_plain import StartView

        view = NotifyView(LogView(StartView(_view(as_json))), _notifier(node_config.notify))
        try:
            from swarmd.daemon.daemon import run_node

            code = run_node(node_config, state, view, lambda: remember(resolved, folder))
            view.ended(None)
        except OperatorError as error:
            view.ended(str(error))
            raise
        finally:
            view.close()
        return code


def _notifier(wanted: str) -> "Send":
    from swarmd.cli.view_notify import nothing, notifier

    found = notifier() if wanted == "on" else nothing
    if found is None:
        print(
            'notify is "on", and there is neither notify-send nor osascript here: nothing will be shown',
            file=sys.stderr,
        )
    return found or nothing


def _view(as_json: bool) -> "View":
    """Choose the view: JSON if asked for, the live page on a terminal that can show it, else plain lines."""
    from swarmd.cli.view_plain import JsonView, PlainView

    if as_json:
        return JsonView(sys.stdout, PlainView(sys.stderr))
    if (
        sys.stderr.isatty()
        and os.environ.get("TERM") not in (None, "dumb")
        and sys.stderr.encoding.lower().replace("-", "") == "utf8"
    ):
        from swarmd.cli.view_live import LiveView

        return LiveView()
    return PlainView(sys.stderr)


@app.command(epilog="Example: swarmd status --watch")
def status(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep running and show every change.")] = False,
) -> None:
    """Show the node's state, last round, reward, peers and refused messages."""
    from swarmd.daemon.control import call
    from swarmd.daemon.status_words import status_lines

    folder = as_state_dir(state_dir)
    if watch:
        _watch(folder, as_json)
    document = call(folder, "status")
    answer(document, "\n".join(status_lines(document)), as_json)


def _watch(folder: Path, as_json: bool) -> None:
    """Show the running node until interrupted or until it stops (NotRunning, exit code 6)."""
    from swarmd.cli.view_plain import PlainView
    from swarmd.daemon.control import call

    view: View = PlainView(sys.stdout)
    if not as_json and sys.stdout.isatty():
        from rich.console import Console

        from swarmd.cli.view_live import LiveView

        view = LiveView(Console())
    shown: Mapping[str, Any] | None = None
    try:
        while True:
            document = call(folder, "status")
            if as_json and document != shown:
                print_json(document)
            elif not as_json:
                view.status(document)
                if shown is not None and document["last"] and document["last"] != shown["last"]:
                    view.round(document["last"])
            shown = document
            time.sleep(1)
    finally:
        view.close()


@app.command(epilog="Example: swarmd peers --json")
def peers(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List connected peers, and peers whose rollouts arrive through others."""
    from swarmd.daemon.control import call
    from swarmd.daemon.status_words import peer_lines

    document = call(as_state_dir(state_dir), "peers")
    answer(document, "\n".join(peer_lines(document)), as_json)


@app.command(epilog="Example: swarmd stop")
def stop(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until it has stopped.", min=0, max=86_400)
    ] = 660.0,
) -> None:
    """Stop the node: it finishes its round, saves and exits. Waits until it has."""
    from swarmd.daemon.control import wait_until_gone
    from swarmd.errors import Unreachable

    _tell(state_dir, "stop", False, "finishing the current round, then stopping …", quiet=as_json)
    folder = as_state_dir(state_dir)
    if not wait_until_gone(folder, timeout):
        raise Unreachable(
            f"{folder}: the node still runs after {timeout:g} s. Wait longer with --timeout, or look at"
            " `swarmd status`."
        )
    if as_json:
        print_json({"schema": 1, "stopped": True})
    else:
        print("Node stopped.", file=sys.stderr)


def _tell(state_dir: Path | None, operation: str, as_json: bool, said: str, *, quiet: bool = False) -> None:
    from swarmd.daemon.control import call

    document = call(as_state_dir(state_dir), operation)
    if as_json:
        print_json(document)
    elif not quiet:
        print(said, file=sys.stderr)


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
    "This machine": "models doctor plan config identity bug-report version",
    "A swarm's operator, a person, a researcher": "bootstrap answer export task lab",
}


def _arrange_help() -> None:
    panels = {name: panel for panel, names in _PANELS.items() for name in names.split()}
    without_flag_types(app)

    def name_of(command: CommandInfo) -> str:
        return str(command.name or getattr(command.callback, "__name__", ""))

    app.registered_commands.sort(key=lambda command: list(panels).index(name_of(command)))
    for command in app.registered_commands:
        command.rich_help_panel = panels[name_of(command)]
    for group in app.registered_groups:
        group.rich_help_panel = panels[str(group.name)]


_arrange_help()
