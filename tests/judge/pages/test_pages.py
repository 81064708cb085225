"""The judge's pages: a stranger's text has no effect, and pages show the recorded values."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from judge.figures.intervals import wilson
from judge.figures.leaderboard import BoardView, Record, ScoreTally
from judge.figures.verification import Upload, VerifiedAnswer
from judge.pages import drawing, rendering, views
from judge.store import reader, verifications
from judge.store import store as judge_store
from judge.store.database import Database
from judge.store.store import open_store
from judge.types import Attributes
from p2p.identity import nickname
from p2p.types import PeerId
from swarmd.config.invitation import Invitation, write_invitation
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import LADDER_9, TINY_9
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion, Task, TaskRef
from testbed.signing_peer import SigningPeer
from tests.judge import hostile, replies
from tests.judge.conftest import check_form, open_court
from tests.judge.store.test_store import evaluate, question

pytestmark = pytest.mark.anyio

NOW = 1_700_000_100.0
PEER = SigningPeer(1).identity.peer_id
INVITATION = write_invitation(
    Invitation("main", "tiny-9", "0123456789abcdef", "tiny", judge="https://judge.example")
)
MENU = [path for path, _ in rendering.NAVIGATION]
PAGES = [*MENU, f"/nodes/{PEER}", "/nodes/nobody"]


@pytest.fixture(scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a real judge whose database has hostile text wherever a stranger can write."""
    database = tmp_path_factory.mktemp("site") / "judge.sqlite3"
    hostile.fill(database)
    async with open_court(database, database.parent, wall=NOW, invitation=INVITATION) as court:
        yield court.http


async def answers(site: httpx2.AsyncClient, peer: str) -> list[dict[str, Any]]:
    return list((await site.get(f"/v1/peers/{peer}")).json()["evaluations"])


@pytest.mark.slow  # 50 pages
async def test_500_hostile_names_and_answers_are_shown_as_text(site: httpx2.AsyncClient) -> None:
    rows = (await site.get("/v1/leaderboard")).json()["peers"]
    assert len(rows) == hostile.NODES
    seen = 0
    for row in rows:
        history = await answers(site, row["peer"])
        texts = [entry["answer"] for entry in history]
        for address, shown in (
            (f"/nodes/{row['peer']}", texts),
            (f"/evaluations/{history[0]['evaluation']}", texts[:1]),
        ):
            page = hostile.Parsed((await site.get(address)).text)
            assert page.faults() == []
            assert [
                text for text in shown if hostile.shown(text) not in page.text.replace("\r", "\ufffd")
            ] == []
        seen += len(texts)
    assert seen == len(hostile.ALL)


@pytest.mark.parametrize("path", [*PAGES, "/?q=%3Cscript%3E&model=%3Cscript%3E", "/?sort=score&active=1"])
async def test_a_page_loads_and_runs_no_foreign_content(site: httpx2.AsyncClient, path: str) -> None:
    response = await site.get(path)
    assert response.status_code == (404 if path.endswith("nobody") else 200)
    page = hostile.Parsed(response.text)
    assert page.faults() == []
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http-equiv" not in {name for name, _ in page.attributes}
    assert len(response.content) <= 100_000


async def test_a_tier_common_to_all_rows_is_shown_once(site: httpx2.AsyncClient) -> None:
    text = hostile.Parsed((await site.get("/")).text).text
    # The second occurrence is in the filter.
    assert "all answered by the node" in " ".join(text.split()) and text.count("by the node") == 2


async def test_a_search_text_is_shown_escaped(site: httpx2.AsyncClient) -> None:
    page = hostile.Parsed((await site.get("/", params={"q": '"><script>hacked=1</script>'})).text)
    assert ("value", '"><script>hacked=1</script>') in page.attributes


async def test_each_answer_is_shown_with_its_question_and_reason(site: httpx2.AsyncClient) -> None:
    entry = (await answers(site, PEER))[0]
    task = tasks_of("tiny-9").task(TaskRef(entry["specialty"], entry["n"]))
    assert task is not None
    for address in (f"/nodes/{PEER}", f"/evaluations/{entry['evaluation']}"):
        text = hostile.Parsed((await site.get(address)).text).text
        assert task.question in text and entry["reason"].replace("correct", "right") in text
    assert str(task.entry["answer"]) in text
    unknown = await site.get("/evaluations/" + "0" * 32)
    assert unknown.status_code == 404 and "No answer with this id is stored" in unknown.text


async def test_older_answers_are_on_further_pages(site: httpx2.AsyncClient) -> None:
    newest, older = [
        hostile.Parsed((await site.get(f"/nodes/{PEER}{q}")).text).text for q in ("", "?before=5")
    ]
    assert "Question 20" in newest and "Question 4" in older and "Question 5" not in older


