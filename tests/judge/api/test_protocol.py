"""The judge's protocol over HTTP: several questions and answers, a peer's self-description, receipts."""

import hashlib
import json
import random
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge import config
from judge.api.requests import AnswersBody, QuestionsBody, plain
from judge.evaluation.receipts import signed
from judge.figures.leaderboard import LISTED_ANSWERS
from p2p.identity import Identity
from swarmd.tasks.held_out import checked_receipt
from tests.judge import replies
from tests.judge.conftest import Court, check_form
from tests.judge.databases import on_each_database
from tests.judge.test_app import asked, refused, standing

pytestmark = pytest.mark.anyio

ASKER = {
    "model": "tiny", "name": "<script>alert(1)</script>", "sharing": "swarm", "local": 4, "external": 4,
    "strategy": "uniform positive", "version": "0.2.0", "hardware": "cpu",
}  # fmt: skip


@on_each_database
async def test_an_evaluation_gives_a_receipt_with_rewards_and_attributes(court: Court) -> None:
    peer = court.peer()
    document = (await court.ask(peer, round=3, asker=ASKER, answers=3)).json()
    (question,) = document["evaluations"]
    assert (
        set(question) == {"evaluation", "question", "seconds", "answers", "window", "commitment"}
        and question["answers"] == 3
    )
    right = await court.right_answer(peer, question["evaluation"])
    refused(await court.answer(peer, question["evaluation"], right), 422, "needs 3 answers")
    graded = (await court.answer(peer, question["evaluation"], "x", right, "y")).json()
    assert (graded["reward"], graded["rewards"], graded["n"], graded["number"]) == (
        0.0,
        [0.0, 1.0, 0.0],
        1,
        1,
    )
    found = checked_receipt(graded)
    assert found is not None
    assert document["judge"] == (await court.http.get("/v1/judge")).json()["judge"]
    answers = [hashlib.sha256(text.encode()).hexdigest() for text in ("x", right, "y")]
    said = {"judge": document["judge"], "peer": peer.identity.peer_id, "round": 3, **ASKER}
    assert found | said | {"answers": answers, "rewards": graded["rewards"]} == found
    row = await standing(court, peer)
    assert row["said"] == {name: value for name, value in ASKER.items() if name != "model"}
    assert row["pass_at"] == {
        # The answers are "x", the right one, and "y". The first is greedy, so it is not a sample.
        "1": {"score": 0.5, "n": 1},
        "2": {"score": 1.0, "n": 1},
    }
    entry = row["evaluations"][0]
    # With the specialty and the number, anyone can generate the question again.
    assert (entry["specialty"], entry["n"]) == (found["specialty"], found["n"])
    assert [further["text"] for further in entry["further"]] == [right, "y"]


async def test_a_changed_receipt_does_not_verify(court: Court) -> None:
    peer = court.peer()
    document = (await court.ask(peer)).json()
    graded = (await court.answer(peer, document["evaluations"][0]["evaluation"], "x")).json()
    receipt = {name: graded[name] for name in ("receipt", "signature")}
    assert checked_receipt(receipt) is not None
    rng = random.Random(1)
    for _ in range(300):
        name = rng.choice(("receipt", "signature"))
        changed = bytearray(receipt[name].encode())
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(7)
        assert checked_receipt(receipt | {name: changed.decode("latin-1")}) is None, changed
    mine = Identity(bytes(32))
    forged = json.loads(signed(mine, {})["receipt"]) | {"judge": document["judge"]}
    assert (
        checked_receipt({"receipt": json.dumps(forged), "signature": signed(mine, forged)["signature"]})
        is None
    )
    for odd in (
        {},
        {"receipt": "[]", "signature": ""},
        {"receipt": "[" * 10**5, "signature": ""},
        {"receipt": None, "signature": 5},
        [],
    ):
        assert checked_receipt(odd) is None  # type: ignore[arg-type] # a file may hold any value


@on_each_database
async def test_a_peer_gets_several_questions_at_a_time(court: Court) -> None:
    """Asking again gives the same questions; a new question only replaces an answered one.

    So a peer cannot choose among questions.
    """
    peer = court.peer()
    first = (await court.ask(peer, questions=3)).json()["evaluations"]
    assert len({question["evaluation"] for question in first}) == 3
    court.monotonic.now += 10.0
    again = (await court.ask(peer, questions=3, answers=2)).json()["evaluations"]
    assert again == [{**question, "seconds": 50.0} for question in first]
    assert await asked(court, peer) == first[0]["evaluation"]  # the oldest open question
    assert (await court.answer(peer, first[1]["evaluation"], "x")).status_code == 200
    later = (await court.ask(peer, questions=3)).json()["evaluations"]
    assert [q["evaluation"] for q in later][:2] == [first[0]["evaluation"], first[2]["evaluation"]] and len(
        later
    ) == 3
    court.monotonic.now += 61.0
    await court.ask(peer)
    row = await standing(court, peer)
    # Each lapsed question counts as wrong.
    assert (row["answered"], row["unanswered"], row["score"]) == (1, 3, 0.0)


