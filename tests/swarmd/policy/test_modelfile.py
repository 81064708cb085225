"""What ollama makes of our Modelfile is what the model was trained on."""

import re
from collections.abc import Mapping, Sequence

import pytest

from swarmd.errors import ConfigError
from swarmd.policy.inference.modelfile import modelfile
from swarmd.policy.models.chat import Chat
from tests.swarmd.policy.conftest import CHAT, NO_SYSTEM_ROLE, make_tokenizer

# Of Qwen2.5: a system prompt of its own where there is none
OWN_PROMPT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|system|>You are Own.<|endoftext|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Of Qwen3: an empty thought before a new answer, and none before earlier ones
NO_THOUGHT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
# Of tiny
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BEGINNING = "{{ '<|endoftext|>' }}" + CHAT  # of Llama: the tokenizer's first token, which ollama puts there
TURNS = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4"), ("user", "and so on?")]


def executed(template: str, values: Mapping[str, str]) -> str:
    """Execute what we use of Go's text/template: fields, and if with else and end."""
    out, on = [], [True]
    for text, action in re.findall(r"(.*?)(?:\{\{ (.*?) \}\}|\Z)", template, re.DOTALL):
        if all(on):
            out.append(text)
        match action.split():
            case ["if", field]:
                on.append(bool(values[field]))
            case ["else"]:
                on[-1] = not on[-1]
            case ["end"]:
                on.pop()
            case [field] if all(on):
                out.append(values[field])
    return "".join(out)


def as_ollama(template: str, messages: Sequence[tuple[str, str]]) -> str:
    """Render a conversation as ollama's template.Execute does for templates without .Messages."""
    done, turn = "", {".System": "", ".Prompt": "", ".Response": ""}
    for role, text in messages:
        if role == "user" and turn[".Response"]:
            done += executed(template, turn)
            turn = dict.fromkeys(turn, "")
        turn[{"system": ".System", "user": ".Prompt", "assistant": ".Response"}[role]] = text
    # The field and all behind it is cut off
    return done + executed(template.partition("{{ .Response }}")[0], turn)


@pytest.mark.parametrize("system", ["", "be good"])
@pytest.mark.parametrize("template", [CHAT, NO_SYSTEM_ROLE, OWN_PROMPT, NO_THOUGHT, NO_SYSTEM, BEGINNING])
def test_ollama_renders_what_the_models_own_template_does(template: str, system: str) -> None:
    tokenizer = make_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>" if template is BEGINNING else None
    chat = Chat(tokenizer, system, ours=True)
    if template is OWN_PROMPT and not system:
        with pytest.raises(ConfigError, match=r"set model\.system_prompt"):
            modelfile(chat, 1.0, 12, 128)
        return
    file = modelfile(chat, 0.5, 12, 128)
    found = re.search(r'^TEMPLATE """(.*?)"""$', file, re.DOTALL | re.MULTILINE)
    assert found is not None
    head = [("system", system)] if system else []
    for length in (1, 3, 5):
        messages = [{"role": role, "content": text} for role, text in TURNS[:length]]
        wanted = chat.conversation(messages).removeprefix(tokenizer.bos_token or "")
        assert as_ollama(found[1], [*head, *TURNS[:length]]) == wanted
    lines = file.splitlines()
    assert ('SYSTEM """be good"""' in lines) is bool(system)
    assert {
        "FROM ./model.gguf",
        "PARAMETER temperature 0.5",
        "PARAMETER top_k 0",
        "PARAMETER num_ctx 128",
    } <= {*lines}
    assert 'PARAMETER stop "<|endoftext|>"' in lines and "PARAMETER num_predict 12" in lines


@pytest.mark.parametrize(
    "template, system",
    [(CHAT + "{# x #}{{ '{{' }}", ""), (CHAT, 'say """'), (CHAT.replace("m['content']", "'x'"), "")],
)
def test_what_a_modelfile_cannot_say_is_refused(template: str, system: str) -> None:
    chat = Chat(make_tokenizer(), system, ours=True)
    chat.tokenizer = make_tokenizer(template)
    with pytest.raises(ConfigError, match="Leave --ollama out"):
        modelfile(chat, 1.0, 12, 128)
