"""Runs a command, and ends it when the owner closes this process's standard input or dies.

Uses only the standard library.

    python guard.py FOLDER COMMAND …

When standard input ends or the command ends by itself, all processes of this process group are killed. Start
this script in a new session, so that its group has only the processes that it started. If standard input
ended, FOLDER is also removed.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time

POLL_S = 0.2
# Seconds from SIGTERM to SIGKILL.
GRACE_S = 10.0


def main(folder: str, command: list[str]) -> int:
    # SIGTERM to the group must not end this process. A handler is set because the command would inherit
    # SIG_IGN, but it does not inherit a handler.
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
        # If the owner was killed, its weights are still in the folder.
        shutil.rmtree(folder, ignore_errors=True)
    # Kill the remaining processes of the command, and this process.
    os.killpg(0, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
