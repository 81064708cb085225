"""The watchdog distinguishes a stuck trainer from a slow or paused trainer and from a machine that slept."""

import io
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from swarmd import link
from swarmd.cli.views.plain import PlainView
from swarmd.config.config import NodeConfig
from swarmd.daemon.daemon import Daemon as Node
from swarmd.daemon.supervision import watchdog
from swarmd.daemon.supervision.restarts import HOPELESS_DEATHS, Death, Deaths
from swarmd.daemon.supervision.trainer_process import TrainerChild, _cause
from swarmd.daemon.supervision.watchdog import MAX_COUNTED_S, Stuck, Watchdog
from swarmd.state.logs import LOG_BYTES
from swarmd.state.status import NodeState
from swarmd.system.exits import exit_words
from swarmd.types import RoundLine
from tests import ROOT
from tests.doubles import TIMEOUT_S

TRAINING, ALIVE, ROUND = (
    link.TrainerState(NodeState.TRAINING),
    link.Alive(),
    link.RoundDone(RoundLine(round=1), None),
)


class Daemon:
    """A daemon that checks its trainer each second, with simulated time and messages."""

    def __init__(self, dog: Watchdog | None = None) -> None:
        self.dog, self.now = dog or Watchdog(), 1000.0
        self.dog.started(self.now)

    def wait(
        self, seconds: float, every: float | None = None, says: Sequence[link.ToDaemon] = ()
    ) -> Stuck | None:
        """Send `says` each `every` seconds; return the last verdict, or the first hopeless one."""
        found: Stuck | None = None
        for second in range(round(seconds)):
            if every is not None and second % every == 0:
                for message in says:
                    self.dog.note_received(message)
            self.now += 1
            found = self.dog.check(self.now)
            if found is not None and found.hopeless:
                return found
        return found


@pytest.fixture
def daemon() -> Daemon:
    """Return a daemon whose trainer has rounds of 5 s."""
    daemon = Daemon()
    daemon.dog.note_received(TRAINING)
    assert daemon.wait(60, 5, [ALIVE, ROUND]) is None
    return daemon


def test_a_silent_trainer_is_reported_as_stuck_and_killed_within_minutes(daemon: Daemon) -> None:
    begun = daemon.now
    shown = daemon.wait(60)
    assert (
        shown is not None
        and "does not answer" in shown.cause
        and "killed" in shown.remedy
        and not shown.hopeless
    )
    end = daemon.wait(3600)
    assert end is not None and end.hopeless and 240 < daemon.now - begun <= 301
    assert "SIGSTOP" in end.cause and "kill -CONT" in end.remedy


def test_a_trainer_that_speaks_again_is_not_stuck(daemon: Daemon) -> None:
    assert daemon.wait(60) is not None and daemon.wait(1, 1, [ALIVE]) is None


def test_a_trainer_that_rests_between_rounds_is_not_stuck_but_a_hanging_one_is(tmp_path: Path) -> None:
    config = NodeConfig.model_validate({"round": {"pace": 3600}, "swarm": {"engine": "none"}})
    daemon = Daemon(Node(config, tmp_path, PlainView(io.StringIO())).child.watchdog)
    for _ in range(2):
        daemon.dog.note_received(TRAINING)
        assert daemon.wait(20, 5, [ALIVE]) is None
        daemon.dog.note_received(ROUND)
        assert daemon.wait(3590, 2, [ALIVE]) is None
        daemon.dog.started(daemon.now)  # each time, its first rest
    daemon.dog.note_received(TRAINING)
    end = daemon.wait(10 * 3600, 2, [ALIVE])
    assert end is not None and end.hopeless


def test_a_hanging_loop_is_found_although_the_process_sends_messages(daemon: Daemon) -> None:
    assert daemon.wait(290, 2, [ALIVE]) is None
    shown = daemon.wait(60, 2, [ALIVE])
    assert (
        shown is not None
        and "no round has ended for over 5 min; the slowest of late took 5.0 s" in shown.cause
    )
    begun = daemon.now
    end = daemon.wait(7200, 2, [ALIVE])
    assert end is not None and end.hopeless and daemon.now - begun > 1200


def test_rests_for_the_cpu_share_do_not_count_as_hanging(daemon: Daemon) -> None:
    """With 2 % of the machine, rounds of 5 s take 250 s, and a round of 105 s takes over 5,000 s."""
    for _ in range(100):
        daemon.dog.note_sent(link.Pause(brief=True))
        assert daemon.wait(49, 2, [ALIVE]) is None
        daemon.dog.note_sent(link.Resume())
        assert daemon.wait(1, 1, [ALIVE]) is None
    daemon.dog.note_received(ROUND)
    hangs = daemon.wait(600, 2, [ALIVE])
    assert (
        hangs is not None
        and "no round has ended for over 9 min; the slowest of late took 105.0 s" in hangs.cause
    )


