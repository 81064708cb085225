"""The page in a real headless Chromium: narrow and wide, light and dark, by keyboard, with hostile texts.

With AXE=/path/to/axe.min.js (`npm pack axe-core`) the accessibility rules of axe are run as well.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import convert, to_builtins
from msgspec.structs import replace

from swarmd.config.invitation import Invitation, write_invitation
from swarmd.daemon.page.page import REFRESH_S
from swarmd.state.status import KnownPeer, Status
from testbed.chromium import Tab, binary, chromium
from tests.processes import wait_until
from tests.swarmd.cli.test_view import LAST, PEER, status_of
from tests.swarmd.daemon.page.served import PEERS, Node, served
from tests.swarmd.daemon.page.test_page import HOSTILE, PAUSE, SHARED, USAGE, hostile, poisoned

pytestmark = [
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(binary() is None, reason="needs Chromium"),
]

NOISY = (
    "Runtime.exceptionThrown",
    "Log.entryAdded",
    "Runtime.consoleAPICalled",
    "Page.javascriptDialogOpening",
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def open_page(tab: Tab, node: Node, **look: Any) -> None:
    """Open the page, and wait until its curve is drawn."""
    tab.open(node.address, **look)
    tab.until("document.querySelector('#chart canvas')")


async def in_browser(node: Node, tab: Tab, look: Callable[[Tab], None]) -> list[dict[str, Any]]:
    """Run `look` on a tab while the page is served; return the browser's complaints."""

    def browse() -> list[dict[str, Any]]:
        try:
            look(tab)
            asked = [
                event["params"]["request"]["url"]
                for event in tab.events
                if event.get("method") == "Network.requestWillBeSent"
            ]
            # And nothing else, anywhere
            assert asked and all(address.startswith(node.origin + "/") for address in asked)
            return [event for event in tab.events if event.get("method") in NOISY]
        finally:  # while the page is served, or it would miss its node in the next test
            tab.open("about:blank")
            tab.events = []

    async with served(node):
        return await trio.to_thread.run_sync(browse)


def changed(status: Status, **changes: Any) -> Status:
    return convert(to_builtins(status) | changes, Status)


def full() -> Node:
    trouble, external = {"cause": "c", "remedy": "r"}, [0] * 60 + [4] * 60
    more = {
        "pauses": [PAUSE] * 2,
        "away": [PAUSE],
        "limits": {"limits.cpu": "25 %"},
    }
    return Node(
        status_of(
            advice={"bad signature": "update"},
            usage=USAGE,
            shared=SHARED,
            trouble=trouble,
            external=external,
            **more,
        )
    )


async def test_the_page_is_readable_at_every_width_in_both_schemes(tab: Tab) -> None:
    node = full()
    axe = Path(os.environ["AXE"]).read_text(encoding="utf-8") if "AXE" in os.environ else None

    def look(tab: Tab) -> None:
        for width in (320, 390, 1280):
            for dark in (False, True):
                open_page(tab, node, width=width, height=844, dark=dark)
                # Nothing to scroll sideways
                assert tab.run("document.documentElement.scrollWidth <= innerWidth")
                paper = tab.run("getComputedStyle(document.body).backgroundColor")
                assert (paper == "rgb(17, 17, 19)") == dark
                if axe is not None:
                    tab.run(axe + ";0")
                    passed, found = tab.run(
                        "axe.run().then(r => [r.passes.length, r.violations.map(v => [v.impact, v.id])])"
                    )
                    assert passed > 20 and found == []

    assert await in_browser(node, tab, look) == []


