"""The node's client is tested with judges that are down, slow or lying; raw servers on loopback play them.

The outcome is always Trouble, in bounded time.
"""

import json
import math
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from msgspec.structs import asdict

from p2p.identity import Identity
from swarmd import link
from swarmd.config.config import NodeConfig, SharingConfig
from swarmd.daemon.judging.client import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    MAX_ANSWER_CHARACTERS,
    MAX_RESPONSE_BYTES,
    Graded,
    JudgeClient,
    Question,
    backoff_seconds,
    judge_origin,
)
from swarmd.daemon.judging.judging import RECEIPTS_FILE, Judging, keep_receipt, said_of
from swarmd.daemon.judging.reader import JudgedBoard, ask, read
from swarmd.errors import ConfigError, Unreachable
from swarmd.state.status import Trouble
from swarmd.types import Completion
from tests.doubles import TIMEOUT_S, Clock
from tests.judge.test_proxies import certificate

pytestmark = pytest.mark.net

ME = Identity(b"\x07" * 32)
# Timeout for a judge that never answers. All other judges may be slow on a busy machine.
SHORT_S = 0.8
ID = "ab" * 16
COMMITMENT = "0123456789abcdef" * 4
QUESTION: Mapping[str, Any] = {
    "evaluation": ID,
    "question": "1 + 1?",
    "seconds": 60.0,
    "answers": 1,
    "window": 3,
    "commitment": COMMITMENT,
}
JUDGE = Identity(b"\x0a" * 32)
RECEIPT: Mapping[str, Any] = {
    "judge": JUDGE.peer_id,
    "evaluation": ID,
    "peer": ME.peer_id,
    "answers": [sha256(b"2").hexdigest()],
    "rewards": [1.0],
    "number": 4,
    "commitment": COMMITMENT,
}


def questions(**changed: Any) -> dict[str, Any]:
    """Return an honest judge's reply to a request for a question."""
    return {"judge": JUDGE.peer_id, "evaluations": [{**QUESTION, **changed}]}


def graded(by: Identity = JUDGE, **changed: Any) -> dict[str, Any]:
    """Return a grade whose receipt has these changes."""
    text = json.dumps({**RECEIPT, **changed})
    return {
        "evaluation": ID,
        "reward": 1.0,
        "reason": "correct",
        "specialty": "bf",
        "answered": 3,
        "total": 2.0,
        "score": 0.625,
        "n": 4,
        "low": 0.31,
        "high": 0.86,
        "receipt": text,
        "signature": by.sign(b"swarmd judge receipt v1", text.encode()).hex(),
    }


GRADE: Mapping[str, Any] = graded()
ANSWER, SCORE = link.JudgeAnswer(ID, "2", True), link.JudgeScore(0.625, 4)
OPEN = Question(ID, "?", 60.0, JUDGE.peer_id, COMMITMENT)

Handler = Callable[[trio.SocketStream, bytes], Awaitable[None]]


def reply(document: Any, status: int = 201, headers: str = "") -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = next((line for line in head.lower().splitlines() if line.startswith(b"content-length")), b":0")
    return bool(end) and len(body) >= int(length.split(b":")[1])


