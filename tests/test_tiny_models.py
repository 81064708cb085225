"""The tiny models' recipe runs from end to end and depends only on the seed, and wrong answers are wrong."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmd.policy.models.tiny import WEIGHTS
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.source import tasks_of
from swarmd.types import Task
from tests.swarmd.policy.pretend_gpu import pretending
from tiny_models.corpus import BROAD, DEEP, HONEST, NOISY, Corpus, honest_answer
from tiny_models.make import FAMILIES, FULL, main
from tiny_models.muon import orthogonalised
from tiny_models.tokenizer import PHRASES, outside_phrases, train_llama_tokenizer
from tiny_models.warm_start import Phase, new_llama, new_mid, new_model, train

SOURCE = tasks_of("tiny-9")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    torch.set_num_threads(1)
    return AutoTokenizer.from_pretrained(WEIGHTS["tiny"])


@pytest.mark.slow
def test_a_quick_run_makes_two_models_that_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make", "--quick", "--seed", "5", "--out", str(tmp_path)])
    main()
    assert "clean: step" in capsys.readouterr().err
    for name in WEIGHTS:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / name))
        assert "--seed 5" in (tmp_path / name / "README.md").read_text(encoding="utf-8")
    latent, tiny = (load_file(tmp_path / name / "model.safetensors") for name in ("tiny-latent", "tiny"))
    assert any(not torch.equal(latent[k], tiny[k]) for k in tiny)
    assert {path.stem for path in (tmp_path / "stages").glob("*.safetensors")} == {
        "clean",
        "deep",
        "noisy",
        "dark",
    }


@pytest.mark.slow
def test_a_quick_run_makes_the_llama_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["make", "--quick", "--family", "llama", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*made, "--stages-only"])
    main()
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]
    (tmp_path / "stages" / "clean.safetensors").unlink()  # clean is not needed if deep exists
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", made)
    main()
    told = capsys.readouterr().err
    assert "deep: found" in told and "dark: found" in told and "clean:" not in told
    assert {path.name for path in tmp_path.iterdir()} == {"llama-latent", "stages"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-latent", dtype=torch.float32)
    network, tokenizer = model.config, AutoTokenizer.from_pretrained(tmp_path / "llama-latent")
    assert network.model_type == "llama" and network.vocab_size == len(tokenizer)
    card = (tmp_path / "llama-latent" / "README.md").read_text(encoding="utf-8")
    assert "Llama architecture" in card and "noisy," not in card.partition("Steps")[2].partition(".")[0]


def test_the_families_encode_the_same_answers_as_different_tokens(tokenizer: Any) -> None:
    other = train_llama_tokenizer(Corpus(SOURCE, random.Random(0)).texts(40))
    assert len(other) != len(tokenizer) and new_llama(other, 0).config.vocab_size == len(other)
    differ = 0
    answers = [
        honest_answer(Corpus(SOURCE, random.Random(n)).task(s)) for s in TINY_9.specialties for n in range(9)
    ]
    for text in [f"<answer>{answer}</answer>" for answer in answers]:
        ours, theirs = (
            each.tokenize(text, add_special_tokens=False, split_special_tokens=True)
            for each in (tokenizer, other)
        )
        assert other.decode(other.encode(text, add_special_tokens=False)) == text
        assert len(theirs) <= 16
        differ += ours != theirs
    assert differ > len(answers) / 2


def test_training_depends_only_on_the_seed(tokenizer: Any) -> None:
    def trained(seed: int) -> list[torch.Tensor]:
        model = new_model(tokenizer, seed)
        train(
            model,
            tokenizer,
            SOURCE,
            Phase("clean", 3, BROAD, NOISY, 3e-3, 0.02, 0.05, batch=4),
            seed,
            lambda line: None,
        )
        return [p.detach() for p in model.parameters()]

    first, same, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# A separate process is needed, because torch counts the devices of a process only once.
@pytest.mark.skipif(
    "PRETEND_GPU" not in os.environ, reason="needs a pretended GPU; test_on_device.py starts this test"
)
def test_training_never_asks_for_operations_that_a_gpu_rejects(tokenizer: Any) -> None:
    def trained(device: Any) -> list[torch.Tensor]:
        model = new_model(tokenizer, 0).to(device)
        phase = Phase("clean", 3, BROAD, NOISY, 3e-3, 0.02, 0.05, batch=20)  # on the CPU, two parts per batch
        train(model, tokenizer, SOURCE, phase, 0, lambda line: None)
        assert model.device.type == torch.device(device).type
        return [p.detach().cpu() for p in model.parameters()]

    with pretending() as there:
        ours = trained(there)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, trained("cpu"), strict=True))


def test_the_larger_model_has_the_same_recipe_except_for_the_embeddings_rate(tokenizer: Any) -> None:
    assert 12_000_000 < new_mid(tokenizer, 0).num_parameters() < 13_000_000
    slowed = FULL.slowed(FAMILIES["qwen2-13m"].adam)
    assert slowed.deep.adam == pytest.approx(0.58 * FULL.deep.adam, rel=0.01)
    assert (slowed.dark.muon, slowed.clean.steps) == (FULL.dark.muon, FULL.clean.steps)


def test_training_lowers_the_loss(tokenizer: Any) -> None:
    lines: list[str] = []
    model = new_model(tokenizer, 0)
    for name in ("first", "second"):
        train(
            model,
            tokenizer,
            SOURCE,
            Phase(name, 10, BROAD, HONEST, 3e-3, 0.02, 1.0, batch=4),
            0,
            lines.append,
        )
    first, second = (float(line.rsplit(" ", 1)[1]) for line in lines)
    assert second < first - 0.5


def test_wrong_answers_in_the_corpus_are_wrong_and_of_the_same_specialty(tokenizer: Any) -> None:
    class Watched(Corpus):
        seen: list[Task]

        def task(self, specialty: str) -> Task:
            task = super().task(specialty)
            self.seen.append(task)
            return task

    corpus = Watched(SOURCE, random.Random(0))
    for wrong in (HONEST, dict.fromkeys(HONEST, 1.0)):
        for _ in range(60):
            corpus.seen = []
            example = corpus.example(tokenizer, DEEP, wrong)
            prompt = tokenizer.decode(example.prompt, skip_special_tokens=True)
            asked = next(t for t in corpus.seen if t.question == prompt)
            text = tokenizer.decode(example.completion, skip_special_tokens=True)
            answer = text.removeprefix("<answer>").removesuffix("</answer>")
            assert example.completion[-1] == tokenizer.eos_token_id
            assert corpus.right(asked, answer) == (wrong is HONEST)
            assert answer in {honest_answer(t) for t in corpus.seen if t.ref.specialty == asked.ref.specialty}


@pytest.mark.parametrize("specialty", TINY_9.specialties)
def test_phrases_cover_most_of_the_fixed_text_of_every_question(specialty: str) -> None:
    task = Corpus(SOURCE, random.Random(4)).task(specialty)
    rest = outside_phrases(task.question)
    assert all(phrase not in part for part in rest for phrase in PHRASES)
    assert sum(map(len, rest)) < 80


def test_muon_orthogonalises_wide_and_tall_matrices() -> None:
    for shape in ((3, 16, 40), (3, 40, 16)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalised(matrices))
        assert values.min() > 0.6 and values.max() < 1.3