FILES = ("/v1/leaderboard", "/v1/judge", "/openapi.json")


@pytest.mark.parametrize("path", [*PAGES[:-1], *FILES])
async def test_a_request_for_an_unchanged_page_gives_304(site: httpx2.AsyncClient, path: str) -> None:
    first = await site.get(path)
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await site.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (await site.get(path, headers={"if-none-match": '"other"'})).status_code == 200
    head = await site.head(path)
    assert (head.status_code, head.headers["etag"]) == (200, etag)


async def test_scripts_of_other_sites_may_read_the_data_but_not_the_pages(site: httpx2.AsyncClient) -> None:
    for path in (*FILES, f"/v1/peers/{PEER}", "/v1/comparison", "/healthz"):
        assert (await site.get(path)).headers["access-control-allow-origin"] == "*", path
    assert "access-control-allow-origin" not in (await site.get("/")).headers
    assert "access-control-allow-origin" not in (await site.post("/v1/evaluations")).headers


async def test_the_judge_serves_files_for_browsers_and_programs(site: httpx2.AsyncClient) -> None:
    for name, kind in (
        ("page.css", "text/css"),
        ("live.js", "text/javascript"),
        ("icon.svg", "image/svg+xml"),
    ):
        assert f'"{rendering.static(name)}"' in (await site.get("/")).text
        response = await site.get(rendering.static(name))
        assert (
            response.headers["content-type"].startswith(kind)
            and "immutable" in response.headers["cache-control"]
        )
    for name in ("../rendering.py", "%2e%2e%2frendering.py", "none.css", "page"):
        assert (await site.get(f"/static/{name}")).status_code == 404
    assert "Disallow: /v1/" in (await site.get("/robots.txt")).text
    metrics = (await site.get("/metrics")).text
    assert "swarmd_judge_nodes_listed 25\n" in metrics and "swarmd_judge_answers 500\n" in metrics
    api = (await site.get("/openapi.json")).text
    assert "/v1/evaluations" in api and "swarmd-signature" in api and "9223372036854775807" not in api


async def test_the_join_page_shows_the_invitation(site: httpx2.AsyncClient) -> None:
    page = hostile.Parsed((await site.get("/join")).text)
    assert f"swarmd join '{INVITATION}'" in page.text and "packaging/install.sh" in page.text
    assert [value for name, value in page.attributes if name == "data-copy"] == ["install", "command"]


async def test_the_join_page_has_complete_commands_without_an_invitation(tmp_path: Path) -> None:
    """Every command can be run unchanged: it has no placeholders."""
    origin = "https://judge.example"
    async with open_court(tmp_path / "judge.sqlite3", tmp_path, origin=(origin,)) as court:
        page = hostile.Parsed((await court.http.get("/join")).text)
    assert page.faults() == [] and "ADDRESS" not in page.text and "swarmd invite" in page.text
    assert f"swarmd join --curriculum tiny-9 --judge {origin}" in page.text


async def test_the_front_page_describes_the_swarm_and_links_to_the_other_pages(
    site: httpx2.AsyncClient,
) -> None:
    page = hostile.Parsed((await site.get("/")).text)
    facts = (
        "swarm main",
        "learns from the answers of other nodes",
        "25 nodes now",
        "500 answers in all",
        "Join this swarm",
    )
    assert [fact for fact in facts if fact not in page.text] == []
    assert (
        page.text.index("nodes now")
        < page.text.index("Leaderboard", page.text.index("nodes now"))
        < page.text.index("Questions")
    )
    assert {*MENU, "/openapi.json"} <= {value for name, value in page.attributes if name == "href"}
    assert (
        "nothing about a model" not in page.text
        and "nothing about a model" in hostile.Parsed((await site.get("/about")).text).text
    )
    listed = (await site.get("/v1/leaderboard")).json()["peers"]
    assert {("href", f"/nodes/{row['peer']}") for row in listed} <= {*page.attributes}
    searched = hostile.Parsed((await site.get("/?q=x")).text)
    assert "answers in all" not in searched.text and "h1" in searched.tags


@pytest.mark.parametrize(
    ("path", "title"), [("/", "swarm"), (f"/nodes/{PEER}", "script"), ("/join", "Join this swarm")]
)
async def test_pages_have_title_and_description_for_link_previews(
    site: httpx2.AsyncClient, path: str, title: str
) -> None:
    """The previews use Open Graph: https://ogp.me"""
    page = hostile.Parsed((await site.get(path)).text)
    said = dict(
        zip(
            *[[value for name, value in page.attributes if name == of] for of in ("property", "content")],
            strict=False,
        )
    )
    values = [value for name, value in page.attributes if name == "content"]
    assert set(said) == {"og:type", "og:site_name", "og:title", "og:description", "og:url"}
    assert f"http://judge.test{path}" in values and any(title in value for value in values)


