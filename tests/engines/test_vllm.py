"""The plug-in for vLLM, against a stand-in for the server with a small real model (standin.py)."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from swarmd_engine_vllm import guard
from swarmd_engine_vllm.client import Client
from swarmd_engine_vllm.engine import ADAPTER, VllmEngine, open_engine
from swarmd_engine_vllm.server import RANKS, SERVED, command

from swarmd.config.config import GenerateConfig
from swarmd.policy.inference.decode import Sample, Sampling
from swarmd.policy.inference.engine import GROUP, EngineFailed, EngineOptions, NoEngine, open_plugin
from swarmd.policy.inference.engine_driver import NetworkWeights
from swarmd.policy.inference.own_engine import OwnEngine
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import seeded
from tests.doubles import TIMEOUT_S
from tests.processes import killed_after, wait_until
from tests.swarmd.policy.conftest import config_of, local, make_model, open_policy
from tests.swarmd.policy.test_engine import PROMPTS, moved, network_of, plain_logprobs

STANDIN = Path(__file__).with_name("standin.py")
CPU = torch.device("cpu")
QUESTIONS = ["1+1?", "a rather longer question", "x"]


def sampling(temperature: float = 1.0, limit: int = 8) -> Sampling:
    return Sampling(limit, 128, frozenset({0}), temperature)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return a script that takes the place of the interpreter of vLLM's environment."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def asked(folder: Path, **changes: Any) -> EngineOptions:
    usual = {
        "model": folder,
        "device": "cpu",
        "dtype": "float32",
        "lora_rank": None,
        "context": 128,
        "start_seconds": TIMEOUT_S,
    }
    return EngineOptions(**usual | changes)


def policy_on_vllm(folder: Path, python: str, **changes: Any) -> LanguagePolicy:
    config = config_of(folder, **changes)
    generate = GenerateConfig(
        engine="vllm", engine_python=python, engine_start_seconds=TIMEOUT_S, max_new_tokens=8
    )
    return LanguagePolicy.open(config.model_copy(update={"generate": generate}), 0)


def started_by(policy: LanguagePolicy) -> VllmEngine:
    engine = policy._driver.engine
    assert isinstance(engine, VllmEngine)
    return engine


# A server that the plug-in starts: it answers, the policy learns, and the server gets the new weights.


@pytest.mark.net
@pytest.mark.parametrize("lora", ["on", "off"])
def test_answers_come_from_the_latest_weights(lora: str, folder: Path, python: str) -> None:
    policy = policy_on_vllm(folder, python, lora=lora, lora_rank=4, train={"learning_rate": 0.05})
    engine = started_by(policy)
    own = OwnEngine(policy.network, 10_000)
    prompts = [policy._chat.prompt(q) for q in QUESTIONS]
    seen = []
    try:
        for _ in range(3):
            expected = own.generate(prompts, 1, sampling(0.0), seeded(CPU, 0))
            theirs = policy._decode(prompts, 1, sampling(0.0))
            assert [s[0].ids for s in theirs] == [s[0].ids for s in expected]
            seen.append([s[0].ids for s in expected])
            batch = []
            for question, generation in zip(QUESTIONS, policy.generate(QUESTIONS, 4), strict=True):
                for ids, logprobs in zip(generation.tokens.ids, generation.tokens.logprobs, strict=True):
                    plain = plain_logprobs(policy.network, policy._chat.prompt(question), ids)
                    torch.testing.assert_close(torch.tensor(logprobs), plain, atol=1e-4, rtol=0)
                assert len(set(generation.tokens.ids)) > 1
                batch.append(local(question, generation, (1.0, 0.0, 0.0, 1.0)))
            report = policy.update(batch)
            assert report.tokens > 0
        assert len({str(s) for s in seen}) == 3  # each update changed the answers
        assert policy.learner._learning.train.importance_cap == 2.0
        kept = [p for p in engine._scratch.iterdir() if p.is_dir()]
        assert kept == [engine._last]  # older weights are deleted

        held = psutil.Process(engine._end.__self__._process.pid)  # the server's guard
        held.children()[0].kill()
        psutil.wait_procs([held], timeout=TIMEOUT_S)
        with pytest.raises(
            EngineFailed,
            match=r"(?s)cannot be reached .*Its last lines:\n    stand-in: starting.*: ready.*Join again",
        ):
            policy.generate(QUESTIONS, 4)
    finally:
        policy.close()
    assert not engine._scratch.exists()
    policy.close()


@pytest.mark.net
def test_the_guard_ends_the_server_with_a_killed_trainer(tmp_path: Path) -> None:
    """The processes: the trainer, the guard as `Child` starts it, the server, and a child of the server."""
    server = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'],"
        " stdin=subprocess.PIPE).wait()"
    )
    scratch = tmp_path / "scratch"
    (scratch / "weights-1").mkdir(parents=True)
    line = [sys.executable, "-I", guard.__file__, str(scratch), sys.executable, "-c", server]
    trainer = (
        "import subprocess, sys\n"
        f"held = subprocess.Popen({line!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(held.pid, flush=True); sys.stdin.read()"
    )
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with killed_after(subprocess.Popen([sys.executable, "-c", trainer], text=True, **pipes)) as process:
        assert process.stdout is not None
        held = psutil.Process(int(process.stdout.readline()))
        below = wait_until(lambda: (found := held.children(recursive=True))[1:] and found)
        process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs([held, *below], timeout=TIMEOUT_S)
        for left in alive:
            left.kill()
        assert alive == [] and not scratch.exists()


@pytest.mark.net
def test_a_server_that_does_not_start_says_why(
    folder: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as alone:  # a short path, because a socket is in it
        monkeypatch.setattr(tempfile, "tempdir", alone)
        fail_to_start(folder, python)
        assert list(Path(alone).iterdir()) == []


def fail_to_start(folder: Path, python: str) -> None:
    with pytest.raises(
        EngineFailed,
        match=r"(?s)ended while it started. Its last lines:.*unrecognized arguments: --no-such.*engine_args",
    ):
        open_engine(asked(folder, python=python, arguments=("--no-such",)))
    with pytest.raises(
        EngineFailed, match=r"(?s)vLLM was not ready after 0.3 s.*Raise generate.engine_start_seconds"
    ):
        open_engine(asked(folder, python=python, start_seconds=0.3))


# A server that is already running.


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Any]:
    """Return a function that starts a stand-in with options and variables, and returns its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, **environment: str) -> str:
        line = [
            sys.executable,
            str(STANDIN),
            "serve",
            str(folder),
            "--served-model-name",
            "their-name",
            *options,
        ]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "stand-in: starting\n"
        return f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"

    yield start
    for process in started:
        process.kill()
        process.communicate()  # closes the pipe, too


