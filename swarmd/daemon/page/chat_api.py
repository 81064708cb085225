"""OpenAI's chat API for a node's own model: /v1/chat/completions, also as a stream, and /v1/models.

One answer at a time; other requests wait. What would change an answer and is not there (tools, top_p, several
choices) is refused by name. `system_fingerprint` names the checkpoint that answered.
"""

import time
from collections.abc import Callable
from functools import partial
from secrets import randbits, token_hex
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import trio

from swarmd.daemon.page import access
from swarmd.daemon.page.http import Request, Response, Send
from swarmd.errors import SwarmdError

if TYPE_CHECKING:
    from swarmd.trainer.trained_model import Answer, AnswerSettings, TrainedModel

# A conversation that fills the context of a large model, as JSON.
MAX_BODY_BYTES: Final = 2**20
HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class _Part(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]

    def plain(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Completion(msgspec.Struct):
    """The body of a request. Fields that are not named here change no answer, and are ignored."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str = ""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # Not there. A value that asks for nothing is taken, for clients send them unasked.
    n: Literal[1] | None = None
    top_p: Any = None
    logprobs: Literal[False] | None = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    response_format: Any = None
    tools: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None

    def check(self) -> None:
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias
        if changed or self.top_p not in (None, 1) or self.response_format not in (None, {"type": "text"}):
            raise msgspec.ValidationError(
                "answers are drawn as in training, from all tokens: leave out top_p, presence_penalty,"
                " frequency_penalty, logit_bias and response_format"
            )

    def settings(self) -> "AnswerSettings":
        from swarmd.trainer.trained_model import AnswerSettings

        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = randbits(32) if self.seed is None else self.seed % 2**32
        most = self.max_completion_tokens or self.max_tokens
        return AnswerSettings(self.temperature, most, tuple(filter(None, stop)), seed)


class ChatApi:
    """Answers requests with a model.

    anybody: whether other machines may ask, as the address is not a loopback one. renewed: called with each
        newer checkpoint's round.
    """

    def __init__(
        self, model: "TrainedModel", *, anybody: bool, renewed: Callable[[int], object] = lambda _: None
    ) -> None:
        self._model, self._anybody, self._renewed = model, anybody, renewed
        self._one = trio.CapacityLimiter(1)

    async def respond(self, request: Request) -> Response:
        why = None if self._anybody else access.foreign(request.headers)
        if why is not None:
            return _refused(403, why)
        if (request.method, request.path) == ("GET", "/v1/models"):
            about = {"id": self._model.name, "object": "model", "created": 0, "owned_by": "swarmd"}
            return _json({"object": "list", "data": [about]})
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            return _refused(404, "There are POST /v1/chat/completions and GET /v1/models.")
        try:
            asked = msgspec.json.decode(request.body, type=_Completion)
            asked.check()
            if asked.model not in ("", self._model.name):
                return _refused(404, f"There is the model {self._model.name!r} alone.", "model_not_found")
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
                    headers=HEADERS,
                    stream=partial(self._stream, asked, prompt, about),
                )
            # The answer ends where its client leaves.
            still = trio.from_thread.check_cancelled
            answer = await self._in_thread(partial(self._answer, asked, prompt, about, lambda _: still()))
        except (msgspec.MsgspecError, UnicodeDecodeError, SwarmdError, RecursionError) as error:
            return _refused(400, str(error))
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answer)}
        return _json({**about, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)})

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(work, limiter=self._one)

    def _prompt(self, asked: _Completion) -> list[int]:
        """Look for a newer checkpoint, and return the prompt's tokens. In the model's thread."""
        if self._model.renew():
            self._renewed(self._model.round)
        return self._model.prompt([message.plain() for message in asked.messages])

    def _answer(
        self, asked: _Completion, prompt: list[int], about: dict[str, Any], told: Callable[[str], object]
    ) -> "Answer":
        """Answer in the model's thread, where no other request changes the weights that `about` names."""
        about["system_fingerprint"] = f"round-{self._model.round}"
        told("")
        return self._model.answer(prompt, asked.settings(), told)

    async def _stream(self, asked: _Completion, prompt: list[int], about: dict[str, Any], send: Send) -> None:
        """Send the answer piece by piece. A client that leaves ends it."""

        async def event(delta: dict[str, str], reason: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            await data({"choices": [choice]})

        async def data(what: dict[str, Any]) -> None:
            chunk = {**about, "object": "chat.completion.chunk", **what}
            await send(b"data: " + msgspec.json.encode(chunk) + b"\n\n")

        def told(text: str) -> None:
            # The first piece, before any text, says who speaks.
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


def _json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(status, "application/json", msgspec.json.encode(document), HEADERS)


def _refused(status: int, message: str, code: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return _json({"error": error}, status)
