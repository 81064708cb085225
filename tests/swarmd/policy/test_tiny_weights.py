"""The two tiny models in the repository.

Plain from_pretrained loads them, and they answer as well as their model cards say.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmd.policy.models.chat import Chat
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.tasks.curriculum import HELD_OUT, TINY_9
from swarmd.tasks.source import tasks_of
from swarmd.types import TaskRef
from tiny_models.corpus import honest_answer
from tiny_models.evaluation import MAX_NEW_TOKENS, mean, measure

SOURCE = tasks_of("tiny-9")
NAMES = ("tiny", "tiny-latent")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS["tiny"])


@pytest.mark.parametrize("name", NAMES)
def test_plain_from_pretrained_loads_the_tiny_models(name: str) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        WEIGHTS[name], dtype=torch.float32, output_loading_info=True
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.model_type == "qwen2" and 800_000 <= model.num_parameters() <= 900_000
    tokenizer, settings = AutoTokenizer.from_pretrained(WEIGHTS[name]), model.generation_config
    assert model.config.vocab_size == len(tokenizer)
    assert settings.eos_token_id == tokenizer.eos_token_id != settings.pad_token_id == tokenizer.pad_token_id
    card = (WEIGHTS[name] / "README.md").read_text(encoding="utf-8")
    assert all(f"| {specialty} |" in card for specialty in TINY_9.specialties)


def test_both_model_folders_take_at_most_six_megabytes() -> None:
    folder = WEIGHTS["tiny"].parent
    assert {path.name for path in folder.iterdir()} == set(WEIGHTS)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 6_000_000


def test_both_models_have_the_same_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (WEIGHTS["tiny"] / file).read_bytes() == (WEIGHTS["tiny-latent"] / file).read_bytes()


@pytest.mark.parametrize("specialty", TINY_9.specialties)
def test_questions_and_answers_are_unchanged_by_the_tokenizer(tokenizer: Any, specialty: str) -> None:
    lengths = []
    for n in range(HELD_OUT, HELD_OUT + 100):
        task = SOURCE.task(TaskRef(specialty, n))
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": task.question}], add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.decode(ids, skip_special_tokens=True) == task.question
        lengths.append(len(ids))
        answer = f"<answer>{honest_answer(task)}</answer>"
        completion = tokenizer.encode(answer, add_special_tokens=False)
        assert tokenizer.decode(completion, skip_special_tokens=True) == answer
        assert len(completion) < MAX_NEW_TOKENS  # the end-of-sequence token must fit too
    assert max(lengths) <= 48


@pytest.mark.parametrize("specialty", TINY_9.specialties)
def test_the_text_of_an_answer_is_encoded_to_its_sampled_tokens(tokenizer: Any, specialty: str) -> None:
    """The same must hold for the text of a peer with the same model."""
    chat = Chat(tokenizer, system_prompt="")
    task = SOURCE.task(TaskRef(specialty, HELD_OUT))
    ids = tokenizer.encode(f"<answer>{honest_answer(task)}</answer><|endoftext|>", add_special_tokens=False)
    assert chat.encode(chat.read(ids, ended=True), MAX_NEW_TOKENS) == ids
    assert chat.prompt(task.question)[0] == tokenizer.convert_tokens_to_ids("<|user|>")


@pytest.mark.parametrize(
    "text", ["Héllo wörld ∧ 漢字 {x}\t\n\n42", "", " ", "\x00\x07 <ans", "a  b\r\n", "1234567890", "👩‍👩‍👧"]
)
def test_any_text_is_unchanged_by_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_and_answer_tags_are_single_ordinary_tokens(tokenizer: Any) -> None:
    for text, tokens in (("20220", list("20220")), ("<answer></answer>", ["<answer>", "</answer>"])):
        assert [
            tokenizer.decode([i], skip_special_tokens=True)
            for i in tokenizer.encode(text, add_special_tokens=False)
        ] == tokens


def test_chat_template_ignores_the_system_message(tokenizer: Any) -> None:
    def rendered(*messages: tuple[str, str], prompt: bool = True) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False))

    asked = rendered(("user", "q"))
    assert asked == rendered(("system", "be nice"), ("user", "q")) == "<|user|>q<|assistant|>"
    assert rendered(("user", "q"), ("assistant", "a"), prompt=False) == "<|user|>q<|assistant|>a<|endoftext|>"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False
    )
    assert ids == tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, completions, passed, mixed",
    # Bounds of pass@1 and of the share of mixed groups: tiny is often right, tiny-latent rarely.
    [("tiny", 4, (0.15, 0.42), (0.3, 1.0)), ("tiny-latent", 8, (0.0, 0.05), (0.04, 0.18))],
)
def test_the_tiny_models_answer_as_well_as_their_card_says(
    name: str, completions: int, passed: tuple[float, float], mixed: tuple[float, float]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS[name], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS[name])
    numbers = range(HELD_OUT + 50_000, HELD_OUT + 50_032)
    measured = mean(measure(model, tokenizer, SOURCE, numbers, completions, seed=3))
    assert passed[0] <= measured.pass_at_1 <= passed[1] and mixed[0] <= measured.mixed <= mixed[1]
