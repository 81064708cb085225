"""`swarmd service`: run the node as a user service, by systemd or launchd.

Also `swarmd join --background`: the starter waits until a process without a terminal runs the node.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from swarmd.cli.options import AsJson, StateDir, answer
from swarmd.errors import ConfigError
from swarmd.state.folder import default_state_dir
from swarmd.system.service import UserService, service_word, user_service

# The last byte that a node in the background writes to its starter: it runs. No message contains it.
RUNS: Final = b"\0"
app = typer.Typer(
    help="Run the node as a service of this user: systemd on Linux, launchd on macOS.", no_args_is_help=True
)


@app.command(epilog="Example: swarmd service install --print")
def install(
    state_dir: StateDir = None,
    show: Annotated[bool, typer.Option("--print", help="Only print the file that would be written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start `swarmd join` now and whenever you log in.

    It continues with the swarm that this state folder has joined, or with the configuration.
    """
    service = _service(state_dir)
    if show:
        print(service.content.decode(), end="")
        return
    new = service.install()
    done = f"{service.file}: " + ("installed and started" if new else "was installed already; started")
    answer(
        {"schema": 1, "file": str(service.file), "new": new},
        "\n".join(filter(None, (done, service.note))),
        as_json,
        people=sys.stderr,
    )


@app.command(epilog="Example: swarmd service uninstall")
def uninstall(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Stop the service, after its round, and remove its file. The state folder stays."""
    service = _service(state_dir)
    aside = service.uninstall()
    kept = f"; it differed from this version's file, so it is kept as {aside}" if aside else ""
    answer(
        {"schema": 1, "file": str(service.file), "kept": str(aside) if aside else None},
        f"{service.file}: stopped and removed{kept}",
        as_json,
    )


@app.command(epilog="Example: swarmd service status --json")
def status(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Say whether the service is installed, whether its file is this version's, and whether it runs."""
    service = _service(state_dir)
    document = {
        "schema": 1,
        "file": str(service.file),
        "installed": service.file.exists(),
        "current": service.is_current,
        "active": service.is_active,
    }
    text = f"{service.file}: installed, {'running' if document['active'] else 'not running'}"
    if not document["installed"]:
        text = f"not installed: there is no {service.file}. `swarmd service install` makes it."
    elif not document["current"]:
        text += "; its file differs from this version's (`swarmd service install --print`)"
    answer(document, text, as_json)


def installed_for(folder: Path) -> Path | None:
    """Return the file of the service that starts this state folder's node, or None."""
    try:
        service = _service(None)
        content = service.file.read_bytes()
        names = {os.fsencode(folder), service_word(folder)}
    except (ConfigError, OSError):
        return None
    own = b"--state-dir" not in content
    # A service of /node2 must not match /node.
    named = any(re.search(re.escape(name) + rb"""["'\s<]""", content) for name in names)
    return service.file if (own and folder == default_state_dir()) or named else None


def _service(state_dir: Path | None) -> UserService:
    home = os.environ.get("XDG_CONFIG_HOME")
    return user_service(
        sys.platform,
        state_dir.expanduser().absolute() if state_dir else None,
        Path.home(),
        Path(home) if home else None,
    )


def go_to_background(running: Callable[[int], object]) -> Callable[[], None]:
    """Continue in a new process without a terminal; end the present one as soon as the node runs.

    Call it before threads and sockets exist, because a fork copies neither. Until the node runs, its output
    is passed on; if it ends earlier, the present process ends with the same exit code.

    Args:
        running: called in the present process with the node's process id.

    Returns:
        In the new process, a function to call once the node runs.
    """
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if node := os.fork():
        os.close(writes)
        if (code := _exit_code(node, reads)) is None:
            running(node)
        raise typer.Exit(code or 0)
    # In a new session, neither Ctrl-C nor a closed terminal reaches the node.
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for end, descriptor in ((nowhere, 0), (nowhere, 1), (writes, 2)):
        os.dup2(end, descriptor)
    os.close(reads)
    os.close(writes)

    def runs() -> None:
        os.write(2, RUNS)
        os.dup2(nowhere, 2)

    return runs


def _exit_code(node: int, reads: int) -> int | None:
    """Pass on the node's output until it runs (None) or ends (its exit code). Ctrl-C stops it."""
    try:
        while said := os.read(reads, 1 << 16):
            os.write(2, said.removesuffix(RUNS))
            if said.endswith(RUNS):
                return None
        code = os.waitstatus_to_exitcode(os.waitpid(node, 0)[1])
    except KeyboardInterrupt:
        os.kill(node, signal.SIGTERM)
        raise
    return code if code >= 0 else 128 - code
