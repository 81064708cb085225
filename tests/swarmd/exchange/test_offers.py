"""Offers: their encoding, the rejection of malformed offers, and the bounded board."""

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgpack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2p.blobs.blobs import MAX_BLOB_BYTES, content_id, pack, unpack
from p2p.identity import Identity, public_key_of
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import offers, wire
from swarmd.exchange.offers import OFFER_BYTES, Board, Offered
from swarmd.types import Completion, Rollout, TaskRef
from tests.doubles import encoded

ME = Identity(bytes(32)).peer_id
OTHER, THIRD = (Identity(bytes([n]) * 32).peer_id for n in (1, 2))
SPECIALTIES = ("bf", "gcd")


def rollout(n: int, specialty: str = "bf", text: str = "an answer") -> Rollout:
    return Rollout(TaskRef(specialty, n), (Completion(f"{text} to {n}", True), Completion("no", False)), ME)


def envelope(body: bytes) -> Envelope:
    return Envelope(ME, 1, 0.0, offers.KIND, body, OTHER)


def test_offers_match_their_blobs() -> None:
    rollouts = [rollout(n, SPECIALTIES[n % 2]) for n in range(8)]
    (offer,), blobs = encoded(rollouts, 5, "tiny", SPECIALTIES)
    decoded = offers.decode(envelope(offer), SPECIALTIES)
    assert not isinstance(decoded, Reason)
    assert [(o.author, o.via, o.ref, o.id, o.size) for o in decoded] == [
        (ME, OTHER, r.ref, content_id(b), len(b)) for r, b in zip(rollouts, blobs, strict=True)
    ]
    unknown = offers.decode(replace(envelope(offer), via=None), SPECIALTIES)
    assert not isinstance(unknown, Reason) and {o.via for o in unknown} == {ME}
    names, sizes = b"".join(sha256(blob).digest()[:12] for blob in blobs), [len(blob) for blob in blobs]
    assert msgpack.unpackb(offer) == [1, 5, [0, 1] * 4, list(range(8)), sizes, names]
    for r, blob in zip(rollouts, blobs, strict=True):
        content = ["tiny", [[r.ref.specialty, r.ref.n, [[[c.text], c.ended] for c in r.completions]]]]
        author, body = msgpack.unpackb(unpack(blob))
        assert author == public_key_of(ME) and msgpack.unpackb(body) == [2, 5, *content]
        item = Offered(ME, r.ref, content_id(blob), len(blob), ME)
        found = offers.decode_blob(blob, {content_id(blob)})
        assert offers.rollout_of(found, item) == wire.RolloutSet(5, "tiny", (r,))
        assert offers.rollout_of(found, replace(item, author=OTHER)) is Reason.NOT_ITS_OWN
        assert found.author == ME
        assert offers.rollout_of(found, replace(item, ref=TaskRef("bf", 99))) is Reason.MISLABELLED
        unasked = offers.decode_blob(blob, {b"another"})
        assert unasked.found is Reason.UNDECODABLE and unasked.author is None


def test_an_offer_carries_its_authors_address() -> None:
    (offer,), _ = encoded([rollout(n) for n in range(3)], 5, "tiny", SPECIALTIES)
    for address, more in (
        ("/ip4/11.0.0.7/tcp/4001", 8),
        (f"/ip6/2600::7/tcp/4001/p2p/{OTHER}/p2p-circuit", 52),
    ):
        body = offers.addressed(offer, address)
        decoded = offers.decode(envelope(body), SPECIALTIES)
        assert not isinstance(decoded, Reason) and {item.at for item in decoded} == {address}
        assert len(body) == len(offer) + more
        # The address is added when the offer is sent, because it may change until then.
        assert offers.join([body]) == [offer]
    assert offers.addressed(offer, "") == offer
    for where in (
        "192.168.1.1/tcp/8080",
        "127.0.0.1/tcp/4001",
        "11.0.0.7/tcp/22",
    ):  # addresses that a node must not dial for a peer
        decoded = offers.decode(envelope(offers.addressed(offer, f"/ip4/{where}")), SPECIALTIES)
        assert not isinstance(decoded, Reason) and {item.at for item in decoded} == {""}
    fields = msgpack.unpackb(offer)
    for junk in (b"", bytes(5), bytes(51), 7, None, [bytes(6)]):
        assert offers.decode(envelope(msgpack.packb([*fields, junk])), SPECIALTIES) is Reason.UNDECODABLE
    many, _ = encoded([rollout(10**8 + n) for n in range(200)], 1000, "m", SPECIALTIES)
    through = f"/ip6/2600::7/tcp/4001/p2p/{OTHER}/p2p-circuit"
    assert all(900 < len(offers.addressed(body, through)) <= OFFER_BYTES for body in many[:-1])


