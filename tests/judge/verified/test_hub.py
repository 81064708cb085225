"""Weights that are named on a hub: what the judge fetches, from where alone, and hostile answers.

The hub is our own, on loopback.
"""

import json
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

import httpx2
import pytest

from judge import config
from judge.config import JudgeSettings
from judge.verified.evaluator import VerifiedUnusable
from judge.verified.hub import MAX_CONFIG_BYTES, REDIRECTS, Hub
from judge.verified.weights_check import UnfitWeights
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.held_out import checked_receipt
from tests.judge.conftest import eventually
from tests.judge.peers import SigningPeer
from tests.judge.test_app import refused
from tests.judge.verified.standin_worker import MODELS, SHAPES
from tests.judge.verified.test_verified import Uploader, judging
from tests.judge.verified.weights import file_of
from tests.loopback import Handler, listening

pytestmark = [pytest.mark.anyio, pytest.mark.net, pytest.mark.usefixtures("patient_uploads")]
COMMIT = "c0ffee" + 34 * "0"
GOOD = file_of(SHAPES)
PEFT = file_of({"base_model.model.a.lora_A.weight": (2, 3), "base_model.model.a.lora_B.weight": (4, 2)})


CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "use_rslora": False,
    "alpha_pattern": {},
    "bias": "none",
}
CONFIGS = {
    name: json.dumps(CONFIG | change).encode()
    for name, change in {
        "adapter": {},
        "alpha": {"lora_alpha": 2},
        "rslora": {"use_rslora": True},
        "rank": {"r": 4},
        "parts": {"alpha_pattern": {"a": 8}},
        "pissa": {"init_lora_weights": "pissa"},
        "word": {"lora_alpha": "4"},
        "dear": {"x": "x" * MAX_CONFIG_BYTES},
    }.items()
} | {"deep": b"[" * 60_000}


class HubWithTricks(Handler):
    """The repository's name says what goes wrong."""

    asked: ClassVar[list[str]]
    elsewhere: ClassVar[str]
    over: ClassVar[threading.Event]
    held: ClassVar[threading.Event]

    def get(self) -> None:
        self.asked.append(self.path)
        assert "authorization" not in self.headers
        what = self.path.split("/")[2]
        if self.path.endswith("adapter_config.json") and what in CONFIGS:
            self.answer(CONFIGS[what])
            return
        bodies = {
            "good": GOOD,
            "adapter": PEFT,
            "shapes": file_of({"a.weight": (3, 4), "b.bias": (5,)}),
            "moved": GOOD,
            "html": b"<html>" * 20,
            "pickle": pickle.dumps({"a": list(range(50))}),
            "short": GOOD[:-1],
            "large": b"",
        }
        targets = {
            "away": f"{self.elsewhere}/secret",
            "plain": "http://cdn.example/x",
            "endless": self.path,
            "file": "file:///etc/passwd",
        }
        if what in targets:
            self.answer(b"", 302, Location=targets[what])
        elif what == "moved" and "moved-here" not in self.path:
            self.answer(b"", 307, Location="/me/moved/moved-here")
        elif what == "silent":
            self.over.wait(60)
        elif what == "held":
            self.held.wait(60)
            self.answer(GOOD)
        elif what not in {*bodies, "slow", "unsized"} or self.path.endswith("adapter_model.safetensors") != (
            what == "adapter"
        ):
            self.answer(b"none", 404)
        elif what == "unsized":
            self.answer(GOOD, Content_Length=None)
        elif what == "slow":
            self.answer(GOOD[:50], Content_Length=len(GOOD))
            self.over.wait(60)
        else:
            size = {"large": 10**6 + 1, "short": len(GOOD)}.get(what, len(bodies[what]))
            self.answer(bodies[what], Content_Length=size)


@contextmanager
def tricking(kind: type[HubWithTricks]) -> Iterator[str]:
    # Once more: tests of a module need not follow one another
    kind.over, kind.held = threading.Event(), threading.Event()
    with listening(kind) as address:
        yield address
        kind.over.set()


class Service(HubWithTricks):
    """Another service of the machine, which must not be reached."""

    asked: ClassVar[list[str]] = []

    def get(self) -> None:
        self.asked.append(self.path)
        self.answer(GOOD)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with tricking(Service) as elsewhere:
        HubWithTricks.asked, HubWithTricks.elsewhere = [], elsewhere
        with tricking(HubWithTricks) as address:
            yield address


@pytest.fixture(scope="module")
def settings(hub: str, tmp_path_factory: pytest.TempPathFactory) -> JudgeSettings:
    folder = tmp_path_factory.mktemp("hub")
    return JudgeSettings(
        str(folder / "judge.sqlite3"),
        "tiny-9",
        verified_bytes=10**6,
        verified_model=MODELS,
        verified_questions=1,
        verified_folder=folder / "uploads",
        verified_hub=hub,
    )


