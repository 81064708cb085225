"""Who learnt from whom: from a node's roster by its signed request to the page, and what is refused there."""

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from judge.api.requests import QuestionsBody
from judge.config import MAX_ASK_BYTES, MAX_LEARNT
from judge.figures.leaderboard import MATRIX_PEERS
from judge.pages import drawing
from judge.store import moderation
from judge.store.reader import Reader
from judge.store.store import Store
from judge.types import Attributes
from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.daemon.judging import client
from swarmd.daemon.judging.judging import judging_of
from swarmd.daemon.local_api.roster import Roster
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import TINY_9
from swarmd.testing import memory_member
from swarmd.types import Completion
from tests.judge import hostile
from tests.judge.conftest import Court, open_court
from tests.judge.peers import SigningPeer, answering, encode, wish
from tests.judge.store.test_store import question
from tests.judge.test_client import honest, judge, replying

IDS = [SigningPeer(number).identity.peer_id for number in range(1, 61)]
BAD_IDS = st.one_of(
    st.text(max_size=60),
    st.builds(lambda id, at: id[:at] + "0" + id[at + 1 :], st.sampled_from(IDS), st.integers(0, 51)),
    st.sampled_from([IDS[0] + " ", IDS[0][:-1], "Qm" + IDS[0][2:], "<script>"]),
)


def parsed(learnt: object) -> Mapping[str, int]:
    return QuestionsBody.model_validate_json(encode({**wish(), "learnt": learnt})).wish.learnt


@given(st.dictionaries(st.sampled_from(IDS), st.integers(1, 10**9), max_size=MAX_LEARNT))
def test_counts_of_peers_come_out_as_they_went_in(learnt: dict[str, int]) -> None:
    assert parsed(learnt) == learnt


@given(
    st.dictionaries(st.sampled_from(IDS), st.integers(1, 9), max_size=3),
    st.one_of(
        st.dictionaries(BAD_IDS, st.just(1), min_size=1, max_size=1),
        st.dictionaries(
            st.just(IDS[-1]),
            st.one_of(
                st.integers(max_value=0), st.integers(10**9 + 1), st.booleans(), st.floats(), st.text()
            ),
            min_size=1,
        ),
        st.just(dict.fromkeys(IDS[: MAX_LEARNT + 1], 1)),
    ),
)
def test_anything_else_is_refused(good: dict[str, int], bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parsed({**good, **bad})


@given(st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.lists(inner, min_size=1)))
def test_what_is_no_table_is_refused(learnt: object) -> None:
    with pytest.raises(ValidationError):
        parsed(learnt)


def test_the_most_that_a_node_tells_fits_a_request() -> None:
    assert client.MAX_LEARNT == MAX_LEARNT
    said = {
        "model": "\U0001f9ab" * 100,
        "name": "\U0001f9ab" * 40,
        "sharing": "swarm",
        "hardware": "other",
        "local": 65_536,
        "external": 65_536,
        "strategy": "unfiltered own-positive",
        "version": "v" * 20,
    }
    body = {"round": 2**63 - 1, "curriculum": "0" * 16, "asker": said}
    body["learnt"] = dict.fromkeys(IDS[:MAX_LEARNT], 10**9)
    assert len(json.dumps(body, ensure_ascii=False).encode()) <= MAX_ASK_BYTES


async def body_of_a_question(folder: Path, roster: Roster, **sections: dict[str, Any]) -> bytes:
    """Return what a node of these settings, and of this roster, asks a judge with."""
    seen = list[bytes]()
    async with judge(replying(honest, seen)) as url:
        sections["judge"] = {"url": url, **sections.get("judge", {})}
        config, member = NodeConfig.model_validate(sections), memory_member(MemorySwarm(), 1, time.time)
        node = judging_of(member, config, TINY_9, folder, lambda: "cpu", roster, lambda _: None, print)
        await node.ask(1)
    return seen[0].partition(b"\r\n\r\n")[2]


@pytest.mark.net
@pytest.mark.parametrize("told", ["on", "off"])
async def test_a_node_tells_whom_it_learnt_from_where_its_operator_wants_that(
    told: str, tmp_path: Path
) -> None:
    """The 32 authors with the most rollouts, in a request that the judge understands."""
    roster = Roster()
    for number, peer in enumerate(IDS[1:41], start=1):
        roster.heard(peer, 0.0)
        for _ in range(number):
            roster.useful(peer, "gcd")
    body = await body_of_a_question(tmp_path, roster, judge={"learnt": told})
    most = dict(list(zip(IDS[1:41], range(1, 41), strict=True))[-MAX_LEARNT:])
    assert QuestionsBody.model_validate_json(body).wish.learnt == (most if told == "on" else {})
    assert (b"learnt" in body) == (told == "on")


@pytest.mark.net
@pytest.mark.parametrize(
    ("sections", "arm"),
    [
        ({}, ("swarm", 4)),
        ({"round": {"external": 0}}, ("solo", 0)),
        ({"round": {"train": "off"}}, ("solo", 0)),
        ({"swarm": {"engine": "none"}}, ("solo", 0)),
    ],
)
async def test_a_node_says_that_it_is_solo_where_it_uses_nobodys_rollouts(
    sections: dict[str, Any], arm: tuple[str, int], tmp_path: Path
) -> None:
    body = await body_of_a_question(tmp_path, Roster(), **sections)
    attributes = QuestionsBody.model_validate_json(body).wish.attributes
    assert (attributes.sharing, attributes.external) == arm


async def said(court: Court, peer: SigningPeer, learnt: object) -> httpx2.Response:
    """Let the peer be asked and answer; return the judge's reply to the first."""
    court.monotonic.now += 3.0
    asked = await court.post(peer, "/v1/evaluations", {**wish(), "learnt": learnt})
    for one in asked.json().get("evaluations", ()):
        await court.post(peer, f"/v1/evaluations/{one['evaluation']}/answers", answering("x"))
    return asked