@asynccontextmanager
async def judge(handle: Handler) -> AsyncIterator[str]:
    """Run a server that reads one request and then calls `handle`; yield its URL."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            request = b""
            while not whole(request) and (part := await stream.receive_some(65_536)):
                request += part
            if not whole(request):
                return  # the client left before it sent a request
            try:
                await handle(stream, request)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the client hung up

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            lambda task_status: trio.serve_tcp(serve, 0, host="127.0.0.1", task_status=task_status)
        )
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def client(url: str, clock: Clock | None = None, seconds: float = TIMEOUT_S) -> JudgeClient:
    return JudgeClient(url, ME, "digest", clock or Clock(0.0), seconds=seconds)


def shown(judging: Judging) -> dict[str, Any]:
    status = judging.status()
    return asdict(status) if status else {}


def honest(request: bytes) -> bytes:
    """Reply as an honest judge."""
    return reply(GRADE, 200) if b"/answers " in request.splitlines()[0] else reply(questions())


def replying(answer: Callable[[bytes], bytes], seen: list[bytes] | None = None) -> Handler:
    """Answer each request, and note it in `seen`."""

    async def handle(stream: trio.SocketStream, request: bytes) -> None:
        if seen is not None:
            seen.append(request)
        await stream.send_all(answer(request))

    return handle


def saying(data: bytes, seen: list[bytes] | None = None) -> Handler:
    return replying(lambda _: data, seen)


def body_of(request: bytes) -> Any:
    return json.loads(request.partition(b"\r\n\r\n")[2])


async def silent(call: Callable[[], Awaitable[object]]) -> Trouble:
    # Sooner than a patient client gives up, so the judge's fault ended the call.
    with trio.fail_after(TIMEOUT_S / 2):
        outcome = await call()
    assert isinstance(outcome, Trouble), outcome
    for words in (outcome.cause, outcome.remedy):
        assert words and words.isprintable()
    return outcome


# An honest judge's replies.


async def test_an_evaluation_by_an_honest_judge_is_graded() -> None:
    seen: list[bytes] = []
    async with judge(replying(honest, seen)) as url:
        evaluated = client(url)
        question = await evaluated.ask(3, "/home/me/models/tiny")
        assert isinstance(question, Question)
        assert question == Question(ID, "1 + 1?", 60.0, JUDGE.peer_id, COMMITMENT)
        outcome = await evaluated.answer(question, Completion("2", True))
        assert outcome == msgspec.convert(GRADE, Graded)
    assert b'"model":"tiny"' in seen[0] and b"/home/me" not in seen[0]  # the path is private
    assert seen[1].startswith(f"POST /v1/evaluations/{ID}/answers HTTP/1.1".encode())


def test_the_path_of_a_strategy_is_not_sent() -> None:
    config = NodeConfig(sharing=SharingConfig(take="/home/me/mine.py"))
    assert said_of(config, "cpu", 4)["strategy"] == "mine.py positive"


async def test_only_the_end_of_a_too_long_answer_is_sent() -> None:
    """The end has the answer, and a judge accepts no longer text."""
    seen: list[bytes] = []
    text = "thinking " * MAX_ANSWER_CHARACTERS + "<answer>2</answer>"
    async with judge(replying(honest, seen)) as url:
        await client(url).answer(OPEN, Completion(text, True))
    assert [body_of(request)["answers"][0]["text"] for request in seen] == [text[-MAX_ANSWER_CHARACTERS:]]


async def test_a_receipt_is_checked_and_stored(tmp_path: Path) -> None:
    """The request has the node's self-description, which the receipt must repeat."""
    seen, told = list[bytes](), list[link.ToTrainer]()
    file = tmp_path / RECEIPTS_FILE
    async with judge(replying(honest, seen)) as url:
        by = JudgeClient(
            url, ME, "digest", Clock(0.0), seconds=TIMEOUT_S, said=lambda: {"hardware": "cpu", "local": 4}
        )
        keep = partial(keep_receipt, tmp_path, most=2)
        judging = Judging(by, told.append, print, model="/home/me/models/tiny", keep=keep)
        for _ in range(5):
            await judging.ask(3)
            await judging.answer(ANSWER)
    assert [message for message in told if isinstance(message, link.JudgeScore)] == [SCORE] * 5
    assert shown(judging)["interval"] == (0.31, 0.86)
    asker = {"hardware": "cpu", "local": 4, "model": "tiny"}
    assert list(map(body_of, seen[:2])) == [
        {"round": 3, "curriculum": "digest", "asker": asker},
        {"answers": [{"text": "2", "ended": True}]},
    ]
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    # Of five receipts, at most twice the limit of two are kept.
    assert kept == [{"receipt": GRADE["receipt"], "signature": GRADE["signature"]}] * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"by": ME}, {"judge": ME.peer_id}, {"evaluation": "cd" * 16}, {"peer": JUDGE.peer_id},
        {"answers": []}, {"rewards": [0.0]},
        {"answers": [sha256(b"3").hexdigest()]}, {"rewards": "1"}, {"commitment": "cd" * 32},
    ],
)  # fmt: skip
async def test_a_wrong_receipt_is_refused(changed: dict[str, Any]) -> None:
    async with judge(saying(reply(graded(**changed), 200))) as url:
        by = JudgeClient(url, ME, "digest", Clock(0.0), seconds=TIMEOUT_S)
        outcome = await by.answer(OPEN, Completion("2", True))
    assert isinstance(outcome, Trouble) and "receipt" in outcome.cause