def test_long_rounds_are_normal_if_all_rounds_are_long() -> None:
    """On a slow machine, each round takes ten minutes, one round takes forty, and the first takes an hour."""
    daemon = Daemon()
    daemon.dog.note_received(TRAINING)
    assert daemon.wait(3600, 2, [ALIVE]) is None
    daemon.dog.note_received(ROUND)
    for minutes in (10, 10, 40, 10):
        assert daemon.wait(60 * minutes, 2, [ALIVE]) is None
        daemon.dog.note_received(ROUND)


def test_a_round_with_a_pause_does_not_count_as_short() -> None:
    """The last five seconds of a round of forty minutes come after a pause; the next round is as long."""
    daemon = Daemon()
    for before, after in ((2395, 5), (2400, 0)):
        daemon.dog.note_received(TRAINING)
        assert daemon.wait(before, 2, [ALIVE]) is None
        daemon.dog.note_received(link.TrainerState(NodeState.PAUSED, "because", "wait"))
        assert daemon.wait(60, 2, [ALIVE]) is None
        daemon.dog.note_received(TRAINING)
        assert daemon.wait(after, 2, [ALIVE]) is None
        daemon.dog.note_received(ROUND)


@pytest.mark.parametrize("state", ["paused", "waiting", "starting", "stopping"])
def test_a_trainer_that_is_set_not_to_train_is_not_hanging(daemon: Daemon, state: str) -> None:
    daemon.dog.note_received(link.TrainerState(NodeState(state), "because", "wait"))
    assert daemon.wait(4 * 3600, 2, [ALIVE]) is None


def test_after_sleep_or_starvation_of_the_machine_the_trainer_is_not_blamed(daemon: Daemon) -> None:
    for asleep in (8 * 3600, 400, -5):
        daemon.now += asleep
        assert daemon.dog.check(daemon.now) is None
    daemon.dog.note_received(ALIVE)
    for _ in range(7):  # on a swapping machine, checks come a minute apart
        daemon.now += 60
        assert daemon.dog.check(daemon.now) is None


def test_a_slow_start_does_not_count_as_silence() -> None:
    daemon = Daemon()
    assert daemon.wait(290) is None
    late = daemon.wait(3600)
    assert late is not None and not late.hopeless


def test_imports_that_block_all_threads_do_not_count_as_silence() -> None:
    daemon = Daemon()
    for step in ("loading PyTorch", "loading transformers"):
        daemon.dog.note_received(link.TrainerState(NodeState.STARTING, step, "wait"))
        assert daemon.wait(240) is None
    daemon.dog.note_received(TRAINING)
    assert daemon.wait(240) is None  # the first round also imports modules
    daemon.dog.note_received(ROUND)
    assert daemon.wait(20) is not None


def test_a_trainer_that_always_dies_after_the_same_checkpoint_is_hopeless() -> None:
    deaths = Deaths()
    died = []
    for _ in range(HOPELESS_DEATHS):
        for number in (11, 12, 13):  # these rounds are lost and run again each time
            deaths.progress(number)
        died.append(deaths.died("out of memory"))
    assert [(death.count, death.backoff, death.hopeless) for death in died] == [
        (1, 0.0, False), (2, 2.0, False), (3, 4.0, False), (4, 8.0, False), (5, 16.0, True),
    ]  # fmt: skip
    deaths.progress(14)
    assert deaths.died("out of memory").count == 1
    assert [exit_words(-9), exit_words(3)] == ["killed by signal 9 (out of memory, perhaps)", "exit 3"]


def test_the_same_error_twice_before_the_first_round_ends_the_restarts() -> None:
    """Different causes, or deaths in between that a restart may fix, do not."""
    deaths = Deaths()
    causes = [("no file", True), ("no room", True), ("killed", False), ("no room", True), ("no room", True)]
    died = [deaths.died(cause, lasting=lasting) for cause, lasting in causes]
    assert [death.hopeless for death in died] == [False, False, False, False, True]


@pytest.mark.net
def test_a_trainer_that_dies_during_loading_is_started_twice(tmp_path: Path) -> None:
    causes, child = causes_of_death("telling", tmp_path / "trainer.log", deaths=3)
    assert len(causes) == 1 and child.restarts == 1
    assert child.failed is not None and "in a row in the same way" in child.failed.message


