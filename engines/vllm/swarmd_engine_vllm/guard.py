"""Runs a command, and ends it when its owner is gone: when this process's standard input closes.

Standard library only.

    python guard.py FOLDER COMMAND …

When standard input ends, because it was closed or because its owner died in whatever way, or when the command
ends by itself, everything in this process's group is ended. Start it in a session of its own: then its group
is what it started. Where standard input ended, FOLDER is removed too.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time

POLL_S = 0.2
# The time from the first signal to the last.
GRACE_S = 10.0


def main(folder: str, command: list[str]) -> int:
    # Our own signal to the group must not end us. The command does not inherit a handler; it would inherit
    # "ignore".
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    gone = False
    while child.poll() is None and not gone:
        gone = bool(select.select([0], [], [], POLL_S)[0])
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < until:
        time.sleep(POLL_S)
    if gone:
        # A killed owner leaves the weights there that it handed over.
        shutil.rmtree(folder, ignore_errors=True)
    # Kill what the command started and left behind, and ourselves.
    os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
