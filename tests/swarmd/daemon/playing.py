"""A child process that ends ten rounds a second: `python -m tests.swarmd.daemon.playing FD`."""

import itertools
import os
import socket
import sys
import time

from swarmd import link
from swarmd.trainer.trainer_link import TrainerLink
from swarmd.types import RoundLine

if __name__ == "__main__":
    daemon = TrainerLink(socket.socket(fileno=int(sys.argv[1])), on_eof=lambda: os._exit(1))
    daemon.open()
    for number in itertools.count(1):
        daemon.tell(link.RoundDone(RoundLine(round=number), None))
        time.sleep(0.1)
