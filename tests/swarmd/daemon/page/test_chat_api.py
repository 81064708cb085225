"""OpenAI's chat API over a real socket, with tiny behind it."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from swarmd.daemon.page import http, opening
from swarmd.daemon.page.chat_api import MAX_BODY_BYTES, ChatApi
from swarmd.testing import TIMEOUT_S, until
from swarmd.trainer.trained_model import Answer, TrainedModel
from tests.swarmd.policy.conftest import open_policy
from tests.swarmd.trainer.test_trained_model import config, save

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"model": "tiny", "messages": MESSAGES, "temperature": 0}


@contextlib.asynccontextmanager
async def served(
    state: Path, kind: type[TrainedModel] = TrainedModel, **more: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    save(open_policy("tiny"), state, 1)
    api = ChatApi(kind(state, config("tiny")), **{"anybody": False, **more})
    async with trio.open_nursery() as nursery:
        listeners = await opening.listen("127.0.0.1", 0)
        nursery.start_soon(partial(http.serve, api.respond, listeners, MAX_BODY_BYTES, gone_ends=True))
        port = listeners[0].socket.getsockname()[1]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=TIMEOUT_S) as client:
            yield client
        nursery.cancel_scope.cancel()


async def test_models_and_an_answer_of_the_newest_checkpoint(tmp_path: Path) -> None:
    renewed: list[int] = []
    async with served(tmp_path, renewed=renewed.append) as client:
        assert [m["id"] for m in (await client.get("/models")).json()["data"]] == ["tiny"]
        first = (await client.post("/chat/completions", json=GREEDY)).json()
        (choice,) = first["choices"]
        said = open_policy("tiny").answer(MESSAGES[0]["content"])
        assert choice["message"] == {"role": "assistant", "content": said.text, "refusal": None}
        assert choice["finish_reason"] == "stop" and first["usage"]["prompt_tokens"] == 15
        save(open_policy("tiny"), tmp_path, 2)
        # Parts of text, and fields that ask for nothing
        again = GREEDY | {
            "messages": [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}],
            "top_p": 1, "n": 1, "tools": [], "response_format": {"type": "text"}, "logit_bias": {},
            "user": "me", "max_tokens": 2,
        }  # fmt: skip
        second = (await client.post("/chat/completions", json=again)).json()
        assert second["choices"][0]["finish_reason"] == "length"
        assert (first["system_fingerprint"], second["system_fingerprint"]) == ("round-1", "round-2")
        assert renewed == [2]


async def test_a_stream_has_the_same_answer_in_pieces(tmp_path: Path) -> None:
    asked = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    async with served(tmp_path) as client:
        whole = (await client.post("/chat/completions", json=GREEDY)).json()
        lines = (await client.post("/chat/completions", json=asked)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert usage["usage"] == whole["usage"] and usage["choices"] == []
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and len(deltas) > 4
    assert "".join(d.get("content", "") for d in deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "change, status, why",
    [
        ({"model": "gpt-4"}, 404, "model 'tiny' alone"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, 400, "context is 1,024"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"n": 2}, 400, r"\$\.n"),
        ({"tools": [{}]}, 400, "tools"),
        ({"logit_bias": {"5": 100}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], status: int, why: str
) -> None:
    async with served(tmp_path) as client:
        for stream in (False, True):
            answer = await client.post("/chat/completions", json=GREEDY | change | {"stream": stream})
            assert answer.status_code == status and re.search(why, answer.json()["error"]["message"])


async def test_who_may_ask(tmp_path: Path) -> None:
    rebound: dict[str, Any] = {"json": GREEDY, "headers": {"Host": "evil.example"}}
    refused: list[tuple[int, dict[str, Any]]] = [
        (403, {"json": GREEDY, "headers": {"Origin": "http://evil.example"}}),
        (403, rebound),
        (400, {"content": b"{" * 2**20}),
        (400, {"content": json.dumps(GREEDY).encode().replace(b"What", b"\xff")}),
        (413, {"content": b" " * 2**20 + b"{"}),
    ]
    async with served(tmp_path) as client:
        for status, request in refused:
            assert (await client.post("/chat/completions", **request)).status_code == status
        assert (await client.get("/")).status_code == 404
    async with served(tmp_path, anybody=True) as client:
        assert (await client.post("/chat/completions", **rebound)).status_code == 200


class Full(TrainedModel):
    """Finds the device full."""

    def _load(self, identity: Any) -> None:
        super()._load(identity)
        self._network.register_forward_pre_hook(full)


def full(*_: object) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


async def test_a_client_is_told_that_memory_is_short(tmp_path: Path) -> None:
    why = "memory on cpu for 15 tokens and an answer of up to 16. Shorten"
    async with served(tmp_path, kind=Full) as client:
        answer = await client.post("/chat/completions", json=GREEDY)
        stream = await client.post("/chat/completions", json=GREEDY | {"stream": True})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    # Its head was sent before.
    *_, event, done, end = stream.text.split("\n\n")
    assert (stream.status_code, done, end) == (200, "data: [DONE]", "")
    assert why in json.loads(event.removeprefix("data: "))["error"]["message"]


class Overtaken(TrainedModel):
    """Finds a newer checkpoint at the second request, while the first one waits for its answer."""

    requests = 0

    def renew(self) -> bool:
        if self.round > 0:
            self.requests += 1
            trio.from_thread.run(wait_all_tasks_blocked)
        if self.requests == 2:
            save(open_policy("tiny"), self._state_dir, 2)
        return super().renew()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fingerprint_is_of_the_weights_that_answer(tmp_path: Path, stream: bool) -> None:
    save(open_policy("tiny"), tmp_path, 1)
    api, seen = ChatApi(Overtaken(tmp_path, config("tiny")), anybody=True), list[str]()

    async def ask() -> None:
        async def send(data: bytes) -> None:
            if b"{" in data:
                seen.append(json.loads(data.removeprefix(b"data: "))["system_fingerprint"])

        body = json.dumps(GREEDY | {"stream": stream, "max_tokens": 1}).encode()
        response = await api.respond(http.Request("POST", "/v1/chat/completions", {}, {}, body))
        await (response.stream(send) if response.stream else send(response.body))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)
    assert set(seen) == {"round-2"}


class Counting(TrainedModel):
    """Ends no answer by itself, and counts the pieces of text of each."""

    counts: ClassVar[list[int]] = []

    def answer(self, prompt: Any, settings: Any, told: Callable[[str], object] = lambda _: None) -> Answer:
        self.counts.append(0)
        self.chat.ends = frozenset()

        def count(text: str) -> None:
            self.counts[-1] += 1
            told(text)

        return super().answer(prompt, settings, count)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_answer(tmp_path: Path, stream: bool) -> None:
    endless = GREEDY | {"max_tokens": 800, "stream": stream}
    Counting.counts.clear()
    async with served(tmp_path, kind=Counting) as client:
        await client.post("/chat/completions", json=endless)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.post, "/chat/completions", json=endless))
            await until(lambda: len(Counting.counts) > 1 and Counting.counts[-1] > 0, every=0.001)
            nursery.cancel_scope.cancel()
        assert (await client.post("/chat/completions", json=GREEDY | {"max_tokens": 1})).status_code == 200
    whole, left, _ = Counting.counts
    assert whole > 200 and left < whole / 2