@pytest.fixture(scope="module")
async def judge(settings: JudgeSettings, anyio_backend: str) -> AsyncIterator[Uploader]:
    async with judging(settings) as uploader:
        yield uploader


async def name(judge: Uploader, repo: str, peer: SigningPeer | None = None, **said: Any) -> httpx2.Response:
    wish = {"model": "good", "curriculum": TINY_9.digest, "repo": repo, "commit": COMMIT} | said
    target = "/v1/verified/hub?" + urlencode(wish)
    return await judge.http.post(target, headers=(peer or judge.peer()).headers("POST", target, b""))


async def outcome(judge: Uploader, repo: str, **said: Any) -> dict[str, Any]:
    taken = await name(judge, repo, **said)
    assert taken.status_code == 202, taken.text
    return await judge.ended(taken.json()["verification"])


@pytest.mark.parametrize(("repo", "file"), [("me/good", GOOD), ("me/moved", GOOD), ("me/adapter", PEFT)])
async def test_weights_of_a_commit_are_evaluated_and_named_in_the_receipt(
    judge: Uploader, hub: str, repo: str, file: bytes
) -> None:
    rank = {"lora_rank": 2} if file is PEFT else {}
    found = await outcome(judge, repo, **rank)
    assert (found["state"], found["weights"], found["bytes"]) == (
        "done",
        sha256(file).hexdigest(),
        len(file),
    ), found
    receipt = checked_receipt(found)
    whence = f"{hub}/{repo}/resolve/{COMMIT}/{'adapter_model' if rank else 'model'}.safetensors"
    assert (
        receipt is not None
        and receipt["source"] == found["source"] == whence
        and receipt["weights"] == found["weights"]
    )
    assert judge.files() == []


@pytest.mark.parametrize(
    ("repo", "words"),
    [
        ("me/nothing", "gives no model.safetensors of this commit"),
        ("me/adapter", "gives no model.safetensors of this commit"),
        ("me/html", "no safetensors file"),
        ("me/pickle", "no safetensors file"),
        ("me/shapes", "other shapes"),
        ("me/large", "too large for this judge"),
        ("me/short", "cannot be reached"),
        ("me/unsized", "how large"),
        ("me/endless", "without end"),
        ("me/away", "a host where this judge fetches nothing"),
        ("me/plain", "a host where this judge fetches nothing"),
        ("me/file", "a host where this judge fetches nothing"),
    ],
)
async def test_hostile_answers(judge: Uploader, repo: str, words: str) -> None:
    before = len(HubWithTricks.asked)
    found = await outcome(judge, repo)
    assert found["state"] == "refused" and words in found["error"] and found["remedy"], found
    assert judge.files() == [] and Service.asked == []
    assert len(HubWithTricks.asked) - before == (REDIRECTS + 1 if repo == "me/endless" else 1)


@pytest.mark.parametrize(
    ("repo", "words"),
    [
        ("me/nothing", "gives no adapter_config.json of this commit"),
        ("me/alpha", "another scale"),
        ("me/rslora", "another scale"),
        ("me/rank", "says rank 4, and 2 was named"),
        ("me/parts", "not one of a plain LoRA adapter"),
        ("me/pissa", "not one of a plain LoRA adapter"),
        ("me/word", "not one of a plain LoRA adapter"),
        ("me/deep", "not one of a plain LoRA adapter"),
        ("me/dear", "too large"),
    ],
)
async def test_an_adapter_of_other_settings_is_refused(judge: Uploader, repo: str, words: str) -> None:
    before = len(HubWithTricks.asked)
    found = await outcome(judge, repo, lora_rank=2)
    assert found["state"] == "refused" and words in found["error"] and found["remedy"], found
    assert len(HubWithTricks.asked) - before == 1  # its weights are not fetched


