"""OpenAI's chat API for a node's own model: /v1/chat/completions, also as a stream, and /v1/models.

One request is answered at a time; the others wait. A field that would change the kind of answer (tools, a
format, several choices) is rejected by name; other unknown fields (top_p) are ignored, and the response's
header `x-swarmd-ignored` names them. `system_fingerprint` names the checkpoint that answered.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import randbits, token_hex
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import trio

from swarmd.daemon.page import access
from swarmd.daemon.page.http import Request, Response, Send
from swarmd.errors import SwarmdError

if TYPE_CHECKING:
    from swarmd.cli.trained.trained_model import Answer, AnswerSettings, TrainedModel

# Enough for a conversation that fills the context of a large model, as JSON.
MAX_BODY_BYTES: Final = 2**20
# Maximum number of sets of ignored fields that are reported, because clients may invent names.
MOST_TOLD: Final = 20
HEADERS: Final[Mapping[str, str]] = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


_COUNT: Final = "a whole number of at least 1"
_FLAG: Final = "true or false"
_NO_TOOLS: Final = "left out: the model calls no tools"
# The required value of each field, in the words of an error message; [] is any place in a list.
_WANTED: Final[Mapping[str, str]] = {
    "": "a JSON object",
    "messages": "a list of at least one message",
    "messages[]": "an object with role and content",
    "messages[].role": "system, developer, user or assistant",
    "messages[].content": "text, or a list of text parts",
    "messages[].content[]": 'a part such as {"type": "text", "text": "…"}',
    "messages[].content[].type": '"text": the model reads text only',
    "messages[].content[].text": "text",
    "messages[].tool_calls": _NO_TOOLS,
    "messages[].function_call": _NO_TOOLS,
    "model": "text",
    "temperature": "a number from 0 to 2",
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "seed": "a whole number",
    "stop": "text, or a list of texts",
    "stop[]": "text",
    "stream": _FLAG,
    "stream_options": "an object with include_usage",
    "stream_options.include_usage": _FLAG,
    "n": "1: ask again for another answer",
    "logprobs": "false: log-probabilities are not supported",
    "top_logprobs": "0: log-probabilities are not supported",
    "logit_bias": "empty: every token may be drawn",
    "response_format": '{"type": "text"}: ask for a format in a message',
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "modalities": '["text"]: the model writes text only',
    "audio": "left out: the model writes text only",
    "web_search_options": "left out: the model cannot search",
}
# Unsupported fields that would change the kind of answer, and their values that request nothing.
_NOT_THERE: Final[Mapping[str, Sequence[object]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}


class _Part(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part] | None = None
    tool_calls: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    function_call: None = None

    def plain(self) -> dict[str, str]:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Completion(msgspec.Struct):
    """The fields of a request that take effect."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @classmethod
    def read(cls, body: bytes) -> tuple["_Completion", list[str]]:
        """Return the request, and the names of further fields, which are ignored. Raises _Unusable."""
        try:
            found = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Unusable("", "JSON text in UTF-8") from None
        try:
            asked = msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise _Unusable(_field(str(error))) from None
        for at, message in enumerate(asked.messages):
            if message.content is None and message.role != "assistant":
                raise _Unusable(f"messages[{at}].content")
        for name, values in _NOT_THERE.items():
            if found.get(name) is not None and found[name] not in values:
                raise _Unusable(name)
        known = {*cls.__struct_fields__, *_NOT_THERE}
        return asked, [
            k for k, value in found.items() if k not in known and value and (k, value) != ("top_p", 1)
        ]

    def settings(self) -> "AnswerSettings":
        from swarmd.cli.trained.trained_model import AnswerSettings

        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return AnswerSettings(
            self.temperature,
            self.max_completion_tokens or self.max_tokens,
            tuple(filter(None, stop)),
            randbits(32) if self.seed is None else self.seed % 2**32,
        )


class _Unusable(Exception):
    """A field of a request has an unsupported value."""

    def __init__(self, field: str, wanted: str = "") -> None:
        wanted = wanted or _WANTED[re.sub(r"\[\d+\]", "[]", field)]
        super().__init__(f"{field or 'the request'} has to be {wanted}")
        self.field = field


def _field(fault: str) -> str:
    """Return the field that a message of msgspec names, such as "messages[0].role"."""
    path = re.search(r"`\$\.?([^`]*)`$", fault)
    missing = re.match(r"Object missing required field `(\w+)`", fault)
    return ".".join(found[1] for found in (path, missing) if found and found[1])


