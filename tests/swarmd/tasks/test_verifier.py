"""The verifier process rejects malformed requests, and is replaced if it is killed or stopped."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from swarmd.protocols import Reward
from swarmd.tasks.answers import MAX_COMPLETION_CHARACTERS
from swarmd.tasks.curriculum import Curriculum
from swarmd.tasks.sandbox import client as client_module
from swarmd.tasks.sandbox import pipe
from swarmd.tasks.sandbox.client import (
    Completion,
    GradeReason,
    ScoredAnswer,
    TaskRef,
    Verifier,
    VerifierFailed,
)
from swarmd.tasks.sandbox.pipe import (
    Judgements,
    Made,
    Reply,
    ScoreItem,
    VerifierReady,
    VerifierRefused,
    VerifierRequest,
)
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import tasks_of
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.swarmd.tasks.watched import descendants

pytestmark = pytest.mark.net

TASKS = tasks_of("tiny-9")
REF = TaskRef("binary_matrix", 7)


def questions(count: int, seed: int) -> list[tuple[TaskRef, list[Completion]]]:
    """Return items with two completions each, the first right and the second wrong."""
    tasks = [
        t for t in TASKS.draw(2 * count, random.Random(seed)) if t.ref.specialty != "propositional_logic"
    ][:count]
    return [
        (
            t.ref,
            [
                Completion(f"<answer>{solution(TASKS, t)}</answer>", True),
                Completion("<answer>?</answer>", False),
            ],
        )
        for t in tasks
    ]


class Raw:
    """A verifier process that a test talks to directly, without the client."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout

    def send(self, body: bytes) -> None:
        self.stdin.write(len(body).to_bytes(4, "big") + body)

    def reply(self) -> Reply:
        reply: Reply = msgspec.msgpack.decode(pipe.receive(self.stdout.fileno()), type=Reply)
        return reply


@pytest.fixture
def raw() -> Iterator[Raw]:
    command = (sys.executable, "-m", Curriculum.module)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0)
    made = Raw(process)
    assert isinstance(made.reply(), VerifierReady)
    yield made
    process.kill()
    process.wait()
    made.stdin.close()
    made.stdout.close()


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier("tiny-9") as started:
        yield started


