"""Write a Modelfile for ollama: chat template, system prompt, stop texts and sampling parameters.

Ollama's templates are Go templates, rendered once per turn: .System is set only in the first turn, and
.Response in all turns but the last, which ends at the place of .Response
(https://docs.ollama.com/modelfile). So the Go template is assembled from the text that the model's template
writes around four marks.

FROM names a GGUF file: ollama reads safetensors of only a few models, and only with its MLX engine
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
    """Return the text of a Modelfile for a folder that `swarmd export` has written.

    Raises ConfigError if the model's chat template has no equivalent in ollama.
    """
    try:
        template = _template(chat)
    except (TemplateFails, ValueError) as error:
        raise ConfigError(
            f"--ollama: the model's chat template cannot be written as ollama's ({error}). Leave --ollama"
            " out; llama.cpp and other programs read the template in the folder."
        ) from None
    # Sample from all tokens, as in training.
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
    """Return the template in Go's language. Raises TemplateFails, or ValueError with the reason."""
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
        # Without a system prompt the template adds a default one. The first turn has the configured one.
        after_answer, first = "", after_answer
    else:
        raise ValueError("it adds a default system prompt: set model.system_prompt")
    if begin is not None:
        first = (
            f"{{{{ if .System }}}}{begin}{{{{ .System }}}}{after_system}{{{{ else }}}}{first}{{{{ end }}}}"
        )
    if end != before_answer:
        end = f"{{{{ if .Response }}}}{before_answer}{{{{ else }}}}{end}{{{{ end }}}}"
    return f"{first}{{{{ .Prompt }}}}{end}{{{{ .Response }}}}{after_answer}"


def _split(chat: Chat, text: str, marks: Sequence[str]) -> list[str]:
    """Return the texts before, between and after the marks, in order."""
    if "{{" in text or _QUOTES in text + chat.system_prompt:
        raise ValueError(f"it, or the system prompt, has {{{{ or {_QUOTES} in it")
    # Ollama itself adds the token at the beginning if the model's tokenizer does.
    rest, pieces = text.removeprefix(chat.tokenizer.bos_token or ""), []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(f"it leaves out {mark.replace('-', ' ')}")
        pieces.append(piece)
    return [*pieces, rest]
