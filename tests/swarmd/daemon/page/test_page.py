"""The contents of the page, and the times at which it asks the node."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
import trio
import trio.testing
from msgspec import convert, to_builtins

from swarmd.config.config import NodeConfig
from swarmd.config.sources import flatten
from swarmd.daemon.diagnosis.isolation import FIRST_HERE
from swarmd.daemon.diagnosis.learning import FROZEN
from swarmd.daemon.local_api.status import LIMITS
from swarmd.daemon.local_api.status_words import status_lines
from swarmd.daemon.page import page, rendering
from swarmd.daemon.page.http import IO_TIMEOUT_S
from swarmd.state.status import (
    ExchangeFigures,
    JudgeStatus,
    KnownPeer,
    ModelDescription,
    PauseCause,
    SharedRollouts,
    Status,
    SwarmLabel,
    TrainerFigures,
)
from swarmd.types import Ages, AnswerFigures, PoolFigures, RoundLine, TokenCounts
from tests.swarmd.cli.test_view import LAST, PEER, status_of
from tests.swarmd.daemon.page.served import PEERS, Node, served

HOSTILE = "</script><img src=x onerror=alert(1)>\" ' onmouseover=alert(2) <b>\x1b[31m\u202e&quot;"
USAGE = {
    "today": {
        "cpu_seconds": 5400.0,
        "energy_wh": None,
        "bytes_up": 1_500_000,
        "bytes_down": 2_000_000,
        "bytes_written": 10**9,
    },
    "month": {},
    "total": {
        "cpu_seconds": 36_000.0,
        "energy_wh": None,
        "bytes_up": 10**7,
        "bytes_down": 10**8,
        "bytes_written": 3 * 10**9,
    },
}
PAUSE = {
    "kind": "hours",
    "cause": "not at this hour",
    "until": 1.0,
    "ends": "at 18:00",
    "remedy": "swarmd resume",
}
SHARED = {"rollouts": 120, "used": 30, "by": 3}


class Tags(HTMLParser):
    """A parser that keeps tags with their attributes' names, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[tuple[str, tuple[str, ...]]] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def poisoned(value: Any) -> Any:
    """Return `value` with every text in it replaced by a hostile one, names in tables too."""
    match value:
        case str():
            return HOSTILE
        case dict():
            return {key if key in _OURS else HOSTILE: poisoned(inner) for key, inner in value.items()}
        case list() | tuple():
            return [poisoned(inner) for inner in value]
    return value


_OURS = {
    *Status.__struct_fields__,
    *RoundLine.__struct_fields__,
    *KnownPeer.__struct_fields__,
    *ModelDescription.__struct_fields__,
    *JudgeStatus.__struct_fields__,
    *SwarmLabel.__struct_fields__,
    *TrainerFigures.__struct_fields__,
    *ExchangeFigures.__struct_fields__,
    *SharedRollouts.__struct_fields__,
    *PauseCause.__struct_fields__,
    *PoolFigures.__struct_fields__,
    *AnswerFigures.__struct_fields__,
    *TokenCounts.__struct_fields__,
    *Ages.__struct_fields__,
}
# Not any text, and a known one; or a table whose keys are columns.
_FIXED = {"state", "usage", "shared"}


def hostile(of: Status) -> Status:
    told = to_builtins(of)
    return convert(poisoned(told) | {name: told[name] for name in _FIXED}, Status)


def whole(of: Status, peers: Sequence[KnownPeer] = PEERS) -> Tags:
    return Tags(rendering.page(rendering.parts(of, peers, now=1_700_000_100.0), rendering.title_of(of)))


def test_foreign_texts_are_escaped() -> None:
    full = status_of(
        pauses=[PAUSE] * 2,
        away=[PAUSE],
        advice={"bad signature": "x"},
        usage=USAGE,
        shared=SHARED,
        trouble={"cause": "c", "remedy": "r"},
    )
    shown = whole(hostile(full), convert(poisoned(to_builtins(PEERS)), list[KnownPeer]))
    # Not a tag or an attribute more; a hostile address of a judge is no link.
    assert shown.tags == whole(full).tags - {("a", ("href", "target", "rel"))}
    assert (
        "\x1b" not in shown.text and "\u202e" not in shown.text and shown.text.count("onerror=alert(1)") > 10
    )


