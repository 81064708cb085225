"""Clients that never read: they request a judge's largest page and read nothing of the response.

`pytest -s` prints the figures.

The judge is a separate process. The page shows a peer with 500 answers of maximum length. An honest node is
evaluated at the same time.
"""

import socket
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import trio

from judge.config import MAX_ANSWER_CHARACTERS
from judge.store import store as judge_store
from judge.store.store import open_store
from judge.types import OpenQuestion, Requester
from p2p.identity import Identity
from swarmd.daemon.judging.client import Graded, JudgeClient, Question
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Task, TaskRef
from tests.attacks.harness import Attack, show
from tests.doubles import TIMEOUT_S
from tests.judge.databases import WINDOW
from tests.judge.test_serving import address, client, serving

MIB = 2**20
PAGES = 40  # requests of each client
LONG = Identity(b"\x4c" * 32).peer_id  # the peer whose page is read


def fill(folder: Path, answers: int) -> None:
    now = time.time()  # recent, because the judge deletes a peer that was silent for a month
    with closing(open_store(folder / "judge.sqlite3", f"tiny-9 {TINY_9.digest}")) as store:
        for number in range(answers):
            task = Task(TaskRef("bf", 10**9 + number), "?", {})
            asker = Requester("", record=True)
            asked = OpenQuestion(f"{number:032x}", LONG, task, 0.0, 60.0, asker, WINDOW, 0)
            store.run(judge_store.asked, asked, 2 * number, now)
            answer = Completion("\U0001f600" * MAX_ANSWER_CHARACTERS, True)
            store.run(judge_store.graded, asked, [answer], [ScoredAnswer.of(0.0)], 0.5, 2 * number + 1, now)


async def calls(judge: JudgeClient, seconds: float, least: int) -> list[float]:
    """Evaluate an honest node for `seconds`, and at least `least` times.

    Return the seconds of each evaluation, which is two calls.
    """
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < least:
        begun = time.monotonic()
        question = await judge.ask(1, "tiny")
        assert isinstance(question, Question), question
        assert isinstance(await judge.answer(question, Completion("<answer>0</answer>", True)), Graded)
        taken.append(time.monotonic() - begun)
        await trio.sleep(1.1)  # one question a second
    return taken


def attack(folder: Path, readers: int = 60, seconds: float = 16.0, answers: int = 500) -> dict[str, Any]:
    fill(folder, answers)
    with ExitStack() as stack:
        process, ready = stack.enter_context(serving(folder))
        judge, honest = psutil.Process(process.pid), client(str(ready["url"]), 1)
        clean = trio.run(calls, honest, 0.0, 2)
        pages = [httpx2.get(f"{ready['url']}/v1/peers/{LONG}", timeout=TIMEOUT_S) for _ in range(2)]
        before = judge.memory_info().rss
        for _ in range(readers):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(address(ready))
            # The responses are larger than the kernel's buffers.
            reader.sendall(f"GET /v1/peers/{LONG} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * PAGES)
        most = 0

        async def watched() -> list[float]:
            nonlocal most
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    nonlocal most
                    while True:
                        most = max(most, judge.memory_info().rss - before)
                        await trio.sleep(0.05)

                nursery.start_soon(watch)
                taken = await calls(honest, seconds, 2)
                nursery.cancel_scope.cancel()
            return taken

        during = trio.run(watched)
    found = {
        "page_KiB": max(len(page.content) for page in pages) / 1024,
        "more_MiB": most / MIB,
        "clean": statistics.median(clean),
        "during": statistics.median(during),
        "longest": max(during),
    }
    show(f"judge-readers, {readers} who never read", found)
    return found


@pytest.mark.net
@pytest.mark.slow
def test_clients_that_never_read_cost_little_memory_and_no_time(tmp_path: Path) -> None:
    found = attack(tmp_path, seconds=0.0, answers=40)
    assert 64 < found["page_KiB"] <= 256
    assert found["more_MiB"] <= 64
    assert found["longest"] < 10  # 0.1 s on an idle machine


ATTACK = Attack(attack, {"page_KiB": 256, "more_MiB": 64, "longest": 0.5})
