"""Relay hoarder: machines of one network try to hold all reservations of a relay, or all circuits to a peer
behind it, while honest nodes ask for theirs.

The relay and the hosts are real, on loopback. Each loopback address counts as the public address that
`NETWORKS` assigns to it, so that many addresses are of one network group.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.peerinfo import PeerInfo

from p2p.admission.inbound_slots import one_too_many
from p2p.engines.libp2p import relay
from p2p.engines.libp2p.relay import RelayLimits
from p2p.netgroup import share_group_of_host
from tests.attacks.harness import Attack, show
from tests.p2p.engines.libp2p.test_relay import OK, Net, net

# The public address of the attacker's n-th machine.
NETWORKS = {
    "one /16": "11.1.{n}.1",
    "one /16, mapped into IPv6": "::ffff:11.1.{n}.1",
    "one /32 of IPv6, many /48": "2600:1:{n}::1",
    "one /48 of IPv6, many /64": "2600:1:1:{n}::1",
    "6to4 of one /16": "2002:b01:{n}01::1",
    "a local network": "192.168.{n}.1",
}
REMOTE_HOST = relay.remote_host


@dataclass
class Hoarded:
    asked: int  # reservations that honest nodes asked for
    granted: int  # reservations granted at once
    kept: int  # granted reservations that remain after the attacker has asked for all of them again
    circuits: int  # circuits to one peer that honest nodes asked for while the attacker holds its share
    reached: int  # circuits of honest nodes that were opened

    @property
    def refused(self) -> float:
        return 1 - min(self.kept / self.asked, self.reached / self.circuits)


def looks_like(network: str) -> Callable[[Any], str]:
    """Return a replacement for `remote_host`. Each honest node has a different network group."""

    def host(connection: Any) -> str:
        _, _, n, hostile = REMOTE_HOST(connection).split(".")
        return (NETWORKS[network] if hostile == "1" else "12.{n}.1.1").format(n=n)

    return host


async def ask_for_all(those: Net, hosts: list[Any]) -> None:
    for host in hosts:
        if not host.get_network().get_connections():
            await host.connect(PeerInfo(those.host.get_id(), those.host.get_transport_addrs()))
        with suppress(BaseLibp2pError):  # the relay may hang up to make room for another host
            await those.reserve(host)


async def play(network: str, machines: int, honest: int, limits: RelayLimits) -> Hoarded:
    async with net(**asdict(limits)) as those:
        theirs = [await those.peer(f"127.0.{1 + n % machines}.1") for n in range(limits.reservations)]
        ours = [await those.peer(f"127.0.{1 + n}.2") for n in range(honest + 1)]
        home = ours.pop()
        assert await those.reserve(home) is OK
        await ask_for_all(those, theirs)
        granted = sum([await those.reserve(host) is OK for host in ours])
        await ask_for_all(those, theirs)
        kept = sum([those.host.get_network().slots.reserved(host.get_id()) for host in ours])
        askers = [host for host in theirs if host.get_network().get_connections()][: 2 * machines]
        held = [await those.connect(host, home) for _ in range(4) for host in askers]
        reached = sum([(await those.connect(host, home))[0] is OK for host in ours[:4]])
        assert held
    return Hoarded(honest, granted, kept, min(4, honest), reached)


def attack(
    folder: Path,
    network: str = "one /16",
    machines: int = 6,
    honest: int = 10,
    reservations: int = RelayLimits().reservations,
    of_machine: int = RelayLimits().reservations_of_machine,
) -> Hoarded:
    limits = RelayLimits(reservations=reservations, reservations_of_machine=of_machine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(relay, "remote_host", looks_like(network))
        result = trio.run(play, network, machines, honest, limits)
    show(f"relay hoarder, {machines} machines of {network}", result)
    return result


@pytest.mark.net
@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
def test_one_network_cannot_hold_all_places_of_a_relay(tmp_path: Path) -> None:
    result = attack(tmp_path, machines=3, honest=2, reservations=6, of_machine=2)
    assert result.granted == result.kept == result.asked and result.reached == result.circuits


@pytest.mark.parametrize("network", NETWORKS)
def test_machines_of_one_public_network_share_a_group(network: str) -> None:
    """Each machine of a local network has a separate group, because its owner let it in."""
    hosts = [NETWORKS[network].format(n=n) for n in range(1, 7)]
    held = {(host, n): (share_group_of_host(host) or "", host) for host in hosts for n in range(16)}
    assert len({group for group, _ in held.values()}) == (6 if network == "a local network" else 1)
    leaving = one_too_many(held, ("12.1", "12.1.1.1"))
    assert leaving == (hosts[-1], 15)


ATTACK = Attack(
    attack,
    {"refused": 0.0},
    choices={"network": tuple(NETWORKS)},
    about={
        "network": "the addresses of the attacker's machines",
        "reservations": "of the relay, in all",
        "of_machine": "reservations that one machine may have",
    },
)
