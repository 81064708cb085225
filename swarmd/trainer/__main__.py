"""The trainer process, `python -m swarmd.trainer FD`, as the daemon starts it. FD: the socket to the daemon.

The verifier starts first, and loads while this process imports torch and transformers, which takes longest of
all.
"""

import gc
import logging
import os
import socket
import sys

from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, SwarmdError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.logs import log_with, set_up_logging
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.priority import lower_cpu_priority, lower_disk_priority
from swarmd.trainer.trainer_link import TrainerLink

log = logging.getLogger(__name__)

# A note on the seconds that a step of the start usually takes.
BUSY = "many times that where other programs use all cores"


def main() -> None:
    """Train until the rounds are done or the daemon says stop.

    Ends at once if the daemon does: what was saved is whole.
    """
    # Imports create no garbage; disabling the collector saves a quarter of the import time.
    gc.disable()
    sock = socket.socket(fileno=int(sys.argv[1]))
    daemon = TrainerLink(sock, on_eof=lambda: os._exit(1))
    start = daemon.open()
    # The daemon writes standard error to trainer.log.
    set_up_logging(None, stderr=True)
    log_with(peer=start.peer_id)
    try:
        config = NodeConfig.model_validate_json(start.config)
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
            daemon.tell(link.TrainerState("starting", "loading PyTorch", f"wait: usually 2 s, {BUSY}"))
            # The first module that loads PyTorch, and little else.
            from swarmd.policy.models import device  # noqa: F401

            daemon.tell(link.TrainerState("starting", "loading transformers", f"wait: usually 4 s, {BUSY}"))
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


if __name__ == "__main__":
    main()
