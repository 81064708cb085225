"""The HTTP routes of vLLM's server that we use, as of 0.33.0.

Every failure raises EngineFailed, with a cause and a remedy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx2

from swarmd.policy.inference.engine import EngineFailed

# Turns off all settings that would change the distribution from softmax(logits / temperature).
_PLAIN: Final = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Client:
    """Calls a vLLM server. Thread-safe, because httpx clients are."""

    def __init__(self, http: httpx2.Client, where: str, why_gone: Callable[[], str]) -> None:
        """Use this HTTP client.

        where: names the server in messages. why_gone: returns cause and remedy if the server does not answer.
        """
        self._http, self._where, self._why_gone = http, where, why_gone

    def healthy(self) -> bool:
        try:
            return self._http.get("/health").status_code == httpx2.codes.OK
        except httpx2.HTTPError:
            # The server does not answer yet. The caller has a timeout.
            return False

    def base_model(self) -> str:
        """Return the name of the first served model that is not an adapter."""
        models = self._call("GET", "/v1/models").get("data", [])
        bases = [m["id"] for m in models if not m.get("parent")]
        if not bases:
            raise EngineFailed(
                f"vLLM at {self._where} serves no model. Start it with the model of model.name."
            )
        return str(bases[0])

    def complete(
        self,
        model: str,
        prompt: Sequence[int],
        copies: int,
        *,
        limit: int,
        ends: Sequence[int],
        temperature: float,
        seed: int | None,
        **more: Any,
    ) -> list[tuple[list[int], list[float]]]:
        """Return `copies` answers to one prompt: their token ids and log-probabilities.

        If an answer ended by itself, its last token is one of `ends`.
        """
        body = {
            **_PLAIN,
            "model": model,
            "prompt": list(prompt),
            "add_special_tokens": False,
            "n": copies,
            "max_tokens": limit,
            "temperature": temperature,
            "stop_token_ids": list(ends),
            "ignore_eos": True,  # we name the tokens that end an answer
            "logprobs": 0,  # only the log-probability of the token that was drawn
            "return_token_ids": True,
            **({} if seed is None else {"seed": seed}),
            **more,
        }
        choices = self._call("POST", "/v1/completions", body).get("choices", [])
        try:
            answers = [
                (list(c["token_ids"]), list(c["logprobs"]["token_logprobs"]))
                for c in sorted(choices, key=lambda c: c["index"])
            ]
        except (KeyError, TypeError) as error:
            raise EngineFailed(
                f"the server at {self._where} sends no token ids or log-probabilities. It must be vLLM"
                " 0.33 or newer."
            ) from error
        return answers

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from a folder; it replaces an adapter of the same name.

        Give another folder each time, because vLLM's prefix cache may contain results of the old one.
        """
        self._call(
            "POST",
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": folder, "load_inplace": True},
            absent=(
                "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, as a user who can read"
                " that folder."
            ),
        )

    def load_weights(self, folder: str) -> None:
        """Reload all weights from a folder, in place, and empty the prefix cache."""
        dev = "Start it with VLLM_SERVER_DEV_MODE=1."
        self._call(
            "POST",
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": folder}},
            absent=dev,
        )
        if not self._call("POST", "/reset_prefix_cache", absent=dev).get("success"):
            raise EngineFailed(
                f"vLLM at {self._where} did not empty its prefix cache, because other clients use it. Give"
                " swarmd a separate server."
            )

    def sleep(self) -> None:
        """Put the server to sleep at level 1: it moves weights to main memory, and drops keys and values."""
        self._call("POST", "/sleep?level=1")

    def wake(self) -> None:
        self._call("POST", "/wake_up")

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, absent: str = ""
    ) -> dict[str, Any]:
        """Call a route and return the JSON object of the answer; {} if the answer is not an object.

        absent: the remedy if the server does not have the route.
        """
        try:
            response = self._http.request(method, path, json=body)
        except httpx2.TimeoutException as error:
            raise EngineFailed(
                f"vLLM at {self._where} did not answer {path} in time. Raise generate.engine_start_seconds if"
                " it only needs longer."
            ) from error
        except httpx2.HTTPError as error:
            raise EngineFailed(
                f"vLLM at {self._where} cannot be reached ({error}). {self._why_gone()}"
            ) from error
        if response.status_code == httpx2.codes.NOT_FOUND and absent:
            raise EngineFailed(
                f"the server at {self._where} has no {path}, or does not find the weights:"
                f" {_error_text(response)}. {absent}"
            )
        if response.is_error:
            raise EngineFailed(
                f"vLLM at {self._where} refused {path} ({response.status_code}: {_error_text(response)}). "
                'Fix that, or set generate.engine to "own".'
            )
        found = _json(response)
        return found if isinstance(found, dict) else {}


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        # Some routes answer with plain text, such as /v1/load_lora_adapter.
        return None


def _error_text(response: httpx2.Response) -> str:
    """Return vLLM's error text, from {"error": {"message": …}} or {"detail": …}."""
    found = _json(response)
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    return response.text[:500]
