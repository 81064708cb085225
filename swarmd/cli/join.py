"""`swarmd join`, `swarmd invite` and `swarmd leave`: join a swarm, invite people to it, and leave it.

The joined swarm is written to the state folder, so the next `swarmd join` needs no arguments.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.cli.options import (
    AsJson,
    ConfigFile,
    DeviceName,
    ModelName,
    StateDir,
    SwarmName,
    Yes,
    answer,
    as_state_dir,
    ask,
    confirm,
)
from swarmd.cli.service import go_to_background, installed_for
from swarmd.cli.settings import configured, joined
from swarmd.errors import ConfigError, NotRunning
from swarmd.state.folder import LOCK_FILE, StateFolder, in_use, leaving, remove
from swarmd.terminal import ended_by_signals, hang_up, printable, shows_pages, tell

if TYPE_CHECKING:
    from swarmd.config.config import NodeConfig
    from swarmd.config.invitation import Invitation
    from swarmd.config.sources import Resolved
    from swarmd.protocols import View


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
            help=(
                "The swarm's tasks: ladder-9, sapo-9 or tiny-9, also with -strict; tools-6; or a file of own"
                " tasks."
            ),
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
            help="Address to listen on, /ip4/…/tcp/<port>. Repeatable.", show_default="the node's own port"
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
    background: Annotated[
        bool, typer.Option("--background", help="Return once the node runs; it continues without a terminal.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show technical figures, too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per round on standard output.")
    ] = False,
) -> None:
    """Join the swarm and train until stopped.

    Ctrl-C finishes the round, saves and exits; the next join resumes.
    """
    if sys.stderr.isatty():
        tell("starting swarmd …")
        if hang_up() and not background:
            tell("Closing this terminal stops the node; with --background it continues.")
    runs = go_to_background(partial(_say_it_runs, state_dir, as_json)) if background else lambda: None
    flags: dict[str, object] = {
        "model": model,
        "swarm": swarm,
        "curriculum": curriculum,
        "bootstrap": bootstrap,
        "judge": judge,
        "rounds": rounds,
        "local": local,
        "external": external,
        "device": device,
        "seed": seed,
        "listen": listen,
        "pace": pace,
        "profile": profile,
        "train": None if train is None else "on" if train else "off",
    }
    try:
        # Until the daemon handles signals itself: importing it takes a second or more.
        with ended_by_signals():
            accepted = accept(invitation) if invitation is not None else None
            resolved = configured(config, flags, accepted.settings() if accepted else None)
            raise typer.Exit(
                _join(resolved, accepted, as_state_dir(state_dir), partial(_view, as_json, verbose), runs)
            )
    except (KeyboardInterrupt, SystemExit):
        tell("stopped; `swarmd join` continues from the last checkpoint")
        raise


def _say_it_runs(state_dir: Path | None, as_json: bool, pid: int) -> None:
    where = f" --state-dir {quote(str(as_state_dir(state_dir)))}" if state_dir else ""
    lines = [
        f"The node runs in the background, as process {pid}.",
        f"Watch it: `swarmd status --watch{where}`, or `swarmd ui{where}` in a browser",
        f"Stop it: `swarmd stop{where}`",
        f"After a restart: `swarmd join --background{where}`, or once `swarmd service install`",
    ]
    answer({"schema": 1, "pid": pid, "state_dir": str(as_state_dir(state_dir))}, "\n".join(lines), as_json)


def _join(
    resolved: "Resolved",
    accepted: "Invitation | None",
    folder: Path,
    shown: Callable[[], "View"],
    runs: Callable[[], None],
) -> int:
    from swarmd.daemon.choices import recalled, remember
    from swarmd.policy.models import preflight

    node_config, notes = recalled(resolved, folder)
    for note in notes:
        tell(note)
    joining = what_is_joined(accepted, resolved, node_config) if accepted else ""
    preflight.check(node_config.model)
    with StateFolder.open(folder) as state:
        state.require_room()
        from swarmd.cli.views.plain import LogView

        with closing(LogView(shown())) as view:
            view.say_that_it_starts()
            if joining:
                view.talk(joining)
            from swarmd.daemon.daemon import run_node

            def works() -> None:
                remember(resolved, folder)
                runs()

            return run_node(node_config, state, view, works)


def _view(as_json: bool, verbose: bool = False) -> "View":
    """Choose the view: JSON if asked for, the live page on a terminal that can show it, else plain lines."""
    from swarmd.cli.views.plain import JsonView, PlainView

    if as_json:
        return JsonView(sys.stdout, sys.stderr)
    if shows_pages(sys.stderr):
        from swarmd.cli.views.live import HINT, LiveView

        return LiveView(hint=HINT + " · closing this one stops the node" * bool(hang_up()), verbose=verbose)
    return PlainView(sys.stderr)


def invite(
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Print one line for other people's `swarmd join`: swarm, curriculum, model, addresses and judge."""
    from swarmd.daemon.inviting import invite as compose
    from swarmd.exchange.swarm_id import curriculum_of

    folder = as_state_dir(state_dir)
    try:
        document = ask(folder, "invitation", dict, timeout=30.0)
    except NotRunning:
        # No node runs: invite to the swarm that the next one would join.
        node_config = joined(config, folder, {})
        if not node_config.swarm.bootstrap:
            raise NotRunning(
                f"No node is running in {folder}, and no bootstrap address is configured: nobody could be"
                " dialled. Start the node with `swarmd join`, then invite; or set swarm.bootstrap."
            ) from None
        document = compose(node_config, curriculum_of(node_config))
    for note in document["notes"]:
        tell(printable(note))
    answer(document, document["invitation"], as_json)


