"""Views of a running node for people and programs, on wide and narrow terminals, also without a reader."""

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import convert, to_builtins
from msgspec.structs import replace
from rich.console import Console

from swarmd.cli import status
from swarmd.cli.views.live import LivePage, LiveView, area
from swarmd.cli.views.plain import JsonView, LogView, PlainView
from swarmd.daemon.local_api.status_words import (
    answer_lines,
    peer_lines,
    progress_words,
    round_sentence,
    state_sentence,
    status_lines,
    workers_words,
)
from swarmd.state.status import KnownPeer, NodeState, StageProgress, Status
from swarmd.terminal import tell
from swarmd.types import AnswerFigures, RoundLine, ShownRollout, WorkerFigures
from tests.doubles import TIMEOUT_S, Clock
from tests.processes import killed_after
from tests.terminals import rest_of, terminal

PEER = "12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F"
_LAST = {
    "round": 120,
    "time": 1_700_000_000.0,
    "seconds": {
        "generate": 2.13,
        "score": 0.12,
        "share": 0.0,
        "collect": 0.0,
        "train": 0.95,
        "checkpoint": 0.2,
    },
    "tokens": {"generated": 512, "trained": 900},
    "local": 4,
    "external": 3,
    "pool": {"size": 17, "fresh": 5, "external_share": 1.0},
    "zero_advantage_dropped": 2,
    "rejected": {"bad signature": 3},
    "reward_mean": 0.3125,
    "reward_sum": 10.0,
    "loss": 0.0123,
    "grad_norm": None,
    "entropy": 1.25,
    "staleness": {"mean": 0.5, "max": 1},
    "replays_mean": 0.0,
    "useful": 3,
    "answers": {"made": 32, "cut": 0.25, "in_form": 0.5, "length": 11.6},
    "peers": 2,
    "judge": None,
}


LAST = convert(_LAST, RoundLine)


def status_of(**changes: Any) -> Status:
    """Return a node's status with changes, which have the form of its JSON."""
    shown = {
        "schema": 1,
        "state": "training",
        "cause": "",
        "remedy": "",
        "peer_id": PEER,
        "name": "brave-otter",
        "swarm": {"name": "main", "digest": "3f2a9c0011223344", "topic": "/swarmd/1/main/3f2a9c0011223344"},
        "engine": "libp2p",
        "model": {"model": "tiny", "parameters": 860_000, "device": "cpu", "dtype": "float32", "lora": None},
        "pid": 1,
        "started_at": 1_700_000_000.0,
        "state_dir": "/state",
        "round": 120,
        "rounds": 300,
        "last": _LAST,
        "rewards": [0.2 + 0.002 * at for at in range(120)],
        "peers": 2,
        "addresses": [f"/ip4/192.0.2.7/tcp/40123/p2p/{PEER}"],
        "rejected": {"bad signature": 3, "already seen": 12, "stale": 0},
        "judge": {"url": "http://127.0.0.1:8400", "score": 0.31, "n": 120, "cause": "", "remedy": ""},
        "trainer": {"pid": 2, "restarts": 1},
    }
    return convert(shown | changes, Status)


def drawn(shown: Status | None, width: int, height: int, events: int = 2) -> list[str]:
    page = LivePage(lambda: 1_700_000_192.0, verbose=True)
    page.status = shown
    for event in range(events):
        page.say(f"event {event}: \x1b[31mpeer brave-otter connected\u202e")
    console = Console(
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(page, end="")
    return capture.get().rstrip("\n").split("\n")


PAUSE = {"state": "paused", "cause": "you paused it", "remedy": "swarmd resume"}
PAUSED = status_of(**PAUSE)
BY_USER = {
    "kind": "user",
    "until": None,
    "cause": "you paused it",
    "ends": "with swarmd resume",
    "remedy": "swarmd resume",
}
AWAY = {
    "kind": "month",
    "until": 1.0,
    "cause": "the month's 20 GB are used up",
    "ends": "on 1 May",
    "remedy": "join",
}
REFUSED = (
    "the judge refused: this judge asks tiny-9 (c14e3c4eaad6a27c), your node trains on another curriculum"
)
REMEDY = "Join with curriculum = 'tiny-9' and the same version of swarmd, or use a judge for your curriculum."
TROUBLE = {
    "cause": "you are the first here: no bootstrap address is set, and no member is on the local network",
    "remedy": "ask the swarm's people for an address, and start with --bootstrap",
}
JUDGED = {"url": "http://127.0.0.1:8400", "score": None, "n": 0, "cause": REFUSED, "remedy": REMEDY}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [12, 24, 50])
def test_the_page_fits_the_terminal(width: int, height: int) -> None:
    for shown in (status_of(), PAUSED, status_of(rewards=[], last=None)):
        lines = drawn(shown, width, height, events=10)
        assert len(lines) <= max(height, 13)
        assert max(map(len, lines)) <= width
        assert not set("\x1b\u202e") & set("".join(lines))


