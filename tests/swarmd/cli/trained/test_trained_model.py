"""The model of the latest checkpoint answers like the policy that saved it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.cli.trained.trained_model import AnswerSettings, TrainedModel
from swarmd.config.config import NodeConfig
from swarmd.errors import ConfigError, NoModel, SwarmdError
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.trainer.checkpoint import Checkpoints, RunState
from tests.swarmd.policy.conftest import CHAT, NO_SYSTEM_ROLE, answered, make_model, open_policy

QUESTION = "one?"
GREEDY = AnswerSettings(temperature=0)
ASKED = [{"role": "user", "content": QUESTION}]


def trained(policy: LanguagePolicy) -> LanguagePolicy:
    for _ in range(2):
        policy.update(answered(policy, [QUESTION], (1.0, 0.0, 0.0, 0.0)))
    return policy


def save(policy: LanguagePolicy, state: Path, rounds: int) -> None:
    rng = random.Random(0).getstate()
    Checkpoints(state / "checkpoints").save(RunState(rounds, 0, rng, rng, ()), policy.files())


def config(folder: Path | str, **model: Any) -> NodeConfig:
    return NodeConfig.model_validate({"model": {"name": str(folder), "device": "cpu", **model}})


@pytest.mark.parametrize("lora", ["off", "on"])
def test_the_model_answers_like_the_policy_and_loads_newer_checkpoints(tmp_path: Path, lora: str) -> None:
    folder, state = make_model(tmp_path / "model", "qwen3"), tmp_path / "state"
    policy = open_policy(folder, lora=lora, train={"learning_rate": 0.02})
    save(policy, state, 1)
    model = TrainedModel(state, config(folder, system_prompt=""))
    first = policy.answer(QUESTION)
    prompt = model.prompt(ASKED)
    assert model.answer(prompt, AnswerSettings(0, 12)).text == first.text and not model.renew()
    save(trained(policy), state, 3)
    assert model.renew() and model.round == 3
    now = policy.answer(QUESTION)
    assert now != first, "the training changed no answer, so this test shows nothing"
    assert model.answer(model.prompt(ASKED), AnswerSettings(0, 12)).text == now.text


def test_a_full_device_gives_a_message_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is usually full while a node trains on it."""
    save(open_policy("tiny"), tmp_path, 1)

    def full(_network: object, _device: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("transformers.PreTrainedModel.to", full)
    with pytest.raises(NoModel, match=r"memory on cpu for the weights of tiny: .* Use --device cpu, or stop"):
        TrainedModel(tmp_path, config("tiny"))


def test_an_answer_is_given_in_pieces_and_ends_at_a_stop_text_or_the_limit(tmp_path: Path) -> None:
    policy = open_policy("tiny")
    save(policy, tmp_path, 1)
    model, pieces = TrainedModel(tmp_path, config("tiny")), list[str]()
    prompt = model.prompt([{"role": "user", "content": "What is 12 + 30?"}])
    whole = model.answer(prompt, GREEDY, pieces.append)
    assert whole.ended and len(pieces) > 2 and "".join(pieces) == whole.text
    assert whole.text == policy.answer("What is 12 + 30?").text
    assert (whole.prompt_tokens, whole.tokens) == (len(prompt), len(pieces) + 1)
    # A temperature too small for float32.
    assert model.answer(prompt, AnswerSettings(1e-40)).text == whole.text
    cut = model.answer(prompt, AnswerSettings(0, tokens=2))
    assert not cut.ended and whole.text.startswith(cut.text)
    # The stop text is in the middle of a token, or spans two tokens; no part of it is given.
    for at in (3, 8):
        stop, told = whole.text[at : at + 4], list[str]()
        stopped = model.answer(prompt, AnswerSettings(0, stop=("never", stop)), told.append)
        assert stopped.ended and stopped.text == "".join(told) == whole.text[: whole.text.index(stop)]
    drawn = [model.answer(prompt, AnswerSettings(1.5, seed=seed)).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_end_token_that_is_an_ordinary_token_is_not_part_of_the_answer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen2")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(4, 262))}))
    policy = open_policy(folder)
    save(policy, tmp_path, 1)
    model, told = TrainedModel(tmp_path, config(folder, system_prompt="")), list[str]()
    made = model.answer(model.prompt(ASKED), AnswerSettings(0, 12), told.append)
    assert made.ended and made.text == policy.answer(QUESTION).text == "".join(told)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHAT, "<|system|>be bad<|user|>one?<|assistant|>two<|user|>one?<|assistant|>"),
        (NO_SYSTEM_ROLE, "<|user|>be bad\n\none?<|assistant|>two<|user|>one?<|assistant|>"),
    ],
)
def test_a_conversation_uses_the_trained_system_prompt_unless_it_has_one(
    tmp_path: Path, template: str, said: str
) -> None:
    folder = make_model(tmp_path / "model", "llama", chat_template=template)
    save(open_policy(folder), tmp_path, 1)
    model = TrainedModel(tmp_path, config(folder, system_prompt="be good"))
    assert model.prompt(ASKED) == model.chat.prompt(QUESTION)
    told = [{"role": "system", "content": "be bad"}, *ASKED, {"role": "assistant", "content": "two"}, *ASKED]
    assert model.chat.conversation(told) == said
    with pytest.raises(ConfigError, match="context is 128"):
        model.prompt([{"role": "user", "content": "x" * 128}])


def test_without_a_checkpoint_there_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(SwarmdError, match="swarmd join"):
        TrainedModel(tmp_path, config("tiny"))