async def test_the_keyboard_reaches_every_button_and_keeps_its_place(tab: Tab) -> None:
    node = Node()

    def look(tab: Tab) -> None:
        open_page(tab, node)
        tab.run("document.querySelector('.menu summary').click()")
        buttons = tab.run("[...document.querySelectorAll('button, .menu summary')].map(b => b.id)")
        reached = []
        for _ in buttons:
            tab.press("Tab")
            reached.append(tab.run("document.activeElement.id"))
            assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert reached == buttons
        tab.run("document.getElementById('do-for-30-min').focus()")
        tab.press("Enter")
        tab.until("document.getElementById('do-for-30-min').ariaBusy === 'false'")
        assert not tab.run("document.querySelector('.menu').open")
        pauses = [PAUSE | {"cause": "you paused it"}]
        node.status = changed(node.status, state="paused", cause="you paused it", pauses=pauses)
        tab.until("document.getElementById('do-resume')")
        # The Resume button takes the place and the focus of the Pause button.
        tab.until("document.activeElement.id === 'do-resume'")
        assert "paused" in tab.run("document.title") and "you paused it" in tab.run(
            "document.getElementById('state').textContent"
        )

    assert await in_browser(node, tab, look) == []
    assert [name for name, _ in node.told] == ["pause"]


async def test_questions_are_answered_twice_and_counted(tab: Tab) -> None:
    node = Node(status_of(model={"model": "tiny", "keeps_first": True}))

    def look(tab: Tab) -> None:
        for width in (390, 1280):
            tab.open(node.address, width=width, height=844)
            tab.until("document.getElementById('do-ask-20-questions')")
            tab.run("document.getElementById('do-ask-20-questions').click()")
            tab.until("document.querySelector('#compared table')")
            shown = tab.run("document.getElementById('compared').innerText")
            assert "12 + 30" in shown and shown.index("42") < shown.index("7</answer>")
            tally = "document.getElementById('tally').textContent"
            tab.until(f"{tally} === 'Of 20 questions: 20 right now, 0 at first.'")
            tab.until("document.getElementById('do-ask-20-questions').textContent === 'Ask 20 questions'")
            assert tab.run("document.documentElement.scrollWidth <= innerWidth")

    assert await in_browser(node, tab, look) == []


async def test_stop_is_asked_again_and_a_hidden_page_costs_nothing(tab: Tab) -> None:
    node = Node()

    def nobody_looks() -> bool:
        looks = node.looks
        time.sleep(2 * REFRESH_S)
        return node.looks == looks

    def look(tab: Tab) -> None:
        open_page(tab, node)
        for sure in ("false", "true"):
            tab.run(f"window.confirm = (text) => (window.asked = text, {sure})")
            tab.run("document.getElementById('do-stop').click()")
            assert "swarmd join" in tab.run("window.asked") and (node.told != []) <= (sure == "true")
        tab.until("document.getElementById('do-stop').ariaBusy === 'false'")
        hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}})"
        hide += ", document.dispatchEvent(new Event('visibilitychange'))"
        tab.run(hide.format("true"))
        wait_until(nobody_looks)
        node.status = changed(node.status, state="stopping")
        tab.run(hide.format("false"))
        # A page that is shown again has the changes of its hidden time.
        tab.until("!document.getElementById('do-stop')")

    assert await in_browser(node, tab, look) == []
    assert [name for name, _ in node.told] == ["stop"]


async def test_an_invitation_is_copied(tab: Tab) -> None:
    at = [f"/ip4/203.0.113.{place}/tcp/4001/p2p/{PEER}" for place in range(3)]
    node = Node(
        invitation=write_invitation(
            Invitation("main", "tiny-9", "0123456789abcdef", "tiny", tuple(at), "https://judge.example")
        )
    )
    command = f"swarmd join '{node.invitation}'"

    def look(tab: Tab) -> None:
        for width in (390, 1280):
            open_page(tab, node, width=width, height=900)
            # Not before it is asked for
            assert tab.run("document.getElementById('invitation').getClientRects().length") == 0
            tab.run("document.getElementById('do-invite-people').click()")
            tab.until("document.querySelector('[data-copy]')")
            tab.run(
                "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve();"
                " }, 0"
            )
            tab.run("document.querySelector('[data-copy]').click()")
            assert tab.run("window.copied") == command

    assert await in_browser(node, tab, look) == []


