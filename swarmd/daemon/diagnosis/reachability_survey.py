"""Reachability survey: collects the facts on whether other nodes can reach this node.

`reachability_report` explains them. The running node makes the survey; if none runs, a member is started for
the survey alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from msgspec import to_builtins

from p2p.address import parse_bootstrap, parse_endpoint
from p2p.identity import Identity, nickname
from p2p.member import Member
from p2p.netgroup import only_here
from p2p.peers import introduction
from p2p.peers.dial_back import DialBackReply, ask_members, who_dials_back
from p2p.peers.introduction import HELPING, Introduced
from p2p.peers.listen import SOMEWHERE, has_route, outward_first
from p2p.peers.mdns import own_networks
from p2p.peers.noise_probe import probe
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation import Facts, another, certain
from swarmd.daemon.membership import engine_builder, run, topic_of
from swarmd.exchange.swarm_id import curriculum_named, curriculum_of
from swarmd.state.status import Trouble
from swarmd.terminal import interruptible

# Seconds that a member started for the survey alone waits to meet another member.
COMPANY_S = 15.0
# Seconds that it then waits until the members see it: they answer only peers that they see as connected.
SEEN_S = 5.0


async def survey(member: Member, config: NodeConfig) -> dict[str, Any]:
    """Survey the network of a running member.

    Takes as long as the slowest peer that is asked, at most 10 s.
    """
    peers = member.peers()
    found: dict[str, Any] = {
        "schema": 1,
        "peer_id": member.identity.peer_id,
        "name": nickname(member.identity.peer_id),
        "swarm": {"name": member.topic.name, "topic": str(member.topic)},
        "engine": config.swarm.engine,
        "listen": list(config.swarm.listen),
        "ports": listen_ports(member.addresses()),
        "addresses": list(member.addresses()),
        "own": outward_first(own_networks()),
        "relays": list(getattr(member.engine, "relayed", ())),
        "peers": {
            "connected": len(peers),
            "relayed": sum("/p2p-circuit" in peer.address for peer in peers),
        },
        "bootstrap": [],
        "verdicts": [],
        "curriculum": curriculum_of(config).name,
        "trouble": None,
        "seen": {"helpers": 0, "companions": 0, "others": {}},  # from `count_others`
    }

    said: dict[str, Any] = {}

    async def dial_back() -> None:
        found["verdicts"] = [
            {
                "by": by,
                "name": nickname(by),
                "outcome": verdict.outcome.name,
                "seen_at": str(verdict.seen_at) if verdict.seen_at else None,
            }
            for by, verdict in (await _dialled_back(member)).items()
        ]

    async def see() -> None:
        named = [parse_bootstrap(address)[0] for address in config.swarm.bootstrap]
        said.update(await ask_around(member, whom_to_ask(member, named), time.time))
        found["seen"] = {key: said[key] for key in found["seen"]}

    async def knock_all() -> None:
        found["bootstrap"] = await probe(
            text for text in config.swarm.bootstrap if parse_bootstrap(text)[0] != member.identity.peer_id
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial_back)
        nursery.start_soon(see)
        nursery.start_soon(knock_all)
    found["trouble"] = to_builtins(_trouble(member, found, said))
    return found


def _trouble(member: Member, found: Mapping[str, Any], said: Mapping[str, Any]) -> Trouble | None:
    return certain(
        Facts(
            member.topic.name,
            found["curriculum"],
            member.topic.digest,
            offline=is_offline([entry["address"] for entry in found["bootstrap"]]),
            connected=found["peers"]["connected"],
            bootstrap=found["bootstrap"],
            **said,
        )
    )


def count_others(member: Member, introduced: Mapping[PeerId, Introduced]) -> dict[str, Any]:
    """Count the connected members that only help and those that may train, and the nodes that peers see.

    Members that do not answer count as "unknown": they may train. The numbers of other nodes, of our
    curriculum ("companions") and of other curricula ("others"), are lower bounds.
    """
    peers = {peer.id for peer in member.peers()}
    names = {one.digest: another(one) for one in introduced.values()}
    others: Counter[str] = Counter()
    companions = 0
    for peer, answer in introduced.items():
        for seen in answer.swarms:
            ours = seen.digest == member.topic.digest
            # A peer that trains counts as a node too. A connected peer also sees us, so do not count us.
            count = seen.members + (answer.doing != HELPING) - (ours and peer in peers)
            if ours:
                companions = max(companions, count)
            elif count > 0:
                name = curriculum_named(seen.digest) or names.get(seen.digest, "an unknown curriculum")
                others[name] = max(others[name], count)
    helpers = sum(peer in peers and answer.doing == HELPING for peer, answer in introduced.items())
    return {
        "helpers": helpers,
        "unknown": len(peers - introduced.keys()),
        "companions": companions,
        "others": dict(others),
    }


def whom_to_ask(member: Member, named: Sequence[PeerId]) -> Sequence[PeerId]:
    """Choose peers to ask: first named ones, then members, then other connected peers."""
    asked = dict.fromkeys([*named, *(peer.id for peer in member.peers()), *sorted(member.engine.connected())])
    asked.pop(member.identity.peer_id, None)
    return [*asked][: introduction.MAX_ASKED]


async def ask_around(member: Member, asked: Sequence[PeerId], clock: Callable[[], float]) -> dict[str, Any]:
    """Ask peers about themselves, about us and about the nodes that they see; return fields of `Facts`."""
    said = await introduction.ask(member.engine.request, asked, member.topic.name, clock)
    introduced = {peer: one for peer, one in said.items() if one is not None}
    return {"introduced": [*introduced.values()], **count_others(member, introduced)}


def is_offline(bootstrap: Sequence[str]) -> bool:
    """Return whether there is no route to any bootstrap address or to the internet."""
    named = [
        endpoint for address in bootstrap if (endpoint := parse_bootstrap(address)[1]).kind.startswith("ip")
    ]
    return not any(map(has_route, [*named, *SOMEWHERE]))


def survey_alone(config: NodeConfig, folder: Path, identity: Identity) -> dict[str, Any]:
    """Survey the network by a member started for it, with this identity and the folder's address book.

    Raises OperatorError, also if the member cannot listen.
    """
    topic = topic_of(config.swarm, curriculum_of(config))
    found: dict[str, Any] = {}

    async def live() -> None:
        member = Member(
            identity,
            topic,
            engine_builder(identity, topic, config.swarm, folder),
            sequence=iter(()),
            clock=time.time,
            admitted=lambda _: None,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(member.run)
            with trio.move_on_after(COMPANY_S):
                while not member.peers():
                    await trio.sleep(0.1)
                with trio.move_on_after(SEEN_S):
                    # Wait until all connected peers that were asked see us as connected, too.
                    while any(one.seen_at is None for one in (await _dialled_back(member)).values()):
                        await trio.sleep(0.2)
            found.update(await survey(member, config))
            nursery.cancel_scope.cancel()

    run(partial(interruptible, live))
    return found


async def _dialled_back(member: Member) -> Mapping[PeerId, DialBackReply]:
    ports = {
        kind: port[0]
        for kind in ("ip4", "ip6")
        if (port := listen_ports([text for text in member.addresses() if text.startswith(f"/{kind}/")]))
    }
    return await ask_members(member.engine.request, who_dials_back(member.peers(), ports))


def listen_ports(addresses: Sequence[str]) -> list[int]:
    """Return the ports of a member's addresses; first the ports that other machines can dial."""
    endpoints = [
        (only_here(address), endpoint)
        for address in addresses
        if (endpoint := parse_endpoint(address)) is not None
    ]
    return list(dict.fromkeys(endpoint.port for _, endpoint in sorted(endpoints, key=lambda pair: pair[0])))
