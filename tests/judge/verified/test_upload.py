"""`swarmd verify --upload` against a judge over TCP, with a stand-in for the evaluating process.

The deadline of uploads is tested, too.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
import uvicorn

from judge.app import create_app
from judge.config import JudgeSettings
from judge.evaluation.service import open_service
from judge.server import JudgeServer, listening_socket, url_of
from judge.verified.evaluator import Evaluator
from p2p.identity import Identity
from swarmd.cli.app import main
from swarmd.daemon.judging import reader
from swarmd.daemon.judging.reader import UploadedWeights, upload
from swarmd.errors import SwarmdError
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.held_out import checked_receipt
from testbed.uploaded_weights import file_of
from tests.judge.verified.standin_worker import BASE, MODELS, SHAPES
from tests.judge.verified.test_verified import STANDIN
from tests.processes import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.net, pytest.mark.usefixtures("patient_uploads")]
OF_THIS_TEST = "SWARMD_TEST_JUDGE"
GOOD = file_of(SHAPES)
ADAPTER = file_of({"a.lora_A.default.weight": (2, 3), "a.lora_B.default.weight": (4, 2)})


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    settings = JudgeSettings(
        str(folder / "judge.sqlite3"),
        "tiny-9",
        verified_bytes=10**6,
        verified_model=MODELS,
        verified_questions=1,
    )
    ready = asyncio.Event()
    async with open_service(settings, random.Random(1), evaluator=Evaluator(60.0, STANDIN)) as service:
        with listening_socket("127.0.0.1", 0) as listener:
            options = uvicorn.Config(
                create_app(service),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
            )
            server = JudgeServer(options, ready.set)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await ready.wait()
                yield url_of(listener)
            finally:
                server.should_exit = True
                await running


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> AsyncIterator[str]:
    async with serving(tmp_path_factory.mktemp("judge")) as url:
        yield url


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return a state folder with a key and a checkpoint of an adapter."""
    checkpoint = tmp_path / "checkpoints" / "round-00000007"
    checkpoint.mkdir(parents=True)
    base = {
        "source": "tiny",
        "revision": None,
        "fingerprint": BASE,
        "lora_rank": 2,
        "dtype": "float32",
        "device": "cpu",
    }
    files = {"policy.json": json.dumps({"base": base, "updates": 7}).encode(), "weights.safetensors": ADAPTER}
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    written = {
        name: {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        for name, content in files.items()
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"schema": 1, "files": written}))
    Identity.load_or_create(tmp_path / "identity.key")
    return tmp_path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("swarmd.cli.judge.POLL_S", 0.05)
    yield


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["verify", *arguments])


