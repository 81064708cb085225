"""The open questions: one a peer, answered once, by that peer, in time. No clock is read and no socket opened."""

import random

import pytest

from judge.limits import SlowReaders, network_of
from judge.refusals import ALREADY_ANSWERED, BUSY, CROWDED, DISPLACED, NO_SUCH_QUESTION, OTHER_PEER, TOO_LATE
from judge.sessions import Asker, AskResult, OpenQuestion, Room, Sessions
from p2p.types import PeerId
from swarmd.types import Task, TaskRef

ALICE, BOB = PeerId("alice"), PeerId("bob")
NEWCOMER, KNOWN = Asker("192.0.2.0/24", record=False), Asker("192.0.2.0/24", record=True)


def sessions(deadline: float = 60.0, limit: int = 100) -> Sessions:
    return Sessions(lambda rng: Task(TaskRef("bf", rng.randrange(2**31)), "?", {}), random.Random(7), deadline, Room(limit, 64, 80))


def ask(open_questions: Sessions, peer: PeerId, now: float, asker: Asker = NEWCOMER) -> OpenQuestion:
    outcome = open_questions.ask(peer, asker, now)
    assert isinstance(outcome, AskResult)
    return outcome.question


def test_answered_once() -> None:
    judge = sessions()
    question = ask(judge, ALICE, 0.0)
    assert judge.take(question.id, ALICE, 60.0) == question
    assert judge.take(question.id, ALICE, 60.0) is ALREADY_ANSWERED
    assert len(judge) == 0


def test_only_by_the_peer_that_asked() -> None:
    judge = sessions()
    question = ask(judge, ALICE, 0.0)
    assert judge.take(question.id, BOB, 1.0) is OTHER_PEER
    assert judge.take(question.id, ALICE, 1.0) == question  # bob took nothing from alice
    assert judge.take(question.id, BOB, 1.0) is OTHER_PEER  # and learns nothing of what became of it


def test_late_is_late_before_and_after_it_was_noticed() -> None:
    judge = sessions(deadline=60.0)
    question = ask(judge, ALICE, 100.0)
    assert judge.take(question.id, ALICE, 160.001) is TOO_LATE
    assert judge.expire(160.0) == []
    assert judge.expire(160.001) == [question]
    assert judge.expire(200.0) == []
    assert judge.take(question.id, ALICE, 100.0) is TOO_LATE


def test_asking_again_returns_the_same_question() -> None:
    judge = sessions()
    first = ask(judge, ALICE, 0.0)
    assert judge.ask(ALICE, NEWCOMER, 30.0) == AskResult(first, False)
    assert judge.take(first.id, ALICE, 31.0) == first
    second = ask(judge, ALICE, 32.0)
    assert (second.id, second.task) != (first.id, first.task)


def test_bounded() -> None:
    judge = sessions(limit=2)
    ask(judge, ALICE, 0.0)
    ask(judge, BOB, 0.0)
    assert judge.ask(PeerId("carol"), NEWCOMER, 0.0) is BUSY
    judge.expire(61.0)
    ask(judge, PeerId("carol"), 61.0)


def test_a_network_has_so_much_room_and_another_its_own() -> None:
    judge = sessions(limit=1_000)
    newcomers = [judge.ask(PeerId(f"new {i}"), NEWCOMER, 0.0) for i in range(70)]
    assert newcomers[64:] == [CROWDED] * 6
    known = [judge.ask(PeerId(f"known {i}"), KNOWN, 0.0) for i in range(81)]
    assert all(isinstance(asked, AskResult) and asked.displaced is None for asked in known[:80])
    assert known[80] is CROWDED
    ask(judge, ALICE, 0.0, Asker("198.51.100.0/24", record=False))
    first = newcomers[0]
    assert isinstance(first, AskResult)
    assert judge.take(first.question.id, first.question.peer, 1.0) == first.question
    ask(judge, BOB, 1.0)  # its room is free again


def test_with_a_record_there_is_room_when_all_is_full() -> None:
    """The newest question of those without a record makes room; theirs only, and until there is none."""
    judge = sessions(limit=3)
    old, young = ask(judge, PeerId("old"), 0.0), ask(judge, PeerId("young"), 1.0)
    ask(judge, PeerId("known"), 2.0, KNOWN)
    assert judge.ask(PeerId("newcomer"), NEWCOMER, 3.0) is BUSY
    for peer, gone in ((ALICE, young), (BOB, old)):
        asked = judge.ask(peer, KNOWN, 3.0)
        assert isinstance(asked, AskResult)
        assert asked.displaced == gone
        assert judge.take(gone.id, gone.peer, 4.0) is DISPLACED
        assert len(judge) == 3
    assert judge.ask(PeerId("carol"), KNOWN, 5.0) is BUSY
    assert [question.peer for question in judge.expire(100.0)] == [PeerId("known"), ALICE, BOB]  # what was displaced did not lapse


def test_withdrawn_is_gone() -> None:
    judge = sessions()
    question = ask(judge, ALICE, 0.0)
    judge.withdraw(question)
    assert judge.take(question.id, ALICE, 0.0) is NO_SUCH_QUESTION


def test_same_seed_same_questions() -> None:
    one, two = sessions(), sessions()
    assert [ask(one, PeerId(str(i)), 0.0) for i in range(5)] == [ask(two, PeerId(str(i)), 0.0) for i in range(5)]


def test_random_histories_never_grade_twice() -> None:
    """A checker over histories: whatever the order, a question is taken at most once, by its peer, in time."""
    for seed in range(60):
        rng = random.Random(seed)
        judge, now = sessions(deadline=5.0, limit=3), 0.0
        asked: dict[str, tuple[PeerId, float]] = {}
        taken: set[str] = set()
        expired: set[str] = set()
        for _ in range(200):
            now += rng.random()
            peer = PeerId(str(rng.randrange(4)))
            if rng.random() < 0.5:
                expired |= {question.id for question in judge.expire(now)}
                outcome = judge.ask(peer, NEWCOMER, now)
                if isinstance(outcome, AskResult):
                    asked.setdefault(outcome.question.id, (peer, now))
                    assert asked[outcome.question.id][0] == peer
            elif asked:
                id = rng.choice(list(asked)[-5:])
                question = judge.take(id, peer, now)
                if isinstance(question, OpenQuestion):
                    assert id not in taken | expired
                    assert asked[id][0] == peer
                    assert now <= asked[id][1] + 5.0
                    taken.add(id)
        assert taken
        assert not taken & expired


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_network_of(host: str, network: str) -> None:
    assert network_of(host) == network


def test_slow_readers_are_few_and_the_longest_waiting_goes_first() -> None:
    readers = SlowReaders[int](of_a_network=2, of_all=3)
    assert [readers.begin(n, "a") for n in (1, 2, 2, 3)] == [None, None, None, 1]
    assert readers.begin(4, "b") is None
    assert readers.begin(5, "c") == 2  # of all
    readers.end(3)
    readers.end(99)
    assert readers.begin(6, "a") is None
    assert len(readers) == 3
