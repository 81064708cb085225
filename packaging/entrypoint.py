"""Prepare a container's node so that it meets the other nodes, and become the node's program.

A bootstrap address ends in a peer id, and a peer id is known only once there is a key. So the first node
makes its key, writes its whole address into a file that the other nodes read at their start. It
is set up by the environment:

    MEETING_FILE   the file, in a volume that all nodes share
    MEETING_AS     only for the first node: its address for the other nodes, as /dns4/node-1/tcp/4001
    MEETING_WAIT   seconds that the other nodes wait for the file; by default 300

Without MEETING_FILE the command is run as it is. Used as: entrypoint.py PROGRAM ARGUMENTS…
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from p2p.address import parse_bootstrap
from p2p.errors import OperatorError
from p2p.identity import Identity

KEY_FILE = "identity.key"  # of a node's state folder
LOOK = 0.5  # seconds between two looks for the file


class NobodyToMeet(OperatorError):
    """The meeting file did not appear."""


def announce(state_dir: Path, address: str, meeting: Path) -> str:
    """Write this node's whole address, `address` and its peer id, into the meeting file.

    Makes the key if there is none yet.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = f"{address}/p2p/{Identity.load_or_create(state_dir / KEY_FILE).peer_id}"
    parse_bootstrap(whole)
    fresh = meeting.with_name(f".{meeting.name}.{os.getpid()}")
    fresh.write_text(whole + "\n", encoding="ascii")
    fresh.replace(meeting)  # whole or not at all: another node may be reading
    return whole


def meet(meeting: Path, patience: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> str:
    """Wait for the first node's address and return it.

    Raises NobodyToMeet after `patience` seconds, BadAddress if the file holds none.
    """
    until = clock() + patience
    while not meeting.exists():
        if clock() >= until:
            raise NobodyToMeet(
                f"{meeting} did not appear in {patience:g} s. Start the first node, the one with MEETING_AS,"
                " and share the file's volume with this one."
            )
        sleep(LOOK)
    address = meeting.read_text(encoding="ascii", errors="replace").strip()
    parse_bootstrap(address)
    return address


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command to become; to `swarmd join` it adds the first node's bootstrap address."""
    meeting = environment.get("MEETING_FILE")
    if not meeting or list(arguments[:2]) != ["swarmd", "join"]:
        return list(arguments)
    address = environment.get("MEETING_AS")
    if address:
        if "--state-dir" not in arguments[:-1]:
            raise OperatorError("MEETING_AS needs --state-dir in the command, to make this node's key there.")
        state_dir = arguments[arguments.index("--state-dir") + 1]
        print(
            f"entrypoint: other nodes reach this node at {announce(Path(state_dir), address, Path(meeting))}",
            file=sys.stderr,
        )
        return list(arguments)
    patience = float(environment.get("MEETING_WAIT", "300"))
    return [*arguments, "--bootstrap", meet(Path(meeting), patience, time.monotonic, time.sleep)]


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("entrypoint: name a program, as: swarmd join --state-dir /state")
    try:
        words = command(sys.argv[1:], os.environ)
        os.execvp(words[0], words)  # noqa: S606  becoming the program is the point: it gets the signals, and the container its exit code
    except OperatorError as error:
        sys.exit(f"entrypoint: {error}")
    except (OSError, ValueError) as error:
        # The meeting file or the key's folder cannot be used, no such program, or no number
        sys.exit(f"entrypoint: {error}")


if __name__ == "__main__":
    main()