async def test_each_question_counts_towards_the_rate_limit(court: Court) -> None:
    peer = court.peer()
    court.monotonic.now += 60.0
    assert (await court.ask(peer, questions=config.MAX_QUESTIONS)).status_code == 201
    refused(await court.ask(peer, questions=config.MAX_QUESTIONS), 429, "too often")


async def test_newcomers_of_a_network_share_a_rate_that_spares_known_peers(court: Court) -> None:
    known = court.peer()
    for _ in range(LISTED_ANSWERS):
        court.monotonic.now += 61.0
        await court.answer(known, await asked(court, known), "x")
    court.monotonic.now += 61.0
    at_once = int(config.NETWORK_ASK_BURST) // config.MAX_QUESTIONS
    for _ in range(at_once):  # rejected requests also count towards the rate
        assert (
            "no record ask too often"
            not in (await court.ask(court.peer(), questions=config.MAX_QUESTIONS)).text
        )
    refused(await court.ask(court.peer(), questions=config.MAX_QUESTIONS), 429, "no record ask too often")
    assert (await court.ask(known, questions=config.MAX_QUESTIONS)).status_code == 201
    court.monotonic.now += 61.0
    assert (await court.ask(court.peer())).status_code == 201


async def test_openapi_describes_the_requests(court: Court) -> None:
    document = (await court.http.get("/openapi.json")).json()
    for path in ("/v1/evaluations", "/v1/evaluations/{id}/answers"):
        post = document["paths"][path]["post"]
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is False and "$ref" not in json.dumps(schema)
        forms = {each["name"]: each["schema"].get("pattern") for each in post["parameters"]}
        assert re.match(forms["swarmd-peer"], court.peer().identity.peer_id) and not re.match(
            forms["swarmd-peer"], ""
        )
        assert "swarmd-signature" in forms


async def test_a_disallowed_method_is_answered_with_the_allowed_methods(court: Court) -> None:
    """RFC 9110, 10.2.1."""
    for path, allowed in (
        ("/v1/judge", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/v1/evaluations", "POST"),
    ):
        refused = await court.http.request("DELETE", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


async def test_requests_and_answers_match_their_documented_schemas(court: Court) -> None:
    document = (await court.http.get("/openapi.json")).json()
    assert "schemas" not in document.get("components", {})  # none of the framework's error schemas
    QuestionsBody.model_validate(replies.QUESTIONS_BODY)
    AnswersBody.model_validate(replies.ANSWERS_BODY)
    peer = court.peer()
    asked = await court.ask(peer)
    check_form(asked.json(), replies.QUESTIONS)
    (question,) = asked.json()["evaluations"]
    for reply in (replies.GRADE, replies.REFUSAL):  # a question can be answered only once
        check_form((await court.answer(peer, question["evaluation"], "x")).json(), reply)
    court.monotonic.now += 10.0
    (question,) = (await court.ask(peer, answers=2)).json()["evaluations"]
    await court.answer(peer, question["evaluation"], "x", "y")
    found = (await court.http.get(f"/v1/peers/{peer.identity.peer_id}")).json()
    check_form(found, replies.PEER)
    assert len(found["evaluations"][0]["further"]) == 1
    assert [*document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]


@given(st.text(max_size=60))
def test_names_are_stored_without_invisible_and_direction_characters(text: str) -> None:
    kept = plain(text)
    if kept is not None:
        assert kept.isprintable() and "C" not in {unicodedata.category(letter)[0] for letter in kept}
        assert kept == " ".join(kept.split()) == plain(kept)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("otter", "otter"), ("  an\totter \n", "an otter"), ("\u202eretto", "retto"),
        ("a\u200bb\u2066c\u2069", "abc"), ("\x1b[2J", "[2J"),
        ("\u202e\u200f", None), ("", None), ("Ａ", "A"), ("o" + "\u0336" * 30, "o" + "\u0336" * 2),
        ("<b>", "<b>"),
        ("Ołówek 🦦", "Ołówek 🦦"), ("e\u200b\u0301", "é"), ("\u33a5" * 40, "m3" * 32),
        ("\u0430dmin (judge)", "\u0430dmin (judge)"), ("админ", "админ"),
        ("Tokyo 東京 トウキョウ", "Tokyo 東京 トウキョウ"),
        ("a\u0430" * 33, "a\u0430" * 32),
    ],
)  # fmt: skip
def test_names_are_cleaned(text: str, kept: str | None) -> None:
    assert plain(text) == kept


@on_each_database
async def test_a_name_is_kept_plain_and_bounded(court: Court) -> None:
    peer = court.peer()
    document = (await court.ask(peer, asker=ASKER | {"name": "\u202e an  otter\x00"})).json()
    graded = (await court.answer(peer, document["evaluations"][0]["evaluation"], "x")).json()
    assert (
        json.loads(graded["receipt"])["name"] == "an otter" == (await standing(court, peer))["said"]["name"]
    )
    refused(await court.ask(peer, asker=ASKER | {"name": "x" * 41}), 422, "name")
