"""Low priority for the CPU and the disk, of this process and of those that it starts.

The disk's comes first, before there are threads and processes that would not inherit it. The CPU's comes once
the first round has been played: loading takes 10 s of the CPU, once, and beside busy programs it would take
minutes at low priority.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import psutil

# At 10 a process gets about a tenth of a core that another program wants whole. At 19 it would get a
# seventieth, and the daemon could take a trainer that was slowed down so suddenly for one that hangs.
NICE: Final = 10


def lower_cpu_priority() -> None:
    """Let other programs go first, from now on.

    What the platform does not have is left out. A lower priority stays.
    """
    with contextlib.suppress(OSError):
        # On Linux the niceness of a process is that of its first thread alone; that of a process group
        # reaches every thread there is, of workers and verifier as well. The daemon starts the trainer as a
        # group of its own.
        which = os.PRIO_PGRP if os.getpgrp() == os.getpid() else os.PRIO_PROCESS
        nice = max(NICE, os.getpriority(which, 0))
        os.setpriority(which, 0, nice)
        # Linux desktops share the CPU out by session first, and a trainer is a session of its own: there its
        # own niceness means nothing.
        autogroup = Path("/proc/self/autogroup")
        if autogroup.exists():
            autogroup.write_text(str(nice))


def lower_disk_priority() -> None:
    """Let other programs read and write first.

    To be called before threads and processes are started: they inherit it.
    """
    process = psutil.Process()
    # On Linux alone: the last class of those that share the disk.
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        if process.ionice().ioclass != psutil.IOPRIO_CLASS_IDLE:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
