"""The daemon's and the trainer's end of their link, tested over a real socket pair."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from p2p.types import PeerId
from swarmd import link
from swarmd.exchange.events import Deliver, Share, Useless
from swarmd.state.status import NodeState
from swarmd.trainer.trainer_link import TrainerLink
from swarmd.types import Completion, Rollout, TaskRef
from tests.doubles import TIMEOUT_S
from tests.processes import wait_until

START = link.StartTrainer("{}", "/state", "12D3KooW", 7)


def rollout(n: int = 0, text: str = "text", heard: int = 0) -> Rollout:
    return Rollout(TaskRef("bf", n), (Completion(text, True),), PeerId("p"), heard, "9.9")


class Ends(NamedTuple):
    """An open link.

    `gone` is set once the daemon is gone. `threads` belong to the trainer's end.
    """

    daemon: socket.socket
    trainer: TrainerLink
    gone: threading.Event
    threads: set[threading.Thread]


@pytest.fixture
def ends() -> Iterator[Ends]:
    before, gone = set(threading.enumerate()), threading.Event()
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    trainer = TrainerLink(theirs, on_eof=gone.set)
    ours.sendall(link.pack(START))
    assert trainer.open() == START
    yield Ends(ours, trainer, gone, set(threading.enumerate()) - before)
    ours.close()
    theirs.close()


def read(sock: socket.socket, count: int) -> list[link.ToDaemon]:
    unpacker, messages = link.Unpacker[link.ToDaemon](link.ToDaemon), []
    while len(messages) < count:
        messages += unpacker.feed(sock.recv(1 << 16))
    return messages


def say(sock: socket.socket, trainer: TrainerLink, *messages: link.ToTrainer) -> None:
    """Send messages and a final stop, and wait until the trainer's end has received all of them."""
    for message in (*messages, link.Stop()):
        sock.sendall(link.pack(message))
    while not trainer.stopping:
        trainer.wait(TIMEOUT_S)


def test_the_round_receives_admitted_rollouts_once_and_in_order(ends: Ends) -> None:
    daemon, trainer, *_ = ends
    say(
        daemon,
        trainer,
        *(Deliver(rollout(n, heard=n)) for n in range(3)),
    )
    received, _ = trainer.collect()
    assert received == [rollout(n) for n in range(3)]
    assert [(r.heard, r.group) for r in received] == [(0, "9.9"), (1, "9.9"), (2, "9.9")]
    assert trainer.collect() == ([], {})


def test_messages_from_the_round_reach_the_daemon(ends: Ends) -> None:
    daemon, trainer, *_ = ends
    trainer.share([], 6)
    trainer.share([rollout()], 7)
    trainer.charge([])
    trainer.charge([PeerId("p")])
    trainer.tell(link.Stopped(3))
    heard = read(daemon, 3)
    assert set(map(type, heard)) == {Share, Useless, link.Stopped}
    assert Share((rollout(),), 7) in heard and Useless((PeerId("p"),)) in heard


def test_news_from_swarm_and_judge_reach_the_training_loop(ends: Ends) -> None:
    daemon, trainer, *_ = ends
    news = [link.SwarmNews(2, {"stale": 1}), link.SwarmNews(3, {"stale": 2, "malformed": 1})]
    questions = [link.JudgeQuestion("1", "old"), link.JudgeQuestion("2", "new")]
    scores = [link.JudgeScore(0.25, 4), link.JudgeScore(0.5, 8)]
    say(daemon, trainer, *news, *questions, *scores)
    assert (trainer.peers, trainer.judged) == (3, link.JudgeScore(0.5, 8))
    # Rejected rollouts are counted until the round collects them.
    assert (trainer.collect(), trainer.collect()) == (([], {"stale": 3, "malformed": 1}), ([], {}))
    assert (trainer.question(), trainer.question()) == (link.JudgeQuestion("2", "new"), None)


def test_pause_and_resume_reach_the_trainer(ends: Ends) -> None:
    daemon, trainer, *_ = ends
    for message, paused in ((link.Pause(), True), (link.Resume(), False)):
        daemon.sendall(link.pack(message))
        wait_until(lambda paused=paused: trainer.paused == paused)  # type: ignore[misc]


def test_a_paused_trainer_rests_until_it_is_resumed_and_reports_the_cause(ends: Ends) -> None:
    daemon, trainer, *_ = ends
    rests: list[bool] = []
    given_back: list[str] = []
    trainer.rest_along(rests.append)
    trainer.give_back = lambda: given_back.append(trainer.pause.cause if trainer.pause else "")
    trainer.rest()  # returns at once, because there is no pause
    assert trainer.rested == 0 and rests == [False]

    def during(*messages: link.ToTrainer) -> threading.Thread:
        daemon.sendall(b"".join(map(link.pack, messages)))
        wait_until(lambda: trainer.must_rest)
        resting = threading.Thread(target=trainer.rest, daemon=True)
        resting.start()
        return resting

    resting = during(link.Pause("on battery", "plug it in"))
    assert read(daemon, 1) == [link.TrainerState(NodeState.PAUSED, "on battery", "plug it in")]
    daemon.sendall(link.pack(link.Pause("night", "wait")))
    assert read(daemon, 1) == [link.TrainerState(NodeState.PAUSED, "night", "wait")]
    daemon.sendall(link.pack(link.Pause(brief=True)))  # the pause is over, but the CPU limit needs a rest
    assert read(daemon, 1) == [link.TrainerState(NodeState.TRAINING)] and resting.is_alive()
    daemon.sendall(link.pack(link.Resume()))
    resting.join(TIMEOUT_S)
    assert not resting.is_alive() and not trainer.must_rest and trainer.rested > 0
    resting = during(link.Pause())
    assert read(daemon, 1) == [link.TrainerState(NodeState.PAUSED, "you paused it", "swarmd resume")]
    daemon.sendall(link.pack(link.Stop()))  # so that the current round can be finished and saved
    resting.join(TIMEOUT_S)
    assert not resting.is_alive() and read(daemon, 1) == [link.TrainerState(NodeState.TRAINING)]
    assert rests == [False, True, True, True, False, True, False]
    assert given_back == ["on battery", "night", "you paused it"]


