import itertools
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID

from p2p.admission import inbox
from p2p.admission.fair_queue import FairQueue
from p2p.admission.reputation import (
    GRAYLIST_THRESHOLD,
    HALF_LIFE_S,
    MAX_BAN_S,
    REPEATED_FRAMES,
    Reputation,
)
from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity, peer_id_of
from p2p.rate_limit import FIRST_BAN_S, LONGEST_BAN_S
from p2p.types import Envelope, Handlers, Peer, PeerId, Reason, Verdict
from tests.doubles import NOW, ListeningMember
from tests.p2p.real import TOPIC, real_engine

A, B, C = (Identity(bytes([n]) * 32).peer_id for n in (1, 2, 3))


def test_a_score_falls_with_each_offence_and_halves_with_time() -> None:
    reputation = Reputation()
    assert reputation.score(A, NOW) == 0 and not reputation.shunned(A, NOW)
    for _ in range(3):
        assert reputation.offence(A, Reason.UNDECODABLE, NOW) is None
    assert reputation.score(A, NOW) == -30 and reputation.shunned(A, NOW) and not reputation.shunned(B, NOW)
    assert reputation.score(A, NOW + HALF_LIFE_S) == pytest.approx(-15) and not reputation.shunned(
        A, NOW + HALF_LIFE_S
    )
    assert reputation.score(A, NOW - 99) == -30  # a clock set back does not raise the score


@pytest.mark.parametrize(
    "reason",
    [Reason.STALE, Reason.OVER_QUOTA, Reason.OWN_ECHO, Reason.WRONG_VERSION, Reason.SHUNNED],
)
def test_rejections_without_a_culprit_do_not_lower_the_score(reason: Reason) -> None:
    reputation = Reputation()
    assert reason.verdict is Verdict.IGNORE
    assert (
        not any(reputation.offence(A, reason, NOW) for _ in range(100_000)) and reputation.score(A, NOW) == 0
    )


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.verdict is Verdict.REJECT])
def test_every_offence_lowers_the_score(reason: Reason) -> None:
    reputation = Reputation()
    reputation.offence(A, reason, NOW)
    assert reputation.score(A, NOW) < 0


def test_bans_grow_longer_for_own_offences_than_for_forwarded_frames() -> None:
    for reason, longest in ((Reason.NOT_ASKED_FOR, MAX_BAN_S), (Reason.BAD_SIGNATURE, LONGEST_BAN_S)):
        reputation, now = Reputation(), NOW
        bans: list[float] = []
        while len(bans) < 1100:  # more doublings than a float can represent
            seconds = reputation.offence(A, reason, now)
            if seconds is not None:
                assert reputation.shunned(A, now + seconds - 1)
                bans.append(seconds)
                now += seconds
        assert bans == [min(longest, FIRST_BAN_S * 2 ** min(n, 20)) for n in range(1100)]
        assert reputation.score(A, now) >= GRAYLIST_THRESHOLD * 1.25


def test_after_a_day_without_a_ban_the_next_ban_is_short_again() -> None:
    reputation = Reputation()

    def ban(now: float) -> float | None:
        return [reputation.offence(A, Reason.NOT_ASKED_FOR, now) for _ in range(5)][-1]

    assert ban(NOW) == 60 and ban(NOW + 7200) == 120 and ban(NOW + 7200 + 2 * 86400) == 60


def test_a_flood_leads_to_a_ban_within_a_second_but_a_busy_peer_is_spared() -> None:
    reputation = Reputation()
    refused = 10_000 - 200  # frames a second beyond a connection's limit
    bans = [
        n for n in range(refused) if reputation.offence(A, Reason.FLOODING, NOW + n / refused) is not None
    ]
    assert len(bans) == 1 and bans[0] < refused / 2
    # One frame a second too many.
    assert not any(reputation.offence(B, Reason.FLOODING, NOW + n) for n in range(3600))


def test_duplicates_cost_nothing_up_to_a_limit() -> None:
    reputation = Reputation()
    for n in range(10_000):  # two duplicates for three new frames
        reputation.offence(A, Reason.DUPLICATE, NOW + n / 50)
        reputation.offence(A, Reason.DUPLICATE, NOW + n / 50)
        for _ in range(3):
            reputation.admitted(A, NOW + n / 50)
    assert reputation.score(A, NOW) == 0
    told = [reputation.offence(B, Reason.DUPLICATE, NOW) for _ in range(int(REPEATED_FRAMES) + 101)]
    assert not any(told[:-2]) and any(told[-2:])