def test_a_failing_disk_loses_only_receipts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / RECEIPTS_FILE
    path.mkdir()  # a folder in place of the file
    keep_receipt(tmp_path, {"receipt": "lost", "signature": ""})
    assert [
        (entry.levelname, "receipt of the judge could not be kept" in entry.message)
        for entry in caplog.records
    ] == [("WARNING", True)]
    path.rmdir()
    keep_receipt(tmp_path, {"receipt": "kept", "signature": ""})
    assert [json.loads(line)["receipt"] for line in path.read_text().splitlines()] == ["kept"] and len(
        caplog.records
    ) == 1
    path.write_text(path.read_text() + '{"receipt": "to')  # as after kill -9
    keep_receipt(tmp_path, {"receipt": "whole", "signature": ""})
    assert json.loads(path.read_text().splitlines()[-1])["receipt"] == "whole"


# Judges that lie.

LIES: list[Any] = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe\x00",
    b"[" * 60_000,
    b'{"evaluation":' * 4_000,
    b'{"x":' + b"[" * 60_000,
    b"<html>hello</html>",
    questions(evaluation=5),
    questions(evaluation="../../v1/peers/x"),
    questions(evaluation=ID + "\n"),
    questions(evaluation=ID.upper()),
    questions(evaluation=""),
    questions(question=""),
    questions(question=None),
    questions(question="x" * 8_193),
    questions(question=["1"]),
    questions(seconds=-1),
    questions(seconds=0),
    questions(seconds=1e308),
    questions(seconds="60"),
    questions(seconds=math.nan),
    questions(seconds=math.inf),
    questions(seconds=True),
    {"error": "no", "remedy": "none"},
    json.dumps(questions()).encode()[:-1],
    json.dumps(questions()).encode() + b"x",
    questions(question="x" * MAX_RESPONSE_BYTES),
    reply(questions()),
    {**questions(), "evaluations": []},
    {**questions(), "judge": 5},
    {**questions(), "judge": "x" * 65},
    {**questions(), "evaluations": [QUESTION] * 9},
    QUESTION,
]


GRADE_LIES: list[Any] = [
    {**GRADE, "reward": 0.5},
    {**GRADE, "reward": -1},
    {**GRADE, "reward": 1e308},
    {**GRADE, "reward": math.nan},
    {**GRADE, "reward": "1"},
    {**GRADE, "evaluation": "cd" * 16},
    {**GRADE, "score": 1.5},
    {**GRADE, "n": 0},
    *({k: v for k, v in GRADE.items() if k != missing} for missing in ("score", "receipt")),
    {},
    [],
    b"null",
    QUESTION,
]


@pytest.mark.parametrize("lie", GRADE_LIES, ids=lambda lie: repr(lie)[:60])
async def test_an_impossible_grade_is_refused(lie: Any) -> None:
    async with judge(saying(reply(lie, 200))) as url:
        await silent(lambda: client(url).answer(OPEN, Completion("2", True)))


NOT_HTTP = {
    "nothing": b"",
    "garbage": b"\x00\x01\x02" * 100,
    "text": b"hello there\r\n\r\n",
    "http/0.9": b"{}",
    "http/3": b"HTTP/3 201 OK\r\ncontent-length: 2\r\n\r\n{}",
    "status": b"HTTP/1.1 9999 X\r\n\r\n",
    "header": b"HTTP/1.1 201 X\r\n\xff\xfe: \xff\r\n\r\n",
    "latin header": b"HTTP/1.1 201 X\r\ncontent-type: \xff\xfe; charset=\xff\r\ncontent-length: 2\r\n\r\n{}",
    "cookie": b"HTTP/1.1 201 X\r\nset-cookie: " + b"a=b; " * 5_000 + b"\r\ncontent-length: 2\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 201 X\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "negative length": b"HTTP/1.1 201 X\r\ncontent-length: -1\r\n\r\n{}",
    "huge length": b"HTTP/1.1 201 X\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    "short": b"HTTP/1.1 201 X\r\ncontent-length: 500\r\n\r\n" + json.dumps(questions()).encode(),
    "bad chunk": b"HTTP/1.1 201 X\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
    "endless header": b"HTTP/1.1 201 X\r\na: " + b"x" * 2_000_000,
    "many headers": b"HTTP/1.1 201 X\r\n" + b"a: b\r\n" * 100_000,
    "gzip": b"HTTP/1.1 201 X\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd",
    "switching": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "continue for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000,
    "no content": b"HTTP/1.1 204 X\r\n\r\n",
    "refused without words": b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n",
    "cursor": reply({"error": "\x1b[2J\x1b]0;evil\x07" + "x" * 5_000, "remedy": "\r\n\u202efoo"}, 400),
    "wrong error types": reply({"error": 5, "remedy": []}, 409),
}


