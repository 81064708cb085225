"""The node's page as HTML, in parts; a changed part is sent again.

Pure; all text from files and peers is escaped. A part without facts is empty, and its section is hidden.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

import msgspec

from swarmd.daemon.diagnosis.isolation import FIRST_HERE
from swarmd.daemon.diagnosis.learning import FROZEN
from swarmd.daemon.local_api.status_words import (
    COMES_BACK,
    HARMLESS,
    NO_FIRST,
    SMOOTH_ROUNDS,
    answers_words,
    exchange_words,
    helped_words,
    judge_words,
    learnt_from_words,
    learnt_words,
    levels_words,
    mean_reward_words,
    model_words,
    other_pauses,
    pause_words,
    peers_words,
    progress_words,
    recent,
    round_words,
    sentence,
    shared_words,
    time_words,
    workers_words,
)
from swarmd.state.status import JudgeStatus, KnownPeer, NodeState, SharedRollouts, Status, UsageReport
from swarmd.terminal import ago, bytes_words, duration_words, printable

PEERS_SHOWN = 40
PARTS = ("state", "controls", "round", "try", "shared", "peers", "judge", "refused", "cost", "limits", "node")
# The entries of the Pause menu, with the arguments for the control API; "for" is in seconds.
_PAUSES: Mapping[str, Mapping[str, Any]] = {
    "For 30 min": {"for": 1800},
    "For 2 h": {"for": 7200},
    "Until I resume it": {},
}
# Number of questions that one use of "Try it" asks.
TRIED = 20
# Row title, field of the usage, its words.
_COSTS: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("CPU time", "cpu_seconds", duration_words),
    ("Energy, estimated", "energy_wh", lambda wh: f"{wh / 1000:,.2f} kWh"),
    ("Sent", "bytes_up", bytes_words),
    ("Received", "bytes_down", bytes_words),
    ("Written to disk", "bytes_written", bytes_words),
)
# Label and value format of each limit, by its key in the configuration.
_LIMIT_LABELS: Mapping[str, tuple[str, str]] = {
    "limits.cpu": ("Share of the CPU", "{}"),
    "limits.priority": ("Priority", "{}"),
    "limits.gpu_memory": ("Share of the GPU's memory", "{}"),
    "limits.up": ("Sent, a second", "{}"),
    "limits.down": ("Received, a second", "{}"),
    "limits.month": ("Bytes in a month", "{}"),
    "limits.state": ("Size of its folder", "{}"),
    "model.threads": ("Threads", "{}"),
    "round.pace": ("A round takes at least", "{:g} s"),
    "checkpoint.gigabytes_a_day": ("Written to disk for saving", "{:g} GB a day at most"),
    "when.battery": ("On battery", "{}"),
    "when.metered": ("On a metered network", "{}"),
    "when.load": ("Other programs use the CPU", "pause above {}"),
    "when.gpu": ("Other programs use the GPU", "pause above {}"),
    "when.hours": ("Hours", "{}"),
}
_LIMIT_VALUES: Mapping[tuple[str, Any], str] = {
    ("when.battery", "train"): "go on training",
    ("when.metered", "alone"): "leave the swarm, and train alone",
    ("when.metered", "share"): "go on sharing",
}


def page(parts: Mapping[str, str], title: str) -> str:
    """Render the whole page with all its parts."""
    section = '<section id="{}" aria-live="off">{}</section>'.format
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title><meta'
        ' name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme"'
        ' content="light dark"><link rel="icon" href="/static/icon.svg"><link rel="stylesheet"'
        ' href="/static/uPlot.min.css"><link rel="stylesheet" href="/static/page.css"><script defer'
        ' src="/static/uPlot.iife.min.js"></script><script defer'
        ' src="/static/page.js"></script></head><body><main><header'
        f' id="state">{parts["state"]}</header><p id="news" role="status"></p><p id="fresh"><span'
        ' role="status"></span> <time></time></p><p id="said" role="status"></p><div'
        f' id="controls">{parts["controls"]}</div><section id="invitation"'
        ' aria-live="polite"></section><section><h2>Reward of each round (1: every answer is right)</h2>'
        f'<div id="round">{parts["round"]}</div>'
        '<div id="chart" role="img" aria-label="Reward by round"></div></section>'
        f'<section><div id="try">{parts["try"]}</div>'
        '<p id="tally" role="status"></p><div id="compared"></div></section>'
        + "".join(section(name, parts[name]) for name in PARTS[4:])
        + "</main></body></html>"
    )


def title_of(status: Status) -> str:
    """Return the title of the browser's tab, as plain text."""
    return printable(f"{status.state} · {status.name} · swarmd")


