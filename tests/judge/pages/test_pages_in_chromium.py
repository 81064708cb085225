"""The judge's pages in a real headless Chromium.

Narrow and wide, light and dark, kept up to date, with hostile texts, by keyboard.

With AXE=/path/to/axe.min.js (`npm pack axe-core`) the accessibility rules of axe are run as well.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from judge.pages.rendering import NAVIGATION
from testbed.chromium import Tab, binary, chromium
from testbed.judge_process import serving
from testbed.signing_peer import SigningPeer, answering, wish
from tests.judge import hostile
from tests.processes import wait_until
from tests.swarmd.daemon.page.test_in_chromium import NOISY

pytestmark = [
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(binary() is None, reason="needs Chromium"),
]

WITHOUT_NODES = [
    *(path for path, _ in NAVIGATION),
    "/?q=nothing",
    "/nodes/nobody",
]

# Figures of a chart that are cut off, or drawn over another. Boxes have room above and below the letters.
CHARTS = """[...document.querySelectorAll('svg.chart')].flatMap((chart) => {
  const texts = [...chart.querySelectorAll('text')];
  const all = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
  const frame = chart.getBoundingClientRect();
  const cut = all.filter(([, r]) =>
    r.left < frame.left || r.right > frame.right + 1 || r.bottom > frame.bottom + 1);
  const over = all.filter(([, a], place) => all.slice(place + 1).some(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4));
  return [...cut, ...over].map(([text]) => text);
})"""


@dataclass
class Site:
    """A judge in a separate process, and a tab."""

    url: str
    tab: Tab
    peers: list[str]

    def open(self, path: str, **look: Any) -> None:
        self.tab.open(self.url + path, **look)

    def complaints(self) -> list[dict[str, Any]]:
        """The browser's complaints since the last call, except for missing pages.

        Every request went to the judge.
        """
        events, self.tab.events = self.tab.events, []
        asked = [
            event["params"]["request"]["url"]
            for event in events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert [address for address in asked if not address.startswith(self.url + "/")] == []
        noise = [event["params"] for event in events if event.get("method") in NOISY]
        return [told for told in noise if "404" not in told.get("entry", {}).get("text", "")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    hostile.fill(folder / "judge.sqlite3", time.time() - 60)
    with serving(str(folder / "judge.sqlite3")) as (_, url), chromium(folder / "profile") as tab:
        rows = httpx2.get(f"{url}/v1/leaderboard").json()["peers"]
        yield Site(url, tab, [row["peer"] for row in rows])


def evaluation(site: Site) -> str:
    return str(httpx2.get(f"{site.url}/v1/peers/{site.peers[0]}").json()["evaluations"][0]["evaluation"])


def post(http: httpx2.Client, peer: SigningPeer, target: str, document: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(target, **peer.signed(target, document))
    assert answer.is_success, answer.text
    return dict(answer.json())


def test_500_hostile_names_and_answers_run_nothing(site: Site) -> None:
    """Each is seen on a page.

    None of their scripts runs, nothing is fetched from elsewhere; the policy would stop anything that
    escaping let through.
    """
    seen = 0
    for path in [
        "/",
        *(f"/nodes/{peer}" for peer in site.peers),
        "/swarm",
        f"/evaluations/{evaluation(site)}",
    ]:
        site.open(path)
        foreign = "document.querySelectorAll('iframe, base, form[action^=\"//\"]').length"
        assert site.tab.run(f"[typeof hacked, document.scripts.length, {foreign}]") == [
            "undefined",
            1,
            0,
        ], path
        seen += site.tab.run("document.querySelectorAll('.answer pre:not(.question)').length")
    assert seen == len(hostile.ALL) + 1 and site.complaints() == []
    site.tab.run("document.body.insertAdjacentHTML('beforeend', '<img src=/none onerror=hacked=1>'), 0")
    wait_until(
        lambda: (
            site.tab.run("typeof hacked") == "undefined"
            and "Content Security Policy" in str(site.complaints())
        )
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_each_page_is_readable_in_both_schemes(site: Site, width: int) -> None:
    axe = Path(os.environ["AXE"]).read_text(encoding="utf-8") if "AXE" in os.environ else None
    for path in [*WITHOUT_NODES, f"/nodes/{site.peers[0]}", f"/evaluations/{evaluation(site)}"]:
        for dark in (False, True):
            site.open(path, width=width, height=844, dark=dark)
            # Nothing to scroll sideways
            assert site.tab.run("document.documentElement.scrollWidth") <= width, path
            assert site.tab.run(CHARTS) == [], path
            assert (
                site.tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(17, 17, 19)"
            ) == dark
            site.tab.run(
                "document.querySelectorAll('details').forEach((details) => { details.open = true; })"
            )
            if axe is not None:
                site.tab.run(axe + ";0")
                passed, found = site.tab.run(
                    "axe.run().then(r => [r.passes.length, r.violations.map(v => [v.impact, v.id,"
                    " v.nodes[0].html])])"
                )
                assert passed > 10 and found == [], path
    assert site.complaints() == []


def test_commands_are_copied_by_a_button(site: Site) -> None:
    site.open("/join")
    site.tab.run(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }, 0"
    )
    site.tab.run("document.querySelector('[data-copy=install]').click()")
    site.tab.until("document.querySelector('[data-copy=install]').textContent === 'Copied'")
    assert site.tab.run("window.copied") == "packaging/install.sh" and site.complaints() == []


def test_a_page_keeps_itself_up_to_date(site: Site) -> None:
    """An answer that comes while a node's page is open appears; parts that the reader opened stay open."""
    peer = SigningPeer(1, site.url)
    assert peer.identity.peer_id in site.peers
    peer.sequence += 10**6
    site.open(f"/nodes/{peer.identity.peer_id}")
    site.tab.run(
        "document.getElementById('passes').open = true; document.querySelector('#passes summary').focus(); 0"
    )
    with httpx2.Client(base_url=site.url) as http:
        asked = post(http, peer, "/v1/evaluations", wish(99))["evaluations"][0]
        post(http, peer, f"/v1/evaluations/{asked['evaluation']}/answers", answering("<answer>late</answer>"))
    look = "document.dispatchEvent(new Event('visibilitychange'))"
    site.tab.until(f"{look} && document.querySelector('#a21')")
    assert (
        site.tab.run("document.querySelector('#answers pre:not(.question)').textContent")
        == "<answer>late</answer>"
    )
    assert site.tab.run("[document.getElementById('passes').open, document.activeElement.tagName]") == [
        True,
        "SUMMARY",
    ]
    assert site.complaints() == []