@pytest.mark.parametrize(
    "said", [*map(reply, LIES), *NOT_HTTP.values()], ids=[*(repr(lie)[:40] for lie in LIES), *NOT_HTTP]
)
async def test_a_malformed_question_is_refused(said: bytes) -> None:
    async with judge(saying(said)) as url:
        await silent(lambda: client(url).ask(1, "tiny"))


async def test_mutated_replies_give_a_question_or_trouble() -> None:
    """500 replies have randomly changed bytes.

    The outcome is a valid Question or Trouble, never an exception.
    """
    rng, clock, outcomes = random.Random(1), Clock(0.0), []

    def mutated(request: bytes) -> bytes:
        data = bytearray(honest(request))
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)

    async with judge(replying(mutated)) as url:
        asking = client(url, clock)
        for _ in range(500):
            clock.now += asking.wait()
            outcomes.append(await asking.ask(1, "tiny"))
    assert {type(outcome) for outcome in outcomes} == {Question, Trouble}


async def test_redirects_are_not_followed() -> None:
    asked: list[bytes] = []
    async with judge(replying(honest, asked)) as other:
        for status in (301, 302, 303, 307, 308):
            async with judge(saying(reply(b"", status, f"location: {other}/v1/evaluations\r\n"))) as url:
                outcome = await silent(lambda url=url: client(url).ask(1, "tiny"))  # type: ignore[misc]
                assert "redirects" in outcome.cause
    assert asked == []


# Judges that are down or slow.


async def test_a_proxy_whose_judge_is_down_is_not_called_a_liar() -> None:
    for status in (502, 503, 504):
        async with judge(saying(reply(b"<html>Bad Gateway</html>", status))) as url:
            outcome = await silent(lambda url=url: client(url).ask(1, "tiny"))  # type: ignore[misc]
            assert f"is not there: its proxy says HTTP {status}" in outcome.cause


async def test_a_judge_that_is_down_or_unknown_is_reported() -> None:
    with socket.socket() as down:
        down.bind(("127.0.0.1", 0))  # bound, but not listening
        for url in (f"http://127.0.0.1:{down.getsockname()[1]}", "http://judge.invalid:8400"):
            cause = (await silent(lambda url=url: client(url).ask(1, "tiny"))).cause  # type: ignore[misc]
            assert "cannot reach the judge" in cause and url in cause


async def test_an_untrusted_certificate_gives_a_message(tmp_path: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate(tmp_path))
    listener = trio.SSLListener((await trio.open_tcp_listeners(0, host="127.0.0.1"))[0], tls)

    async def greet() -> None:
        with pytest.raises(trio.BrokenResourceError):
            await (await listener.accept()).do_handshake()

    async with trio.open_nursery() as nursery, listener:
        nursery.start_soon(greet)
        url = f"https://127.0.0.1:{listener.transport_listener.socket.getsockname()[1]}"
        outcome = await silent(lambda: client(url).ask(1, "tiny"))
        nursery.start_soon(greet)
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await trio.to_thread.run_sync(read, url, "/v1/leaderboard", JudgedBoard)
    assert "certificate verify failed" in outcome.cause


async def never(stream: trio.SocketStream, request: bytes) -> None:
    await trio.sleep_forever()


async def stalls_in_the_body(stream: trio.SocketStream, request: bytes) -> None:
    await stream.send_all(reply(questions())[:-5])
    await trio.sleep_forever()


async def drips(stream: trio.SocketStream, request: bytes) -> None:
    for byte in reply(questions()):  # no byte is late; the time limit is on the whole reply
        await stream.send_all(bytes([byte]))
        await trio.sleep(0.1)


async def pours(stream: trio.SocketStream, request: bytes) -> None:
    await stream.send_all(b"HTTP/1.1 201 X\r\n\r\n")
    for _ in range(64):  # 4 MiB
        await stream.send_all(b" " * 65_536)