def test_of_many_peers_the_rest_is_counted() -> None:
    many = PEERS * (rendering.PEERS_SHOWN + 3)
    assert "and 3 more: <code>swarmd peers</code>" in rendering.parts(status_of(), many, 0.0)["peers"]


def test_the_page_shows_the_status() -> None:
    shown = whole(
        status_of(
            usage=USAGE,
            shared=SHARED,
            external=[0] * 60 + [4] * 60,
            advice={"bad signature": "update"},
        )
    ).text
    facts = (
        "training",
        "120 of 300",
        "0.429, mean of the last 10 rounds",
        "60 of 120 rounds had answers of other nodes",
        "21 % right at first, 43 % now",
        "its own copy of the language model tiny",
        "3.4 s (generate 2.1, score 0.1, train 0.9, checkpoint 0.2)",
        "Since this start your machine helped 3 other nodes: they trained 30 times on its answers.",
        "120 rollouts since this start; used 30 times, by 3 other nodes",
        "1.5 h",
        "10.0 h",
        "0.10 GB",
        "3.00 GB",
        "/ip4/192.0.2.9/tcp/4001",
        "bad signature",
        "update",
        "score 0.310",
        PEER,
    )
    for fact in facts:
        assert fact in shown, fact
    # Means of different periods must not be compared
    assert shown.index("helped 3") < shown.index("Reward") and "alone 0.259" not in shown
    assert "in the pool" not in shown and "Topic" not in shown and "Offers:" not in shown
    late = rendering.parts(status_of(rewards=[0.5] * 500, round=900), PEERS, now=0.0)["state"]
    assert "50 % right 500 rounds ago, 50 % now" in late
    assert "right" not in rendering.parts(status_of(rewards=[0.5] * 19, round=19), PEERS, now=0.0)["state"]


def test_the_levels_of_a_ladder_are_one_row() -> None:
    levels = {"arc_1d": 1, "basic_arithmetic": 3}
    last = {**to_builtins(LAST), "levels": levels}
    assert "Levels arc_1d 1, basic_arithmetic 3" in " ".join(whole(status_of(last=last)).text.split())
    assert "levels   arc_1d 1, basic_arithmetic 3" in status_lines(status_of(last=last))
    assert "Levels" not in whole(status_of()).text
    assert not any(line.startswith("levels") for line in status_lines(status_of()))


def test_a_command_in_a_text_is_shown_as_one() -> None:
    trouble = {"cause": "nobody is here", "remedy": "run `swarmd invite` and <b>send</b> it"}
    html = rendering.parts(status_of(trouble=trouble), PEERS, now=0.0)["state"]
    assert "run <code>swarmd invite</code> and &lt;b&gt;" in html and "`" not in html


def test_one_button_is_primary_and_a_trouble_has_its_own() -> None:
    alone = {"peers": 0, "connected": 0}
    trouble = {"cause": "no peer is heard", "remedy": "ask the operator"}
    first = {"cause": f"{FIRST_HERE}: nobody is near", "remedy": "invite some"}
    for now, primary, where in (
        ({"peers": 2}, [], ""),
        (alone, ["Invite people"], "controls"),
        (alone | {"trouble": first}, ["Invite people"], "state"),
        (alone | {"trouble": trouble}, [], ""),
        ({"pauses": [PAUSE]}, ["Resume"], "controls"),
        (alone | {"pauses": [PAUSE]}, ["Resume"], "controls"),
        (alone | {"trouble": trouble, "state": "stopping"}, [], ""),
    ):
        parts = rendering.parts(status_of(**now), PEERS, now=0.0)
        found = {name: re.findall('class="primary"[^>]*>([^<]+)<', html) for name, html in parts.items()}
        assert {name: names for name, names in found.items() if names} == ({where: primary} if where else {})
        whole_page = parts["state"] + parts["controls"]
        assert whole_page.count("do-invite-people") == (now.get("state") != "stopping")


def test_somebody_who_founds_a_swarm_is_in_no_trouble() -> None:
    first = {"cause": f"{FIRST_HERE}: nobody is near", "remedy": "invite people"}
    for trouble, calm in ((first, True), ({"cause": "no peer is heard", "remedy": "x"}, False)):
        state = rendering.parts(status_of(trouble=trouble, peers=0, connected=0), PEERS, now=0.0)["state"]
        assert ('class="trouble calm"' in state) is calm and ("do-invite-people" in state) is calm


