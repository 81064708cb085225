"""Finding a model by repository id, with a test hub on loopback that supports downloads."""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmd.policy.models.files.progress import Download, Progress
from swarmd.trainer.checkpoint import Checkpoints, RunState
from tests.doubles import TIMEOUT_S
from tests.loopback import Handler, listening
from tests.processes import killed_after, wait_until
from tests.swarmd.policy.conftest import edit_json, make_model, open_policy

COMMIT = "c0ffee" + 34 * "0"
FIND = """
import json, sys
from swarmd.errors import SwarmdError
try:
    from swarmd.policy.models import hub
    from swarmd.policy.models.files.model_folder import notes
    place = hub.locate(sys.argv[1], sys.argv[2] or None)
    told = lambda download: print(download.words, flush=True)
    files = sorted(p.name for p in hub.with_weights(place, told).iterdir())
    assert "torch" not in sys.modules
    found = {"source": place.source, "revision": place.revision, "files": files}
    print(json.dumps(found | {"notes": notes(place.folder, place.source)}))
except SwarmdError as error:
    print(json.dumps({"error": str(error), "exit": error.exit_code}))
"""
LARGE = 25_000_000
pytestmark = pytest.mark.net


class Hub(Handler):
    """A test hub. Repositories are folders <root>/<owner>/<name> with a single commit COMMIT on main."""

    address: str
    root: Path
    fetched: list[str]
    ranges: list[str]
    cut: list[int]  # an entry for each response that has a byte less than announced
    broken: list[int]  # an entry for each response with one changed byte in the weights
    holds = ".safetensors"
    held: list[int]  # per entry, one transfer of a larger file stops after so many bytes, until `go_on`
    go_on: threading.Event

    def get(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repository, rest = self.root / parts[0] / parts[1], parts[2:]
        if parts[1] == "gated":
            self.answer(status=403, X_Error_Code="GatedRepo")
        elif parts[0] == "refusing":
            message = "Invalid credentials in Authorization header"
            self.answer({"error": message}, status=int(parts[1]), X_Error_Message=message)
        elif not repository.is_dir():
            self.answer(status=404, X_Error_Code="RepoNotFound")
        elif rest[:1] in (["revision"], ["tree"], ["resolve"]) and rest[1] not in ("main", COMMIT):
            self.answer(status=404, X_Error_Code="RevisionNotFound")
        elif rest[:1] == ["resolve"]:
            self.file(repository / "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            files = [p for p in sorted(repository.rglob("*")) if p.is_file()]
            self.answer(
                [
                    {
                        "type": "file",
                        "path": str(p.relative_to(repository)),
                        "size": p.stat().st_size,
                        "oid": oid(p),
                        **({"xetHash": 64 * "a"} if p.name == "tokenizer.json" else {}),
                    }
                    for p in files
                ]
            )
        else:
            self.answer({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": []})

    def file(self, path: Path) -> None:
        body = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted is not None and self.command == "GET":
            self.ranges.append(self.headers["Range"])
            body = body[int(wanted[1]) :]
        size = 10**15 if path.parent.name == "huge" and path.suffix == ".safetensors" else len(body)
        if path.suffix == ".safetensors" and self.cut and self.command == "GET":
            self.cut.pop()
            size, body = size - 1, body[:-1]
        status, etag = 206 if wanted else 200, f'"{oid(path)}"'
        # Like most tokenizers on the hub, this file is also offered to hf_xet, which cannot fetch it here.
        more = {"X_Xet_Hash": 64 * "a", "X_Xet_Refresh_Route": "/no/where"}
        self.answer(
            status=status, X_Repo_Commit=COMMIT, ETag=etag, Content_Length=size,
            **(more if path.name == "tokenizer.json" else {}),
        )  # fmt: skip
        if self.command == "GET":
            self.fetched.append(path.name)
            if path.suffix == ".safetensors" and self.broken:
                self.broken.pop()
                body = body[:-1] + bytes([body[-1] ^ 1])
            with contextlib.suppress(OSError):  # the downloading process was killed
                if path.name.endswith(self.holds) and self.held and len(body) > self.held[-1]:
                    first = self.held.pop()
                    self.wfile.write(body[:first])
                    self.wfile.flush()
                    self.go_on.wait(300)
                    body = body[first:]
                self.wfile.write(body)


def oid(path: Path) -> str:
    """Return git's object id of a file, with which the hub identifies small files."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Hub]]:
    root = tmp_path_factory.mktemp("hub")
    whole = make_model(root / "owner" / "small", "llama")
    (whole / "original").mkdir()
    (whole / "original" / "model.safetensors").write_bytes(b"other weights, not for us")
    (whole / "pytorch_model.bin").write_bytes(b"a pickle")
    shard(make_model(root / "owner" / "large", "llama"))
    (whole / "model.fp16.safetensors").write_bytes(b"another precision")
    (whole / "adapter_config.json").write_text("{}")
    (whole / "adapter_model.safetensors").write_bytes(b"an adapter")
    (whole / "modeling.py").write_text("raise SystemExit")
    hostile = shard(make_model(root / "owner" / "hostile", "llama"))
    (hostile / "evil.bin").write_bytes(b"a pickle")
    edit_json(hostile / "model.safetensors.index.json", weight_map={"a": "evil.bin"})
    make_model(root / "owner" / "huge", "llama")
    pickled = make_model(root / "owner" / "pickled", "llama")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (root / "owner" / "gated").mkdir()
    (root / "owner" / "adapter").mkdir()
    (root / "owner" / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "owner/small"}'
    )
    (root / "owner" / "empty").mkdir()
    (root / "owner" / "empty" / "README.md").write_text("nothing")
    handler = type(
        "Handler",
        (Hub,),
        {
            "root": root,
            "fetched": [],
            "ranges": [],
            "cut": [],
            "broken": [],
            "held": [],
            "go_on": threading.Event(),
        },
    )
    with listening(handler) as handler.address:
        yield handler
        handler.go_on.set()


def shard(folder: Path) -> Path:
    """Split the weights into two files, of which the second is large, and write their index."""
    large = torch.from_numpy(numpy.frombuffer(random.Random(0).randbytes(LARGE), numpy.uint8).copy())
    save_file({"large": large}, folder / "model-2.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = dict.fromkeys(load_file(folder / "model-1.safetensors"), "model-1.safetensors")
    index = {"weight_map": names | {"large": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def surroundings(hub: type[Hub] | None, home: Path) -> dict[str, str]:
    settings = {
        "HF_ENDPOINT": hub.address if hub else "http://127.0.0.1:9",  # nothing listens at this port
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "HTTP", "http", "ALL_PROXY", "all_proxy", "SWARMD_"))
    }
    return kept | settings


def find(
    hub: type[Hub] | None, home: Path, name: str, revision: str = "", **environment: str
) -> dict[str, object]:
    """Find a model in a separate process, because huggingface_hub reads its settings at import."""
    done = subprocess.run(
        [sys.executable, "-c", FIND, name, revision],
        capture_output=True,
        text=True,
        env=surroundings(hub, home) | environment,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_repository_is_downloaded_once_and_its_commit_is_known(hub: type[Hub], tmp_path: Path) -> None:
    hub.fetched.clear()
    first = find(hub, tmp_path, "owner/small")
    files = [
        "adapter_config.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (note,) = first.pop("notes")  # type: ignore[misc]
    assert note.startswith("owner/small also holds an adapter, which is left out")
    assert first == {"source": "owner/small", "revision": COMMIT, "files": files}
    assert set(hub.fetched) == set(files), (
        "pickles, adapter weights, code or other precisions were downloaded"
    )
    assert len(hub.fetched) == len(set(hub.fetched))
    # Cached files need no hub, whether it is switched off or unreachable.
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        again = find(None, tmp_path, "owner/small", **environment)
        assert again.pop("notes") == [note] and again == first


def test_a_pinned_revision_is_downloaded(hub: type[Hub], tmp_path: Path) -> None:
    assert find(hub, tmp_path, "owner/small", COMMIT)["revision"] == COMMIT
    assert "no revision 'v9'" in str(find(hub, tmp_path, "owner/small", "v9")["error"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/nothing", "the hub has no repository owner/nothing"),
        ("owner/gated", "is gated: accept its terms"),
        ("owner/pickled", "no weights in safetensors format"),
        ("owner/empty", "no config.json"),
        ("owner/adapter", "holds an adapter, not a model. Give its base model, --model owner/small,"),
        ("owner/hostile", "names 'evil.bin', which is no safetensors file"),
    ],
)
def test_unusable_repositories_are_rejected(name: str, message: str, hub: type[Hub], tmp_path: Path) -> None:
    answer = find(hub, tmp_path, name)
    assert message in str(answer["error"]) and answer["exit"] == 3


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {}])
def test_an_unreachable_hub_is_reported(environment: dict[str, str], tmp_path: Path) -> None:
    answer = find(None, tmp_path, "qwen2.5-0.5b", **environment)
    assert str(answer["error"]).startswith(
        "cannot fetch Qwen/Qwen2.5-0.5B-Instruct from the Hugging Face hub"
    )
    assert ("HF_HUB_OFFLINE" in str(answer["error"])) == bool(environment) and answer["exit"] == 4


@pytest.mark.parametrize(
    ("environment", "said", "code"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:9"}, "Check the connection, ALL_PROXY", 4),
        ({"https_proxy": "foo://x:1"}, "Correct or unset https_proxy", 2),
        ({"HTTP_PROXY": "http://x:port"}, "HTTP_PROXY", 2),
        ({"HTTPS_PROXY": "http://[::1"}, "HTTPS_PROXY", 2),
        ({"HF_ENDPOINT": "huggingface.co"}, "unset HF_ENDPOINT", 2),
        ({"HF_ENDPOINT": "http://[::1"}, "unset HF_ENDPOINT", 2),
        ({"HF_TOKEN": "ünicode"}, "HF_TOKEN", 2),
        ({"HF_ENDPOINT": "https://127.0.0.1:9", "SSL_CERT_FILE": "/nowhere"}, "SSL_CERT_FILE", 2),
        (
            {"HTTP_PROXY": "http://127.0.0.1:9"},
            "Check the connection, HTTP_PROXY, HF_ENDPOINT",
            4,
        ),
        ({"HF_HOME": "/dev/null/x"}, "HF_HOME to another", 3),
        ({"HF_HUB_CACHE": "/dev/null/x"}, "HF_HUB_CACHE to another", 3),
        ({"HF_HOME": "", "HF_HUB_CACHE": "~nobody-here/x"}, "no home folder for the hub's cache", 3),
    ],
)
def test_an_invalid_environment_variable_gives_a_message_with_its_name(
    environment: dict[str, str], said: str, code: int, hub: type[Hub], tmp_path: Path
) -> None:
    answer = find(hub, tmp_path, "owner/small", **environment)
    assert re.search(said, str(answer["error"])) and answer["exit"] == code


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_ENDPOINT": "http://[::1"},
        {"HF_HUB_ETAG_TIMEOUT": "soon"},
        {"HF_HUB_DOWNLOAD_TIMEOUT": "1.5", "HF_ENDPOINT": "//["},
        {"ALL_PROXY": "foo://x:1", "HF_TOKEN": "ünicode", "SSL_CERT_FILE": "/nowhere"},
    ],
)
def test_an_invalid_variable_of_the_hub_does_not_affect_local_models(
    environment: dict[str, str], tmp_path: Path
) -> None:
    answer = find(None, tmp_path, "tiny", **environment)
    assert answer.get("source") == "tiny", answer
    (name, *_), refused = environment, find(None, tmp_path, "owner/small", **environment)
    assert name in str(refused["error"]) and refused["exit"] == 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejected_token_is_not_reported_as_a_connection_error(
    status: int, hub: type[Hub], tmp_path: Path
) -> None:
    answer = find(hub, tmp_path, f"refusing/{status}", HF_TOKEN="hf_wrong")
    assert f"refuses HF_TOKEN for refusing/{status} (status {status})" in str(answer["error"])
    assert "unset it" in str(answer["error"]) and answer["exit"] == 3
    answer = find(hub, tmp_path, f"refusing/{status}")
    assert "Log in" in str(answer["error"]) and answer["exit"] == 3


def test_a_silent_hub_is_given_up_soon(hub: type[Hub], tmp_path: Path) -> None:
    find(hub, tmp_path, "owner/small")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silence = {
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "HF_HUB_ETAG_TIMEOUT": "1",
        }
        assert find(None, tmp_path, "owner/small", **silence)["revision"] == COMMIT
        assert find(None, tmp_path, "owner/other", **silence)["exit"] == 4


def parts(home: Path) -> list[Path]:
    return [path for path in home.rglob("blobs/*") if path.suffix in (".swarmd-part", ".incomplete")]


def there(home: Path) -> int:
    """Return the bytes of downloaded files; a file may be renamed in the meantime."""
    found = 0
    for path in parts(home):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def test_a_download_shows_its_progress_and_resumes_after_kill_9(hub: type[Hub], tmp_path: Path) -> None:
    hub.held.append(LARGE - 100_000)
    command = [sys.executable, "-c", FIND, "owner/large", ""]
    with killed_after(
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings(hub, tmp_path))
    ) as process:
        assert process.stdout.readline() == "downloading owner/large: 0 of 25 MB\n"
        wait_until(lambda: there(tmp_path) > 10_000_000)
        process.kill()
    (part,) = parts(tmp_path)
    left = part.stat().st_size
    assert left >= 10_000_000
    hub.go_on.set()
    hub.ranges.clear()
    assert "model-2.safetensors" in find(hub, tmp_path, "owner/large")["files"]  # type: ignore[operator]
    assert hub.ranges == [f"bytes={left}-"]
    (whole,) = tmp_path.rglob("snapshots/*/model-2.safetensors")
    assert whole.read_bytes() == (hub.root / "owner" / "large" / "model-2.safetensors").read_bytes()
    assert not parts(tmp_path)


def test_an_interrupted_download_of_a_tokenizer_leaves_no_files(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "holds", "tokenizer.json")
    hub.go_on.clear()
    hub.held.append(10)
    command = [sys.executable, "-c", FIND, "owner/small", ""]
    with killed_after(subprocess.Popen(command, env=surroundings(hub, tmp_path))):
        wait_until(lambda: not hub.held and parts(tmp_path))
    hub.go_on.set()
    assert "tokenizer.json" in find(hub, tmp_path, "owner/small")["files"]  # type: ignore[operator]
    assert not parts(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "by"),
    [
        ("doctor model --model owner/small", signal.SIGINT),
        ("plan replay --model owner/small --device cpu", signal.SIGINT),
        ("export --state-dir {0}/state {0}/out", signal.SIGINT),
        ("export --state-dir {0}/state {0}/out", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_wait_for_the_hub(command: str, by: signal.Signals, tmp_path: Path) -> None:
    files = dict(open_policy("tiny").files())
    files["policy.json"] = bytes(files["policy.json"]).replace(b'"tiny"', b'"owner/small"')
    rng = random.Random(0).getstate()
    Checkpoints(tmp_path / "state" / "checkpoints").save(RunState(2, 0, rng, rng, ()), files.items())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT_S)
        environment = surroundings(None, tmp_path) | {
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"
        }
        with killed_after(
            subprocess.Popen(
                [sys.executable, "-m", "swarmd", *command.format(tmp_path).split()],
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        ) as process:
            silent.accept()[0].close()
            process.send_signal(by)
            _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (130, "stopped; downloads are kept\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_downloading_node(hub: type[Hub], tmp_path: Path) -> None:
    """The node ends although the hub has stopped sending."""
    hub.go_on.clear()
    hub.held.append(10)
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "join",
        "--model",
        "owner/small",
        "--device",
        "cpu",
        "--state-dir",
        str(tmp_path / "state"),
    ]
    environment = surroundings(hub, tmp_path / "home") | {"SWARMD_SWARM_ENGINE": "none"}
    with killed_after(
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    ) as process:
        said = next(line for line in process.stderr if "downloading" in line)
        assert re.search(r"starting: downloading owner/small: 0 of 0 MB; wait; Ctrl-C exits at once", said)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and "Traceback" not in rest


@pytest.mark.parametrize(
    ("done", "rate", "said"),
    [
        (0, 0.0, "0 of 988 MB"),
        (312_000_000, 5e6, "312 of 988 MB, 2 min left"),
        (900_000_000, 2e6, "900 of 988 MB, 44 s left"),
        (988_000_000, 0.0, "988 of 988 MB"),
    ],
)
def test_progress_is_described_in_words(done: int, rate: float, said: str) -> None:
    assert Download("a/b", done, 988_000_000, rate).words == f"downloading a/b: {said}"


def test_progress_is_reported_at_intervals_and_at_the_end() -> None:
    now, told = [0.0], []
    progress = Progress("a/b", 100_000_000, told.append, lambda: now[0])
    progress.found(50_000_000)
    for _ in range(50):
        now[0] += 1
        progress.update(1_000_000)
    assert [download.done for download in told] == [*range(50_000_000, 100_000_001, 5_000_000)]
    assert told[1].words == "downloading a/b: 55 of 100 MB, 45 s left" and told[-1].seconds_left == 0


def test_downloads_with_a_wrong_digest_are_rejected_and_removed(hub: type[Hub], tmp_path: Path) -> None:
    hub.broken.append(1)
    answer = find(hub, tmp_path, "owner/small")
    assert (
        "model.safetensors of owner/small does not match the hub's hash" in str(answer["error"])
        and answer["exit"] == 3
    )
    assert "model.safetensors" in find(hub, tmp_path, "owner/small")["files"]  # type: ignore[operator]


def test_a_truncated_response_is_not_reported_as_a_disk_error(hub: type[Hub], tmp_path: Path) -> None:
    hub.cut.append(1)
    error = str(find(hub, tmp_path, "owner/small")["error"])
    assert error.startswith("cannot fetch owner/small at") and "HF_HOME" not in error
    assert "files" in find(hub, tmp_path, "owner/small")


def test_a_too_small_disk_is_reported_before_the_download(hub: type[Hub], tmp_path: Path) -> None:
    hub.fetched.clear()
    answer = find(hub, tmp_path, "owner/huge")
    assert (
        "owner/huge needs 1,000,000,000 MB more on the disk" in str(answer["error"]) and answer["exit"] == 3
    )
    assert "model.safetensors" not in hub.fetched