def test_malformed_requests_are_rejected_and_the_next_request_is_answered(raw: Raw) -> None:
    rng = random.Random(5)
    good = msgspec.msgpack.encode(VerifierRequest("tiny-9", (ScoreItem("binary_matrix", 1, (("x",),)),)))
    wrong = [
        *(None, 7, {"curriculum": "tiny-9"}, ["tiny-9"], ["tiny-9", [["bf", 1, [["x"]], "truth"]]]),
        *(["tiny-9", [["bf", n, [["x"]]]]] for n in ("1", 1.5, None, [1])),
        *(["tiny-9", [["bf", 1, [x]]]] for x in (7, None, b"x", "x", [7], [["x"]])),
    ]
    bodies = [
        *(b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", good[:-1], good + b"\0"),
        *map(msgspec.msgpack.encode, wrong),
        *(rng.randbytes(rng.randrange(60)) for _ in range(1000)),
    ]
    worker = descendants(raw.process.pid)[0].pid
    for body in bodies:
        raw.send(body)
        assert isinstance(raw.reply(), VerifierRefused), body[:80]
    for i in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[i // 8] ^= 1 << i % 8
        raw.send(bytes(flipped))
        assert isinstance(raw.reply(), VerifierRefused | Judgements | Made)
    raw.send(good)
    assert raw.reply() == Judgements(((ScoredAnswer.of(GradeReason.WRONG),),))
    assert [p.pid for p in descendants(raw.process.pid)] == [worker]


def test_unknown_references_and_invalid_answers_get_a_reason(raw: Raw) -> None:
    items = (
        *(ScoreItem("no such", 1, (("x",),)), ScoreItem("bf", -1, (("x",),))),
        ScoreItem("bf", 2**63, (("x",), ("y",))),
        *(ScoreItem("bf", 1, (("x" * 1000,), ("\u202e",), ("",))), ScoreItem("bf", 1, ())),
    )
    raw.send(msgspec.msgpack.encode(VerifierRequest("tiny-9", items)))
    nothing = (ScoredAnswer.of(GradeReason.NO_TASK),)
    refused = tuple(map(ScoredAnswer.of, (GradeReason.TOO_LONG, GradeReason.UNSAFE, GradeReason.WRONG)))
    assert raw.reply() == Judgements((nothing, nothing, nothing * 2, refused, ()))
    raw.send(msgspec.msgpack.encode(VerifierRequest("no such", (ScoreItem("bf", 1, (("x",),)),))))
    assert raw.reply() == Judgements((nothing,))


def test_the_verifier_ignores_signals_and_ends_when_its_input_closes(raw: Raw) -> None:
    worker = descendants(raw.process.pid)[0]
    raw.process.send_signal(signal.SIGINT)
    raw.process.send_signal(signal.SIGTERM)
    raw.send(msgspec.msgpack.encode(VerifierRequest("tiny-9", ())))
    assert raw.reply() == Judgements(())
    raw.stdin.close()
    assert raw.process.wait(timeout=TIMEOUT_S) == 0
    psutil.wait_procs([worker], timeout=TIMEOUT_S)
    assert not worker.is_running()


def test_the_verifier_ends_when_its_client_is_killed() -> None:
    program = (
        "from swarmd.tasks.sandbox.client import *\nwith Verifier('tiny-9') as v:\n"
        " v.judge([(TaskRef('bf', 1), [Completion('<answer>x</answer>', True)])])\n"
        " print(v.pid, flush=True)\n input()"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    process = psutil.Process(int(client.stdout.readline()))
    family = [process, *process.children()]
    assert len(family) == 2
    client.kill()
    client.communicate()
    assert psutil.wait_procs(family, timeout=TIMEOUT_S)[1] == []


def test_the_verifier_has_no_inherited_variables_connections_or_files(verifier: Verifier) -> None:
    verifier.judge(questions(1, 0))
    process = psutil.Process(verifier.pid)
    (worker,) = process.children()
    assert all(
        name.startswith("PYTHON") or name.endswith("_THREADS") or name == "LC_ALL"
        for name in process.environ()
    )
    for member in (process, worker):
        assert member.num_threads() == 1 and member.net_connections() == []
    if sys.platform == "linux":
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == (
            "1",
            "2" if verifier._child.seccomp else "0",
        )
        # One pipe for input and one for output; printed text is discarded.
        held = [str(file.readlink()) for file in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert len(held) == 5 and held.count("/dev/null") == 3


def test_a_killed_verifier_is_restarted(verifier: Verifier) -> None:
    items = questions(8, 1)
    assert verifier.score(items) == [(1.0, 0.0)] * 8
    before, restarts = verifier.pid, verifier.restarts
    os.kill(before, signal.SIGKILL)
    assert verifier.score(items) == [(1.0, 0.0)] * 8
    assert verifier.pid != before and verifier.restarts == restarts + 1


def test_a_killed_worker_is_replaced_and_costs_no_reward(verifier: Verifier) -> None:
    items = questions(8, 2)
    verifier.score(items)
    before, restarts = verifier.pid, verifier.restarts
    files = psutil.Process(before).num_fds()
    for _ in range(10):
        (worker,) = descendants(verifier.pid)
        worker.kill()
        assert verifier.score(items) == [(1.0, 0.0)] * 8
    assert (verifier.pid, verifier.restarts) == (before, restarts)
    assert psutil.Process(before).num_fds() == files, "pipe ends of the killed workers are still open"


@pytest.mark.slow
def test_a_verifier_that_is_killed_repeatedly_still_scores(verifier: Verifier) -> None:
    """The verifier or its worker is killed at random moments.

    A wrong answer never gets a reward, and marking continues.
    """
    stop, kills, rng = threading.Event(), [0], random.Random(3)

    def kill() -> None:
        while not stop.wait(rng.uniform(0.01, 0.4)):
            pid = verifier.pid
            if pid is None:
                continue
            try:
                workers = descendants(pid)  # none while the verifier starts, so that it can start
                if workers:
                    rng.choice([*workers * 9, psutil.Process(pid)]).kill()
                    kills[0] += 1
            except psutil.NoSuchProcess:
                continue

    items = questions(8, 4)
    killer = threading.Thread(target=kill)
    killer.start()
    lost = 0
    try:
        while kills[0] < 10:
            rewards = verifier.score(items)
            assert all(wrong == 0.0 for _, wrong in rewards)
            lost += sum(right != 1.0 for right, _ in rewards)
    finally:
        stop.set()
        killer.join()
    # If two workers are killed during one answer, this answer and perhaps the rest of its item get no reward.
    assert lost <= 2 * kills[0]
    assert verifier.score(items) == [(1.0, 0.0)] * 8


@pytest.mark.slow
def test_a_stopped_verifier_is_replaced(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ITEM_TIMEOUT_S", 0.5)
    items = questions(1, 5)
    verifier.score(items)
    os.kill(verifier.pid, signal.SIGSTOP)
    assert verifier.score(items) == [(1.0, 0.0)]


def test_a_worker_is_replaced_after_many_answers(verifier: Verifier) -> None:
    ref, completions = questions(1, 6)[0]
    (worker,) = descendants(verifier.pid)
    # 6,000 answers, more than MOST_ANSWERS and WORKER_LIFE allow
    assert verifier.score([(ref, completions * 600)] * 5) == [(1.0, 0.0) * 600] * 5
    assert [p.pid for p in descendants(verifier.pid)] != [worker.pid]


def test_a_worker_is_replaced_after_many_questions() -> None:
    program = (
        "from swarmd.tasks.sandbox import worker; worker.WORKER_ANSWERS = 3\n"
        "worker.run(lambda: worker.Work(lambda *_: worker.Prepared('?', lambda _: 1.0)))"
    )
    with Verifier("tiny-9", (sys.executable, "-c", program)) as verifier:
        pids = []
        for _ in range(4):
            assert verifier.make(REF).question == "?"
            pids += [worker.pid for worker in descendants(verifier.pid)]
    assert pids[0] == pids[1] == pids[2] != pids[3]


def impostor(*sent: str) -> tuple[str, ...]:
    """Return a command that sends these messages, reads a little input, and waits."""
    program = f"from swarmd.tasks.sandbox.pipe import *\nfor said in ({','.join(sent)},): send(1, said)\n"
    return (sys.executable, "-c", program + "os.read(0, 8192); time.sleep(600)")


@pytest.mark.parametrize(
    "command, cause",
    [
        ((sys.executable, "-c", "raise SystemExit('no room')"), "no room"),
        ((sys.executable, "-c", "print('hello there, I am no verifier')"), "ended|invalid reply"),
        ((sys.executable, "-c", r"print('\0\0\0\1x', end='')"), "it sent an invalid reply"),
        (impostor("VerifierReady(True)", "VerifierReady(True)"), "it sent a reply of the wrong kind"),
        (impostor("VerifierReady(True)", "Judgements(())"), "it sent 0 scores for 2 answers"),
        (impostor("VerifierReady(True)", "VerifierRefused('no')"), r"it refused the request \(no\)"),
        (impostor("VerifierRefused('no')"), "in a row: no"),
        (("/no/such/python",), "cannot be started"),
    ],
)
def test_a_verifier_that_cannot_run_gives_an_error_with_a_remedy(
    command: tuple[str, ...], cause: str
) -> None:
    with Verifier("tiny-9", command) as broken:
        with pytest.raises(VerifierFailed, match=cause) as caught:
            broken.score(questions(1, 0))
        assert "3 times" in str(caught.value) and "install swarmd again" in str(caught.value)
        assert broken.restarts == 3


def test_the_error_names_the_cause_if_a_worker_cannot_be_replaced() -> None:
    program = (
        "import os; from swarmd.tasks.sandbox.worker import Work, run\n"
        "forks = [os.fork]; os.fork = lambda: forks.pop()()\n"
        "run(lambda: Work(lambda *_: os._exit(1)))"
    )
    with (
        Verifier("tiny-9", (sys.executable, "-c", program)) as broken,
        pytest.raises(VerifierFailed, match="pop from empty list"),
    ):
        broken.score(questions(1, 0))


def test_a_worker_that_dies_before_it_is_ready_is_replaced() -> None:
    program = (
        "import os; from swarmd.tasks.sandbox.worker import Prepared, Work, run\n"
        "fork, deaths = os.fork, [1]; os.fork = lambda: fork() or (os._exit(1) if len(deaths) else 0)\n"
        "os.register_at_fork(after_in_parent=deaths.clear)\n"
        "run(lambda: Work(lambda *_: Prepared('?', lambda _: 1.0)))"
    )
    with Verifier("tiny-9", (sys.executable, "-c", program)) as verifier:
        assert verifier.score([(REF, [Completion("<answer>x</answer>", True)])]) == [(1.0,)]
        assert verifier.restarts == 0 and len(descendants(verifier.pid)) == 1


def test_a_verifier_that_stops_reading_gives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ITEM_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client_module, "ATTEMPTS", 1)
    many = [Completion(f"<answer>{'1' * 90}</answer>", True)] * 1000  # more than the capacity of a pipe
    with (
        Verifier("tiny-9", impostor("VerifierReady(True)")) as stuck,
        pytest.raises(VerifierFailed, match="did not answer in time"),
    ):
        stuck.score([(REF, many)])


def test_a_slow_machine_gets_more_time_with_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "START_TIMEOUT_S", 0.02)
    begun = time.monotonic()
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    with Verifier("tiny-9", command) as slow, pytest.raises(VerifierFailed, match="did not answer in time"):
        slow.score(questions(1, 0))
    assert time.monotonic() - begun >= 0.02 * (1 + 4 + 16)


def test_a_missing_temporary_folder_gives_an_error_with_cause_and_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        Verifier("tiny-9") as broken,
        pytest.raises(VerifierFailed, match=r"temporary file cannot be made.*Free some"),
    ):
        broken.score(questions(1, 0))


# The interface that the rest of swarmd and the judge use: rewards and reasons.


@pytest.fixture(scope="module")
def right() -> str:
    return solution(TASKS, TASKS.task(REF))


def test_each_completion_gets_its_reason(verifier: Verifier, right: str) -> None:
    texts = {
        f"so <answer>{right}</answer>": GradeReason.CORRECT,
        "<answer>0</answer>": GradeReason.WRONG,
        right: GradeReason.NO_ANSWER,
        f"<answer>{right}": GradeReason.NO_ANSWER,
        f"<answer>{right * 40}</answer>": GradeReason.TOO_LONG,
        "x" * MAX_COMPLETION_CHARACTERS + f"<answer>{right}</answer>": GradeReason.TOO_LONG,
        f"<answer>{right}\u202e</answer>": GradeReason.UNSAFE,
        f"<answer>{right}\ud800</answer>": GradeReason.UNSAFE,
        f"\ud800\0<answer>{right}</answer>": GradeReason.CORRECT,
    }
    unknown = TaskRef("no such", 7)
    scores = verifier.judge(
        [(REF, [Completion(text, True) for text in texts]), (unknown, [Completion("", True)] * 2), (REF, [])]
    )
    judged = [tuple(score.reason for score in row) for row in scores]
    assert judged == [tuple(texts.values()), (GradeReason.NO_TASK,) * 2, ()]
    assert verifier.judge([]) == []
    # Truncated after its answer
    assert verifier.score([(REF, [Completion(f"<answer>{right}</answer> and so", False)])]) == [(1.0,)]
    assert verifier.judge([(TaskRef("bf", 2**80), [Completion("<answer>1</answer>", True)])]) == [
        (ScoredAnswer.of(GradeReason.NO_TASK),)
    ]


def test_a_verifier_is_a_reward_that_threads_may_share(verifier: Verifier, right: str) -> None:
    reward: Reward = verifier
    verifier.judge([(REF, [Completion(f"<answer>{right}</answer>", True)])])  # the verifier has started
    restarts, answers = verifier.restarts, list[object]()

    def ask() -> None:
        answers.extend(reward([(REF, [Completion(f"<answer>{right}</answer>", True)])]) for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[(1.0,)]] * 80
    assert verifier.restarts == restarts


def test_an_unused_or_closed_verifier_has_no_process() -> None:
    idle = Verifier("tiny-9")
    assert idle.pid is None
    idle.close()
    with idle as entered:
        pid = entered.pid
        assert psutil.pid_exists(pid), "entering the context does not start the verifier"
        with idle as again:
            assert again.pid == pid
    assert idle.pid is None and not psutil.pid_exists(pid)