def parts(status: Status, peers: Sequence[KnownPeer], now: float) -> dict[str, str]:
    """Render the parts named in PARTS. now: seconds since the epoch."""
    return {
        "state": _state(status),
        "controls": _controls(status),
        "round": _round(status),
        "try": _try(status.model.keeps_first),
        "shared": _shared(status.shared, status.usage.total.helped if status.usage else 0),
        "cost": _cost(status.usage) if status.usage else "",
        "peers": _peers(status, peers, now),
        "refused": _refused(status),
        "judge": _judge(status.judge, status.peer_id) if status.judge else "",
        "limits": _limits(status.limits),
        "node": _node(status, now),
    }


class RewardCurve(msgspec.Struct):
    """The chart's data: the last round, and each round's reward and number of other nodes' rollouts."""

    last: int
    rewards: list[float | None]
    external: list[int]


def curve(status: Status) -> RewardCurve:
    """Return the chart's data."""
    rewards = status.rewards
    return RewardCurve(status.round, rewards, status.external[-len(rewards) :])


def _state(status: Status) -> str:
    model, learns = status.model.model.rpartition("/")[2], status.learning != FROZEN
    early = learns and len(status.rewards) < 2 * SMOOTH_ROUNDS
    cause, founds = sentence(status), _founds(status)
    notes = [*other_pauses(status), *(pause_words(each, COMES_BACK) for each in status.away)]
    return (
        f"<h1>{_text(status.name)} <small>in the swarm {_text(status.swarm.name)}</small></h1>"
        + f'<p class="state {status.state}"><b>{status.state}</b>{": " * bool(cause)}{_marked(cause)}</p>'
        + _paragraph(_headline(status), "headline")
        + _paragraph(f"Whether it learns is shown after {2 * SMOOTH_ROUNDS} rounds." * early)
        + _paragraph(helped_words(status.shared), "helped")
        + "".join(map(_paragraph, notes))
        + _trouble(sentence(status.learning), calm=not learns)
        + _trouble(
            sentence(status.trouble),
            _invite_button(primary=True) if founds and _runs(status) else "",
            calm=founds,
        )
        + _paragraph(
            f"This machine trains its own copy of the language model {model} on questions with known answers,"
            " and learns from the answers of the swarm's other machines."
            if model and learns
            else "",
            "soft",
        )
    )


def _headline(status: Status) -> str:
    """Compare the chart's first rounds with its last ones; "" if there are too few rounds."""
    rewards = status.rewards
    first, last = recent(rewards[:SMOOTH_ROUNDS]), recent(rewards)
    if len(rewards) < 2 * SMOOTH_ROUNDS or not first or not last:
        return ""
    then = "at first" if status.round == len(rewards) else f"{len(rewards)} rounds ago"
    return f"{100 * fmean(first):.0f} % right {then}, {100 * fmean(last):.0f} % now"


def _alone(status: Status) -> bool:
    return not status.peers and not status.connected


def _founds(status: Status) -> bool:
    # The node is alone because it is the first of its swarm.
    return _alone(status) and sentence(status.trouble).startswith(FIRST_HERE)


def _runs(status: Status) -> bool:
    return status.state not in (NodeState.STOPPING, NodeState.STOPPED)


def _trouble(words: str, button: str = "", *, calm: bool = False) -> str:
    return f'<div class="trouble{" calm" * calm}">{_paragraph(words)}{button}</div>' if words else ""


def _controls(status: Status) -> str:
    if not _runs(status):
        return ""
    menu = "".join(_button(name, "pause", arguments) for name, arguments in _PAUSES.items())
    pauses = f'<details class="menu"><summary>Pause</summary><div>{menu}</div></details>'
    paused = bool(status.pauses)
    return (
        (_button("Resume", "resume", kind="primary") if paused else "")
        + (
            ""
            if _founds(status)
            else _invite_button(primary=_alone(status) and not paused and not status.trouble)
        )
        + ("" if paused else pauses)
        + _button("Stop", "stop", kind="quiet")
    )


