"""Two judges, each a process of its own, on one PostgreSQL: a request serves once, wherever it arrives."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from judge.config import JudgeSettings
from judge.errors import DatabaseInUse, DatabaseUnusable
from judge.server import serve
from judge.store.database import Database
from judge.store.reader import Reader
from judge.store.store import Store
from swarmd.tasks.curriculum import TINY_9
from swarmd.testing import TIMEOUT_S
from tests.judge.peers import SigningPeer
from tests.judge.store.test_store import ALICE, question
from tests.judge.test_serving import serving

pytestmark = pytest.mark.net

Answered = tuple[int, dict[str, Any]]
ASK = {"round": 1, "curriculum": TINY_9.digest, "asker": {"model": "tiny", "sharing": "swarm"}}
ANSWER = {"answers": [{"text": "x", "ended": True}]}


class TwoJudges:
    def __init__(self, address: str, urls: list[str]) -> None:
        self.address, self.urls = address, urls
        self.peers = 0
        self._threads = ThreadPoolExecutor(8)

    def peer(self) -> SigningPeer:
        self.peers += 1
        return SigningPeer(self.peers)

    def signed(self, peer: SigningPeer, target: str, document: Any) -> Callable[[int], Answered]:
        """One request, to be sent to either judge, as often as one likes."""
        request = peer.signed(target, document)

        def send(judge: int) -> Answered:
            answer = httpx2.post(self.urls[judge] + target, **request, timeout=TIMEOUT_S, trust_env=False)
            return answer.status_code, answer.json()

        return send

    def ask(self, peer: SigningPeer) -> Callable[[int], Answered]:
        return self.signed(peer, "/v1/evaluations", ASK)

    def answer(self, peer: SigningPeer, evaluation: str) -> Callable[[int], Answered]:
        return self.signed(peer, f"/v1/evaluations/{evaluation}/answers", ANSWER)

    def together(self, *requests: tuple[Callable[[int], Answered], int]) -> list[Answered]:
        return [
            sent.result() for sent in [self._threads.submit(request, judge) for request, judge in requests]
        ]


@pytest.fixture(scope="module")
def judges(postgresql: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoJudges]:
    address, folder = postgresql(), tmp_path_factory.mktemp("shared")
    with ExitStack() as stack:
        options = ("--database", address, "--shared", "--key", str(folder / "judge.key"))
        # The second migrates nothing, and voids nothing
        started = [stack.enter_context(serving(folder, *options)) for _ in range(2)]
        yield TwoJudges(address, [str(ready["url"]) for _, ready in started])


def test_a_request_serves_once_at_both_together(judges: TwoJudges) -> None:
    peer = judges.peer()
    asked = judges.ask(peer)
    code, questions = asked(0)
    assert code == 201
    assert [asked(1)[0], asked(0)[0], asked(1)[0]] == [409, 409, 409]
    answered = judges.answer(peer, questions["evaluations"][0]["evaluation"])
    assert answered(0)[0] == 200
    code, refused = answered(1)
    assert code == 409 and refused["sequence"] > 0
    assert judges.ask(peer)(1)[0] == 201  # a new request is welcome at the other


def test_copies_of_a_first_request_that_arrive_together(judges: TwoJudges) -> None:
    """Nothing is known of these peers yet."""
    for _ in range(8):
        asked = judges.ask(judges.peer())
        codes = sorted(code for code, _ in judges.together((asked, 0), (asked, 1), (asked, 0), (asked, 1)))
        assert codes == [201, 409, 409, 409]


def test_copies_of_a_later_request_that_arrive_together(judges: TwoJudges) -> None:
    peer = judges.peer()
    assert judges.ask(peer)(0)[0] == 201
    for _ in range(8):
        asked = judges.ask(peer)
        codes = [code for code, _ in judges.together((asked, 0), (asked, 1))]
        assert codes.count(409) == 1, codes


def test_question_and_answer_at_different_judges(judges: TwoJudges) -> None:
    """The proxy sends a peer always to the same one.

    Where it does not, nothing is counted that should not be.
    """
    peer = judges.peer()
    _, questions = judges.ask(peer)(0)
    evaluation = questions["evaluations"][0]["evaluation"]
    assert judges.answer(peer, evaluation)(1)[0] == 404
    assert judges.answer(peer, evaluation)(0)[1]["answered"] == 1
    assert judges.answer(peer, evaluation)(0)[0] == 409


def test_numbers_of_a_peer_that_is_answered_at_both(judges: TwoJudges) -> None:
    """One question open at each, answered at the same time.

    Each is counted once, with a number of its own.
    """
    peer = judges.peer()
    numbers = []
    for _ in range(4):
        open_ = [judges.ask(peer)(judge)[1]["evaluations"][0]["evaluation"] for judge in (0, 1)]
        # The sequence numbers grow in the order of signing; what arrives late of the two is refused, and sent
        # again.
        for judge, (code, graded) in enumerate(
            judges.together(*((judges.answer(peer, open_[judge]), judge) for judge in (0, 1)))
        ):
            if code == 409:
                code, graded = judges.answer(peer, open_[judge])(judge)
            assert code == 200, graded
            numbers.append(json.loads(graded["receipt"])["number"])
    assert sorted(numbers) == list(range(1, 9))
    with closing(Reader(Database(judges.address, alone=False))) as reader:
        standing = reader.standing(peer.identity.peer_id)
        assert standing is not None and standing.record.answered == 8


def test_only_postgresql_may_be_shared(judges: TwoJudges, tmp_path: Path) -> None:
    with pytest.raises(DatabaseInUse, match="start all with --shared"):
        Store(judges.address, f"tiny-9 {TINY_9.digest}")
    with pytest.raises(DatabaseUnusable, match="SQLite"):
        Store(tmp_path / "j", f"tiny-9 {TINY_9.digest}", shared=True)


def test_judges_of_one_database_share_key_deadline_and_window(
    judges: TwoJudges, postgresql: Callable[[], str], tmp_path: Path
) -> None:
    other = JudgeSettings(judges.address, "tiny-9", port=0, shared=True, key=tmp_path / "other.key")
    with pytest.raises(DatabaseUnusable, match=r"is of judges with --key of 12D3.*start it as the others"):
        serve(other, lambda url: pytest.fail(url))
    with closing(Store(address := postgresql(), "tiny-9 0123", shared=True)) as store:
        store.agree("--deadline 60", shared=True)
        store.agree("--deadline 60", shared=True)
        with pytest.raises(DatabaseUnusable, match="--deadline 60, and this one has --deadline 90"):
            store.agree("--deadline 90", shared=True)
    with closing(Store(address, "tiny-9 0123")) as alone:
        alone.agree("--deadline 90", shared=False)
    with closing(Store(address, "tiny-9 0123", shared=True)) as store:
        store.agree("--deadline 90", shared=True)


def test_questions_of_a_dead_judge_do_not_count(judges: TwoJudges) -> None:
    peer = judges.peer()
    _, questions = judges.ask(peer)(0)
    now = time.time()
    with closing(Store(judges.address, f"tiny-9 {TINY_9.digest}", shared=True)) as store:
        state = f"SELECT state FROM evaluations WHERE id = '{questions['evaluations'][0]['evaluation']}'"
        for before, expected in ((now - 3_600, "open"), (now + 3_600, "void")):
            store.abandoned(before)
            with store.database.begin() as db:
                assert db.exec_driver_sql(state).scalar() == expected
        # That judge lives, and has the answer: it counts, unless the question may have been found by its
        # seed meanwhile.
        with store.database.begin() as db:
            db.exec_driver_sql("UPDATE windows SET revealed = 1.0")
        assert judges.answer(peer, questions["evaluations"][0]["evaluation"])(0)[0] == 500
        _, questions = judges.ask(peer)(0)
        with store.database.begin() as db:
            db.exec_driver_sql("UPDATE windows SET revealed = NULL")
        store.abandoned(now + 3_600)
        assert judges.answer(peer, questions["evaluations"][0]["evaluation"])(0)[0] == 200


def test_a_judge_that_is_paused_in_a_transaction_holds_up_nobody(postgresql: Callable[[], str]) -> None:
    """The server ends its session. When it goes on, what it was writing is written again, once."""
    address, told = postgresql(), []
    with (
        closing(Store(address, "tiny-9 0123", shared=True)) as paused,
        closing(Store(address, "tiny-9 0123", shared=True)) as other,
    ):
        with paused.database.begin() as db:
            assert db.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == "10s"
            # Of this session; the next one has 10 s again
            db.exec_driver_sql("SET idle_in_transaction_session_timeout = '500ms'")

        def is_paused() -> None:
            if not told:
                told.append(other.sequence(ALICE))  # waits for its turn

        asked = (paused.asked, (question(7), 7, 1_000.0))
        assert paused.together([asked, (is_paused, ()), (paused.probe, (1_000.0,))]) == [None] * 3
        assert told == [-1]  # it saw nothing of what was undone
        assert other.sequence(ALICE) == 7
        with other.database.begin() as db:
            assert db.exec_driver_sql("SELECT count(*) FROM evaluations").scalar() == 1
