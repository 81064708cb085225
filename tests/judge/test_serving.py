"""`swarmd-judge serve` as a process.

The tests cover evaluations by swarmd's client, slow peers, kill -9, a clean end, and an operator's mistakes.
"""

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
import uvicorn
from typer.testing import CliRunner

from judge.__main__ import main
from judge.cli import app
from judge.config import JudgeSettings
from judge.errors import JudgeError
from judge.server import JudgeServer, in_both_families, listening_socket, reach, serve
from judge.store import store as judge_store
from judge.store.store import open_store
from p2p.errors import OperatorError
from p2p.identity import Identity
from swarmd.daemon.judging.client import Graded, JudgeClient, Question
from swarmd.state.status import Trouble
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.processes import killed_after, wait_until

pytestmark = pytest.mark.net


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a judge; yield its process and the line that it printed when it was ready."""
    starting = command(folder, "--port", "0", "--json", *options)
    process = subprocess.Popen(starting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = ThreadPoolExecutor(1)
    try:
        assert process.stdout is not None
        ready = watchdog.submit(process.stdout.readline).result(TIMEOUT_S)
        assert ready, f"the judge did not start: {process.communicate()}"
        yield process, json.loads(ready)
    finally:
        process.kill()
        process.wait()
        watchdog.shutdown(wait=True)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def command(folder: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "judge",
        "serve",
        "--database",
        str(folder / "judge.sqlite3"),
        "--curriculum",
        "tiny-9",
        *options,
    ]


def key(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


def client(url: str, number: int, digest: str = TINY_9.digest) -> JudgeClient:
    return JudgeClient(url, key(number), digest, seconds=TIMEOUT_S)


async def evaluate(judge: JudgeClient, rounds: int) -> list[Graded]:
    grades = []
    for number in range(rounds):
        question = await judge.ask(number, "tiny")
        assert isinstance(question, Question), question
        grade = await judge.answer(question, Completion("<answer>0</answer>", True))
        assert isinstance(grade, Graded), grade
        grades.append(grade)
    return grades


def board(url: str) -> list[dict[str, Any]]:
    return list(httpx2.get(f"{url}/v1/leaderboard", timeout=TIMEOUT_S).json()["peers"])


def test_nodes_are_judged_and_the_leaderboard_survives_kill_9(tmp_path: Path) -> None:
    async def all_nodes(url: str) -> None:
        async with trio.open_nursery() as nursery:
            for number in (1, 2, 3):
                nursery.start_soon(evaluate, client(url, number), 10)

    with serving(tmp_path) as (process, ready):
        assert ready["digest"] == TINY_9.digest
        url = str(ready["url"])
        trio.run(all_nodes, url)
        assert isinstance(trio.run(client(url, 4).ask, 1, "tiny"), Question)  # open at the kill
        # The leaderboard is recomputed every two seconds.
        wait_until(lambda: [row["answered"] for row in board(url)] == [10, 10, 10])
        before = board(url)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(tmp_path) as (_, ready):
        url = str(ready["url"])
        assert board(url) == before
        four = client(url, 4)
        # The question lost in the kill does not block the next one.
        assert len(trio.run(evaluate, four, 1)) == 1
        grades = trio.run(evaluate, client(url, 1), 1)
        assert grades[0].n == 11


def test_kill_9_while_the_judge_writes_loses_no_grade(tmp_path: Path) -> None:
    """The judge is killed three times, at different moments.

    Afterwards the database has every grade that was sent to the node, exactly once.
    """
    told = 0

    async def until_it_dies(url: str, process: subprocess.Popen[str], after: float) -> int:
        graded, judge, first = 0, client(url, 9), trio.Event()

        async def kill() -> None:
            await first.wait()
            await trio.sleep(after)
            process.kill()

        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                while True:
                    question = await judge.ask(1, "tiny")
                    if isinstance(question, Question):
                        if isinstance(await judge.answer(question, Completion("x", True)), Graded):
                            graded += 1
                            first.set()
                    elif graded:
                        return graded
                    else:
                        await trio.sleep(judge.wait())

    for i in range(3):
        with serving(tmp_path) as (process, ready):
            found = httpx2.get(f"{ready['url']}/v1/peers/{key(9).peer_id}", timeout=TIMEOUT_S)
            answered = found.json()["answered"] if found.status_code == 200 else 0
            # For each kill, at most one answer was written without its grade being sent.
            assert told <= answered <= told + i
            told += trio.run(until_it_dies, str(ready["url"]), process, 0.03 + 0.1 * i)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_judge_cleanly(tmp_path: Path, by: signal.Signals) -> None:
    with serving(tmp_path) as (process, ready):
        trio.run(evaluate, client(str(ready["url"]), 1), 1)
        half_open = socket.create_connection(address(ready))
        half_open.sendall(b"POST /v1/eval")
        process.send_signal(by)
        assert process.wait(TIMEOUT_S) == 0 and process.stderr is not None and process.stderr.read() == ""
        half_open.close()


def test_a_request_that_takes_too_long_during_shutdown_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, ready), socket.create_connection(address(ready), TIMEOUT_S) as slow:
        slow.sendall(
            b"POST /v1/evaluations HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 50\r\n\r\n"
        )
        assert slow.recv(4_096).startswith(b"HTTP/1.1 100 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0 and process.stderr is not None
        (said,) = process.stderr.read().splitlines()
        assert "timeout graceful shutdown exceeded" in said
        answer = slow.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"Send the request again when the judge is back." in answer


def address(ready: dict[str, Any]) -> tuple[str, int]:
    host, port = str(ready["url"]).removeprefix("http://").split(":")
    return host, int(port)


@asynccontextmanager
async def served(host: str, app: Any) -> AsyncIterator[tuple[JudgeServer, socket.socket]]:
    """Run an app under the judge's server; yield the server and its listening socket."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        forwarded_allow_ips=in_both_families(["127.0.0.1"]),
    )
    listens = asyncio.Event()
    server = JudgeServer(config, listens.set)
    with listening_socket(host, 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await listens.wait()
            yield server, listener
        finally:
            server.should_exit = True
            await serving


# Asyncio forgets a connection that is accepted while its server closes, and Python 3.13 then warns.
@pytest.mark.filterwarnings("ignore:unclosed transport")
@pytest.mark.filterwarnings("ignore:.*_SelectorTransport.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("turns", range(4))
def test_a_connection_during_shutdown_does_not_delay_it(turns: int) -> None:
    """The connection begins a varying number of event loop turns before the shutdown.

    So it waits to be accepted, is being accepted, or is open.
    """

    async def end() -> None:
        async with served("127.0.0.1", None) as (server, listener):
            with socket.create_connection(listener.getsockname()[:2]) as half_open:
                half_open.sendall(b"POST /v1/eval")
                for _ in range(turns):
                    await asyncio.sleep(0)
                await asyncio.wait_for(server.shutdown(), TIMEOUT_S)

    asyncio.run(end())
    gc.collect()


def test_a_proxy_is_recognised_on_a_dual_stack_socket() -> None:
    """The proxy connects from 127.0.0.1, which the system reports as ::ffff:127.0.0.1."""

    async def caller() -> str:
        async def client_of(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": scope["client"][0].encode()})

        async with served("::", client_of) as (_, listener):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as proxy:
                return (await proxy.get(url, headers={"x-forwarded-for": "198.51.100.7"})).text

    assert asyncio.run(asyncio.wait_for(caller(), TIMEOUT_S)) == "198.51.100.7"


def test_operator_mistakes_give_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(folder: Path, *options: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", command(folder, *options)[2:])
        code, said = main(), capsys.readouterr()
        assert said.out == ""
        return code, said.err

    with serving(tmp_path, "--origin", "https://judge.example") as (_, ready):
        outcome = trio.run(client(str(ready["url"]), 1).ask, 1, "tiny")
        assert isinstance(outcome, Trouble)
        assert "another judge" in outcome.cause and "https://judge.example" in outcome.remedy
        code, words = failed(tmp_path)
        assert code == 5 and "another judge is using" in words and "--database" in words
        code, words = failed(tmp_path / "other", "--port", str(address(ready)[1]))
        assert code == 2 and "--port" in words
    assert failed(tmp_path, "--deadline", "0")[0] == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"curriculum": "sapo-10"}, "sapo-9, tiny-9"),
        ({"curriculum": "sapo-9"}, "holds answers to tiny-9.*--database"),
        ({"host": "not.an.address.invalid"}, "--host"),
        ({"host": "203.0.113.7"}, "cannot listen.*--port.*--host"),  # TEST-NET-3: no machine's address
        ({"database": "letter.txt"}, "file is not a database.*--database"),
        ({"database": "letter.txt/judge.sqlite3"}, "cannot write.*--database"),
    ],
)
def test_invalid_settings_are_rejected_at_the_start(
    tmp_path: Path, changed: dict[str, str], words: str
) -> None:
    (tmp_path / "letter.txt").write_text("dear database")
    open_store(tmp_path / "judge.sqlite3", f"tiny-9 {TINY_9.digest}").close()
    database = tmp_path / changed.pop("database", "judge.sqlite3")
    settings = replace(JudgeSettings(database, "tiny-9", port=0), **changed)  # type: ignore[arg-type] # strings only
    with pytest.raises(OperatorError, match=words):
        serve(settings, lambda url: pytest.fail(f"listens at {url}"))


