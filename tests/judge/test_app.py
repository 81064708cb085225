"""The judge's protocol, with the real verifier.

The tests cover an evaluation from question to leaderboard, and all requests that are rejected.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from fastapi.routing import APIRoute

from judge import config, errors
from judge.app import create_app
from judge.errors import Refusal
from judge.figures.leaderboard import LISTED_ANSWERS
from swarmd.tasks.curriculum import CURRICULA, HELD_OUT, HELD_OUT_END, SAPO_9, TINY_9
from swarmd.tasks.sandbox.client import Verifier, VerifierFailed
from testbed.signing_peer import SigningPeer, answering, encode, wish
from tests.judge.conftest import Court, eventually, http_to, open_court
from tests.judge.databases import KINDS, on_each_database

pytestmark = pytest.mark.anyio


def refused(response: httpx2.Response, status: int, *words: str) -> None:
    """Check that the response is a rejection with this status, these words in its error, and a remedy."""
    document = response.json()
    assert response.status_code == status and document["error"] and document["remedy"], document
    assert [word for word in words if word not in document["error"]] == [], document


async def asked(court: Court, peer: SigningPeer) -> str:
    response = await court.ask(peer)
    assert response.status_code == 201, response.text
    return str(response.json()["evaluations"][0]["evaluation"])


async def questioned(court: Court) -> tuple[SigningPeer, str, str]:
    """Let a new peer ask; return the peer, its question, and the right answer."""
    peer = court.peer()
    evaluation = await asked(court, peer)
    return peer, evaluation, await court.right_answer(peer, evaluation)


async def standing(court: Court, peer: SigningPeer) -> dict[str, Any]:
    response = await court.http.get(f"/v1/peers/{peer.identity.peer_id}")
    return dict(response.json()) if response.status_code == 200 else {}


@on_each_database
async def test_an_evaluation_is_asked_answered_and_graded(court: Court) -> None:
    peer = court.peer()
    for number in range(1, 9):
        response = await court.ask(peer, round=number)
        assert response.status_code == 201
        (question,) = response.json()["evaluations"]
        # The question reveals neither the task's number nor its answer.
        assert set(question) == {"evaluation", "question", "seconds", "answers", "window", "commitment"}
        assert question["seconds"] == 60.0
        right = number % 2 == 0
        text = await court.right_answer(peer, question["evaluation"]) if right else "I do not know"
        court.monotonic.now += 2.0
        graded = (await court.answer(peer, question["evaluation"], text)).json()
        expected = {"reward": 1.0, "reason": "correct"} if right else {"reward": 0.0, "reason": "no answer"}
        expected |= {"answered": number, "total": number // 2, "score": number // 2 / number, "n": number}
        assert graded | expected == graded
    row = await standing(court, peer)
    assert row | {"n": 8, "right": 4, "score": 0.5, "reward": 4.0, "unanswered": 0} == row
    assert 0.2 < row["low"] < 0.5 < row["high"] < 0.8
    assert sum(tally["n"] for tally in row["specialties"].values()) == 8 and row["curve"][-1] == [8, 4.0]
    entries = row["evaluations"]
    assert [(entry["number"], entry["seconds"]) for entry in entries] == [(n, 2.0) for n in range(8, 0, -1)]
    assert all(HELD_OUT <= entry["n"] < HELD_OUT_END for entry in entries)  # no node trains on these numbers


@on_each_database
async def test_a_question_can_be_answered_only_once_and_only_by_its_peer(court: Court) -> None:
    (peer, evaluation, right), other = await questioned(court), court.peer()
    refused(await court.answer(other, evaluation, right), 403, "another peer")
    assert await standing(court, other) == {}
    assert (await court.answer(peer, evaluation, "<answer>wrong</answer>")).json()["reward"] == 0.0
    refused(await court.answer(peer, evaluation, right), 409, "has been answered")
    assert (await standing(court, peer))["n"] == 1


@on_each_database
async def test_an_answer_after_the_deadline_is_refused(court: Court) -> None:
    peer, evaluation, right = await questioned(court)
    court.monotonic.now += 60.1
    refused(await court.answer(peer, evaluation, right), 410, "deadline")
    again = await asked(court, peer)
    right = await court.right_answer(peer, again)
    assert again != evaluation and (await court.answer(peer, again, right)).status_code == 200
    row = await standing(court, peer)
    # The late answer counts as wrong.
    assert (row["n"], row["answered"], row["unanswered"], row["score"]) == (2, 1, 1, 0.5)
    assert [(entry["answer"], entry["reward"]) for entry in row["evaluations"]] == [(right, 1.0), (None, 0.0)]


@on_each_database
async def test_replayed_requests_are_rejected(court: Court) -> None:
    """Each request of an evaluation is captured and sent again, at once and later."""
    peer = court.peer()
    body = encode(wish())
    captured = [("/v1/evaluations", body, peer.headers("POST", "/v1/evaluations", body))]
    evaluation = (await court.http.post("/v1/evaluations", content=body, headers=captured[0][2])).json()[
        "evaluations"
    ][0]["evaluation"]
    target, body = f"/v1/evaluations/{evaluation}/answers", encode(answering("x"))
    captured.append((target, body, peer.headers("POST", target, body)))
    assert (await court.http.post(target, content=body, headers=captured[1][2])).status_code == 200
    for wait in (0.0, 30.0, 1_800.0):
        court.monotonic.now += wait
        for target, body, headers in captured:
            response = await court.http.post(target, content=body, headers=headers)
            refused(response, 409, "sequence number")
            assert response.json()["sequence"] == peer.sequence
    assert (await standing(court, peer))["n"] == 1


@on_each_database
async def test_a_request_captured_before_its_peer_was_deleted_is_rejected(court: Court) -> None:
    peer, body = court.peer(), encode(wish())
    captured = {"content": body, "headers": peer.headers("POST", "/v1/evaluations", body)}
    assert (await court.http.post("/v1/evaluations", **captured)).status_code == 201
    court.monotonic.now += 61.0
    await court.service.expire()
    court.wall.now += 2 * court.service.settings.window + 100.0
    await court.service.prune()
    court.service._sequences.clear()  # as after a restart
    assert await standing(court, peer) == {}
    response = await court.http.post("/v1/evaluations", **captured)
    refused(response, 409, "sequence number")
    # A node with the key continues after the number that the reply states.
    peer.sequence = response.json()["sequence"]
    assert peer.sequence == int(court.wall.now * 1e9)
    assert (await court.ask(peer)).status_code == 201


async def test_a_sequence_number_far_ahead_of_the_clock_is_refused(court: Court) -> None:
    peer, now = court.peer(), int(court.wall.now * 1e9)
    peer.sequence = now + 3_700 * 10**9
    refused(await court.ask(peer), 400, "ahead of the judge's clock")
    peer.sequence = now + 3_500 * 10**9
    assert (await court.ask(peer)).status_code == 201


async def test_a_peer_of_another_curriculum_is_refused(court: Court) -> None:
    response = await court.post(court.peer(), "/v1/evaluations", wish(curriculum=SAPO_9.digest))
    refused(response, 409, "tiny-9", "another curriculum")
    assert "tiny-9" in response.json()["remedy"]


async def test_a_node_with_other_scoring_rules_is_scored_by_the_judges_rules(court: Court) -> None:
    strict = wish(curriculum=CURRICULA["tiny-9-strict"].digest)
    assert (await court.post(court.peer(), "/v1/evaluations", strict)).status_code == 201
    health = (await court.http.get("/healthz")).json()
    assert health["curriculum"] == TINY_9.digest


async def test_asking_too_often_is_refused(court: Court) -> None:
    peer = court.peer()
    for _ in range(config.ASK_BURST):
        assert (await court.ask(peer)).status_code == 201
    response = await court.ask(peer)
    refused(response, 429, "too often")
    assert response.headers["retry-after"] == "2"
    assert (await court.ask(court.peer())).status_code == 201  # another peer has a separate budget
    court.monotonic.now += 1.0
    assert (await court.ask(peer)).status_code == 201


async def test_forged_requests_are_rejected(court: Court) -> None:
    """Requests with another author or a changed part are rejected, as in `test_signing`, here over HTTP.

    Nothing is recorded, and the peer in whose name the requests come is not locked out.
    """
    (alice, evaluation, right), mallory = await questioned(court), court.peer()
    before = court.rows("SELECT count(*), count(reward) FROM evaluations")
    for target, document in (
        ("/v1/evaluations", wish()),
        (f"/v1/evaluations/{evaluation}/answers", answering(right)),
    ):
        body = encode(document)
        in_her_name = {"swarmd-peer": alice.identity.peer_id}
        for sent, headers in (
            (body, mallory.headers("POST", target, body, 10**9) | in_her_name),
            (body, alice.headers("GET", target, body, 10**9)),
            (body, alice.headers("POST", target + "?", body, 10**9)),
            (body + b" ", alice.headers("POST", target, body, 10**9)),
        ):
            refused(await court.http.post(target, content=sent, headers=headers), 401, "signature")
    assert court.rows("SELECT count(*), count(reward) FROM evaluations") == before
    assert (await court.answer(alice, evaluation, right)).status_code == 200


BAD_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"{",
    b'{"round":1}',
    b"\xff\xfe",
    b"[" * 4_000,
    b'{"a":' * 600,
    b"NaN",
    encode(wish()).replace(b"1", b"NaN"),
    b'{"round": 1' + b"0" * 400 + b"}",
    *(encode(wish(model=model)) for model in ("", "m" * 101, None, "\ud800")),
    *(
        encode(wish() | changed)
        for changed in (
            *({"round": number} for number in (-1, 2**63, 1.5, "1", True)),
            {"curriculum": 5},
            {"extra": 1},
            {"questions": 0},
            {"questions": config.MAX_QUESTIONS + 1},
            {"questions": True},
            {"answers": 0},
            {"answers": config.MAX_ANSWERS + 1},
            {"answers": "2"},
            {"model": "tiny"},
            {"asker": None},
        )
    ),
    *(
        encode(wish() | {"asker": wish()["asker"] | changed})
        for changed in (
            {"sharing": "both"},
            {"local": -1},
            {"name": "n" * 41},
            {"hardware": "abacus"},
            {"further": 1},
        )
    ),
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=[repr(b[:30]) for b in BAD_BODIES])
async def test_a_malformed_body_is_refused(court: Court, body: bytes) -> None:
    refused(await court.post(court.peer(), "/v1/evaluations", body), 422)


async def test_mutated_bodies_never_cause_a_server_error(court: Court) -> None:
    """1,000 correctly signed bodies with random changes are accepted or rejected, never with status 500."""
    rng = random.Random(9)
    for i in range(1_000):
        peer = SigningPeer(20_000 + i)
        target = "/v1/evaluations" if i % 2 else f"/v1/evaluations/{i:032x}/answers"
        body = bytearray(encode(wish() if i % 2 else answering("<answer>1</answer>")))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body))
            body[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        response = await court.post(peer, target, bytes(body))
        assert response.status_code in (201, 404, 409, 422), response.text


async def test_bodies_over_their_limits_are_refused(court: Court) -> None:
    peer = court.peer()
    refused(await court.post(peer, "/v1/evaluations", b" " * (config.MAX_ASK_BYTES + 1)), 413)
    evaluation = await asked(court, peer)
    refused(await court.answer(peer, evaluation, "x" * (config.MAX_ANSWER_CHARACTERS + 1)), 422)
    refused(
        await court.post(
            peer, f"/v1/evaluations/{evaluation}/answers", b"x" * (config.MAX_ANSWERS_BYTES + 1)
        ),
        413,
    )
    longest = "\U0001f9ab" * config.MAX_ANSWER_CHARACTERS  # twelve bytes each if escaped
    assert (await court.answer(peer, evaluation, longest)).status_code == 200


HOSTILE_ANSWERS = [
    "",
    "<answer></answer>",
    "<answer>" * 2_000,
    "<answer>__import__('os').system('touch /tmp/owned')</answer>",
    "<answer>9**9**9**9</answer>",
    "<answer>" + "(" * 8_000 + "</answer>",
    "<answer>１２</answer>",
    "<answer>\u202e21</answer>",
    "\x00\x01",
    "<answer>nan</answer>",
    "<answer>" + "1" * 16_000 + "</answer>",
    "'; DROP TABLE peers; --",
    "é\u0301" * 3_000,
]


@on_each_database
async def test_hostile_answers_get_no_reward(court: Court) -> None:
    peer = court.peer()
    for text in HOSTILE_ANSWERS:
        court.monotonic.now += 1.0
        graded = await court.answer(peer, await asked(court, peer), text)
        assert (graded.status_code, graded.json()["reward"]) == (200, 0.0), text[:40]
    assert (await standing(court, peer))["n"] == len(HOSTILE_ANSWERS)
    # The text is stored unchanged.
    assert {entry["answer"] for entry in (await standing(court, peer))["evaluations"]} == set(HOSTILE_ANSWERS)


async def test_unknown_addresses_and_ids_give_404(court: Court) -> None:
    refused(await court.http.get("/v3"), 404)
    refused(await court.http.get("/v1/evaluations"), 405)
    refused(await court.http.get("/v1/peers/nobody"), 404)
    refused(await court.http.get("/v1/peers/nobody?before=x"), 422)
    refused(await court.answer(court.peer(), "0" * 32, "x"), 404)
    refused(await court.answer(court.peer(), "%2e%2e", "x"), 404)
    # PostgreSQL cannot store NUL.
    for path in ("/v1/peers", "/nodes", "/v1/evaluations", "/evaluations", "/v1/verified"):
        refused(await court.http.get(f"{path}/%00"), 422, "malformed")
    court.monotonic.now += 3.0  # longer than /healthz is cached
    health = (await court.http.get("/healthz")).json()
    assert (health["status"], health["curriculum"]) == ("ok", TINY_9.digest)


async def test_a_rejection_is_a_page_for_browsers_and_readable_by_scripts(court: Court) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path, status in (("/nothing", 404), ("/?after=-1", 422), ("/nodes/nobody", 404)):
        page = await court.http.get(path, headers=browser)
        assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8"), path
        assert (
            "default-src 'none'" in page.headers["content-security-policy"]
            and "To the leaderboard" in page.text
        )
    for path, status in (("/nothing", 404), ("/v1/peers/nobody", 404), ("/v1/leaderboard?after=-1", 422)):
        read = await court.http.get(path, headers=browser if path.startswith("/v1") else {})
        refused(read, status)
        assert read.headers["access-control-allow-origin"] == "*"
    assert (
        "access-control-allow-origin"
        not in (await court.http.post("/v1/evaluations", headers=browser)).headers
    )


async def test_an_answer_lost_on_a_full_disk_does_not_count(
    court: Court, caplog: pytest.LogCaptureFixture
) -> None:
    """The question of an answer that could not be stored is not answered, and does not lapse.

    /healthz says that the disk is full; the log says so once.
    """
    peer, evaluation, right = await questioned(court)
    assert (await court.http.get("/healthz")).status_code == 200
    court.monotonic.now += 3.0
    court.rows(f"PRAGMA max_page_count={court.rows('PRAGMA page_count')[0][0]}")
    try:
        refused(await court.answer(peer, evaluation, "x" * 16_000), 500)
        refused(await court.http.get("/healthz"), 503, "cannot write")
        refused(await court.answer(peer, evaluation, right), 410, "does not count")
    finally:
        court.rows("PRAGMA max_page_count=1000000")
    court.monotonic.now += 61.0
    assert (await court.http.get("/healthz")).json()["status"] == "ok"
    court.monotonic.now += 3.0
    court.rows("PRAGMA query_only=1")  # noticed even without requests
    try:
        refused(await court.http.get("/healthz"), 503, "cannot write")
        refused(await court.ask(peer), 500)
        assert (await court.http.get("/v1/leaderboard")).status_code == 200
    finally:
        # No transaction can begin. The setting belongs to one connection, so drop the pool's connections.
        court.service._writer._store.engine.dispose()
    full, unwritable = caplog.records
    assert "disk is full" in full.getMessage() and "readonly database" in unwritable.getMessage()
    assert not full.exc_info
    court.monotonic.now += 31.0
    assert (await court.http.get("/healthz")).status_code == 200
    again = await asked(court, peer)
    assert again != evaluation
    assert (await court.answer(peer, again, "x")).json()["n"] == 1
    assert (await standing(court, peer))["unanswered"] == 0
    court.wall.now += 60.0 + config.ABANDONED_S + 1.0
    lost = f"SELECT state FROM evaluations WHERE id = '{evaluation}'"

    async def void() -> bool:
        return court.rows(lost) == [("void",)]

    await eventually(void)  # else its window is never revealed
    court.wall.now -= 7_200.0  # set the clock back
    court.rows(
        f"UPDATE evaluations SET state = 'open', asked_at = {court.wall.now - 600} WHERE id = '{evaluation}'"
    )
    await eventually(void)


@pytest.mark.parametrize("court_database", KINDS[1:], indirect=True)
async def test_a_restart_of_the_database_server_loses_no_answer(court: Court) -> None:
    address = str(court.service.settings.database)
    peer, evaluation, right = await questioned(court)
    # Leave out background processes of the server, which also connect to the database at times.
    ours = "backend_type = 'client backend'"
    others = (
        f"FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND {ours}"
    )
    with psycopg.connect(address) as admin:
        # The connections of the store and of the reader.
        assert len(admin.execute(f"SELECT pg_terminate_backend(pid, 60000) {others}").fetchall()) == 2
    assert (await court.answer(peer, evaluation, right)).json()["reward"] == 1.0
    assert (await court.http.get(f"/v1/peers/{peer.identity.peer_id}")).json()["answered"] == 1


def test_every_readable_address_answers_head_requests(court: Court) -> None:
    of = {
        method: {
            route.path
            for route in create_app(court.service).routes
            if isinstance(route, APIRoute) and method in route.methods
        }
        for method in ("GET", "HEAD")
    }
    assert of["GET"] == of["HEAD"] and "/v1/verified/{id}" in of["GET"]


@on_each_database
async def test_a_peers_score_is_the_same_everywhere(court: Court) -> None:
    """The reply to an answer, the peer's page and the leaderboard have the same score and questions."""
    peer, right = court.peer(), 0.0
    for number in range(12):
        evaluation = await asked(court, peer)
        court.monotonic.now += 1.1
        text = await court.right_answer(peer, evaluation) if number % 3 else "x"
        said = (await court.answer(peer, evaluation, text)).json()
        right += said["reward"]
        if number == 5:
            await asked(court, peer)
            court.monotonic.now += 61.0
    court.forget_leaderboard()
    board = (await court.http.get("/v1/leaderboard")).json()
    assert (board["listed_answers"], board["more_after"]) == (10, None)
    row = next(row for row in board["peers"] if row["peer"] == peer.identity.peer_id)
    shown = await standing(court, peer)
    assert right >= 6  # of 8, since a rare logic question has no right answer
    assert (
        (said["score"], said["n"])
        == (row["score"], row["n"])
        == (shown["score"], shown["n"])
        == (right / 13, 13)
    )
    assert f"<b>{100 * right / 13:.0f} %</b>" in (await court.http.get("/")).text
    assert (await court.http.get("/v1/leaderboard?after=1000")).json()["peers"] == []
    refused(await court.http.get("/v1/leaderboard?after=-1"), 422)


