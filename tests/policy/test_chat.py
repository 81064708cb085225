"""Questions to prompts, ids to text and back."""

import pytest

from swarmd.errors import NoModel
from swarmd.policy.models.chat import SYSTEM_PROMPT, Chat
from swarmd.types import Completion
from tests.policy.conftest import NO_SYSTEM_ROLE, THINKING, make_tokenizer


def text_of(chat: Chat, tokenizer, question: str) -> str:
    return tokenizer.decode(chat.prompt(question))


def test_prompt_is_the_template_with_the_system_prompt() -> None:
    tokenizer = make_tokenizer()
    assert text_of(Chat(tokenizer, "be good", ours=True), tokenizer, "1+1?") == "<|system|>be good<|user|>1+1?<|assistant|>"
    assert text_of(Chat(tokenizer, "", ours=True), tokenizer, "1+1?") == "<|user|>1+1?<|assistant|>"


def test_template_without_system_role_gets_it_in_the_question() -> None:
    tokenizer = make_tokenizer(NO_SYSTEM_ROLE)
    assert text_of(Chat(tokenizer, "be good", ours=True), tokenizer, "1+1?") == "<|user|>be good\n\n1+1?<|assistant|>"


def test_thinking_is_switched_off() -> None:
    tokenizer = make_tokenizer(THINKING)
    assert text_of(Chat(tokenizer, "", ours=True), tokenizer, "1+1?") == "<|user|>1+1?<|assistant|>"


def test_built_in_prompt_asks_for_the_tags() -> None:
    assert "<answer>" in SYSTEM_PROMPT
    assert "</answer>" in SYSTEM_PROMPT


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}", "{# nothing #}"])
def test_template_that_does_not_work(template: str) -> None:
    with pytest.raises(NoModel, match="chat template"):
        Chat(make_tokenizer(template), "be good", ours=True)


@pytest.mark.parametrize("text", ["<answer>42</answer>", "a b\n", "", "ünï ∧∨¬", "  two  spaces , here ."])
def test_text_survives_the_round_trip(text: str) -> None:
    chat = Chat(make_tokenizer(), "", ours=True)
    for ended in (True, False):
        ids = chat.encode(Completion(text, ended), 100)
        assert (ids[-1:] == [0]) is ended
        assert chat.read(ids, ended) == Completion(text, ended)


def test_cut_text_does_not_end() -> None:
    chat = Chat(make_tokenizer(), "", ours=True)
    assert chat.encode(Completion("abc", ended=True), 4)[-1] == 0
    assert len(chat.encode(Completion("abc", ended=True), 3)) == 3
    assert 0 not in chat.encode(Completion("abc", ended=True), 3)
    assert chat.encode(Completion("abc", ended=True), 0) == []


def test_control_tokens_spelled_out_stay_text() -> None:
    chat = Chat(make_tokenizer(), "", ours=True)
    ids = chat.encode(Completion("x<|endoftext|><|user|>y", ended=False), 100)
    assert not set(ids) & {0, 1, 2, 3}
    assert chat.read(ids, ended=False).text == "x<|endoftext|><|user|>y"


def test_answer_tags_stay_single_tokens() -> None:
    assert len(Chat(make_tokenizer(), "", ours=True).encode(Completion("<answer></answer>", ended=False), 100)) == 2


def test_control_tokens_that_were_sampled_are_no_text() -> None:
    assert Chat(make_tokenizer(), "", ours=True).read([1, 4, 5, 0], ended=True) == Completion("<answer></answer>", ended=True)
