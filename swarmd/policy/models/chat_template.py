"""A model's chat template (Jinja).

Rendered once, in a contained process; afterwards a prompt is put together from its pieces.

A template is a program that came with the model: it may loop without end or fill the memory. `python -m
swarmd.policy.models.chat_template` renders it for a made-up question, without files or network, in
CPU_SECONDS and `containment.MEMORY` at most. What stands around the question is then the same for every
question, so no template runs during a round.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

CPU_SECONDS: Final = 2  # an ordinary template takes a few milliseconds
PATIENCE: Final = 120.0  # seconds, on however busy a machine
MAX_TEXT: Final = 2**20  # characters of one rendered prompt

WARM_UP: Final = (
    "{% for m in messages %}{{ m | tojson }}{{ strftime_now('%d %b %Y') }}{% endfor %}",
    "{{ raise_exception('') }}",
    "{% if %}",
)
QUESTION: Final = "what-is-asked-here"
SPACED: Final = f" \n {QUESTION} again \n "
_TRIMS: Final[Mapping[str, Callable[[str], str]]] = {
    "": str,
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
}


class TemplateFails(Exception):
    """The template cannot be rendered, for the reason given."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What a chat template puts around a question.

    trim: what it does to the white space at the question's ends.
    """

    pieces: tuple[str, ...]
    trim: str = ""

    def around(self, question: str) -> str:
        return _TRIMS[self.trim](question).join(self.pieces)


def frame_of(plain: str, spaced: str) -> ChatFrame:
    """Derive the frame from the template's texts for QUESTION and for SPACED.

    Raises TemplateFails where the template does more to a question than trim it.
    """
    pieces = tuple(plain.split(QUESTION))
    if len(pieces) < 2:
        raise TemplateFails("it leaves the question out")
    for trim in _TRIMS:
        frame = ChatFrame(pieces, trim)
        if frame.around(SPACED) == spaced:
            return frame
    raise TemplateFails("it changes the question")


@cache
def frame(
    template: str, special_tokens: tuple[tuple[str, str], ...], system: str, *, ours: bool
) -> ChatFrame:
    """Return the text that a chat template puts around a question.

    special_tokens: names and texts, for the template to use. system: the system prompt; "" for none. ours:
        the template came with this package, and is rendered in this process.

    Raises TemplateFails.
    """
    return frame_of(*(render if ours else render_contained)(template, dict(special_tokens), system))


def render(template: str, special_tokens: Mapping[str, str], system: str) -> tuple[str, str]:
    """Render the template for QUESTION and for SPACED, as `apply_chat_template` does.

    Raises TemplateFails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    head = [{"role": "system", "content": system}] if system else []
    chats = [[*head, {"role": "user", "content": question}] for question in (QUESTION, SPACED)]
    # enable_thinking: Qwen3's template would let it think for more tokens than we generate; other templates
    # don't look at it.
    more = {**special_tokens, "add_generation_prompt": True, "enable_thinking": False}
    try:
        (plain, spaced), _ = render_jinja_template(chats, chat_template=template, **more)
    except Exception as error:  # a template is a program and may raise anything
        raise TemplateFails(str(error).strip() or type(error).__name__) from None
    if max(len(plain), len(spaced)) > MAX_TEXT:
        raise TemplateFails(f"it makes more than {MAX_TEXT:,} characters of a question")
    return plain, spaced


def render_contained(template: str, special_tokens: Mapping[str, str], system: str) -> tuple[str, str]:
    """Render a chat template in a contained process, within its limits.

    Raises TemplateFails.
    """
    request = json.dumps([template, dict(special_tokens), system])
    # A zone that needs no file: a template may ask for the date
    environment = {**os.environ, "TZ": "UTC0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "swarmd.policy.models.chat_template"]
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateFails(f"it takes longer than {PATIENCE:.0f} s") from None
    if done.returncode < 0:
        raise TemplateFails(f"it takes more than {CPU_SECONDS} s of CPU time")
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
        if "error" in reply:
            raise TemplateFails(str(reply["error"])[:200])
        plain, spaced = reply["texts"]
    except (ValueError, KeyError, TypeError):
        raise TemplateFails(f"its process ended: {done.stderr.strip()[-200:] or 'out of memory'}") from None
    return str(plain), str(spaced)


def main() -> None:
    """Serve as the contained process: one request on standard input, one reply on standard output."""
    from swarmd.tasks.sandbox import seccomp
    from swarmd.tasks.sandbox.containment import limit_resources

    template, special_tokens, system = json.load(sys.stdin)
    for first in WARM_UP:  # so that everything is imported
        with contextlib.suppress(TemplateFails):
            render(first, {}, "")
    most = int(time.process_time()) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    limit_resources()
    seccomp.install()
    try:
        reply: dict[str, Any] = {"texts": render(template, special_tokens, system)}
    except TemplateFails as failed:
        reply = {"error": str(failed)}
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
