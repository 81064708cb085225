"""Rollouts that wait for a node's turn to send: the latest of the last rounds go into one offer."""

import random

import msgpack

from p2p.identity import Identity
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import offers, wire
from swarmd.exchange.pacing import FEW_AUTHORS, FIRST_PACE, TARGET_PER_S, Heard, Outgoing, Pacing
from swarmd.types import Completion, Rollout, TaskRef
from tests.doubles import encoded

ME = Identity(bytes(32)).peer_id


def offer(*ns: int) -> bytes:
    rollouts = [Rollout(TaskRef("bf", n), (Completion(f"answer {n}", True),), ME) for n in ns]
    (body,), _ = encoded(rollouts, ns[0], "tiny", ("bf",))
    return body


def offered(body: bytes) -> list[int]:
    found = offers.decode(Envelope(ME, 1, 0.0, offers.KIND, body), ("bf",))
    assert not isinstance(found, Reason)
    return [item.ref.n for item in found]


def busy() -> Pacing:
    """Return the pacing of a node on a busy topic at time 0.0."""
    heard = Heard()
    for n in range(2 * FEW_AUTHORS):
        heard.offer(PeerId(str(n)), "", 0.0)
    return Pacing(heard, random.Random(1))


def test_everything_is_sent_at_once_while_the_pace_is_free() -> None:
    outgoing = Outgoing(Pacing(Heard(), random.Random(1)), 2)
    outgoing.put(offers.KIND, offer(1, 2))
    outgoing.put(wire.KIND, b"a set")
    assert outgoing.pop(0.0) == (offers.KIND, offer(1, 2)) or outgoing.pop(0.0) is None
    outgoing.put(offers.KIND, offer(*range(100, 170)[:40]))
    outgoing.put(offers.KIND, offer(*range(200, 240)))
    sent = []
    while (message := outgoing.pop(1.0)) is not None:
        sent += offered(message[1])
    assert sent == [*range(100, 140), *range(200, 240)]


def test_an_offer_combines_the_last_rounds_latest_first() -> None:
    outgoing = Outgoing(busy(), 2)
    for n in range(1, 6):
        outgoing.put(offers.KIND, offer(10 * n, 10 * n + 1))
        assert outgoing.pop(float(n)) is None
        outgoing.next_round()
    outgoing.put(offers.KIND, offer(60))
    later = 2 / (FIRST_PACE * TARGET_PER_S)
    message = outgoing.pop(later)
    assert message is not None and offered(message[1]) == [60, 50, 51]
    assert msgpack.unpackb(message[1])[1] == 60, "the offer does not have the latest round"
    assert outgoing.pop(later + 1) is None
    outgoing.put(offers.KIND, offer(70))
    assert outgoing.pop(later + 1) is None  # not the node's turn yet


def test_only_the_latest_of_the_whole_sets_is_sent() -> None:
    outgoing = Outgoing(busy(), 2)
    outgoing.put(wire.KIND, b"older")
    assert outgoing.pop(0.0) is None
    outgoing.next_round()
    outgoing.put(wire.KIND, b"newer")
    assert outgoing.pop(2 / (FIRST_PACE * TARGET_PER_S)) == (wire.KIND, b"newer")


def test_a_rollout_that_did_not_fit_into_an_offer_keeps_its_age() -> None:
    outgoing, turn = Outgoing(busy(), 2), 2 / (FIRST_PACE * TARGET_PER_S)
    assert outgoing.pop(0.0) is None
    for n in range(100, 600, 100):
        outgoing.put(offers.KIND, offer(*range(n, n + 40)))
    sent = []
    for n in range(1, 3):
        message = outgoing.pop(n * turn)
        assert message is not None
        sent += offered(message[1])
        outgoing.next_round()
    assert sent[:80] == [*range(100, 140), *range(200, 240)]
    outgoing.put(offers.KIND, offer(1))
    message = outgoing.pop(3 * turn)
    assert message is not None and offered(message[1]) == [1]
