"""The verified tier over HTTP.

The tests cover accepted and rejected uploads, restarts, and failing workers, with real processes.
"""

import asyncio
import errno
import os
import random
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import psutil
import pytest

from judge import config
from judge.config import JudgeSettings
from judge.errors import BUSY, JudgeError
from judge.evaluation.service import JudgeService, open_service
from judge.figures.verification import Upload, VerifiedAnswer
from judge.store import store as judge_store
from judge.store import verifications
from judge.store.store import open_store
from judge.store.verifications import newest
from judge.verified import evaluator
from judge.verified.evaluator import EvaluationFailed, Evaluator
from judge.verified.messages import AnswerRequest
from p2p.types import PeerId
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.held_out import checked_receipt
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.tasks.source import tasks_of
from swarmd.types import TaskRef
from testbed.hostile_uploads import HostileUpload, uploads
from testbed.signing_peer import ORIGIN, SigningPeer
from testbed.uploaded_weights import file_of
from tests.doubles import TIMEOUT_S, Clock
from tests.judge import replies
from tests.judge.conftest import check_form, eventually, http_to
from tests.judge.databases import on_each_database
from tests.judge.test_app import refused
from tests.judge.verified.standin_worker import BASE, MODELS, SHAPES
from tests.processes import ended

pytestmark = [pytest.mark.anyio, pytest.mark.net, pytest.mark.usefixtures("patient_uploads")]
STANDIN = (sys.executable, "-m", "tests.judge.verified.standin_worker")
GOOD = file_of(SHAPES)


class Uploader:
    def __init__(self, service: JudgeService, http: httpx2.AsyncClient, clock: Clock) -> None:
        self.service, self.http, self.clock, self.peers = service, http, clock, 0

    def peer(self) -> SigningPeer:
        self.peers += 1
        self.clock.now += 601.0  # so that no rate limit applies
        return SigningPeer(self.peers)

    async def upload(
        self,
        file: Any = GOOD,
        peer: SigningPeer | None = None,
        headers: dict[str, str] | None = None,
        **said: Any,
    ) -> Any:
        """Upload weights. file: bytes, or parts of them. said: declared values that replace the true ones."""
        peer = peer or self.peer()
        true = file if isinstance(file, bytes) else GOOD
        wish = {
            "model": "good",
            "curriculum": TINY_9.digest,
            "bytes": len(true),
            "sha256": sha256(true).hexdigest(),
        } | said
        target = "/v1/verified?" + urlencode(wish)
        signed = peer.headers("POST", target, b"")
        message = f"POST\n{ORIGIN}\n{target}\n{peer.sequence}\n{wish['sha256']}"
        signed["swarmd-signature"] = peer.identity.sign(b"swarmd judge request v1", message.encode()).hex()
        return await self.http.post(target, content=file, headers=signed | (headers or {}))

    async def ended(self, id: str) -> dict[str, Any]:
        return await self.told(id, "done", "refused")

    async def told(self, id: str, *states: str) -> dict[str, Any]:
        """Wait until an upload is in one of these states; return the judge's statement about it.

        Fail if it has ended in another state.
        """

        async def look() -> dict[str, Any] | None:
            found = dict((await self.http.get(f"/v1/verified/{id}")).json())
            check_form(found, replies.VERIFICATION)
            assert found["state"] in (*states, "queued", "running"), found
            return found if found["state"] in states else None

        return dict(await eventually(look))

    def files(self) -> list[str]:
        return sorted(path.name for path in folder_of(self.service.settings).iterdir())


async def workers() -> list[psutil.Process]:
    """Return the worker processes of this process's judges that have begun to evaluate weights."""
    children = psutil.Process().children()
    return [child for child in children if not ended(child) and child.cmdline()[2:3] == [STANDIN[2]]]


def folder_of(settings: JudgeSettings) -> Path:
    return settings.uploads_folder


@asynccontextmanager
async def judging(settings: JudgeSettings, seconds: float = TIMEOUT_S) -> AsyncIterator[Uploader]:
    clock = Clock(1_000.0)
    evaluator = Evaluator(seconds, STANDIN)
    service_of = open_service(settings, random.Random(11), clock, Clock(1_800_000_000.0), evaluator)
    async with service_of as service, http_to(service) as http:
        yield Uploader(service, http, clock)