def test_a_young_node_says_when_it_is_known_whether_it_learns() -> None:
    for rounds, said in ((0, True), (19, True), (20, False)):
        state = rendering.parts(status_of(rewards=[0.5] * rounds, round=rounds), PEERS, now=0.0)["state"]
        assert ("Whether it learns is shown after 20 rounds." in state) is said


def test_a_frozen_node_does_not_claim_to_learn() -> None:
    frozen = status_of(learning=to_builtins(FROZEN), rewards=[])
    state = rendering.parts(frozen, PEERS, now=0.0)["state"]
    assert 'class="trouble calm"' in state and "--no-train" in state
    assert "learns from the answers" not in state and "Whether it learns" not in state


def test_the_judge_is_linked_once_it_knows_the_node() -> None:
    judge = {"url": "https://judge.example/", "score": 0.5, "n": 12}
    for told, link in ((judge, True), (judge | {"score": None}, False), (judge | {"url": "x:y"}, False)):
        html = rendering.parts(status_of(judge=told), PEERS, now=0.0)["judge"]
        assert (f'href="https://judge.example/nodes/{PEER}"' in html) is link and ("<a " in html) is link


def test_the_first_facts_about_a_guest_are_shown_even_if_it_is_off() -> None:
    limits = {"when.battery": "train", "when.hours": [], "when.load": ""}
    html = rendering.parts(status_of(limits=limits), PEERS, now=0.0)["limits"]
    rows = re.findall("<dt>([^<]+)</dt><dd>([^<]+)</dd>", html)
    assert rows == [
        ("On battery", "go on training"),
        ("Hours", "always"),
    ]


def test_names_for_machines_are_behind_details() -> None:
    html = rendering.parts(status_of(), PEERS, now=0.0)["node"]
    seen, _, behind = html.partition("<details>")
    assert PEER not in seen and "/swarmd/1" not in seen and "/ip4/" not in seen
    assert PEER in behind and "/swarmd/1" in behind and "/ip4/" in behind


def test_each_pause_says_why_and_when_it_ends() -> None:
    paused = status_of(
        state="paused",
        cause="the earlier",
        pauses=[PAUSE | {"cause": "the earlier"}, PAUSE],
        away=[PAUSE | {"cause": "no bytes left"}],
    )
    shown = whole(paused).text
    assert (
        "not at this hour; it goes on at 18:00; swarmd resume" in shown
        and "no bytes left" in shown
        and shown.count("the earlier") == 1
    )


def test_limits_that_are_set_are_shown() -> None:
    limits = {
        "limits.cpu": "25 %",
        "limits.up": "",
        "when.hours": ["sat", "sun"],
        "limits.gpu_memory": "100 %",
        "limits.priority": "normal",
        "checkpoint.gigabytes_a_day": 50.0,
        "when.metered": "alone",
        "round.pace": 0.8,
    }
    shown = whole(status_of(limits=limits)).text
    assert (
        "25 %" in shown
        and "sat, sun" in shown
        and "swarmd config path" in shown
        and "50 GB a day at most" in shown
        and "0.8 s" in shown
    )
    assert not any(word in shown for word in ("GPU's memory", "Priority"))


def test_each_limit_has_a_name_of_words() -> None:
    """No key of the settings file is on the page, and none of a later limit will be."""
    limits = {
        key: value or "x"
        for key, value in flatten(NodeConfig()).items()
        if key in LIMITS or key.startswith(("limits.", "when."))
    } | {
        "model.threads": 2,
        "round.pace": 1.0,
        "limits.priority": "low",
    }
    shown = whole(status_of(limits=limits)).text
    assert len(limits) >= 15 and [key for key in limits if key in shown] == []


def test_unknown_facts_are_not_shown() -> None:
    bare = rendering.parts(Status(), [], now=0.0)
    assert {name for name, html in bare.items() if not html} >= {"shared", "cost", "refused", "judge"}
    assert set(bare) == set(rendering.PARTS)
    paused, full_disk, running = (
        re.findall(">([^<]+)</button>", rendering.parts(status_of(**now), PEERS, now=0.0)["controls"])
        for now in ({"state": "paused", "pauses": [PAUSE]}, {"state": "paused"}, {})
    )
    assert paused == ["Resume", "Invite people", "Stop"]
    # A pause for a full disk is none that anybody can resume from.
    assert running == ["Invite people", "For 30 min", "For 2 h", "Until I resume it", "Stop"]
    assert full_disk == running
    assert rendering.parts(status_of(state="stopping"), PEERS, now=0.0)["controls"] == ""