def test_an_offer_of_eight_rollouts_is_small() -> None:
    (offer,), _ = encoded([rollout(10**8 + n) for n in range(8)], 1000, "m", SPECIALTIES)
    assert len(offer) <= 180


def test_a_large_set_is_split_into_several_offers_without_loss() -> None:
    rollouts = [rollout(n) for n in range(150)]
    bodies, blobs = encoded(rollouts, 1, "m", SPECIALTIES)
    assert len(bodies) > 1 and all(len(body) <= OFFER_BYTES for body in bodies) and len(blobs) == 150
    items = [
        o for body in bodies for o in offers.decode(envelope(body), SPECIALTIES) if isinstance(o, Offered)
    ]
    assert [o.ref for o in items] == [r.ref for r in rollouts]


def test_a_rollout_over_the_limits_of_a_blob_is_left_out() -> None:
    huge = Rollout(TaskRef("bf", 3), tuple(Completion("é" * 16_384, True) for _ in range(64)), ME)
    (offer,), (blob,) = encoded([huge, rollout(4)], 1, "m", SPECIALTIES)
    decoded = offers.decode(envelope(offer), SPECIALTIES)
    assert not isinstance(decoded, Reason) and [o.id for o in decoded] == [content_id(blob)]
    assert encoded([huge], 1, "m", SPECIALTIES) == ([], [])


def test_eight_completions_of_maximum_length_fit_into_a_blob() -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 9))) for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=20_000))[: wire.MAX_TEXT_CHARACTERS] for _ in range(8)]
    assert {len(text) for text in texts} == {wire.MAX_TEXT_CHARACTERS}
    thought = Rollout(TaskRef("bf", 3), tuple(Completion(text, True) for text in texts), ME)
    (offer,), (blob,) = encoded([thought], 1, "m", SPECIALTIES)
    (item,) = offers.decode(envelope(offer), SPECIALTIES)
    found = offers.rollout_of(offers.decode_blob(blob), item)
    assert not isinstance(found, Reason) and found.rollouts == (thought,)


ITEMS = st.tuples(
    st.sampled_from([0, 1, 1, 2, -1]),
    st.sampled_from([0, 3, 4, -1]),
    st.sampled_from([1, 5, MAX_BLOB_BYTES, MAX_BLOB_BYTES + 1, 0]),
)


