"""A child process of another version, which sends messages that this version does not know.

`python -m tests.swarmd.daemon.foreign FD`.
"""

import socket
import struct
import sys

import msgspec

if __name__ == "__main__":
    message = msgspec.msgpack.encode({"type": "SomethingNew"})
    with socket.socket(fileno=int(sys.argv[1])) as daemon:
        daemon.sendall(struct.pack(">I", len(message)) + message)
        while daemon.recv(1 << 16):
            pass
