"""`swarmd doctor model`, `export`, `chat` and `serve`, as people and scripts use them."""

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from swarmd.cli import machine
from swarmd.config.sources import resolve
from swarmd.daemon.choices import remember
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.state.folder import StateFolder
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.checkpoint import Checkpoints, RunState
from tests.doubles import TIMEOUT_S
from tests.ports import kept_port
from tests.swarmd.conftest import Run
from tests.swarmd.policy.conftest import make_model, open_policy


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return the state folder of a node that has trained tiny for a round or two."""
    policy = open_policy("tiny")
    state = random.Random(0).getstate()
    Checkpoints(tmp_path / "state" / "checkpoints").save(RunState(2, 0, state, state, ()), policy.files())
    lines = [{"round": n, "reward_mean": 0.25 * n, "local": 4, "external": 4} for n in (1, 2)]
    (tmp_path / "state" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "state"


@pytest.mark.net
def test_doctor_without_a_topic_checks_model_and_network(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is from the environment. The network is also checked if the model cannot be used."""
    remember(resolve(None, {}, {"model": "tiny-latent"}), tmp_path)
    monkeypatch.setenv("SWARMD_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "none")
    said = run("doctor")
    assert said.code in (0, 4) and said.out.startswith("tiny-latent: ") and "opens no socket" in said.out
    monkeypatch.setenv("SWARMD_STATE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("SWARMD_MODEL_NAME", "./nowhere")
    said = run("doctor")
    assert said.code == 3 and "nowhere" in said.err and "opens no socket" in said.out


def test_doctor_model_shows_the_plan(run: Run, tmp_path: Path) -> None:
    remember(resolve(None, {}, {"model": "tiny-latent"}), tmp_path)
    said = run("doctor", "model", "--device", "cpu", "--state-dir", tmp_path)
    assert said.out.startswith("tiny-latent: ")  # by the settings of the next join
    said = run("doctor", "model", "--model", "tiny", "--device", "cpu", "--state-dir", tmp_path)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("tiny: 851,584 parameters, on cpu") and "851,584 × 4 B" in said.out
    document = json.loads(run("doctor", "model", "--device", "cpu", "--json").out)
    assert (
        document["schema"],
        document["fits"],
        document["plan"]["dtype"],
        document["plan"]["lora_rank"],
    ) == (1, True, "float32", None)


def test_all_commands_predict_the_same_memory_and_time(run: Run, tmp_path: Path) -> None:
    """`models` and `doctor model` agree. All processes of a node with tiny used 0.87 GB."""
    common = ("--device", "cpu", "--state-dir", tmp_path)
    listed = json.loads(run("models", "--device", "cpu", "--json").out)["models"]
    (tiny,) = (model for model in listed if model["name"] == "tiny")
    document = json.loads(run("doctor", "model", "tiny", *common, "--json").out)
    assert document["memory"] == tiny["memory"]["expected"]
    assert document["memory"] == pytest.approx(0.87e9, rel=0.1)
    assert 0.01 < document["seconds_a_round"] < 100
    make_model(tmp_path / "model", "llama", max_position_embeddings=2048)
    (tmp_path / "lora.toml").write_text('[model]\nlora = "on"\n')
    said = run("doctor", "model", tmp_path / "model", "--config", tmp_path / "lora.toml", "--device", "cpu")
    assert re.search(r"LoRA of rank 16, .* model\.lora = \"off\" trains all weights", said.out)
    assert re.search(r"a round +about [\d.e-]+ s", said.out) and "for the program's processes" in said.out
    assert "did you mean tiny?" in run("doctor", "model", "tyni").err


def test_an_export_without_a_trained_model_gives_a_message(run: Run, trained: Path, tmp_path: Path) -> None:
    file = trained / "metrics.jsonl"
    for tokens, said in ((0, True), (5, False)):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [line | {"tokens": {"generated": 5, "trained": tokens}} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        out = tmp_path / f"out-{tokens}"
        assert ("nothing was trained yet" in run("export", "--state-dir", trained, out).err) == said
        assert ("Not trained yet" in (out / "README.md").read_text()) == said


def test_doctor_model_reports_a_model_that_does_not_fit(run: Run, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "hidden_size": 2**16,
        "intermediate_size": 2**19,
        "head_dim": 2**14,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = run("doctor", "model", "--model", tmp_path, "--device", "cpu", "--json")
    document = json.loads(said.out)
    assert (said.code, document["fits"]) == (3, False)
    assert "not enough memory" in said.err and document["message"] in said.err
    assert run("doctor", "model", "--model", "./nowhere").code == 3


def test_export_works_while_a_node_uses_the_folder(run: Run, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StateFolder.open(trained):
        said = run("export", "--state-dir", trained, out, "--json")
    assert said.code == 0, said.err
    document = json.loads(said.out)
    assert document["folder"] == str(out)
    told = (document["model"], ("base", "curriculum")), (document["run"], ("rounds", "external_share"))
    assert [of[key] for of, keys in told for key in keys] == ["tiny", "tiny-9", 2, 0.5]
    assert (out / "model.safetensors").stat().st_size > (WEIGHTS["tiny"] / "model.safetensors").stat().st_size
    assert "tiny-9" in (out / "README.md").read_text()
    again = run("export", "--state-dir", trained, out)
    assert (again.code, again.out) == (2, "") and "Choose another" in again.err


@pytest.mark.parametrize(
    "chosen, said", [("tiny-9-strict", "tiny-9-strict"), ("/none/fractions.py", "fractions")]
)
def test_the_model_card_names_the_joined_curriculum(
    run: Run, trained: Path, tmp_path: Path, chosen: str, said: str
) -> None:
    (trained / "choices.json").write_text(json.dumps({"schema": 1, "curriculum": chosen}))
    document = json.loads(run("export", "--state-dir", trained, tmp_path / "out", "--json").out)
    assert document["model"]["curriculum"] == said


def test_export_writes_a_folder_for_ollama(run: Run, trained: Path, tmp_path: Path) -> None:
    said = run("export", "--state-dir", trained, tmp_path / "out", "--ollama")
    assert said.code == 0 and "swarmd export --gguf model.gguf" in said.err
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert "FROM ./model.gguf" in lines and 'PARAMETER stop "<|endoftext|>"' in lines
    refused = run("export", "--state-dir", trained, tmp_path / "other", "--ollama", "--adapter")
    assert refused.code == 2 and not (tmp_path / "other").exists()


def test_export_writes_a_gguf_file(run: Run, trained: Path, tmp_path: Path) -> None:
    said = run("export", "--gguf", tmp_path / "mine", "--state-dir", trained)
    assert (said.code, said.out) == (0, f"{tmp_path / 'mine.gguf'}\n") and "hf upload" not in said.err
    assert [path.name for path in tmp_path.glob("*mine*")] == ["mine.gguf"]
    assert (tmp_path / "mine.gguf").read_bytes()[:4] == b"GGUF"
    again = run("export", "--gguf", tmp_path / "mine.gguf", "--state-dir", trained)
    assert again.code == 2 and "exists already. Choose another" in again.err
    for other in ("--ollama", "--adapter"):
        both = run("export", "--gguf", other, tmp_path / "both", "--state-dir", trained)
        assert both.code == 2 and "Give one of them" in both.err


def test_invalid_exports_are_rejected(run: Run, trained: Path, tmp_path: Path) -> None:
    assert run("export", "--state-dir", trained, tmp_path / "a", "--adapter").code == 2
    empty = run("export", "--state-dir", tmp_path / "empty")
    assert empty.code == 2 and "swarmd join" in empty.err


def test_chat_uses_the_latest_checkpoint(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Random", lambda: random.Random(5))
    with StateFolder.open(trained):
        one = run("chat", "What is 12 + 30?", "--temperature", "0", "--state-dir", trained)
    assert (one.code, one.err) == (0, "") and one.out.startswith("<answer>")
    assert run("chat", "", "--state-dir", trained).code == 0  # an empty question is skipped
    lines = f"What is 12 + 30?\n{'x ' * 3000}\n\nWhat is 12 + 30?\n"
    said = run("chat", "--temperature", "0", "--state-dir", trained, stdin=lines)
    # The too long question is rejected with a reason; after an empty line, a new conversation begins.
    assert (said.code, said.out) == (0, 2 * one.out)
    assert "2 rounds trained" in said.err and "context is 1,024" in said.err
    assert "It trains on tiny-9, and knows nothing else" in said.err
    offered = run("chat", "--temperature", "0", "--state-dir", trained, stdin="?\nWhat is 12 + 30?\n")
    asked = [task.question for task in CurriculumTasks(TINY_9).draw(1, random.Random(5))]
    assert offered.code == 0 and offered.out.count("<answer>") == 2 and asked[0] in offered.err
    nothing = run("chat", "hello", "--state-dir", tmp_path / "nowhere")
    assert (nothing.code, "swarmd join" in nothing.err) == (2, True)


@pytest.mark.net
@pytest.mark.usefixtures("run")
def test_serve_answers_until_ctrl_c(trained: Path) -> None:
    command = [sys.executable, "-m", "swarmd", "serve", "--state-dir", str(trained), "--listen"]
    with (
        kept_port() as port,
        subprocess.Popen([*command, str(port)], stdout=-1, stderr=-1, text=True) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert httpx2.get(f"{address}/models").json()["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said.splitlines()) == (0, ["tiny, 2 rounds trained. Ctrl-C ends."])


def test_serve_without_an_address_gives_a_message(run: Run, trained: Path) -> None:
    said = run("serve", "--listen", "nowhere at all", "--state-dir", trained)
    assert (said.code, "neither host:port nor a port" in said.err) == (2, True)