def _invite_button(*, primary: bool) -> str:
    return _button("Invite people", "invitation", kind="primary" if primary else "")


def _button(name: str, operation: str, arguments: Mapping[str, Any] = {}, kind: str = "") -> str:
    request = escape(json.dumps({"operation": operation, "arguments": arguments}))
    more = (
        ' data-ask="Stop the node? It finishes its round, saves and ends. Start it again with: swarmd join"'
        if operation == "stop"
        else ""
    )
    more += f' data-times="{TRIED}"' if operation == "compare" else ""
    return (
        f'<button type="button" class="{kind}" id="do-{re.sub("[^a-z0-9]", "-", name.lower())}"'
        f' data-request="{request}"{more}>'
        f"{_text(name)}</button>"
    )


def _round(status: Status) -> str:
    last, external = status.last, status.external
    return _facts(
        [
            ("Round", round_words(status)),
            ("Now", progress_words(status.progress, status.left)),
            ("Reward", mean_reward_words(status)),
            ("Answers", answers_words(last.answers) if last else ""),
            ("Last round", learnt_from_words(last) if last else ""),
            ("Levels", levels_words(last.levels) if last else ""),
            (
                "Received",
                f"{sum(map(bool, external)):,} of {len(external):,} rounds had answers of other nodes"
                if any(external)
                else "",
            ),
            ("Workers", workers_words(last.workers) if last else ""),
            # This is last: the style sheet keeps room for its longest form, so that nothing below moves.
            ("Time", time_words(last.seconds) if last else ""),
        ]
    )


def _try(keeps_first: bool | None) -> str:
    asks = _paragraph(
        "Asks the model questions that it trains on, as it is now and as it was at first; each waits for the"
        " end of a round. To talk to it: `swarmd chat`"
    ) + _button(f"Ask {TRIED} questions", "compare")
    absent = _paragraph("Once the model is loaded." if keeps_first is None else NO_FIRST)
    return _card("Try it", asks if keeps_first else absent)


def comparison(question: str, round_number: int, now: tuple[str, float], first: tuple[str, float]) -> str:
    """Render a question with both answers to it side by side, each with its reward."""

    def cell(answer: tuple[str, float]) -> str:
        text, reward = answer
        words = {0.0: "wrong", 1.0: "right"}.get(reward, f"reward {reward:.2f}")
        return f"{_pre(text)}<b>{words}</b>"

    heads = (f"Now, after {round_number:,} rounds", "At first")
    return _pre(question) + _table(heads, [(cell(now), cell(first))])


def _pre(text: str) -> str:
    return '<pre tabindex="0">' + "\n".join(map(_text, text.split("\n"))) + "</pre>"


def invitation(text: str, notes: Iterable[str]) -> str:
    """Render the invitation: the command for other people, with a button that copies it."""
    command = f"swarmd join '{text}'"
    shown = (
        f'<pre id="command" tabindex="0">{_text(command)}</pre><button type="button"'
        ' data-copy="command">Copy</button>'
    )
    return _card(
        "Invite people",
        _paragraph("Anyone may run this on a machine of their own to join the swarm. It holds no secret.")
        + shown
        + "".join(map(_paragraph, notes)),
    )


def _shared(shared: SharedRollouts, helped: int) -> str:
    in_all = f"In all, other nodes trained {helped:,} times on its answers." if helped > shared.used else ""
    said = _paragraph(shared_words(shared)) + _paragraph(in_all)
    return _card("Shared with other nodes", said) if said else ""


def _cost(usage: UsageReport) -> str:
    """Render the node's usage in each period, without figures that this machine cannot measure."""
    periods = (usage.today, usage.month, usage.total)
    rows = [
        [title, *("–" if (value := getattr(row, key)) is None else words(value) for row in periods)]
        for title, key, words in _COSTS
        if any(getattr(row, key) is not None for row in periods)
    ]
    return _card("Cost", _table(("Used", "Today", "This month", "In all"), rows))