@pytest.mark.parametrize(
    ("handle", "why"),
    [
        (never, "longer"),
        (stalls_in_the_body, "longer"),
        (drips, "longer"),
        (pours, "more than"),
    ],
)
async def test_the_client_gives_up_on_slow_and_endless_replies(handle: Handler, why: str) -> None:
    """`swarmd verify --upload` and reading commands give up, too. A slow reply has slow headers, too."""
    seconds = SHORT_S if why == "longer" else TIMEOUT_S
    async with judge(handle) as url:
        unasked = await silent(lambda: client(url, seconds=seconds).ask(1, "tiny"))
        await silent(lambda: client(url, seconds=seconds).answer(OPEN, Completion("2", True)))
        assert why in unasked.cause
        with pytest.raises(Unreachable, match="more than" if handle is pours else "whole"):
            await trio.to_thread.run_sync(ask, "POST", url, "/", {}, [b"weights"], seconds)


async def test_cancelling_the_daemon_is_not_swallowed() -> None:
    async with judge(never) as url:
        with trio.move_on_after(0.1) as scope:
            await client(url).ask(1, "tiny")
        assert scope.cancelled_caught


# Waiting times after failures of a judge.


def test_waits_grow_and_are_bounded() -> None:
    waits = [backoff_seconds(attempts) for attempts in range(1, 200)]
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits == sorted(waits) and waits[-1] == LONGEST_WAIT_S
    assert backoff_seconds(3, 0.999) < 1.25 * backoff_seconds(3)


async def test_the_wait_grows_with_each_failure_of_a_judge() -> None:
    calls, clock, well = list[bytes](), Clock(0.0), False
    busy = reply({"error": "busy", "remedy": "wait"}, 503)
    async with judge(replying(lambda request: honest(request) if well else busy, calls)) as url:
        asking, waits = client(url, clock), []
        for _ in range(5):
            await silent(lambda: asking.ask(1, "tiny"))
            before = len(calls)
            await Judging(asking, print, print).ask(1)
            assert len(calls) == before  # nothing was sent
            waits.append(asking.wait())
            clock.now += asking.wait()
        assert all(b == pytest.approx(2 * a) for a, b in pairwise(waits))
        well = True
        question = await asking.ask(1, "tiny")
        assert isinstance(question, Question)
        assert isinstance(await asking.answer(question, Completion("2", True)), Graded)
        well = False
        await silent(lambda: asking.ask(1, "tiny"))
        assert asking.wait() == pytest.approx(waits[0])  # a grade resets the wait


async def test_after_a_used_sequence_number_the_next_request_has_a_higher_one() -> None:
    """A number is used twice if a node's clock was set back.

    The judge reports the last number, and the next request exceeds it.
    """
    numbers, clock = list[int](), Clock(0.0)
    used = {"error": "this sequence number was used", "remedy": "larger", "sequence": 10**18}

    def rising(request: bytes) -> bytes:
        (line,) = (line for line in request.splitlines() if line.startswith(b"swarmd-sequence"))
        numbers.append(int(line.split(b":")[1]))
        return honest(request) if numbers[-1] > 10**18 else reply(used, 409)

    async with judge(replying(rising)) as url:
        asking = JudgeClient(url, ME, "digest", clock, nanoseconds=lambda: 5, seconds=TIMEOUT_S)
        assert isinstance(await asking.ask(1, "tiny"), Trouble)
        clock.now += 60.0
        assert isinstance(await asking.ask(1, "tiny"), Question)
    assert numbers == [5, 10**18 + 1]


async def test_an_answer_after_the_deadline_is_not_sent() -> None:
    clock = Clock(61.0)
    outcome = await silent(lambda: client("http://127.0.0.1:9", clock).answer(OPEN, Completion("2", True)))
    assert "deadline" in outcome.cause and "if the node was not paused" in outcome.remedy


# The judge's address.


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://judge.example", "http://judge.example"),
        ("https://Judge.Example:443/", "https://judge.example"),
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400"),
        ("HTTP://[::1]:8400/", "http://[::1]:8400"),
    ],
)
def test_spellings_of_an_address_give_the_same_origin(url: str, origin: str) -> None:
    assert judge_origin(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "", "judge.example", "judge.example:8400", "ftp://judge.example", "http://", "http://:8400",
        "http://judge:0", "http://judge:99999",
        "http://judge:x", "http://a b", "http://user:secret@judge", "http://judge/path", "http://judge?x",
        "http://judge#x", "http://[::1",
        "http://jüdge", "http://judge\n", "http://judge\\evil", "file:///etc/passwd", "http://" + "x" * 300,
        "//judge",
        "http://" + "x" * 64 + ".example", "http://a..b", "http://1.2.3.999", "http://[fe80::1%eth0]",
        "http://[v1.x]", "http://-a", "http://a.%41",
    ],
)  # fmt: skip
def test_a_malformed_judge_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port") as caught:
        judge_origin(url)
    assert caught.value.exit_code == 2


