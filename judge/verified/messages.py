"""Messages between the judge and the process that evaluates weights (worker.py): one request, one reply.

The request arrives on the process's standard input. Both are JSON.
"""

from typing import Annotated

import msgspec

MAX_ANSWER_CHARACTERS = 16_384


class DescribeRequest(msgspec.Struct, tag="describe", frozen=True):
    models: tuple[str, ...]


class AnswerRequest(msgspec.Struct, tag="answer", frozen=True):
    """A request for answers. The command line names the file descriptor of the weights."""

    model: str
    lora_rank: int | None
    digest: str  # SHA-256 of the weights
    questions: tuple[str, ...]
    answers: int  # answers to each question; the first is greedy
    seed: int  # seed of the sampled answers
    cpu: int  # seconds
    memory: int  # bytes, beyond the base model


class ModelTensors(msgspec.Struct, frozen=True):
    """Names and shapes of a model's trained tensors. adapter: the tensors of a LoRA adapter of rank 1."""

    fingerprint: str  # fingerprint of the base weights
    whole: dict[str, tuple[int, ...]]
    adapter: dict[str, tuple[int, ...]]

    def shapes(self, lora_rank: int | None) -> dict[str, tuple[int, ...]]:
        """Return shapes by name. lora_rank: None: all weights."""
        if lora_rank is None:
            return self.whole
        return {
            name: (lora_rank, *shape[1:]) if ".lora_A." in name else (*shape[:-1], lora_rank)
            for name, shape in self.adapter.items()
        }


class ModelDescriptions(msgspec.Struct, tag="described", frozen=True):
    contained: bool  # whether the kernel sandboxes the process
    models: dict[str, ModelTensors]


class GivenAnswer(msgspec.Struct, array_like=True, frozen=True):
    text: Annotated[str, msgspec.Meta(max_length=MAX_ANSWER_CHARACTERS)]
    ended: bool


class GivenAnswers(msgspec.Struct, tag="answered", frozen=True):
    answers: list[list[GivenAnswer]]  # the answers to each question


class WorkerRefusal(msgspec.Struct, tag="refused", frozen=True):
    error: str


Reply = ModelDescriptions | GivenAnswers | WorkerRefusal
