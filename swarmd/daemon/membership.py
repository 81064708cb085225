"""Swarm membership for every kind of node: choose an engine, build it and the member, and run them."""

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from pathlib import Path

import trio

from p2p.address import parse_listen
from p2p.engines import engine
from p2p.engines.traffic import Traffic
from p2p.errors import AddressMissing, OperatorError
from p2p.identity import Identity, nickname
from p2p.member import Member
from p2p.peers.introduction import Introducer
from p2p.peers.listen import held_ports
from p2p.peers.mdns import Mdns
from p2p.peers.outbound import TARGET_MEMBERS
from p2p.topic import Topic
from p2p.types import Handlers, P2pEngine, PeerId, PeerRequest
from swarmd.config.config import SwarmConfig
from swarmd.daemon.diagnosis.isolation import NO_ADDRESS
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.state.logs import installed_version
from swarmd.state.status import Trouble
from swarmd.tasks.curriculum import Curriculum

# Seconds between two checks whether this machine has a missing listening address by now.
LOOK_EVERY_S = 5.0


def topic_of(config: SwarmConfig, curriculum: Curriculum) -> Topic:
    return Topic(config.name, swarm_digest(curriculum))


def engine_builder(
    identity: Identity,
    topic: Topic,
    config: SwarmConfig,
    folder: Path | None,
    *,
    public: bool = False,
    traffic: Traffic | None = None,
) -> Callable[[Handlers], P2pEngine]:
    """Return a function that builds the p2p engine of a `Member`.

    Args:
        folder: where the address book is kept; None for no address book.
        public: the operator says that other nodes can dial this node. Then it relays more, or relays at once
            (`hivemind`) instead of waiting until other nodes confirm that they can dial it.
        traffic: counts and limits the bytes.
    """

    def build(handlers: Handlers) -> P2pEngine:
        if config.engine == "none":
            from p2p.engines.memory import MemorySwarm

            return MemorySwarm().join(identity.peer_id, handlers)
        return engine(config.engine)(
            identity,
            topic,
            handlers,
            listen=config.listen,
            bootstrap=config.bootstrap,
            addressbook=folder / "peers.json" if folder is not None else None,
            clock=time.time,
            rng=random.Random(secrets.randbits(64)),
            traffic=traffic,
            public=public,
        )

    return build


async def addresses_present(listen: Sequence[str], say: Callable[[Trouble | None], None]) -> None:
    """Wait until this machine has every address in `listen`: a service may start before the network is up.

    say: called with the reason at each check while it waits, and with None at the end. Raises CannotListen.
    """
    while True:
        try:
            with held_ports([*map(parse_listen, listen)]):
                say(None)
                return
        except AddressMissing as error:
            say(NO_ADDRESS.trouble(why=str(error).partition(";")[0]))
        await trio.sleep(LOOK_EVERY_S)


def introduce(member: Member, curriculum: Curriculum, doing: Callable[[], str]) -> str:
    """Make the member answer peers that ask for an introduction (`p2p.peers.introduction`).

    Returns the versions that it tells them, of swarmd and reasoning-gym.
    """
    runs = f"swarmd {installed_version()}, reasoning-gym {installed_version('reasoning-gym')}"
    member.answers[PeerRequest.INTRODUCTION] = Introducer(
        member.topics,
        member.engine.present,
        curriculum.name,
        runs,
        doing,
        lambda peer: member.reputation.shunned(peer, time.time()),
        time.time,
    )
    return runs


def nearby(member: Member) -> Mdns:
    """Return an mDNS service that finds members on the local network; run it in a separate task."""
    return Mdns(member.topics, member.identity.peer_id, member.addresses, member.engine.heard_nearby)


def connection_news(before: Set[PeerId], now: Set[PeerId]) -> Iterator[str]:
    """Yield a line for each member that connected or disconnected, if the swarm is small.

    Small means fewer connections than a node dials by itself (`TARGET_MEMBERS`). In a larger swarm, short
    connections for DHT queries come and go every minute.
    """
    if min(len(before), len(now)) < TARGET_MEMBERS:
        yield from (f"connected to {nickname(peer)} ({len(now)} connected)" for peer in now - before)
        yield from (f"disconnected from {nickname(peer)} ({len(now)} connected)" for peer in before - now)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run trio; of several errors, raise the one that the operator can correct, or the interrupt or exit."""
    try:
        trio.run(main)
    except BaseExceptionGroup as group:
        error: BaseException | None = group.subgroup((OperatorError, KeyboardInterrupt, SystemExit))
        if error is None:
            raise
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
