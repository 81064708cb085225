"""A Modelfile for ollama: chat template, system prompt, stops and how answers are drawn.

Ollama's templates are Go's, and one is run for each turn: .System is there in the first turn alone, .Response
in all but the last, which ends where .Response would stand (https://docs.ollama.com/modelfile). So ours is
put together from what the model's own template writes around four marks.

FROM names a GGUF file: ollama reads safetensors of few models, and only with its MLX engine
(https://docs.ollama.com/import).
"""

from collections.abc import Sequence
from typing import Final

from swarmd.errors import ConfigError
from swarmd.policy.models.chat import Chat, TemplateFails

COMMANDS: Final = (
    "swarmd export --gguf model.gguf",
    "ollama create my-model",
    "ollama run my-model",
)
MAX_CONTEXT_TOKENS: Final = 8192
_MARKS: Final = ("the-system-prompt", "the-first-question", "the-first-answer", "the-second-question")
_QUOTES: Final = '"""'


def modelfile(chat: Chat, temperature: float, new_tokens: int, context: int) -> str:
    """Write the Modelfile of a folder that `swarmd export` has written.

    Raises ConfigError where the model's chat template has no counterpart in ollama.
    """
    try:
        template = _template(chat)
    except (TemplateFails, ValueError) as error:
        raise ConfigError(
            f"--ollama: the model's chat template cannot be written as ollama's ({error}). Leave --ollama"
            " out; llama.cpp and others read the template that the folder has."
        ) from None
    # From all tokens, as in training.
    drawing = {"temperature": f"{temperature:g}", "top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1}
    limits = {"num_predict": new_tokens, "num_ctx": min(context, MAX_CONTEXT_TOKENS)}
    lines = [
        "# In this folder, with the node's --state-dir if it has one:",
        *(f"#     {command}" for command in COMMANDS),
        "FROM ./model.gguf",
        f"TEMPLATE {_QUOTES}{template}{_QUOTES}",
        *([f"SYSTEM {_QUOTES}{chat.system_prompt}{_QUOTES}"] if chat.system_prompt else []),
        *(f"PARAMETER {name} {value}" for name, value in (drawing | limits).items()),
        *(f'PARAMETER stop "{chat.tokenizer.decode([end])}"' for end in sorted(chat.ends)),
    ]
    return "\n".join(lines) + "\n"


def _template(chat: Chat) -> str:
    """Write the template in Go's language. Raises TemplateFails, or ValueError with the reason."""
    system, *turns = _MARKS
    roles = ("system", "user", "assistant", "user")
    asked = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    text = chat.conversation(asked)
    begin, text = _split(chat, text, [system]) if system in text else (None, text)
    after_system, before_answer, after_answer, end = _split(chat, text, turns)
    plain = chat.conversation([{"role": "system", "content": ""}, asked[1]])
    first, _ = _split(chat, plain, turns[:1])
    if after_answer.endswith(first):
        after_answer = after_answer.removesuffix(first)
    elif chat.system_prompt and begin is not None:
        # Without a system prompt the template brings one of its own. There is ours in the first turn.
        after_answer, first = "", after_answer
    else:
        raise ValueError("it has a system prompt of its own: set model.system_prompt")
    if begin is not None:
        first = (
            f"{{{{ if .System }}}}{begin}{{{{ .System }}}}{after_system}{{{{ else }}}}{first}{{{{ end }}}}"
        )
    if end != before_answer:
        end = f"{{{{ if .Response }}}}{before_answer}{{{{ else }}}}{end}{{{{ end }}}}"
    return f"{first}{{{{ .Prompt }}}}{end}{{{{ .Response }}}}{after_answer}"


def _split(chat: Chat, text: str, marks: Sequence[str]) -> list[str]:
    """Return what stands before, between and behind the marks, in their order."""
    if "{{" in text or _QUOTES in text + chat.system_prompt:
        raise ValueError(f"it, or the system prompt, has {{{{ or {_QUOTES} in it")
    # Ollama puts the token at the beginning itself, where the model's tokenizer does.
    rest, pieces = text.removeprefix(chat.tokenizer.bos_token or ""), []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(f"it leaves out {mark.replace('-', ' ')}")
        pieces.append(piece)
    return [*pieces, rest]