@st.composite
def documents(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw mostly offers of a few items, in which a list or the ids may be truncated."""
    items = draw(st.lists(ITEMS, max_size=2))
    parts = [list(part) for part in zip(*items, strict=True)] or [[], [], []]
    ids = bytes(12 * len(items) + draw(st.sampled_from([0, 0, 0, 1, -1, 12])) * bool(items))
    if items and draw(st.integers(0, 3)) == 0:
        parts[draw(st.integers(0, 2))].pop()
    return (draw(st.sampled_from([1, 1, 1, 1, 2])), draw(st.sampled_from([0, 7, 7, -1])), *parts, ids)


@settings(max_examples=400)
@given(documents())
@example((1, 1, [0] * 65, [1] * 65, [1] * 65, bytes(12 * 65)))
@example((1, 1, [0] * 62, [2**40] * 62, [1] * 62, bytes(12 * 62)))  # larger than OFFER_BYTES
def test_an_offer_that_breaks_a_rule_is_rejected(document: tuple[Any, ...]) -> None:
    version, number, specialties, ns, sizes, ids = document
    body = msgpack.packb(document)
    decoded = offers.decode(envelope(body), SPECIALTIES)
    whole = (
        len(specialties) == len(ns) == len(sizes) > 0
        and len(ids) == 12 * len(ns)
        and len(ns) <= 64
        and len(body) <= OFFER_BYTES
    )
    numbers = (
        number >= 0
        and min(specialties, default=0) >= 0
        and min(ns, default=0) >= 0
        and all(0 < size <= MAX_BLOB_BYTES for size in sizes)
    )
    if version != 1 or not (whole and numbers):
        assert decoded is (Reason.UNDECODABLE if version == 1 else Reason.WRONG_VERSION)
    elif max(specialties) > 1:
        assert decoded is Reason.UNKNOWN_TASK
    else:
        refs = [TaskRef(SPECIALTIES[index], n) for index, n in zip(specialties, ns, strict=True)]
        assert not isinstance(decoded, Reason) and [(o.ref, o.size) for o in decoded] == list(
            zip(refs, sizes, strict=True)
        )


@settings(derandomize=True, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_decode_to_an_offer_or_a_reason(body: bytes) -> None:
    decoded = offers.decode(envelope(body), SPECIALTIES)
    assert isinstance(decoded, Reason) or all(o.author == ME for o in decoded)


def offered(author: PeerId, n: int, name: int | None = None, group: str = "") -> Offered:
    return Offered(
        author, TaskRef("bf", n), (n if name is None else name).to_bytes(16, "big"), 10, author, group
    )


def uniform(items: Sequence[Offered], count: int, rng: random.Random) -> Sequence[Offered]:
    return rng.sample(items, min(count, len(items)))


def board(**options: Any) -> Board:
    made = Board(lambda ref: ref.n < 1000, kept_rounds=options.pop("kept_rounds", 2), **options)
    made.begin(1)
    return made


def test_a_chosen_offer_is_not_chosen_again() -> None:
    on_offer, rng = board(), random.Random(0)
    items = [offered(ME, n) for n in range(6)]
    assert on_offer.add(items) == 6
    first = on_offer.choose(4, rng, uniform)
    on_offer.add(items)  # the same items are offered again
    second = on_offer.choose(4, rng, uniform)
    assert len(first) == 4 and sorted(o.id for o in [*first, *second]) == [o.id for o in items]
    assert not on_offer.choose(4, rng, uniform) and not len(on_offer.offered)


def test_only_one_rollout_of_each_author_and_task_is_chosen() -> None:
    on_offer = board()
    on_offer.add([offered(ME, 1, name=1), offered(ME, 1, name=2), offered(OTHER, 1, name=3)])
    assert sorted(o.author for o in on_offer.choose(9, random.Random(0), uniform)) == sorted([ME, OTHER])


def test_old_offers_are_removed() -> None:
    on_offer = board(kept_rounds=2)
    on_offer.add([offered(ME, 1)])
    on_offer.begin(on_offer.round + 1)
    on_offer.add([offered(ME, 2)])
    on_offer.begin(on_offer.round + 1)
    assert [o.ref.n for o in on_offer.offered.values()] == [2]


def test_after_a_trainers_restart_ages_count_from_its_earlier_round() -> None:
    on_offer = Board(lambda _: True, kept_rounds=2)
    on_offer.add([offered(ME, 1)])  # before the trainer's round is known
    on_offer.begin(90)
    on_offer.begin(91)
    assert [o.round for o in on_offer.offered.values()] == [90]
    on_offer.add([offered(ME, 2)])
    on_offer.begin(40)
    assert [(o.ref.n, o.round) for o in on_offer.offered.values()] == [(1, 40), (2, 40)]
    on_offer.begin(42)
    assert not len(on_offer.offered)


def test_a_chosen_rollout_keeps_the_age_of_its_offer() -> None:
    on_offer = board(kept_rounds=2)
    on_offer.add([offered(ME, 1)])
    on_offer.begin(on_offer.round + 1)
    (item,) = on_offer.choose(1, random.Random(0), uniform)
    assert on_offer.round - item.round == 1
    ages = {}
    for _ in range(2):
        on_offer.begin(on_offer.round + 1)
        ages[on_offer.round - item.round] = on_offer.too_old(item)
    assert ages == {2: False, 3: True}


def test_an_author_displaces_only_its_own_oldest_offers() -> None:
    on_offer = board(per_author=3)
    on_offer.add([offered(OTHER, 500)])
    on_offer.add([offered(ME, n) for n in range(10)])
    assert [(o.author, o.ref.n) for o in on_offer.offered.values()] == [
        (OTHER, 500),
        (ME, 7),
        (ME, 8),
        (ME, 9),
    ]


def test_the_board_is_bounded() -> None:
    on_offer = board(in_all=5)
    on_offer.add([offered(PeerId(str(n)), n) for n in range(9)])
    assert [o.ref.n for o in on_offer.offered.values()] == [6, 7, 8]  # the oldest offers are removed at once


def test_a_crowd_in_few_groups_does_not_displace_other_authors() -> None:
    on_offer = Board(lambda _: True, kept_rounds=2, in_all=40)
    on_offer.add([offered(PeerId(f"friend {n}"), n) for n in range(20)])
    on_offer.add([offered(PeerId(f"sybil {n}"), n, name=100 + n, group="rack") for n in range(1000)])
    assert [o.ref.n for o in on_offer.offered.values()] == [*range(20), *range(990, 1000)]
    on_offer.add([offered(PeerId(f"friend {n}"), n, name=2000 + n) for n in range(20)])
    assert sum(o.author.startswith("sybil") for o in on_offer.offered.values()) < 3


def test_a_copied_offer_does_not_displace_the_authors_offer_in_either_order() -> None:
    on_offer = board()
    on_offer.add(
        [replace(offered(OTHER, 1, name=7), size=3), offered(THIRD, 2, name=7), offered(ME, 1, name=7)]
    )
    copy, changed, mine = on_offer.offered.values()
    assert (copy.author, changed.author, mine.author) == (OTHER, THIRD, ME)
    assert on_offer.same(mine) == [copy, changed] and on_offer.same(copy) == [changed, mine]
    (taken,) = on_offer.choose(1, random.Random(0), lambda items, count, rng: [copy])
    assert taken is copy and list(on_offer.offered.values()) == [changed, mine]
    on_offer.add([copy, mine])
    assert list(on_offer.offered.values()) == [changed, mine], "a chosen offer was put on the board again"
    on_offer.take_down(THIRD)
    on_offer.take(mine)
    on_offer.add([mine])
    assert not on_offer.offered


def test_an_authors_offer_remains_when_a_copy_of_it_expires() -> None:
    on_offer = board(kept_rounds=2)
    on_offer.add([offered(OTHER, 1, name=7)])
    on_offer.begin(2)
    on_offer.add([offered(ME, 1, name=7)])
    on_offer.begin(3)
    assert [o.author for o in on_offer.offered.values()] == [ME]


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_blob_or_a_reason(content: bytes) -> None:
    for blob in (content, pack(content)) if content else ():
        assert isinstance(offers.rollout_of(offers.decode_blob(blob), offered(ME, 1)), Reason)


def test_the_choice_is_uniform_over_rollouts() -> None:
    """SAPO, section 5: every external rollout is equally likely, whoever is its author."""
    counts = dict.fromkeys((ME, OTHER, THIRD), 0)
    for seed in range(600):
        on_offer = board()
        on_offer.add([offered(ME, 1), offered(OTHER, 2), offered(THIRD, 3), offered(THIRD, 4)])
        for item in on_offer.choose(2, random.Random(seed), uniform):
            counts[item.author] += 1
    assert abs(counts[ME] - 300) < 50 and abs(counts[OTHER] - 300) < 50 and abs(counts[THIRD] - 600) < 70
