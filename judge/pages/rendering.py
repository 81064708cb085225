"""The page templates, with all text escaped, and their formats of numbers and times.

Nothing here depends on the reader.
"""

import base64
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from time import gmtime, strftime
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from judge.figures.leaderboard import TIERS
from judge.pages import drawing
from p2p.identity import nickname
from swarmd.terminal import ago

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NAVIGATION = (
    ("/", "Leaderboard"),
    ("/compare", "Swarm or solo"),
    ("/swarm", "Health"),
    ("/join", "Join"),
    ("/about", "About"),
)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


def visible(text: str) -> str:
    """Replace control characters, and characters that reorder or hide text, by U+FFFD."""
    return (
        text
        if text.isprintable()
        else "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    )


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def lines(text: str, most: int) -> Markup:
    """Truncate a text of several lines to `most` characters."""
    kept = "\n".join(visible(line.expandtabs(4)) for line in cut(text, most).split("\n"))
    return Markup("\n") + escape(kept)


@cache
def static(name: str) -> str:
    """Return the URL of a static file with its content hash (cache busting)."""
    digest = blake2b((STATIC / name).read_bytes(), digest_size=5).digest()
    return f"/static/{name}?v={base64.b32encode(digest).decode().lower()}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters |= {
        "cut": cut,
        "lines": lines,
        "percent": lambda share: f"{100 * share:.0f} %",
        "number": "{:,.0f}".format,
        "iso": lambda at: strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(at)),
        "ago": lambda at, now: ago(now - at),
        "nickname": nickname,
        "words": lambda name: name.replace("_", " ").replace(".", ", level "),
    }
    environment.globals |= {
        "static": static,
        "pages": NAVIGATION,
        "here": "",
        "tiers": TIERS,
        "sparkline": drawing.sparkline,
        "whisker": drawing.whisker,
        "whisker_scale": drawing.whisker_scale,
        "pass_chart": drawing.pass_chart,
        "compare_chart": drawing.compare_chart,
    }
    return environment


def render(template: str, context: Mapping[str, Any]) -> str:
    return _environment().get_template(template).render(context)
