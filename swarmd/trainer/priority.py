"""Low priority for the CPU and the disk, of this process and of those that it starts."""

import contextlib
from pathlib import Path
from typing import Final

import psutil

# At 10 a process gets about a tenth of a core that another program wants whole. At 19 it would get a seventieth, and the daemon could take
# a trainer that was slowed down so suddenly for one that hangs.
NICE: Final = 10


def lower_priority() -> None:
    """What the platform does not have is left out. A priority that is lower already stays."""
    process = psutil.Process()
    with contextlib.suppress(psutil.Error, OSError):
        nice = max(NICE, process.nice())
        process.nice(nice)
        # Linux desktops share the CPU out by session first, and a trainer is a session of its own: there its own niceness means nothing.
        autogroup = Path("/proc/self/autogroup")
        if autogroup.exists():
            autogroup.write_text(str(nice))
    with contextlib.suppress(psutil.Error, OSError, AttributeError):  # Linux alone: the last of those that share the disk
        if process.ionice().ioclass != psutil.IOPRIO_CLASS_IDLE:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