FIGURES = """brave-otter|● training|round 120 of 300|up 03:12|tiny 0.9 M cpu float32|reward 0.429
    |generate 2.1|4 local + 3 external|pool 17, 5 new|2 without advantage dropped|gradient –
    |3 bad signature|0.310 over 120 questions|/ip4/192.0.2.7/tcp/40123
    |restarts: 1|event 1|swarm main 3f2a9c00|another terminal: swarmd ui, invite, stop"""
WRAPPED = """loss 0.0123|KL from the start 0.00731|512 tokens made, 900 trained
    |age 0.5 rounds|checkpoint 0.2|tcp/40123"""


@pytest.mark.parametrize(
    "changes, width, height, wanted",
    [
        ({}, 120, 40, f"{FIGURES}|/ip4/192.0.2.7/tcp/40123/p2p/{PEER}"),
        ({}, 80, 24, f"● training|reward 0.429|gradient –|/p2p/{PEER}"),
        ({}, 60, 24, f"/p2p/{PEER[:41]}…"),
        *(
            ({"trouble": TROUBLE}, width, 24, f"{TROUBLE['cause']} → {TROUBLE['remedy']}")
            for width in (60, 80, 120)
        ),
        (PAUSE, 60, 24, "● paused|you paused it → swarmd resume"),
        (
            {"away": [AWAY]},
            60,
            24,
            "● training|away the month's 20 GB are used up; it comes back on 1 May; join",
        ),
        (
            # Paused by a full disk and by its user.
            PAUSE | {"cause": "the disk is full", "pauses": [BY_USER]},
            60,
            24,
            "the disk is full → swarmd resume|paused you paused it; it goes on with swarmd resume model",
        ),
        (
            # A node that is still in a long first round.
            {"cause": "the first round", "since": 1_700_000_000.0, "trouble": {"cause": "c", "remedy": "r"}},
            60,
            24,
            "up 03:12 c → r",
        ),
        *(
            ({"kl": {"round": 110, "value": 0.00731}}, width, height, WRAPPED)
            for width, height in ((60, 20), (80, 24), (120, 40))
        ),
        *(
            ({"judge": JUDGED}, width, height, f"{REFUSED}; {REMEDY}")
            for width, height in ((60, 24), (80, 24), (120, 40))
        ),
    ],
)
def test_nothing_is_truncated_if_there_is_room(
    changes: dict[str, Any], width: int, height: int, wanted: str
) -> None:
    lines = drawn(status_of(**changes), width, height)
    text = " ".join(" ".join(lines).replace("│", " ").split())
    assert [said for part in wanted.split("|") if (said := part.strip()) not in text] == []
    assert len(lines) <= height