@pytest.fixture(scope="module")
def settings(court_database: str, tmp_path_factory: pytest.TempPathFactory) -> JudgeSettings:
    folder = tmp_path_factory.mktemp("verified")
    return JudgeSettings(
        court_database,
        "tiny-9",
        key=folder / "judge.key",
        verified_bytes=10**6,
        verified_model=MODELS,
        verified_questions=2,
        verified_folder=folder / "uploads",
    )


@pytest.fixture(scope="module")
async def judge(settings: JudgeSettings, anyio_backend: str) -> AsyncIterator[Uploader]:
    async with judging(settings) as uploader:
        yield uploader


@on_each_database
async def test_weights_are_evaluated_and_the_receipt_names_them(judge: Uploader) -> None:
    peer = judge.peer()
    taken = await judge.upload(peer=peer, answers=3)
    assert taken.status_code == 202, taken.text
    check_form(taken.json(), replies.QUEUED)
    found = await judge.ended(taken.json()["verification"])
    assert (found["state"], found["n"], found["tier"]) == ("done", 18, "verified")
    assert found["weights"] == sha256(GOOD).hexdigest() and found["peer"] == peer.identity.peer_id
    assert {question["specialty"] for question in found["questions"]} == set(TINY_9.specialties)
    receipt = checked_receipt(found)
    assert (
        receipt is not None and receipt["weights"] == found["weights"] and receipt["right"] == found["right"]
    )
    assert [[q["specialty"], q["n"], q["reward"], q["correct"]] for q in found["questions"]] == receipt[
        "questions"
    ]
    # For each of the two fractions, the first of three answers is right.
    right = {q["n"]: q["correct"] for q in found["questions"] if q["reward"] == 1}
    assert (found["right"], list(right.values())) == (2.0, [1, 1])
    assert receipt["specialties"]["fraction_simplification"] == [2.0, 2]
    # The greedy answer counts for the score, and is not one of the two samples.
    assert found["pass_at"] == {"1": 0.0, "2": 0.0}
    assert judge.files() == []
    tasks = [
        tasks_of("tiny-9").task(TaskRef(question["specialty"], question["n"]))
        for question in found["questions"]
    ]
    assert all(TINY_9.holds_out(task) for task in tasks if task and task.ref.specialty in TINY_9.held_by_text)
    again = await judge.upload(peer=judge.peer())  # the same weights get other questions
    assert (await judge.ended(again.json()["verification"]))["questions"][0]["n"] != found["questions"][0][
        "n"
    ]


async def test_the_judge_lists_the_models_that_it_evaluates(judge: Uploader) -> None:
    response = await judge.http.get("/v1/verified")
    assert response.headers["etag"] and response.headers["access-control-allow-origin"] == "*"
    said = response.json()
    check_form(said, replies.VERIFIABLE)
    assert said["models"]["good"] == {"base": BASE, "tensors": 2} and said["bytes"] == 10**6


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("eats", "too much processor time or memory|ended by itself"),
        ("dies", "ended by itself"),
        ("talks", "reply is too large"),
        ("lies", "a wrong number of answers"),
        ("babbles", "middle of its reply"),
    ],
)
async def test_a_failing_workers_error_is_reported_and_the_next_upload_is_evaluated(
    judge: Uploader, model: str, words: str
) -> None:
    wrong = (await judge.upload(model=model)).json()["verification"]
    good = (await judge.upload()).json()["verification"]
    found = await judge.ended(wrong)
    assert found["state"] == "refused" and found["remedy"]
    assert any(word in found["error"] for word in words.split("|")), found["error"]
    assert ((await judge.ended(good))["state"], judge.files()) == ("done", [])


async def test_a_worker_that_floods_its_output_is_killed(tmp_path: Path) -> None:
    """With so many unread bytes, asyncio stops reading and does not notice that the worker has ended."""
    (tmp_path / "weights").touch()
    talks = Evaluator(1.0, (sys.executable, "-c", "import os\nwhile True: os.write(1, bytes(65536))"))
    request = AnswerRequest("good", None, "", ("x" * 10**6,), answers=1, seed=0, cpu=1, memory=0)
    with pytest.raises(EvaluationFailed, match="longer than 1 s"):
        await asyncio.wait_for(talks.answers(tmp_path / "weights", request), TIMEOUT_S)