def test_a_page_says_when_it_was_last_up_to_date_and_that_the_judge_is_gone(tmp_path: Path) -> None:
    shown = "document.getElementById('fresh').textContent"
    with chromium(tmp_path / "profile") as tab:
        with serving(str(tmp_path / "judge.sqlite3")) as (_, url):
            tab.open(f"{url}/swarm")
            tab.until(f"/^Up to date at .*[0-9]/.test({shown})")
        look = "document.dispatchEvent(new Event('visibilitychange'))"
        tab.until(f"{look} && /^The judge does not answer.*[0-9]/.test({shown})")


def test_the_keyboard_reaches_search_filters_and_nodes(site: Site) -> None:
    site.open("/")
    reached = []
    for _ in range(26):
        site.tab.press("Tab")
        reached.append(
            site.tab.run("document.activeElement.name || document.activeElement.getAttribute('href') || ''")
        )
        assert site.tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached[0] == "#content" and {"q", "model", "tier", "sort", "active", "/?sort=score"} <= set(
        reached
    )
    assert f"/nodes/{site.peers[0]}" in reached
    site.tab.run(
        "document.querySelector('[name=q]').focus(); document.querySelector('[name=q]').value = '<script>'; 0"
    )
    site.tab.press("Enter")
    site.tab.until("location.search.includes('q=%3Cscript%3E') && document.readyState === 'complete'")
    assert 0 < site.tab.run("document.querySelectorAll('.board tbody tr').length") < len(site.peers)
    assert site.complaints() == []