def test_technical_figures_are_shown_only_on_demand() -> None:
    page = LivePage(lambda: 1_700_000_192.0)
    page.status = status_of(kl={"round": 110, "value": 0.00731})
    console = Console(width=120, height=40, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(page)
    assert "KL" not in capture.get() and "pid" not in capture.get() and "restarts: 1" in capture.get()
    assert "KL from the start" in " ".join(drawn(status_of(kl={"round": 110, "value": 0.00731}), 120, 40))


def test_one_has_no_plural_s_and_unknown_values_are_shown_as_a_dash() -> None:
    assert ", 1 peer, " in round_sentence(replace(LAST, peers=1)) and ", 0 peers, " in round_sentence(
        replace(LAST, peers=0)
    )
    assert "reward –, learnt from 3" in round_sentence(replace(LAST, reward_mean=None))


def test_the_page_can_be_drawn_with_little_or_no_data() -> None:
    assert drawn(None, 60, 24, events=0) == ["starting …"] and drawn(None, 60, 24)[0].startswith("event 1: ")
    for shown in (
        Status(),
        status_of(rewards=[0.5], round=1),
        status_of(rewards=[None, 0.5], judge=None, swarm={}),
    ):
        assert drawn(shown, 60, 24)


def test_the_curve_follows_the_values() -> None:
    rising = area([0.0, 1.0], 10, 4, 1.0)
    assert rising == ["     █████", "     █████", "     █████", "▁▁▁▁▁█████"]
    assert area([0.5], 3, 4, 1.0) == ["   ", "   ", "███", "███"]
    assert area([0.3, 2.0], 2, 1, 1.0) == ["▂█"]  # in eighths, and not above the top


def test_a_plain_line_is_printed_once_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    view = PlainView(out)
    for _ in range(3):
        view.status(status_of())
    view.status(status_of(state="paused", cause="you paused it", remedy="swarmd resume"))
    view.status(status_of())
    view.round(LAST)
    view.talk("peer \x1b[2J connected")
    view.status(status_of(trouble=TROUBLE))
    view.status(status_of(away=[AWAY]))  # a node that left the swarm has no trouble in it
    view.close()
    assert out.getvalue().splitlines() == [
        f"brave-otter {PEER}, swarm main, model tiny 0.9 M cpu float32, engine libp2p",
        f"reachable at /ip4/192.0.2.7/tcp/40123/p2p/{PEER}",
        "training",
        "paused: you paused it; swarmd resume",
        "training",
        (
            "round 120: reward 0.3125, learnt from 3 of 7 rollouts (4 own, 3 of other nodes), 32 answers"
            " of 12 tokens (25 % cut, 50 % in the asked form), 17 in the pool, 2 peers, 3.4 s (generate 2.1,"
            " score 0.1, train 0.9, checkpoint 0.2), refused 3 bad signature; judged 0.310"
            " over 120 questions"
        ),
        r"peer \x1b[2J connected",
        f"{TROUBLE['cause']}; {TROUBLE['remedy']}",
    ]


def test_a_long_start_is_reported_less_and_less_often() -> None:
    out, clock, begun = io.StringIO(), Clock(0.0), time.time()
    view = PlainView(out, clock)
    for seconds in range(1200):
        clock.now = float(seconds)
        view.status(status_of(cause="the first round since the start", remedy="wait", since=begun - seconds))
    told = [int(line.split()[-2]) for line in out.getvalue().splitlines() if ", for " in line]
    assert told[:3] == [5, 10, 15] and 15 < len(told) < 30


def test_lines_are_broken_between_words_and_only_on_a_terminal() -> None:
    """An address is not broken, so that it can be copied."""
    trouble = {"cause": "no peer is heard: " + "and no member was found " * 4, "remedy": "wait"}
    lines = [line for line in status_lines(status_of(trouble=trouble)) if PEER not in line]
    ours, theirs = terminal()
    with os.fdopen(theirs, "w") as screen, os.fdopen(ours) as shown:
        view = PlainView(screen)
        view.round(LAST)
        tell("\n".join([*lines, PEER * 2, "end"]), screen, indent=" " * 9)
        seen = list(iter(lambda: shown.readline().rstrip("\n"), "end"))
    assert PEER * 2 in seen and max(len(line) for line in seen if PEER not in line) <= 80
    assert "".join("".join([*lines, PEER * 2]).split()) in "".join("".join(seen).split())
    assert [line for line in seen if line.startswith(" " * 9) and "member was found" in line] != []
    pipe = io.StringIO()
    tell("\n".join(lines), pipe)
    assert pipe.getvalue().splitlines() == lines


def test_with_json_stdout_has_only_data_and_messages_go_to_stderr() -> None:
    out, talk = io.StringIO(), io.StringIO()
    view = JsonView(out, talk)
    view.status(status_of())
    view.round(LAST)
    view.talk("hello")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"schema": 1, **to_builtins(LAST)}]
    assert "hello" in talk.getvalue() and "training" in talk.getvalue()


