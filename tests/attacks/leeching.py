"""A crowd of fresh keys that downloads as much from one node as the node sends.

`python -m tests.attacks.leeching`, a separate process, writes JSON lines.

Each key has one connection. It requests one blob again and again, on --streams streams at the same time; with
--iwant, it requests the node's own frames by IWANT instead.

Output: {"ready": true} when all keys are connected, {"taken": bytes so far} every second.
"""

import time
from typing import Any

import multiaddr
import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2p.engines.libp2p.pubsub import MAX_WANTED, MESHSUB
from p2p.engines.libp2p.rpcs import MAX_RPC_BYTES
from p2p.engines.libp2p.stack import make_host
from p2p.engines.libp2p.streams import PROTOCOL, IncomingStream
from p2p.engines.request_response import Broken, ask
from p2p.topic import Topic
from p2p.types import PeerRequest
from testbed.probe import options, say
from tests.attacks.harness import declare
from tests.attacks.nodes import key_of, subscribe

BLOB_BYTES = 256 * 1024
IWANTS_PER_S = 10
# Seconds until a stream that was reset is opened again. A faster peer would lose its connection.
AGAIN_S = 0.2


class Leech:
    """One key and its connection. source: the address that it dials from. begin: starts the requests."""

    def __init__(self, seed: int, number: int, source: str, begin: trio.Event, streams: int) -> None:
        self.host, self.taken = make_host(key_of(seed, number)), 0  # bytes
        self._begin, self._streams = begin, streams
        (tcp,) = self.host.get_network().transport_manager.get_transports()
        tcp.dial = lambda where: tcp.dial_with_source(where, (source, 0))
        self.host.set_stream_handler(MESHSUB[0], self._hear)
        self._names: list[bytes] = []  # ids of the victim's frames, in the form of IWANT

    async def run(self, victim: Any, topic: Topic, question: bytes, task_status: Any) -> None:
        async with self.host.run(listen_addrs=[]), trio.open_nursery() as nursery:
            self._victim: ID = victim.peer_id
            stream, ended = await subscribe(self.host, victim, topic)
            task_status.started()
            await self._begin.wait()
            if question:
                for _ in range(self._streams):
                    nursery.start_soon(self._ask, question)
            else:
                nursery.start_soon(self._want, stream)
            await ended.wait()
            nursery.cancel_scope.cancel()

    async def _ask(self, question: bytes) -> None:
        while True:
            try:
                stream = IncomingStream(await self.host.new_stream(self._victim, [PROTOCOL]))
                while answer := await ask(stream, question, BLOB_BYTES):
                    self.taken += len(answer)
            except Broken:
                pass  # the victim reset the stream
            except Exception:  # no stream was opened; each layer raises a different exception
                pass
            await trio.sleep(AGAIN_S)

    async def _want(self, stream: Any) -> None:
        while True:
            wanted = rpc_pb2.ControlIWant(messageIDs=self._names[-MAX_WANTED:])
            rpc = rpc_pb2.RPC(control=rpc_pb2.ControlMessage(iwant=[wanted]))
            await stream.write(encode_varint_prefixed(rpc.SerializeToString()))
            await trio.sleep(1 / IWANTS_PER_S)

    async def _hear(self, stream: Any) -> None:
        try:
            while True:
                data = await read_varint_prefixed_bytes_limited(stream, MAX_RPC_BYTES)
                for message in rpc_pb2.RPC.FromString(data).publish:
                    self.taken += len(message.data)
                    name = (message.from_id + message.seqno).hex().encode()
                    if message.from_id == self._victim.to_bytes() and name not in self._names:
                        self._names.append(name)
        except Exception:  # the victim hung up
            return


async def run(given: Any) -> None:
    topic = Topic(given.swarm, given.digest)
    question = b"" if given.iwant else PeerRequest.BLOBS.message(bytes.fromhex(given.blob))
    victim = info_from_p2p_addr(multiaddr.Multiaddr(given.bootstrap[0]))
    begin = trio.Event()
    leeches = [
        Leech(given.seed, n, f"127.0.{9 + n}.1" if given.machines else "127.0.9.1", begin, given.streams)
        for n in range(given.keys)
    ]
    async with trio.open_nursery() as nursery:
        for leech in leeches:
            await nursery.start(lambda task_status, it=leech: it.run(victim, topic, question, task_status))
        say(ready=True)
        begin.set()
        until = time.monotonic() + given.seconds
        while time.monotonic() < until:
            say(taken=sum(leech.taken for leech in leeches))
            await trio.sleep(1.0)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = options("tests.attacks.leeching", "takes blobs and gives none; give it only your own")
    about = {
        "keys": "number of keys; each has one connection",
        "streams": "streams of each key that request at the same time",
        "blob": "id of the blob to request, in hexadecimal",
        "iwant": "request the node's own frames instead of a blob",
        "machines": "each key has a different loopback address",
    }
    defaults = {
        "keys": 20,
        "streams": 2,
        "blob": "",
        "iwant": False,
        "machines": False,
        "seconds": 600.0,
        "seed": 1,
    }
    declare(parser, defaults, {}, about)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
