import itertools
import random

import pytest

from p2p.admission import inbox
from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Handlers, PeerRequest, Reason, Verdict
from tests.doubles import NOW, TOPIC, Clock, ListeningMember, memory_member
from tests.p2p.lossy import LossySwarm


def member(swarm: MemorySwarm, n: int, topic: Topic = TOPIC) -> ListeningMember:
    return memory_member(swarm, n, lambda: NOW, topic=topic)


def test_frames_of_helped_swarms_are_admitted_and_forwarded() -> None:
    other = Topic(TOPIC.name, "ffffffffffffffff")
    kept: list[Handlers] = []

    def build(handlers: Handlers) -> MemoryEngine:
        kept.append(handlers)
        return MemorySwarm().join(Identity(b"b" * 32).peer_id, handlers)

    helper = ListeningMember(
        Identity(b"b" * 32),
        TOPIC,
        build,
        sequence=itertools.count(),
        clock=lambda: NOW,
        also=[other],
    )
    author, hostile = Identity(b"\1" * 32), Identity(b"\2" * 32).peer_id
    frame = seal(author, other.swarm_id, 1, NOW, "rollouts", b"body")
    pass_on, broken = (
        kept[0].also[other],
        seal(author, other.swarm_id, 2, NOW, "rollouts", b"body")[:-1] + b"x",
    )
    # The helper did not send this frame.
    assert helper.topics == [TOPIC, other] and kept[0].deliver(frame, None) is Verdict.REJECT
    assert [pass_on(frame, None), pass_on(frame, None), pass_on(broken, hostile)] == [
        Verdict.ACCEPT, Verdict.IGNORE, Verdict.REJECT,
    ]  # fmt: skip
    assert [envelope.body for envelope in helper.received()] == [b"body"] and helper.score(hostile) < 0
    assert helper.rejected == {Reason.OTHER_SWARM: 1, Reason.DUPLICATE: 1, Reason.BAD_SIGNATURE: 1}


def test_a_member_that_left_sends_nothing_until_it_returns() -> None:
    swarm = MemorySwarm()
    a, b = member(swarm, 1), member(swarm, 2)
    for number, change in enumerate((a.come_back, a.leave, a.leave, a.come_back)):
        change()
        a.publish("rollouts", bytes([number]))
    assert [envelope.body for envelope in b.received()] == [b"\0", b"\3"]


def test_reports_lower_an_authors_quota_and_then_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "FRAMES_AT_ONCE", 5.0)
    swarm = MemorySwarm()
    a, b = member(swarm, 1), member(swarm, 2)
    a.publish("rollouts", b"1")
    b.report(a.identity.peer_id, Reason.UNDECODABLE)
    a.publish("rollouts", b"2")
    assert [envelope.body for envelope in b.received()] == [b"1"]
    assert b.rejected == {Reason.UNDECODABLE: 1, Reason.OVER_QUOTA: 1}
    for _ in range(2):
        b.report(a.identity.peer_id, Reason.UNDECODABLE)
    a.publish("rollouts", b"3")
    assert b.rejected == {Reason.UNDECODABLE: 3, Reason.OVER_QUOTA: 1, Reason.SHUNNED: 1}
    for _ in range(2):
        b.report(a.identity.peer_id, Reason.UNDECODABLE)
    a.publish("rollouts", b"4")  # now the engine was told to shut the author out
    assert sum(b.rejected.values()) == 7


def test_frames_of_unknown_kinds_are_counted_and_forwarded() -> None:
    clock, swarm, known = Clock(), MemorySwarm(), "offer"
    us, via = memory_member(swarm, 1, clock, knows=known.__eq__), member(swarm, 9).identity.peer_id
    author = Identity(bytes([50]) * 32)
    for number, kind in enumerate(("later", known), 1):
        frame = seal(author, TOPIC.swarm_id, number, clock.now, kind, b"")
        assert us.deliver(frame, via) is Verdict.ACCEPT
    assert us.rejected == {Reason.UNKNOWN_KIND: 1} and us.score(author.peer_id) == 0
    assert [body.kind for body in us.received()] == [known]


def history(seed: int) -> list[list[bytes]]:
    swarm, rng = LossySwarm(seed, loss=0.2, duplicate=0.3), random.Random(seed)
    members = [member(swarm, n) for n in (1, 2, 3, 4)]
    heard: list[list[bytes]] = []
    for step in range(60):
        rng.choice(members).publish("rollouts", b"%d" % step)
        heard.extend([envelope.body for envelope in m.received()] for m in members)
    return heard


def test_the_same_seed_gives_the_same_history() -> None:
    assert history(7) == history(7) != history(8)
    arrived = sum(len(bodies) for bodies in history(7))
    assert 0.65 < arrived / (60 * 3) < 0.95  # a fifth is lost, and duplicates are not admitted


def test_a_partition_heals_and_a_member_that_left_is_gone() -> None:
    swarm = MemorySwarm()
    a, b, c = (member(swarm, n) for n in (1, 2, 3))
    swarm.partition([a.identity.peer_id])
    a.publish("rollouts", b"lost")
    assert not b.received() and not a.peers() and len(b.peers()) == 1
    swarm.partition()
    a.publish("rollouts", b"heard")
    assert (
        [envelope.body for envelope in b.received()]
        == [b"heard"]
        == [envelope.body for envelope in c.received()]
    )
    swarm.join(c.identity.peer_id, lambda frame: Verdict.ACCEPT)  # a restart of c, which replaces it
    c.publish("rollouts", b"from the dead")
    assert not b.received()


def test_the_first_bytes_of_questions_never_change() -> None:
    assert [(one.name, one.message(b"x")) for one in PeerRequest] == [
        ("BLOBS", b"\1x"), ("DIAL_BACK", b"\3x"), ("TWINS", b"\6x"),
        ("USED", b"\7x"), ("INTRODUCTION", b"\x08x"),
    ]  # fmt: skip
    assert [PeerRequest.TWINS.content(message) for message in (b"\6main", b"\5main", b"")] == [
        b"main",
        None,
        None,
    ]
