"""The status board: the data of `swarmd status` and `swarmd peers`."""

import os
from pathlib import Path
from textwrap import wrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert, to_builtins
from msgspec.structs import asdict, replace

from p2p.identity import Identity, nickname
from p2p.types import Envelope, Peer, Reason
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation import CAUSES
from swarmd.daemon.diagnosis.learning import FROZEN, trouble_of
from swarmd.daemon.local_api.roster import Roster
from swarmd.daemon.local_api.status import KEPT_REWARDS, StatusBoard, peers_of
from swarmd.daemon.local_api.status_words import shared_words, status_lines
from swarmd.daemon.page.prometheus import exposition
from swarmd.daemon.sharing import Participant
from swarmd.daemon.supervision.watchdog import Stuck
from swarmd.state.status import (
    NEXT,
    JudgeStatus,
    ModelDescription,
    NodeState,
    SharedRollouts,
    StageProgress,
    Status,
    SwarmPart,
    TrainerFigures,
    UsageReport,
    UsageRow,
)
from swarmd.types import AnswerFigures, PoolFigures, RoundLine, Score, ShownRollout, TokenCounts

ME = Identity(bytes(32)).peer_id
OTHER = Identity(b"\1" * 32).peer_id

EXCHANGE = {"on_offer": 12, "fetched": 5, "missed": 1, "bytes_in": 20_480, "bytes_out": 7_000}
SHARED = {"rollouts": 12, "used": 31, "by": 4}


def board(rounds: int = 0, train: str = "on") -> StatusBoard:
    config = NodeConfig.model_validate({"round": {"rounds": rounds, "train": train}})
    return StatusBoard(config, Path("/state"), Roster())


def status(
    of: StatusBoard,
    trainer: TrainerFigures = TrainerFigures(1, 0),  # noqa: B008
    judge: JudgeStatus | None = None,
    **swarm: Any,
) -> Status:
    """Return the board's status with a trainer, a judge and the swarm's part as its JSON has it."""
    part = convert({"exchange": EXCHANGE, "shared": SHARED} | swarm, SwarmPart)
    trainer = replace(trainer, verifier_pid=of.known.trainer.verifier_pid)
    return replace(of.known, **asdict(part), trainer=trainer, judge=of.judged(judge))


def test_refusals_come_with_reason_and_remedy(tmp_path: Path) -> None:
    config = NodeConfig.model_validate({"swarm": {"engine": "none"}})
    of = Participant(config, tmp_path, "m", print, str, print)
    for reason in [Reason.WRONG_VERSION] * 3 + [Reason.BAD_SIGNATURE] * 2:
        of.member.ignore(reason)
    shown = replace(board().known, **asdict(of.status()))
    assert shown.rejected == {"another wire version": 3, "bad signature": 2}
    assert shown.advice == {"another wire version": Reason.WRONG_VERSION.remedy}
    text = "\n".join(status_lines(shown))
    assert "3 another wire version" in text and "update the older" in text and "2 bad signature" in text
    assert shown.state is NodeState.STARTING and shown.cause and shown.remedy


def test_frames_over_a_full_queue_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd.exchange.driver.MAX_EVENTS", 2)
    of = Participant(
        NodeConfig.model_validate({"swarm": {"engine": "none"}}), tmp_path, "m", print, str, print
    )
    for number in range(5):
        of._admitted(Envelope(OTHER, number, 0, "offer", b""))
    assert of.status().rejected == {Reason.BACKLOG.value: 3}


def test_peers_are_the_connected_nodes_and_the_nodes_heard_through_them() -> None:
    of = board()
    for _ in range(4):
        of._roster.heard(OTHER, 100.0)
    of._roster.useful(OTHER, "gcd")
    relayed = peers_of(of._roster, [], 110.0, said={OTHER: (7, "qwen2.5-0.5b")}).peers
    assert relayed[0].learnt == {"gcd": 1}
    assert [(p.id, p.direction, p.frames, p.round, p.model) for p in relayed] == [
        (OTHER, "relayed", 4, 7, "qwen2.5-0.5b")
    ]
    connected = peers_of(of._roster, [Peer(OTHER, "/ip4/192.0.2.1/tcp/1", "inbound", 1.0)], 110.0).peers
    assert [(p.direction, p.address) for p in connected] == [("inbound", "/ip4/192.0.2.1/tcp/1")]
    assert peers_of(of._roster, [], 1000.0).peers == []  # it is gone