def test_an_invitation_is_shown_as_text() -> None:
    shown = Tags(rendering.invitation(HOSTILE, [HOSTILE]))
    assert {tag for tag, _ in shown.tags} == {"h2", "p", "pre", "button"}
    assert shown.text.count("onerror=alert(1)") == 2 and "\x1b" not in shown.text


def test_two_answers_to_a_question_are_shown_as_text() -> None:
    html = rendering.comparison(HOSTILE, 1200, (HOSTILE, 1.0), ("one\ntwo", 0.25))
    shown = Tags(html)
    assert {tag for tag, _ in shown.tags} <= {"pre", "table", "thead", "tbody", "tr", "th", "td", "span", "b"}
    assert shown.text.count("onerror=alert(1)") == 2 and "\x1b" not in shown.text and "one\ntwo" in html
    assert "Now, after 1,200 rounds" in shown.text and "right" in shown.text and "reward 0.25" in shown.text


def test_nothing_can_be_tried_without_the_first_weights() -> None:
    for kept, button in ((True, True), (False, False)):
        shown = rendering.parts(status_of(model={"keeps_first": kept}), PEERS, now=0.0)["try"]
        assert ("do-ask-20-questions" in shown) is button and ("train.kl_every" in shown) is not button
    assert "Once the model is loaded." in rendering.parts(status_of(model={}), PEERS, now=0.0)["try"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = rendering.page(rendering.parts(status_of(judge=None), PEERS, now=0.0), "t")
    for source in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert source.startswith("/static/") and (page.STATIC / source.removeprefix("/static/")).is_file()
    assert "<script>" not in html and "style=" not in html and "<style" not in html
    for file in ("page.js", "page.css"):
        assert "://" not in (page.STATIC / file).read_text(encoding="utf-8")


@pytest.mark.net
async def test_events_bring_everything_then_changes_and_end_with_the_reader(
    autojump_clock: trio.testing.MockClock,
) -> None:
    autojump_clock.autojump_threshold = 0.05  # of real sockets
    async with served() as node:
        async with node.watching() as events:
            first = await events.next()
            assert (
                set(first["parts"]) == set(rendering.PARTS)
                and first["curve"]["rewards"] == node.status.rewards
            )
            pauses = [PAUSE | {"cause": "on battery"}]
            node.status = status_of(state="paused", cause="on battery", pauses=pauses)
            changed = await events.next()
            assert (
                set(changed["parts"]) == {"state", "controls"}
                and "on battery" in changed["parts"]["state"]
                and "curve" not in changed
            )
            silent = await events.next()
            # Nothing new: it hears that the node is there
            assert silent["parts"] == {} and "curve" not in silent
            looks = node.looks
            await trio.sleep(10 * page.REFRESH_S)
            assert node.looks >= looks + 9
        await trio.sleep(2 * page.REFRESH_S)
        looks = node.looks
        await trio.sleep(100 * page.REFRESH_S)
        assert node.looks == looks  # no page is open: the node is not asked


@pytest.mark.net
async def test_a_client_that_asks_for_nothing_is_disconnected(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = 0.05
    async with served() as node:
        begun = trio.current_time()
        with trio.fail_after(10 * IO_TIMEOUT_S):
            assert await node.send(b"GET / HTTP/1.1\r\nHost: 127") == b""
        assert trio.current_time() - begun == pytest.approx(IO_TIMEOUT_S, abs=1)


async def test_the_node_is_not_asked_before_somebody_looks() -> None:
    async with served(Node()) as node:
        await trio.testing.wait_all_tasks_blocked()
        assert node.looks == 0


def test_the_total_contribution_is_shown() -> None:
    # A total that is not above this start's figure says nothing more: it is saved later.
    for total in (0, SHARED["used"]):
        usage = USAGE | {"total": USAGE["total"] | {"helped": total}}
        assert "In all, other nodes" not in whole(status_of(shared=SHARED, usage=usage)).text
    helped = USAGE | {"total": USAGE["total"] | {"helped": 1234}}
    shown = rendering.parts(status_of(shared=SHARED, usage=helped), PEERS, now=0.0)["shared"]
    assert "In all, other nodes trained 1,234 times" in shown
