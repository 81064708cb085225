"""Prompts from questions, text from token ids and back, and Modelfiles that give the same prompts."""

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from tokenizers import processors

from swarmd.config.config import ModelConfig
from swarmd.errors import ConfigError, NoModel
from swarmd.policy.inference.modelfile import modelfile
from swarmd.policy.models.chat import MAX_MARKS, SYSTEM_PROMPT, Chat, TemplateFails, ends_of
from swarmd.policy.models.fit import chat_of
from swarmd.types import Completion
from tests.swarmd.policy.conftest import CHAT, NO_SYSTEM_ROLE, THINKING, make_tokenizer


@pytest.mark.parametrize(
    ("template", "system", "prompt"),
    [
        (CHAT, "be good", "<|system|>be good<|user|>1+1?<|assistant|>"),
        (CHAT, "", "<|user|>1+1?<|assistant|>"),
        (NO_SYSTEM_ROLE, "be good", "<|user|>be good\n\n1+1?<|assistant|>"),
        (THINKING, "", "<|user|>1+1?<|assistant|>"),  # thinking is switched off
    ],
)
def test_a_prompt_is_the_rendered_template_with_the_system_prompt(
    template: str, system: str, prompt: str
) -> None:
    tokenizer = make_tokenizer(template)
    assert tokenizer.decode(Chat(tokenizer, system, ours=True).prompt("1+1?")) == prompt
    assert "<answer>" in SYSTEM_PROMPT and "</answer>" in SYSTEM_PROMPT


SHOWN = (("2+2?", "<answer>4</answer>"), ("3+3?", "<answer>6</answer>"))


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (CHAT, "<|system|>be good<|user|>2+2?"),
        (NO_SYSTEM_ROLE, "<|user|>be good\n\n2+2?"),
        # Templates may change answers; Qwen3's removes thoughts from them.
        (CHAT.replace("m['content']", "m['content'] | trim"), "<|system|>be good<|user|>2+2?"),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_examples_become_turns_before_the_question(template: str, head: str, ours: bool) -> None:
    tokenizer = make_tokenizer(template)
    chat = Chat(tokenizer, "be good", ours=ours, examples=SHOWN, opening="<answer>")
    turns = "<|assistant|><answer>4</answer><|user|>3+3?<|assistant|><answer>6</answer>"
    assert tokenizer.decode(chat.prompt("1+1?")) == f"{head}{turns}<|user|>1+1?<|assistant|><answer>"
    # Text that people send to the model gets neither examples nor opening.
    assert "2+2?" not in chat.conversation([{"role": "user", "content": "1+1?"}])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ '<|user|>' + messages[-1]['content'] + '<|assistant|>' }}", "it leaves the examples out"),
        (
            "{% if messages | length > 2 %}{{ raise_exception('one at a time') }}{% endif %}" + CHAT,
            "one at a time",
        ),
    ],
)
def test_a_template_that_cannot_take_examples_gives_a_message(template: str, why: str) -> None:
    for opening in ("", "<answer>"):
        with pytest.raises(NoModel, match=rf'after examples \({why}\)\. Set model\.examples = "off"'):
            Chat(make_tokenizer(template), "", ours=True, examples=SHOWN, opening=opening)


@pytest.mark.parametrize(
    ("template", "thinking"),
    [
        (THINKING, True),
        (CHAT, True),
        (CHAT + "{{ '<think>' }}", False),
        # As in gpt-oss, where a channel comes before the answer.
        (CHAT.replace("m['content']", "('<a>' if m['role'] == 'assistant' else '') + m['content']"), False),
    ],
)
def test_an_answer_that_follows_a_thought_cannot_have_an_opening(template: str, thinking: bool) -> None:
    tokenizer = make_tokenizer(template)
    Chat(tokenizer, "", ours=True, thinking=thinking)
    with pytest.raises(NoModel, match=r"'<answer>' cannot begin an answer .* Set model\.opening"):
        Chat(tokenizer, "", ours=True, thinking=thinking, opening="<answer>")