async def test_verify_uploads_the_newest_checkpoint(
    url: str, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("--upload", "--judge", url, "--state-dir", str(node), "--json", "--answers", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["n"], found["weights"]) == ("done", 9, sha256(ADAPTER).hexdigest())
    (line,) = (node / "receipts.jsonl").read_text().splitlines()
    receipt = checked_receipt(json.loads(line))
    assert receipt is not None and receipt["lora_rank"] == 2 and receipt["answers"] == 2
    assert await run(found["verification"], "--judge", url, "--state-dir", str(node)) == 0
    said = capsys.readouterr().out
    # The stand-in simplifies one fraction correctly.
    assert "pass@1 11.1 %" in said
    assert found["signature"] not in said and len(said) < 400


async def test_verify_uploads_a_file_and_shows_a_rejection(
    url: str, node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(GOOD)
    options = ("--judge", url, "--state-dir", str(node), "--model", "tiny")
    assert await run("--upload", str(tmp_path / "mine"), *options) == 0
    assert f"weights {sha256(GOOD).hexdigest()}" in capsys.readouterr().out
    (tmp_path / "bomb").write_bytes(b"\x1f\x8b" + bytes(100))
    for name, said in (("bomb", "not a safetensors file"), ("nothing", "Give a safetensors file")):
        assert await run("--upload", str(tmp_path / name), *options) == 2
        assert said in capsys.readouterr().err


async def test_verify_uploads_an_exported_adapter(
    url: str, node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exported tensors have peft's names."""
    file, about = tmp_path / "mine" / "adapter_model.safetensors", tmp_path / "mine" / "adapter_config.json"
    file.parent.mkdir()
    file.write_bytes(
        file_of({"base_model.model.a.lora_A.weight": (2, 3), "base_model.model.a.lora_B.weight": (4, 2)})
    )
    options = ("--upload", str(file.parent), "--judge", url, "--state-dir", str(node), "--json")
    about.write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    assert await run(*options) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == sha256(file.read_bytes()).hexdigest()
    for wrong, said in (
        ('{"r": 2, "lora_alpha": 2}', "scale is not"),
        ('{"r": 2, "lora_alpha": 4, "use_rslora": true}', "scale is not"),
        ("[]", "adapter_config.json cannot be read"),
    ):
        about.write_text(wrong)
        assert await run(*options) == 2
        assert said in capsys.readouterr().err


async def test_an_upload_without_a_judge_gives_a_message(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("--upload", "--state-dir", str(node)) == 2
    assert "--judge" in capsys.readouterr().err


async def test_an_upload_succeeds_after_the_clock_was_set_back(url: str) -> None:
    """The reply to a too low sequence number states the highest number seen."""
    identity = Identity(b"\x07" * 32)
    weights = UploadedWeights(GOOD, "tiny", TINY_9.digest)
    first = await asyncio.to_thread(upload, url, identity, weights, lambda _sent: None, lambda: 10**6)
    await asyncio.to_thread(wait_until, lambda: reader.outcome(url, first).over)
    await asyncio.to_thread(upload, url, identity, weights, lambda _sent: None, lambda: 5)
    with pytest.raises(SwarmdError, match=r"waits or is being|too often"):
        await asyncio.to_thread(upload, url, identity, weights, lambda _sent: None, lambda: 10**7)


async def test_an_upload_may_take_longer_than_other_requests(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload takes two seconds; other requests have one and a half."""
    monkeypatch.setattr(reader, "PIECE_BYTES", len(GOOD) - 4)
    sent: list[int] = []

    def told(so_far: int) -> None:
        sent.append(so_far)
        if len(sent) == 1:
            time.sleep(2.0)

    id = await asyncio.to_thread(
        upload, url, Identity(b"\x09" * 32), UploadedWeights(GOOD, "tiny", TINY_9.digest), told
    )
    assert sent == [len(GOOD) - 4, len(GOOD)] and len(id) == 32


def of_standins(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(OF_THIS_TEST) == str(folder)
    ]


def workers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in of_standins(folder):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process may end at any moment
            found += [process] if "tests.judge.verified.standin_worker" in process.cmdline() else []
    return found


@contextmanager
def judge_process(folder: Path) -> Iterator[str]:
    """Run a judge; kill it with SIGKILL at the end."""
    command, environment = (
        [sys.executable, "-m", "tests.judge.standin_judge", str(folder)],
        {**os.environ, OF_THIS_TEST: str(folder)},
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the judge did not start"
            yield url
        finally:
            process.kill()


@pytest.mark.slow  # starts two judges
def test_after_kill_9_uploads_are_either_complete_or_removed(tmp_path: Path) -> None:
    peers = [Identity(bytes([number]) * 32) for number in (11, 12, 13)]
    uploads = tmp_path / "judge.sqlite3.uploads"
    with judge_process(tmp_path) as url:
        hanging = upload(url, peers[0], UploadedWeights(GOOD, "hangs", TINY_9.digest), lambda _sent: None)
        wait_until(lambda: reader.outcome(url, hanging).state == "running")
        waiting = upload(url, peers[1], UploadedWeights(GOOD, "tiny", TINY_9.digest), lambda _sent: None)
        (uploads / ("0" * 32 + ".part")).write_bytes(GOOD[:50])  # as left by an unfinished upload
        wait_until(lambda: len(of_standins(tmp_path)) > 1)
    wait_until(lambda: not of_standins(tmp_path))  # the evaluating process ended with its judge
    with judge_process(tmp_path) as url:
        assert {path.suffix for path in uploads.iterdir()} == {".safetensors"}
        # The judge listens before the evaluation has started again.
        wait_until(lambda: reader.outcome(url, hanging).state == "running")
        assert reader.outcome(url, waiting).state == "queued"
        wait_until(lambda: workers(tmp_path) != [])
        for process in workers(tmp_path):
            process.kill()
        wait_until(lambda: reader.outcome(url, waiting).over)
        assert reader.outcome(url, waiting).state == "done"
        assert "killed" in reader.outcome(url, hanging).error
        assert list(uploads.iterdir()) == []