def test_a_full_disk_at_the_start_gives_a_message(tmp_path: Path) -> None:
    with contextlib.closing(open_store(database := tmp_path / "judge", f"tiny-9 {TINY_9.digest}")) as store:
        store.run(judge_store.agree, store.name, "")
        with store.begin() as db:
            db.exec_driver_sql(
                "CREATE TRIGGER t BEFORE UPDATE ON about BEGIN SELECT RAISE(FAIL, 'database or disk is"
                " full'); END"
            )
    with pytest.raises(
        JudgeError,
        match=r"cannot start, as its database fails: database or disk is full\. Free some space",
    ):
        serve(JudgeSettings(database, "tiny-9", port=0), lambda url: pytest.fail(url))


def test_the_log_can_be_json_lines() -> None:
    code = (
        "import logging; from judge.logs import set_up_logging; set_up_logging(as_json=True); log ="
        " logging.getLogger('judge')\nlog.info('not worth a line')\ntry: 1 / 0\nexcept ZeroDivisionError:"
        " log.exception('cannot use\\nthe %s', 'database')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert (said["level"], said["logger"], said["event"]) == ("error", "judge", "cannot use\nthe database")
    assert "ZeroDivisionError" in said["exception"] and said["timestamp"].endswith("Z")


def test_settings_from_variables_a_plain_first_line_and_ctrl_c(tmp_path: Path) -> None:
    options = {"PORT": "0", "CURRICULUM": "tiny-9", "DATABASE": str(tmp_path / "j")}
    environment = {**os.environ, **{f"SWARMD_JUDGE_{name}": value for name, value in options.items()}}
    starting = [sys.executable, "-m", "judge", "serve"]
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with killed_after(subprocess.Popen(starting, text=True, env=environment, **pipes)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"Judging tiny-9 at http://127.0.0.1:(\d+)", line)
        assert found and str(tmp_path / "j") in line
        # Input that anyone may send must not fill the log.
        for sent in (b"no request\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(found[1])), TIMEOUT_S) as anybody:
                anybody.sendall(sent)
                assert anybody.recv(8) == b"HTTP/1.1"
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=TIMEOUT_S), process.returncode) == (("", ""), 130)


@pytest.mark.parametrize("package", ["fastapi", "sqlalchemy", "uvicorn"])
def test_without_the_judge_extra_the_message_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from judge.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("swarmd-judge: ")
        and "pip install 'swarmd[judge]'" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_an_option_prints_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.count("\n"), done.stdout.split()[0]) == (0, 1, "swarmd-judge")


def test_a_removed_working_folder_gives_a_one_sentence_message(tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); from judge.__main__ import main; sys.exit(main())"
    (gone := tmp_path / "gone").mkdir()
    starting = [sys.executable, "-c", code, "serve", "--database", "judge.sqlite3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(starting, cwd=gone, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "swarmd-judge: the folder you are in was removed. Change to another one.\n",
    )


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "Only this machine"),
        ("::1", "Only this machine"),
        ("localhost", "Only this machine"),
        ("0.0.0.0", "every address of this machine"),
        ("::", "every address of this machine"),
        ("192.0.2.7", "at 192.0.2.7: every machine that reaches it"),
    ],
)
def test_the_first_line_says_who_can_reach_the_judge(host: str, words: str) -> None:
    assert words in reach(host)
