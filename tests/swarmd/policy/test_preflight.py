"""Messages of `swarmd join` about a model or a device before it makes anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarmd.config.config import ModelConfig
from swarmd.policy.models import preflight
from tests.doubles import TIMEOUT_S

MODEL = {"model_type": "qwen2", "num_hidden_layers": 2}
JOIN = (
    "import sys, swarmd.cli.app; code = swarmd.cli.app.main(sys.argv[1:]); print(*{n.split('.')[0]for n in"
    " sys.modules}); sys.exit(code)"
)


def join(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", JOIN, "join", "--state-dir", str(state), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "./none"], "there is no folder none"),
        (["--model", "tinny"], "there is no model called 'tinny'; did you mean tiny? Use one of tiny,"),
        (["--model", "Qwen2.5-0.5B"], "did you mean qwen2.5-0.5b?"),
        (["--model", "gpt2"], "there is no model called 'gpt2'. Use one of tiny,"),
        (["--model", "https://huggingface.co/a/b"], "called 'https://huggingface.co/a/b'. Use one of tiny,"),
        (["--model", "{empty}"], "holds no config.json"),
        (["--model", "{config}"], "no weights in safetensors format"),
        (["--device", "mps" if sys.platform != "darwin" else "cuda"], "was asked for"),
    ],
)
def test_a_local_mistake_is_told_before_anything_is_made(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(MODEL))
    done = join(
        tmp_path / "state",
        *(word.format(empty=tmp_path / "empty", config=tmp_path / "config") for word in words),
    )
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "state").exists()
    assert not {"torch", "transformers", "httpx2", "trio", "libp2p"} & set(done.stdout.split())


def test_a_machine_that_has_the_device_is_never_refused() -> None:
    if torch.cuda.is_available():
        preflight.check(ModelConfig(device="cuda"))
    preflight.check(ModelConfig(device="cpu"))
    preflight.check(ModelConfig())


def test_the_check_of_a_model_loads_neither_numpy_nor_torch() -> None:
    """The daemon makes this check, and keeps all that it has loaded."""
    program = (
        "import sys; from swarmd.config.config import ModelConfig;"
        " from swarmd.policy.models import preflight;"
        " preflight.check(ModelConfig(name='tiny')); print(*{'numpy', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("there", [*preflight.DRIVERS, *preflight.LIBRARIES])
def test_any_trace_of_a_driver_lets_a_device_pass(there: str) -> None:
    def load(library: str) -> None:
        if library != there:
            raise OSError

    assert preflight.driver_there(lambda path: path == there, load)
    assert not preflight.driver_there(lambda path: path == "/dev/null", lambda _: load("none"))