async def test_a_killed_verifier_loses_no_answer(court: Court) -> None:
    """The scoring process is replaced, and the answer is scored by the new one."""
    peer, evaluation, right = await questioned(court)
    verifier = court.service._mark.__self__  # type: ignore[attr-defined]
    assert isinstance(verifier, Verifier) and verifier.pid is not None
    os.kill(verifier.pid, signal.SIGKILL)
    assert (await court.answer(peer, evaluation, right)).json()["reward"] == 1.0


async def test_if_the_verifier_cannot_run_no_answer_counts_as_wrong(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(items: object) -> Any:
        raise VerifierFailed

    peer = court.peer()
    evaluation = await asked(court, peer)
    with monkeypatch.context() as patch:
        patch.setattr(court.service, "_mark", fails)
        refused(await court.answer(peer, evaluation, "x"), 500, "internal error")
    refused(await court.answer(peer, evaluation, "x"), 410, "does not count")
    assert (await court.answer(peer, await asked(court, peer), "x")).status_code == 200
    row = await standing(court, peer)
    assert (row["n"], row["unanswered"]) == (1, 0)


async def test_a_network_that_wrote_its_daily_share_has_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open question may still be answered; peers with a record have a separate share."""
    monkeypatch.setattr(config, "WRITTEN_A_DAY", {False: (70_000.0, 70_000.0), True: (1e9, 1e9)})
    async with open_court(tmp_path / "judge", tmp_path) as court:
        known, other = court.peer(), court.peer()
        for _ in range(LISTED_ANSWERS):
            assert (await court.answer(known, await asked(court, known), "x")).status_code == 200
            court.monotonic.now += 2.0
        for _ in range(3):
            evaluation = await asked(court, other)
            assert (await court.answer(other, evaluation, "x" * 16_000)).status_code == 200
        response = await court.ask(court.peer())
        refused(response, 429, "your network has used up")
        assert (await court.ask(known)).status_code == 201
        court.monotonic.now += int(response.headers["retry-after"])
        assert (await court.ask(court.peer())).status_code == 201


async def test_with_a_nearly_full_disk_new_nodes_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_court(tmp_path / "judge", tmp_path) as court:
        known = court.peer()
        for _ in range(LISTED_ANSWERS):
            assert (await court.answer(known, await asked(court, known), "x")).status_code == 200
            court.monotonic.now += 2.0
        monkeypatch.setattr(config, "FREE_BYTES", 2**62)
        for _ in range(2):
            court.monotonic.now += 2 * config.PROBE_S
            refused(await court.ask(court.peer()), 503, "nearly full", "no new nodes")
        assert (await court.ask(known)).status_code == 201
        assert [record.message for record in caplog.records if "MiB left" in record.message] != []
        assert "swarmd_judge_disk_free_bytes" in (await court.http.get("/metrics")).text


async def test_the_unfinished_bodies_of_a_network_are_bounded(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise 4,096 connections could hold 512 KiB each before any signature is checked."""
    monkeypatch.setattr(config, "ARRIVING_BYTES", 1000)
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(950)
        begun.set()
        await go.wait()

    async with http_to(court.service) as http:
        few = replace(court, http=http)
        first = asyncio.create_task(http.post("/v1/evaluations", content=slow()))
        await begun.wait()
        refused(await few.ask(court.peer()), 429, "at once")
        go.set()
        refused(await first, 401)
        assert (await few.ask(court.peer())).status_code == 201


async def test_the_pages_computed_for_a_network_are_limited(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "BOARDS_BURST", 2.0)
    async with http_to(court.service) as http:
        codes = [(await http.get(f"/?q={word}")).status_code for word in ("a", "b", "c", "a")]
        assert codes == [200, 200, 429, 200]  # the last page is cached
        for path in ("/v1/leaderboard?q=d", "/?q=d"):
            assert (await http.get(path)).headers["retry-after"] == "1"
        court.wall.now += 1.0
        assert (await http.get("/?q=d")).status_code == 200


async def test_a_judge_too_busy_to_score_leaves_the_question_open(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = court.peer()
    evaluation = await asked(court, peer)
    with monkeypatch.context() as patch:
        patch.setattr(court.service, "_scoring", config.SCORING_BACKLOG)
        response = await court.answer(peer, evaluation, "x")
        refused(response, 503, "overloaded")
        assert response.headers["retry-after"] == "30"
    assert (await court.answer(peer, evaluation, "x")).status_code == 200


@pytest.mark.parametrize("refusal", [found for found in vars(errors).values() if isinstance(found, Refusal)])
def test_every_remedy_is_one_sentence(refusal: Refusal) -> None:
    """A node appends the remedy to its own message."""
    assert refusal.remedy.endswith(".") and ". " not in refusal.remedy