NO_READER = """
import sys
from swarmd.cli.views.plain import JsonView
from swarmd.types import RoundLine
view = JsonView(sys.stdout, sys.stderr)
sys.stdin.readline()
for number in range(3):
    view.round(RoundLine(round=number))
view.close()
"""


@pytest.mark.net
def test_a_full_pipe_does_not_block_the_node() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as out:
        talk = io.StringIO()
        view = JsonView(out, talk)
        for number in range(5000):
            view.round(RoundLine(round=number))
        os.set_blocking(read, False)
        rounds = [json.loads(line)["round"] for line in reader]
        assert rounds == list(range(len(rounds))), "the first lines were not written completely"
        view.round(RoundLine(round=5000))
        assert json.loads(next(reader))["round"] == 5000
        full, again = talk.getvalue().splitlines()
        assert "it is full" in full and again.endswith(f"left out: {5000 - len(rounds)}")


def test_a_view_without_a_reader_stops_and_the_node_continues() -> None:
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with killed_after(subprocess.Popen([sys.executable, "-c", NO_READER], text=True, **pipes)) as process:
        assert process.stdout and process.stdin and process.stderr
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stderr.read()
        assert process.wait(TIMEOUT_S) == 0
    assert said.count("\n") == 1 and "nobody reads standard output" in said
    closed = io.StringIO()
    closed.close()
    PlainView(closed).talk("x")


ON_A_TERMINAL = """
import sys, time
from swarmd.cli.join import _view
from swarmd.state.status import NodeState, Status
view = _view(False)
assert type(view).__name__ == "LiveView"
paused = {"cause": "you paused it", "remedy": "swarmd resume"}
view.status(Status(state=NodeState.PAUSED, name="brave-otter", round=3, **paused))
view.talk("peer connected")
view.close()
"""


@pytest.mark.net
def test_a_watch_without_a_reader_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with `swarmd status --watch | head -1`. A terminal that cannot draw gets lines."""
    told = iter([status_of(), PAUSED])
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("swarmd.cli.status.ask", lambda *_: next(told))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with (
        patch("sys.stdout", io.StringIO()) as out,
        patch.object(out, "isatty", return_value=True),
        patch.object(out, "flush", side_effect=BrokenPipeError),
        pytest.raises(BrokenPipeError),
    ):
        status._watch(tmp_path, as_json=False)
    assert out.getvalue().startswith(f"brave-otter {PEER}, swarm main")


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_the_live_page_and_colours_only_if_wanted(no_color: bool) -> None:
    ours, theirs = terminal()
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"} | (
        {"NO_COLOR": "1"} if no_color else {}
    )
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    text = rest_of(ours)
    assert process.wait(TIMEOUT_S) == 0, text
    assert "you paused it" in text and "peer connected" in text
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", text)) != no_color


ON_A_STOPPED_TERMINAL = """
from swarmd.cli.views.live import LiveView
from swarmd.state.status import NodeState, Status
view = LiveView()
for number in range(100):
    view.status(Status(state=NodeState.TRAINING, name="brave-otter", round=number, rewards=[0.5] * 99))
view.close()
"""


@pytest.mark.net
def test_a_blocked_terminal_does_not_block_the_node() -> None:
    ours, theirs = terminal()
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_STOPPED_TERMINAL],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    try:
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        assert "brave-otter" in rest_of(ours)


IN_THE_BACKGROUND = """
import time
from swarmd.cli.views.live import LiveView
from swarmd.state.status import NodeState, Status
view = LiveView()
while True:
    view.status(Status(state=NodeState.TRAINING, name="brave" + "-otter"))
    time.sleep(0.02)
