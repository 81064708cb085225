"""A real judge (database, verifier, HTTP app) behind an in-process transport, with a test clock."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from judge import config
from judge.app import create_app
from judge.config import JudgeSettings
from judge.evaluation.service import JudgeService, open_service
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import tasks_of
from testbed.signing_peer import ORIGIN, THEN, SigningPeer, answering, wish
from tests.doubles import TIMEOUT_S, Clock
from tests.judge.databases import KINDS, cluster
from tests.judge.replies import Reply


async def eventually(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Wait for a task of the judge to reach a condition (asyncio).

    Returns the condition's value; raises TimeoutError.
    """
    async with asyncio.timeout(TIMEOUT_S):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
    return found


# Fields whose keys are data: names of specialties, peers, models.
MAPS = frozenset({"said", "specialties", "pass_at", "new_texts", "tiers", "models"})


def check_form(found: Any, reply: Reply) -> None:
    """Check that a document has exactly the fields of its documented example, with the same types."""

    def alike(found: Any, example: Any, name: str) -> None:
        if isinstance(example, dict) and name in MAPS:
            for value in found.values() if name != "said" else ():
                alike(value, next(iter(example.values())), "")
        elif isinstance(example, dict):
            assert example.keys() - set(reply.sometimes) <= found.keys() <= example.keys(), name
            for field, value in found.items():
                if value is not None:
                    alike(value, example[field], field)
        elif isinstance(example, list):
            for value in found:
                if value is not None:
                    alike(value, example[0], "")
        else:
            number = isinstance(example, int | float) and not isinstance(example, bool)
            assert isinstance(found, int | float if number else type(example)), name

    alike(found, reply.example, "")


@dataclass
class Court:
    """A judge, with helpers for the tests."""

    service: JudgeService
    http: httpx2.AsyncClient
    monotonic: Clock
    wall: Clock
    peers: int = 0

    def peer(self) -> SigningPeer:
        self.peers += 1
        peer = SigningPeer(self.peers)
        peer.sequence = int(self.wall.now * 1e9)
        return peer

    async def post(self, peer: SigningPeer, target: str, document: Any) -> httpx2.Response:
        return await self.http.post(target, **peer.signed(target, document))

    async def ask(self, peer: SigningPeer, **changed: Any) -> httpx2.Response:
        return await self.post(peer, "/v1/evaluations", wish() | changed)

    async def answer(self, peer: SigningPeer, evaluation: str, *texts: str) -> httpx2.Response:
        return await self.post(peer, f"/v1/evaluations/{evaluation}/answers", answering(*texts))

    async def right_answer(self, peer: SigningPeer, evaluation: str) -> str:
        """Return the right answer to an open question, whose task only the judge's store knows."""
        ((specialty, n),) = self.rows(f"SELECT specialty, n FROM evaluations WHERE id = '{evaluation}'")
        tasks = tasks_of("tiny-9")
        task = next(q.task for q in self.service._sessions._open.values() if q.id == evaluation)
        assert (task.ref.specialty, task.ref.n) == (specialty, n)
        return f"<answer>{solution(tasks, task)}</answer>"

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows that a statement selects in the judge's database."""
        with self.service._writer._store.begin() as db:
            found = db.exec_driver_sql(statement)
            return [tuple(row) for row in found] if found.returns_rows else []

    def forget_leaderboard(self) -> None:
        self.monotonic.now += 3.0  # longer than a leaderboard is cached


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def patient_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow uploads to pause for as long as a busy machine may need.

    A test of slow uploads sets a shorter time.
    """
    monkeypatch.setattr(config, "VERIFIED_STALL_S", TIMEOUT_S)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a court an SQLite database unless the test is marked otherwise."""
    said = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if "court_database" in metafunc.fixturenames and "court_database" not in said:
        metafunc.parametrize("court_database", ["sqlite"], indirect=True)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    with cluster() as make:
        yield make


@pytest.fixture(scope="module")
def court_database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database(request, tmp_path_factory.mktemp("judge"))


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a new database of each kind."""
    return new_database(request, tmp_path)


def new_database(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "sqlite":
        return str(folder / "state" / "judge.sqlite3")
    return str(request.getfixturevalue("postgresql")())


def http_to(service: JudgeService) -> httpx2.AsyncClient:
    """Return a client of the judge's app, without a socket."""
    transport = httpx2.ASGITransport(app=create_app(service), raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url=ORIGIN)


@asynccontextmanager
async def open_court(
    database: str | Path, folder: Path, seed: int = 11, wall: float = THEN, **settings: Any
) -> AsyncIterator[Court]:
    """Open a judge. folder: for the judge's key. settings: override the usual settings of a court.

    Closing writes nothing, so the database is left as after kill -9.
    """
    clocks = Clock(1_000.0), Clock(wall)
    usual: dict[str, Any] = {"curriculum": "tiny-9", "deadline": 60.0, "key": folder / "judge.key"}
    of_this = JudgeSettings(database, **usual | settings)
    async with open_service(of_this, random.Random(seed), *clocks) as service, http_to(service) as http:
        yield Court(service, http, *clocks)


@pytest.fixture(scope="module")
async def court(
    court_database: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Court]:
    async with open_court(court_database, tmp_path_factory.mktemp("key")) as court:
        yield court
