"""Prompt lengths of a curriculum, for the memory plan.

Questions are sampled, and counted by the model's own tokenizer.

Where there is no tokenizer yet (`swarmd models` downloads nothing), tokens are estimated from the text: a
word, a digit, a run of signs and white space before anything but a word are one each, which is how byte-pair
tokenizers part text. For sapo-9's longest question (arc_1d) it gives 526 where Qwen2.5's tokenizer makes 523.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from swarmd.tasks.curriculum import CURRICULA, SAPO_9

SAMPLES: Final = 32  # questions of each specialty
FRAME: Final = 32  # tokens that a chat template puts around a question, where it is not known
STEP: Final = 64  # tokens: lengths are rounded up to it, so that an estimate and a count give the same plan
_PIECE: Final = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s+|_")


@lru_cache(maxsize=4)
def longest_questions(curriculum: str) -> tuple[str, ...]:
    """Return the longest of SAMPLES questions of each specialty.

    curriculum: `swarm.curriculum` of a model that is not tiny. Empty for own tasks, which only their
        contained process can make.
    """
    known = SAPO_9 if curriculum == "auto" else CURRICULA.get(curriculum)
    if known is None:
        return ()
    from swarmd.tasks.source import TaskRef, tasks_of  # ReasoningGYM takes a second to import

    def longest(specialty: str) -> str:
        found = (tasks_of(known.name).task(TaskRef(specialty, n)) for n in range(SAMPLES))
        return max((task.question for task in found if task), key=estimated_tokens)

    return tuple(longest(specialty) for specialty in known.specialties)


def estimated_tokens(text: str) -> int:
    return len(_PIECE.findall(text))


def prompt_tokens(questions: Sequence[str], count: Callable[[str], int]) -> int:
    """Return the tokens of the longest prompt, rounded up to STEP.

    count: the tokens of a question's whole prompt.
    """
    return -(-max(map(count, questions)) // STEP) * STEP