"""


def test_a_view_in_the_background_draws_nothing() -> None:
    """Ctrl-Z restores the shell's screen, `bg` does not draw on it, and `fg` draws again."""
    ours, theirs = terminal()
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"}

    def with_terminal() -> None:  # like a shell's child: a terminal of its session, a foreground group
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    text = bytearray()

    def drawn_until(wanted: bytes) -> bytes:
        while wanted not in text:
            text.extend(os.read(ours, 65536))
        before, found, text[:] = text.partition(wanted)
        return bytes(before + found)

    shell = f"set -m; {sys.executable} -c '{IN_THE_BACKGROUND}'; bg; sleep 1; echo quiet; fg"
    with killed_after(
        subprocess.Popen(
            ["bash", "-c", shell],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            preexec_fn=with_terminal,
        )
    ):
        drawn_until(b"brave-otter")
        os.write(ours, b"\x1a")
        left = drawn_until(b"quiet").rpartition(b"\x1b[?1049l")
        assert left[1] and b"brave-otter" not in left[2]
        assert b"\x1b[?1049h" in drawn_until(b"brave-otter")
        os.write(ours, b"\x03")
        drawn_until(b"KeyboardInterrupt")
    os.close(theirs)
    rest_of(ours)


def test_a_live_view_draws_its_status_and_can_be_closed_twice() -> None:
    out = io.StringIO()
    view = LiveView(
        Console(file=out, force_terminal=True, width=80, height=24, color_system=None, legacy_windows=False),
        lambda: 0.0,
    )
    view.status(status_of())
    view.round(LAST)
    view.talk("something happened")
    view.close()
    view.close()
    assert "something happened" in out.getvalue()
    _, _, left = out.getvalue().partition("\x1b[?1049l")  # the final return to the ordinary screen
    assert "\x1b[?1049h" in out.getvalue() and left.count("● training") == 1


def test_the_status_is_printed_as_lines() -> None:
    lost = {"state": "restarting", "cause": "the trainer was lost", "remedy": "it starts again now"}
    gone = [{"pid": None, "restarts": number} for number in (0, 1)]
    assert not any(line.startswith("trainer") for line in status_lines(status_of(trainer=gone[0])))
    assert "trainer  restarts: 1" in status_lines(status_of(trainer=gone[1]))
    assert (
        status_lines(status_of(**lost))[0] == "state    restarting: the trainer was lost; it starts again now"
    )
    assert {
        "address  /ip4/192.0.2.7/tcp/40123",
        "reward   0.429, mean of the last 10 rounds",
        "judge    score 0.310 over 120 questions, http://127.0.0.1:8400",
    } <= {*status_lines(status_of())}
    sure = {"url": "http://a", "score": 0.31, "interval": [0.234, 0.398], "n": 120, "cause": "", "remedy": ""}
    silent = {"score": None, "n": 0, "cause": "it did not answer", "remedy": "asked again in 30 s"}
    for judge, said in (
        (sure, "judge    score 0.310 (95 % interval 0.234 to 0.398) over 120 questions, http://a"),
        (sure | silent, "judge    no score yet, http://a: it did not answer; asked again in 30 s"),
    ):
        assert said in status_lines(status_of(judge=judge))
    assert status_lines(Status())
    assert state_sentence(Status(state=NodeState.TRAINING)) == "training"


def test_a_rounds_line_has_informative_rollouts_and_how_answers_ended() -> None:
    learnt = round_sentence(LAST)
    assert "learnt from 3 of 7 rollouts (4 own, 3 of other nodes)" in learnt
    assert "32 answers of 12 tokens (25 % cut, 50 % in the asked form)" in learnt
    nothing = round_sentence(replace(LAST, useful=0))
    assert "nothing learnt from 7 rollouts (4 own, 3 of other nodes)" in nothing
    assert "answers" not in round_sentence(replace(LAST, answers=AnswerFigures(0)))


