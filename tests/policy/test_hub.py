"""Finding a model by repository id, against a hub of our own on loopback that speaks as much of the protocol as a download takes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.policy.conftest import make_model

COMMIT = "c0ffee" + 34 * "0"
FIND = """
import json, sys
from swarmd.errors import SwarmdError
from swarmd.policy import hub
try:
    place = hub.locate(sys.argv[1], sys.argv[2] or None)
    files = sorted(p.name for p in hub.with_weights(place).iterdir())
    assert "torch" not in sys.modules
    print(json.dumps({"source": place.source, "revision": place.revision, "files": files}))
except SwarmdError as error:
    print(json.dumps({"error": str(error), "exit": error.exit_code}))
"""
pytestmark = pytest.mark.net


class Hub(BaseHTTPRequestHandler):
    """Repositories are folders <root>/<owner>/<name>, each with the one commit COMMIT on main."""

    root: Path
    fetched: list[str]

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repository, rest = self.root / parts[0] / parts[1], parts[2:]
        if parts[1] == "gated":
            self.refuse(403, "GatedRepo")
        elif not repository.is_dir():
            self.refuse(404, "RepoNotFound")
        elif rest[:1] in (["revision"], ["tree"], ["resolve"]) and rest[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif rest[:1] == ["resolve"]:
            self.file(repository / "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            files = [p for p in sorted(repository.rglob("*")) if p.is_file()]
            self.json([{"type": "file", "path": str(p.relative_to(repository)), "size": p.stat().st_size, "oid": oid(p)} for p in files])
        else:
            self.json({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": []})

    do_HEAD = do_GET  # noqa: N815  the name that http.server looks for

    def file(self, path: Path) -> None:
        body = path.read_bytes()
        self.send_response(200)
        for key, value in {"X-Repo-Commit": COMMIT, "ETag": f'"{oid(path)}"', "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.fetched.append(path.name)
            self.wfile.write(body)

    def json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadingHTTPServer]:
    root = tmp_path_factory.mktemp("hub")
    whole = make_model(root / "owner" / "small", "llama")
    (whole / "original").mkdir()
    (whole / "original" / "model.safetensors").write_bytes(b"other weights, not for us")
    (whole / "pytorch_model.bin").write_bytes(b"a pickle")
    pickled = make_model(root / "owner" / "pickled", "llama")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (root / "owner" / "gated").mkdir()
    (root / "owner" / "empty").mkdir()
    (root / "owner" / "empty" / "README.md").write_text("nothing")
    handler = type("Handler", (Hub,), {"root": root, "fetched": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def find(server: ThreadingHTTPServer | None, home: Path, name: str, revision: str = "", **environment: str) -> dict[str, object]:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    port = server.server_port if server else 9  # 9: nobody listens there
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP", "http", "ALL_PROXY", "all_proxy"))}
    done = subprocess.run(
        [sys.executable, "-c", FIND, name, revision], capture_output=True, text=True, env=kept | settings | environment, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_repository_is_fetched_once_and_its_commit_is_known(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    first = find(hub, tmp_path, "owner/small")
    files = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert first == {"source": "owner/small", "revision": COMMIT, "files": files}
    fetched = hub.RequestHandlerClass.fetched
    assert "model.safetensors" in fetched
    assert "pytorch_model.bin" not in fetched
    assert len(fetched) == len(set(fetched))
    # What is in the cache needs no hub, by either way of not having one.
    assert find(None, tmp_path, "owner/small", HF_HUB_OFFLINE="1") == first
    assert find(None, tmp_path, "owner/small") == first


def test_pinned_revision(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    assert find(hub, tmp_path, "owner/small", COMMIT)["revision"] == COMMIT
    assert "no revision 'v9'" in str(find(hub, tmp_path, "owner/small", "v9")["error"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/nothing", "the hub has no repository owner/nothing"),
        ("owner/gated", "is gated: accept its terms"),
        ("owner/pickled", "no weights in safetensors format"),
        ("owner/empty", "no config.json"),
    ],
)
def test_what_cannot_be_used(name: str, message: str, hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    answer = find(hub, tmp_path, name)
    assert message in str(answer["error"])
    assert answer["exit"] == 3


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {}])
def test_hub_that_cannot_be_reached(environment: dict[str, str], tmp_path: Path) -> None:
    answer = find(None, tmp_path, "qwen2.5-0.5b", **environment)
    assert str(answer["error"]).startswith("cannot fetch Qwen/Qwen2.5-0.5B-Instruct from the Hugging Face hub")
    assert "HF_HUB_OFFLINE" in str(answer["error"])
    assert answer["exit"] == 4
