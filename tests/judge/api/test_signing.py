"""Authentication of requests: the golden example, equality of the three implementations, and forgeries."""

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from judge.api.requests import QuestionsBody
from judge.api.signing import HEADERS, verify_request
from judge.errors import Refusal
from judge.evaluation.sessions import claim
from judge.types import Signed
from p2p.identity import Identity
from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.daemon.judging.client import JudgeClient
from testbed.signing_peer import ORIGIN, SigningPeer

TARGET, BODY = "/v1/evaluations", b'{"round":17,"model":"tiny","curriculum":"0123456789abcdef"}'

# From docs/judge-protocol.md; the key's seed is 32 bytes of 01. Frozen: a change would break the protocol.
GOLDEN = {
    "swarmd-peer": "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",
    "swarmd-origin": "http://127.0.0.1:8400",
    "swarmd-sequence": "1700000000000000000",
    "swarmd-signature": "86eff4eabaed368cd3988152db50ff79e263a04aa6a29519ddb6ce031819f343"
    "96fd8404ebabe98d19791548a7414690318d807ba01f5143c9b4227d6d545e03",
}

Headers = list[tuple[bytes, bytes]]


def raw(headers: dict[str, str]) -> Headers:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def test_the_signed_bytes_are_frozen() -> None:
    peer = SigningPeer(0x0101, origin="http://127.0.0.1:8400")
    assert peer.headers("POST", TARGET, BODY, 1_700_000_000_000_000_000) == GOLDEN
    assert verify_request("POST", TARGET, raw(GOLDEN), BODY) == Signed(
        PeerId(GOLDEN["swarmd-peer"]), 1_700_000_000_000_000_000
    )


def test_the_nodes_client_signs_as_in_the_golden_file() -> None:
    client = JudgeClient(
        "http://127.0.0.1:8400/",
        Identity(b"\x01" * 32),
        "d",
        nanoseconds=lambda: 1_700_000_000_000_000_000,
    )
    assert client.signed(TARGET, BODY) == GOLDEN


def test_the_protocol_document_begins_with_a_valid_request() -> None:
    page = (Path(__file__).parents[3] / "docs" / "judge-protocol.md").read_text(encoding="utf-8")
    example = page.partition("\n\n    ")[2].partition("\n\n    201 ")[0]
    head, _, body = "\n".join(line.removeprefix("    ") for line in example.split("\n")).partition("\n\n")
    (method, target), *headers = (line.split(" ", 1) for line in head.split("\n"))
    given = {name.removesuffix(":"): value for name, value in headers}
    assert isinstance(verify_request(method, target, raw(given), body.encode()), Signed)
    assert QuestionsBody.model_validate_json(body).questions == 1


def fields(peer: SigningPeer) -> dict[str, bytes]:
    """Return all parts of a signed request."""
    headers = peer.headers("POST", TARGET, BODY, 7)
    return {"method": b"POST", "target": TARGET.encode(), "body": BODY} | {
        name: value.encode() for name, value in headers.items()
    }


ALICE, MALLORY = fields(SigningPeer(1)), fields(SigningPeer(2))
SPELLINGS = [
    b"",
    b"0x1",
    b"-1",
    b"+7",
    b"07",
    b" 7",
    b"7 ",
    b"\xef\xbc\x97",
    b"\n",
    b"8",
    b"post",
    b"http://judge.test:80",
    b"/v1/evaluations?x",
]


@settings(max_examples=1500)
@given(
    st.sampled_from(sorted(ALICE)),
    st.integers(0, 2000) | st.sampled_from([*SPELLINGS, *MALLORY.values()]) | st.binary(max_size=70),
)
def test_any_changed_part_breaks_the_signature(name: str, change: int | bytes) -> None:
    """One field is taken from another peer's request, is arbitrary, or has one bit flipped."""
    value = bytearray(ALICE[name])
    if isinstance(change, int):
        value[change // 8 % len(value)] ^= 1 << change % 8
    changed = ALICE | {name: bytes(value) if isinstance(change, int) else change}
    assume(changed != ALICE)
    method, target, body = (changed.pop(part) for part in ("method", "target", "body"))
    headers = [(header.encode(), value) for header, value in changed.items()]
    assert isinstance(
        verify_request(method.decode("latin-1"), target.decode("latin-1"), headers, body), Refusal
    )


@pytest.mark.parametrize("name", HEADERS)
def test_each_header_must_occur_exactly_once(name: str) -> None:
    headers = raw(SigningPeer(1).headers("POST", TARGET, BODY))
    assert refused([h for h in headers if h[0] != name.encode()]).status == 401
    assert refused([*headers, (name.encode(), dict(headers)[name.encode()])]).status == 400


@pytest.mark.parametrize(
    "sequence", ["01", "+1", "1_0", "1e3", " 1", "", "9223372036854775808", "99999999999999999999"]
)
def test_other_spellings_of_a_sequence_number_are_rejected(sequence: str) -> None:
    headers = SigningPeer(1).headers("POST", TARGET, BODY) | {"swarmd-sequence": sequence}
    assert refused(raw(headers)).status == 400


def test_headers_of_proxies_may_occur_twice() -> None:
    headers = [*raw(SigningPeer(1).headers("POST", TARGET, BODY)), (b"via", b"a"), (b"via", b"b")]
    assert isinstance(verify_request("POST", TARGET, headers, BODY), Signed)


def refused(headers: Headers, origins: frozenset[str] = frozenset()) -> Refusal:
    outcome = verify_request("POST", TARGET, headers, BODY, origins)
    assert isinstance(outcome, Refusal) and outcome.error and outcome.remedy
    return outcome


def test_a_request_signed_for_another_judge_is_refused() -> None:
    headers = raw(SigningPeer(1).headers("POST", TARGET, BODY))
    assert isinstance(verify_request("POST", TARGET, headers, BODY, frozenset({ORIGIN})), Signed)
    assert "another judge" in refused(headers, frozenset({"https://judge.example"})).error


def test_sequence_numbers_must_rise() -> None:
    alice, bob = PeerId("alice"), PeerId("bob")
    highest: Latest[PeerId, int] = Latest(2)
    assert claim(highest, Signed(alice, 5), -1) is None
    for used in (5, 4, 0):
        refusal = claim(highest, Signed(alice, used), -1)
        assert refusal is not None and refusal.extra == (("sequence", 5),)
    assert claim(highest, Signed(bob, 1), -1) is claim(highest, Signed(alice, 6), -1) is None


def test_a_sequence_number_forgotten_in_memory_is_checked_in_the_store() -> None:
    assert claim(Latest(2), Signed(PeerId("0"), 7), 7) is not None
