"""Commands for a running node: status, peers, ui, logs and bug-report; pause, resume and stop."""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from swarmd.cli.options import (
    AsJson,
    ConfigFile,
    StateDir,
    Yes,
    answer,
    as_state_dir,
    ask,
    confirm,
    print_json,
)
from swarmd.cli.settings import with_origins
from swarmd.config.hours import clock_words
from swarmd.daemon.local_api.status_words import NAME_COLUMNS, answer_lines, peer_lines, status_lines
from swarmd.errors import SwarmdError, Unreachable
from swarmd.protocols import View
from swarmd.state.folder import LOG_FILE
from swarmd.state.logs import for_people, installed_version, lines_of
from swarmd.state.status import AnswerList, PeerList, Status
from swarmd.terminal import printable, shows_pages, tell


def status(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep running and show every change.")] = False,
    answers: Annotated[
        bool,
        typer.Option("--answers", help="Show the newest questions, with the model's answers and rewards."),
    ] = False,
) -> None:
    """Show the node's state, last round, reward, peers and refused messages."""
    folder = as_state_dir(state_dir)
    if answers:
        found = ask(folder, "answers", AnswerList)
        answer(found, "\n".join(answer_lines(found.answers)), as_json)
        return
    if watch:
        _watch(folder, as_json)
    status = ask(folder, "status", Status)
    answer(status, "\n".join(status_lines(status)), as_json, indent=" " * (NAME_COLUMNS + 1))


def _watch(folder: Path, as_json: bool) -> None:
    """Show the running node until interrupted, or until it stops: then NotRunning, exit code 6."""
    from swarmd.cli.views.plain import Lines

    # Unlike the node's own views, this one ends the command if nobody reads its output any more.
    view: View = Lines(lambda text: tell(text, sys.stdout), time.monotonic)
    if not as_json and shows_pages(sys.stdout):
        from rich.console import Console

        from swarmd.cli.views.live import LiveView

        view = LiveView(Console())
    shown: Status | None = None
    try:
        while True:
            status = ask(folder, "status", Status)
            if as_json and status != shown:
                print_json(status)
            elif not as_json:
                view.status(status)
                if shown is not None and status.last and status.last != shown.last:
                    view.round(status.last)
            shown = status
            time.sleep(1)
    finally:
        view.close()


