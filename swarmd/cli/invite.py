"""`swarmd invite`: print an invitation to this node's swarm. Also what `swarmd join` does with one."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.cli.inspect import config_file
from swarmd.cli.options import AsJson, ConfigFile, StateDir, as_state_dir, print_json
from swarmd.errors import ConfigError, NotRunning
from swarmd.terminal import printable

if TYPE_CHECKING:
    from swarmd.config.config import NodeConfig
    from swarmd.config.invitation import Invitation
    from swarmd.config.sources import Resolved


def invite(
    state_dir: StateDir = None,
    config: ConfigFile = None,
    qr: Annotated[
        bool, typer.Option("--qr", help="Also draw it as a QR code; needs `pip install 'swarmd\\[qr]'`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print one line that others give to `swarmd join`: swarm, curriculum, model, addresses and judge."""
    from swarmd.config.invitation import as_link

    if qr and as_json:
        raise ConfigError("--qr draws for people and --json prints for programs. Choose one.")
    document = _document(as_state_dir(state_dir), config_file(config))
    for note in document["notes"]:
        print(printable(note), file=sys.stderr)
    text = document["invitation"]
    if as_json:
        print_json({**document, "link": as_link(text)})
        return
    print(text)
    if qr:
        _draw(as_link(text))


def _document(folder: Path, file: Path | None) -> dict[str, Any]:
    """Return the invitation of the node that runs in `folder`, else of one configured like it."""
    from swarmd.config.sources import resolve
    from swarmd.daemon import control
    from swarmd.daemon.choices import recalled
    from swarmd.daemon.inviting import invite as compose
    from swarmd.exchange.swarm_id import curriculum_of

    try:
        return control.call(folder, "invitation", timeout=30.0)
    except NotRunning:
        node_config, _ = recalled(resolve(file, os.environ, {}), folder)
    if not node_config.swarm.bootstrap:
        raise NotRunning(
            f"No node is running in {folder}, and no bootstrap address is configured: nobody could be"
            " dialled. Start the node with `swarmd join`, then invite; or set swarm.bootstrap."
        )
    return compose(node_config, curriculum_of(node_config))


def _draw(text: str) -> None:
    try:
        import segno
    except ImportError:
        raise ConfigError(
            "no QR code can be drawn: segno is missing. Run `pip install 'swarmd[qr]'`, or leave --qr out."
        ) from None
    segno.make(text, error="l", micro=False).terminal(compact=True)


def accept(text: str) -> "Invitation":
    """Read an invitation, and check what only this machine can tell. ConfigError."""
    from swarmd.config.invitation import read_invitation
    from swarmd.policy.models.hub import is_folder

    invitation = read_invitation(text)
    if invitation.model and is_folder(invitation.model):
        raise ConfigError(
            f"the invitation cannot be used: its model is {invitation.model}, and that is a folder here. Run"
            " it in another folder."
        )
    return invitation


def say_what_is_joined(invitation: "Invitation", resolved: "Resolved", node_config: "NodeConfig") -> None:
    """Print what will be joined, and each setting in which a flag overrides the invitation.

    Raises ConfigError where the settings name another swarm.
    """
    from swarmd.config.sources import INVITED, flatten
    from swarmd.exchange.swarm_id import curriculum_of, swarm_digest

    values, swarm = flatten(node_config), node_config.swarm
    for key, value in invitation.settings().items():
        said = list(value) if isinstance(value, tuple) else value
        if values[key] != said:
            origin = resolved.origins[key]
            whose = origin if origin != INVITED else "this state folder"
            print(
                printable(
                    f"{key}: {_words(values[key])}, as {whose} says; the invitation says {_words(said)}"
                ),
                file=sys.stderr,
            )
    curriculum = curriculum_of(node_config)
    if invitation.digest and swarm_digest(curriculum) != invitation.digest:
        raise ConfigError(_another_swarm(invitation, curriculum.name))
    judge = f"judged by {node_config.judge.url}" if node_config.judge.url else "no judge"
    count = len(swarm.bootstrap)
    first = f"{count} address{'es' * (count != 1)} to dial first"
    print(
        printable(
            f"joining swarm {swarm.name}: {curriculum.name}, model {node_config.model.name}, {judge}, {first}"
        ),
        file=sys.stderr,
    )


def _another_swarm(invitation: "Invitation", here: str) -> str:
    """Explain why the node would never meet those who invited it."""
    from swarmd.config.curriculum_name import BUILT_IN
    from swarmd.state.logs import installed_version

    versions = f"swarmd {installed_version()} with reasoning-gym {installed_version('reasoning-gym')}"
    if invitation.curriculum == here and here in BUILT_IN:
        return (
            f"the invitation is from another version: its {here} is not that of {versions}, which is here."
            " Update both to the same."
        )
    if invitation.curriculum == here:
        return (
            f"the invitation is for other tasks called {here}: yours differ from theirs. Get their file, and"
            " give it with --curriculum."
        )
    if invitation.curriculum in BUILT_IN:
        return (
            f"the invitation is for {invitation.curriculum}, and --curriculum says {here}: they never meet."
            " Leave one of the two out."
        )
    return (
        f"the invitation is for the tasks {invitation.curriculum}, which {versions} does not have: own tasks,"
        " or those of a newer version. Get the file from whoever invited you and name it with --curriculum,"
        " or update."
    )


def _words(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value or "none")