def test_the_status_has_the_present_and_the_history() -> None:
    of = board(rounds=7)
    assert board().known.rounds is None and of.known.rounds == 7
    of.say(NodeState.RESTARTING, "it was lost", "wait")
    for number in range(1, KEPT_REWARDS + 3):
        of.round_done(link.RoundDone(RoundLine(round=number, reward_mean=number / 1000), 42))
    told = {"peers": 2, "connected": 1, "addresses": ["/ip4/192.0.2.1/tcp/1"], "offers": {"every": 40.0}}
    shown = status(of, trainer=TrainerFigures(9, 3), **told)
    assert shown.last == RoundLine(round=KEPT_REWARDS + 2, reward_mean=(KEPT_REWARDS + 2) / 1000)
    history: dict[str, Any] = {"round": KEPT_REWARDS + 2}
    history["rewards"] = [n / 1000 for n in range(3, KEPT_REWARDS + 3)]
    of_us = {
        "state_dir": "/state",
        "pid": os.getpid(),
        "state": "restarting",
        "cause": "it was lost",
        "remedy": "wait",
    }
    of_us["trainer"] = {"pid": 9, "restarts": 3, "verifier_pid": 42}
    json = to_builtins(shown)
    assert json | told | history | of_us == json
    lines = status_lines(replace(shown, last=None))
    assert "peers    2 heard, 1 connected" in lines


def test_the_model_has_one_name_before_and_after_it_is_loaded() -> None:
    of = board()
    assert 'model="tiny"' in exposition(of.known) and "model    tiny" in status_lines(of.known)
    of.resumed(link.TrainerReady(ModelDescription("tiny", device="cpu"), 0, []))
    assert 'model="tiny"' in exposition(of.known) and "model    tiny cpu" in status_lines(of.known)


def test_an_author_of_bad_rollouts_is_shown_as_one() -> None:
    of = board()
    for _ in range(5):
        of._roster.heard(OTHER, 9.0)
    for _ in range(2):
        of._roster.bad(OTHER)
    (peer,) = peers_of(of._roster, [Peer(OTHER, "/ip4/192.0.2.1/tcp/1", "outbound", 1.5)], 9.0).peers
    assert to_builtins(peer) == {
        "id": OTHER,
        "name": nickname(OTHER),
        "address": "/ip4/192.0.2.1/tcp/1",
        "direction": "outbound",
        "connected_at": 1.5,
        "heard_at": 9.0,
        "frames": 5,
        "rejected": 2,
        "round": None,
        "model": None,
        "learnt": {},
        "score": None,
    }


def test_the_p2p_engine_is_told() -> None:
    swarm = {"name": "main", "topic": "/swarmd/1/main/3f"}
    told = status(board(), engine="libp2p", swarm=swarm)
    assert "swarm    main  /swarmd/1/main/3f  libp2p" in status_lines(told)


def test_offers_and_fetches_are_shown_once_there_were_any() -> None:
    lines = status_lines(status(board()))
    assert (
        "exchange 12 rollouts on offer, 5 fetched, 1 that nobody had in time; 20 KiB in, 7 KiB out" in lines
    )
    quiet = status(board(), exchange=dict.fromkeys(EXCHANGE, 0))
    assert not any(line.startswith("exchange") for line in status_lines(quiet))


def test_shared_rollouts_are_shown_with_how_often_they_were_used() -> None:
    shown = status(board())
    assert to_builtins(shown.shared) == SHARED
    assert "shared   12 rollouts since this start; used 31 times, by 4 other nodes" in status_lines(shown)
    once = shared_words(SharedRollouts(1, 1, 1))
    assert once == "1 rollout since this start; used 1 time, by 1 other node"
    unused = status_lines(replace(shown, shared=SharedRollouts(1)))
    assert "shared   1 rollout since this start; nobody has said yet that it used one" in unused
    nothing = status_lines(replace(shown, shared=SharedRollouts()))
    assert not any(line.startswith("shared") for line in nothing)


def lines_of(number: int, trained: int, cut: float = 0.0, in_form: float = 1.0) -> RoundLine:
    return RoundLine(
        round=number,
        reward_mean=0.0,
        seconds={"generate": 2.0},
        tokens=TokenCounts(96, trained),
        answers=AnswerFigures(8, cut, in_form, 12.0),
    )


def test_two_rounds_that_teach_nothing_are_a_trouble_until_one_teaches_something() -> None:
    of = board()
    for number in (1, 2, 3):
        shown = ShownRollout(number, "sums", "2 + 2?", ((f"text {number}", 0.0, True),))
        of.round_done(link.RoundDone(lines_of(number, 0, in_form=0.0), 42, shown=shown))
        assert (of.known.learning is not None) is (number > 1)
    trouble = of.known.learning
    assert trouble and "0 of 16 answers are in the asked form" in trouble.cause
    assert "“text 2”" in trouble.cause
    assert [(each.round, each.answers[0][0]) for each in of.answers] == [
        (number, f"text {number}") for number in (1, 2, 3)
    ]
    for number in (4, 5):
        of.round_done(link.RoundDone(lines_of(number, 9), 42))
    assert of.known.learning is None