async def test_a_judge_that_ends_during_its_start_ends_the_worker(tmp_path: Path) -> None:
    """At the start, the worker may download the operator's models for minutes."""
    os.mkfifo(tmp_path / "pid")
    code = (
        "import os, sys, time\nwith open(sys.argv[1], 'w') as f: f.write(str(os.getpid()))\ntime.sleep(1000)"
    )
    worker = Evaluator(TIMEOUT_S, (sys.executable, "-c", code, str(tmp_path / "pid")))
    start = asyncio.create_task(worker.describe(["tiny"]))
    process = psutil.Process(int(await asyncio.to_thread((tmp_path / "pid").read_text)))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not process.is_running()


async def test_a_start_that_takes_too_long_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "START_S", 0.1)
    slow = Evaluator(TIMEOUT_S, (sys.executable, "-c", "import time; time.sleep(1000)"))
    with pytest.raises(JudgeError, match=r"after 0\.1 s \(TimeoutError\)\. Start the judge again"):
        await slow.describe(["tiny"])


async def test_ctrl_c_reaches_the_judge_but_no_worker(tmp_path: Path) -> None:
    """A terminal signals the whole process group, and a worker's traceback would hide the judge's message."""
    told = """import os; print('{"type":"refused","error":"apart %s"}' % (os.getpgrp() == os.getpid()))"""
    alone = Evaluator(TIMEOUT_S, (sys.executable, "-c", told))
    with pytest.raises(JudgeError, match="apart True"):
        await alone.describe(["tiny"])
    (tmp_path / "weights").touch()
    request = AnswerRequest("good", None, "", (), answers=1, seed=0, cpu=1, memory=0)
    with pytest.raises(EvaluationFailed, match="apart True"):
        await alone.answers(tmp_path / "weights", request)


async def test_a_worker_that_hangs_is_killed(settings: JudgeSettings, tmp_path: Path) -> None:
    own = replace(settings, database=str(tmp_path / "judge.sqlite3"), verified_folder=tmp_path / "uploads")
    async with judging(own, seconds=0.5) as judge:
        found = await judge.ended((await judge.upload(model="hangs")).json()["verification"])
        assert found["state"] == "refused" and "longer than 0.5 s" in found["error"]


async def test_weights_that_cannot_be_deleted_do_not_block_other_uploads(
    settings: JudgeSettings, tmp_path: Path
) -> None:
    own = replace(settings, database=str(tmp_path / "judge.sqlite3"), verified_folder=tmp_path / "uploads")
    async with judging(own) as judge:
        stuck = (await judge.upload(model="hangs")).json()["verification"]
        (worker,) = await eventually(workers)
        file = tmp_path / "uploads" / f"{stuck}.safetensors"
        file.unlink()
        file.mkdir()  # `unlink` fails on a folder, as it would on a failing disk
        worker.kill()
        assert (await judge.ended(stuck))["state"] == "refused"
        assert (await judge.ended((await judge.upload()).json()["verification"]))["state"] == "done"


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ({"model": "other"}, 422, "no model of this name"),
        ({"curriculum": "0" * 16}, 409, "another curriculum"),
        ({"lora_rank": 4, "base": "f" * 16}, 409, "another base model"),
        ({"lora_rank": 4, "base": BASE}, 422, "do not fit this model|missing, unknown or"),
        ({"lora_rank": 0}, 422, "malformed"),
        ({"lora_rank": 10**9, "base": BASE}, 422, "malformed"),
        ({"bytes": 2 * 10**6}, 422, "length differs"),
        ({"bytes": 0}, 422, "malformed"),
        ({"sha256": "0" * 64}, 422, "SHA-256 differs"),
        ({"sha256": "../../etc/passwd"}, 422, "malformed"),
        ({"answers": 17}, 422, "malformed"),
        ({"path": "/etc/passwd"}, 422, "malformed"),
    ],
)
async def test_declarations_are_checked_before_the_body(
    judge: Uploader, said: dict[str, Any], status: int, words: str
) -> None:
    response = await judge.upload(**said)
    assert response.status_code == status and any(
        word in response.json()["error"] for word in words.split("|")
    ), response.text
    assert response.json()["remedy"] and judge.files() == []


