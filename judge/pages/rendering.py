"""The leaderboard as an HTML page without scripts or external resources. Pure; all text is escaped."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from time import gmtime, strftime

from judge.leaderboard import BOARD_PAGE, LISTED_ANSWERS, WINDOW, LeaderboardPage, Standing, by_specialty
from judge.overlap import TRAINING
from judge.pages.drawing import chart, sparkline, whisker
from judge.pages.style import STYLE
from judge.tiers import TIERS
from p2p.identity import nickname

CHARTED = 6  # curves, one for each colour of the style sheet

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def leaderboard(board: LeaderboardPage, curriculum: str, specialties: Sequence[str], new_texts: Mapping[str, float], now: float) -> str:
    """`new_texts`: by specialty, as judge.overlap has it. `now`: seconds since the epoch, for "12 s ago"."""
    body = _board(board.standings, specialties, new_texts, now) if board.standings else _EMPTY
    at = strftime("%H:%M:%S UTC", gmtime(now))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>swarmd judge</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head><body><main>"
        f"<header><h1>swarmd judge</h1><p>{escape(curriculum)} · {_count(board.listed, 'node')} · {_count(board.answers, 'answer')}</p>"
        f'<p class="at">{at} <a href="">Reload</a></p></header>'
        f"{body}{_pages(board)}<footer>{_FOOTER}</footer></main></body></html>"
    )


def _pages(board: LeaderboardPage) -> str:
    links = []
    if board.after:
        links.append(f'<a href="/?after={max(0, board.after - BOARD_PAGE)}">Previous</a>')
    if board.more_after is not None:
        links.append(f'<a href="/?after={board.more_after}">Next</a>')
    few = f"{_count(board.unlisted, 'node')} with fewer than {LISTED_ANSWERS} answers not shown" if board.unlisted else ""
    return f'<nav aria-label="Pages">{" · ".join(filter(None, [*links, few]))}</nav>' if links or few else ""


_EMPTY = (
    f"<p class='empty'>No node has {LISTED_ANSWERS} answers yet. "
    "Join with <code>swarmd join --judge</code> and the address of this page.</p>"
)
_FOOTER = (
    f"<p>The score is pass@1 over a node's last {WINDOW} questions; the bar is Wilson's 95 % interval, and nodes are ranked by its lower "
    "end. Every question is drawn anew, from numbers that no node trains on, asked of one key, answered once, before a deadline, and "
    "scored here. A question not answered in time counts as wrong.</p>"
    f"<p>{escape(TIERS['reported'])}</p><p>{escape(TIERS['verified'])}</p>"
    "<p>Where a specialty has few questions, two numbers give one text. The row “New texts” says which share of the questions has a text "
    f"that is not among {TRAINING:,} training questions of the specialty. The others can be answered from memory.</p>"
    '<p><a href="/v1/leaderboard">JSON</a></p>'
)


def _board(standings: Sequence[Standing], specialties: Sequence[str], new_texts: Mapping[str, float], now: float) -> str:
    charted = [(nickname(s.record.peer), s.record.curve) for s in standings[:CHARTED]]
    picture = chart(charted)
    if picture:
        legend = "".join(f'<li><i class="k{colour}"></i>{escape(name)}</li>' for colour, (name, _) in enumerate(charted))
        picture = f"<section><h2>Cumulative reward over questions</h2>{picture}<ul class='legend'>{legend}</ul></section>"
    rows = "".join(_row(s, now) for s in standings)
    heads = "".join(f'<th scope="col"><span>{escape(name.replace("_", " "))}</span></th>' for name in specialties)
    cells = "".join(_specialties(s, specialties) for s in standings)
    news = "".join(f"<td>{new_texts[name]:.0%}</td>" if name in new_texts else '<td class="none">?</td>' for name in specialties)
    return (
        '<section><table class="board"><thead><tr><th scope="col">#</th><th scope="col">Node</th><th scope="col">Score</th>'
        '<th scope="col">Answers</th><th scope="col">Reward</th><th scope="col">Last seen</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></section>{picture}"
        f'<section><h2>By specialty</h2><div class="scroll"><table class="skills"><thead><tr><th scope="col">Node</th>{heads}</tr></thead>'
        f'<tbody>{cells}<tr><th scope="row">New texts</th>{news}</tr></tbody></table></div></section>'
    )


def _row(standing: Standing, now: float) -> str:
    record, recent = standing.record, standing.record.score
    interval = recent.interval
    seen = strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(record.last_seen))
    name = f'<small class="model">calls itself <bdi>{_text(str(record.said["name"]))}</bdi></small>' if "name" in record.said else ""
    let_pass = f'<small title="questions not answered in time">{record.unanswered} unanswered</small>' if record.unanswered else ""
    return (
        f'<tr><td class="rank">{standing.rank}</td>'
        f'<td class="node">{_node(record.peer)}{name}<small class="model"><bdi>{_text(record.model)}</bdi></small></td>'
        f'<td class="pass"><b>{recent.share:.0%}</b> <small>{interval.low:.0%}–{interval.high:.0%}</small>'
        f"{whisker(recent.share, interval)}</td>"
        f'<td class="number"><b>{record.answered:,}</b>{let_pass}</td>'
        f'<td class="curve"><b>{record.reward:,.0f}</b>{sparkline(record.curve)}</td>'
        f'<td class="seen" title="{seen}">{_ago(now - record.last_seen)}</td></tr>'
    )


def _node(peer: str) -> str:
    """The nickname, and enough of the id to tell apart two peers with the same nickname."""
    id = escape(peer)
    return f'<a href="/v1/peers/{id}" title="{id}"><b>{escape(nickname(peer))}</b></a> <code>…{escape(peer[-6:])}</code>'


def _specialties(standing: Standing, specialties: Sequence[str]) -> str:
    cells, tallies = [], by_specialty(standing.record.recent)
    for name in specialties:
        tally = tallies.get(name)
        if tally is None:
            cells.append('<td class="none">–</td>')
        else:
            cells.append(f'<td class="h{int(tally.share * 10)}">{tally.share:.0%}<small>{tally.right}/{tally.answers}</small></td>')
    return f'<tr><th scope="row">{_node(standing.record.peer)}</th>{"".join(cells)}</tr>'


def _text(text: str) -> str:
    """Text of a peer: escaped, without control characters that reorder or hide other text."""
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
