import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.envelope import Frame, check, parse, seal
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import offers, wire
from swarmd.testing import NOW, TOPIC, identity
from swarmd.types import Completion, Rollout, TaskRef

ME = PeerId("12D3KooWtest")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
COMPLETIONS = st.lists(st.builds(Completion, TEXT, st.booleans()), min_size=1, max_size=8).map(tuple)
ROLLOUTS = st.lists(
    st.builds(
        Rollout,
        st.builds(TaskRef, st.text("abc_", min_size=1, max_size=9), st.integers(0, 2**31)),
        COMPLETIONS,
        st.just(ME),
    ),
    min_size=1,
    max_size=5,
)


def rollout(n: int, size: int = 1, completions: int = 8) -> Rollout:
    return Rollout(TaskRef("bf", n), (Completion("x" * size, True),) * completions, ME)


@given(ROLLOUTS, st.integers(0, 10**6), TEXT)
def test_what_was_encoded_decodes_to_itself(rollouts: list[Rollout], number: int, model: str) -> None:
    body = wire.encode(rollouts, number, model)
    document = [
        1,
        number,
        model,
        [[r.ref.specialty, r.ref.n, [[c.text, c.ended] for c in r.completions]] for r in rollouts],
    ]
    assert msgpack.unpackb(body) == document and msgpack.packb(document) == body
    decoded = wire.decode(body, ME)
    assert isinstance(decoded, wire.RolloutSet)
    assert (decoded.round, decoded.model, list(decoded.rollouts)) == (number, model, rollouts)


def test_version_1_is_frozen() -> None:
    """Other implementations rely on these bytes, so a change here needs a new version."""
    rollouts = [
        Rollout(
            TaskRef("basic_arithmetic", 7),
            (Completion("<answer>3</answer>", True), Completion("¬", False)),
            ME,
        )
    ]
    golden = bytes.fromhex(
        "940103a474696e799193b062617369635f61726974686d65746963079292b23c616e737765723e333c2f616e737765723ec392a2c2acc2"
    )
    assert wire.encode(rollouts, 3, "tiny") == golden
    assert msgpack.unpackb(golden) == [
        1,
        3,
        "tiny",
        [["basic_arithmetic", 7, [["<answer>3</answer>", True], ["¬", False]]]],
    ]
    decoded = wire.decode(golden, ME)
    assert isinstance(decoded, wire.RolloutSet) and list(decoded.rollouts) == rollouts


@given(st.binary(max_size=300))
def test_any_bytes_give_a_reason_and_never_an_exception(body: bytes) -> None:
    assert isinstance(wire.decode(body, ME), Reason)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


ALMOST = st.tuples(TEXT, st.integers(-(2**63), 2**63), st.lists(JUNK, max_size=3))


@settings(max_examples=300)
@given(st.tuples(st.just(1), st.integers(-1, 5), TEXT | JUNK, st.lists(JUNK | ALMOST, max_size=3)))
def test_almost_right_bodies_are_refused_or_canonical(document: tuple[object, ...]) -> None:
    body = msgpack.packb(document)
    decoded = wire.decode(body, ME)
    if isinstance(decoded, wire.RolloutSet):
        assert wire.encode(decoded.rollouts, decoded.round, decoded.model) == body


def test_flipped_bits_and_cuts_never_raise_and_never_pass_unseen() -> None:
    body = wire.encode([rollout(n) for n in range(3)], 9, "tiny")
    for i in range(len(body) * 8):
        changed = bytearray(body)
        changed[i // 8] ^= 1 << i % 8
        decoded = wire.decode(bytes(changed), ME)
        # A changed letter or number is still a rollout set; the envelope's signature guards it
        if isinstance(decoded, wire.RolloutSet):
            assert wire.encode(decoded.rollouts, decoded.round, decoded.model) == bytes(changed)
    for cut in range(len(body)):
        assert wire.decode(body[:cut], ME) is Reason.UNDECODABLE
    assert wire.decode(body + b"\0", ME) is Reason.UNDECODABLE


def test_numbers_written_the_long_way_are_refused() -> None:
    """msgpack can say 7 in five ways; only the shortest has the content id that everybody else computes."""
    body = wire.encode([rollout(7)], 1, "m")
    at = body.index(b"\xa2bf\x07") + 3
    assert wire.decode(body[:at] + b"\xcc\x07" + body[at + 1 :], ME) is Reason.UNDECODABLE


@pytest.mark.parametrize(
    "document, reason",
    [
        ([2, 1, "m", {"new": 1}], Reason.WRONG_VERSION),  # a later one is told apart from garbage
        ([1, 1, "m", []], Reason.UNDECODABLE),
        ([1, -1, "m", [["bf", 1, [["x", True]]]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["bf", -1, [["x", True]]]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["bf", 1, []]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["bf", 1, [["x", True]] * 65]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["bf", 1, [["x", True]]]] * 65], Reason.UNDECODABLE),
        ([1, 1, "m" * 97, [["bf", 1, [["x", True]]]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["b" * 97, 1, [["x", True]]]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["bf", 1, [["x" * 65_537, True]]]]], Reason.TOO_LONG),
        ([1, 1, "m", [["bf", 1, [["x", True, 1.0]]]]], Reason.UNDECODABLE),
        ([1, 1, "m", [["bf", True, [["x", True]]]]], Reason.UNDECODABLE),
    ],
)
def test_malformed_sets_are_refused(document: list[object], reason: Reason) -> None:
    assert wire.decode(msgpack.packb(document), ME) is reason


MODALITIES = st.from_regex(r"[a-z0-9][a-z0-9-]{0,15}", fullmatch=True)


@pytest.mark.parametrize("kind", [wire.KIND, offers.KIND])
@given(modality=MODALITIES)
def test_the_modality_of_a_kind_is_the_one_it_was_tagged_with(kind: str, modality: str) -> None:
    tagged = kind if modality == wire.TEXT else f"{kind}-{modality}"
    frame = seal(identity(1), TOPIC.swarm_id, 1, NOW, tagged, b"")
    parsed = parse(frame, TOPIC.swarm_id)
    assert isinstance(parsed, Frame)
    envelope = check(parsed, frame)
    assert isinstance(envelope, Envelope) and wire.modality_of(envelope.kind) == modality
    assert (envelope.kind == kind) == (modality == wire.TEXT)


@pytest.mark.parametrize(
    "kind", ["hello", "rollout", "offers", "rollouts-", "rollouts-text", "roll-outs", ""]
)
def test_other_kinds_have_no_modality(kind: str) -> None:
    """rollouts-text: text has one spelling."""
    assert wire.modality_of(kind) is None