async def test_each_reply_matches_its_example(site: httpx2.AsyncClient) -> None:
    """Every public document has exactly the fields of its example."""
    found = (await site.get("/openapi.json")).json()
    for path, methods in found["paths"].items():
        for method, told in methods.items():
            assert told["description"], (method, path)
    entry = (await answers(site, PEER))[0]["evaluation"]
    for path, reply in (
        ("/v1/judge", replies.JUDGE),
        ("/v1/leaderboard", replies.LEADERBOARD),
        (f"/v1/peers/{PEER}", replies.PEER),
        ("/v1/comparison", replies.COMPARISON),
        ("/v1/windows", replies.WINDOWS),
        ("/healthz", replies.HEALTH),
        (f"/v1/evaluations/{entry}", replies.EVALUATION),
    ):
        response = await site.get(path)
        assert response.status_code == 200
        check_form(response.json(), reply)


async def test_pages_with_the_longest_names_are_bounded(tmp_path: Path) -> None:
    """There are 50 nodes whose names have characters of five letters in HTML or four bytes.

    Every page and document has at most 100 kB, and the next page has the rest.
    """
    with closing(open_store(tmp_path / "judge.sqlite3", f"tiny-9 {TINY_9.digest}")) as store:
        for node in range(50):
            letter = '"' if node % 4 == 0 else "\U0001f9ab"
            said = Attributes(1, letter * 100, letter * 40, "swarm", 4, 4, letter * 64, letter * 64, "cpu")
            answers, steps = [Completion(letter * (16_384 if node == 1 else 1), True)], []
            for number in range(10):
                asked = replace(
                    question(1_000_000_000 + 10 * node + number, SigningPeer(node).identity.peer_id),
                    attributes=said,
                )
                asked = replace(
                    asked, task=Task(TaskRef(TINY_9.specialties[number % 9], asked.task.ref.n), "?", {})
                )
                steps.append((judge_store.asked, (asked, number, 1.0)))
                steps.append((judge_store.graded, (asked, answers, [ScoredAnswer.of(0.0)], 0.5, number, 1.0)))
            store.together(steps)
    async with open_court(tmp_path / "judge.sqlite3", tmp_path, wall=2.0) as court:
        node, http = SigningPeer(1).identity.peer_id, court.http
        entry = (await http.get(f"/v1/peers/{node}")).json()["evaluations"][0]["evaluation"]
        for path in (
            *MENU,
            f"/nodes/{node}",
            f"/evaluations/{entry}",
            f"/v1/peers/{node}",
        ):
            response = await http.get(path)
            assert response.status_code == 200 and len(response.content) <= 100_000, path
        seen, after = 0, 0
        while after is not None:
            response = await http.get("/v1/leaderboard", params={"after": after})
            assert len(response.content) <= 100_000
            seen, after = seen + len(response.json()["peers"]), response.json()["more_after"]
        assert seen == 50


async def test_a_node_on_a_ladder_has_a_table_of_levels(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "judge.sqlite3", f"ladder-9 {LADDER_9.digest}")) as store:
        steps: list[Any] = []
        for number, (specialty, reward) in enumerate(
            [("arc_1d.1", 1.0), ("arc_1d.1", 0.0), ("arc_1d.3", 0.0), ("binary_matrix.1", 1.0)]
        ):
            asked = question(1_000_000_000 + number, PEER)
            asked = replace(asked, task=Task(TaskRef(specialty, asked.task.ref.n), "?", {}))
            given = [Completion("x", True)], [ScoredAnswer.of(reward)]
            steps.append((judge_store.asked, (asked, number, 1.0)))
            steps.append((judge_store.graded, (asked, *given, 0.5, number, 1.0)))
        store.together(steps)
    async with open_court(tmp_path / "judge.sqlite3", tmp_path, wall=2.0, curriculum="ladder-9") as court:
        text = " ".join(hostile.Parsed((await court.http.get(f"/nodes/{PEER}")).text).text.split())
        record = (await court.http.get(f"/v1/peers/{PEER}")).json()
    assert "arc 1d1 of 20 of 1 binary matrix1 of 1– all67 % 2 of 30 % 0 of 1" in text
    assert "By levelSpecialtyLevel 1Level 3" in text and "arc 1d33 %1 of 3" in text
    assert "arc 1d, level 3" in text and record["specialties"]["arc_1d.1"]["n"] == 2


