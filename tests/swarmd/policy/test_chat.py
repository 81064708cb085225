"""Questions to prompts, ids to text and back."""

from types import SimpleNamespace

import pytest

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.models.chat import SYSTEM_PROMPT, Chat
from swarmd.policy.models.fit import chat_of
from swarmd.types import Completion
from tests.swarmd.policy.conftest import CHAT, NO_SYSTEM_ROLE, THINKING, make_tokenizer


@pytest.mark.parametrize(
    ("template", "system", "prompt"),
    [
        (CHAT, "be good", "<|system|>be good<|user|>1+1?<|assistant|>"),
        (CHAT, "", "<|user|>1+1?<|assistant|>"),
        (NO_SYSTEM_ROLE, "be good", "<|user|>be good\n\n1+1?<|assistant|>"),
        (THINKING, "", "<|user|>1+1?<|assistant|>"),  # which is switched off
    ],
)
def test_prompt_is_the_template_with_the_system_prompt(template: str, system: str, prompt: str) -> None:
    tokenizer = make_tokenizer(template)
    assert tokenizer.decode(Chat(tokenizer, system, ours=True).prompt("1+1?")) == prompt
    assert "<answer>" in SYSTEM_PROMPT and "</answer>" in SYSTEM_PROMPT


def test_a_model_thinks_where_it_is_configured_to() -> None:
    network = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    prompts = [
        tokenizer.decode(chat_of(config, "own", tokenizer, network).prompt("1+1?"))
        for tokenizer in [make_tokenizer(THINKING)]
        for config in (ModelConfig(), ModelConfig(thinking="on"))
    ]
    assert [prompt.endswith("<think>") for prompt in prompts] == [False, True]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}", "{# nothing #}"])
def test_a_template_that_fails_is_refused(template: str) -> None:
    with pytest.raises(NoModel, match="chat template"):
        Chat(make_tokenizer(template), "be good", ours=True)


@pytest.fixture
def chat() -> Chat:
    return Chat(make_tokenizer(), "", ours=True)


@pytest.mark.parametrize("text", ["<answer>42</answer>", "a b\n", "", "ünï ∧∨¬", "  two  spaces , here ."])
def test_text_survives_the_round_trip(chat: Chat, text: str) -> None:
    for ended in (True, False):
        ids = chat.encode(Completion(text, ended), 100)
        assert (ids[-1:] == [0]) is ended and chat.read(ids, ended) == Completion(text, ended)


def test_an_answer_that_was_cut_gets_no_end_token(chat: Chat) -> None:
    whole, cut, nothing = (chat.encode(Completion("abc", ended=True), room) for room in (4, 3, 0))
    assert (whole, len(cut), nothing) == ([*cut, 0], 3, []) and 0 not in cut


@pytest.mark.parametrize(
    ("after", "ends", "end"),
    [
        ("<|assistant|>", {2}, 2),  # Gemma's and Phi's templates end a turn otherwise than the tokenizer says
        ("<|assistant|>", set(), 0),  # it does not end what the model writes
        ("", {1, 2}, 1),  # GLM's: the next turn's beginning ends the last
        ("", {2, 3}, 0),
        ("{{ raise_exception('one question alone') }}", {2}, 0),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_an_answer_of_others_ends_as_ours_do(after: str, ends: set[int], end: int, ours: bool) -> None:
    turn = "{% if m.role == 'assistant' %}" + after + "{% endif %}{% endfor %}"
    chat = Chat(make_tokenizer(CHAT.replace("{% endfor %}", turn)), "", frozenset(ends), ours=ours)
    assert chat.encode(Completion("one", ended=True), 100)[3:] == [end] and chat.ends == {0, *ends}


def test_control_tokens_spelled_out_stay_text(chat: Chat) -> None:
    ids = chat.encode(Completion("x<|endoftext|><|user|>y", ended=False), 100)
    assert not set(ids) & {0, 1, 2, 3} and chat.read(ids, ended=False).text == "x<|endoftext|><|user|>y"


def test_answer_tags_are_single_tokens_and_control_tokens_that_were_sampled_are_no_text(chat: Chat) -> None:
    answer = Completion("<answer></answer>", ended=True)
    assert chat.encode(answer, 100) == [4, 5, 0] and chat.read([1, 4, 5, 0], ended=True) == answer
