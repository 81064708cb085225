"""`swarmd pause` and `swarmd resume`."""

import re
import sys
import time
from datetime import datetime, timedelta
from typing import Annotated

import typer

from swarmd.cli.options import AsJson, StateDir, as_state_dir, print_json
from swarmd.errors import SwarmdError

_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def pause(
    for_: Annotated[
        str | None,
        typer.Option("--for", help="How long, such as 2h, 1h30m or 45m.", show_default="until resumed"),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Until a time, such as 18:00 or 2026-11-24T08:00.", show_default="until resumed"),
    ] = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Pause training at once, within a round if need be.

    The node stays in the swarm. A pause outlasts a restart of the node.
    """
    from swarmd.daemon.control import call

    end = pause_end(for_, until, time.time())
    document = call(as_state_dir(state_dir), "pause", until=end)
    if as_json:
        print_json(document)
    else:
        words = (
            f"until {datetime.fromtimestamp(end):%a %H:%M}; `swarmd resume` ends it earlier"
            if end
            else "`swarmd resume` continues"
        )
        print(f"pausing; {words}", file=sys.stderr)


def resume(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Resume training, whatever pauses it.

    Your own pause ends. A condition that holds now (battery, hours, ...) is set aside until it has ended.
    """
    from swarmd.daemon.control import call

    document = call(as_state_dir(state_dir), "resume")
    if as_json:
        print_json(document)
    else:
        print("training resumed", file=sys.stderr)


def pause_end(for_: str | None, until: str | None, now: float) -> float | None:
    """Return when the pause ends, in seconds since the epoch, or None for a pause without an end.

    Raises SwarmdError.
    """
    if for_ is not None and until is not None:
        raise SwarmdError("--for and --until both say when the pause ends. Give one of them.")
    if for_ is not None:
        return now + _duration(for_)
    return _moment(until, now) if until is not None else None


def _duration(text: str) -> float:
    parts = re.fullmatch(
        r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?", text.strip().lower()
    )
    seconds = (
        sum(
            int(number) * size
            for number, size in zip(parts.groups(), _SECONDS.values(), strict=True)
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


def _moment(text: str, now: float) -> float:
    local = datetime.fromtimestamp(now)
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
            hour, _, minute = text.strip().partition(":")
            found = local.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
            found += timedelta(days=found <= local)
        else:
            found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SwarmdError(
            f"--until {text!r} is no time. Give one such as 18:00, or 2026-11-24T08:00."
        ) from None
    if found.timestamp() <= now:
        raise SwarmdError(f"--until {text}: that has passed.")
    return found.timestamp()