@pytest.mark.parametrize(
    ("repo", "limit"),
    [("me/slow", "VERIFIED_STALL_S"), ("me/slow", "FETCH_S"), ("me/silent", "HUB_S")],
)
async def test_a_hub_that_is_too_slow(
    judge: Uploader, repo: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(config, limit, 0.2)
        found = await outcome(judge, repo)
    assert found["state"] == "refused" and "in time" in found["error"] and judge.files() == []


@pytest.mark.parametrize(
    "said",
    [
        {"commit": "main"},
        {"commit": COMMIT[:-1]},
        {"commit": COMMIT + "\n"},
        {"repo": "../.."},
        {"repo": "me/good/resolve/main"},
        {"repo": "evil@other/x"},
        {"file": "x.bin"},
    ],
)
async def test_names_of_weights_that_are_refused(judge: Uploader, said: dict[str, str]) -> None:
    refused(await name(judge, said.pop("repo", "me/good"), **said), 422, "another form")


async def test_naming_refuses_unknown_models_other_bases_and_second_uploads(
    judge: Uploader, settings: JudgeSettings, tmp_path: Path
) -> None:
    refused(await name(judge, "me/good", model="other"), 422, "no model of this name")
    refused(await name(judge, "me/adapter", lora_rank=2, base="f" * 16), 409, "another base model")
    peer = judge.peer()
    taken = await name(judge, "me/good", peer)
    refused(await name(judge, "me/good", peer), 409, "of yours wait")
    # Or the next test's count of what is fetched has this one too
    await judge.ended(taken.json()["verification"])
    assert (await judge.http.get("/v1/verified")).json()["hub"] == settings.verified_hub
    off = replace(
        settings,
        database=str(tmp_path / "judge.sqlite3"),
        verified_folder=tmp_path / "uploads",
        verified_hub="",
    )
    async with judging(off) as without:
        refused(await name(without, "me/good"), 404, "fetches no weights")


async def test_waiting_weights_are_fetched_after_a_restart(settings: JudgeSettings, tmp_path: Path) -> None:
    async def asked_for_held() -> bool:
        return any("/me/held" in path for path in HubWithTricks.asked)

    own = replace(settings, database=str(tmp_path / "judge.sqlite3"), verified_folder=tmp_path / "uploads")
    async with judging(own) as judge:
        held = (await name(judge, "me/held")).json()["verification"]
        waiting = (await name(judge, "me/good")).json()["verification"]
        await eventually(asked_for_held)
    HubWithTricks.held.set()
    async with judging(own) as judge:
        assert (await judge.ended(waiting))["state"] == (await judge.ended(held))["state"] == "done"


@pytest.mark.parametrize("path", [None, "/mirror"])
async def test_waiting_weights_are_fetched_from_no_other_hub(
    settings: JudgeSettings, tmp_path: Path, path: str | None
) -> None:
    own = replace(settings, database=str(tmp_path / "judge.sqlite3"), verified_folder=tmp_path / "uploads")
    async with judging(own) as judge:
        waiting = (await name(judge, "me/silent")).json()["verification"]
    async with judging(replace(own, verified_hub="" if path is None else own.verified_hub + path)) as judge:
        found = await judge.ended(waiting)
    assert found["state"] == "refused" and "fetches nothing from there" in found["error"]


async def test_a_cdn_is_reached_by_the_address_that_was_checked() -> None:
    sent: list[httpx2.Request] = []
    found = {"cdn.example": ["93.184.215.14"], "inside.example": ["93.184.215.14", "10.0.0.1"]}

    async def pieces() -> AsyncIterator[bytes]:
        yield GOOD

    async def resolve(host: str) -> list[str]:
        return found[host]

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        first = request.url.host == "hub.example"
        to = "cdn.example:8443/x?y" if "me/x" in request.url.path else "inside.example/x"
        if first:
            return httpx2.Response(302, headers={"location": f"https://{to}"})
        return httpx2.Response(200, headers={"content-length": f"{len(GOOD)}"}, content=pieces())

    hub = Hub("https://hub.example/", resolve, httpx2.MockTransport(answer))
    async with hub.opened(hub.source("me/x", COMMIT, adapter=False)) as (size, parts):
        assert size == len(GOOD) and b"".join([part async for part in parts]) == GOOD
    assert sent[1].url == "https://93.184.215.14:8443/x?y" and sent[1].headers["host"] == "cdn.example:8443"
    assert sent[1].extensions["sni_hostname"] == "cdn.example"
    with pytest.raises(UnfitWeights, match="fetches nothing"):
        async with hub.opened(hub.source("me/y", COMMIT, adapter=False)):
            pass
    assert len(sent) == 3


async def test_no_proxy_stands_between_judge_and_hub(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would look hosts up by itself, past the check of addresses."""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    there = Hub(hub)
    async with there.opened(there.source("me/good", COMMIT, adapter=False)) as (size, _):
        assert size == len(GOOD)


async def test_a_malformed_host_is_refused() -> None:
    away = httpx2.MockTransport(
        lambda _: httpx2.Response(302, headers={"location": "https://" + 64 * "a" + ".example/"})
    )
    hub = Hub("https://hub.example", transport=away)
    with pytest.raises(UnfitWeights, match="cannot be reached"):
        async with hub.opened(hub.source("me/x", COMMIT, adapter=False)):
            pass


@pytest.mark.parametrize(
    "address",
    ["huggingface.co", "ftp://hub.example", "https://me:secret@hub.example", "https://hub.example?x"],
)
def test_a_malformed_hub_address_is_refused(address: str) -> None:
    with pytest.raises(VerifiedUnusable, match="--verified-hub"):
        Hub(address)