def test_the_status_shows_a_rounds_progress_and_why_nothing_is_learnt() -> None:
    told = {"stage": "generate", "done": 12, "of": 32, "left": 118.0}
    lines = status_lines(status_of(progress=told, learning={"cause": "all wrong", "remedy": "choose easier"}))
    assert {"now      answers 12 of 32, about 2 min left", "learning all wrong; choose easier"} <= {*lines}
    assert progress_words(StageProgress("generate", 12, 0, None), None) == "stage: generate"
    assert progress_words(None, 0.06) == ""
    assert progress_words(StageProgress(**told), 0.06).endswith("this node 6 % of a core")


def test_the_latest_answers_are_shown_as_text() -> None:
    answers = (("4\x1b[2J", 1.0, True), ("5", 0.25, False))
    shown = ShownRollout(7, "sums", "2 + 2?\nBriefly.", answers)
    assert answer_lines([shown]) == [
        "round 7, sums:",
        "    2 + 2?",
        "    Briefly.",
        "  reward 1:",
        "    4\\x1b[2J",
        "  reward 0.25, cut:",
        "    5",
    ]
    assert answer_lines([]) == ["no answers yet: a round has to end first"]


def test_peers_are_printed_as_lines() -> None:
    peer = KnownPeer(PEER, "brave-otter", None, "relayed", None, frames=12)
    near = replace(peer, address=f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}", direction="inbound")
    assert peer_lines([]) == [
        "no peers yet; `swarmd doctor network` says whether other nodes can reach this one"
    ]
    far = replace(
        near,
        name="extraordinary-woodpecker",
        address=f"/ip6/2001:db8:85a3:1234:5678:8a2e:370:7334/tcp/40123/p2p/{PEER}",
    )
    near.learnt = {"gcd": 3, "legs": 9, "arc": 1, "sort": 2}
    lines = peer_lines([peer, near, far])
    header, first, second, learnt, third, address, ids = lines
    assert header.split() == ["NAME", "FRAMES", "REFUSED", "DIRECTION", "ADDRESS"]
    assert first.split() == ["brave-otter", "12", "0", "relayed", "–"]
    assert second.endswith("inbound    /ip4/1.2.3.4/tcp/5") and third.split() == [
        "extraordinary-woodpecker",
        "12",
        "0",
        "inbound",
    ]
    assert learnt.strip() == "learnt from: 15 rollouts: 9 legs, 3 gcd, 2 sort"
    assert address.strip() == "/ip6/2001:db8:85a3:1234:5678:8a2e:370:7334/tcp/40123" and "--json" in ids
    assert max(map(len, lines)) <= 80


def test_the_log_has_every_event_and_a_line_a_minute_for_rounds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now, out = [0.0], io.StringIO()
    log_view = LogView(PlainView(out), lambda: now[0])
    shown = status_of(state="starting", cause="loading the model tiny", remedy="wait", judge=None)
    log_view.status(shown)
    log_view.talk("connected to brave-otter (1 connected)")
    shown = status_of(saved=100)
    for number in range(1, 1201):  # ten a second, for two minutes
        now[0] += 0.1
        log_view.round(replace(LAST, round=number))
        log_view.status(shown)
    log_view.status(status_of(state="paused", cause="you paused it", remedy="swarmd resume"))
    log_view.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:4] == [
        f"brave-otter {PEER}, swarm main, model tiny 0.9 M cpu float32, engine libp2p",
        f"reachable at /ip4/192.0.2.7/tcp/40123/p2p/{PEER}",
        "starting: loading the model tiny; wait",
        "connected to brave-otter (1 connected)",
    ]
    assert "paused: you paused it; swarmd resume" in lines
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) in (3, 4) and rounds[0].startswith("round 1: reward 0.3125, ")
    assert re.search(
        r"; \d{3} rounds since the last line; saved up to round 100; judged 0\.310 over 120 questions$",
        rounds[1],
    )
    assert "connected to brave-otter" in out.getvalue()


