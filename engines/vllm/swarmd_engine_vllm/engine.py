"""vLLM as an engine of swarmd: the entry point `vllm` of the group `swarmd.engines`."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx2

from swarmd.policy.inference.engine import EngineFailed, EngineOptions, Sample, Sampling, Weights, draw_seed
from swarmd_engine_vllm.client import Client
from swarmd_engine_vllm.server import SERVED, ServerProcess, command

ADAPTER: Final = "swarmd-policy"  # the adapter's name in requests
# A request is one prompt with all its answers.
REQUESTS_AT_ONCE: Final = 64
# If only one token is allowed, its log-probability must be at least this. A lower value means that the server
# does not report the distribution that it draws from.
SURE_LOGPROB: Final = -1e-3


def open_engine(asked: EngineOptions) -> "VllmEngine":
    """Start `vllm serve`, or connect to the server at `asked.url`. Raises NoEngine or EngineFailed."""
    scratch = Path(tempfile.mkdtemp(prefix="swarmd-vllm-"))  # mode 0700: other users cannot reach the socket
    try:
        return _connected(asked, scratch) if asked.url else _started(asked, scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _started(asked: EngineOptions, scratch: Path) -> "VllmEngine":
    socket = scratch / "socket"
    child = ServerProcess(command(asked, socket), scratch / "vllm.log", os.environ)
    http = httpx2.Client(
        base_url="http://vllm",
        transport=httpx2.HTTPTransport(uds=str(socket)),
        timeout=asked.start_seconds,
        trust_env=False,
    )
    client = Client(http, str(socket), lambda: f"Its last lines:\n{child.last_lines()}\nJoin again.")
    try:
        child.wait_until(client.healthy, asked.start_seconds)
    except BaseException:
        child.close()
        client.close()
        raise
    return VllmEngine(client, SERVED, scratch, sleeps=asked.device == "cuda", end=child.close)


def _connected(asked: EngineOptions, scratch: Path) -> "VllmEngine":
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    http = httpx2.Client(base_url=asked.url, headers=headers, timeout=asked.start_seconds, trust_env=False)
    client = Client(http, asked.url, lambda: "Start it, or correct generate.engine_url.")
    try:
        # We did not start this server, so we neither put it to sleep nor end it.
        return VllmEngine(
            client, client.base_model(), scratch, sleeps=False, end=lambda: None, check_logprobs=True
        )
    except BaseException:
        client.close()
        raise


class VllmEngine:
    """Implements `swarmd.policy.inference.engine.Engine`."""

    def __init__(
        self,
        client: Client,
        base: str,
        scratch: Path,
        *,
        sleeps: bool,
        end: Callable[[], None],
        check_logprobs: bool = False,
    ) -> None:
        """Use this server.

        Args:
            client: calls the server.
            base: the base model's name at the server.
            scratch: a folder for weights, which the server must be able to read.
            sleeps: whether the server may be put to sleep.
            end: ends the server.
            check_logprobs: whether to check the server's log-probabilities before their first use.
        """
        self._client, self._base, self._scratch, self._sleeps, self._end = client, base, scratch, sleeps, end
        self._model, self._handed, self._unchecked, self._closed = base, 0, check_logprobs, False
        # The folder of the weights that the server uses.
        self._last: Path | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, generator: Any
    ) -> list[list[Sample]]:
        """Generate samples (`Engine.generate`)."""
        fits = [prompt for prompt in prompts if len(prompt) < sampling.context]
        if self._unchecked and fits and sampling.temperature not in (0.0, 1.0):
            self._check_logprobs(fits[0], sampling)
        base_seed = draw_seed(generator) if sampling.temperature else None

        def answer(i: int) -> list[Sample]:
            room = sampling.room(i, prompts[i])
            if not room:
                return [Sample((), (), ended=False)] * copies
            # Greedy answers are all the same, and vLLM refuses to draw more than one.
            drawn = copies if sampling.temperature else 1
            # vLLM draws answer k with seed + k.
            seed = None if base_seed is None else base_seed + i * copies
            found = self._client.complete(
                self._model,
                prompts[i],
                drawn,
                limit=room,
                ends=sorted(sampling.ends),
                temperature=sampling.temperature,
                seed=seed,
            )
            return [_sample(ids, logprobs, sampling.ends) for ids, logprobs in found] * (copies // drawn)

        with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, max(1, len(prompts)))) as pool:
            return list(pool.map(answer, range(len(prompts))))

    def _check_logprobs(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Check that the server's log-probabilities include the temperature.

        By default vLLM reports log-probabilities without the temperature. Raises EngineFailed.
        """
        ((_, logprobs),) = self._client.complete(
            self._model,
            prompt,
            1,
            limit=1,
            ends=(),
            temperature=sampling.temperature,
            seed=0,
            allowed_token_ids=[0],
        )
        if not logprobs or logprobs[0] < SURE_LOGPROB:
            raise EngineFailed(
                "the server's log-probabilities leave out the temperature, so training with"
                f" generate.temperature {sampling.temperature:g} would be wrong. Start it with"
                " --logprobs-mode processed_logprobs."
            )
        self._unchecked = False

    def sync(self, weights: Weights) -> None:
        """Hand over the adapter, or all weights, through a folder.

        The folder is new each time, so that the server does not reuse cached results of older weights.
        """
        self._handed += 1
        folder = self._scratch / f"weights-{self._handed}"
        try:
            folder.mkdir()
            (weights.write_model if weights.lora_rank is None else weights.write_adapter)(folder)
        except OSError as error:
            raise EngineFailed(
                f"the weights for vLLM cannot be written to {folder}: {error}. Free some space, or set"
                " TMPDIR."
            ) from error
        if weights.lora_rank is None:
            self._client.load_weights(str(folder))
        else:
            self._client.load_adapter(ADAPTER, str(folder))
            self._model = ADAPTER
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = folder

    def sleep(self) -> None:
        """Move the server's weights to main memory. Without an update, `wake` moves them back."""
        if self._sleeps:
            self._client.sleep()

    def wake(self) -> None:
        """Bring the weights back."""
        if self._sleeps:
            self._client.wake()

    def close(self) -> None:
        """End the server if we started it, and remove the weights."""
        if not self._closed:
            self._closed = True
            self._client.close()
            self._end()
            shutil.rmtree(self._scratch, ignore_errors=True)


def _sample(ids: Sequence[int], logprobs: Sequence[float], ends: frozenset[int]) -> Sample:
    return Sample(tuple(ids), tuple(logprobs), ended=bool(ids) and ids[-1] in ends)
