"""OpenAI's chat API over a real socket, with the model tiny."""

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

from swarmd.cli.trained import chat_api
from swarmd.cli.trained.chat_api import MAX_BODY_BYTES, ChatApi
from swarmd.cli.trained.trained_model import Answer, TrainedModel
from swarmd.daemon.page import http, opening
from tests.doubles import TIMEOUT_S, until
from tests.swarmd.cli.trained.test_trained_model import config, save
from tests.swarmd.policy.conftest import open_policy

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


async def test_the_api_lists_the_model_and_answers_with_the_latest_checkpoint(tmp_path: Path) -> None:
    renewed: list[int] = []
    async with served(tmp_path, renewed=renewed.append) as client:
        listed = (await client.get("/models")).json()["data"]
        assert [m["id"] for m in listed] == ["tiny"]
        assert listed == [(await client.get("/models/tiny")).json()]
        first = (await client.post("/chat/completions", json=GREEDY)).json()
        (choice,) = first["choices"]
        said = open_policy("tiny").answer(MESSAGES[0]["content"])
        assert choice["message"] == {"role": "assistant", "content": said.text, "refusal": None}
        assert choice["finish_reason"] == "stop" and first["usage"]["prompt_tokens"] == 15
        save(open_policy("tiny"), tmp_path, 2)
        # Content in parts, and fields with values that have no effect.
        again = GREEDY | {
            "messages": [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}],
            "top_p": 1, "n": 1, "tools": [], "response_format": {"type": "text"}, "logit_bias": {},
            "user": "me", "max_tokens": 2,
        }  # fmt: skip
        second = (await client.post("/chat/completions", json=again)).json()
        assert second["choices"][0]["finish_reason"] == "length"
        assert (first["system_fingerprint"], second["system_fingerprint"]) == ("round-1", "round-2")
        assert renewed == [2]


async def test_a_streamed_answer_is_the_same_answer_in_pieces(tmp_path: Path) -> None:
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


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "change, field, why",
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": None}, "messages", "at least one message"),
        ({"messages": ["x"]}, "messages[0]", "an object with role and content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "system, developer, user or assistant"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role", "assistant"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text, or a list"),
        ({"messages": [{"role": "system"}, USER]}, "messages[0].content", "text, or a list"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "a part such as"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "reads text only",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, USER]},
            "messages[1].tool_calls",
            "calls no tools",
        ),
        ({"temperature": -1}, "temperature", "from 0 to 2"),
        ({"temperature": 2.5}, "temperature", "from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "from 0 to 2"),
        ({"temperature": True}, "temperature", "from 0 to 2"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "at least 1"),
        ({"seed": "x"}, "seed", "a whole number"),
        ({"stop": 5}, "stop", "text, or a list of texts"),
        ({"stop": ["x", 5]}, "stop[1]", "text"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": []}, "stream_options", "include_usage"),
        ({"stream_options": {"include_usage": 2}}, "stream_options.include_usage", "true or false"),
        ({"model": 5}, "model", "text"),
        ({"n": 2}, "n", "ask again"),
        ({"n": "1"}, "n", "ask again"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"logit_bias": {"5": 100}}, "logit_bias", "every token"),
        ({"response_format": {"type": "json_object"}}, "response_format", "in a message"),
        ({"response_format": "json"}, "response_format", "in a message"),
        ({"tools": [{"type": "function"}]}, "tools", "calls no tools"),
        ({"tool_choice": "required"}, "tool_choice", "calls no tools"),
        ({"functions": [{}]}, "functions", "calls no tools"),
        ({"modalities": ["text", "audio"]}, "modalities", "writes text only"),
        ({"audio": {"voice": "x"}}, "audio", "text only"),
        ({"web_search_options": {}}, "web_search_options", "cannot search"),
    ],
)
async def test_an_unsupported_field_is_rejected_by_name(
    api: ChatApi, change: dict[str, Any], field: str, why: str
) -> None:
    for stream in [False, True] * ("stream" not in change) or [False]:
        code, said = await asked(api, {"stream": stream, **GREEDY, **change})
        assert code == 400 and said["error"]["param"] == field
        assert said["error"]["message"].startswith(f"{field} has to be ") and why in said["error"]["message"]


