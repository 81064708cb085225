"""The process that answers questions with uploaded weights: `python -m judge.verified.worker FD`.

It is the only part of the judge that uses torch. It loads the judge's copy of the model, tokenizer and
template, and then gives up access to files, sockets and processes (swarmd/tasks/sandbox/containment.py). Only
then does it read the weights, from a file that was opened for it. It never receives the right answers.
"""

import os
import sys
from hashlib import sha256

import msgspec

from judge.verified.messages import (
    MAX_ANSWER_CHARACTERS,
    AnswerRequest,
    DescribeRequest,
    GivenAnswer,
    GivenAnswers,
    ModelDescriptions,
    ModelTensors,
    Reply,
    WorkerRefusal,
)
from judge.verified.weights_check import with_checkpoint_names
from p2p.errors import OperatorError
from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import compile_nothing
from swarmd.tasks.sandbox import seccomp
from swarmd.tasks.sandbox.containment import close_files_except, contain
from swarmd.types import Completion

# Questions answered in one batch.
BATCH_QUESTIONS = 64
PIECE_BYTES = 2**20
# Runs at a lower priority than the judge, which has deadlines.
NICE = 10


def opened(model: str, lora_rank: int | None) -> LanguagePolicy:
    """Open the judge's copy of the model, on the CPU in one thread. Raises OperatorError."""
    return LanguagePolicy.open(
        NodeConfig(
            model=ModelConfig(
                name=model,
                device="cpu",
                threads=1,
                lora="off" if lora_rank is None else "on",
                lora_rank=lora_rank or 1,
            )
        ),
        0,
    )


def described(request: DescribeRequest) -> Reply:
    # The models are loaded before the containment, which denies files.
    models = {name: _tensors(name) for name in request.models}
    return ModelDescriptions(contain(), models)


def _tensors(model: str) -> ModelTensors:
    whole, adapter = opened(model, None), opened(model, 1)
    return ModelTensors(
        whole.fingerprint,
        *[
            {name: tuple(weight.shape) for name, weight in policy.trained.items()}
            for policy in (whole, adapter)
        ],
    )


def answered(request: AnswerRequest, weights: int, replies: int) -> Reply:
    """Answer a request. weights, replies: file descriptors; all other ones above 2 are closed."""
    compile_nothing()
    policy = opened(request.model, request.lora_rank)
    # Warm up, so that no module is left to import.
    _answers(policy, request.questions[:2], min(request.answers, 2), request.seed)
    close_files_except(weights, replies)
    # Standard output is /dev/null by now; standard error goes there too.
    os.dup2(1, 2)
    if not contain(request.memory, request.cpu):
        return WorkerRefusal("this machine cannot sandbox the evaluation")
    data = b"".join(iter(lambda: os.read(weights, PIECE_BYTES), b""))
    if sha256(data).hexdigest() != request.digest:
        return WorkerRefusal("the weights on the judge's disk are damaged")
    policy.load_weights(with_checkpoint_names(data))
    del data
    batches = [
        _answers(
            policy, request.questions[start : start + BATCH_QUESTIONS], request.answers, request.seed + start
        )
        for start in range(0, len(request.questions), BATCH_QUESTIONS)
    ]
    return GivenAnswers([row for batch in batches for row in batch])


def _answers(
    policy: LanguagePolicy, questions: tuple[str, ...], count: int, seed: int
) -> list[list[GivenAnswer]]:
    """Generate the answers: the first greedy, the rest sampled at the default temperature."""
    first = [[_given(answer)] for answer in policy.greedy(questions)]
    if count > 1:
        for row, generation in zip(first, policy.generate(questions, count - 1, seed=seed), strict=True):
            row += map(_given, generation.completions)
    return first


def _given(answer: Completion) -> GivenAnswer:
    return GivenAnswer(answer.text[-MAX_ANSWER_CHARACTERS:], answer.ended)


def main() -> None:
    seccomp.die_with_parent(int(sys.argv[1]))
    os.nice(NICE)
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Prints must not mix with the reply.
    os.dup2(nowhere, 1)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=DescribeRequest | AnswerRequest)
    try:
        reply = (
            described(request)
            if isinstance(request, DescribeRequest)
            else answered(request, int(sys.argv[2]), replies)
        )
    except OperatorError as error:
        # The judge's own model cannot be opened.
        reply = WorkerRefusal(str(error))
    except MemoryError:
        reply = WorkerRefusal("the evaluation took too much memory")
    except (ValueError, RuntimeError) as error:
        # Caused by the weights: torch raises RuntimeError for most failures, including lack of memory.
        reply = WorkerRefusal(f"the weights cannot be evaluated: {str(error)[:200]}")
    body = msgspec.json.encode(reply)
    while body:
        body = body[os.write(replies, body) :]
    # A normal exit runs functions of torch that import modules, which the containment refuses by now.
    os._exit(0)


if __name__ == "__main__":
    main()
