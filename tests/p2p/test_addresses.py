import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.address import EXAMPLE, Endpoint, parse_bootstrap, parse_endpoint, parse_listen
from p2p.errors import BadAddress
from p2p.identity import Identity, peer_id_of
from p2p.peers.addressbook import MAX_ADDRESSES, MAX_PEERS, AddressBook

NOW = 1_700_000_000.0
ME, A, B = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))
KEY = bytes(range(16))
WHERE = Endpoint("ip4", "203.0.113.7", 4001)


@pytest.mark.parametrize("host", ["ip4/127.0.0.1", "ip6/::1", "dns/example.org", "dns4/a.example", "dns6/localhost"])
def test_addresses_of_each_kind(host: str) -> None:
    assert str(parse_bootstrap(f"/{host}/tcp/4001/p2p/{A}")[1]) == f"/{host}/tcp/4001"
    assert parse_bootstrap(EXAMPLE)[1] == WHERE


@pytest.mark.parametrize(
    "text",
    ["", "/", "example.org:4001", "/ip4/127.0.0.1/tcp/4001", "/p2p/" + A]
    + [f"/ip4/127.0.0.1/tcp/4001/p2p/{A}{more}" for more in ("x", "/")]
    + [f"/ip4/{part}/p2p/{A}" for part in ("1.2.3.256/tcp/1", "1.2.3.4/tcp/65536", "1.2.3.4/tcp/-1", "1.2.3.4/tcp/٣", "1.2.3.4/tcp/0")]
    + [f"/{part}/p2p/{A}" for part in ("ip4/1.2.3.4/udp/1", "dns4/-a/tcp/1", "dns4//tcp/1", "dns4/a b/tcp/1", "unix/x/tcp/1")],
)  # fmt: skip
def test_what_is_no_bootstrap_address_is_named_and_shown_right(text: str) -> None:
    with pytest.raises(BadAddress) as raised:
        parse_bootstrap(text)
    assert repr(text) in str(raised.value) and EXAMPLE in str(raised.value)


def test_listen_addresses() -> None:
    assert parse_listen("/ip4/0.0.0.0/tcp/0") == Endpoint("ip4", "0.0.0.0", 0)
    for text in ("/dns4/localhost/tcp/1", f"/ip4/0.0.0.0/tcp/0/p2p/{A}", "0.0.0.0:4001", ""):
        with pytest.raises(BadAddress, match=r"/ip4/0\.0\.0\.0/tcp/4001"):
            parse_listen(text)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from(["ip4", "ip6", "dns", "1.2.3.4", "::1", "tcp", "80", "p2p", A, ""]), max_size=9).map("/".join)
)
def test_no_address_from_a_peer_crashes(text: str) -> None:
    endpoint = parse_endpoint(text)
    assert endpoint is None or parse_endpoint(str(endpoint)) == endpoint
    assert parse_endpoint("/ip4/0.0.0.0/tcp/4001") is None and parse_endpoint("/ip4/10.0.0.1/tcp/0") is None


def test_candidates_come_in_seeded_order_and_only_when_due() -> None:
    book, strangers = AddressBook(ME, KEY), [peer_id_of(bytes([n]) * 32) for n in range(20)]
    for n, peer in enumerate(strangers):
        book.add(peer, [f"/ip4/11.{n}.0.1/tcp/1"], NOW)
    order = [peer for peer, _ in book.candidates(NOW, random.Random(1))]
    assert order == [peer for peer, _ in book.candidates(NOW, random.Random(1))]
    assert order != [peer for peer, _ in book.candidates(NOW, random.Random(2))] and set(order) == set(strangers)
    book.failed(strangers[0], NOW)
    assert strangers[0] not in dict(book.candidates(NOW + 0.9, random.Random(1)))
    assert strangers[0] in dict(book.candidates(NOW + 1.1, random.Random(1)))
    assert strangers[1] not in dict(book.candidates(NOW, random.Random(1), without={strangers[1]}))


def test_waits_grow_and_stay_short_for_who_was_there_lately() -> None:
    book = AddressBook(ME, KEY)
    book.pin(A, WHERE)
    book.add(B, [str(WHERE)], NOW - 10_000)

    def waits(peer: object, start: float) -> list[float]:
        found = []
        for _ in range(12):
            book.failed(peer, start)  # type: ignore[arg-type]
            found.append(book[peer].due() - start)  # type: ignore[index]
            start += found[-1]
        return found

    assert waits(A, NOW) == [1, 2, 4] + [8] * 9  # a bootstrap may be starting just now
    assert waits(B, NOW)[-1] == 300
    book.lost(B, NOW)
    assert book[B].due() == 0 and waits(B, NOW)[3:8] == [8] * 5


def test_the_address_that_worked_comes_first() -> None:
    book = AddressBook(ME, KEY)
    book.add(A, ["/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1", "/ip4/0.0.0.0/tcp/1", "junk"], NOW)
    book.succeeded(A, "/ip4/10.0.0.2/tcp/1", NOW)
    assert book[A].addresses == ["/ip4/10.0.0.2/tcp/1", "/ip4/10.0.0.1/tcp/1"]


def test_it_is_bounded_and_keeps_what_proved_good() -> None:
    book = AddressBook(ME, KEY)
    book.pin(A, WHERE)
    book.add(B, [str(WHERE)], NOW)
    book.succeeded(B, str(WHERE), NOW)
    book.add(ME, [str(WHERE)], NOW)
    for n in range(MAX_PEERS):
        book.add(peer_id_of(n.to_bytes(32, "big")), [f"/ip4/11.{n % 256}.0.1/tcp/{port}" for port in range(1, 40)], NOW + n)
    assert 1000 < len(book) <= MAX_PEERS and ME not in dict(book.candidates(NOW, random.Random(0)))
    assert book[A].pinned and book[B].last_success == NOW
    assert len(book[peer_id_of(bytes(32))].addresses) == MAX_ADDRESSES


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    book, path = AddressBook(ME, KEY), tmp_path / "state" / "peers.json"
    book.add(A, [str(WHERE)], NOW)
    book.succeeded(A, str(WHERE), NOW)
    assert book.changed
    book.save(path)
    assert not book.changed
    again = AddressBook(ME, KEY)
    again.load(path)
    assert again.candidates(NOW, random.Random(0)) == [(A, [str(WHERE)])] and again[A].last_success == NOW
    AddressBook(ME, KEY).load(tmp_path / "none")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema": 2, "peers": []}', b'{"schema": 1}', b'{"schema": 1, "peers": [1]}']
    + [json.dumps({"schema": 1, "peers": [{"id": peer, "addresses": [str(WHERE)], "last_success": when}]}).encode()
       for peer, when in (("x", 0), (A, "then"), (None, 0), (A, None))],
)  # fmt: skip
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    book = AddressBook(ME, KEY)
    book.load(path)
    assert len(book) == 0 and not path.exists() and (tmp_path / "peers.json.corrupt").read_bytes() == content
    assert "damaged" in caplog.text
