"""`swarmd ui`: opens the page of the running node."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from swarmd.cli.options import AsJson, StateDir, answer, as_state_dir

OPENER = "ui.html"  # in the state folder


def ui(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser, where there is a screen.")
    ] = True,
) -> None:
    """Open the running node's page in a browser, and print its address.

    The address holds a secret: whoever has it can stop the node.
    """
    from swarmd.daemon.control import call

    folder = as_state_dir(state_dir)
    document = call(folder, "ui")
    answer(document, document["address"], as_json)
    if browser and not as_json and not _open(folder / OPENER, document["address"]):
        port = document["address"].partition("/?")[0].rpartition(":")[2]
        print(
            f"No screen here. On a machine with one: ssh -L {port}:127.0.0.1:{port} HOST, and open that"
            " address.",
            file=sys.stderr,
        )


def _open(file: Path, address: str) -> bool:
    """Open a browser at a file that leads to the address.

    The address itself would be read in the list of processes by everybody.
    """
    import webbrowser

    screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if os.environ.get("SSH_CONNECTION") or not screen:
        return False
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(
            '<!doctype html><meta name="referrer" content="no-referrer"><meta http-equiv="refresh"'
            f' content="0;url={address}">'
        )
    return webbrowser.open(file.as_uri())
