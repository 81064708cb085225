"""Chat encoding by the model's template: questions to prompt tokens, and tokens to completions and back.

A template (Jinja) is an untrusted program that came with the model: it may loop forever or fill the memory.
So `python -m swarmd.policy.models.chat` renders it once, for a made-up question, without files or network,
and within CPU_S and `containment.MEMORY_BYTES`. The text around the question is the same for every question.
So prompts are assembled from these pieces, and no template runs during a round. Example turns are part of the
first piece. An opening, the text with which every answer begins, is appended to the last piece.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from swarmd.errors import NoModel
from swarmd.terminal import printable
from swarmd.types import Completion

# CPU seconds. An ordinary template takes a few milliseconds.
CPU_S: Final = 2
# Wall-clock limit, generous for a busy machine.
RENDER_TIMEOUT_S: Final = 120.0
MAX_PROMPT_CHARACTERS: Final = 2**20
# The limit of Unicode's stream-safe text format (UAX #15). Normalisation takes time quadratic in this number:
# without the limit, two seconds for the longest completion that a peer may send.
MAX_MARKS: Final = 30

WARM_UP: Final = (
    "{% for m in messages %}{{ m | tojson }}{{ strftime_now('%d %b %Y') }}{% endfor %}",
    "{{ raise_exception('') }}",
    "{% if %}",
)
QUESTION: Final = "what-is-asked-here"
SPACED: Final = f" \n {QUESTION} again \n "
ANSWER: Final = "what-is-answered-here"
Examples = tuple[tuple[str, str], ...]  # questions with their answers
_TRIMS: Final[Mapping[str, Callable[[str], str]]] = {
    "": str,
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
}


class TemplateFails(Exception):
    """The template cannot be rendered; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The text that a chat template puts around a question.

    pieces: the text before, between and after the places of the question. trim: how the template strips the
        question. end: the text after the last answer. after: the text between an answer and the next
        question.
        straight: whether an answer starts where the prompt ends; otherwise the model writes more first
        (gpt-oss). rendered: the last piece as the template renders it. notes: for the operator.
    """

    pieces: tuple[str, ...]
    trim: str = ""
    end: str = ""
    after: str = ""
    straight: bool = True
    rendered: str = ""
    notes: tuple[str, ...] = ()

    def around(self, question: str) -> str:
        return _TRIMS[self.trim](question).join(self.pieces)


# Matches the end of a prompt that opens a thought: `<think>`, `[THINK]`, `<|begin_of_thought|>`, not
# `</think>`.
_THOUGHT: Final = re.compile(r"[<\[]\|?(?!end)\w*(think|thought|reason)\w*\|?[>\]]\s*\Z", re.IGNORECASE)


def frame_of(texts: Sequence[str], eos: str = "") -> ChatFrame:
    """Derive the frame from the template's texts.

    texts: the result of `render`. eos: the text of the tokenizer's end token.

    Raises TemplateFails if the template changes a question in another way than by trimming.
    """
    plain, spaced, unopened, asked_again, answered = texts
    pieces = tuple(plain.split(QUESTION))
    if len(pieces) < 2:
        raise TemplateFails("it leaves the question out")
    before, there, behind = asked_again.partition(ANSWER)
    end, after = answered.partition(ANSWER)[2], behind.partition(QUESTION)[0]
    # Compare the text after the question here with the text between question and answer in a conversation.
    tail, known, notes = pieces[-1], before.rpartition(QUESTION)[2] if there else pieces[-1], list[str]()
    missing, extra = known.removeprefix(tail).strip(), tail.removeprefix(known).strip()
    if plain == unopened and known.startswith(tail) and missing:
        notes.append(f"its template does not open an answer, so a prompt is ended by {missing!r}, too")
        tail = known
    elif tail.startswith(known) and extra and not _THOUGHT.search(extra) and extra in (eos, end.strip()):
        notes.append(f"its template ends a prompt with {extra!r}, which ends an answer: this end is left out")
        tail = known
    for trim in _TRIMS:
        if ChatFrame(pieces, trim).around(SPACED) == spaced:
            straight = tail.strip().startswith(known.strip())
            return ChatFrame((*pieces[:-1], tail), trim, end, after, straight, pieces[-1], tuple(notes))
    raise TemplateFails("it changes the question")


@cache
def frame(
    template: str,
    special_tokens: tuple[tuple[str, str], ...],
    system: str,
    examples: Examples = (),
    *,
    ours: bool,
    thinking: bool,
) -> ChatFrame:
    """Return the text that a chat template puts around a question. Raises TemplateFails.

    Args:
        template: the template's source.
        special_tokens: names and texts of tokens that the template may use.
        system: the system prompt; "" for none.
        examples: turns before the question.
        ours: whether the template came with this package, and may be rendered in this process.
        thinking: let the model think first, if its template has this choice.
    """
    special = dict(special_tokens)
    texts = (render if ours else render_contained)(template, special, system, examples, thinking)
    if system.strip() not in texts[0]:
        raise TemplateFails("it leaves the system prompt out")
    # Examples may be changed, but not dropped: some templates remove thoughts from earlier answers.
    if examples and not any(text.strip() in texts[0] for pair in examples for text in pair):
        raise TemplateFails("it leaves the examples out")
    found = frame_of(texts, special.get("eos_token", ""))
    if thinking or not (thought := _THOUGHT.search(found.pieces[-1])):
        return found
    note = (
        f"its template opens a thought ({thought[0].strip()}), though model.thinking is off: an answer comes"
        " after the thought. If many answers are truncated, raise generate.max_new_tokens, or choose another"
        " model"
    )
    return replace(found, notes=(*found.notes, note))


def render(
    template: str,
    special_tokens: Mapping[str, str],
    system: str,
    examples: Sequence[Sequence[str]] = (),
    thinking: bool = False,
) -> tuple[str, ...]:
    """Render the template as `apply_chat_template` does. Raises TemplateFails.

    Returns:
        five texts: for QUESTION, for SPACED, for QUESTION without `add_generation_prompt`, for ANSWER between
        two questions, and for QUESTION and ANSWER alone. The last two are "" if the template allows only one
        question.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    head = [{"role": "system", "content": system}] if system else []
    for question, answer in examples:
        head += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked, spaced = ({"role": "user", "content": question} for question in (QUESTION, SPACED))
    # enable_thinking: Qwen3's template lets the model think by default, which takes more tokens than our
    # default limit. Other templates ignore it.
    more = {**special_tokens, "enable_thinking": thinking}

    def text_of(*messages: Mapping[str, str], opened: bool = True) -> str:
        (text,), _ = render_jinja_template(
            [[*head, *messages]], chat_template=template, **more, add_generation_prompt=opened
        )
        return str(text)

    # A template is an untrusted program and may raise anything.
    try:
        texts = text_of(asked), text_of(spaced), text_of(asked, opened=False)
    except Exception as error:
        raise TemplateFails(str(error).strip() or type(error).__name__) from None
    answered, talks = {"role": "assistant", "content": ANSWER}, ("", "")
    with contextlib.suppress(Exception):
        talks = text_of(asked, answered, asked), text_of(asked, answered, opened=False)
    if max(map(len, (*texts, *talks))) > MAX_PROMPT_CHARACTERS:
        raise TemplateFails(f"it makes more than {MAX_PROMPT_CHARACTERS:,} characters of a question")
    return *texts, *talks


