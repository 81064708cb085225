"""When a run is saved, which actions wait for a save, and what a kill loses.

The parts are real; the disk can be slow or full.
"""

import errno
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from swarmd import link
from swarmd.config.config import CheckpointConfig
from swarmd.errors import CannotRecord
from swarmd.exchange.events import Share
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.state.metrics import read_metrics
from swarmd.trainer import trainer as node
from swarmd.trainer.checkpoint import Checkpoints, Content, RunState, Timetable
from swarmd.types import Rollout
from tests.doubles import TIMEOUT_S
from tests.processes import wait_until
from tests.swarmd.trainer.conftest import TrainerIn
from tests.swarmd.trainer.test_checkpoint import written


class SlowDisk(Checkpoints):
    late = 0.05

    def save(self, state: RunState, files: Iterable[tuple[str, Content]]) -> Path:
        time.sleep(self.late)  # long enough to detect code that does not wait
        return super().save(state, files)

    def durable(self) -> int:
        """Return the round of the latest checkpoint."""
        return max((int(p.name.removeprefix("round-")) for p in self.folder.glob("round-*")), default=0)


class SmallDisk(Checkpoints):
    """A disk that is full until `room` is true."""

    room, tries = False, 0

    def save(self, state: RunState, files: Iterable[tuple[str, Content]]) -> Path:
        def written() -> Iterator[tuple[str, Content]]:
            yield from files
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.tries += 1
        return super().save(state, written())


