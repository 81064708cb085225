"""The trainer process, `python -m swarmd.trainer FD`, as the daemon starts it. FD: the socket to the daemon.

The verifier starts first, and loads while this process imports torch and transformers, which takes longest of
all.
"""

import contextlib
import gc
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Final

import psutil

from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, SwarmdError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.logs import log_with, set_up_logging
from swarmd.state.status import NodeState
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.checkpoint import rounds_done
from swarmd.trainer.trainer_link import TrainerLink

log = logging.getLogger(__name__)

# At 10 a process gets about a tenth of a core that another program wants whole. At 19 it would get a
# seventieth, and the daemon could take a trainer that was slowed down so suddenly for one that hangs.
NICE: Final = 10
# A note on the seconds that a step of the start usually takes.
BUSY = "many times that where other programs use all cores"


def main() -> None:
    """Train until the rounds are done or the daemon says stop.

    Ends at once if the daemon does: what was saved is whole.
    """
    # Imports create no garbage; disabling the collector saves a quarter of the import time.
    gc.disable()
    daemon = TrainerLink(socket.socket(fileno=int(sys.argv[1])), on_eof=lambda: os._exit(1))
    start = daemon.open()
    # The daemon writes standard error to trainer.log.
    set_up_logging(None, stderr=True)
    log_with(peer=start.peer_id)
    try:
        config = NodeConfig.model_validate_json(start.config)
        if (behind := rounds_done(Path(start.state_dir) / "checkpoints", config.round.rounds)) is not None:
            # Nothing is loaded to train no round.
            daemon.tell(link.Stopped(behind))
            return
        low = config.limits.priority == "low"
        if low:
            lower_disk_priority()
        curriculum = curriculum_of(config)
        if start.curriculum not in ("", curriculum.scoring):
            raise ConfigError(
                f"the tasks {curriculum.name} have changed since this node started, or its own reward. Join"
                " again; all nodes need the same tasks."
            )
        with Verifier(curriculum) as verifier:
            daemon.tell(
                link.TrainerState(NodeState.STARTING, "loading PyTorch", f"wait: usually 2 s, {BUSY}")
            )
            # The first module that loads PyTorch, and little else.
            from swarmd.policy.models import device  # noqa: F401

            daemon.tell(
                link.TrainerState(NodeState.STARTING, "loading transformers", f"wait: usually 4 s, {BUSY}")
            )
            from swarmd.trainer.trainer import open_trainer

            with open_trainer(start, daemon, verifier) as trainer:
                # What is loaded stays until the end: keep the collector from scanning it.
                gc.freeze()
                gc.enable()
                trainer.run(lower_cpu_priority if low else lambda: None)
    except SwarmdError as error:
        log.error("%s", error)  # noqa: TRY400  the operator's to mend: a message, no traceback
        daemon.tell(link.TrainerFailed(str(error), error.exit_code))
    finally:
        daemon.close()
        # At its end a process collects what is not frozen, which takes over a second.
        gc.freeze()


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


if __name__ == "__main__":
    main()