async def test_an_upload_over_the_limit_is_refused(judge: Uploader) -> None:
    refused(await judge.upload(headers={"content-length": str(10**6 + 1)}, bytes=10**6 + 1), 413, "too large")


async def test_an_unsigned_upload_is_refused(judge: Uploader) -> None:
    peer = judge.peer()
    refused(await judge.upload(peer=peer, headers={"swarmd-signature": "0" * 128}), 401, "signature")
    refused(await judge.upload(peer=peer, headers={"content-encoding": "gzip"}), 415, "compressed")
    taken = await judge.upload(peer=peer)
    assert taken.status_code == 202
    await judge.ended(taken.json()["verification"])
    peer.sequence -= 1
    refused(await judge.upload(peer=peer), 409, "sequence number")


@pytest.mark.parametrize("pause, rate", [(0.02, 10**6), (3600.0, 1e-3)], ids=["trickles", "stands still"])
async def test_a_slow_upload_is_ended_and_frees_its_place(
    judge: Uploader, pause: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload may not trickle for ever, and may not pause because it was fast before."""
    monkeypatch.setattr(config, "VERIFIED_STALL_S", 0.05)
    monkeypatch.setattr(config, "VERIFIED_BYTES_PER_S", rate)

    async def drip() -> AsyncIterator[bytes]:
        for byte in GOOD:
            yield bytes([byte])
            await asyncio.sleep(pause)

    refused(await asyncio.wait_for(judge.upload(drip()), TIMEOUT_S), 408, "in time")
    assert judge.files() == []


@pytest.mark.parametrize("folder", [False, True])
async def test_a_disk_timeout_is_not_blamed_on_the_sender(
    judge: Uploader, folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk may time out when the file's content or its name is written."""

    def times_out(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) is folder:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", times_out)
        refused(await judge.upload(), 500, "internal error")
    assert judge.files() == []


@on_each_database
async def test_a_peer_may_have_one_upload_at_a_time_and_a_network_a_few(
    judge: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, held = judge.peer(), asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield GOOD[:20]
        await held.wait()
        yield GOOD[20:]

    async def both_arrive() -> bool:
        return len(judge.files()) == 2

    slow = [asyncio.create_task(judge.upload(waiting(), one)) for one in (peer, judge.peer())]
    await eventually(both_arrive)
    refused(await judge.upload(peer=peer), 409, "of yours wait")
    refused(await judge.upload(), 429, "of your network wait")
    monkeypatch.setattr(config, "VERIFIED_WAITING", 2)
    refused(await judge.upload(), BUSY.status, BUSY.error)
    held.set()
    for upload in slow:
        assert (await judge.ended((await upload).json()["verification"]))["state"] == "done"


async def test_a_networks_uploads_are_limited_over_all_its_keys(judge: Uploader) -> None:
    taken = await judge.upload()
    await judge.ended(taken.json()["verification"])
    for key in range(int(config.VERIFIED_BURST) - 1):
        refused(await judge.upload(bytes(len(GOOD)), SigningPeer(1_000 + key)), 422, "not a safetensors file")
    response = await judge.upload(peer=SigningPeer(2_000))
    refused(response, 429, "your network uploads too often")
    assert 0 < int(response.headers["retry-after"]) <= config.VERIFIED_PAUSE_S + 1


async def test_with_a_nearly_full_disk_uploads_are_rejected(
    judge: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "FREE_BYTES", 2**62)
    refused(await judge.upload(), 503, "nearly full")


async def test_a_judge_without_the_verified_tier_rejects_uploads(
    settings: JudgeSettings, tmp_path: Path
) -> None:
    off = replace(settings, database=str(tmp_path / "judge.sqlite3"), verified_bytes=0)
    async with judging(off) as judge:
        refused(await judge.upload(), 404, "evaluates no uploaded weights")
        refused(await judge.http.get("/v1/verified"), 404, "evaluates no uploaded weights")
        refused(await judge.http.get("/v1/verified/nothing"), 404, "no upload with this id")


async def test_failing_own_tasks_do_not_end_the_judge(settings: JudgeSettings, tmp_path: Path) -> None:
    plugin = tmp_path / "none.py"
    # A plug-in without held-out questions.
    generate = "def generate(specialty, seed):\n    assert seed < 10**9\n    return 'none', ''\n"
    plugin.write_text(f"specialties = ['add']\n{generate}def score(facts, answer):\n    return 0.0\n")
    digest = find_curriculum(str(plugin)).digest
    async with judging(
        replace(settings, database=str(tmp_path / "judge.sqlite3"), curriculum=str(plugin))
    ) as judge:
        for _ in range(2):
            found = await judge.ended((await judge.upload(curriculum=digest)).json()["verification"])
            assert (found["state"], found["error"]) == ("refused", "internal error of the judge")


async def test_uploads_continue_after_a_restart(database: str, tmp_path: Path) -> None:
    """Waiting uploads are evaluated, but not an upload whose evaluation was interrupted twice.

    Incomplete files, and files that the database does not name, are removed.
    """
    settings = JudgeSettings(
        database,
        "tiny-9",
        key=tmp_path / "judge.key",
        verified_bytes=10**6,
        verified_model=MODELS,
        verified_questions=1,
        verified_folder=tmp_path / "uploads",
    )
    async with judging(settings) as judge:
        hanging = (await judge.upload(model="hangs")).json()["verification"]
        waiting = (await judge.upload()).json()["verification"]
        await judge.told(hanging, "running")
    others = ["my-model.safetensors", "notes.txt"]
    for stray in ("0" * 32 + ".part", "1" * 32 + ".safetensors", *others):
        (folder_of(settings) / stray).write_bytes(GOOD)
    async with judging(settings) as judge:
        assert judge.files() == sorted([hanging + ".safetensors", waiting + ".safetensors", *others])
        await judge.told(hanging, "running")
    async with judging(settings) as judge:
        assert (await judge.ended(waiting))["state"] == "done"
        found = await judge.ended(hanging)
        assert found["state"] == "refused" and "stopped twice" in found["error"]
        assert judge.files() == others
    for name in others:
        (folder_of(settings) / name).unlink()


def test_only_a_peers_latest_uploads_are_kept(database: str) -> None:
    with closing(open_store(database, "tiny-9 0123")) as store:
        answer = VerifiedAnswer("bf", 7, 1.0, 1, "correct", "a\0\\", True)
        for number in range(12):
            upload = Upload(f"{number:032x}", PeerId("alice"), "tiny", None, "0" * 64, 10, 1)
            store.run(verifications.queued, upload, 100 + number, float(number))
            store.run(verifications.running, upload.id)
            if number % 2:
                store.run(verifications.refused, upload, float(number), "unfit", "mend it")
            else:
                store.run(
                    verifications.done, upload, float(number), [answer], {"receipt": "{}", "signature": "0"}
                )
        kept = [number for number in range(12) if store.run(verifications.find, f"{number:032x}")]
        assert kept == [2, 4, 6, 8, 10, 11]  # the finished uploads, and the last
        with store.begin() as db:
            assert {peer: one["verification"] for peer, one in newest(db, ["alice", "bob"]).items()} == {
                "alice": f"{10:032x}"
            }
        found = store.run(verifications.find, f"{10:032x}")
        assert found is not None and found[1] == [answer]
        assert (found[0].correct, found[0].questions) == (1, 1)
        assert (
            store.run(judge_store.sequence, PeerId("alice")) == 111
            and store.run(judge_store.sequence, PeerId("bob")) == -1
        )


@pytest.mark.slow  # two hundred uploads
async def test_two_hundred_hostile_uploads_are_rejected(
    judge: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is stored or evaluated, each gets a reason and a remedy, and the next good upload is evaluated."""
    count = 0
    for hostile in uploads(SHAPES, seed=1):

        async def body(hostile: HostileUpload = hostile) -> AsyncIterator[bytes]:
            yield hostile.body
            if hostile.slow:
                await asyncio.Event().wait()

        true = {"bytes": len(hostile.body), "sha256": sha256(hostile.body).hexdigest()}
        with monkeypatch.context() as impatient:
            if hostile.slow:
                impatient.setattr(config, "VERIFIED_STALL_S", 0.05)
            response = await judge.upload(body(), headers=hostile.headers, **true | hostile.said)
        assert 400 <= response.status_code < 500, (hostile.kind, response.text)
        assert response.json()["error"] and response.json()["remedy"]
        assert judge.files() == [], hostile.kind
        count += 1
    assert count == 200
    assert (await judge.ended((await judge.upload()).json()["verification"]))["state"] == "done"