def noting(disk: SlowDisk, function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """Return the function, changed so that each call first records the saved round in `seen`."""
    return lambda *given, **more: seen.append(disk.durable()) or function(*given, **more)  # type: ignore[func-returns-value]


# Helpers that read what the trainer sends and saves.


def heard(daemon: socket.socket) -> list[link.ToDaemon]:
    """Return all messages of the trainer, up to its last."""
    unpacker, messages = link.Unpacker[link.ToDaemon](link.ToDaemon), list[link.ToDaemon]()
    while not any(isinstance(m, link.Stopped) for m in messages):
        messages += unpacker.feed(daemon.recv(1 << 16))
    return messages


def figures(folder: Path) -> list[tuple[float, float, float]]:
    return [(line.reward_sum, line.loss, line.grad_norm) for line in read_metrics(folder / "metrics.jsonl")]


def assert_same_end(folder: Path, name: str) -> None:
    assert figures(folder / "cut") == figures(folder / "whole")
    for file in ("weights.safetensors", "training.safetensors", "run.msgpack"):
        ends = [(folder / side / "checkpoints" / name / file).read_bytes() for side in ("cut", "whole")]
        assert ends[0] == ends[1], file


def shared(daemon: socket.socket) -> list[Rollout]:
    """Return all rollouts that the trainer shared, up to its last message."""
    return [rollout for m in heard(daemon) if isinstance(m, Share) for rollout in m.rollouts]


def test_rounds_are_saved_when_a_checkpoint_is_due_and_at_the_end(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    with trainer_in(tmp_path, 4) as (trainer, daemon):
        disk = SlowDisk(trainer.checkpoints.folder)
        trainer.checkpoints, one, saved = disk, trainer._one_round, []

        def round_() -> None:
            one()
            saved.append(disk.durable())
            if trainer.round == 2:  # make a checkpoint due and affordable
                trainer.timetable.last = trainer.timetable.paid = -math.inf

        trainer._one_round = round_  # type: ignore[method-assign]
        trainer.run()
        told = [m.saved for m in heard(daemon) if isinstance(m, link.RoundDone)]
    assert saved[:2] == [0, 0] and told[:2] == [0, 0] and disk.durable() == 4
    assert sorted(p.name for p in disk.folder.iterdir()) == ["round-00000002", "round-00000004"]


def test_a_judge_that_asks_each_round_does_not_make_small_checkpoints_more_frequent() -> None:
    """Saves at every answer would write 25 GB per day for a model of 3.4 MB; the limit is 50 GB."""
    timetable, written = Timetable(60.0, 50e9, 0.0), 0
    for second in range(86_400):
        if timetable.affordable(second):
            timetable.wrote(10_300_000, second)
            written += 10_300_000
    assert 14e9 < written < 15e9
    large = Timetable(60.0, 50e9, 0.0)
    assert large.interval(105_000_000) > 180, (
        "the interval of large checkpoints does not depend on their size"
    )


def test_rounds_lost_to_a_kill_run_again_with_the_same_result(trainer_in: TrainerIn, tmp_path: Path) -> None:
    """Questions, answers and updates are the same.

    Each round has one line in the metrics, and the same rollouts are shared again.
    """
    with trainer_in(tmp_path / "whole", 4) as (trainer, daemon):
        trainer.run()
        sent = shared(daemon)
    with trainer_in(tmp_path / "cut", 2) as (trainer, _):
        trainer.run()
    # Two rounds run without a checkpoint, and are lost.
    with trainer_in(tmp_path / "cut", 4) as (trainer, _):
        trainer._one_round()
        trainer._one_round()
    assert len(figures(tmp_path / "cut")) == 4
    with trainer_in(tmp_path / "cut", 4) as (trainer, daemon):
        assert trainer.round == 2 and figures(tmp_path / "cut") == figures(tmp_path / "whole")[:2]
        trainer.run()
        again = shared(daemon)
    assert again == sent[-len(again) :] and again
    assert_same_end(tmp_path, "round-00000004")


def test_a_checkpoint_with_invalid_weights_is_skipped_with_a_note(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    """The manifest is valid, because anyone who can write to the folder can make one."""
    with trainer_in(tmp_path, 2, every=0, gigabytes_a_day=10**6) as (trainer, _):
        trainer.run()
    folder = tmp_path / "checkpoints" / "round-00000002"
    written(folder, "weights.safetensors", b"nonsense" * 100)
    with trainer_in(tmp_path, 2) as (trainer, daemon):
        assert trainer.round == 1
        daemon.sendall(link.pack(link.Stop()))
        while not trainer.link.stopping:
            trainer.link.wait(TIMEOUT_S)
        trainer.run()
        (ready,) = [m for m in heard(daemon) if isinstance(m, link.TrainerReady)]
    assert (
        any("round-00000002 is damaged" in note for note in ready.notes)
        and "resumed after round 1" in ready.notes
    )


def test_an_interval_below_a_minute_is_not_rounded_to_zero() -> None:
    assert "every 0.3 min, not every 1 s" in node.slower(10**7, 17.3, CheckpointConfig(every=1.0))


def test_the_daily_limit_of_written_bytes_is_kept_and_reported_once(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    # A checkpoint of tiny has 10 MB, so one is allowed in ten days.
    with trainer_in(tmp_path, 4, every=0, gigabytes_a_day=0.001) as (trainer, daemon):
        trainer.run()
        messages = heard(daemon)
    (note,) = [m.text for m in messages if isinstance(m, link.Note)]
    assert "checkpoint.gigabytes_a_day" in note and "min, not every 0 s" in note
    assert [m.affordable for m in messages if isinstance(m, link.RoundDone)] == [True, False, False, False]
    assert sorted(p.name for p in trainer.checkpoints.folder.iterdir()) == [
        "round-00000001",
        "round-00000004",
    ], "the first and the last round are not the saved ones"


def test_metrics_lines_are_durable_before_the_checkpoint_of_their_rounds(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    with trainer_in(tmp_path, 1) as (trainer, _):
        order, sync, save = [], trainer.metrics.sync, trainer.checkpoints.save

        def synced() -> None:
            order.append("lines")
            sync()

        def saved(state: RunState, files: Iterable[tuple[str, Content]]) -> Path:
            order.append("checkpoint")
            return save(state, files)

        trainer.metrics.sync, trainer.checkpoints.save = synced, saved  # type: ignore[method-assign]
        trainer.run()
    assert order == ["lines", "checkpoint"]


def test_a_round_is_saved_before_a_long_rest(trainer_in: TrainerIn, tmp_path: Path) -> None:
    """If the rounds have a pace, a checkpoint does not wait for the next round."""
    with trainer_in(tmp_path, 0, every=0) as (trainer, daemon):
        trainer._one_round()
        trainer.link.wait = lambda seconds: daemon.sendall(link.pack(link.Stop()))  # type: ignore[method-assign]
        trainer._rest(time.monotonic() + 3600)
        assert [p.name for p in trainer.checkpoints.folder.iterdir()] == ["round-00000001"]


def test_a_full_disk_pauses_the_run_and_questions_cause_no_extra_attempts(
    trainer_in: TrainerIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "RETRY_FULL_DISK_S", 0.05)
    with trainer_in(tmp_path, 2, every=0, gigabytes_a_day=10**6) as (trainer, daemon):
        disk, took = SmallDisk(trainer.checkpoints.folder), list[float]()
        wait = trainer.link.wait

        def waited(seconds: float, **kinds: bool) -> None:
            if not took:
                daemon.sendall(link.pack(link.JudgeQuestion("1", "2 + 2?")))
                wait(TIMEOUT_S)
            disk.room = disk.tries >= 4
            begun = time.monotonic()
            wait(seconds, **kinds)
            took.append(time.monotonic() - begun)

        trainer.checkpoints, trainer.link.wait = disk, waited  # type: ignore[method-assign]
        trainer.run()
        messages = heard(daemon)
    assert any(isinstance(m, link.JudgeAnswer) for m in messages) and took and min(took) >= 0.05
    states = [m for m in messages if isinstance(m, link.TrainerState)]
    paused = [s for s in states if s.state == "paused"]
    assert len(paused) > 1 and states[-1].state == "training"
    assert sum("Free some space" in line for line in caplog.messages) == 1
    assert all("Free some space" in s.cause and "tried again" in s.remedy for s in paused)
    # A view joins cause and remedy into one sentence: "…; it is tried again".
    assert not any(s.cause.endswith(".") for s in paused)
    assert len(figures(tmp_path)) == 2 and (disk.folder / "round-00000002").is_dir()


def test_a_run_that_is_stopped_on_a_full_disk_keeps_its_saved_rounds(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    with trainer_in(tmp_path, 0) as (trainer, daemon):
        disk = SmallDisk(trainer.checkpoints.folder)
        disk.room = True
        trainer.checkpoints = disk
        trainer._one_round()
        trainer._save()
        disk.room = False
        trainer._one_round()
        daemon.sendall(link.pack(link.Stop()))
        while not trainer.link.stopping:
            trainer.link.wait(TIMEOUT_S)
        with pytest.raises(CannotRecord, match="Free some space"):
            trainer.run()
    with trainer_in(tmp_path, 0) as (trainer, _):
        assert trainer.round == 1 and len(figures(tmp_path)) == 1


def test_a_run_is_saved_before_it_pauses(trainer_in: TrainerIn, tmp_path: Path) -> None:
    with trainer_in(tmp_path, 0) as (trainer, daemon):
        disk, tell, paused = SlowDisk(trainer.checkpoints.folder), trainer.link.tell, []

        def told(message: link.ToDaemon) -> None:
            if isinstance(message, link.TrainerState) and message.state == "paused":
                paused.append(disk.durable())
                daemon.sendall(link.pack(link.Stop()))
            tell(message)

        trainer.checkpoints, trainer.link.tell = disk, told  # type: ignore[method-assign]
        trainer._one_round()
        daemon.sendall(link.pack(link.Pause()))
        while not trainer.link.paused:
            trainer.link.wait(TIMEOUT_S)
        trainer.run()
        assert link.Stopped(1) in heard(daemon)
    assert paused == [1]


def test_the_judge_is_answered_with_saved_weights(trainer_in: TrainerIn, tmp_path: Path) -> None:
    with trainer_in(tmp_path, 1) as (trainer, daemon):
        disk, durable = SlowDisk(trainer.checkpoints.folder), list[int]()
        answer = noting(disk, trainer.policy.next_text, durable)
        trainer.checkpoints, trainer.policy.next_text = disk, answer  # type: ignore[method-assign]
        daemon.sendall(link.pack(link.JudgeQuestion("1", "2 + 2?")))
        trainer.link.wait(TIMEOUT_S)
        trainer.run()
        assert any(isinstance(m, link.JudgeAnswer) for m in heard(daemon))
    assert durable == [1]


def test_a_judges_question_does_not_wait_for_another_long_round(
    trainer_in: TrainerIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer answers after it has reported a round; the judge waits only two minutes."""
    monkeypatch.setattr(node, "LONG_ROUND_S", 0.0)
    monkeypatch.setattr(node, "QUESTION_S", TIMEOUT_S)
    with trainer_in(tmp_path, 2, judge="http://judge.test") as (trainer, daemon):
        tell, asking = trainer.link.tell, link.pack(link.JudgeQuestion("1", "2 + 2?"))

        def told(message: link.ToDaemon) -> None:
            tell(message)
            if isinstance(message, link.RoundDone):
                Timer(0.1, lambda: daemon.sendall(asking)).start()

        trainer.link.tell = told  # type: ignore[method-assign]
        trainer.run()
        kinds = [type(m) for m in heard(daemon) if isinstance(m, link.RoundDone | link.JudgeAnswer)]
    assert kinds == [link.RoundDone, link.JudgeAnswer] * 2


def test_a_comparison_is_answered_with_the_latest_and_the_initial_weights(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    def play(folder: Path, *, asked: bool) -> tuple[list[Any], list[link.ToDaemon], node.Trainer]:
        with trainer_in(folder, 3) as (trainer, daemon):
            if asked:
                daemon.sendall(link.pack(link.CompareRequest()))
                trainer.link.wait(TIMEOUT_S)
            trainer.run()
            messages = heard(daemon)
        lines = read_metrics(folder / "metrics.jsonl")
        return [(line.reward_mean, line.loss) for line in lines], messages, trainer

    rounds, messages, trainer = play(tmp_path / "asked", asked=True)
    (found,) = (m for m in messages if isinstance(m, link.ComparedAnswers))
    assert found.round == 1 and {found.now[1], found.first[1]} <= {0.0, 1.0}
    start = LanguagePolicy.open(trainer.config, 1)
    assert found.first[0] == start.answer(found.question).text
    # The question does not change the run.
    assert rounds == play(tmp_path / "alone", asked=False)[0]


def test_a_round_is_saved_before_the_next_begins(trainer_in: TrainerIn, tmp_path: Path) -> None:
    with trainer_in(tmp_path, 2, every=0, gigabytes_a_day=10**6) as (trainer, daemon):
        disk, begun = SlowDisk(trainer.checkpoints.folder), list[int]()
        trainer.checkpoints, trainer.policy.generate = disk, noting(disk, trainer.policy.generate, begun)  # type: ignore[method-assign]
        trainer.run()
        heard(daemon)
    assert begun == [0, 1] and disk.durable() == 2
    assert read_metrics(tmp_path / "metrics.jsonl")[1].seconds["checkpoint"] >= disk.late


@pytest.mark.parametrize("stage", ["generate", "train"])
def test_an_interrupted_round_is_lost_and_the_rounds_before_it_are_saved(
    trainer_in: TrainerIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """`swarmd stop --now` comes at the first token or the first micro-batch of the third round."""
    with trainer_in(tmp_path, 0) as (trainer, daemon):
        policy = trainer.policy
        name = "generate" if stage == "generate" else "update"
        work = getattr(policy, name)

        def stopped(*given: Any, **_: Any) -> Any:
            if trainer.round == 2:
                daemon.sendall(link.pack(link.Stop(now=True)))
                wait_until(lambda: trainer.link.hurried)
            return work(*given)

        monkeypatch.setattr(policy, name, stopped)
        trainer.run()
        told = heard(daemon)
    assert told[-1] == link.Stopped(2) and len([m for m in told if isinstance(m, link.RoundDone)]) == 2
    assert [line.round for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    with trainer_in(tmp_path, 3) as (trainer, daemon):
        assert trainer.round == 2
        trainer.run()
        assert heard(daemon)[-1] == link.Stopped(3)
