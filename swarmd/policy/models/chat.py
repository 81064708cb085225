"""Chat encoding: a question to prompt tokens, tokens to a completion and back."""

import unicodedata
from collections.abc import Sequence
from typing import Any

from swarmd.errors import NoModel
from swarmd.policy.models.chat_template import ChatFrame, TemplateFails, frame
from swarmd.terminal import printable
from swarmd.types import Completion

SYSTEM_PROMPT = (
    "You solve puzzles. Think as briefly as the puzzle allows, then give the final result, and nothing else, "
    "between <answer> and </answer>. Write it exactly in the form that the question asks for."
)


class Chat:
    """A tokenizer and its chat template. `ends`: the ids that end an answer when they are sampled."""

    def __init__(
        self, tokenizer: Any, system_prompt: str, ends: frozenset[int] = frozenset(), *, ours: bool = False
    ) -> None:
        """Test the chat template, and fall back to the system prompt inside the question (Gemma 2).

        ends: end-of-answer ids besides the tokenizer's own, from the model's generation settings. ours: the
            template came with this package.

        Raises NoModel where the template does not work.
        """
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self.ends = ends | {self._end}
        # Some templates know no system role (Gemma 2): say the same at the head of the question.
        ways = [(system_prompt, ""), ("", system_prompt + "\n\n")] if system_prompt else [("", "")]
        for system, self._preamble in ways:
            try:
                self._frame = self._framed(system, ours)
            except TemplateFails as error:
                why = printable(str(error))
            else:
                return
        raise NoModel(
            f"the model's chat template cannot render a question ({why}). Choose an instruct model, or"
            " correct chat_template.jinja."
        )

    def _framed(self, system_prompt: str, ours: bool) -> ChatFrame:
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError as error:  # several, and none of them is the default
            raise TemplateFails(str(error)) from None
        tokens = {
            name: text for name, text in self._tokenizer.special_tokens_map.items() if isinstance(text, str)
        }
        return frame(template, tuple(sorted(tokens.items())), system_prompt, ours=ours)

    def prompt(self, question: str) -> list[int]:
        """Return the token ids up to where the answer begins."""
        ids: list[int] = self._tokenizer(
            self._frame.around(self._preamble + question), add_special_tokens=False
        )["input_ids"]
        return ids

    def read(self, ids: Sequence[int], ended: bool) -> Completion:
        """Decode sampled ids to text, without the end-of-sequence token."""
        body = list(ids[:-1] if ended else ids)
        return Completion(
            self._tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False), ended
        )

    def has_tokens_for(self, text: str) -> bool:
        """Return whether the text survives a round trip; for ASCII that was checked at loading."""
        if text.isascii():
            return True
        ids = self.encode(Completion(text, ended=False), len(text.encode()) + 1)
        return _composed(self.read(ids, ended=False).text) == _composed(text)

    def encode(self, completion: Completion, limit: int) -> list[int]:
        """Return the ids of somebody else's answer, as if we had sampled it: at most `limit`.

        The end token is added only where the answer ended by itself and fits. Control tokens that are spelled
        out in the text stay text, so that nobody but us ends an answer or opens a new turn.
        """
        ids: list[int] = self._tokenizer(
            completion.text, add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        return [*ids, *([self._end] if completion.ended else [])][:limit]


def _composed(text: str) -> str:
    """Normalise accented letters to one spelling, and drop leading spaces, as many tokenizers do."""
    return unicodedata.normalize("NFC", text).lstrip()
