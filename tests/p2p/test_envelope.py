from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p.envelope import MAX_BODY_BYTES, MAX_FRAME_BYTES, check, parse, seal
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Envelope, Reason, Rejected

ME = Identity.from_seed(bytes(range(32)))
SWARM = Topic("main", "0123456789abcdef").swarm_id
NOW = 1_700_000_000.25
GOLDEN = Path(__file__).with_name("frame_v1.hex")

fuzz = settings(derandomize=True, max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def example(body: bytes = b"body") -> bytes:
    return seal(ME, SWARM, 7, NOW, "rollouts", body)


def fields(frame: bytes) -> list[object]:
    decoded: list[object] = msgpack.unpackb(frame)
    return decoded


def resigned(values: list[object] | bytes) -> bytes:
    """A frame that its author really signed, however odd its form."""
    signed = values if isinstance(values, bytes) else msgpack.packb([*values[:8], bytes(64)])[:-66]
    return signed + b"\xc4\x40" + ME.sign(b"swarmd frame v1", signed)


def open_frame(frame: bytes, swarm: bytes) -> Envelope | Rejected:
    parsed = parse(frame, swarm)
    return parsed if isinstance(parsed, Rejected) else check(parsed, frame)


def reason(frame: bytes, swarm: bytes = SWARM) -> Reason | None:
    outcome = open_frame(frame, swarm)
    return outcome.reason if isinstance(outcome, Rejected) else None


def test_version_1_is_frozen() -> None:
    """If this fails, the wire has changed: nodes of before and after would not understand each other."""
    golden = bytes.fromhex("".join(GOLDEN.read_text().split()))
    assert example() == golden
    assert msgpack.unpackb(golden) == [
        "swarmd",
        1,
        SWARM,
        ME.public_key,
        7,
        int(NOW * 1000),
        "rollouts",
        b"body",
        golden[-64:],
    ]
    author = Ed25519PublicKey.from_public_bytes(ME.public_key)
    # As docs/wire.md says; raises where it does not hold
    author.verify(golden[-64:], b"swarmd\x00\x0fswarmd frame v1" + golden[:-66])
    assert open_frame(golden, SWARM) == Envelope(ME.peer_id, 7, NOW, "rollouts", b"body")


@fuzz
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**53 - 1),
    st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True),
    st.binary(max_size=70_000),
)
def test_every_frame_comes_back(sequence: int, ms: int, kind: str, body: bytes) -> None:
    frame = seal(ME, SWARM, sequence, ms / 1000, kind, body)
    assert msgpack.packb(fields(frame)) == frame
    opened = open_frame(frame, SWARM)
    assert isinstance(opened, Envelope)
    assert (opened.author, opened.sequence, opened.kind, opened.body) == (ME.peer_id, sequence, kind, body)
    assert abs(opened.sent_at - ms / 1000) <= 0.0011


