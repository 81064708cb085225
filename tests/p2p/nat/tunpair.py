"""A line with delay and loss, as a program.

It is made of two TUN devices: a packet that goes into one device comes out of the other later, or never.

It is for kernels without netem. Run it as root: `python -m tests.p2p.nat.tunpair NS_A ADDRESS_A NS_B
ADDRESS_B --delay-ms D --loss P`. It prints "up" when both ends are up, and runs until it is killed, which
also removes the devices.
"""

import argparse
import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import time

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 65536


def device(name: str, namespace: str, address: str, other: str) -> int:
    """Create a point-to-point TUN device in this namespace; return its file descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        f"ip link set {name} netns {namespace}",
        f"ip -n {namespace} addr add {address} peer {other} dev {name}",
        f"ip -n {namespace} link set {name} up mtu 1400",
    ):
        subprocess.run(command.split(), check=True)
    return tun


def carry(ends: tuple[int, int], delay: float, loss: float, rng: random.Random) -> None:
    """Carry packets between the ends for ever. delay: seconds in each direction."""
    under_way: list[tuple[float, int, int, bytes]] = []  # time of arrival, number, device, packet
    numbers = itertools.count()
    while True:
        now = time.monotonic()
        wait = under_way[0][0] - now if under_way else 1.0
        ready, _, _ = select.select(ends, [], [], max(0.0, wait))
        for end in ready:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(end, MAX_PACKET):
                    if rng.random() >= loss:
                        there = ends[1] if end == ends[0] else ends[0]
                        heapq.heappush(under_way, (time.monotonic() + delay, next(numbers), there, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, there, packet = heapq.heappop(under_way)
            # If the other end's queue is full or the device is down, the packet is lost.
            with contextlib.suppress(OSError):
                os.write(there, packet)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.p2p.nat.tunpair")
    for name in ("namespace_a", "address_a", "namespace_b", "address_b"):
        parser.add_argument(name)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets lost in each direction")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    stem = f"sw{os.getpid() % 10**8}"
    ends = (
        device(f"{stem}a", given.namespace_a, given.address_a, given.address_b),
        device(f"{stem}b", given.namespace_b, given.address_b, given.address_a),
    )
    print("up", flush=True)
    carry(ends, given.delay_ms / 1000, given.loss, random.Random(given.seed))


if __name__ == "__main__":
    main()
