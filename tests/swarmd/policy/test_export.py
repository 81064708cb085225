"""An export answers like the policy, in plain transformers and with peft.

No export is written partially.
"""

import json
import runpy
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarmd.errors import CannotRecord, ConfigError, NoModel
from swarmd.policy.export import (
    Origin,
    card,
    export,
    figures_of,
)
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.lora import lora_layers
from swarmd.policy.training.policy_files import CheckpointUnfit
from swarmd.state.metrics import each_round
from swarmd.types import RoundLine, Score, TokenCounts
from tests.swarmd.policy.conftest import answered, edit_json, files_of, make_model, open_policy

QUESTIONS = ["one?", "and another one", "zzz"]
FAST = {"learning_rate": 0.02}


def line(round_number: int, **changes: Any) -> RoundLine:
    figures: dict[str, Any] = {
        "seconds": {"generate": 1.0, "train": 2.0},
        "tokens": TokenCounts(100, 50),
        "local": 4,
        "external": 2,
        "reward_mean": round_number / 10,
    }
    return RoundLine(round=round_number, **figures | changes)


def train(policy: LanguagePolicy, updates: int = 2) -> None:
    for _ in range(updates):
        policy.update(answered(policy, QUESTIONS[:1], (1.0, 0.0, 0.0, 0.0)))


@pytest.fixture
def files(folders: dict[str, Path]) -> dict[str, bytes]:
    """Return the files of a wholly trained model at its start."""
    return files_of(open_policy(folders["llama"]))


