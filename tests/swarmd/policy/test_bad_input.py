"""What a user can bring that cannot work.

Each has its message, where the user meets it, and nothing is lost.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swarmd.cli.app import main
from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.errors import NoModel
from swarmd.policy.export import export
from swarmd.policy.models.doctor import document, examine, explain
from swarmd.policy.models.hub import locate
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.policy.models.tokenizer import PROBES, load_tokenizer
from swarmd.testing import TIMEOUT_S
from tests.swarmd.policy.conftest import CHAT, SPECIALS, external, files_of, local, make_model, open_policy


def rewrite_tokenizer(folder: Path, backend: Tokenizer, **settings: str) -> None:
    """What `save_pretrained` would write of it, in place of the model's own."""
    for old in ("tokenizer.json", "tokenizer_config.json"):
        (folder / old).unlink()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIALS[0], chat_template=CHAT, **settings
    ).save_pretrained(folder)


def without_digits(folder: Path) -> None:
    """Make a vocabulary of single letters and signs; a digit becomes the unknown token."""
    signs = sorted({c for text in PROBES for c in text if not c.isdigit()})
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, "<unk>", *signs])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*SPECIALS, "<unk>"])
    rewrite_tokenizer(folder, backend, unk_token="<unk>")


def in_lower_case(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Lowercase()
    rewrite_tokenizer(folder, backend)


def answer_tags_are_control_tokens(folder: Path) -> None:
    """Text of ours that holds them would be read without them."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Replace("<answer>", "")
    rewrite_tokenizer(folder, backend)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without_digits, r"no token for '.*0123456789"),
        (in_lower_case, "no token for 'TWY'"),
        (answer_tags_are_control_tokens, "comes back as"),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(spoil, named: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    spoil(tmp_path)
    with pytest.raises(
        NoModel, match=rf"cannot represent what is asked and answered here: .*({named}).*Choose another model"
    ):
        open_policy(tmp_path)
    found = examine(NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu")))
    assert "cannot represent" in str(document(found)["message"])
    with pytest.raises(NoModel, match="cannot represent"):
        found.require()


def digits_in_pairs(folder: Path) -> None:
    """A file that joins digits, beside a configuration for which transformers has a tokenizer of its own that
    parts them.
    """
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["12"] = len(vocabulary)
    document["model"]["merges"] = [["1", "2"]]
    (folder / "tokenizer.json").write_text(json.dumps(document))


def test_a_tokenizer_file_is_followed_where_transformers_would_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, "qwen2", vocab_size=300)
    digits_in_pairs(tmp_path)
    text = "<answer>12</answer>"
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"] != file, (
        "else there is nothing to mend"
    )
    policy = open_policy(tmp_path)
    assert (
        policy._chat.encode(external("?", [(text, False)] * 2, (0.0, 1.0)).rollout.completions[0], 99) == file
    )
    assert (
        "as a Qwen2Tokenizer, which splits text otherwise than the file says: the file is followed"
        in caplog.text
    )
    assert policy.generate(["12+12?"], 2)[0].completions[0] is not None
    made = export(files_of(policy), [], "sapo-9", tmp_path / "out").folder
    written = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert written.encode(text, add_special_tokens=False).ids == file


def test_our_own_models_tokenizers_are_what_their_files_say(caplog: pytest.LogCaptureFixture) -> None:
    network = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(num_embeddings=10**6))
    for name in WEIGHTS:
        load_tokenizer(locate(name, None), network)  # type: ignore[arg-type]
    assert "the file is followed" not in caplog.text


def test_a_system_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    with pytest.raises(
        NoModel,
        match=r"context of 128 tokens, and what stands before .* takes \d{3}: .*shorter model\.system_prompt",
    ):
        open_policy(tmp_path, system_prompt="x" * 130)


def test_answers_longer_than_the_context_and_questions_that_fill_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are said, cut or left out; the rest of the round is trained on."""
    policy = open_policy(make_model(tmp_path, "llama"), new_tokens=500)
    assert (
        "answers of" in caplog.text
        and "end before the 500 tokens of generate.max_new_tokens: its context is 128 tokens" in caplog.text
    )
    short, full = policy.generate(["1+1?", "x" * 200], 4)
    assert "1 of 2 questions fill the model's context of 128 tokens" in caplog.text
    assert [c.text for c in full.completions] == [""] * 4 and full.tokens.ids == ((),) * 4
    assert all(0 < len(ids) <= 126 for ids in short.tokens.ids)
    report = policy.update(
        [
            local("x" * 200, full, (1.0, 0.0, 0.0, 1.0)),
            local("1+1?", short, (1.0, 0.0, 0.0, 1.0)),
            external("2+2?", [("y" * 1000, True), ("z", True)], (1.0, 0.0)),
        ]
    )
    assert report.tokens > 0 and report.skipped == 0
    assert "Answers end with the model's context of 128 tokens" in "\n".join(
        explain(examine(NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu"))))
    )


def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"})
    )
    with pytest.raises(
        NoModel, match=r"holds an adapter, not a model.*--model Qwen/Qwen2\.5-0\.5B-Instruct,.*swarmd export"
    ):
        open_policy(tmp_path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(NoModel, match=r"adapter|no config\.json"):
            open_policy(tmp_path)


@pytest.mark.net
@pytest.mark.slow
def test_join_and_doctor_report_a_bad_model_with_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "llama")
    without_digits(model)
    environment = os.environ | {"SWARMD_SWARM_ENGINE": "none"}
    common = ["--model", str(model), "--device", "cpu"]
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "join",
        *common,
        "--state-dir",
        str(tmp_path / "state"),
        "--rounds",
        "1",
    ]
    joined = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
    )
    for status, said in (
        (joined.returncode, joined.stderr),
        (main(["doctor", "model", *common]), capsys.readouterr().err),
    ):
        assert status == 3, said
        assert "cannot represent what is asked and answered here" in said and "Traceback" not in said
