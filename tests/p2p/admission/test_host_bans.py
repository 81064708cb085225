"""Bans of hosts from which several peers were banned."""

import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.admission.host_bans import _KNOWN, BANNED_AT_ONCE, ONE_MORE_S, HostBans
from p2p.netgroup import machine_of_host
from p2p.rate_limit import FIRST_BAN_S
from p2p.types import PeerId

HERE, THERE = "11.0.0.1", "11.0.0.2"
KEYS = (PeerId(f"new {n}") for n in itertools.count())


def come(host_bans: HostBans, count: int, now: float, host: str = HERE) -> None:
    """Report `count` banned peers from one host."""
    for peer in itertools.islice(KEYS, count):
        host_bans.count(peer, host, now)


def test_several_hostile_peers_get_only_their_own_machine_banned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host_bans = HostBans()
    come(host_bans, int(BANNED_AT_ONCE), 0.0)
    assert host_bans.admits(HERE, 0.0) and not caplog.messages  # a few may share a host
    come(host_bans, 1, 0.0)
    assert HERE in caplog.text
    assert not host_bans.admits(HERE, FIRST_BAN_S - 1) and host_bans.admits(THERE, FIRST_BAN_S - 1)
    assert host_bans.admits(HERE, FIRST_BAN_S)
    come(host_bans, 100, 0.0, "")  # from an unknown host
    assert host_bans.admits("", 0.0)


def test_a_peer_counts_once_and_old_bans_are_forgotten() -> None:
    host_bans = HostBans()
    for n in range(1000):
        host_bans.count(PeerId("the same"), HERE, float(n))
    assert host_bans.admits(HERE, 1000.0)
    for n in range(100):
        come(host_bans, 1, 1000 + n * ONE_MORE_S)
        assert host_bans.admits(HERE, 1000 + n * ONE_MORE_S)
    often = 1000 + 100 * ONE_MORE_S
    for n in range(2 * int(BANNED_AT_ONCE)):
        come(host_bans, 1, often + n * ONE_MORE_S / 2)
    assert not host_bans.admits(HERE, often + n * ONE_MORE_S / 2), (
        "a host with twice the rate of bans was not banned"
    )


def test_the_number_of_remembered_peers_is_bounded() -> None:
    host_bans = HostBans()
    for n in range(10_000):
        come(host_bans, 1, float(n), f"11.1.{n // 256}.{n % 256}")
    assert len(host_bans._known) == _KNOWN and len(host_bans._rate_limit._until) <= _KNOWN


@pytest.mark.parametrize(
    "host, machine",
    [
        ("11.0.0.1", "11.0.0.1"),
        ("::ffff:11.0.0.1", "11.0.0.1"),
        ("2a01:4f8::1", "2a0104f800000000"),
        ("2a01:4f8::ffff:ffff:ffff:ffff", "2a0104f800000000"),
        ("2a01:4f8:0:1::1", "2a0104f800000001"),
        ("fe80::1%eth0", "fe80::1"),
        ("", ""),
    ],
)
def test_a_machine_is_an_ipv4_address_or_an_ipv6_64_prefix(host: str, machine: str) -> None:
    assert machine_of_host(host) == machine


@given(st.text() | st.ip_addresses().map(str))
def test_every_host_maps_to_a_machine(host: str) -> None:
    machine = machine_of_host(host)
    try:
        ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        assert machine == host
    else:
        assert machine_of_host(machine) == machine or len(machine) == 16  # the first half of an IPv6 address
