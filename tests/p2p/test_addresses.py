import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.address import (
    EXAMPLE,
    PACKED_BYTES,
    Endpoint,
    own_ports,
    packed,
    parse_bootstrap,
    parse_endpoint,
    parse_listen,
    unpacked,
)
from p2p.errors import BadAddress
from p2p.identity import Identity
from p2p.types import PeerId

A = Identity(bytes([2]) * 32).peer_id
WHERE = Endpoint("ip4", "203.0.113.7", 4001)


@pytest.mark.parametrize(
    "host", ["ip4/127.0.0.1", "ip6/::1", "dns/example.org", "dns4/a.example", "dns6/localhost"]
)
def test_addresses_of_each_kind_are_parsed(host: str) -> None:
    peer, where = parse_bootstrap(f"/{host}/tcp/4001/p2p/{A}")
    assert (peer, str(where)) == (A, f"/{host}/tcp/4001")
    assert parse_bootstrap(EXAMPLE)[1] == WHERE


@pytest.mark.parametrize(
    "text",
    ["", "/", "example.org:4001", "/ip4/127.0.0.1/tcp/4001", "/p2p/" + A]
    + [f"/ip4/127.0.0.1/tcp/4001/p2p/{A}{more}" for more in ("x", "/")]
    + [f"/ip4/1.2.3.4/tcp/{port}/p2p/{A}" for port in ("65536", "-1", "٣", "0")]
    + [f"/{part}/p2p/{A}" for part in ("ip4/1.2.3.256/tcp/1", "ip4/1.2.3.4/udp/1", "dns4/-a/tcp/1")]
    + [f"/{part}/p2p/{A}" for part in ("dns4//tcp/1", "dns4/a b/tcp/1", "unix/x/tcp/1")]
    + [f"/dns4/{'a.' * 127}a/tcp/1/p2p/{A}", f"/ip4/1.2.3.4/tcp/1/ipfs/{A}"],
)  # fmt: skip
def test_a_malformed_bootstrap_address_gives_a_message_with_an_example(text: str) -> None:
    with pytest.raises(BadAddress) as raised:
        parse_bootstrap(text)
    assert repr(text) in str(raised.value) and EXAMPLE in str(raised.value)


def test_listen_addresses_are_parsed() -> None:
    assert parse_listen("/ip4/0.0.0.0/tcp/0") == Endpoint("ip4", "0.0.0.0", 0)
    for text in ("/dns4/localhost/tcp/1", f"/ip4/0.0.0.0/tcp/0/p2p/{A}", "0.0.0.0:4001", ""):
        with pytest.raises(BadAddress, match=r"/ip4/0\.0\.0\.0/tcp/4001"):
            parse_listen(text)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(["ip4", "ip6", "dns", "1.2.3.4", "::1", "tcp", "80", "p2p", A, ""]), max_size=9
    ).map("/".join)
)
def test_no_address_from_a_peer_causes_an_exception(text: str) -> None:
    endpoint = parse_endpoint(text)
    assert endpoint is None or parse_endpoint(str(endpoint)) == endpoint
    assert parse_endpoint("/ip4/0.0.0.0/tcp/4001") is None and parse_endpoint("/ip4/10.0.0.1/tcp/0") is None


@pytest.mark.parametrize(
    ("address", "size"),
    [
        ("/ip4/203.0.113.7/tcp/4001", 6),
        ("/ip6/2001:db8::7/tcp/65535", 18),
        (f"/ip4/203.0.113.7/tcp/4001/p2p/{A}/p2p-circuit", 38),
        (f"/ip6/2001:db8::7/tcp/4001/p2p/{A}/p2p-circuit", 50),
        ("/dns/node.example/tcp/4001", 0),
        ("", 0),
    ],
)
def test_a_packed_address_has_few_bytes(address: str, size: int) -> None:
    raw = packed(address)
    assert len(raw) == size and (not raw or unpacked(raw) == address)


@given(st.binary(max_size=60))
def test_packed_bytes_are_an_address_or_are_rejected(raw: bytes) -> None:
    try:
        assert packed(unpacked(raw)) in (raw, b"")  # port 0 is never packed
    except KeyError:
        assert len(raw) not in PACKED_BYTES


def test_a_nodes_ports_follow_from_its_key_and_are_unassigned() -> None:
    """The system uses none of them for outgoing connections, which could block the port at the next start."""
    first, second = own_ports(PeerId(A)), own_ports(PeerId(A[::-1]))
    assert first == own_ports(PeerId(A)) and len({*first, *second}) == 8
    assert all(1024 <= port < 32768 for port in [*first, *second])
