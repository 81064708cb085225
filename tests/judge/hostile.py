"""Hostile content for a judge's database, and a check that a page is harmless.

In the database, every text that a stranger can write is hostile.
"""

from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

from judge.store import store as judge_store
from judge.store.store import open_store
from judge.types import Attributes, OpenQuestion, Requester
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import HELD_OUT, TINY_9
from swarmd.types import Completion, Task, TaskRef
from testbed.signing_peer import SigningPeer
from tests.judge.databases import WINDOW

NODES, ANSWERS = 25, 20  # in all: 500 names and 500 answers

TEXTS = [
    "<script>hacked=1</script>",
    "</title><script>hacked=1</script>",
    '"><img src=x onerror=hacked=1>',
    "'><svg onload=hacked=1>",
    "javascript:hacked=1",
    "<iframe srcdoc='<script>parent.hacked=1</script>'>",
    "</bdi></td></tr></table><script>hacked=1</script>",
    "<!--<script>",
    "--><script>hacked=1</script>",
    "]]><script>hacked=1</script>",
    "&lt;script&gt;hacked=1",
    "&#60;script&#62;hacked=1",
    "<a href='data:text/html,x'>",
    "<style>*{display:none}</style>",
    "</style><script>hacked=1</script>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<form action=//evil.example><input>",
    "\u202e\u2066evil",
    "\x00<script>",
    "<scr\x00ipt>hacked=1</scr\x00ipt>",
    "\ufeff<script>hacked=1</script>",
    "＜script＞hacked=1",
    "<details open ontoggle=hacked=1>",
    "<math><mtext></pre><script>hacked=1</script>",
    "${hacked=1}",
    "{{ ''.__class__ }}",
    "{% include '/etc/passwd' %}",
    "<x onclick=hacked=1 style=position:fixed>",
    "\r\nSet-Cookie: a=b",
    "<" * 40,
    "</pre></textarea><script>hacked=1</script>",
    '=HYPERLINK("//evil.example")',
    "' onfocus=hacked=1 autofocus '",
]
ALL = [f"{TEXTS[place % len(TEXTS)]}{place}" for place in range(NODES * ANSWERS)]

TAGS = """
    html head meta title link script body a header div span nav main h1 h2 h3 p b small form label input
    select option button table caption thead tr th tbody td bdi time section article details summary ul li i
    code pre dl dt dd footer img textarea svg g line circle text polyline polygon rect path title
""".split()  # noqa: SIM905
ATTRIBUTES = """
    lang charset name content rel href src defer class id role aria-label aria-current aria-labelledby
    aria-sort aria-hidden method action type value maxlength placeholder selected checked scope datetime title
    tabindex data-live alt height readonly rows for property hidden data-copy
    viewbox preserveaspectratio transform points x y x1 x2 y1 y2 cx cy r width d text-anchor fill stroke
""".split()  # noqa: SIM905


def fill(database: Path, at: float = 1_700_000_000.0) -> None:
    """Fill a database; every text that a stranger can write is a different one of ALL.

    Each node has as many answers as one page shows. at: time of the first question, in seconds since 1970; it
    must be recent, because a judge deletes peers that were silent for a month.
    """
    texts = iter(ALL)
    with closing(open_store(database, f"{TINY_9.name} {TINY_9.digest}")) as store:
        peers = [SigningPeer(node + 1).identity.peer_id for node in range(NODES)]
        for node, peer in enumerate(peers):
            steps = []
            for number in range(ANSWERS):
                text, n = next(texts), HELD_OUT + node * ANSWERS + number
                said = Attributes(
                    number,
                    text[:100],
                    name=text[:40],
                    sharing="swarm",
                    local=4,
                    external=4,
                    strategy=text[:64],
                    version=text[:64],
                )
                task, asker = Task(TaskRef("basic_arithmetic", n), "?", {}), Requester("", record=False)
                question = OpenQuestion(f"{n:032x}", peer, task, 0.0, 60.0, asker, WINDOW, 0, said)
                score = ScoredAnswer.of(float(number % 2))
                steps.append((judge_store.asked, (question, 2 * number, at + number)))
                steps.append(
                    (
                        judge_store.graded,
                        (
                            question,
                            [Completion(text, True)],
                            [score],
                            0.5,
                            2 * number + 1,
                            at + 0.5 + number,
                        ),
                    )
                )
            assert not [outcome for outcome in store.together(steps) if isinstance(outcome, Exception)]


class Parsed(HTMLParser):
    """A page, parsed as by a browser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def faults(self) -> list[str]:
        """Return content that no judge page may have: other tags, attributes, scripts and addresses."""
        found = (
            [f"<{tag}>" for tag in self.tags if tag not in TAGS]
            + [f"{name}={value}" for name, value in self.attributes if name not in ATTRIBUTES]
            + [
                f"{name}={value}"
                for name, value in self.attributes
                if name in ("href", "src", "action") and value[:1] not in ("/", "#")
            ]
            + [
                f"{name}={value}"
                for name, value in self.attributes
                if name in ("href", "src", "action") and value[:2] == "//"
            ]
            + [ascii(letter) for letter in set(self.text) if not letter.isprintable() and letter != "\n"]
        )
        return found + ["scripts"] * (self.tags.count("script") != 1)


def shown(text: str) -> str:
    """Return the text as a page shows it: lines do not end at \r, invisible characters are marked."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)