async def test_a_node_without_levels_has_no_table_of_levels(site: httpx2.AsyncClient) -> None:
    assert "By level" not in (await site.get(f"/nodes/{PEER}")).text


@pytest.fixture
def board(database: str) -> Iterator[Database]:
    """Return a judge with nodes of two models that have 10 to 24 answers and were seen at different times.

    A node with a higher number is better and was seen later.
    """
    with closing(open_store(database, "tiny-9 0123")) as store:
        numbers = iter(range(1, 1_000))
        for node in range(4):
            for place in range(10 + 4 * node):
                evaluate(
                    store,
                    next(numbers),
                    float(place < 2 + 4 * node),
                    PeerId(f"node{node}"),
                    "a" if node % 2 else "B_%",
                )
        evaluate(store, 999, 1.0, PeerId("newcomer"), "a")
        yield store


def names(board: Database, **view: Any) -> list[str]:
    return [f"{s.rank}{s.record.peer[4:]}" for s in board.run(reader.board, BoardView(**view)).standings]


def test_the_board_can_be_searched_filtered_and_sorted(board: Database) -> None:
    """Ranks are among all peers, even if the page shows a selection."""
    views: list[tuple[dict[str, Any], str]] = [
        *(({"sort": sort}, "13 22 31 40") for sort in ("rank", "score", "new", "seen", "questions")),
        ({"model": "a"}, "13 31"),
        *(({"search": name}, "22") for name in ("NODE2", nickname("node2")[2:])),
        *(({"search": letters}, "22 40") for letters in ("_%", "%")),
        ({"search": "newcomer"}, ""),
        ({"model": "a", "sort": "reward", "after": 1, "limit": 1}, "31"),
        ({"seen_since": board.run(reader.board, BoardView()).standings[1].record.last_seen}, "13 22"),
    ]
    for view, shown in views:
        assert names(board, **view) == shown.split(), view
    page = board.run(reader.board, BoardView(model="a", limit=1))
    assert (page.listed, page.unlisted, page.matching, page.more_after, page.models) == (
        4,
        1,
        2,
        1,
        ["B_%", "a"],
    )


def test_pages_show_nodes_whose_weights_were_evaluated(database: str) -> None:
    with closing(open_store(database, "tiny-9 0123")) as store:
        for number in range(30):
            evaluate(store, number + 1, 1.0, PeerId(f"node{number % 3}"))
        for peer, done in (("node1", True), ("node2", False)):
            upload = Upload(f"of {peer}", PeerId(peer), "tiny", None, "ab" * 32, 10, 1)
            store.run(verifications.queued, upload, 1, 1.0)
            if done:
                store.run(
                    verifications.done,
                    upload,
                    2.0,
                    [VerifiedAnswer("bf", 1, 1.0, 1, "correct", "x", True)],
                    {"receipt": "{}", "signature": ""},
                )
        assert names(store, tier="verified") == ["21"] and names(store, tier="reported") == ["10", "32"]
        assert [s.record.tier for s in store.run(reader.board, BoardView(sort="rank")).standings] == [
            "reported",
            "verified",
            "reported",
        ]
        standing = store.run(reader.standing, "node1")
    shown = {
        "standing": standing,
        "segments": [],
        "segment_rows": views.segment_rows,
        "subjects": {},
        "levels": {},
        "specialties": {},
        "passes": {},
        "said": [],
        "history": [],
        "before": False,
        "more": None,
        "now": 3.0,
        "base": "",
        "curriculum": "tiny-9",
        "listed_answers": 10,
    }
    page = hostile.Parsed(rendering.render("node.html", shown))
    assert (
        page.faults() == []
        and "Verified by the judge" in page.text
        and "ab" * 32 in page.text
        and "1 of 1 questions" in page.text
    )


def test_the_front_page_shows_the_health_of_the_swarm(board: Database) -> None:
    """Evaluation n was of round n, and was asked n seconds after the start of 1970."""
    newest = 999.0
    health = board.run(reader.health, newest)
    counts = ("listed", "unlisted", "seen_hour", "seen_day")
    assert [health[name] for name in counts] == [4, 1, 5, 5]
    assert (health["answers"], health["progress"]) == (65, None)
    assert health["groups"]["model"] == [("a", 3), ("B_%", 2)] and health["groups"]["version"] == [(None, 5)]
    later = board.run(reader.health, newest + 3600)
    assert (later["seen_hour"], later["seen_day"]) == (1, 5)