def _peers(status: Status, peers: Sequence[KnownPeer], now: float) -> str:
    shown, left_out = peers[:PEERS_SHOWN], len(peers) - PEERS_SHOWN
    table = _table(
        ("Peer", "Where", "Last heard", "Messages", "Refused", "Learnt from", "Round", "Model"),
        (
            (
                f"<b>{_text(peer.name)}</b> <code>…{_text(peer.id[-6:])}</code>",
                _text(_where(peer)),
                _text(ago(now - peer.heard_at) if peer.heard_at else "not yet"),
                _text(peer.frames),
                _text(peer.rejected),
                _text(learnt_words(peer) or "–"),
                _text("–" if peer.round is None else peer.round),
                f"<bdi>{_text(peer.model or '–')}</bdi>",
            )
            for peer in shown
        ),
    )
    more = _paragraph(f"and {left_out} more: `swarmd peers`") if left_out > 0 else ""
    return _card(
        "Other nodes",
        (table + more if shown else _paragraph("None yet: the node trains alone until it meets some."))
        + _paragraph(peers_words(status))
        + _details("Traffic", _facts([("Answers moved", exchange_words(status.exchange))])),
    )


def _where(peer: KnownPeer) -> str:
    return (
        "through other nodes" if peer.direction == "relayed" else (peer.address or "–").partition("/p2p/")[0]
    )


def _judge(judge: JudgeStatus, peer_id: str) -> str:
    address = _text(f"{judge.url.rstrip('/')}/nodes/{peer_id}")
    link = (
        f'<p class="more"><a href="{address}" target="_blank" rel="noreferrer">Answers, at the judge</a></p>'
    )
    # The address may come from an invitation. A node without a score may be unknown there.
    linked = judge.score is not None and judge.url.startswith(("http://", "https://"))
    return _card("Judge", _paragraph(judge_words(judge)) + link * linked)


def _refused(status: Status) -> str:
    rows = sorted(
        ((why, count) for why, count in status.rejected.items() if count and why not in HARMLESS),
        key=lambda item: (-item[1], item[0]),
    )
    cells = (
        (f"{count:,}", _text(reason), _text(status.advice.get(reason, "nothing to do")))
        for reason, count in rows
    )
    return _card("Refused", _table(("Count", "Why", "What to do"), cells)) if rows else ""


def _limits(limits: Mapping[str, Any]) -> str:
    """Render the limits that are set."""
    on = [
        (_LIMIT_LABELS.get(key, (key,))[0], _limit(key, value))
        for key, value in limits.items()
        # Show these two even if they are off, because owners of a machine ask about them first.
        if (value and value not in ("100 %", "normal")) or key in ("when.battery", "when.hours")
    ]
    where = _paragraph(
        "Limits, and when the node pauses, are set in the file that `swarmd config path` names. They"
        " hold from the next join."
    )
    return _card("Limits", _facts(on) + where) if limits else ""


def _limit(key: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "always"
    return _LIMIT_VALUES.get((key, value)) or _LIMIT_LABELS.get(key, ("", "{}"))[1].format(value)


def _node(status: Status, now: float) -> str:
    started, restarts = status.started_at, status.trainer.restarts
    facts = [
        ("Model", model_words(status.model)),
        ("Started", ago(now - started) if started else ""),
        ("Restarts", str(restarts) if restarts else ""),
    ]
    return _card(
        "This node",
        _facts(facts)
        + _details(
            "Details",
            _facts(
                [
                    ("Peer id", status.peer_id),
                    ("Swarm's key", status.swarm.topic),
                    ("Network", status.engine),
                    ("Addresses", " ".join(status.addresses)),
                    ("Folder", status.state_dir),
                ]
            ),
        ),
    )


def _card(title: str, body: str) -> str:
    return f"<h2>{_text(title)}</h2>{body}"


def _details(title: str, body: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{body}</details>" if body else ""


def _facts(facts: Iterable[tuple[str, object]]) -> str:
    rows = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_marked(value)}</dd></div>" for name, value in facts if value
    )
    return f"<dl>{rows}</dl>" if rows else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table of HTML cells. On a narrow screen, each cell shows its column's name."""
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{_text(name)}"><span>{cell}</span></td>'
            for name, cell in zip(heads, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{_marked(text)}</p>' if text else ""


def _marked(text: object) -> str:
    """Escape text for HTML, and mark commands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", _text(text))


def _text(value: object) -> str:
    """Escape text for HTML, between tags or in quotes; make control and direction characters visible."""
    return escape(printable(str(value if value is not None else "")))