@pytest.fixture(scope="module")
def able(serve: Any) -> str:
    """Return the address of a server that was started as docs/engines.md says."""
    return serve(
        "--enable-lora",
        "--logprobs-mode",
        "processed_logprobs",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        VLLM_SERVER_DEV_MODE="1",
    )


@pytest.fixture(scope="module")
def plain(serve: Any) -> str:
    """Return the address of a server that was started without further options."""
    return serve()


def calls(url: str) -> Any:
    return httpx2.get(f"{url}/standin/calls", timeout=TIMEOUT_S).json()


@pytest.mark.net
def test_a_running_server_is_used_and_not_ended(able: str, folder: Path) -> None:
    engine: Any = open_plugin("vllm", asked(folder, url=able, device="cuda"))
    network = moved(folder, lora="on", lora_rank=4).network
    engine.sync(NetworkWeights(network, 1, 4, str(folder)))
    expected = OwnEngine(network, 10_000).generate(PROMPTS, 1, sampling(0.0), seeded(CPU, 0))
    assert [s[0].ids for s in engine.generate(PROMPTS, 1, sampling(0.0), seeded(CPU, 0))] == [
        s[0].ids for s in expected
    ]
    engine.sleep()
    assert not calls(able)["asleep"]
    first = calls(able)["adapters"][ADAPTER]
    engine.sync(NetworkWeights(network, 2, 4, str(folder)))
    # A different path, so that the server does not use a cached adapter.
    assert calls(able)["adapters"][ADAPTER] != first
    engine.close()
    assert httpx2.get(f"{able}/health", timeout=TIMEOUT_S).status_code == 200


@pytest.mark.net
def test_logprobs_are_at_the_sampling_temperature_and_seeds_come_from_the_generator(
    able: str, folder: Path
) -> None:
    engine: Any = open_plugin("vllm", asked(folder, url=able))
    network = network_of(folder)
    # The server uses its base weights, even if another test has left adapters.
    one = engine.generate(PROMPTS, 3, sampling(0.6), seeded(CPU, 4))
    assert (
        one
        == engine.generate(PROMPTS, 3, sampling(0.6), seeded(CPU, 4))
        != engine.generate(PROMPTS, 3, sampling(0.6), seeded(CPU, 5))
    )
    assert len({s.ids for s in one[0]}) > 1
    for prompt, samples in zip(PROMPTS, one, strict=True):
        for s in samples:
            torch.testing.assert_close(
                torch.tensor(s.logprobs), plain_logprobs(network, prompt, s.ids, 0.6), atol=1e-4, rtol=0
            )
    long = engine.generate([[5] * 128, [5] * 126], 2, sampling(), seeded(CPU, 0))
    assert [[len(s.ids) for s in samples] for samples in long] == [[0, 0], [2, 2]]
    engine.close()


@pytest.mark.net
def test_a_server_with_logprobs_at_another_temperature_is_reported(plain: str, folder: Path) -> None:
    engine: Any = open_plugin("vllm", asked(folder, url=plain))
    assert engine.generate(PROMPTS, 1, sampling(1.0), seeded(CPU, 0))  # no difference at 1
    with pytest.raises(
        EngineFailed,
        match=r"leave out the temperature.*temperature 0\.6.*--logprobs-mode processed_logprobs",
    ):
        # The check also works if the first prompt fills the context and gets no answer.
        engine.generate([[5] * 128, *PROMPTS], 1, sampling(0.6), seeded(CPU, 0))
    assert engine.generate([[5] * 128], 1, sampling(0.6), seeded(CPU, 0)) == [[Sample((), (), ended=False)]]
    assert engine.generate([], 1, sampling(0.6), seeded(CPU, 0)) == []
    engine.close()


