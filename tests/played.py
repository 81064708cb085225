"""A policy without a model."""

from collections.abc import Callable, Sequence

from swarmd.experience.advantages import unweighed
from swarmd.types import Completion, Generation, Scored, Tokens, UpdateReport, Weigh


class PlayedPolicy:
    """A `Policy` without a model.

    It answers a question with `texts(question)`, one text for each completion, and learns nothing.
    """

    def __init__(self, texts: Callable[[str], Sequence[str]]) -> None:
        self._texts = texts

    def generate(
        self, questions: Sequence[str], completions: int, limits: Sequence[int] = (), **_: object
    ) -> Sequence[Generation]:
        tokens = Tokens(((1,),) * completions, ((-1.0,),) * completions)
        answers = [self._texts(question)[:completions] for question in questions]
        return [
            Generation(tuple(Completion(text, ended=True) for text in texts), tokens) for texts in answers
        ]

    def answer(self, question: str, observe: object = None) -> Completion:
        return Completion(self._texts(question)[0], ended=True)

    def update(self, batch: Sequence[Scored], _weigh: Weigh = unweighed) -> UpdateReport:
        return UpdateReport(tokens=len(batch))
