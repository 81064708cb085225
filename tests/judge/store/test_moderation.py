"""Hidden names and banned keys, on SQLite and PostgreSQL, while the judge runs."""

import sqlite3
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from judge.app import create_app
from judge.cli import app
from judge.config import EXPIRE_S
from judge.errors import JudgeError
from judge.store import moderation
from judge.store import store as judge_store
from judge.store.store import open_store
from testbed.signing_peer import SigningPeer
from tests.doubles import TIMEOUT_S
from tests.judge.conftest import Court, open_court

pytestmark = pytest.mark.anyio


async def listed_by(court: Court, name: str, model: str = "") -> SigningPeer:
    """Add a peer with this name and ten answers, so that the board lists it."""
    peer = court.peer()
    said = {
        "name": name,
        "strategy": f"strategy of {name}",
        "version": f"version of {name}",
        "sharing": "swarm",
    }
    for number in range(10):
        court.monotonic.now += 1.0
        asked = await court.ask(peer, round=number, asker={"model": model or f"model of {name}", **said})
        graded = await court.answer(peer, asked.json()["evaluations"][0]["evaluation"], "x")
        assert graded.status_code == 200, graded.text
    return peer


async def everything(court: Court, peer: str, evaluation: str) -> AsyncIterator[tuple[str, str]]:
    """Return every public address that shows the peer, with its content."""
    paths = {
        route.path
        for route in create_app(court.service).routes
        if isinstance(route, APIRoute) and "GET" in route.methods
    }
    for path in sorted(paths):
        for name, value in {"{peer}": peer, "{id}": evaluation, "{name}": "style.css"}.items():
            path = path.replace(name, value)
        yield path, (await court.http.get(path)).text


async def assert_hidden(court: Court, rude: str, *, listed: bool) -> None:
    """Check that no page shows the peer's name, and that no search finds the peer by it."""
    court.monotonic.now += 11.0  # longer than a comparison is cached
    answered = (await court.http.get(f"/v1/peers/{rude}")).json()["evaluations"][0]["evaluation"]
    async for path, text in everything(court, rude, answered):
        assert "rude-words" not in text, path
        assert rude not in text or listed or rude in path or answered in path, path
    for path in ("/", "/v1/leaderboard"):
        for asked in ({"q": "RUDE-words"}, {"model": "model of rude-words"}):
            assert rude not in (await court.http.get(path, params=asked)).text, (path, asked)
        # The page repeats the search text.
        assert (rude in (await court.http.get(path, params={"q": rude})).text) == listed or path == "/"
    for path in ("/compare", "/v1/comparison"):
        assert "rude-words" not in (await court.http.get(path, params={"model": "model of rude-words"})).text
    assert (await court.http.get(f"/v1/evaluations/{answered}")).status_code == 403


async def board(court: Court) -> list[str]:
    court.forget_leaderboard()
    return [peer["peer"] for peer in (await court.http.get("/v1/leaderboard")).json()["peers"]]


async def noticed(court: Court) -> None:
    """Let the judge read the moderation decisions now, as it does each second."""
    assert EXPIRE_S <= 2.0
    await court.service.heed_moderation()


