"""The judge's pages in a real headless Chromium.

The tests cover both widths and colour schemes, updates, hostile texts, and use by keyboard.

With AXE=/path/to/axe.min.js (`npm pack axe-core`), axe's accessibility rules are checked, too.
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

# Texts of a chart that are cut off or overlap. Their boxes include some space above and below the letters.
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
    """A judge in a separate process, and a browser tab."""

    url: str
    tab: Tab
    peers: list[str]

    def open(self, path: str, **look: Any) -> None:
        self.tab.open(self.url + path, **look)

    def complaints(self) -> list[dict[str, Any]]:
        """Return the browser's complaints since the last call, except for missing pages.

        Also check that every request went to the judge.
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


def test_500_hostile_names_and_answers_run_no_script(site: Site) -> None:
    """Each text is shown on a page.

    None of their scripts runs, and nothing is loaded from another host. The content security policy would
    block a script that escaping let through.
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
            # No horizontal scrolling.
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


def test_a_button_copies_a_command(site: Site) -> None:
    site.open("/join")
    site.tab.run(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }, 0"
    )
    site.tab.run("document.querySelector('[data-copy=install]').click()")
    site.tab.until("document.querySelector('[data-copy=install]').textContent === 'Copied'")
    assert site.tab.run("window.copied") == "packaging/install.sh" and site.complaints() == []


def test_a_page_keeps_itself_up_to_date(site: Site) -> None:
    """A new answer appears on a node's open page; sections that the reader opened stay open."""
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


def test_a_page_says_if_the_judge_is_down_and_when_it_was_last_updated(tmp_path: Path) -> None:
    shown = "document.getElementById('fresh').textContent"
    with chromium(tmp_path / "profile") as tab:
        with serving(str(tmp_path / "judge.sqlite3")) as (_, url):
            tab.open(f"{url}/swarm")
            tab.until(f"/^Up to date at .*[0-9]/.test({shown})")
        look = "document.dispatchEvent(new Event('visibilitychange'))"
        tab.until(f"{look} && /^The judge does not answer.*[0-9]/.test({shown})")


def test_search_filters_and_nodes_can_be_reached_by_keyboard(site: Site) -> None:
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
