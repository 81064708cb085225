"""Open questions: each is answered once, by its peer, before the deadline.

No clock is read and no socket is opened.
"""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.errors import (
    ALREADY_ANSWERED,
    BUSY,
    CROWDED,
    DISPLACED,
    NO_SUCH_QUESTION,
    OTHER_PEER,
    TOO_LATE,
    Refusal,
)
from judge.evaluation.questions import Drawn
from judge.evaluation.sessions import Sessions
from judge.types import OpenQuestion, QuestionWindow, Requester, network_of
from p2p.types import PeerId
from swarmd.tasks.held_out import Terms
from swarmd.types import Task, TaskRef

ALICE, BOB = PeerId("alice"), PeerId("bob")
NEWCOMER, KNOWN = Requester("192.0.2.0/24", record=False), Requester("192.0.2.0/24", record=True)


WINDOW = QuestionWindow(Terms("0123", 1, 0, 60, 1_000), bytes(32), 0.0)


def drawing(rng: random.Random) -> Callable[[PeerId], Drawn]:
    return lambda _peer: Drawn(Task(TaskRef("bf", rng.randrange(2**31)), "?", {}), WINDOW, 0)


def sessions(deadline: float = 60.0, limit: int = 100) -> Sessions:
    return Sessions(drawing(random.Random(6)), random.Random(7), deadline, limit, 64, 80)


def ask(open_questions: Sessions, peer: PeerId, now: float, asker: Requester = NEWCOMER) -> OpenQuestion:
    outcome = open_questions.ask(peer, asker, now)
    assert isinstance(outcome, tuple)
    return outcome[0]


STEP = st.tuples(
    st.sampled_from(["ask", "ask", "take", "expire"]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.5, 6.0]),
)


@given(st.lists(STEP, max_size=80))
def test_the_rules_of_open_questions_hold_for_any_history(steps: list[tuple[str, int, int, float]]) -> None:
    """Six peers act in any order.

    A question is answered once, by its peer, in time; asking again gives the same question.
    """
    judge, now = sessions(deadline=5.0, limit=3), 0.0
    asked: list[OpenQuestion] = []
    fate: dict[str, Refusal] = {}  # why each closed question is closed
    for what, who, which, seconds in steps:
        now, peer = now + seconds, PeerId(str(who))
        if what == "take" and asked:
            question = asked[-1 - which % len(asked)]
            why = fate.get(question.id) or (TOO_LATE if now > question.deadline else ALREADY_ANSWERED)
            in_time = question.id not in fate and now <= question.deadline
            outcome = judge.close(question.id, peer, now)
            assert (
                outcome is OTHER_PEER if peer != question.peer else outcome == (question if in_time else why)
            )
            if isinstance(outcome, OpenQuestion):
                fate[question.id] = ALREADY_ANSWERED
            continue
        late = [question for question in asked if question.id not in fate and now > question.deadline]
        assert judge.expire(now) == late
        fate |= {question.id: TOO_LATE for question in late}
        if what == "ask":
            left = [question for question in asked if question.id not in fate]
            mine = next((question for question in left if question.peer == peer), None)
            drawn = judge.ask(peer, NEWCOMER, now)
            if mine is not None:
                assert drawn == (mine, None)
            elif len(left) == 3:
                assert drawn is BUSY
            else:
                assert isinstance(drawn, tuple)
                assert drawn[0].id not in {question.id for question in asked}
                asked.append(drawn[0])
    assert len(judge) == sum(question.id not in fate for question in asked)


def test_each_network_has_its_own_limit_of_open_questions() -> None:
    judge = sessions(limit=1_000)
    newcomers = [judge.ask(PeerId(f"new {i}"), NEWCOMER, 0.0) for i in range(70)]
    assert newcomers[64:] == [CROWDED] * 6
    known = [judge.ask(PeerId(f"known {i}"), KNOWN, 0.0) for i in range(81)]
    assert all(isinstance(asked, tuple) and asked[1] is None for asked in known[:80])
    assert known[80] is CROWDED
    ask(judge, ALICE, 0.0, Requester("198.51.100.0/24", record=False))
    other = Requester("203.0.113.0/24", record=False)
    of_one_peer = [judge.ask(PeerId("many"), other, 0.0, most=65) for _ in range(65)]
    assert of_one_peer[63] is not CROWDED and of_one_peer[64] is CROWDED
    first = newcomers[0]
    assert isinstance(first, tuple)
    assert judge.close(first[0].id, first[0].peer, 1.0) == first[0]
    ask(judge, BOB, 1.0)  # ALICE's network has room for one question again, no other network does
    assert judge.ask(PeerId("carol"), NEWCOMER, 1.0) is CROWDED


def test_a_peer_with_a_record_displaces_a_newcomers_question() -> None:
    """The newest question of a peer without a record is displaced, as long as there is one."""
    judge = sessions(limit=3)
    old, young = ask(judge, PeerId("old"), 0.0), ask(judge, PeerId("young"), 1.0)
    ask(judge, PeerId("known"), 2.0, KNOWN)
    assert judge.ask(PeerId("newcomer"), NEWCOMER, 3.0) is BUSY
    for peer, gone in ((ALICE, young), (BOB, old)):
        asked = judge.ask(peer, KNOWN, 3.0)
        assert isinstance(asked, tuple) and asked[1] == gone
        assert judge.close(gone.id, gone.peer, 4.0) is DISPLACED and len(judge) == 3
    assert judge.ask(PeerId("carol"), KNOWN, 5.0) is BUSY
    # Displaced questions do not lapse.
    assert [question.peer for question in judge.expire(100.0)] == [PeerId("known"), ALICE, BOB]


def test_an_answer_needs_the_right_number_of_texts_before_its_deadline() -> None:
    judge = sessions(deadline=5.0)
    first, second, third = (judge.ask(ALICE, NEWCOMER, float(i), answers=2, most=3) for i in range(3))
    assert isinstance(first, tuple) and isinstance(second, tuple) and isinstance(third, tuple)
    short = judge.close(first[0].id, ALICE, 5.0, answers=1)
    assert isinstance(short, Refusal) and "needs 2 answers, not 1" in short.error
    assert judge.close(first[0].id, ALICE, 5.0, answers=2) == first[0]
    assert judge.of(ALICE) == [second[0], third[0]]
    # The question is late, although `expire` was not called yet.
    assert judge.close(second[0].id, ALICE, 6.5, answers=2) is TOO_LATE
    assert judge.expire(6.5) == [second[0]] and judge.of(ALICE) == [third[0]]


def test_a_withdrawn_question_is_forgotten() -> None:
    judge = sessions()
    question = ask(judge, ALICE, 0.0)
    judge.withdraw(question)
    judge.withdraw(question)  # as for a question that was displaced in the meantime
    assert judge.close(question.id, ALICE, 0.0) is NO_SUCH_QUESTION
    assert judge.close("never asked", ALICE, 0.0) is NO_SUCH_QUESTION


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
def test_an_address_belongs_to_its_network(host: str, network: str) -> None:
    assert network_of(host) == network