def test_progress_compares_the_same_nodes(database: str) -> None:
    """Each node's last 100 questions are compared with its earlier questions, if it has any.

    All nodes have the same weight, so the figure does not change if no node changed.
    """
    with closing(open_store(database, "tiny-9 0123")) as store:
        for number in range(150):
            evaluate(store, number + 1, float(number < 10 or number >= 100), PeerId("old"), "a")
        for number in range(20):
            evaluate(store, number + 200, 1.0, PeerId("young"), "a")
        assert store.run(reader.health, 999.0)["progress"] == {"nodes": 1, "before": 10 / 50, "now": 50 / 100}
        of = "UPDATE peers SET answered = {}, reward = {}, recent_right = {}, recent_n=100 WHERE peer = '{}'"
        with store.begin() as db:
            db.exec_driver_sql(of.format(10_100, 8_080.0, 80.0, "old"))
            db.exec_driver_sql(of.format(120, 12.0, 10.0, "young"))
        progress = store.run(reader.health, 999.0)["progress"]
        assert progress is not None and progress["before"] == pytest.approx(progress["now"]) == pytest.approx(
            0.45
        )


def test_a_rank_stands_next_to_its_node(board: Database) -> None:
    ranks = {peer: board.run(reader.standing, peer) for peer in ("node3", "node0", "newcomer", "nobody")}
    assert {peer: found and found.rank for peer, found in ranks.items()} == {
        "node3": 1,
        "node0": 4,
        "newcomer": 0,
        "nobody": None,
    }


def test_segments_cover_every_question_once() -> None:
    for last, totals in ((9, 4.0), (48, 20.0), (1_000, 500.0)):
        step = max(1, last // 48)
        curve = [(number, totals * number // last) for number in sorted({*range(1, last + 1, step), last})]
        found = views.segments(curve)
        assert [first for first, *_ in found] == [1, *(end + 1 for _, end, *_ in found[:-1])] and found[-1][
            1
        ] == last
        # No segment is so short that luck makes it 100 %.
        assert all(end - first + 1 >= views.MIN_SEGMENT_QUESTIONS for first, end, *_ in found[1:])
        assert sum(round(share * (end - first + 1)) for first, end, share, _ in found) == totals
        assert len(found) <= views.MAX_SEGMENTS
    assert views.segments([]) == []
    # Of 23 answers, the last three are right.
    rising = [(number, float(max(0, number - 20))) for number in range(1, 24)]
    assert views.segments(rising) == [(1, 10, 0.0, wilson(0, 10)), (11, 23, 3 / 13, wilson(3, 13))]


@pytest.mark.parametrize("last", [0.0, 1.0, 7.0, 12_345.0])
def test_charts_stay_inside_their_frame(last: float) -> None:
    found = views.segments([(number, number * min(1.0, last) / 100) for number in range(1, 101)])
    drawn = [(drawing.sparkline(found), 120, 28)]
    drawn.append((drawing.pass_chart([(1, 10, 0.0, wilson(0, 10)), (11, 20, 1.0, wilson(10, 10))]), 720, 220))
    drawn.append(
        (drawing.compare_chart([("a", [(5.0, 1.0, -3.0, 2.0), (10.0, last, 0.0, last + 1)])]), 720, 260)
    )
    for picture, width, height in drawn:
        for points in re.findall(r'points="([^"]+)"', picture):
            for point in points.split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width and 0 <= y <= height


def test_a_node_with_few_answers_has_a_page() -> None:
    record = Record(PEER, "tiny", 0.0, 0.0, 1, 0, 1.0, ScoreTally(1, 1), [("bf", 1.0)], [(1, 1.0)])
    assert views.segments(record.curve) == [(1, 1, 1.0, wilson(1, 1))]


def test_figures_next_to_a_chart_are_short() -> None:
    assert [drawing.figure(value) for value in (0, 0.5, 9_999, 10_000, 250_000)] == [
        "0",
        "0.5",
        "9999",
        "10k",
        "250k",
    ]


def test_a_comparison_lists_rounds_at_which_both_sides_have_enough_nodes() -> None:
    rounds = list(range(5, 505, 5))
    swarm = {"round": rounds, "reward": [x / 10 for x in rounds], "peers": [6] * 100}
    solo = {"round": rounds, "reward": [x / 20 for x in rounds], "peers": [7] * 90 + [5] * 10}
    rows = views.comparison_rows({"fewest_peers": 6, "swarm": swarm, "solo": solo})
    assert rows[-1] == ("450", "45.0 (6 nodes)", "22.5 (7 nodes)", "+22.5") and 20 < len(rows) <= 24
    assert views.comparison_rows({"fewest_peers": 8, "swarm": swarm, "solo": solo}) == []