async def test_hiding_banning_and_undoing_take_effect_and_are_logged(database: str, tmp_path: Path) -> None:
    async with open_court(database, tmp_path) as court:
        rude, other = await listed_by(court, "rude-words"), await listed_by(court, "otter")
        assert set(await board(court)) == {rude.identity.peer_id, other.identity.peer_id}

        moderation.act(database, "hide", rude.identity.peer_id, "rude\nname", 1_800_000_000.0)
        await assert_hidden(court, rude.identity.peer_id, listed=True)
        models = [model["model"] for model in (await court.http.get("/v1/comparison")).json()["models"]]
        assert models == ["model of otter"]
        assert (await court.http.get(f"/v1/peers/{rude.identity.peer_id}")).json()["model"] == "hidden"
        assert "otter" in (await court.http.get(f"/v1/peers/{other.identity.peer_id}")).text
        court.monotonic.now += 10.0
        await noticed(court)
        assert (await court.ask(rude)).status_code == 201

        moderation.act(database, "ban", rude.identity.peer_id, "cheats", 1_800_000_060.0)
        await noticed(court)
        court.monotonic.now += 10.0
        refused = await court.ask(rude)
        assert refused.status_code == 403 and "banned your key" in refused.json()["error"]
        assert (await court.ask(other)).status_code == 201
        assert await board(court) == [other.identity.peer_id]
        await assert_hidden(court, rude.identity.peer_id, listed=False)
        assert (await court.http.get(f"/v1/peers/{rude.identity.peer_id}")).json()["answered"] == 10
        assert "fewer than" not in (await court.http.get(f"/nodes/{rude.identity.peer_id}")).text

        moderation.act(database, "undo", rude.identity.peer_id, "was a mistake", 1_800_000_120.0)
        await noticed(court)
        assert (await court.ask(rude)).status_code == 201
        assert set(await board(court)) == {rude.identity.peer_id, other.identity.peer_id}
        assert "rude-words" in (await court.http.get(f"/v1/peers/{rude.identity.peer_id}")).text
        court.monotonic.now += 11.0
        assert "model of rude-words" in (await court.http.get("/v1/comparison")).text

    for act, peer, why in (
        ("undo", rude.identity.peer_id, "neither hidden nor banned"),
        ("ban", "otter", "no peer id"),
    ):
        with pytest.raises(JudgeError, match=why):
            moderation.act(database, act, peer, "spam", 1_800_000_130.0)
    done = CliRunner().invoke(app, ["moderate", "log", "--database", database])
    lines = done.output.splitlines()
    assert [line.split()[3] for line in lines] == ["hide", "ban", "undo"], done.output
    assert lines[0] == f"2027-01-15 08:00:00 UTC  hide  {rude.identity.peer_id}  rude\\nname"


async def test_the_command_bans_an_unknown_key_and_requires_a_reason(tmp_path: Path) -> None:
    database = str(tmp_path / "judge.sqlite3")
    async with open_court(database, tmp_path) as court:
        stranger = court.peer()
        words = ["moderate", "ban", stranger.identity.peer_id, "--database", database]
        assert CliRunner().invoke(app, words).exit_code == 2
        banned = CliRunner().invoke(app, [*words, "--why", "spam"])
        assert banned.exit_code == 0 and stranger.identity.peer_id in banned.output
        await noticed(court)
        assert (await court.ask(stranger)).status_code == 403
    async with open_court(database, tmp_path) as court:  # also after a restart
        assert (await court.ask(court.peer())).status_code == 403


def test_a_key_can_be_banned_while_the_judge_writes_continuously(database: str) -> None:
    ended, failed = Event(), []
    with closing(open_store(database, "tiny-9 0123")) as store, ThreadPoolExecutor(1) as thread:

        def write() -> None:
            while not ended.is_set():
                failed.extend(
                    outcome
                    for outcome in store.together([(judge_store.probe, (0.0,))])
                    if outcome is not None
                )

        writing = thread.submit(write)
        try:
            for number in range(3):
                moderation.act(database, "ban", SigningPeer(number).identity.peer_id, "spam", 1_800_000_000.0)
        finally:
            ended.set()
        writing.result(TIMEOUT_S)
    assert failed == [] and len(moderation.history(database)) == 3


def test_moderation_on_a_full_disk_gives_a_message(tmp_path: Path) -> None:
    open_store(database := tmp_path / "judge.sqlite3", "tiny-9 0123").close()
    with closing(sqlite3.connect(database)) as db:
        db.execute(
            "CREATE TRIGGER full BEFORE INSERT ON moderation BEGIN SELECT RAISE(FAIL, 'database or disk is"
            " full'); END"
        )
    with pytest.raises(JudgeError, match="nothing was done: database or disk is full"):
        moderation.act(database, "ban", SigningPeer(1).identity.peer_id, "spam", 1_800_000_000.0)


async def test_a_model_named_hidden_is_not_hidden(tmp_path: Path) -> None:
    database = str(tmp_path / "judge.sqlite3")
    async with open_court(database, tmp_path) as court:
        sly = (await listed_by(court, "sly", "hidden")).identity.peer_id
        answered = (await court.http.get(f"/v1/peers/{sly}")).json()["evaluations"][0]["evaluation"]
        # The answers can still be checked.
        assert (await court.http.get(f"/v1/evaluations/{answered}")).status_code == 200
        moderation.act(database, "hide", sly, "rude version", 1_800_000_130.0)
        assert (await court.http.get(f"/v1/evaluations/{answered}")).status_code == 403
        assert "sly" not in (await court.http.get(f"/evaluations/{answered}")).text