@pytest.mark.parametrize("text", ["<answer>42</answer>", "<answer>", "<answer>ünï", "<answer><answer>4"])
def test_an_opening_is_part_of_the_prompt_and_of_the_answers_text(text: str) -> None:
    chat = Chat(make_tokenizer(), "", ours=True, opening="<answer>")
    ids = chat.encode(Completion(text, ended=True), 100)
    assert chat.read(ids, ended=True) == Completion(text, ended=True)
    assert ids == Chat(make_tokenizer(), "", ours=True).encode(Completion(text[8:], ended=True), 100)
    assert chat.has_tokens_for(text)
    for other in ("42</answer>", " <answer>42</answer>", ""):
        assert chat.encode(Completion(other, ended=True), 100) == [], (
            "text that cannot follow the opening was accepted"
        )


def test_a_model_thinks_only_if_configured() -> None:
    network = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    prompts = [
        tokenizer.decode(chat_of(config, "own", tokenizer, network).prompt("1+1?"))
        for tokenizer in [make_tokenizer(THINKING)]
        for config in (ModelConfig(), ModelConfig(thinking="on"))
    ]
    assert [prompt.endswith("<think>") for prompt in prompts] == [False, True]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('for two') }}", "for two"),
        ("{{ raise_exception('') }}", "TemplateError"),
        ("{% if %}", "Expected an expression, .*"),
        ("{# nothing #}", "it leaves the question out"),
        ("{{ 'x' * 2 ** 20 }}" + CHAT, "it makes more than 1,048,576 characters of a question"),
        ({"rag": CHAT, "tool_use": CHAT}, ".*multiple chat templates.*"),
    ],
)
def test_a_failing_template_is_rejected(template: str | dict[str, str], why: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(NoModel, match=rf"chat template cannot render a question \({why}\)\. Choose"):
        Chat(tokenizer, "", ours=True)


def test_a_strangers_template_is_rendered_in_the_contained_process() -> None:
    """This process would have enough memory for the template, but the contained process does not."""
    tokenizer = make_tokenizer("{{ ('x' * 400_000_000) | length }}" + CHAT)
    with pytest.raises(NoModel, match=r"template cannot render a question \(.*[Mm]emory"):
        Chat(tokenizer, "")


def test_only_the_template_adds_a_token_before_a_text() -> None:
    """Llama's tokenizer adds a token before every text, which its template already contains."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", 3)]
    )
    assert tokenizer("").input_ids == [3]
    chat = Chat(tokenizer, "", frozenset({3}), ours=True)
    assert tokenizer.decode(chat.prompt("1+1?")) == "<|user|>1+1?<|assistant|>"
    assert tokenizer.decode(chat.encode(Completion("2", ended=True), 9)) == "2<|endoftext|>"


def test_an_empty_list_of_messages_is_rejected(chat: Chat) -> None:
    for messages in ([], [{"role": "system", "content": "be good"}]):
        with pytest.raises(TemplateFails, match="there is no question in it"):
            chat.conversation(messages)


@pytest.fixture
def chat() -> Chat:
    return Chat(make_tokenizer(), "", ours=True)


@pytest.mark.parametrize("text", ["<answer>42</answer>", "a b\n", "", "ünï ∧∨¬", "  two  spaces , here ."])
def test_text_is_unchanged_after_encoding_and_decoding(chat: Chat, text: str) -> None:
    for ended in (True, False):
        ids = chat.encode(Completion(text, ended), 100)
        assert (ids[-1:] == [0]) is ended and chat.read(ids, ended) == Completion(text, ended)


def test_the_number_of_accents_on_a_letter_is_limited(chat: Chat) -> None:
    """Sorting accents takes quadratic time, and a peer may send 65,536 on one letter."""
    assert chat.has_tokens_for(f"a{chr(0x300) * MAX_MARKS}b{chr(0x316) * MAX_MARKS}")
    assert not chat.has_tokens_for("a" + chr(0x300) * MAX_MARKS + chr(0x316))
    assert chat.has_tokens_for("ü" * 2 * MAX_MARKS), "a word with many letters was changed"


def test_a_truncated_answer_gets_no_end_token(chat: Chat) -> None:
    whole, cut, nothing = (chat.encode(Completion("abc", ended=True), room) for room in (4, 3, 0))
    assert (whole, len(cut), nothing) == ([*cut, 0], 3, []) and 0 not in cut


@pytest.mark.parametrize(
    ("after", "ends", "end"),
    [
        ("<|assistant|>", {2}, 2),  # Gemma, Phi: the template's end token is not the tokenizer's
        ("<|assistant|>", set(), 2),  # only the template has the end token
        ("One more?", set(), 0),  # text of several tokens
        ("", {1, 2}, 1),  # as in GLM, where the next turn's beginning ends the last
        ("", {2, 3}, 0),
        ("{{ raise_exception('one question alone') }}", {2}, 0),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_a_received_answer_gets_the_same_end_as_a_local_one(
    after: str, ends: set[int], end: int, ours: bool
) -> None:
    turn = "{% if m.role == 'assistant' %}" + after + "{% endif %}{% endfor %}"
    chat = Chat(make_tokenizer(CHAT.replace("{% endfor %}", turn)), "", frozenset(ends), ours=ours)
    assert chat.encode(Completion("one", ended=True), 100)[3:] == [end] and chat.ends == {0, *ends, end}


ENDED = (  # as in ChatML: here <|system|> ends every turn
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|system|>' }}{% endfor %}"
)
OPENED = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "prompt", "ends", "note"),
    [
        (
            ENDED + OPENED,
            "<|user|>1?<|system|><|assistant|>",
            {0, 3},
            "ends an answer with <|system|>, which",
        ),
        (ENDED, "<|user|>1?<|system|><|assistant|>", {0, 3}, "does not open an answer"),
        (
            ENDED + OPENED + "{{ '<|endoftext|>' }}",
            "<|user|>1?<|system|><|assistant|>",
            {0, 3},
            "ends a prompt with '<|endoftext|>'",
        ),
        (
            ENDED + "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}",
            "<|user|>1?<|system|><|assistant|><think>\n",
            {0, 3},
            "opens a thought (<think>), though model.thinking is off",
        ),
        (
            CHAT.replace("m['content']", "m['content'] + '\n##'"),
            "<|user|>1?\n##<|assistant|>",
            {0},
            "ends an answer with text ('\\n##'), not with a token: answers end only when the model writes"
            " <|endoftext|>",
        ),
        # gpt-oss writes a channel before the answer, so the end token of another model does not end its
        # answer.
        (
            ENDED.replace("m['content']", "('<answer>' if m['role'] == 'assistant' else '') + m['content']")
            + OPENED,
            "<|user|>1?<|system|><|assistant|>",
            {0},
            "",
        ),
        (CHAT, "<|user|>1?<|assistant|>", {0}, ""),
        (THINKING, "<|user|>1?<|assistant|>", {0}, ""),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_prompt_and_end_token_follow_the_conversations_of_the_template(
    template: str, prompt: str, ends: set[int], note: str, ours: bool
) -> None:
    chat = Chat(make_tokenizer(template), "", ours=ours)
    assert chat.tokenizer.decode(chat.prompt("1?")) == prompt and chat.ends == ends
    assert chat.conversation([{"role": "user", "content": "1?"}]) == prompt
    assert note in "\n".join(chat.notes) if note else not chat.notes


def test_a_template_without_a_system_message_gets_it_in_the_question() -> None:
    dropped = "{% for m in messages if m['role'] != 'system' %}" + CHAT.partition("%}")[2]
    chat = Chat(make_tokenizer(dropped), "be good", ours=True)
    assert chat.tokenizer.decode(chat.prompt("1?")) == "<|user|>be good\n\n1?<|assistant|>"


def test_end_tokens_are_read_from_every_file_that_names_one() -> None:
    """Here the tokenizer names none, and generation_config.json names tokens that cannot be end tokens."""
    named = ends_of(SimpleNamespace(eos_token_id=[True, 2, -1, 2**70, "x", 70]))
    chat = Chat(make_tokenizer(eos=None), "", named, ours=True)
    assert chat.ends == {2, 70} and chat.encode(Completion("", ended=True), 9) == [2]
    assert f"ends answers at -1, 70, {2**70}, which is no control token" in chat.notes[0]
    assert Chat(make_tokenizer(ENDED + OPENED, eos=None), "", ours=True).ends == {3}
    with pytest.raises(NoModel, match=r"no end-of-sequence token, so answers could not end. Set eos_token"):
        Chat(make_tokenizer(eos=None), "", ours=True)


def test_spelled_out_control_tokens_stay_text(chat: Chat) -> None:
    ids = chat.encode(Completion("x<|endoftext|><|user|>y", ended=False), 100)
    assert not set(ids) & {0, 1, 2, 3} and chat.read(ids, ended=False).text == "x<|endoftext|><|user|>y"


def test_answer_tags_are_single_tokens_and_sampled_control_tokens_give_no_text(chat: Chat) -> None:
    answer = Completion("<answer></answer>", ended=True)
    assert chat.encode(answer, 100) == [4, 5, 0] and chat.read([1, 4, 5, 0], ended=True) == answer


# From Qwen2.5: a default system prompt if there is none.
OWN_PROMPT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|system|>You are Own.<|endoftext|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# From Qwen3: an empty thought before a new answer, and none before earlier answers.
NO_THOUGHT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
# From tiny.
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BEGINNING = "{{ '<|endoftext|>' }}" + CHAT  # from Llama: the tokenizer's first token, which ollama adds
TURNS = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4"), ("user", "and so on?")]


def executed(template: str, values: Mapping[str, str]) -> str:
    """Execute the used subset of Go's text/template: fields, and if with else and end."""
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
    """Render a conversation like ollama's template.Execute for templates without .Messages."""
    done, turn = "", {".System": "", ".Prompt": "", ".Response": ""}
    for role, text in messages:
        if role == "user" and turn[".Response"]:
            done += executed(template, turn)
            turn = dict.fromkeys(turn, "")
        turn[{"system": ".System", "user": ".Prompt", "assistant": ".Response"}[role]] = text
    # The field and all text after it are cut off.
    return done + executed(template.partition("{{ .Response }}")[0], turn)


@pytest.mark.parametrize("system", ["", "be good"])
@pytest.mark.parametrize("template", [CHAT, NO_SYSTEM_ROLE, OWN_PROMPT, NO_THOUGHT, NO_SYSTEM, BEGINNING])
def test_ollamas_template_renders_the_same_as_the_models_template(template: str, system: str) -> None:
    tokenizer = make_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>" if template is BEGINNING else None
    chat = Chat(tokenizer, system, ours=True)
    if template is OWN_PROMPT and not system:
        with pytest.raises(ConfigError, match=r"set model\.system_prompt"):
            modelfile(chat, 1.0, 12, 128)
        return
    file = modelfile(chat, 0.5, 12, 128)
    (found,) = re.findall(r'^TEMPLATE """(.*?)"""$', file, re.DOTALL | re.MULTILINE)
    head = [("system", system)] if system else []
    for length in (1, 3, 5):
        messages = [{"role": role, "content": text} for role, text in TURNS[:length]]
        wanted = chat.conversation(messages).removeprefix(tokenizer.bos_token or "")
        assert as_ollama(found, [*head, *TURNS[:length]]) == wanted
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
def test_settings_that_a_modelfile_cannot_express_are_rejected(template: str, system: str) -> None:
    chat = Chat(make_tokenizer(), system, ours=True)
    chat.tokenizer = make_tokenizer(template)
    with pytest.raises(ConfigError, match="Leave --ollama out"):
        modelfile(chat, 1.0, 12, 128)