@pytest.mark.net
@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (4, r"has no /v1/load_lora_adapter.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"),
        (None, r"has no /collective_rpc.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_that_cannot_load_weights_gives_an_error_with_a_remedy(
    rank: int | None, said: str, plain: str, folder: Path
) -> None:
    engine: Any = open_plugin("vllm", asked(folder, url=plain, lora_rank=rank))
    network = open_policy(folder, lora="on" if rank else "off", lora_rank=4).network
    with pytest.raises(EngineFailed, match=said):
        engine.sync(NetworkWeights(network, 1, rank, str(folder)))
    engine.close()


@pytest.mark.net
def test_an_error_quotes_the_servers_reason(able: str, folder: Path) -> None:
    engine: Any = open_plugin("vllm", asked(folder, url=able))
    engine._model = "gone"
    with pytest.raises(EngineFailed, match=r"refused /v1/completions \(404: The model `gone` does not exist"):
        engine.generate(PROMPTS, 1, sampling(), seeded(CPU, 0))
    engine.close()


@pytest.mark.net
def test_the_engines_own_server_sleeps_during_updates(able: str, tmp_path: Path) -> None:
    client = Client(httpx2.Client(base_url=able, timeout=TIMEOUT_S), able, str)
    engine = VllmEngine(client, "their-name", tmp_path / "scratch", sleeps=True, end=lambda: None)
    engine.sleep()
    assert calls(able)["asleep"]
    with pytest.raises(EngineFailed, match="the engine sleeps"):
        engine.generate(PROMPTS, 1, sampling(), seeded(CPU, 0))
    engine.wake()
    assert not calls(able)["asleep"]
    engine.close()


@pytest.mark.net
def test_a_server_that_is_old_or_down_gives_an_error_with_a_remedy(tmp_path: Path, folder: Path) -> None:
    def old(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"choices": [{"index": 0, "text": "hello", "logprobs": None}]})

    client = Client(
        httpx2.Client(base_url="http://old", transport=httpx2.MockTransport(old)), "http://old", str
    )
    with pytest.raises(EngineFailed, match=r"sends no token ids.*vLLM 0\.33 or newer"):
        VllmEngine(client, "m", tmp_path, sleeps=False, end=lambda: None).generate(
            PROMPTS, 1, sampling(), seeded(CPU, 0)
        )
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(
            EngineFailed, match=r"cannot be reached .*Start it, or correct generate\.engine_url"
        ):
            open_plugin("vllm", asked(folder, url=f"http://127.0.0.1:{taken.getsockname()[1]}"))


# The command line that starts a server.


def test_vllm_is_found_by_its_entry_point() -> None:
    (point,) = [p for p in entry_points(group=GROUP) if p.name == "vllm"]
    assert point.dist is not None
    assert point.dist.name == "swarmd-engine-vllm"
    assert point.load() is open_engine


def test_the_servers_command_line_follows_the_options(folder: Path, python: str) -> None:
    line = command(
        asked(
            folder,
            python=python,
            device="cuda",
            dtype="bfloat16",
            lora_rank=20,
            memory=0.3,
            arguments=("--x",),
        ),
        Path("/s"),
    )
    assert line[:5] == [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    options = " ".join(line[5:])
    assert (
        options
        == f"--uds /s --served-model-name {SERVED} --dtype bfloat16 --logprobs-mode processed_logprobs"
        " --generation-config vllm --disable-uvicorn-access-log"
        " --enable-lora --max-loras 1 --max-lora-rank 32"
        " --gpu-memory-utilization 0.3 --enable-sleep-mode --x"
    )
    assert "--enable-lora" not in command(asked(folder, python=python), Path("/s"))
    assert "--enable-sleep-mode" not in command(asked(folder, python=python), Path("/s"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "mps"}, r"does not run on Apple's MPS.*generate\.engine"),
        ({"python": "/no/such/python"}, r"engine_python is /no/such/python, and there is no such file"),
        (
            {"python": "", "device": "cpu"},
            r"vLLM is not found.*pip install vllm==0\.33\.0.*engine_python.*engine_url",
        ),
        (
            {"python": sys.executable, "lora_rank": RANKS[-1] + 1},
            r"rank 512\. Lower model\.lora_rank",
        ),
    ],
)
def test_a_server_that_cannot_be_started_gives_a_remedy(
    changes: dict[str, Any], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoEngine, match=said):
        open_engine(asked(folder, **changes))


def test_the_stand_in_server_does_not_import_swarmd() -> None:
    """The stand-in must read weights as peft and transformers do, not with swarmd's code."""
    assert "swarmd" not in STANDIN.read_text()
