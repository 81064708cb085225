"""A hostile peer that begins RPCs and does not finish them.

`python -m tests.attacks.halving`, a separate process, writes JSON lines.

Over each of --connections connections to a victim it opens --streams GossipSub streams. On each stream it
announces an RPC of --size bytes, and sends all but the last byte. If the victim hangs up, it dials again
until --seconds are over.

Output: {"ready": true}; {"halves": RPCs begun} when all RPCs of a connection are begun; {"cut": seconds from
then until the victim hung up}; {"done": true}.
"""

import argparse
import time
from typing import Any

import multiaddr
import trio
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.utils import encode_uvarint

from p2p.engines.libp2p.pubsub import MESHSUB
from p2p.engines.libp2p.stack import make_host
from p2p.identity import Identity
from p2p.topic import Topic
from testbed.probe import options, say
from tests.attacks.harness import declare
from tests.attacks.nodes import key_of, subscribe, swallow


async def begin(host: Any, victim: Any, half: bytes) -> None:
    try:
        stream = await host.new_stream(victim.peer_id, list(MESHSUB))
        await stream.write(half)
    except Exception:  # reset, or the victim hung up; each layer raises a different exception
        return


async def connection(identity: Identity, victim: Any, given: argparse.Namespace) -> None:
    half = encode_uvarint(given.size) + bytes(given.size - 1)
    host = make_host(identity)
    host.set_stream_handler(MESHSUB[0], swallow)
    async with host.run(listen_addrs=[]):
        _, ended = await subscribe(host, victim, Topic(given.swarm, given.digest))
        host.get_network().get_connections(victim.peer_id)[
            0
        ].muxed_conn.stream_backlog_semaphore = trio.Semaphore(1000)
        async with trio.open_nursery() as nursery:
            for _ in range(given.streams):
                nursery.start_soon(begin, host, victim, half)
        say(halves=given.streams)
        begun = time.monotonic()
        await ended.wait()
        say(cut=time.monotonic() - begun)
        await host.get_network().close_sockets()


async def keep_coming(number: int, victim: Any, given: argparse.Namespace) -> None:
    while True:
        try:
            await connection(key_of(given.seed, number), victim, given)
        except Exception:  # the victim refused, or hung up during the dial: dial again
            await trio.sleep(0.5)


async def run(given: argparse.Namespace) -> None:
    say(ready=True)
    with trio.move_on_after(given.seconds):
        async with trio.open_nursery() as nursery:
            for number in range(given.connections):
                for victim in given.bootstrap:
                    nursery.start_soon(
                        keep_coming, number, info_from_p2p_addr(multiaddr.Multiaddr(victim)), given
                    )
    say(done=True)


def main() -> None:
    parser = options(
        "tests.attacks.halving", "begins requests and never finishes them; give it only your own nodes"
    )
    defaults = {"connections": 6, "streams": 64, "size": 300_000, "seconds": 30.0, "seed": 3}
    declare(parser, defaults, {}, {"streams": "of each connection", "size": "bytes announced"})
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