@pytest.mark.anyio
async def test_the_newest_word_of_a_listed_node_is_shown(database: str, tmp_path: Path) -> None:
    async with open_court(database, tmp_path) as court:
        alice, bob, stranger = court.peer(), court.peer(), court.peer()
        a, b, c = (peer.identity.peer_id for peer in (alice, bob, stranger))
        for _ in range(10):
            for peer, learnt in ((alice, {b: 1}), (bob, {a: 5, c: 2})):
                assert (await said(court, peer, learnt)).status_code == 201
        await said(court, stranger, {a: 9})
        await said(court, alice, {b: 7, c: 3})
        court.forget_leaderboard()
        found = (await court.http.get("/v1/learnt")).json()
        rows = {row["peer"]: (row["learnt"], row["others"]) for row in found["learners"]}
        # Not listed: neither a row nor a column
        assert rows == {a: ({b: 7}, 3), b: ({a: 5}, 2)}
        assert {row["peer"] for row in found["teachers"]} == {a, b}

        for bad in ({a: 1}, {"x": 1}, {b: 0}, [b], None, dict.fromkeys(IDS[10 : 11 + MAX_LEARNT], 1)):
            refused = await said(court, alice, bad)
            assert refused.status_code == 422 and "learnt" in refused.json()["error"], refused.text
        unsigned = await court.http.post(
            "/v1/evaluations",
            content=(body := encode({**wish(), "learnt": {b: 1}})),
            headers={**bob.headers("POST", "/v1/evaluations", body), "swarmd-peer": a},
        )
        assert unsigned.status_code == 401

        moderation.act(database, "ban", b, "floods us", 1.0)
        court.forget_leaderboard()
        found = (await court.http.get("/v1/learnt")).json()
        assert [(row["peer"], row["learnt"], row["others"]) for row in found["learners"]] == [(a, {}, 10)]
        assert b not in (await court.http.get("/learnt")).text

        await court.ask(alice)  # It says nothing more, and so what it said is forgotten.
        court.forget_leaderboard()
        assert (await court.http.get("/v1/learnt")).json()["learners"] == []
        assert "No node of the leaderboard tells yet" in (await court.http.get("/learnt")).text
        assert court.rows("SELECT count(learnt) FROM peers") == [(2,)]


def test_no_number_of_keys_or_counts_drives_a_better_node_off(database: str) -> None:
    """Nodes that know nothing tell the largest counts, of each other; the ranked ones stay in rank."""
    good, liars = IDS[:MATRIX_PEERS], IDS[MATRIX_PEERS:]
    with closing(Store(database, "tiny-9 0123")) as store:
        number = 0
        for peer in [*good, *liars]:
            told = dict.fromkeys(liars[:2], 10**9) | {good[0]: 1, good[1]: 1}
            told.pop(peer, None)
            for _ in range(10):
                number += 1
                asked = question(number, PeerId(peer))
                store.asked(asked, 2 * number, float(number), learnt=told)
                reward = [ScoredAnswer.of(float(peer in good))]
                store.graded(asked, [Completion("x", True)], reward, 0.5, 2 * number + 1, float(number))
        found = Reader(store.database).learnt()
    assert {standing.record.peer for standing in found.learners} == {*good}
    assert [standing.rank for standing in found.learners] == list(range(1, MATRIX_PEERS + 1))
    assert {standing.record.peer for standing in found.teachers} == {good[0], good[1], *liars[:2]}
    assert {standing.record.peer for standing in found.teachers[:2]} == {good[0], good[1]}


@pytest.mark.anyio
async def test_the_fullest_matrix_is_a_small_harmless_page(tmp_path: Path) -> None:
    """Thirty nodes of the longest hostile names tell the most that they may."""
    file = tmp_path / "judge.sqlite3"
    with closing(Store(file, f"tiny-9 {TINY_9.digest}")) as store:
        for place, peer in enumerate(IDS[:MATRIX_PEERS]):
            told = {other: 10**9 - place for other in IDS[:MAX_LEARNT] if other != peer}
            name = '"' * 40 if place % 2 else "</text></svg><script>hacked=1</script>"
            for number in range(10 * place + 1, 10 * place + 11):
                asked = replace(question(number, peer), attributes=Attributes(1, "tiny", name=name))
                store.asked(asked, 2 * number, 1.0, learnt=told)
                grade = [ScoredAnswer.of(1.0)]
                store.graded(asked, [Completion("x", True)], grade, 0.5, 2 * number + 1, 1.0)
    async with open_court(str(file), tmp_path) as court:
        for path in ("/learnt", "/v1/learnt"):
            response = await court.http.get(path)
            assert response.status_code == 200 and len(response.content) <= 100_000, len(response.content)
        page = hostile.Parsed((await court.http.get("/learnt")).text)
    assert page.faults() == [] and page.tags.count("tr") == MATRIX_PEERS + 1
    assert "Each count is that node's own word: nobody can check it." in page.text


def test_a_matrix_shows_the_shares_of_a_row() -> None:
    drawn = drawing.matrix(["1 a", "2 <b>", "all others"], [("1 a", 0, 750, 250), ("2 <b>", 1, 999, 0)])
    assert [*drawn.split("<g>")[1].split("</text>")][:-1] == [
        '<text x="159" y="140">75', '<text x="195" y="140">25',
        '<text x="135" y="164">&lt;1', '<text x="159" y="164">100',
    ]  # fmt: skip
    assert drawn.count("2 &lt;b&gt;") == 2 and drawn.count("h23v23h-23z") == 4