def causes_of_death(
    module: str, log_file: Path, deaths: int = 1, between: Callable[[], object] = lambda: None, **more: Any
) -> tuple[list[str], TrainerChild]:
    """Start a module of this folder as the trainer; return the causes of its deaths, and stop after some."""
    causes: list[str] = []

    def died(death: Death) -> None:
        causes.append(death.cause)
        child.stop() if len(causes) == deaths else between()

    async def run() -> None:
        with trio.fail_after(TIMEOUT_S):
            await child.run()

    start = link.StartTrainer("{}", "", "", 1)
    child = TrainerChild(start, log_file, print, died, module=f"tests.swarmd.daemon.{module}", **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # so that `tests` can be imported
        trio.run(run)
    return causes, child


@pytest.mark.net
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_lingering_trainer_is_killed_and_not_restarted_once_stopped(tmp_path: Path, deaths: int) -> None:
    causes, child = causes_of_death("lingering", tmp_path / "trainer.log", deaths, lingers=0.1)
    assert causes == ["killed by signal 9 (out of memory, perhaps)"] * deaths
    assert child.restarts == deaths - 1 and child.pid is None


@pytest.mark.net
def test_a_trainer_of_another_version_counts_as_dead_with_a_cause(tmp_path: Path) -> None:
    (cause,), _ = causes_of_death("foreign", tmp_path / "trainer.log")
    assert "another version of swarmd" in cause and "join again" in cause


@pytest.mark.net
def test_a_trainers_threads_wait_without_spinning_in_any_locale(tmp_path: Path) -> None:
    """libgomp compares the setting by the locale's letters, and in Turkish "I" is not the capital of "i"."""
    (cause,), _ = causes_of_death("telling", tmp_path / "trainer.log")
    assert cause.startswith("OMP_WAIT_POLICY=passive (")


@pytest.mark.net
def test_a_trainers_output_cannot_fill_the_disk(tmp_path: Path) -> None:
    log_file = tmp_path / "trainer.log"
    (cause,), _ = causes_of_death("talking", log_file)
    assert cause.startswith("the last word (") and log_file.read_text() == "the last word\n"
    assert log_file.with_name("trainer.log.1").stat().st_size == LOG_BYTES + 1


@pytest.mark.parametrize("before", ["", "[rank0]: "])
def test_an_error_is_reported_with_its_own_text_and_not_with_torchs_note(before: str, tmp_path: Path) -> None:
    """torch 2.13 adds this text on CUDA (c10/cuda/CUDAException.cpp)."""
    lines = (
        "Traceback (most recent call last):",
        '  File "/swarmd/policy/inference/decode.py", line 132, in decode_rows',
        "    left = [place for place, lives in enumerate(alive.tolist()) if lives]",
        "                                                ^^^^^^^^^^^^^^",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "Search for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda for more information.",
        "CUDA kernel errors might be asynchronously reported at some other API call.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Device-side assertion tracking was not enabled by user.",
    )
    log_file = tmp_path / "trainer.log"
    log_file.write_text("began\n" + "".join(f"{before}{line}\n" for line in lines))
    told = _cause(1, log_file)
    assert told == (
        f"torch.AcceleratorError: CUDA error: unspecified launch failure (exit 1; more in {log_file})"
    )
    log_file.write_text(log_file.read_text().replace(" CUDA error:", " \n\nCUDA error:"))
    assert _cause(1, log_file) == told, "a text that begins with an empty line gave no cause"


@pytest.mark.net
def test_a_trainer_that_cannot_be_started_counts_as_dead_and_is_retried(tmp_path: Path) -> None:
    log_file = tmp_path / "logs" / "trainer.log"
    causes, _ = causes_of_death("lingering", log_file, 2, log_file.parent.mkdir, lingers=0.1)
    assert (
        causes[0] == f"it cannot be started: [Errno 2] No such file or directory: '{log_file}'"
        and "signal 9" in causes[1]
    )


@pytest.mark.net
def test_a_frozen_trainer_is_reported_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is frozen with SIGSTOP and never continued."""
    told: list[Stuck | None] = []
    deaths: list[Death] = []
    for limit, value in {"SILENT_S": 1.0, "SILENT_END_S": 3 * MAX_COUNTED_S, "HANGING_ROUNDS": 0.0}.items():
        monkeypatch.setattr(watchdog, limit, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # so that `tests` can be imported

    async def run() -> None:
        done = trio.Event()

        def heard(message: link.ToDaemon) -> None:
            if not isinstance(message, link.RoundDone) or child.pid is None:
                return
            if deaths:
                done.set()
            elif not told:
                os.kill(child.pid, signal.SIGSTOP)

        child = TrainerChild(
            link.StartTrainer("{}", "", "", 1),
            tmp_path / "trainer.log",
            heard,
            deaths.append,
            told.append,
            module="tests.swarmd.daemon.playing",
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.run)
            with trio.fail_after(TIMEOUT_S):
                await done.wait()
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert [stuck is not None and "SIGSTOP" in stuck.cause for stuck in told] == [True, True]
    assert len(deaths) == 1 and "it was stuck" in deaths[0].cause
