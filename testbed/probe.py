"""One member of a swarm as a program, `python -m testbed.probe`: it reads and writes JSON lines.

It trains nothing. Tests and benchmarks with real processes use it; by hand, it shows whether two machines can
reach each other.

    In:   {"publish": n, "count": c, "every": s}    publish n random bytes c times, s seconds apart;
                                                    without count, once
          {"hold": n}                               hold a blob of n random bytes
          {"fetch": id, "size": n, "holders": [peer ids], "seconds": s}     fetch a blob in at most s seconds
          {"shut_out": peer id, "seconds": s}       allow no connection with this peer for s seconds
          end of input                              leave the swarm
    Out:  {"up": [addresses], "id": peer id}
          {"sent": sequence}
          {"got": sequence, "author": id, "bytes": n, "at": time, "delay": seconds}
          {"held": id, "size": bytes}
          {"fetched": id, "bytes": n, "seconds": s} with null for n if no holder had the blob
          {"peers": [ids]}                          when the connected peers change
          {"twin": null, "earlier" or "later"}      when this changes: whether another node has the same key,
                                                    and whether this node started earlier or later
          {"cpu": seconds, "rejected": {reason: n}, "restarts": n}          every --report seconds
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio

from p2p.blobs.blobs import content_id
from p2p.engines import engine
from p2p.engines.traffic import Traffic
from p2p.errors import OperatorError
from p2p.identity import Identity
from p2p.member import Member
from p2p.sequence import SequenceFile
from p2p.topic import Topic
from p2p.types import Envelope, Handlers, P2pEngine, PeerId, PeerRequest, Unanswered


class Probe:
    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = arguments.folder
        self._identity = Identity.load_or_create(folder / "key")
        self._topic = Topic(arguments.swarm, arguments.digest)
        self._arguments = arguments
        self._last = -1
        self.member = Member(
            self._identity,
            self._topic,
            partial(build_engine, arguments, self._identity, addressbook=folder / "peers.json"),
            sequence=self._numbers(SequenceFile(folder / "sequence", time.time)),
            clock=time.time,
            admitted=self._admitted,
            folder=folder,
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(self.member.run)
            say(up=list(addresses), id=self._identity.peer_id)
            nursery.start_soon(self._tell)
            async for line in lines():
                nursery.start_soon(self._obey, json.loads(line))
            nursery.cancel_scope.cancel()

    async def _obey(self, order: dict[str, Any]) -> None:
        if "hold" in order:
            blob = os.urandom(order["hold"])
            self.member.blobs.put(blob)
            say(held=content_id(blob).hex(), size=len(blob))
            return
        if "shut_out" in order:
            self.member.engine.shut_out(order["shut_out"], order["seconds"])
            return
        if "fetch" in order:
            await self._fetch(order)
            return
        for _ in range(order.get("count", 1)):
            self.member.publish("probe", os.urandom(order["publish"]))
            say(sent=self._last)
            await trio.sleep(order.get("every", 0))

    async def _fetch(self, order: dict[str, Any]) -> None:
        since, found = time.monotonic(), list[int]()
        name = bytes.fromhex(order["fetch"])

        async def ask(holder: PeerId) -> None:
            with contextlib.suppress(Unanswered):
                blob = await self.member.request(holder, PeerRequest.BLOBS.message(name), order["size"])
                if content_id(blob) == name:
                    self.member.blobs.put(blob)
                    found.append(len(blob))
                    nursery.cancel_scope.cancel()

        with trio.move_on_after(order["seconds"]):
            async with trio.open_nursery() as nursery:
                for holder in dict.fromkeys([*order["holders"], *(p.id for p in self.member.peers())]):
                    nursery.start_soon(ask, holder)
        say(fetched=order["fetch"], bytes=found[0] if found else None, seconds=time.monotonic() - since)

    async def _tell(self) -> None:
        peers: list[PeerId] = []
        twin: str | None = None
        while True:
            earlier = self.member.earlier_twin()
            before, twin = twin, None if earlier is None else "later" if earlier else "earlier"
            if twin != before:
                say(twin=twin)
            now = sorted(peer.id for peer in self.member.peers())
            if now != peers:
                say(peers=now)
                peers = now
            rejected = {reason.name: count for reason, count in self.member.rejected.items()}
            say(
                cpu=time.process_time(),
                rejected=rejected,
                restarts=getattr(self.member.engine, "restarts", 0),
            )
            await trio.sleep(self._arguments.report)

    def _admitted(self, envelope: Envelope) -> None:
        now = time.time()
        say(
            got=envelope.sequence,
            author=envelope.author,
            bytes=len(envelope.body),
            at=now,
            delay=now - envelope.sent_at,
        )

    def _numbers(self, numbers: Iterator[int]) -> Iterator[int]:
        for self._last in numbers:
            yield self._last


async def lines() -> Any:
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        rest = b""
        async for chunk in stream:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def options(module: str, about: str) -> argparse.ArgumentParser:
    """Return the options of a process that `ProbeProcess` starts."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the key, sequence numbers and known peers"
    )
    parser.add_argument("--swarm", default="probe", help="name of the swarm")
    parser.add_argument("--digest", default="0", help="digest of the swarm")
    parser.add_argument(
        "--listen", default="/ip4/127.0.0.1/tcp/0", help="multiaddresses to listen on, separated by commas"
    )
    parser.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        help="multiaddress ending in /p2p/<peer id>; may be repeated",
    )
    parser.add_argument("--up", type=float, help="most bytes a second that the process sends")
    parser.add_argument("--down", type=float, help="most bytes a second that the process reads")
    parser.add_argument("--engine", default="libp2p", choices=["libp2p", "hivemind"], help="p2p engine")
    return parser


def build_engine(
    given: argparse.Namespace, identity: Identity, handlers: Handlers, addressbook: Path | None = None
) -> P2pEngine:
    """Build the p2p engine that the options name."""
    return engine(given.engine)(
        identity,
        Topic(given.swarm, given.digest),
        handlers,
        listen=given.listen.split(","),
        bootstrap=given.bootstrap,
        addressbook=addressbook,
        clock=time.time,
        rng=random.Random(identity.peer_id),
        traffic=Traffic(given.up, given.down),
    )


def main() -> None:
    parser = options("testbed.probe", "one member of a swarm that trains nothing")
    parser.set_defaults(listen="/ip4/0.0.0.0/tcp/0,/ip6/::/tcp/0")
    parser.add_argument("--report", type=float, default=0.2, help="seconds between reports")
    try:
        trio.run(Probe(parser.parse_args()).run)
    except* OperatorError as errors:
        for error in errors.exceptions:
            sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