def render_contained(
    template: str,
    special_tokens: Mapping[str, str],
    system: str,
    examples: Sequence[Sequence[str]] = (),
    thinking: bool = False,
) -> tuple[str, ...]:
    """Render a chat template in a contained process, within its limits.

    Raises TemplateFails.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "swarmd.policy.models.chat"],
            input=json.dumps([template, dict(special_tokens), system, examples, thinking]),
            capture_output=True,
            text=True,
            timeout=RENDER_TIMEOUT_S,
            # A template may ask for the date, and this time zone needs no file.
            env={**os.environ, "TZ": "UTC0", "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateFails(f"it takes longer than {RENDER_TIMEOUT_S:.0f} s") from None
    if done.returncode < 0:
        raise TemplateFails(f"it takes more than {CPU_S} s of CPU time")
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
        if "error" in reply:
            raise TemplateFails(str(reply["error"])[:200])
        plain, spaced, unopened, again, answered = map(str, reply["texts"])
    except (ValueError, KeyError, TypeError):
        raise TemplateFails(f"its process ended: {done.stderr.strip()[-200:] or 'out of memory'}") from None
    return plain, spaced, unopened, again, answered


SYSTEM_PROMPT = (
    "You solve puzzles. Think as briefly as the puzzle allows, then give the final result, and nothing else, "
    "between <answer> and </answer>. Write it exactly in the form that the question asks for."
)


class Chat:
    """A tokenizer and its chat template.

    ends: the token ids that end an answer when they are sampled. notes: notes for the operator.
    """

    def __init__(
        self, tokenizer: Any, system_prompt: str, ends: frozenset[int] = frozenset(), *,
        ours: bool = False, thinking: bool = False, examples: Examples = (), opening: str = "",
    ) -> None:  # fmt: skip
        """Test the chat template; without a system role (Gemma 2), put the system prompt into the question.

        Args:
            tokenizer: the model's tokenizer.
            system_prompt: "" for none.
            ends: ids that end an answer, from the model's generation settings, besides the tokenizer's.
            ours: whether the template came with this package.
            thinking: let the model think first (`model.thinking`).
            examples: turns before each question.
            opening: text with which each answer begins. It ends the prompt, and `read` adds it to the answer.

        Raises:
            NoModel: if the template does not work.
        """
        self.tokenizer, self._ours, self._thinking = tokenizer, ours, thinking
        self.examples, self.opening = examples, opening
        self.system_prompt = system_prompt
        self.ends, self.notes = ends | {tokenizer.eos_token_id} - {None}, list[str]()
        # Some templates have no system role (Gemma 2). For them, the question starts with the system prompt.
        ways = [(system_prompt, ""), ("", system_prompt + "\n\n")] if system_prompt else [("", "")]
        special = tuple(
            sorted((n, text) for n, text in tokenizer.special_tokens_map.items() if isinstance(text, str))
        )
        for system, preamble in ways:
            # Like a system prompt, the preamble stands at the start of the conversation.
            first, self._preamble = examples[:1], "" if examples else preamble
            shown = (*((preamble + question, answer) for question, answer in first), *examples[1:])
            try:
                template = tokenizer.get_chat_template()
                self._frame = frame(template, special, system, shown, ours=ours, thinking=thinking)
            except (TemplateFails, ValueError) as error:
                # ValueError: there are several templates, and none is the default.
                why = printable(str(error))
            else:
                self._find_end()
                self._check_opening()
                return
        remedy = 'Set model.examples = "off"' if examples else "Choose an instruct model"
        raise NoModel(
            f"the model's chat template cannot render a question{' after examples' * bool(examples)} ({why})."
            f" {remedy}, or correct chat_template.jinja."
        )

    def showing(self, examples: Examples, opening: str) -> "Chat":
        """Return a chat of the same model with other examples and another opening. Raises NoModel."""
        return Chat(
            self.tokenizer, self.system_prompt, self.ends,
            ours=self._ours, thinking=self._thinking, examples=examples, opening=opening,
        )  # fmt: skip

    def _check_opening(self) -> None:
        thinks = self._thinking or _THOUGHT.search(self._frame.pieces[-1]) or not self._frame.straight
        if self.opening and thinks:
            raise NoModel(
                f"model.opening = {self.opening!r} cannot begin an answer of this model, which writes other"
                ' text first, such as a thought. Set model.opening = "".'
            )

    def _find_end(self) -> None:
        """Find the token that ends an answer. If only the template has it, it is added to `ends`.

        Raises NoModel if there is none.
        """
        frame, tokenizer = self._frame, self.tokenizer
        special = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        if odd := sorted(self.ends - special):
            self.notes.append(
                f"generation_config.json ends answers at {', '.join(map(str, odd))}, which is no control"
                " token of its tokenizer. Correct eos_token_id in a local copy"
            )
        self.ends = frozenset(end for end in self.ends if 0 <= end < len(tokenizer))
        between, closing = ids_of(tokenizer, frame.after), ids_of(tokenizer, frame.end)
        first = next((i for i in closing if tokenizer.decode([i]).strip()), None)
        self.notes += frame.notes
        if first is not None and first not in self.ends and frame.straight:
            if first in special:
                self.ends |= {first}
                self.notes.append(
                    f"its template ends an answer with {tokenizer.decode([first])}, which neither its"
                    " tokenizer nor generation_config.json names as an end: answers end there, too"
                )
            elif not self.ends & {*closing, *between}:
                self.notes.append(
                    f"its template ends an answer with text ({frame.end[:40]!r}), not with a token: answers"
                    f" end only when the model writes {tokenizer.decode(sorted(self.ends))}"
                )
        if not self.ends:
            raise NoModel(
                "the model has no end-of-sequence token, so answers could not end. Set eos_token in the"
                " tokenizer_config.json of a local copy, or choose another model."
            )
        # Gemma ends a turn with <end_of_turn>, but its tokenizer names another end token.
        usual = tokenizer.eos_token_id if tokenizer.eos_token_id in self.ends else min(self.ends)
        self._end: int = next((i for i in (*closing, *between) if i in self.ends), usual)

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation, up to the start of the next answer, in this process.

        Only for the operator's own conversations: the template was tested in the contained process, but
        nothing limits it here.

        Args:
            messages: role ("system", "user" or "assistant") and content. A system message comes first.
                Without one, the system prompt of the training is used; an empty one means none.

        Raises:
            TemplateFails: if the template rejects the conversation.
        """
        given = bool(messages) and messages[0]["role"] == "system"
        system, turns = (messages[0]["content"], messages[1:]) if given else (self.system_prompt, messages)
        if not turns:
            raise TemplateFails("there is no question in it")
        if not system:
            return self._rendered(turns)
        try:
            return self._rendered([{"role": "system", "content": system}, *turns])
        except TemplateFails:
            # The template may have no system role, as in __init__. If the cause is another, it fails again.
            first, *others = turns
            return self._rendered([{**first, "content": f"{system}\n\n{first['content']}"}, *others])

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=self._thinking
                )
            )
        except Exception as error:
            # A template is an untrusted program and may raise anything.
            raise TemplateFails(str(error).strip() or type(error).__name__) from None
        rendered = self._frame.rendered
        return text.removesuffix(rendered) + self._frame.pieces[-1] if text.endswith(rendered) else text

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of the prompt, up to the start of the answer."""
        return ids_of(self.tokenizer, self._frame.around(self._preamble + question) + self.opening)

    def read(self, ids: Sequence[int], ended: bool) -> Completion:
        """Decode sampled ids to a completion: the opening, then the ids without the end-of-sequence token."""
        body = list(ids[:-1] if ended else ids)
        text = self.tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(self.opening + text, ended)

    def turn(self, observation: str) -> list[int]:
        """Return the ids between an answer that ended and the next one, with the observation between them.

        Control tokens that are spelled out in an observation are encoded as plain text.
        """
        between = ids_of(self.tokenizer, self._frame.after)
        said = _TRIMS[self._frame.trim](observation)
        return [
            *between[between.index(self._end) + 1 if self._end in between else 0 :],
            *ids_of(self.tokenizer, said, split_special_tokens=True),
            *ids_of(self.tokenizer, self._frame.pieces[-1] + self.opening),
        ]

    def read_turns(self, ids: Sequence[int], ended: bool, sampled: Sequence[bool]) -> Completion:
        """Decode the ids of several turns (`Tokens.sampled`); see `read`."""
        parts = groupby(zip(ids, sampled, strict=True), key=itemgetter(1))
        runs = [[i for i, _ in part] for drawn, part in parts if drawn]
        *earlier, last = (self.read(run, ended or n < len(runs)).text for n, run in enumerate(runs, 1))
        return Completion(last, ended, tuple(earlier))

    def encode_turns(
        self, completion: Completion, observations: Sequence[str], limit: int
    ) -> tuple[list[int], list[bool]]:
        """Return at most `limit` ids of a completion of several turns, and which of them are the model's.

        See `encode`. There are no ids if a text does not begin with the opening.
        """
        ids: list[int] = []
        sampled: list[bool] = []
        for text, observation in zip(completion.earlier, observations, strict=False):
            said, fed = self.encode(Completion(text, ended=True), limit), self.turn(observation)
            ids += [*said, *fed]
            sampled += [True] * len(said) + [False] * len(fed)
        said = self.encode(completion, limit)
        if not all(text.startswith(self.opening) for text in completion.texts):
            return [], []
        return [*ids, *said][:limit], [*sampled, *[True] * len(said)][:limit]

    def has_tokens_for(self, text: str) -> bool:
        """Return whether the text survives a round trip. ASCII was checked when the tokenizer was loaded.

        A text with more than MAX_MARKS accents on one letter counts as not surviving.
        """
        if text.isascii():
            return True
        runs = groupby(text, lambda letter: unicodedata.combining(letter) > 0)
        if any(marks and len([*run]) > MAX_MARKS for marks, run in runs):
            return False
        ids = self.encode(Completion(text, ended=False), len(text.encode()) + 1)
        found = self.read(ids, ended=False).text
        return _composed(found.removeprefix(self.opening)) == _composed(text.removeprefix(self.opening))

    def encode(self, completion: Completion, limit: int) -> list[int]:
        """Return at most `limit` token ids of another node's answer, as if this node had sampled that text.

        The opening is in the prompt, so an answer that begins differently gets no ids. The end token is added
        only if the answer ended by itself and there is room.

        Control tokens that are spelled out in the text are encoded as plain text, so that a peer's text
        cannot end an answer or open a new turn.
        """
        if not completion.text.startswith(self.opening):
            return []
        ids = ids_of(self.tokenizer, completion.text.removeprefix(self.opening), split_special_tokens=True)
        return [*ids, *([self._end] if completion.ended else [])][:limit]


def ids_of(tokenizer: Any, text: str, **more: bool) -> list[int]:
    """Return the ids of a text, without added special tokens. more: arguments for the tokenizer."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, **more)["input_ids"]
    return ids


def ends_of(generation_config: Any) -> frozenset[int]:
    """Return the ids that end an answer; a model's generation settings may name several."""
    eos = generation_config.eos_token_id
    # The file is untrusted, so the value may have any type.
    return frozenset(end for end in (eos if isinstance(eos, list) else [eos]) if type(end) is int)


def _composed(text: str) -> str:
    """Normalise accented letters to one form, and drop leading spaces, as many tokenizers do."""
    return unicodedata.normalize("NFC", text).lstrip()


def main() -> None:
    """Run the contained process: one request on standard input, one reply on standard output."""
    from swarmd.tasks.sandbox import seccomp
    from swarmd.tasks.sandbox.containment import limit_resources

    request = json.load(sys.stdin)
    for first in WARM_UP:
        # Import everything that rendering needs before the limits apply.
        with contextlib.suppress(TemplateFails):
            render(first, {}, "")
    limit_resources(cpu=int(time.process_time()) + 1 + CPU_S)
    seccomp.install()
    try:
        reply: dict[str, Any] = {"texts": render(*request)}
    except TemplateFails as failed:
        reply = {"error": str(failed)}
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