def peers(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List connected peers, and peers whose rollouts arrive through others."""
    found = ask(as_state_dir(state_dir), "peers", PeerList)
    answer(found, "\n".join(peer_lines(found.peers)), as_json)


def pause(
    for_: Annotated[
        str | None,
        typer.Option("--for", help="How long, such as 2h, 1h30m or 45m.", show_default="until resumed"),
    ] = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Pause training at once, within a round if need be.

    The node stays in the swarm. A pause outlasts a restart of the node.
    """
    now = time.time()
    end = None if for_ is None else now + duration_s(for_)
    document = ask(as_state_dir(state_dir), "pause", dict, until=end)
    words = "`swarmd resume` continues"
    if end:
        at = clock_words(datetime.fromtimestamp(end), datetime.fromtimestamp(now))
        words = f"until {at}; `swarmd resume` ends it earlier"
    answer(
        document,
        "\n".join(filter(None, (f"pausing; {words}", document["warning"]))),
        as_json,
        people=sys.stderr,
    )


def resume(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Resume training, whatever pauses it.

    Your own pause ends. A condition that holds now (battery, hours, ...) is set aside until it has ended.
    """
    document = ask(as_state_dir(state_dir), "resume", dict)
    done = "resumed" if document["ended"] else "nothing was paused"
    answer(document, "\n".join(filter(None, (done, document["warning"]))), as_json, people=sys.stderr)


def duration_s(text: str) -> float:
    """Return the seconds of a length of time, such as 1h30m. Raises SwarmdError."""
    parts = re.fullmatch(
        r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?", text.strip().lower()
    )
    seconds = (
        sum(
            int(number) * size
            for number, size in zip(parts.groups(), (86_400, 3600, 60, 1), strict=True)
            if number
        )
        if parts
        else 0
    )
    if not seconds:
        raise SwarmdError(
            f"--for {text!r} is no length of time. Give hours and minutes, such as 2h, 1h30m or 45m."
        )
    return seconds


def stop(
    now: Annotated[
        bool, typer.Option("--now", help="Cut the round: save the rounds before it, and end within seconds.")
    ] = False,
    state_dir: StateDir = None,
    as_json: AsJson = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until it has stopped.", min=0, max=86_400)
    ] = 660.0,
) -> None:
    """Stop the node: it finishes its round, saves and exits. Waits until it has."""
    from swarmd.daemon.local_api.control import wait_until_gone

    folder = as_state_dir(state_dir)
    document = ask(folder, "stop", dict, now=now)
    if not as_json:
        hint = "" if now else " (`swarmd stop --now` does not wait for the round)"
        tell(": ".join(filter(None, ("stopping", document.get("cause")))) + f" …{hint}")
    if not wait_until_gone(folder, timeout):
        raise Unreachable(
            f"{folder}: the node still runs after {timeout:g} s. Wait longer with --timeout, or look at"
            " `swarmd status`."
        )
    answer({"schema": 1, "stopped": True}, "Node stopped.", as_json, people=sys.stderr)


def ui(
    state_dir: StateDir = None,
    as_json: AsJson = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser, where there is a screen.")
    ] = True,
) -> None:
    """Open the running node's page in a browser, and print its address.

    The address holds a secret: anybody who has it can stop the node.
    """
    folder = as_state_dir(state_dir)
    document = ask(folder, "ui", dict)
    answer(document, document["address"], as_json)
    if browser and not as_json and not _open(folder / "ui.html", document["address"]):
        port = document["address"].partition("/?")[0].rpartition(":")[2]
        tell(
            f"No screen here. On a machine with one: ssh -L {port}:127.0.0.1:{port} HOST, and open that"
            " address."
        )


def _open(file: Path, address: str) -> bool:
    """Open a browser at a file that leads to the address.

    Everybody could read the address itself in the list of processes.
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
    path = as_state_dir(state_dir) / ("trainer.log" if trainer else LOG_FILE)
    for line in lines_of(path, lines, follow=follow):
        if as_json:
            print(line, flush=follow)
        else:
            tell(for_people(line), sys.stdout, indent="    ")


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
    """Put versions, settings, status, figures, logs and events into one file, without secrets; send nothing.

    A terminal shows it first.
    """
    from swarmd.system.bug_report import collect, write_report

    folder = as_state_dir(state_dir)
    files = collect(folder, _of_running_node(folder, config), Path.home(), addresses=hide_addresses)
    to = (out or Path("swarmd-bug-report.zip")).expanduser().absolute()
    listing = [f"{len(text.encode()):>9,} bytes  {name}" for name, text in files.items()]
    if not yes and sys.stdin.isatty() and sys.stdout.isatty():
        import pydoc

        shown = "\n".join([*listing, *(f"\n=== {name}\n{text.rstrip()}" for name, text in files.items())])
        pydoc.pager("\n".join(map(printable, shown.splitlines())) + "\n")
        confirm(f"Write these {len(files)} files to {to}?")
    else:
        print("\n".join(listing))
    write_report(files, to)
    tell(f"{to}: written, for you alone to read; nothing was sent. Look through it before you hand it on.")


def _of_running_node(folder: Path, config: Path | None) -> dict[str, str]:
    """Collect versions, settings and, if a node runs, its status, as files by name."""
    packages = ("swarmd", "torch", "transformers", "libp2p", "hivemind", "reasoning-gym", "huggingface_hub")
    versions = {"system": platform.platform(), "python": sys.version} | {
        name: installed_version(name) for name in packages
    }
    found = {"versions.json": json.dumps(versions, indent=1)}
    told: dict[str, Callable[[], object]] = {
        "settings": partial(with_origins, config, folder),
        "status": partial(ask, folder, "status", Status),
        "peers": partial(ask, folder, "peers", PeerList),
    }
    for name, tell_it in told.items():
        try:
            found[f"{name}.json"] = msgspec.json.format(msgspec.json.encode(tell_it()), indent=1).decode()
        except SwarmdError as error:
            found[f"{name}.json"] = str(error)
    return found