def accept(text: str) -> "Invitation":
    """Read an invitation; check that its model is not a local folder. Raises ConfigError."""
    from swarmd.config.invitation import read_invitation
    from swarmd.policy.models.hub import is_folder

    invitation = read_invitation(text)
    if invitation.model and is_folder(invitation.model):
        raise ConfigError(
            f"the invitation cannot be used: its model is {invitation.model}, and that is a folder here. Run"
            " `swarmd join` in another folder."
        )
    return invitation


def what_is_joined(invitation: "Invitation", resolved: "Resolved", node_config: "NodeConfig") -> str:
    """Describe the swarm to join, and print each setting that differs from the invitation.

    Raises ConfigError if the settings belong to another swarm.
    """
    from swarmd.config.schema import INVITED
    from swarmd.config.sources import flatten
    from swarmd.daemon.choices import words
    from swarmd.exchange.swarm_id import curriculum_of, require_same_swarm

    values, swarm = flatten(node_config), node_config.swarm
    for key, value in invitation.settings().items():
        said = list(value) if isinstance(value, tuple) else value
        if values[key] != said:
            origin = resolved.origins[key]
            whose = origin if origin != INVITED else "this state folder"
            tell(
                printable(f"{key}: {words(values[key])}, as {whose} says; the invitation says {words(said)}")
            )
    curriculum = curriculum_of(node_config)
    require_same_swarm(invitation, curriculum)
    judge = f"judged by {node_config.judge.url}" if node_config.judge.url else "no judge"
    count = len(swarm.bootstrap)
    first = f"{count} address{'es' * (count != 1)} to dial first"
    return f"joining swarm {swarm.name}: {curriculum.name}, model {node_config.model.name}, {judge}, {first}"


def leave(
    everything: Annotated[
        bool, typer.Option("--everything", help="Also remove the key, the training and the logs.")
    ] = False,
    yes: Yes = False,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Stop the node and forget the swarm: its settings, and the peers it met.

    The key, the training and its figures stay.
    """
    from swarmd.daemon.local_api import control

    folder = as_state_dir(state_dir)
    try:
        # Every state folder has a lock file; a folder without it may contain unrelated checkpoints.
        (folder / LOCK_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotRunning(
            f"{folder}: there is no state folder, so nothing to leave. Name another with --state-dir."
        ) from None
    if (file := installed_for(folder)) is not None:
        # The service would start the node again, in the default swarm.
        raise ConfigError(f"{file} starts the node again. Run `swarmd service uninstall` first.")
    if not yes:
        _show_leaving(folder, *leaving(folder, everything=everything), running=in_use(folder))
        confirm("Leave?")
    elif in_use(folder):
        tell("the node stops: it finishes its round and saves")
    if in_use(folder):
        ask(folder, "stop", dict)
        control.wait_until_gone(folder, 660.0)
    with StateFolder.open(folder):
        removed, stays = leaving(folder, everything=everything)
        remove(folder, removed)
    document = {
        "schema": 1,
        "removed": [path.name for path in removed],
        "stays": [path.name for path in stays],
    }
    answer(document, f"{folder}: removed {_names(removed)}\nYou left the swarm.", as_json, people=sys.stderr)


def _show_leaving(folder: Path, removed: Sequence[Path], stays: Sequence[Path], *, running: bool) -> None:
    lines = [
        *(["the node would stop: it finishes its round and saves"] if running else []),
        f"in {folder}",
        f"would be removed: {_names(removed)}",
        f"would stay: {_names(stays)}",
        "downloaded models stay in the hub's cache (`hf cache ls`), converted GGUF files in"
        " swarmd-gguf next to it, settings in `swarmd config path`",
    ]
    if any(path.name == "identity.key" for path in removed):
        lines.append("the node's identity is lost with its key: copy identity.key first, if you want it back")
    tell("\n".join(lines))


def _names(paths: Any) -> str:
    return ", ".join(path.name for path in paths) or "nothing"
