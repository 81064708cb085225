import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p.envelope import MAX_BODY_BYTES, MAX_FRAME_BYTES, check, parse, seal
from p2p.topic import Topic
from p2p.types import Envelope, Reason
from tests.vectors import ALICE as ME
from tests.vectors import signed_frame

SWARM = Topic("main", "0123456789abcdef").swarm_id
NOW = 1_700_000_000.25

fuzz = settings(derandomize=True, max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def example(body: bytes = b"body") -> bytes:
    return seal(ME, SWARM, 7, NOW, "rollouts", body)


def fields(frame: bytes) -> list[object]:
    decoded: list[object] = msgpack.unpackb(frame)
    return decoded


def resigned(values: list[object]) -> bytes:
    """Return a frame with these values and a valid signature of its author."""
    return signed_frame(msgpack.packb([*values[:8], bytes(64)])[:-66])


def open_frame(frame: bytes, swarm: bytes) -> Envelope | Reason:
    parsed = parse(frame, swarm)
    return parsed if isinstance(parsed, Reason) else check(parsed, frame)


def reason(frame: bytes, swarm: bytes = SWARM) -> Reason | None:
    outcome = open_frame(frame, swarm)
    return outcome if isinstance(outcome, Reason) else None


@fuzz
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**53 - 1),
    st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True),
    st.binary(max_size=70_000),
)
def test_a_sealed_frame_is_opened_unchanged(sequence: int, ms: int, kind: str, body: bytes) -> None:
    frame = seal(ME, SWARM, sequence, ms / 1000, kind, body)
    assert msgpack.packb(fields(frame)) == frame
    opened = open_frame(frame, SWARM)
    assert isinstance(opened, Envelope)
    assert (opened.author, opened.sequence, opened.kind, opened.body) == (ME.peer_id, sequence, kind, body)
    assert abs(opened.sent_at - ms / 1000) <= 0.0011


def test_a_frame_with_any_flipped_bit_is_rejected() -> None:
    frame = example()
    for bit in range(8 * len(frame)):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        assert reason(bytes(broken)) is not None, bit


def test_a_truncated_or_extended_frame_is_rejected() -> None:
    frame = example()
    assert all(reason(frame[:n]) is not None for n in range(len(frame)))
    assert all(reason(frame[n:]) is not None for n in range(1, len(frame)))
    assert {reason(frame + more) for more in (*(bytes([n]) for n in range(256)), frame)} == {Reason.MALFORMED}


@fuzz
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_rejected(junk: bytes) -> None:
    for start in (b"", b"\x99\xa6swarmd", example()[:9]):
        assert reason(start + junk) is not None


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (2, b"x" * 15), (2, b"x" * 17), (2, "x" * 16), (3, b"x" * 31), (3, None), (4, -1), (4, 2**63),
        (4, 1.0), (4, True), (4, "7"),
        (5, -1), (5, 2**53), (5, 1.5), (6, ""), (6, "Rollouts"), (6, "a b"), (6, "a\n"), (6, "a" * 33),
        (6, b"rollouts"), (6, "ａ"),
        (7, "body"), (7, [1, 2]), (7, {"a": 1}), (7, None), (0, "swarme"),
    ],
)  # fmt: skip
def test_an_invalid_field_is_rejected_although_it_is_signed(position: int, value: object) -> None:
    values = fields(example())
    values[position] = value
    assert reason(resigned(values)) is Reason.MALFORMED


def test_maps_deep_nesting_and_bombs_are_rejected_at_once() -> None:
    start = example()[:9]
    for bomb in (
        b"\x91" * 200_000,
        start + b"\x91" * 200_000,
        start + b"\xdd\xff\xff\xff\xff",
        start + b"\xc6\xff\xff\xff\xff",
        start + b"\xdf\xff\xff\xff\xff",
        b"\x82\xa1a\x01\xa1a\x01",
        b"\x99\xa6swarmd\x01" + b"\x82\xa1a\x01\xa1a\x02" * 7,
    ):
        assert reason(bomb) is Reason.MALFORMED


def test_another_version_is_recognised() -> None:
    for version in (0, 2, 127):
        assert (
            reason(resigned([*fields(example())[:1], version, *fields(example())[2:]]))
            is Reason.WRONG_VERSION
        )
        assert reason(msgpack.packb(["swarmd", version, {"a": "later form"}])) is Reason.WRONG_VERSION
    assert Reason.WRONG_VERSION.verdict.value == "ignore"


def test_the_size_limit_holds_for_sealing_and_opening() -> None:
    frame = example(bytes(MAX_BODY_BYTES))
    assert reason(frame) is None and len(frame) <= MAX_FRAME_BYTES
    with pytest.raises(ValueError, match="too large"):
        example(bytes(MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    ("swarm", "sequence", "now", "kind"),
    [(b"short", 1, NOW, "a"), (SWARM, -1, NOW, "a"), (SWARM, 1, -5.0, "a"), (SWARM, 1, NOW, "A")],
)
def test_frames_that_no_node_would_admit_are_never_sealed(
    swarm: bytes, sequence: int, now: float, kind: str
) -> None:
    with pytest.raises(ValueError, match="admit"):
        seal(ME, swarm, sequence, now, kind, b"")


@pytest.mark.parametrize(("name", "digest"), [("", "a"), ("a/b", "c"), ("a", ""), ("A", "b")])
def test_a_topics_name_may_have_only_certain_characters(name: str, digest: str) -> None:
    with pytest.raises(ValueError):
        Topic(name, digest)
