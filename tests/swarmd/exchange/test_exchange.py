"""The invariants of the exchange hold after random events: late, lost, repeated, reordered or hostile
ones."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.blobs.blobs import MISSING, content_id
from p2p.types import Envelope, PeerId, Reason
from swarmd.config.config import RoundConfig
from swarmd.exchange import offers, wire
from swarmd.exchange.events import (
    Admitted,
    Answered,
    Ask,
    Cancel,
    Connected,
    Deliver,
    Event,
    Hold,
    Report,
    RoundBegan,
    Send,
    Share,
    Tick,
    Useless,
    WakeAt,
)
from swarmd.exchange.exchange import MIN_GAP_S, Exchange
from swarmd.exchange.fetching import NEXT, QUESTIONS_AT_ONCE, HolderReply, State, Step
from swarmd.exchange.offers import MAX_OFFERED
from swarmd.exchange.pacing import FEW_AUTHORS, MAX_WAITING
from swarmd.experience.strategies import SharingSettings
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Rollout, TaskRef
from tests.doubles import encoded, identity

WANTED, MAX_AGE = 4, 2
ROUND = RoundConfig(external=WANTED, max_age=MAX_AGE)
PEERS = tuple(identity(n).peer_id for n in range(40))
AUTHORS = PEERS[:6]
ENDS = {State.DELIVERED, State.REFUSED, State.MISSING, State.DROPPED}


def rollout(author: PeerId, n: int) -> Rollout:
    return Rollout(TaskRef("bf", n), (Completion(f"{n} a", True), Completion("b", True)), author)


def packed(author: PeerId, n: int) -> tuple[bytes, bytes]:
    """Return an offer of one rollout, and its blob. n ≥ 12: other answers to the tasks of n − 12."""
    (body,), (blob,) = encoded([rollout(author, n % 12)], n, "m", TINY_9.specialties)
    return body, blob


OFFERS = {(author, n): packed(AUTHORS[author], n) for author in range(6) for n in range(24)}
BLOBS = {content_id(blob): blob for _, blob in OFFERS.values()}
OWNERS = {content_id(blob): AUTHORS[author] for (author, _), (_, blob) in OFFERS.items()}


def machine(seed: int = 0, whole: int = 0) -> Exchange:
    return Exchange(TINY_9, ROUND, SharingSettings(), "m", random.Random(seed), whole)


@dataclass
class Played:
    """Two exchanges that get the same events, and a driver that checks the invariants."""

    seed: int
    now: float = 0.0
    wake_at: float = math.inf
    round: int = 0
    open: dict[int, Ask] = field(default_factory=dict)
    delivered: Counter[tuple[PeerId, TaskRef]] = field(default_factory=Counter)  # in the last MAX_AGE rounds
    sent: list[Send] = field(default_factory=list)
    # The faults for which each peer may be blamed.
    faults: set[tuple[PeerId, Reason]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.exchange = machine(self.seed)
        self.twin: Exchange | None = machine(self.seed)
        self.sequence, self.asked = itertools.count(1), 0

    def put(self, event: Event) -> None:
        running = list(self.exchange.market.under_way.values())
        outputs = self.exchange.handle(event, self.now)
        if self.twin is not None:
            assert outputs == self.twin.handle(event, self.now), "the same events gave different outputs"
        assert isinstance(event, Tick) <= any(isinstance(output, WakeAt) for output in outputs)
        for output in outputs:
            match output:
                case Ask(number):
                    assert number > self.asked, "the number of an open question was used again"
                    self.open[number], self.asked = output, number
                case Cancel(number):
                    ask = self.open.pop(number)
                    self.faults.add((ask.peer, Reason.UNSERVED))
                case Deliver(rollout):
                    self.delivered[rollout.author, rollout.ref] += 1
                case Report(peer, reason):
                    assert (peer, reason) in self.faults, "a peer was blamed for another peer's fault"
                case WakeAt(time):
                    assert time > self.now
                    self.wake_at = time
                case Send():
                    self.sent.append(output)
        market = self.exchange.market
        assert max(self.delivered.values(), default=0) <= 1, (
            "a rollout of the same author and task was delivered twice"
        )
        assert market.holding <= WANTED and len(market.under_way) <= 3 * WANTED
        assert not any(fetch.state in ENDS for fetch in market.under_way.values())
        ended = {fetch.state for fetch in running} & ENDS
        assert State.DELIVERED not in ended or any(isinstance(output, Hold) for output in outputs)
        assert not any(f.state is State.MISSING and HolderReply.YES in f.replies.values() for f in running)
        assert self.open.keys() == market.fetcher.open.keys() and len(self.open) <= QUESTIONS_AT_ONCE
        assert len(market.board.offered) <= MAX_OFFERED
        assert all(len(waiting) <= MAX_WAITING for waiting in self.exchange.outgoing._rounds)

    def hear(self, author: PeerId, kind: str, body: bytes, via: PeerId | None = None) -> None:
        self.put(Admitted(Envelope(author, next(self.sequence), self.now, kind, body, via, "9.9")))

    def offer(self, by: int, of: int, ns: Sequence[int]) -> None:
        """Let the peer `by` offer rollouts of the author `of` as its own."""
        if by != of:
            self.faults.add((AUTHORS[by], Reason.NOT_ITS_OWN))
        (body,) = offers.join([OFFERS[of, n][0] for n in ns])
        self.hear(AUTHORS[by], offers.KIND, body, AUTHORS[0])

    def answer(self, which: int, how: str) -> None:
        number = sorted(self.open)[which % len(self.open)]
        ask = self.open.pop(number)
        if how != "yes":
            self.faults.add((ask.peer, Reason.UNSERVED))
        if how == "junk":
            self.faults.add((ask.peer, Reason.NOT_ASKED_FOR))
        replies = {"yes": BLOBS[ask.question[1:]], "no": MISSING, "empty": b"", "junk": b"junk", "gone": None}
        self.put(Answered(number, replies[how]))

    def begin(self, ahead: int) -> None:
        self.round = max(1, self.round + ahead)
        if ahead:
            self.delivered.clear()
        self.put(RoundBegan(self.round, {}))

    def pass_to(self, time: float) -> None:
        while self.wake_at <= time:
            self.now, self.wake_at = self.wake_at, math.inf
            self.put(Tick())
        self.now = time


Action = tuple[object, ...]
small = st.integers(0, 5)
ACTIONS = st.one_of(
    st.tuples(st.just("offer"), small, small, st.sets(st.integers(0, 23), min_size=1)),
    st.tuples(st.just("whole"), small, st.integers(0, 11)),
    st.tuples(st.just("junk"), small, st.binary(max_size=30), st.sampled_from([wire.KIND, offers.KIND])),
    st.tuples(st.just("answer"), st.integers(0, 30), st.sampled_from(["yes", "no", "empty", "junk", "gone"])),
    st.tuples(st.just("late"), st.integers(0, 200)),
    st.tuples(st.just("peers"), st.integers(0, 40)),
    st.tuples(st.just("round"), st.integers(0, 2)),
    st.tuples(st.just("share"), st.integers(20, 30)),
    st.tuples(st.just("useless"), small),
    st.tuples(st.just("pass"), st.floats(0, 6)),
    st.tuples(st.just("tick")),
    st.tuples(st.just("wake")),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(ACTIONS, min_size=20, max_size=60), st.integers(0, 3))
def test_the_invariants_hold_after_any_sequence_of_events(actions: list[Action], seed: int) -> None:
    played = Played(seed)
    play(played, actions)
    # Each question and each fetch ends by itself, even without an answer.
    over = played.now + 600
    while played.exchange.market.under_way:
        assert played.wake_at < over
        played.pass_to(played.wake_at)
    assert not played.open


def play(played: Played, actions: Sequence[Action]) -> None:
    for action in actions:
        match action:
            case "offer", int(by), int(of), set(ns):
                played.offer(by, of, sorted(ns))
            case "whole", int(by), int(n):
                played.hear(AUTHORS[by], wire.KIND, wire.encode([rollout(AUTHORS[by], n)], 1, "m"))
            case "junk", int(by), bytes(body), str(kind):
                played.faults |= {
                    (AUTHORS[by], reason)
                    for reason in (Reason.UNDECODABLE, Reason.WRONG_VERSION, Reason.UNKNOWN_TASK)
                }
                played.hear(AUTHORS[by], kind, body)
            case "answer", int(which), str(how) if played.open:
                played.answer(which, how)
            case "late", int(number) if number not in played.open:
                played.put(Answered(number, b"late"))
            case "peers", int(count):
                played.put(Connected(PEERS[:count]))
            case "round", int(ahead):
                played.begin(ahead)
            case "share", int(n):
                played.put(Share((rollout(PEERS[39], n),), 1))
            case "useless", int(who):
                played.faults.add((AUTHORS[who], Reason.USELESS))
                played.put(Useless((AUTHORS[who],)))
            case "pass", float(seconds):
                played.pass_to(played.now + seconds)
            case "tick", *_:
                played.put(Tick())
            case "wake", *_ if played.wake_at < math.inf:
                played.pass_to(played.wake_at)


def test_each_state_that_is_not_final_can_reach_each_final_state() -> None:
    assert {state for state, _ in NEXT} == set(State) - ENDS
    assert all(
        (state, step) in NEXT for state in (State.ON_TIME, State.LATE) for step in set(Step) - {Step.SLOW}
    )


def test_a_copy_is_recognised_at_once_if_the_rollout_is_known() -> None:
    """The copy is neither chosen nor requested, however its author became known."""
    played = Played(1)
    played.begin(1)
    played.put(Connected(PEERS))
    played.offer(0, 0, [1])
    played.answer(0, "yes")
    assert len(played.delivered) == 1
    for by in (1, 2):
        played.offer(by, 0, [1])
        assert not played.open
    mine = Rollout(TaskRef("bf", 3), (Completion("mine", True),), PEERS[39])
    played.put(Share((mine,), 1))
    played.faults.add((AUTHORS[3], Reason.NOT_ITS_OWN))
    played.hear(AUTHORS[3], offers.KIND, played.sent[-1].body)
    assert not played.open and played.exchange.market.board.offered == {}


def test_rollouts_wait_for_a_connected_peer_and_for_the_nodes_turn() -> None:
    played = Played(0)
    held: list[Hold] = []
    played.begin(1)
    for n in (1, 2):
        played.put(Share((rollout(PEERS[39], n),), 1))
    assert not played.sent and played.wake_at == math.inf
    played.put(Connected(PEERS[:1]))
    assert len(played.sent) == 1 and played.exchange.shared == 2, "the rollouts were not sent in one offer"
    played.put(Share((rollout(PEERS[39], 3),), 1))
    assert len(played.sent) == 1 and played.wake_at == MIN_GAP_S
    played.pass_to(MIN_GAP_S)
    assert len(played.sent) == 2 and not held


def test_on_a_busy_topic_the_exchange_wakes_only_at_its_turn() -> None:
    """The exchange does not check waiting offers every second."""
    exchange, ticks, wake_at = machine(), 0, math.inf
    exchange.handle(RoundBegan(1), 0.0)
    exchange.handle(Connected(PEERS), 0.0)
    exchange.pacing.target = 0.2
    for n in range(3 * FEW_AUTHORS):
        who = identity(100 + n).peer_id
        exchange.handle(
            Admitted(Envelope(who, 1, 0.0, wire.KIND, wire.encode([rollout(who, n)], 1, "m"))), 0.0
        )
    sent = 0
    event: Event = Share((rollout(PEERS[39], 1),), 1)
    now = 0.0
    while not sent and now < 7200:
        for output in exchange.handle(event, now):
            sent += isinstance(output, Send)
            if isinstance(output, WakeAt):
                wake_at = output.time
        event, now, ticks = Tick(), wake_at, ticks + 1
    assert sent == 1 and ticks <= now / 30 + 2
