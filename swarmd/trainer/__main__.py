"""The trainer process, `python -m swarmd.trainer FD`, started by the daemon. FD: the socket to the daemon.

The verifier starts first, and loads while this process imports torch and transformers, the slowest step.
"""

import contextlib
import gc
import logging
import os
import socket
import sys
from pathlib import Path

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

# At niceness 10 a process gets about a tenth of a core that another program also wants. At niceness 19 it
# would get a seventieth, and the daemon could take the sudden slowdown for a trainer that hangs.
NICE = 10
# Appended to the usual duration of a start-up step.
BUSY = "many times that if other programs use all cores"


def main() -> None:
    """Train until the configured rounds are done or the daemon says stop.

    If the daemon ends, this process ends at once; saved checkpoints are complete.
    """
    # Imports create no garbage, so disabling the collector saves a quarter of the import time.
    gc.disable()
    daemon = TrainerLink(socket.socket(fileno=int(sys.argv[1])), on_eof=lambda: os._exit(1))
    start = daemon.open()
    # The daemon writes standard error to trainer.log.
    set_up_logging(None, stderr=True)
    log_with(peer=start.peer_id)
    try:
        config = NodeConfig.model_validate_json(start.config)
        if (behind := rounds_done(Path(start.state_dir) / "checkpoints", config.round.rounds)) is not None:
            # All rounds were already done when the process started, so nothing needs to be loaded.
            daemon.tell(link.Stopped(behind))
            return
        low = config.limits.priority == "low"
        if low:
            lower_disk_priority()
        curriculum = curriculum_of(config)
        if start.curriculum not in ("", curriculum.scoring):
            raise ConfigError(
                f"the file of the tasks {curriculum.name}, or of tasks.reward, has changed since this node"
                " started. Join again; all nodes of the swarm need the same tasks."
            )
        with Verifier(curriculum) as verifier:
            daemon.tell(
                link.TrainerState(NodeState.STARTING, "loading PyTorch", f"wait: usually 2 s, {BUSY}")
            )
            # This module imports PyTorch and little else, so the loading of PyTorch is reported as a separate
            # step.
            from swarmd.policy.models import device  # noqa: F401

            daemon.tell(
                link.TrainerState(NodeState.STARTING, "loading transformers", f"wait: usually 4 s, {BUSY}")
            )
            from swarmd.trainer.trainer import open_trainer

            with open_trainer(start, daemon, verifier) as trainer:
                # Loaded objects stay until the end: exclude them from garbage collection.
                gc.freeze()
                gc.enable()
                trainer.run(lower_cpu_priority if low else lambda: None)
    except SwarmdError as error:
        log.error("%s", error)  # noqa: TRY400  an operator's error: a message, no traceback
        daemon.tell(link.TrainerFailed(str(error), error.exit_code))
    finally:
        daemon.close()
        # At exit Python would collect every object that is not frozen, which takes over a second.
        gc.freeze()


def lower_cpu_priority() -> None:
    """Lower the CPU priority of this process from now on.

    Steps that the platform does not support are skipped. A priority that is already lower stays.
    """
    with contextlib.suppress(OSError):
        # On Linux the niceness of a process applies to its first thread only; the niceness of a process group
        # applies to all threads, and to workers and verifier. The daemon starts the trainer as leader of a
        # process group.
        which = os.PRIO_PGRP if os.getpgrp() == os.getpid() else os.PRIO_PROCESS
        nice = max(NICE, os.getpriority(which, 0))
        os.setpriority(which, 0, nice)
        # Linux desktops share the CPU by session first, and the trainer has a separate session: there, only
        # the niceness of the session counts.
        autogroup = Path("/proc/self/autogroup")
        if autogroup.exists():
            autogroup.write_text(str(nice))


def lower_disk_priority() -> None:
    """Lower the disk priority of this process.

    Call it before threads and processes are started, because they inherit it.
    """
    process = psutil.Process()
    # Linux only: 7 is the lowest priority of the class that shares the disk.
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        if process.ionice().ioclass != psutil.IOPRIO_CLASS_IDLE:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)


if __name__ == "__main__":
    main()
