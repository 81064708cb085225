"""Between text and token ids: a question as a prompt, an answer as a completion."""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from swarmd.errors import NoModel
from swarmd.types import Completion

SYSTEM_PROMPT = (
    "You solve puzzles. Think as briefly as the puzzle allows, then give the final result, and nothing else, "
    "between <answer> and </answer>. Write it exactly in the form that the question asks for."
)


class Chat:
    """A tokenizer and its chat template. `ends`: the ids that end an answer when they are sampled."""

    def __init__(self, tokenizer: Any, system_prompt: str, ends: frozenset[int] = frozenset()) -> None:
        """ends: more of them than the tokenizer's own, from the model's generation settings. NoModel where the template does not work."""
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self.ends = ends | {self._end}
        self._system, self._preamble = system_prompt, ""
        try:
            works = self.prompt("?") != []
        except TemplateError:
            # Some templates know no system role (Gemma 2): say the same at the head of the question.
            self._system, self._preamble = "", system_prompt + "\n\n" if system_prompt else ""
            try:
                works = self.prompt("?") != []
            except TemplateError:
                works = False
        if not works:
            raise NoModel("the model's chat template cannot render a question. Choose an instruct model, or correct chat_template.jinja.")

    def prompt(self, question: str) -> list[int]:
        """Token ids up to where the answer begins."""
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": self._preamble + question})
        # enable_thinking: Qwen3's template would let it think for more tokens than we generate; other templates don't look at it.
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def read(self, ids: Sequence[int], ended: bool) -> Completion:
        """The text of sampled ids, the end-of-sequence left out."""
        body = list(ids[:-1] if ended else ids)
        return Completion(self._tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False), ended)

    def encode(self, completion: Completion, limit: int) -> list[int]:
        """The ids of somebody else's answer, as if we had sampled it: at most `limit`; its end only where it ended by itself, uncut.

        Control tokens that are spelled out in the text stay text: nobody but us ends an answer or opens a new turn.
        """
        ids: list[int] = self._tokenizer(completion.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*ids, *([self._end] if completion.ended else [])][:limit]