# The daemon's part.


async def test_one_question_at_a_time_goes_to_the_trainer_and_its_answer_to_the_judge() -> None:
    asked: list[bytes] = []
    release = trio.Event()

    async def handle(stream: trio.SocketStream, request: bytes) -> None:
        asked.append(request.splitlines()[0])
        await release.wait()
        await stream.send_all(honest(request))

    clock = Clock(0.0)
    to_trainer: list[link.ToTrainer] = []
    async with judge(handle) as url:
        judging = Judging(client(url, clock), to_trainer.append, print)
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(judging.ask, number)
            await trio.testing.wait_all_tasks_blocked(0.05)
            release.set()
        assert to_trainer == [link.JudgeQuestion(ID, "1 + 1?")]
        await judging.ask(6)  # the trainer still works on the first question
        await judging.answer(link.JudgeAnswer("cd" * 16, "2", True))  # was never asked
        assert len(asked) == 1
        await judging.answer(ANSWER)
        assert to_trainer[1:] == [SCORE]
        await judging.answer(link.JudgeAnswer(ID, "3", True))
        assert len(asked) == 2
        document = shown(judging)
        assert (document["score"], document["n"], document["cause"], document["url"]) == (0.625, 4, "", url)
        await judging.ask(7)
        clock.now += 61.0  # the trainer died before it answered
        await judging.ask(8)
        assert len(to_trainer) == 4


async def test_the_trainer_is_asked_for_text_after_text_until_the_episode_ends() -> None:
    sent: list[dict[str, Any]] = []

    async def handle(stream: trio.SocketStream, request: bytes) -> None:
        if b"/answers" in request.splitlines()[0]:
            sent.append(json.loads(request.partition(b"\r\n\r\n")[2]))
        more = len(sent) in (1, 2)
        await stream.send_all(
            reply({"evaluation": ID, "observation": f"reply {len(sent)}"}, 202) if more else honest(request)
        )

    to_trainer: list[link.ToTrainer] = []
    async with judge(handle) as url:
        judging = Judging(client(url, Clock(0.0)), to_trainer.append, print)
        await judging.ask(1)
        for text in ("a", "b"):
            await judging.answer(link.JudgeAnswer(ID, text, True))
        assert to_trainer == [
            link.JudgeQuestion(ID, "1 + 1?"),
            link.JudgeQuestion(ID, "1 + 1?", (("a", "reply 1"),)),
            link.JudgeQuestion(ID, "1 + 1?", (("a", "reply 1"), ("b", "reply 2"))),
        ]
        await judging.answer(ANSWER)
    assert [each["answers"] for each in sent] == [
        [{"text": text, "ended": True}] for text in ("a", "a\x1eb", "a\x1eb\x1e2")
    ]


async def test_a_rejection_is_logged_in_full_once(caplog: pytest.LogCaptureFixture) -> None:
    error, remedy = "no: " + "because " * 40 + "so", "do this: " + "step " * 40 + "done"
    clock, told = Clock(0.0), list[str]()
    async with judge(saying(reply({"error": error, "remedy": f"D{remedy[1:]}."}, 409))) as url:
        judging = Judging(client(url, clock), print, told.append)
        for _ in range(2):
            await judging.ask(1)
            clock.now += 3600.0
    assert told == [f"not judged: the judge refused: {error}; {remedy}"]
    # The node's log already has the message.
    assert "not judged" not in caplog.text
    document = shown(judging)
    assert (document["cause"], document["remedy"]) == (f"the judge refused: {error}", remedy)


async def test_the_status_shows_a_silent_judge() -> None:
    async with judge(saying(b"")) as url:
        judging = Judging(client(url), print, print)
        await judging.ask(1)
        document = shown(judging)
        assert document["cause"] and document["remedy"] and document["asked_again_in"] > 0
        assert (document["score"], document["n"]) == (None, 0)