def greedy(folder: Path, network: Any, tokens: int = 12) -> list[str]:
    """Return greedy answers computed with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        answers.append(
            tokenizer.decode(
                out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
    return answers


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_an_exported_whole_model_answers_like_the_policy(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    policy = open_policy(folders[family], train=FAST)
    before = [policy.answer(q).text for q in QUESTIONS]
    train(policy)
    here = [policy.answer(q).text for q in QUESTIONS]
    assert here != before
    made = export(files_of(policy), [line(1), line(2)], "sapo-9", tmp_path / "out")
    assert made.folder == tmp_path / "out"
    assert greedy(made.folder, AutoModelForCausalLM.from_pretrained(made.folder)) == here
    assert len({p.stat().st_mode for p in made.folder.iterdir()}) == 1
    assert {p.suffix for p in made.folder.iterdir()} <= {".json", ".jinja", ".safetensors", ".md"}
    again = open_policy(made.folder)  # another node can join with the export
    assert [again.answer(q).text for q in QUESTIONS] == here


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2"])
def test_merged_weights_give_the_same_values_as_the_adapter(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    policy = open_policy(folders[family], lora="on", lora_rank=4, train=FAST)
    train(policy)
    files = files_of(policy)
    merged = AutoModelForCausalLM.from_pretrained(export(files, [], "sapo-9", tmp_path / "merged").folder)
    with warnings.catch_warnings():
        # The operator must not see warnings of peft.
        warnings.simplefilter("error")
        alone = export(files, [], "sapo-9", tmp_path / "adapter", adapter_only=True).folder
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= {
        p.name for p in alone.iterdir()
    }
    assert not (alone / "model.safetensors").exists()
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        8,
        str(folders[family].resolve()),
    )
    base = AutoModelForCausalLM.from_pretrained(folders[family])
    ids = torch.arange(40)[None] % 100 + 6
    with torch.inference_mode():
        untrained = base(ids).logits
        adapted = PeftModel.from_pretrained(base, alone).eval()(ids).logits
        assert not torch.allclose(adapted, untrained, atol=1e-2)
        assert torch.allclose(merged(ids).logits, adapted, atol=1e-4)
    assert greedy(tmp_path / "merged", merged) == [policy.answer(q).text for q in QUESTIONS]
    assert not any("lora" in name for name, _ in merged.named_parameters())


@pytest.mark.parametrize("adapter", [False, True])
def test_an_export_can_be_read_by_older_versions_of_transformers(tmp_path: Path, adapter: bool) -> None:
    """Version 4 ignores settings that version 5 renamed, and it cannot read version 5's tokenizer.

    llama.cpp reads tokenizer.model.
    """
    base = make_model(tmp_path / "base", "llama")
    scaling = {"rope_type": "linear", "factor": 2.0}
    edit_json(base / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    old = {"tokenizer_class": None, "additional_special_tokens": ["<|user|>"], "eos_token": "<|endoftext|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(old))
    (base / "tokenizer.model").write_bytes(b"of sentencepiece")
    policy = open_policy(base, lora="on", lora_rank=4)
    out = export(files_of(policy), [], "sapo-9", tmp_path / "out", adapter_only=adapter).folder
    prompt = AutoTokenizer.from_pretrained(out)("<|user|>one 1?")["input_ids"]
    assert prompt == AutoTokenizer.from_pretrained(base)("<|user|>one 1?")["input_ids"]
    assert (out / "tokenizer.model").read_bytes() == b"of sentencepiece"
    if adapter:
        return  # only tokenizer_config.json could name the class
    assert json.loads((out / "tokenizer_config.json").read_text()) == old
    written = json.loads((out / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"], written["torch_dtype"]) == (
        5e5, scaling, "float32",
    )  # fmt: skip
    ropes = [AutoConfig.from_pretrained(folder).rope_parameters for folder in (base, out)]
    assert ropes[0] == ropes[1] == scaling | {"rope_theta": 5e5}


def test_the_card_states_the_precision_lost_by_merging_and_an_adapter_loses_none(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    policy = open_policy(
        folders["llama"], lora="on", lora_rank=4, dtype="bfloat16", train={"learning_rate": 1e-4}
    )
    train(policy)
    files = files_of(policy)
    made = export(files, [], "sapo-9", tmp_path / "merged")
    merged = dict(AutoModelForCausalLM.from_pretrained(made.folder).named_parameters())
    missing = energy = 0.0
    for name, layer in lora_layers(policy.network):
        weight, delta = rounded.get_submodule(name).weight.float(), layer.get_delta_weight("default")
        missing += float((merged[f"{name}.weight"].float() - weight - delta).detach().square().sum())
        energy += float(delta.detach().square().sum())
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16}, (
        "the card does not have the run's figures"
    )
    assert made.origin.lost == pytest.approx(missing / energy, rel=1e-3) and 0.3 < missing / energy <= 1
    said = f"to bfloat16 lost {100 * missing / energy:.1f} % of the adapter's energy"
    assert said in (made.folder / "README.md").read_text()
    alone = export(files, [], "sapo-9", tmp_path / "adapter", adapter_only=True)
    assert alone.origin.lost is None and "energy" not in (alone.folder / "README.md").read_text()
    exact = files_of(open_policy(folders["llama"], lora="on", lora_rank=4))
    assert (
        "energy" not in (export(exact, [], "sapo-9", tmp_path / "float32").folder / "README.md").read_text()
    )


def test_exporting_the_adapter_of_a_wholly_trained_model_gives_a_message(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no adapter.*Leave --adapter out"):
        export(files, [], "sapo-9", tmp_path / "out", adapter_only=True)


def test_a_folder_that_is_not_empty_is_not_changed(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert export(files, [], "sapo-9", tmp_path / "out").folder.is_dir()
    before = sorted((tmp_path / "out").iterdir())
    with pytest.raises(ConfigError, match=r"not an empty folder\. Choose another path\.$"):
        export(files, [], "sapo-9", tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


def test_an_unwritable_folder_is_reported(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotRecord, match=r"cannot be written: [^[]*Choose another folder"):
        export(files, [], "sapo-9", tmp_path / "file" / "out")


def test_an_adapter_of_another_base_is_rejected(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama")
    files = files_of(open_policy(base, lora="on"))
    make_model(base, "llama", seed=1)
    with pytest.raises(CheckpointUnfit, match="Restore the old base model"):
        export(files, [], "sapo-9", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_base_or_damaged_weights_are_reported(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama")
    files = files_of(open_policy(base))
    for broken in ({"weights.safetensors": b"\0" * 20}, {"policy.json": b"{"}):
        with pytest.raises(CheckpointUnfit):
            export(files | broken, [], "sapo-9", tmp_path / "out")
    edit_json(base / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(CheckpointUnfit, match="other names or shapes"):
        export(files, [], "sapo-9", tmp_path / "out")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(NoModel, match="there is no folder"):
        export(files, [], "sapo-9", tmp_path / "out")


@pytest.mark.parametrize("adapter", [False, True])
def test_the_code_snippet_of_the_card_runs(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    files = files_of(open_policy(folders["qwen2"], lora="on", lora_rank=4))
    out = export(files, [], "tiny-9", tmp_path / "out", adapter_only=adapter).folder
    snippet = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "snippet.py").write_text(snippet)
    monkeypatch.chdir(out)
    assert runpy.run_path(str(tmp_path / "snippet.py"))["model"]


@pytest.mark.parametrize(
    ("base", "head", "said"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "\nbase_model: Qwen/Qwen3-0.6B\nlicense: apache-2.0\n",
            "base model's, apache-2.0.",
        ),
        ("owner/model", "\nbase_model: owner/model\nlibrary_name", "The licence is the base model's."),
    ],
)
def test_the_card_has_licence_and_base_model_from_the_hub(base: str, head: str, said: str) -> None:
    text = card(Origin(base, True, None, 8, False, "bfloat16", "sapo-9", "1"), figures_of([]))
    assert head in text and said in text


@pytest.mark.parametrize(("curriculum", "whose"), [("tiny-9-strict", "ReasoningGYM"), ("sums", "own")])
def test_the_card_names_the_source_of_the_questions(curriculum: str, whose: str) -> None:
    text = card(Origin("tiny", False, None, None, False, "float32", curriculum, "1"), figures_of([]))
    assert f"GRPO on {whose} questions" in text and ("reasoning-gym" in text) == (whose == "ReasoningGYM")


def test_the_card_describes_the_run(folders: dict[str, Path], tmp_path: Path) -> None:
    files = files_of(open_policy(folders["qwen2"]))
    lines = [line(n, judge=Score(0.5, 90) if n == 3 else None) for n in range(1, 5)]
    out = export(files, lines, "tiny-9", tmp_path / "out").folder
    text = (out / "README.md").read_text()
    for words in (
        "Curriculum: tiny-9",
        "Rounds: 4, 0.2 minutes",
        "400 tokens generated",
        "200 trained on",
        "33 %",
        "| 0.150 |",
        "| 0.350 |",
    ):
        assert words in text
    assert "pass@1 of 90 answers | 0.500 |" in text
    assert ModelCard(text).data.library_name == "transformers"


def test_the_rounds_of_weeks_are_read_line_by_line(tmp_path: Path) -> None:
    rounds = [line(number) for number in range(1, 3001)]
    written = [msgspec.json.encode(each).decode() + "\n" for each in rounds]
    written[1000:1000] = ["\0" * 4096, "\n", written[999], "{}\n"]  # as after a power cut
    (tmp_path / "metrics.jsonl").write_text("".join([*written, '{"round":']))
    tracemalloc.start()
    try:
        found = figures_of(each_round(tmp_path / "metrics.jsonl", 2999))
        assert tracemalloc.get_traced_memory()[1] < len(rounds) * 100
    finally:
        tracemalloc.stop()
    assert found == figures_of(rounds[:-1])
    (tmp_path / "metrics.jsonl").unlink()
    assert figures_of(each_round(tmp_path / "metrics.jsonl", 2999)) == figures_of([])
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(CannotRecord, match="cannot be read"):
        figures_of(each_round(tmp_path / "metrics.jsonl", 2999))


def test_the_card_has_figures_for_runs_with_gaps() -> None:
    nothing = figures_of([])
    assert nothing.rounds == 0
    assert nothing.reward_first is nothing.external_share is nothing.judge_score is None
    whole = figures_of([line(n, reward_mean=None if n == 1 else n / 100) for n in range(1, 101)])
    assert whole.edge == 10 and whole.reward_first == pytest.approx(0.065)
    assert whole.reward_last == pytest.approx(0.955)
    only_others = figures_of([line(1, local=0, external=4, reward_mean=None, tokens=TokenCounts(0, 9))])
    assert (only_others.reward_first, only_others.external_share) == (None, 1.0)
    assert figures_of([line(7)]).reward_first == figures_of([line(7)]).reward_last == pytest.approx(0.7)