def test_an_event_that_is_also_a_state_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    out = io.StringIO()
    view = LogView(PlainView(out))
    view.status(status_of())
    for number in range(2):
        view.round(replace(LAST, round=number))
        view.talk("stuck: no round has ended; look into trainer.log")
        view.status(status_of(state="stuck", cause="no round has ended", remedy="look into trainer.log"))
        view.talk("the trainer works again")
        view.status(status_of())
    lines = [record.getMessage() for record in caplog.records]
    begun = [line[:6] for line in lines if not line.startswith("round")]
    assert begun[-6:] == ["stuck:", "the tr", "traini"] * 2
    assert out.getvalue().count("stuck:") == 2


def test_without_a_terminal_rounds_get_a_line_a_minute_and_all_are_counted() -> None:
    now, out = [0.0], io.StringIO()
    view = PlainView(out, lambda: now[0])
    for number in range(1, 1201):  # ten a second, for two minutes
        now[0] += 0.1
        view.round(replace(LAST, round=number))
        view.status(status_of(judge=None))
    view.close()
    rounds = [line for line in out.getvalue().splitlines() if line.startswith("round ")]
    assert [line.partition(":")[0] for line in rounds] == ["round 1", "round 601", "round 1200"]
    assert rounds[1].endswith("; 600 rounds since the last line") and rounds[2].endswith(
        "; 599 rounds since the last line"
    )


def test_a_long_start_shows_its_duration_every_five_seconds() -> None:
    now, out = [0.0], io.StringIO()
    view = PlainView(out, lambda: now[0])
    shown = status_of(
        state="starting", cause="loading PyTorch", remedy="usually 5 s", last=None, since=time.time()
    )
    for _ in range(40):  # half a second each
        view.status(shown)
        now[0] += 0.5
    lines = out.getvalue().splitlines()
    assert lines[2:4] == ["starting: loading PyTorch; usually 5 s", "starting: loading PyTorch, for 0 s"]
    assert len(lines) == 3 + 3
    view.status(status_of())
    now[0] += 60
    view.status(status_of())
    assert out.getvalue().splitlines()[6:] == ["training"]


def test_the_time_of_imports_before_the_first_status_is_shown() -> None:
    out, told = io.StringIO(), threading.Event()

    class Told(PlainView):
        def talk(self, text: str) -> None:
            super().talk(text)
            told.set()

    view = LogView(Told(out))
    view.say_that_it_starts(every=0.01)
    assert told.wait(TIMEOUT_S)
    view.status(status_of())
    view.close()
    lines = [
        line
        for line in out.getvalue().splitlines()
        if line.startswith("starting: loading the network and the questions")
    ]
    assert lines and out.getvalue().splitlines()[-1] == "training"


def test_a_paused_page_is_drawn_rarely_but_at_once_after_an_event() -> None:
    now, out = [0.0], io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=80, height=24, color_system=None, legacy_windows=False
    )
    view = LiveView(console, lambda: now[0])

    def drawings(seconds: float, shown: Status) -> int:
        before = out.getvalue().count("swarm main 3f2a9c00")
        for _ in range(int(2 * seconds)):
            now[0] += 0.5
            view.status(shown)
        return out.getvalue().count("swarm main 3f2a9c00") - before

    assert drawings(10, status_of()) == 20
    assert drawings(60, PAUSED) <= 13
    view.talk("connected to brave-otter")
    assert drawings(0.5, PAUSED) == 1 and "connected to brave-otter" in out.getvalue()
    assert drawings(0.5, status_of()) == 1
    view.close()


WORKERS = {
    "generators": {"alive": 2, "of": 2, "pids": [1, 2]},
    "trainers": {"alive": 1, "of": 1, "pids": []},
    "version": 30,
    "lag": {"mean": 1.25, "max": 3},
    "tokens_per_second": None,
    "questions": {"in_flight": 8},
    "waiting": 0,
    "overtaken": 0,
}


def test_workers_are_described_in_words() -> None:
    assert workers_words(None) == ""
    assert (
        workers_words(convert(WORKERS, WorkerFigures))
        == "2 of 2 generators, 1 of 1 trainers, – tokens/s, version 30, lag 1.25 versions, at most 3"
    )
