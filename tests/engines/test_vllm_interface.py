"""The plug-in's requests and options exist in vLLM, according to the sources of the version that it supports.

The sources are read, not run: `python -m testbed.environments vllm-sources` downloads them once (47 MB).
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from swarmd_engine_vllm import server
from swarmd_engine_vllm.client import Client

from swarmd.policy.inference.engine import EngineOptions
from testbed.environments import SOURCES, default_environment
from tests.engines.test_vllm import asked

NAME = "vllm-sources"
VLLM = default_environment(NAME) / SOURCES[NAME].partition("==")[2] / "vllm"
pytestmark = pytest.mark.skipif(
    not VLLM.is_dir(), reason=f"no sources of vLLM: `python -m testbed.environments {NAME}`"
)


def tree(path: str) -> ast.Module:
    return ast.parse((VLLM / path).read_text(encoding="utf-8"))


def classes(path: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}


def fields(*found: ast.ClassDef) -> set[str]:
    """Return the names of the annotated fields of classes: options, or a request."""
    return {
        node.target.id
        for each in found
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def routes() -> Iterator[str]:
    """Yield the path in each decorator @router.get(…) and @router.post(…)."""
    for path in (VLLM / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr in ("get", "post") and isinstance(first, ast.Constant):
                    yield str(first.value)


@pytest.fixture
def sent() -> list[httpx2.Request]:
    """Call each method of the client once, and return its requests."""
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        choice = {"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
        return httpx2.Response(200, json={"data": [{"id": "x"}], "choices": [choice], "success": True})

    http = httpx2.Client(transport=httpx2.MockTransport(answer), base_url="http://vllm")
    client = Client(http, "vllm", lambda: "")
    client.healthy()
    client.base_model()
    client.complete("x", [1], 1, limit=1, ends=[0], temperature=0.5, seed=0, allowed_token_ids=[0])
    client.load_adapter("a", "/a")
    client.load_weights("/w")
    client.sleep()
    client.wake()
    return requests


def body_of(sent: list[httpx2.Request], path: str) -> dict[str, object]:
    (found,) = [json.loads(request.content) for request in sent if request.url.path == path]
    assert isinstance(found, dict)
    return found


def test_every_route_that_the_client_requests_exists(sent: list[httpx2.Request]) -> None:
    assert len(sent) == 8 and {request.url.path for request in sent} <= set(routes())


def test_vllms_requests_have_every_field_that_the_client_sends(sent: list[httpx2.Request]) -> None:
    """vLLM ignores unknown fields of a request, with only a line in its log."""
    request = classes("entrypoints/openai/completion/protocol.py")["CompletionRequest"]
    assert set(body_of(sent, "/v1/completions")) <= fields(request)
    adapter = classes("entrypoints/serve/lora/protocol.py")["LoadLoRAAdapterRequest"]
    assert set(body_of(sent, "/v1/load_lora_adapter")) <= fields(adapter)


def test_a_worker_reloads_weights_from_a_folder(sent: list[httpx2.Request]) -> None:
    call = body_of(sent, "/collective_rpc")
    worker, runner = (
        next(
            node
            for node in ast.walk(tree(path))
            if isinstance(node, ast.FunctionDef) and node.name == call["method"]
        )
        for path in ("v1/worker/gpu_worker.py", "v1/worker/gpu/model_runner.py")
    )
    assert worker.args.kwarg is not None  # passes its arguments on unchanged
    assert set(call["kwargs"]) <= {each.arg for each in runner.args.args}  # type: ignore[call-overload]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_has_every_option_that_the_server_is_started_with(device: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    options: EngineOptions = asked(tmp_path, device=device, python=str(python), lora_rank=9)
    line = server.command(options, tmp_path / "socket")
    known = fields(
        classes("engine/arg_utils.py")["EngineArgs"],
        *classes("entrypoints/common/cli_args.py").values(),
    )
    used = {part.removeprefix("--").replace("-", "_") for part in line if part.startswith("--")}
    assert len(used) >= 8 and used <= known
    assert (VLLM / line[2].removeprefix("vllm.").replace(".", "/")).with_suffix(".py").is_file()


def test_vllm_knows_the_values_and_variables_that_the_server_is_started_with() -> None:
    (ranks,) = [
        node.value
        for node in tree("config/lora.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MaxLoRARanks"
    ]
    assert ast.literal_eval(f"({ast.unparse(ranks).removeprefix('Literal[')[:-1]})") == server.RANKS
    assert "processed_logprobs" in (VLLM / "config/model.py").read_text(encoding="utf-8")
    known = (VLLM / "envs.py").read_text(encoding="utf-8")
    assert all(f'"{name}": ' in known for name in server._SET if name.startswith("VLLM_"))
