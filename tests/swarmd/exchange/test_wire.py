import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.types import PeerId, Reason
from swarmd.exchange import wire
from swarmd.types import Completion, Rollout, TaskRef

ME = PeerId("12D3KooWtest")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
EARLIER = st.lists(TEXT, max_size=3).map(tuple)
COMPLETIONS = st.lists(st.builds(Completion, TEXT, st.booleans(), EARLIER), min_size=1, max_size=8).map(tuple)
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
def test_decoding_encoded_rollouts_gives_the_same_rollouts(
    rollouts: list[Rollout], number: int, model: str
) -> None:
    body = wire.encode(rollouts, number, model)
    document = [
        2,
        number,
        model,
        [[r.ref.specialty, r.ref.n, [[[*c.texts], c.ended] for c in r.completions]] for r in rollouts],
    ]
    assert msgpack.unpackb(body) == document and msgpack.packb(document) == body
    decoded = wire.decode(body, ME)
    assert isinstance(decoded, wire.RolloutSet)
    assert (decoded.round, decoded.model, list(decoded.rollouts)) == (number, model, rollouts)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_a_reason_and_never_an_exception(body: bytes) -> None:
    assert isinstance(wire.decode(body, ME), Reason)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


ALMOST = st.tuples(TEXT, st.integers(-(2**63), 2**63), st.lists(JUNK, max_size=3))


@settings(max_examples=300)
@given(st.tuples(st.just(2), st.integers(-1, 5), TEXT | JUNK, st.lists(JUNK | ALMOST, max_size=3)))
def test_almost_valid_bodies_are_rejected_or_canonical(document: tuple[object, ...]) -> None:
    body = msgpack.packb(document)
    decoded = wire.decode(body, ME)
    if isinstance(decoded, wire.RolloutSet):
        assert wire.encode(decoded.rollouts, decoded.round, decoded.model) == body


def test_flipped_bits_and_truncations_raise_nothing_and_change_the_content() -> None:
    body = wire.encode([rollout(n) for n in range(3)], 9, "tiny")
    for i in range(len(body) * 8):
        changed = bytearray(body)
        changed[i // 8] ^= 1 << i % 8
        decoded = wire.decode(bytes(changed), ME)
        # A changed letter or number may still be a rollout set; the envelope's signature protects against
        # that.
        if isinstance(decoded, wire.RolloutSet):
            assert wire.encode(decoded.rollouts, decoded.round, decoded.model) == bytes(changed)
    for cut in range(len(body)):
        assert wire.decode(body[:cut], ME) is Reason.UNDECODABLE
    assert wire.decode(body + b"\0", ME) is Reason.UNDECODABLE


def test_a_completion_over_the_limit_is_refused() -> None:
    assert (
        wire.decode(msgpack.packb([2, 1, "m", [["bf", 1, [[["x" * 65_530, "x" * 7], True]]]]]), ME)
        is Reason.TOO_LONG
    )
    cut = wire.decode(wire.encode([rollout(1, 65_537, 1)], 1, "m" * 97), ME)
    assert isinstance(cut, wire.RolloutSet) and (cut.model, cut.rollouts) == (
        "m" * 96,
        (rollout(1, 65_536, 1),),
    )
