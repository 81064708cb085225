"""Flood detection: finds peers that flood p2pd with data that it silently drops.

Such data are messages with bad signatures, gossip about unknown messages, and other protocols. p2pd does not
report them, so their senders would never be cut off. The kernel counts the bytes of each connection (Linux:
sock_diag(7), NETLINK_SOCK_DIAG), and `swarmd_engine_hivemind.unexplained_bytes` bounds the useful part.
"""

import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import trio

from p2p.address import parse_endpoint
from p2p.engines.traffic import Traffic
from p2p.types import PeerId
from swarmd_engine_hivemind.connections import direct, texts
from swarmd_engine_hivemind.p2pd import P2pd, peer_of
from swarmd_engine_hivemind.unexplained_bytes import OVERHEAD_BYTES, Unexplained

EVERY_S = 0.5

SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
SOCK_DIAG_BY_FAMILY = 20
DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
DONE, ERROR = 3, 2  # NLMSG_DONE, NLMSG_ERROR
TCP_ESTABLISHED = 1
INFO = 2  # INET_DIAG_INFO: struct tcp_info
# The kernel normally answers in 1 ms.
KERNEL_TIMEOUT_S = 1.0
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI48x")  # inet_diag_req_v2: family, protocol, extensions, padding, states, id
# At offset 4 of inet_diag_msg: local port, remote port, local address, remote address.
_ENDS = struct.Struct(">HH16s16s")
# Offset of the inode in inet_diag_msg.
_INODE_AT = 4 + 48 + 16
# The size of inet_diag_msg; attributes follow.
_MESSAGE_BYTES = 72
_ATTRIBUTE = struct.Struct("=HH")  # length, type
# Offset of tcpi_bytes_received in tcp_info: eight bytes, since Linux 4.1.
_RECEIVED_AT = 128

log = logging.getLogger(__name__)


class FloodWatch:
    """Watches p2pd's connections.

    cut_off: called with each peer that sends too many unexplained bytes. traffic: gets the byte counts of
    p2pd.
    """

    def __init__(self, p2pd: P2pd, cut_off: Callable[[PeerId], None], traffic: Traffic | None = None) -> None:
        self._p2pd, self._cut_off, self._traffic = p2pd, cut_off, traffic or Traffic()
        self._connections = Unexplained[int]()  # by inode of the socket
        self._of_use = 0  # useful bytes since the last check
        self._counted = (0, 0)  # bytes up and down that are already in `traffic`

    def useful(self, size: int) -> None:
        """Note a received message or answer of `size` bytes."""
        self._of_use += size + OVERHEAD_BYTES

    async def run(self) -> None:
        """Watch until cancelled. If the kernel gives no byte counts, log that and cut off no peers."""
        read, at, seen = 0, trio.current_time(), True
        try:
            process = psutil.Process(self._p2pd.pid)
            if not hasattr(process, "io_counters"):
                _cannot_see(OSError("this system does not count a process's bytes"))
                return
            while True:
                await trio.sleep(EVERY_S)
                before, since, moved = read, at, process.io_counters()
                # The counters include sockets and files.
                read, at = moved.read_chars, trio.current_time()
                self._count(moved.write_chars, read)
                suspected = self._connections.passed(at - since, read - before, self._of_use)
                self._of_use = 0
                if suspected and seen:
                    # Listing the sockets is expensive, so it is done only on suspicion.
                    seen = await self._find_flooders()
        except psutil.Error as error:
            _cannot_see(error)

    def _count(self, written: int, read: int) -> None:
        """Add the bytes that p2pd wrote and read to `traffic`, except on its control socket.

        The few bytes of its files are included.
        """
        up, down = max(0, written - self._p2pd.control.heard), max(0, read - self._p2pd.control.told)
        self._traffic.count(max(0, up - self._counted[0]), max(0, down - self._counted[1]))
        self._counted = max(up, self._counted[0]), max(down, self._counted[1])

    async def _find_flooders(self) -> bool:
        """Cut off flooders. Return False if the kernel gives no byte counts."""
        try:
            sockets = sockets_of(self._p2pd.pid)
        except OSError as error:
            _cannot_see(error)
            return False
        over = self._connections.over({found.inode: found.received for found in sockets})
        if over:
            await self._cut({(found.host, found.port) for found in sockets if found.inode in over})
        return True

    async def _cut(self, ends: Collection[tuple[str, int]]) -> None:
        """Cut off the peers of the connections with these remote hosts and ports."""
        listed = (await self._p2pd.ask(type=self._p2pd.pb.Request.LIST_PEERS)).peers
        for info in listed:
            # p2pd lists one entry for each connection.
            peer = peer_of(info.id)
            there = [parse_endpoint(text) for text in direct(texts(info.addrs))]
            if peer is not None and any(end is not None and (end.host, end.port) in ends for end in there):
                self._cut_off(peer)


def _cannot_see(error: Exception) -> None:
    log.info(
        "the bytes of p2pd's connections cannot be seen (%s): peers that flood it will not be found",
        error,
    )


@dataclass(frozen=True, slots=True)
class Socket:
    """An established TCP connection. received: bytes received since it began."""

    inode: int
    host: str  # remote host
    port: int
    received: int


def sockets_of(pid: int) -> list[Socket]:
    """Return a process's sockets in our network namespace.

    Raises OSError if the kernel does not list them, or the process has ended or belongs to another user.
    """
    inodes = set(_inodes(pid))
    return [
        found
        for family in (socket.AF_INET, socket.AF_INET6)
        for found in _dump(family)
        if found.inode in inodes
    ]


def _inodes(pid: int) -> Iterator[int]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # was closed meanwhile
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _dump(family: int) -> Iterator[Socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as kernel:
        kernel.settimeout(KERNEL_TIMEOUT_S)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0, 1 << TCP_ESTABLISHED)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, DUMP, 1, 0) + request)
        while True:
            data = kernel.recv(1 << 18)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == DONE or length < _HEADER.size:
                    return
                body = data[at + _HEADER.size : at + length]
                if kind == ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                if (found := _socket(family, body)) is not None:
                    yield found
                at += _aligned(length)


def _socket(family: int, body: bytes) -> Socket | None:
    _, port, _, there = _ENDS.unpack_from(body, 4)
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        info = body[at + _ATTRIBUTE.size : at + length]
        if kind == INFO and len(info) >= _RECEIVED_AT + 8:
            inode, received = (
                struct.unpack_from("=I", body, _INODE_AT)[0],
                struct.unpack_from("=Q", info, _RECEIVED_AT)[0],
            )
            return Socket(inode, _host(family, there), port, received)
        at += _aligned(max(length, _ATTRIBUTE.size))
    return None


def _host(family: int, raw: bytes) -> str:
    """Return an IP address as text. IPv4-mapped IPv6 addresses become IPv4 addresses."""
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[:4]))
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