def test_a_flood_of_names_does_not_erase_a_ban() -> None:
    reputation, rng = Reputation(limit=500), random.Random(0)
    for _ in range(5):
        reputation.offence(B, Reason.NOT_ASKED_FOR, NOW)
    for n in range(5000):
        reputation.offence(peer_id_of(rng.randbytes(32)), Reason.MALFORMED, NOW + n / 100)
    assert len(reputation._scores) <= 500 and reputation.shunned(B, NOW + 59)


class Placed(MemoryEngine):
    """A memory engine whose peers have addresses, and which records the peers that it is told to shut out."""

    def __init__(
        self,
        swarm: MemorySwarm,
        where: dict[PeerId, str],
        told: list[tuple[PeerId, float]],
        me: PeerId,
        handlers: Handlers,
    ):
        super().__init__(swarm, me, handlers)
        self.where, self.told = where, told

    def peers(self) -> list[Peer]:
        return [Peer(peer, address, "inbound", 0.0) for peer, address in self.where.items()]

    def shut_out(self, peer: PeerId, seconds: float) -> None:
        self.told.append((peer, seconds))


@dataclass
class Life:
    """One run of a member's process, with a state folder."""

    folder: Path
    now: float = NOW
    where: dict[PeerId, str] = field(default_factory=dict)
    told: list[tuple[PeerId, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        me, self.swarm = Identity(b"m" * 32), MemorySwarm()
        build = partial(Placed, self.swarm, self.where, self.told, me.peer_id)
        self.member = ListeningMember(
            me,
            TOPIC,
            build,
            sequence=itertools.count(1),
            clock=lambda: self.now,
            folder=self.folder,
        )

    def hear(self, author: Identity, number: int, via: PeerId | None = None) -> Verdict:
        return self.member.deliver(seal(author, TOPIC.swarm_id, number, self.now, "rollouts", b"body"), via)


ALICE, BOB = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)


def test_a_member_reports_each_bodys_group_and_shuts_out_an_offender(tmp_path: Path) -> None:
    life = Life(tmp_path, where={A: "/ip4/11.0.1.2/tcp/1", B: "/ip4/9.9.9.9/tcp/1/p2p/x/p2p-circuit"})
    assert life.hear(ALICE, 1) is Verdict.ACCEPT
    (first,) = life.member.received()
    assert first.group == "11.0"
    assert life.hear(ALICE, 2) is Verdict.ACCEPT and life.hear(BOB, 1, via=A) is Verdict.ACCEPT
    assert [(e.author, e.group) for e in life.member.received()] == [(A, "11.0"), (B, "")]
    for _ in range(5):
        life.member.report(B, Reason.NOT_ASKED_FOR)
    assert life.told == [(B, FIRST_BAN_S)]


def test_memory_goes_to_groups_and_connections_in_equal_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_AUTHORS", 9)
    where = {A: "/ip4/11.0.1.2/tcp/1", B: "/ip4/11.0.9.9/tcp/1", C: "/ip4/12.0.1.2/tcp/1"}
    life = Life(tmp_path, where=where)
    authors = (Identity(bytes([n]) * 32) for n in itertools.count(200))
    life.hear(ALICE, 1)  # this makes the member note the groups
    held = []
    for via in (A, B, C):
        assert all(life.hear(next(authors), 1, via) is Verdict.ACCEPT for _ in range(8))
        held.append({holder.via: len(those) for holder, those in life.member.inbox._replays._held.items()})
    assert [[these.get(via, 0) for via in (A, B, C)] for these in held] == [[8, 0, 0], [4, 4, 0], [2, 2, 4]]


async def test_graylisted_peers_are_asked_no_questions(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, asked = Life(tmp_path, where={A: "/ip4/11.0.1.2/tcp/1", B: "/ip4/12.0.1.2/tcp/1"}), list[PeerId]()

    async def ask(peer: PeerId, question: bytes, limit: int) -> bytes:
        asked.append(peer)
        return b"an answer"

    monkeypatch.setattr(life.member.engine, "request", ask)
    for _ in range(3):
        life.member.report(B, Reason.NOT_ASKED_FOR)
    answers = [await life.member.request(peer, b"?", 10) for peer in (A, B, C)]
    assert answers == [b"an answer", b"", b"an answer"] and asked == [A, C]


def test_a_graylisted_peer_that_keeps_sending_is_banned_but_forwarders_are_not(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path)
    for _ in range(3):
        life.member.report(A, Reason.NOT_ASKED_FOR)
    assert life.member.score(A) == -30 and not life.told
    for n in range(600):  # ten a second
        life.now += 0.1
        assert life.hear(ALICE, n, via=C) is Verdict.IGNORE  # ALICE's score at C may be higher
        assert life.hear(BOB, n, via=A) is Verdict.IGNORE
        if life.told:
            break
    assert life.told == [(A, FIRST_BAN_S)] and n > 300 and life.member.score(C) == 0
    life.now += FIRST_BAN_S + 1
    assert life.hear(ALICE, 1000) is Verdict.IGNORE  # after the ban, ALICE is still shunned


def test_bad_frames_lead_to_a_ban_of_the_sender_and_not_of_the_named_author(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for n in range(20):
        forged = seal(BOB, TOPIC.swarm_id, n, NOW, "rollouts", b"")[:-64] + bytes(64)
        assert life.member.deliver(forged, A) is Verdict.REJECT
    assert life.told == [(A, FIRST_BAN_S)] and life.hear(ALICE, 1, via=A) is Verdict.IGNORE
    assert life.hear(BOB, 1, via=C) is Verdict.ACCEPT
    assert life.member.deliver(forged, A) is Verdict.IGNORE  # its signature is no longer checked
    assert life.member.rejected == {Reason.BAD_SIGNATURE: 20, Reason.SHUNNED: 2}


@pytest.mark.net
async def test_gossipsub_uses_the_members_scores(nursery: trio.Nursery) -> None:
    handlers = Handlers(
        lambda *_: Verdict.ACCEPT,
        lambda *_: b"",
        lambda peer: GRAYLIST_THRESHOLD - 1 if peer == A else GRAYLIST_THRESHOLD,
    )
    engine = real_engine("libp2p", 9, handlers)
    await nursery.start(engine.run)
    scorer = engine._stack.router.scorer
    assert scorer.is_graylisted(ID.from_string(A), [str(TOPIC)]) and not scorer.is_graylisted(
        ID.from_string(B), [str(TOPIC)]
    )


def put(queue: FairQueue[Envelope], author: str, n: int, group: str = "", size: int = 10) -> None:
    queue.put(Envelope(PeerId(author), n, NOW, "rollouts", b"", group=group), PeerId(author), group, size)


def test_a_crowd_in_one_group_displaces_only_its_own_frames() -> None:
    queue: FairQueue[Envelope] = FairQueue(frames=100)
    for n in range(80):
        put(queue, f"honest {n % 10}", n, f"home {n % 10}", size=10)
        for k in range(20):
            put(queue, f"sybil {n} {k}", k, "rack", size=10)
    waiting = queue.drain()
    assert sum(e.group == "rack" for e in waiting) == 20 and len(waiting) == 100
    assert len(queue) == 0


def test_the_author_with_most_frames_loses_frames() -> None:
    queue: FairQueue[Envelope] = FairQueue(frames=1000, bytes_=10_000)
    for n in range(50):
        put(queue, "quiet", n, size=100)
        for k in range(20):
            put(queue, "loud", 20 * n + k, size=100)
    waiting = queue.drain()
    assert [e.sequence for e in waiting if e.author == "quiet"] == list(range(50))
    assert [e.sequence for e in waiting if e.author == "loud"] == list(range(950, 1000))


def test_large_frames_of_many_authors_displace_no_small_frames() -> None:
    """Each hostile author has one large frame, each honest author three small ones; bytes are scarce."""
    queue: FairQueue[Envelope] = FairQueue(frames=1024, bytes_=1024 * 1024)
    for n in range(100):
        for k in range(3):
            put(queue, f"honest {n}", k, size=100)
        put(queue, f"hostile {n}", n, size=200_000)
    assert sum(e.author.startswith("honest") for e in queue.drain()) == 300
