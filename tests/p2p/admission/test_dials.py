"""Limits on dials of addresses that other peers named, so that a third party gets few dials."""

import itertools

import pytest

from p2p.address import Endpoint, parse_endpoint
from p2p.admission.dials import LOCAL_FACTOR, UNANSWERED_AT_ONCE, UNANSWERED_PER_S, Dials
from p2p.netgroup import block_of_host

MOST = int(UNANSWERED_AT_ONCE)


def at(host: str, port: int = 4001) -> Endpoint:
    found = parse_endpoint(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
    assert found is not None
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["11.5.5.5"],
        ["11.5.5.{n}"],
        ["::ffff:11.5.5.{n}", "64:ff9b::b05:5{n:02x}", "2002:b05:5{n:02x}::1", "11.5.5.{n}"],
        ["2600:5:5:{n}::1", "2600:5:5::{n}"],
    ],
)
def test_a_block_that_never_answers_is_dialled_a_few_times_then_once_a_minute(names: list[str]) -> None:
    dials = Dials()
    named = (
        at(name.format(n=n % 250 + 1), 1024 + 257 * n % 60_000) for n in itertools.count() for name in names
    )
    assert sum(dials.begin(endpoint, 0.0) for endpoint in itertools.islice(named, 100)) == MOST
    assert dials.begin(at("12.5.5.5"), 0.0) and dials.begin(at("2601:5:5::1"), 0.0)
    later = [dials.begin(next(named), now) for now in range(1, 301)]
    assert sum(later) == 300 * UNANSWERED_PER_S


def test_an_answered_dial_does_not_count_towards_the_limit() -> None:
    dials = Dials()
    for n in range(200):
        assert dials.begin(at(f"11.5.5.{n}"), 0.0)
        dials.proved(at(f"11.5.5.{n}"), 0.0)


def test_ports_of_system_services_and_names_are_never_dialled() -> None:
    dials = Dials()
    assert not any(dials.begin(at("11.5.5.5", port), 0.0) for port in (1, 22, 25, 80, 443, 1023))
    assert not dials.begin(parse_endpoint("/dns4/victim.example/tcp/4001"), 0.0)
    assert not dials.begin(None, 0.0) and not dials.begin(Endpoint("ip4", "224.0.0.1", 4001), 0.0)
    assert dials.begin(at("11.5.5.5", 1024), 0.0)


def test_addresses_of_a_local_network_are_dialled_without_limit() -> None:
    dials = Dials()
    met = [dials.begin(at(f"192.168.1.{n % 250 + 1}"), 0.0) for n in range(1000)]
    assert sum(met) == MOST * LOCAL_FACTOR


def test_a_block_is_a_prefix_that_usually_belongs_to_one_site() -> None:
    assert block_of_host("11.5.5.5") == block_of_host("::ffff:11.5.5.9") == "11.5.5.0/24"
    assert block_of_host("2600:5:5:9::1") == "2600:5:5::/48"
    assert block_of_host("victim.example") is None and block_of_host("224.0.0.1") is None