def test_a_frozen_model_is_said_and_progress_ends_with_its_round() -> None:
    of = board(train="off")
    assert of.known.learning == FROZEN, "before the first round, too"
    for number in (1, 2, 3):
        of.known.progress = StageProgress("generate", 1, 8, None)
        of.round_done(link.RoundDone(lines_of(number, 0), 42))
    assert (of.known.learning, of.known.progress) == (FROZEN, None)
    of.known.progress = StageProgress("generate", 1, 8, None)
    of.say(NodeState.PAUSED, "you paused it", "swarmd resume")
    assert of.known.progress is None


def test_one_address_is_named_and_the_rest_are_counted() -> None:
    addresses = ["/ip4/192.0.2.1/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1"]
    assert "address  /ip4/192.0.2.1/tcp/1 and 2 more" in status_lines(status(board(), addresses=addresses))


def test_the_judges_last_score_outlives_a_restart_until_there_is_a_new_one() -> None:
    of, silent = board(), JudgeStatus("http://a")
    of.replay([RoundLine(round=1, judge=Score(0.31, 56)), RoundLine(round=2)])
    assert "judge    score 0.310 over 56 questions, before this start, http://a" in status_lines(
        status(of, judge=silent)
    )
    newer = replace(silent, score=0.4, n=57)
    assert "judge    score 0.400 over 57 questions, http://a" in status_lines(status(of, judge=newer))
    assert status(of).judge is None, "no judge is configured now"


def test_harmless_refusals_are_counted_for_programs_and_not_shown() -> None:
    shown = status(board(), rejected={Reason.OLD.value: 5, Reason.DUPLICATE.value: 2})
    assert "refused  nothing" in status_lines(shown) and shown.rejected[Reason.OLD.value] == 5
    assert "swarmd_refused_total" in exposition(shown)
    both = status(board(), rejected={Reason.OLD.value: 5, Reason.MALFORMED.value: 1})
    assert "refused  1 not a frame" in status_lines(both)


def test_the_status_says_how_the_model_is_asked() -> None:
    of = board()
    of.known.model = ModelDescription("a/b", device="cpu", examples=2, opening="<answer>\x1b")
    assert "model    a/b cpu +2 examples +opening <answer>\\x1b" in status_lines(of.known)
    of.known.model = ModelDescription("a/b", device="cpu")
    assert "model    a/b cpu" in status_lines(of.known)


def test_the_status_of_a_node_with_every_trouble_fits_a_terminal_of_80_by_24() -> None:
    of = board()
    of.known.round, of.known.rewards = 120, [0.0, 0.0]
    line = replace(lines_of(120, 0, cut=0.94, in_form=0.0), local=4, external=3, pool=PoolFigures(3))
    of.known.last = line
    of.say(NodeState.TRAINING)
    of.known.progress = StageProgress("generate", 12, 32, 118.0)
    of.known.model = ModelDescription(
        "/home/me/models/smollm2-135m",
        parameters=134_500_000,
        device="cpu",
        lora=16,
        new_tokens=12,
        examples=2,
    )
    of.known.learning = trouble_of(
        [line] * 2, of.known.model, "It is Thursday, Monday comes next in this week: " * 3
    )
    silent = JudgeStatus("https://judge.example", cause="it is down", remedy="wait")
    alone = next(cause for cause in CAUSES if "first here" in cause.says).trouble()
    spent = UsageRow(17_000, 300, 9 * 10**9, 9 * 10**9, 8 * 10**9)
    of.known.usage = UsageReport(spent, spent, spent)
    shown = status(
        of,
        judge=silent,
        trouble=to_builtins(alone),
        peer_id=ME,
        name="brave-otter",
        exchange=dict.fromkeys(EXCHANGE, 0),
        shared=dict.fromkeys(SHARED, 0),
        swarm={"name": "main", "topic": "/swarmd/1/main/45d480c45ee4d11f"},
        addresses=["/ip6/2001:db8:85a3:1234:5678:8a2e:370:7334/tcp/40123/p2p/" + ME] * 5,
    )
    lines = [part for each in status_lines(shown) for part in wrap(each, 80, subsequent_indent=" " * 9)]
    assert len(lines) <= 24, "\n".join(lines)
    assert [each.partition(" ")[0] for each in lines[:4]] == ["state", "round", "now", "reward"]


@given(st.lists(st.sampled_from([*NodeState, "works"])))
def test_a_state_follows_another_as_the_table_allows(words: list[Any]) -> None:
    of = board()
    for word in words:
        before, stuck = of.known.state, of.known.state is NodeState.STUCK
        if word == "works":
            of.say_stuck(None)
            assert of.known.state is not NodeState.STUCK
        elif word is NodeState.STUCK:
            of.say_stuck(Stuck("no round has ended", "wait"))
        else:
            of.say(word, "why", "what to do")
        after = of.known.state
        assert after is before or after in NEXT[before]
        assert after is word or word not in NEXT[before] or stuck or word == "works"
        assert before not in (NodeState.STOPPING, NodeState.STOPPED) or after in (before, NodeState.STOPPED)
    assert set(NEXT) == set(NodeState)