class ChatApi:
    """Answers requests with a model.

    Args:
        anybody: whether other machines may ask, because the address is not a loopback address.
        renewed: called with each newer checkpoint's round.
        ignored: called with the names of ignored fields of requests, once for each set of names.
    """

    def __init__(
        self,
        model: "TrainedModel",
        *,
        anybody: bool,
        renewed: Callable[[int], object] = lambda _: None,
        ignored: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._model, self._anybody, self._renewed, self._ignored = model, anybody, renewed, ignored
        self._told: set[str] = set()
        self._one = trio.CapacityLimiter(1)

    async def respond(self, request: Request) -> Response:
        if not self._anybody and (why := access.foreign(request.headers)) is not None:
            return _refused(403, why)
        about: dict[str, Any] = {
            "id": self._model.name,
            "object": "model",
            "created": 0,
            "owned_by": "swarmd",
        }
        if (request.method, request.path) == ("GET", f"/v1/models/{self._model.name}"):
            return _json(about)
        if (request.method, request.path) == ("GET", "/v1/models"):
            return _json({"object": "list", "data": [about]})
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            return _refused(404, "There are POST /v1/chat/completions and GET /v1/models.")
        try:
            asked, without = _Completion.read(request.body)
            headers = self._warned(without + ["model"] * (asked.model not in (None, "", self._model.name)))
            prompt = await self._in_thread(partial(self._prompt, asked))
            about = {
                "id": f"chatcmpl-{token_hex(12)}",
                "created": int(time.time()),
                "model": self._model.name,
            }
            if asked.stream:
                return Response(
                    200,
                    "text/event-stream",
                    headers=headers,
                    stream=partial(self._stream, asked, prompt, about),
                )
            answer = await self._in_thread(
                # The answer is cancelled when its client disconnects.
                partial(self._answer, asked, prompt, about, lambda _: trio.from_thread.check_cancelled())
            )
        except _Unusable as error:
            return _refused(400, f"{error}.", error.field or None)
        except SwarmdError as error:
            return _refused(400, str(error))
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answer)}
        whole = {"object": "chat.completion", "choices": [choice], "usage": _usage(answer)}
        return _json(about | whole, headers=headers)

    def _warned(self, ignored: Sequence[str]) -> Mapping[str, str]:
        """Return a response's headers, which name ignored fields; report each set of names once."""
        # The client chose the names: only those that fit a header are repeated.
        names = ", ".join(sorted(name for name in ignored if re.fullmatch(r"[a-z_]{1,40}", name))[:20])
        if not names:
            return HEADERS
        if names not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(names)
            self._ignored(names)
        return {**HEADERS, "x-swarmd-ignored": names}

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(work, limiter=self._one)

    def _prompt(self, asked: _Completion) -> list[int]:
        """Load a newer checkpoint if there is one, and return the prompt's tokens. In the model's thread."""
        if self._model.renew():
            self._renewed(self._model.round)
        return self._model.prompt([message.plain() for message in asked.messages])

    def _answer(
        self, asked: _Completion, prompt: list[int], about: dict[str, Any], told: Callable[[str], object]
    ) -> "Answer":
        """Answer in the model's thread, so no other request changes the weights that `about` names."""
        about["system_fingerprint"] = f"round-{self._model.round}"
        told("")
        return self._model.answer(prompt, asked.settings(), told)

    async def _stream(self, asked: _Completion, prompt: list[int], about: dict[str, Any], send: Send) -> None:
        """Send the answer piece by piece. It ends if the client disconnects."""

        async def event(delta: dict[str, str], reason: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            await data({"choices": [choice]})

        async def data(what: dict[str, Any]) -> None:
            chunk = {**about, "object": "chat.completion.chunk", **what}
            await send(b"data: " + msgspec.json.encode(chunk) + b"\n\n")

        def told(text: str) -> None:
            # The first piece, before any text, gives the role.
            trio.from_thread.run(event, {"content": text} if text else {"role": "assistant", "content": ""})

        try:
            answer = await self._in_thread(partial(self._answer, asked, prompt, about, told))
        except SwarmdError as error:
            await send(b"data: " + _refused(400, str(error)).body + b"\n\n")
        else:
            await event({}, _reason(answer))
            if asked.stream_options is not None and asked.stream_options.include_usage:
                await data({"choices": [], "usage": _usage(answer)})
        await send(b"data: [DONE]\n\n")


def _reason(answer: "Answer") -> str:
    return "stop" if answer.ended else "length"


def _usage(answer: "Answer") -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }


def _json(document: dict[str, Any], status: int = 200, headers: Mapping[str, str] = HEADERS) -> Response:
    return Response(status, "application/json", msgspec.json.encode(document), headers)


def _refused(status: int, message: str, field: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": field, "code": None}
    return _json({"error": error}, status)