def test_each_flipped_bit_is_refused() -> None:
    frame = example()
    for bit in range(8 * len(frame)):
        broken = bytearray(frame)
        broken[bit // 8] ^= 1 << bit % 8
        assert reason(bytes(broken)) is not None, bit


def test_each_truncation_and_addition_is_refused() -> None:
    frame = example()
    assert all(reason(frame[:n]) is not None for n in range(len(frame)))
    assert all(reason(frame[n:]) is not None for n in range(1, len(frame)))
    assert all(reason(frame + bytes([n])) is Reason.MALFORMED for n in range(256))
    assert reason(frame + frame) is Reason.MALFORMED


@fuzz
@given(st.binary(max_size=400))
def test_any_bytes_are_refused(junk: bytes) -> None:
    assert reason(junk) is not None
    assert reason(b"\x99\xa6swarmd" + junk) is not None
    assert reason(example()[:9] + junk) is not None


def other_spellings() -> dict[str, bytes]:
    """The same values, signed by their author, spelled in another way than ours.

    Offsets are those of `example()`.
    """
    signed = example()[:-66]
    tag, version, swarm, author, rest = signed[1:8], signed[8:9], signed[9:27], signed[27:61], signed[61:]
    head = tag + version + swarm + author
    return {
        "long array header": b"\xdc\x00\x09" + signed[1:],
        "longer array header": b"\xdd\x00\x00\x00\x09" + signed[1:],
        "tag as str 8": b"\x99\xd9\x06swarmd" + signed[8:],
        "tag as bin": b"\x99\xc4\x06swarmd" + signed[8:],
        "version as uint 8": b"\x99" + tag + b"\xcc\x01" + signed[9:],
        "version as float": b"\x99" + tag + b"\xcb\x3f\xf0" + bytes(6) + signed[9:],
        "swarm id as bin 16": b"\x99" + tag + version + b"\xc5\x00\x10" + swarm[2:] + author + rest,
        "author as bin 32": b"\x99" + tag + version + swarm + b"\xc6\x00\x00\x00\x20" + author[2:] + rest,
        "sequence as uint 8": b"\x99" + head + b"\xcc\x07" + rest[1:],
        "sequence as uint 64": b"\x99" + head + b"\xcf" + bytes(7) + b"\x07" + rest[1:],
        "sequence as int 64": b"\x99" + head + b"\xd3" + bytes(7) + b"\x07" + rest[1:],
        "time as int 64": b"\x99" + head + b"\x07\xd3" + rest[2:],
        "kind as str 8": b"\x99" + head + rest[:10] + b"\xd9\x08" + rest[11:],
        "body as bin 16": b"\x99" + head + rest[:19] + b"\xc5\x00\x04" + rest[21:],
        "body as str": b"\x99" + head + rest[:19] + b"\xa4" + rest[21:],
    }


@pytest.mark.parametrize("name", other_spellings())
def test_another_spelling_of_the_same_values_is_refused(name: str) -> None:
    spelled = other_spellings()[name]
    assert resigned(example()[:-66]) == example()
    assert reason(resigned(spelled)) is Reason.MALFORMED
    long_signature = resigned(spelled)[:-66] + b"\xc5\x00\x40" + resigned(spelled)[-64:]
    assert reason(long_signature) is Reason.MALFORMED


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
def test_a_wrong_field_is_refused_though_it_is_signed(position: int, value: object) -> None:
    values = fields(example())
    values[position] = value
    assert reason(resigned(values)) is Reason.MALFORMED


def test_maps_nesting_and_bombs_are_refused_at_once() -> None:
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


def test_another_version_is_told_apart() -> None:
    for version in (0, 2, 127):
        assert (
            reason(resigned([*fields(example())[:1], version, *fields(example())[2:]]))
            is Reason.WRONG_VERSION
        )
        assert reason(msgpack.packb(["swarmd", version, {"a": "later form"}])) is Reason.WRONG_VERSION
    assert Reason.WRONG_VERSION.verdict.value == "ignore"


def test_another_key_or_author_is_a_bad_signature() -> None:
    frame, other = example(), Identity.from_seed(bytes(32))
    assert reason(frame[:-64] + other.sign(b"swarmd frame v1", frame[:-66])) is Reason.BAD_SIGNATURE
    assert reason(frame[:-64] + ME.sign(b"another domain", frame[:-66])) is Reason.BAD_SIGNATURE
    assert reason(frame.replace(ME.public_key, other.public_key)) is Reason.BAD_SIGNATURE


def test_the_size_limit_holds_on_both_sides() -> None:
    frame = example(bytes(MAX_BODY_BYTES))
    assert reason(frame) is None and len(frame) <= MAX_FRAME_BYTES
    with pytest.raises(ValueError, match="at most"):
        example(bytes(MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    ("swarm", "sequence", "now", "kind"),
    [(b"short", 1, NOW, "a"), (SWARM, -1, NOW, "a"), (SWARM, 1, -5.0, "a"), (SWARM, 1, NOW, "A")],
)
def test_we_never_seal_what_nobody_would_admit(swarm: bytes, sequence: int, now: float, kind: str) -> None:
    with pytest.raises(ValueError, match="admit"):
        seal(ME, swarm, sequence, now, kind, b"")


@pytest.mark.parametrize(("name", "digest"), [("", "a"), ("a/b", "c"), ("a", ""), ("A", "b")])
def test_a_topic_is_made_of_words(name: str, digest: str) -> None:
    with pytest.raises(ValueError):
        Topic(name, digest)


def test_a_topic_reads_as_designed() -> None:
    assert str(Topic("main", "0123456789abcdef")) == "/swarmd/1/main/0123456789abcdef"
    assert SWARM.hex() == "b66c9516cdf6b7f2ef49d654627b62f0"
