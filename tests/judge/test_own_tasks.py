"""A judge of an operator's own tasks.

It is started with the nodes' task file, asks and scores these tasks, and rejects nodes of another curriculum.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from threading import Event

import msgspec
import pytest

from judge import config
from judge.config import JudgeSettings
from judge.errors import JudgeError
from judge.evaluation.service import JudgeService
from judge.store.database import Database
from judge.store.store import open_store
from swarmd.daemon.judging.reader import PublicEvaluation, examine
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks, tasks_of
from swarmd.types import TURN, Task, TaskRef
from tests import ROOT
from tests.doubles import TIMEOUT_S, Clock, identity
from tests.judge.conftest import Court, http_to, open_court
from tests.judge.test_app import refused

pytestmark = pytest.mark.anyio
EXAMPLE = ROOT / "docs" / "examples" / "sums.py"


@pytest.mark.net
async def test_a_judge_of_own_tasks_asks_and_scores_them(tmp_path: Path) -> None:
    digest = find_curriculum(str(EXAMPLE)).digest
    async with open_court(tmp_path / "judge.sqlite3", tmp_path, curriculum=str(EXAMPLE)) as court:
        peer = court.peer()
        asked = await court.ask(peer, curriculum=digest)
        assert asked.status_code == 201, asked.text
        (question,) = asked.json()["evaluations"]
        _, a, sign, b = question["question"].removesuffix(".").split()
        right = int(a) + int(sign + b)
        graded = await court.answer(peer, question["evaluation"], f"<answer>{right}</answer>")
        assert graded.json()["reward"] == 1.0, graded.text
        other = await court.ask(court.peer())
        refused(other, 409, "this judge asks sums")
        assert "own tasks need a judge" in other.json()["remedy"]


COUNTER = """
specialties = ["count"]
def reset(specialty, seed):
    return f"Count from {seed % 7}", [seed % 7]
def step(state, text):
    state[0] += 1
    done = len(text) > 9 or state[0] % 7 == 0
    return f"after {state[0] - 1}", 1.0 * (text == str(state[0])) * done, done
"""


@pytest.mark.net
async def test_a_judge_plays_an_environment_turn_by_turn(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(COUNTER)
    found = find_curriculum(str(tmp_path / "counter.py"))
    async with open_court(tmp_path / "judge.sqlite3", tmp_path, curriculum=found.source) as court:
        peer = court.peer()
        refused(await court.ask(peer, curriculum=found.digest, answers=2), 422, "has one answer")
        asked = await court.ask(peer, curriculum=found.digest)
        (question,) = asked.json()["evaluations"]
        id, start = question["evaluation"], int(question["question"].rpartition(" ")[2])
        said: list[str] = []
        for number in range(start + 1, 7):
            said.append(str(number))
            for _ in range(2):  # the reply to the first request was lost
                replied = await court.answer(peer, id, TURN.join(said))
                assert replied.status_code == 202, replied.text
                assert replied.json() == {"evaluation": id, "observation": f"after {number - 1}"}
            # A text cannot be taken back, and nothing may be sent twice.
            for wrong in (["x"] * len(said), [*said, "7", "8"], [*said[:-1], "x"]):
                refused(await court.answer(peer, id, TURN.join(wrong)), 409, "not the texts so far")
            refused(await court.answer(court.peer(), id, "1"), 403, "")
        text = TURN.join([*said, "7"])
        graded = await court.answer(peer, id, text)
        assert (graded.status_code, graded.json()["reward"]) == (200, 1.0), graded.text
        refused(await court.answer(peer, id, text), 409, "answered")
        kept = (await court.http.get(f"/v1/evaluations/{id}")).json()
        assert kept["answers"] == [{"text": text, "ended": True}]
        public = msgspec.convert(kept, PublicEvaluation, strict=False)
        with Verifier(found) as verifier:
            checks = examine(id, public, None, open_tasks(found, verifier), verifier.judge)
        assert [check.name for check in checks if check.holds is False] == []


async def test_a_judge_of_environments_takes_no_uploads(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(COUNTER)
    with pytest.raises(JudgeError, match="--verified-bytes: uploaded weights cannot answer counter"):
        async with open_court(
            tmp_path / "judge.sqlite3",
            tmp_path,
            curriculum=str(tmp_path / "counter.py"),
            verified_bytes=10**9,
        ):
            pass


class HangingTasks:
    """Tasks whose plug-in hangs until the test releases it."""

    curriculum = TINY_9

    def __init__(self, makes: bool = True) -> None:
        """makes: whether the plug-in returns a question once it is released."""
        self.hangs, self.let_go, self.makes, self.calls = Event(), Event(), makes, 0

    def task(self, ref: TaskRef) -> Task | None:
        self.calls += 1
        self.hangs.set()
        assert self.let_go.wait(TIMEOUT_S)
        return tasks_of("tiny-9").task(ref) if self.makes else None


@asynccontextmanager
async def judge_of(tasks: HangingTasks, folder: Path) -> AsyncIterator[Court]:
    database, clocks = folder / "judge.sqlite3", (Clock(1_000.0), Clock())
    settings, name = JudgeSettings(database, "tiny-9"), f"tiny-9 {TINY_9.digest}"
    with (
        closing(open_store(database, name)) as store,
        closing(Database(database, alone=False)) as reading,
        closing(Verifier("tiny-9")) as verifier,
    ):
        service = JudgeService(
            settings, tasks, identity(1), store, reading, verifier.judge, random.Random(3), *clocks
        )
        async with http_to(service) as http:
            yield Court(service, http, *clocks)
        await service.close()


async def test_a_hanging_plug_in_does_not_delay_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "QUESTIONS_BACKLOG", 2)
    async with judge_of(tasks := HangingTasks(), tmp_path) as court:
        peer = court.peer()
        asking = [asyncio.create_task(court.ask(peer))]
        await asyncio.to_thread(tasks.hangs.wait, TIMEOUT_S)
        assert not asking[0].done()
        assert (await court.http.get("/healthz")).status_code == 200
        asking.append(asyncio.create_task(court.ask(peer)))  # this request also waits
        async with asyncio.timeout(TIMEOUT_S):
            while court.service._questions.waiting < 2:
                await asyncio.sleep(0.001)
        refused(await court.ask(court.peer()), 503, "overloaded")
        tasks.let_go.set()
        first, second = [await one for one in asking]
        assert first.status_code == second.status_code == 201, second.text
        one, other = (answered.json()["evaluations"][0]["evaluation"] for answered in (first, second))
        assert one == other  # a peer that asks twice gets the same open question


async def test_a_judge_can_stop_while_a_plug_in_hangs(tmp_path: Path) -> None:
    async with judge_of(tasks := HangingTasks(makes=False), tmp_path) as court:
        asking = asyncio.create_task(court.ask(court.peer()))
        await asyncio.to_thread(tasks.hangs.wait, TIMEOUT_S)
        stopping = asyncio.create_task(court.service.close())
        await asyncio.sleep(0)
        tasks.let_go.set()
        await stopping
        assert (await asking).status_code == 500
        assert tasks.calls == 1  # otherwise sixteen tasks are tried