async def test_a_line_about_a_round_of_another_length_moves_nothing(tab: Tab) -> None:
    node = full()
    short = replace(LAST, seconds={"generate": 1.0}, rejected={})
    watch = (
        "window.shifts = [], window.watch = new PerformanceObserver((l) => shifts.push(...l.getEntries()))"
    )
    watch += ", watch.observe({type: 'layout-shift'})"
    drawn = "new Promise((draw) => requestAnimationFrame(() => requestAnimationFrame(draw)))"

    def look(tab: Tab) -> None:
        for width in (390, 1000):
            node.status = replace(node.status, last=LAST)
            open_page(tab, node, width=width)
            tab.run(drawn)
            tab.run(watch)
            node.status = replace(node.status, last=short)
            tab.until("document.getElementById('round').textContent.includes('1.0 s (generate 1.0)')")
            tab.run(drawn)
            assert tab.run("shifts.length + watch.takeRecords().length") == 0

    assert await in_browser(node, tab, look) == []


async def test_an_empty_chart_says_when_it_begins(tab: Tab) -> None:
    node = Node(status_of(rewards=[0.5], external=[0], round=1))

    def look(tab: Tab) -> None:
        tab.open(node.address)
        chart = "document.getElementById('chart').textContent"
        tab.until(f"{chart} === 'The curve begins after two rounds.'")
        node.status = changed(node.status, rewards=[0.5] * 2, external=[0] * 2, round=2)
        tab.until("document.querySelector('#chart canvas')")
        assert "begins" not in tab.run(chart)

    assert await in_browser(node, tab, look) == []


@pytest.mark.parametrize(
    ("external", "names"), [([0] * 120, ["Alone"]), ([4] * 120, ["With answers of other nodes"])]
)
async def test_the_legend_names_the_drawn_lines(tab: Tab, external: list[int], names: list[str]) -> None:
    node = Node(status_of(external=external))

    def look(tab: Tab) -> None:
        open_page(tab, node)
        legend = tab.run(
            "[...document.querySelectorAll('.u-series')].map(e => e.textContent).filter(Boolean)"
        )
        assert legend == ["Mean of 10 rounds", *names]

    assert await in_browser(node, tab, look) == []


async def test_hostile_texts_run_nothing(tab: Tab) -> None:
    node = full()
    node.status = hostile(node.status)
    node.peers = convert(poisoned(to_builtins(PEERS)), list[KnownPeer])

    def look(tab: Tab) -> None:
        open_page(tab, node)
        node.status = changed(node.status, cause=HOSTILE * 2)
        tab.until("document.getElementById('state').textContent.split('onerror').length > 3")
        assert tab.run("document.images.length + document.scripts.length") == 2  # our two scripts
        # Would escaping fail:
        tab.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=document.title=1>'), 0")
        wait_until(lambda: tab.run("document.images[0].complete") and sources(tab.events) == blocked)
        assert tab.run("document.title") != "1"  # the policy holds

    blocked = ["network", "security"]  # no x there; and the handler was blocked
    complaints = await in_browser(node, tab, look)
    assert sources(complaints) == blocked and len(complaints) == len(blocked)


def sources(events: list[dict[str, Any]]) -> list[str]:
    """Return the sources of the browser's log entries, sorted.

    The order of the entries is not fixed: several processes write them.
    """
    return sorted(
        event["params"]["entry"]["source"] for event in events if event.get("method") == "Log.entryAdded"
    )


async def test_the_page_says_when_it_was_last_up_to_date(tmp_path: Path) -> None:
    """In a separate browser, which complains of the node that is gone."""
    node = Node()
    shown = "document.getElementById('fresh').textContent"
    with chromium(tmp_path) as tab:
        async with served(node):
            await trio.to_thread.run_sync(tab.open, node.address)
            await trio.to_thread.run_sync(tab.until, f"/^Up to date at .*[0-9]/.test({shown})")
        await trio.to_thread.run_sync(tab.until, f"{shown}.startsWith('The node does not answer.')")
        assert "Last up to date at" in tab.run(shown) and tab.run("document.title").startswith("no answer ·")