def test_every_field_has_an_error_text() -> None:
    kinds = {
        "": chat_api._Completion,
        "messages[].": chat_api._Message,
        "messages[].content[].": chat_api._Part,
    }
    fields = {prefix + name for prefix, kind in kinds.items() for name in kind.__struct_fields__}
    assert fields | set(chat_api._NOT_THERE) <= set(chat_api._WANTED)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"5", b"\xff", b'{"temperature": NaN}', b"[" * 100_000])
async def test_malformed_requests_are_refused(api: ChatApi, body: bytes) -> None:
    answer = await api.respond(http.Request("POST", "/v1/chat/completions", {}, {"host": "localhost"}, body))
    message = json.loads(answer.body)["error"]["message"]
    assert answer.status == 400 and re.match(r"(the request|messages) has to be ", message)


async def test_a_too_long_conversation_is_rejected(api: ChatApi) -> None:
    code, said = await asked(api, {"messages": [{"role": "user", "content": "x " * 2000}]})
    assert code == 400 and "context is 1,024" in said["error"]["message"]


@pytest.mark.parametrize(
    "change, names",
    [
        ({"model": "gpt-4"}, "model"),
        ({"top_p": 0.5, "presence_penalty": 1, "user": "me"}, "presence_penalty, top_p, user"),
        ({"top_p": 1, "presence_penalty": 0, "metadata": {}, "model": "", "seed": 10**30}, None),
        ({"x\r\nevil: 1": 1}, None),
        ({"messages": [USER, {"role": "assistant", "content": None}, USER]}, None),
        ({"messages": [USER, {"role": "assistant"}, {**USER, "name": "me"}]}, None),
        ({"messages": [{"role": "user", "content": []}]}, None),
        ({"max_tokens": 10**30, "temperature": 2, "stop": ["", "<"]}, None),
        (dict.fromkeys(("n", "stop", "tools", "response_format", "stream", "max_tokens"), None), None),
    ],
)
async def test_a_field_without_effect_is_ignored_and_logged_once(
    tmp_path: Path, change: dict[str, Any], names: str | None
) -> None:
    told: list[str] = []
    async with served(tmp_path, ignored=told.append) as client:
        for _ in range(2):
            answer = await client.post("/chat/completions", json=GREEDY | change)
            assert answer.status_code == 200 and answer.json()["model"] == "tiny"
            assert answer.headers.get("x-swarmd-ignored") == names
        stream = await client.post("/chat/completions", json=GREEDY | change | {"stream": True})
        assert stream.headers.get("x-swarmd-ignored") == names
    assert told == ([names] if names else [])  # logged once


@pytest.fixture
def api(tmp_path: Path) -> ChatApi:
    save(open_policy("tiny"), tmp_path, 1)
    return ChatApi(TrainedModel(tmp_path, config("tiny")), anybody=False)


async def asked(api: ChatApi, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = http.Request(
        "POST", "/v1/chat/completions", {}, {"host": "localhost"}, json.dumps(body).encode()
    )
    answer = await api.respond(request)
    return answer.status, json.loads(answer.body)


async def test_requests_with_a_wrong_host_or_origin_or_a_bad_body_are_rejected(tmp_path: Path) -> None:
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
    """A model that raises an error as on a full device."""

    def _load(self, identity: Any) -> None:
        super()._load(identity)
        self._network.register_forward_pre_hook(full)


def full(*_: object) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


async def test_a_client_gets_an_error_if_memory_is_short(tmp_path: Path) -> None:
    why = "memory on cpu for 15 tokens and an answer of up to 16. Shorten"
    async with served(tmp_path, kind=Full) as client:
        answer = await client.post("/chat/completions", json=GREEDY)
        stream = await client.post("/chat/completions", json=GREEDY | {"stream": True})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    # The stream's header was sent before the error.
    *_, event, done, end = stream.text.split("\n\n")
    assert (stream.status_code, done, end) == (200, "data: [DONE]", "")
    assert why in json.loads(event.removeprefix("data: "))["error"]["message"]


class Overtaken(TrainedModel):
    """A model that loads a newer checkpoint at the second request, while the first waits for its answer."""

    requests = 0

    def renew(self) -> bool:
        if self.round > 0:
            self.requests += 1
            trio.from_thread.run(wait_all_tasks_blocked)
        if self.requests == 2:
            save(open_policy("tiny"), self._state_dir, 2)
        return super().renew()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fingerprint_belongs_to_the_weights_that_answered(tmp_path: Path, stream: bool) -> None:
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
    """A model whose answers never end, and which counts the pieces of each answer."""

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