def test_workers_first_learn_the_current_state_and_then_its_changes(ends: Ends) -> None:
    """A pause that arrives during the first notice still takes effect."""
    daemon, trainer, *_ = ends
    rests: list[bool] = []

    def told(resting: bool) -> None:
        if not resting:
            daemon.sendall(link.pack(link.Pause()))
            time.sleep(0.05)  # the pause arrives
        rests.append(resting)

    trainer.rest_along(told)
    wait_until(lambda: len(rests) == 2)
    assert rests == [False, True]


def test_the_trainer_notices_the_end_of_the_daemon_at_once(ends: Ends) -> None:
    daemon, _, gone, _ = ends
    daemon.close()
    assert gone.wait(TIMEOUT_S)


def test_a_full_queue_loses_rollouts_but_no_state_and_does_not_block(ends: Ends) -> None:
    """The daemon does not read while the trainer sends many rollouts.

    The trainer does not wait, and its messages about state arrive afterwards.
    """
    daemon, trainer, *_ = ends
    for n in range(5000):
        trainer.share([rollout(n, "x" * 2000)], n)
    trainer.tell(link.Stopped(1))
    closing = threading.Thread(target=trainer.close)
    closing.start()
    messages: list[link.ToDaemon] = []
    unpacker = link.Unpacker[link.ToDaemon](link.ToDaemon)
    while data := daemon.recv(1 << 16):
        messages += unpacker.feed(data)
    closing.join()
    shared = [m.round for m in messages if isinstance(m, Share)]
    assert link.Stopped(1) in messages
    assert len(shared) < 5000 and shared[-1] == 4999 and shared == sorted(shared)


def test_a_full_queue_drops_the_oldest_rollouts_and_no_other_message() -> None:
    queue = link.MessageQueue(rollouts=2)
    for n in range(50):
        queue.put(link.TrainerState(NodeState.TRAINING, str(n)))
        queue.put(Deliver(rollout()) if n % 2 else Share((rollout(),), n))
    taken = [queue.pop() for _ in range(len(queue))]
    assert taken[:50] == [link.TrainerState(NodeState.TRAINING, str(n)) for n in range(50)]
    assert taken[50:] == [Share((rollout(),), 48), Deliver(rollout())]
    assert queue.pop() is None


def test_a_long_round_is_followed_by_the_latest_rollouts_only(ends: Ends) -> None:
    daemon, trainer, *_ = ends
    flood = range(link.MAX_WAITING_ROLLOUTS + 10)
    say(daemon, trainer, *(Deliver(rollout(n)) for n in flood))
    assert [r.ref.n for r in trainer.collect()[0]] == list(flood)[10:]


def test_closing_the_link_does_not_report_a_lost_daemon(ends: Ends) -> None:
    """Otherwise a finished trainer would end at once, before its last messages, as if the daemon had died."""
    daemon, trainer, gone, threads = ends
    trainer.tell(link.Stopped(1))
    trainer.close()
    assert read(daemon, 1) == [link.Stopped(1)] and daemon.recv(1) == b""
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not gone.is_set()


def test_messages_to_an_ended_daemon_are_lost_without_an_error(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends with unread data, so the trainer gets a connection reset, not an end of file."""
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    daemon, trainer, gone, threads = ends
    trainer.share([rollout()], 1)
    daemon.recv(1)
    daemon.close()
    assert gone.wait(TIMEOUT_S)
    trainer.share([rollout(text="x" * (1 << 20))], 1)
    trainer.close()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert raised == []


@pytest.mark.parametrize("message", [link.Stop(), link.Pause(), link.JudgeQuestion("1", "2 + 2?")])
def test_waiting_ends_when_a_request_arrives(ends: Ends, message: link.ToTrainer) -> None:
    daemon, trainer, *_ = ends
    threading.Timer(0.05, daemon.sendall, [link.pack(message)]).start()
    begun = time.monotonic()
    for _ in range(2):  # the second time, the request arrived before the wait
        trainer.wait(TIMEOUT_S)
    assert time.monotonic() - begun < TIMEOUT_S
    assert (trainer.stopping, trainer.paused, trainer.question() is not None) == tuple(
        isinstance(message, kind) for kind in (link.Stop, link.Pause, link.JudgeQuestion)
    )


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_are_decoded_however_the_stream_is_split(step: int) -> None:
    sent: list[link.ToTrainer] = [
        START,
        link.Pause(),
        Deliver(rollout(text="x" * 99)),
        link.Stop(),
    ]
    stream = b"".join(map(link.pack, sent))
    unpacker = link.Unpacker[link.ToTrainer](link.ToTrainer)
    assert [m for i in range(0, len(stream), step) for m in unpacker.feed(stream[i : i + step])] == sent


def test_an_oversized_message_is_rejected() -> None:
    with pytest.raises(ValueError, match="limit"):
        link.Unpacker[link.ToDaemon](link.ToDaemon).feed(b"\xff\xff\xff\xff")
