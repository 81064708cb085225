"""The page: nothing a peer says is more than text, and what is shown is what was recorded."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from benchmarks.overlap import new_share
from judge.leaderboard import LeaderboardPage, Record, Standing
from judge.overlap import TRAINING, new_texts
from judge.pages.drawing import chart, sparkline
from judge.pages.rendering import HEADERS, leaderboard
from p2p.identity import Identity
from p2p.types import PeerId
from swarmd.tasks.curriculum import SAPO_9, TINY_9, Curriculum
from swarmd.tasks.source import tasks_of

NEW = new_texts(TINY_9.digest)

RECORD = Record(PeerId("a"), "tiny", 0.0, 0.0, 10, 0, 1.0, [("bf", 1.0)], [(1, 1.0)])

HOSTILE = [
    "<script>alert(1)</script>", "</title><script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "'><svg onload=alert(1)>",
    "javascript:alert(1)", "<iframe srcdoc='<script>alert(1)</script>'>", "</bdi></td></tr></table><script>alert(1)</script>",
    "<!--", "-->", "]]>", "&lt;script&gt;", "&#60;script&#62;", "<a href='data:text/html,x'>", "<style>*{display:none}</style>",
    "</style><script>alert(1)</script>", "<base href=//evil.example>", "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<form action=//evil.example><input>",
    "\u202e\u2066evil", "\x00<script>", "<scr\x00ipt>", "\ufeff<script>", "＜script＞",
    "<math><mtext>", "<details open ontoggle=alert(1)>",
    "${alert(1)}", "{{7*7}}", "<x onclick=alert(1) style=position:fixed>", "\r\nSet-Cookie: a=b", "<" * 100,
]  # fmt: skip


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.meta: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action") and value]
        self.meta += [value or "" for name, value in attrs if tag == "meta" and name == "http-equiv"]

    def handle_data(self, data: str) -> None:
        self.text += data


def page(models: list[str]) -> str:
    records = [
        Record(Identity.from_seed(bytes([i + 1]) * 32).peer_id, model, 0.0, 990.0, 3, 1, 2.0, [("bf", 1.0), ("bf", 0.0), ("arc_1d", 1.0)],
               [(1, 1.0), (2, 1.0), (3, 2.0)])
        for i, model in enumerate(models)
    ]  # fmt: skip
    return leaderboard(board(records), TINY_9.name, TINY_9.specialties, NEW, 1_000.0)


def board(records: list[Record], after: int = 0, listed: int | None = None, unlisted: int = 0) -> LeaderboardPage:
    standings = [Standing(after + place, record) for place, record in enumerate(records, 1)]
    return LeaderboardPage(
        standings, after, len(records) if listed is None else listed, unlisted, sum(record.answered for record in records)
    )


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def test_hostile_model_names_are_text() -> None:
    """The tags of a page full of hostile names are those of a page of harmless ones, one by one."""
    hostile, harmless = parsed(page(HOSTILE)), parsed(page(["tiny"] * len(HOSTILE)))
    assert hostile.tags == harmless.tags
    assert hostile.links == harmless.links
    for name in HOSTILE:
        assert "".join(c if c.isprintable() else "\ufffd" for c in name) in hostile.text


def test_nothing_is_loaded_or_run() -> None:
    tags = parsed(page(HOSTILE))
    assert not tags.meta, "a page that reloads itself takes the reader's place away"
    assert not {tag for tag, _ in tags.tags} & {"script", "img", "iframe", "link", "object", "form", "base"}
    assert not {name for _, names in tags.tags for name in names if name.startswith("on") or name == "style"}
    assert all(re.fullmatch(r"/v1/(leaderboard|peers/12D3KooW\w{44})", link) for link in tags.links)


def test_the_style_sheet_is_the_one_the_policy_names() -> None:
    style = re.search("<style>(.*?)</style>", page(["tiny"]), re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in HEADERS["content-security-policy"]


def test_a_hostile_peer_id_is_text_too() -> None:
    """The signature check lets none through; the page does not depend on it."""
    record = Record(PeerId('"><script>alert(1)</script>'), "tiny", 0.0, 0.0, 1, 0, 1.0, [("bf", 1.0)], [(1, 1.0)])
    assert "<script" not in leaderboard(board([record]), "tiny-9", TINY_9.specialties, NEW, 0.0)


def test_what_is_shown() -> None:
    text = parsed(page(["tiny"])).text
    assert "67%" in text
    assert "21%–94%" in text  # Wilson's interval of 2 of 3
    assert "1 unanswered" in text
    assert "10 s ago" in text
    assert "50%" in text  # of bf
    assert "1 node " in text
    assert "3 answers" in text


def test_how_new_the_questions_are_is_said() -> None:
    text = page(["tiny"])
    for name in TINY_9.specialties:
        assert f"<td>{NEW[name]:.0%}</td>" in text
    unmeasured = leaderboard(board([RECORD]), "tiny-9", TINY_9.specialties, {}, 0.0)
    assert unmeasured.count('<td class="none">?</td>') == 9


@pytest.mark.slow
@pytest.mark.parametrize("curriculum", [TINY_9, SAPO_9], ids=lambda curriculum: curriculum.name)
def test_what_is_said_is_what_is_measured(curriculum: Curriculum) -> None:
    """With another seed than benchmarks.overlap took. Without bf, which takes longer to make than all others."""
    said, tasks = new_texts(curriculum.digest), tasks_of(curriculum.name)
    assert set(said) == set(curriculum.specialties)
    for specialty in sorted(set(said) - {"bf"}):
        assert new_share(tasks, specialty, TRAINING, 400, seed=9) == pytest.approx(said[specialty], abs=0.08), specialty


def test_empty() -> None:
    text = leaderboard(board([], unlisted=2), "tiny-9", TINY_9.specialties, NEW, 0.0)
    assert "No node has 10 answers yet" in text
    assert "2 nodes with fewer than 10 answers not shown" in text


def test_pages_are_linked() -> None:
    for after, links in ((0, ["/?after=50"]), (50, ["/?after=0", "/?after=100"]), (100, ["/?after=50"])):
        text = leaderboard(board([RECORD] * (50 if after < 100 else 3), after, listed=103), "tiny-9", TINY_9.specialties, NEW, 0.0)
        assert [link for link in parsed(text).links if link.startswith("/?")] == links
        assert f'<td class="rank">{after + 1}</td>' in text


@pytest.mark.parametrize("last", [0.0, 1.0, 7.0, 12_345.0])
def test_drawings_stay_in_their_frame(last: float) -> None:
    curve = [(1, 0.0), (50, last / 2), (100, last)]
    for picture, width, height in ((sparkline(curve), 120, 28), (chart([("a", curve), ("b", curve[:1])]), 720, 220)):
        for points in re.findall(r'points="([^"]+)"', picture):
            for point in points.split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_no_curve_no_picture() -> None:
    assert sparkline([]) == ""
    assert chart([("a", []), ("b", [(1, 1.0)])]) == ""
