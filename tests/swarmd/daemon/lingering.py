"""A child that closes its connection but does not exit: `python -m tests.swarmd.daemon.lingering FD`."""

import socket
import sys
import time

if __name__ == "__main__":
    socket.socket(fileno=int(sys.argv[1])).close()
    time.sleep(600)
