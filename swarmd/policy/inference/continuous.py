"""The engine `continuous`: transformers' continuous batching (`generate_batch`) on the trainer's own network.

It is built anew for every call: what it keeps between calls (keys and values of earlier prompts, CUDA graphs)
would be of older weights.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.utils import is_flash_attn_2_available

from swarmd.policy.inference.decode import Sample, Sampling
from swarmd.policy.inference.engine import BuiltInEngine, EngineFailed, NoEngine, draw_seed

# Tokens of a page of keys and values; 256 is what flash attention's paged kernel takes.
PAGE: Final = {"cuda": 256}
SMALL_PAGE_TOKENS: Final = 32  # elsewhere
# Architectures whose answers were compared with plain forward passes (tests/swarmd/policy/test_engine.py).
COMPARED: Final = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "granite", "olmo2"}
)
# The size of one forward pass, at most: bounds the prompts that are computed at once.
BATCH_TOKENS: Final = 2048


class ContinuousEngine(BuiltInEngine):
    """Implements `swarmd.policy.inference.engine.Engine`."""

    def __init__(self, network: nn.Module, tokens: int, rest: Callable[[], object] = lambda: None) -> None:
        """Wrap transformers' continuous batching.

        tokens: how many tokens' keys and values are held at once, at most. Raises NoEngine where it would not
        draw from the model's distribution.
        """
        model: Any = network
        if model.config.model_type not in COMPARED:
            raise NoEngine(
                f"continuous batching was not found to compute what {model.config.model_type} models do (it"
                ' leaves out Gemma 2\'s soft cap, for one). Set generate.engine to "own".'
            )
        self._network, self._tokens, self._resting = model, tokens, rest

    def generate(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, generator: torch.Generator
    ) -> list[list[Sample]]:
        """Generate answers; see `InferenceEngine`.

        Draws one number from `generator`, unless greedy.
        """
        answers = [[Sample((), (), ended=False)] * copies for _ in prompts]
        seed = draw_seed(generator) if sampling.temperature else 0
        rooms = [min(sampling.limit, sampling.context - len(p)) for p in prompts]
        devices = [generator.device] if generator.device.type == "cuda" else []
        # transformers seeds torch's global source.
        with _paged(self._network), torch.random.fork_rng(devices=devices), _frozen_garbage():
            for place, room in enumerate(sorted({r for r in rooms if r > 0}, reverse=True)):
                group = [i for i, r in enumerate(rooms) if r == room]
                found = self._batch([prompts[i] for i in group], copies, room, sampling, seed + place)
                for i, samples in zip(group, found, strict=True):
                    answers[i] = samples
        return answers

    def _batch(
        self, prompts: Sequence[Sequence[int]], copies: int, room: int, sampling: Sampling, seed: int
    ) -> list[list[Sample]]:
        """Generate for prompts that all have the same room for tokens."""
        drawn = copies if sampling.temperature else 1  # greedy answers are all the same
        settings = GenerationConfig(
            do_sample=bool(sampling.temperature),
            temperature=sampling.temperature or None,
            top_k=0 if sampling.temperature else None,
            top_p=1.0 if sampling.temperature else None,
            eos_token_id=sorted(sampling.ends),
            pad_token_id=0,  # never read
            max_new_tokens=room,
            num_return_sequences=drawn,
        )
        batching = self._batching(prompts, drawn, room, seed)
        resting = self._network.register_forward_pre_hook(lambda *_: self._rest())
        try:
            outputs = self._network.generate_batch(
                [list(p) for p in prompts], settings, batching, warmup=False
            )
        finally:
            resting.remove()
        found = list(outputs.values())
        errors = [o.error for o in found if o.error]
        if errors or len(found) != len(prompts) * drawn:
            why = errors[0] if errors else f"{len(found)} of {len(prompts) * drawn} answers came back"
            raise EngineFailed(f'continuous batching failed ({why}). Set generate.engine to "own".')
        samples = [_sample(o.generated_tokens, o.logprobs, sampling.ends) for o in found]
        return [samples[i : i + drawn] * (copies // drawn) for i in range(0, len(samples), drawn)]

    def _rest(self) -> None:
        # Do not return its result: it would be taken for the pass's arguments.
        self._resting()

    def _batching(
        self, prompts: Sequence[Sequence[int]], copies: int, room: int, seed: int
    ) -> ContinuousBatchingConfig:
        """Return settings with pages for all rows, or for as many as the budget holds (at least 1)."""
        page = PAGE.get(self._network.device.type, SMALL_PAGE_TOKENS)

        def pages(tokens: int) -> int:
            return -(-tokens // page) + 1

        wanted = sum(copies * pages(len(p) + room) for p in prompts)
        least = pages(max(map(len, prompts)) + room)
        return ContinuousBatchingConfig(
            page_size=page,
            num_blocks=max(least, min(wanted, self._tokens // page)) + 1,
            max_batch_tokens=BATCH_TOKENS,
            return_logprobs=True,
            seed=seed % 2**62,
            auto_switch_to_flash=False,  # it might fetch kernels from the hub; see `_paged`
            use_cuda_graph=False,
            use_async_batching=False,
        )


def _sample(ids: Sequence[int], logprobs: Sequence[float], ends: frozenset[int]) -> Sample:
    return Sample(tuple(ids), tuple(logprobs), ended=bool(ids) and ids[-1] in ends)


@contextmanager
def _paged(network: Any) -> Iterator[None]:
    """Switch the network to an attention that continuous batching supports until the block ends.

    Nothing with a gradient may be alive across the block.
    """
    before = network.config._attn_implementation
    flash = (
        network.device.type == "cuda"
        and network.dtype in (torch.float16, torch.bfloat16)
        and is_flash_attn_2_available()
    )
    network.set_attn_implementation("flash_attention_2" if flash else "sdpa")
    try:
        yield
    finally:
        network.set_attn_implementation(before)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude existing objects from garbage collection until the block ends.

    transformers collects garbage at the end of every batch, which takes a second once torch is loaded.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
