"""The control API over a real socket.

The tests cover requests, answers, and the caller's errors if no node runs.
"""

import contextlib
import itertools
import json
import math
import os
import resource
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from swarmd.daemon.local_api.control import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, call, serve, wait_until_gone
from swarmd.errors import NotRunning, SwarmdError, Unreachable
from swarmd.state.folder import StateFolder
from tests.disk import failing_at
from tests.doubles import TIMEOUT_S

pytestmark = pytest.mark.net


async def _answer(
    arguments: Mapping[str, Any], error: Exception | None = None, seconds: float = 0.0
) -> Mapping[str, Any]:
    await trio.sleep(seconds)
    if error is not None:
        raise error
    return {"schema": 1, "got": dict(arguments)}


HANDLERS = {
    "status": _answer,
    "pause": partial(_answer, error=Unreachable("The trainer is gone. Wait.")),
    "peers": partial(_answer, error=ZeroDivisionError()),
    "stop": partial(_answer, seconds=math.inf),
    "large": lambda _: _answer({"x": "x" * MAX_REPLY_BYTES}),
}


@contextlib.asynccontextmanager
async def running(state_dir: Path) -> AsyncIterator[str]:
    with StateFolder.open(state_dir) as state:
        async with trio.open_nursery() as nursery:
            path: str = await nursery.start(
                lambda task_status: serve(state.path, HANDLERS, task_status=task_status)
            )
            yield path
            nursery.cancel_scope.cancel()


def run_file(state_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((state_dir / "run.json").read_text())
    return found


async def ask(state_dir: Path, operation: str, **arguments: Any) -> dict[str, Any]:
    return await trio.to_thread.run_sync(lambda: call(state_dir, operation, dict, **arguments))


async def test_a_disk_failure_is_reported_at_the_start_and_ends_no_running_node(tmp_path: Path) -> None:
    for step in itertools.count(1):
        (state_dir := tmp_path / f"step-{step}").mkdir()
        started = False
        with failing_at(step) as begun:
            try:
                async with running(state_dir):
                    started = True
            except* SwarmdError as group:
                assert not started and "run.json: cannot be written" in str(group.exceptions[0])
        if len(begun) < step:
            break
    assert step > 6


async def test_a_request_is_answered_and_the_socket_is_private(tmp_path: Path) -> None:
    state_dir = tmp_path / ("very-long-name" * 8) / "state"  # longer than a socket's path may be
    async with running(state_dir) as path:
        assert await ask(state_dir, "status", a=[1]) == {"schema": 1, "got": {"a": [1]}}
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        document = run_file(state_dir)
        assert (document["pid"], document["socket"]) == (os.getpid(), path)
    assert not Path(path).parent.exists()
    assert not (state_dir / "run.json").exists()
    with pytest.raises(NotRunning, match="swarmd join"):
        await ask(state_dir, "status")


async def test_a_temporary_folder_with_a_too_long_path_is_not_used_for_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with running(tmp_path):
        assert (await ask(tmp_path, "status"))["schema"] == 1


async def test_errors_reach_the_caller_and_an_internal_error_does_not_stop_the_node(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(SwarmdError, match="The trainer is gone") as refused:
            await ask(tmp_path, "pause")
        assert refused.value.exit_code == 4
        with pytest.raises(SwarmdError, match="its log says why"):
            await ask(tmp_path, "peers")
        with pytest.raises(SwarmdError, match="knows no operation 'dance'"):
            await ask(tmp_path, "dance")
        with pytest.raises(Unreachable, match="did not answer"):
            await ask(tmp_path, "stop", timeout=0.1)
        with pytest.raises(SwarmdError, match=rf"over {MAX_REPLY_BYTES:,} bytes"):
            await ask(tmp_path, "large")
        assert await ask(tmp_path, "status") == {"schema": 1, "got": {}}


NO_REQUESTS = [
    b"\n",
    b"{}\n",
    b"[]\n",
    b"[" * 20_000 + b"\n",
    b"\xff\xfe\n",
    b'{"operation":1}\n',
    b"a" * (MAX_REQUEST_BYTES + 2),
]


async def test_a_malformed_request_is_rejected_and_the_next_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as path:
        for line in NO_REQUESTS:
            with trio.fail_after(TIMEOUT_S):
                async with await trio.open_unix_socket(path) as connection:
                    await connection.send_all(line)
                    assert not json.loads(await connection.receive_some(1000))["ok"]
            assert (await ask(tmp_path, "status"))["schema"] == 1


async def test_excess_connections_are_closed_and_places_become_free_again(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as path:
        held = [await trio.open_unix_socket(path) for _ in range(17)]
        with trio.fail_after(TIMEOUT_S):
            assert await held[16].receive_some(1) == b""
        for stream in held:
            await stream.aclose()
        while True:
            with contextlib.suppress(Unreachable), trio.fail_after(TIMEOUT_S):
                assert (await ask(tmp_path, "status"))["schema"] == 1
                break


async def test_a_node_without_free_file_descriptors_answers_once_it_has_one(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running(tmp_path) as path:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                await trio.testing.wait_all_tasks_blocked(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await ask(tmp_path, "status"))["schema"] == 1


async def test_after_a_kill_the_left_files_count_as_not_running(tmp_path: Path) -> None:
    left = tmp_path / "swarmd-left"
    left.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left / "control"))
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "pid": 1, "socket": str(left / "control")}))
    with pytest.raises(NotRunning):
        call(tmp_path, "status", dict)
    async with running(tmp_path):
        assert (await ask(tmp_path, "status"))["schema"] == 1


async def test_commands_on_a_copy_of_a_running_nodes_folder_do_not_reach_the_node(tmp_path: Path) -> None:
    async with running(tmp_path / "node") as path:
        shutil.copytree(tmp_path / "node", tmp_path / "copy")
        with pytest.raises(NotRunning):
            await ask(tmp_path / "copy", "status")
        async with running(tmp_path / "copy") as of_the_copy:
            assert of_the_copy != path
            assert (await ask(tmp_path / "node", "status"))["schema"] == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"socket": 3}', '{"socket": "/nowhere"}', "\udcff"])
def test_an_unreadable_run_file_counts_as_not_running(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(NotRunning):
        call(tmp_path, "status", dict)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a connection")
def test_a_hanging_node_is_not_reported_as_starting(tmp_path: Path) -> None:
    with (
        StateFolder.open(tmp_path),
        socket.socket(socket.AF_UNIX) as listener,
        contextlib.ExitStack() as held,
    ):
        listener.bind(str(tmp_path / "control"))
        listener.listen(0)
        (tmp_path / "run.json").write_text(json.dumps({"socket": str(tmp_path / "control")}))
        # Fill the queue of connections that were not accepted yet.
        with pytest.raises(BlockingIOError):
            while True:
                earlier = held.enter_context(socket.socket(socket.AF_UNIX))
                earlier.setblocking(False)
                earlier.connect(str(tmp_path / "control"))
        with pytest.raises(Unreachable, match="did not answer"):
            call(tmp_path, "status", dict, timeout=0.1)


def test_a_command_can_wait_until_the_node_has_ended(tmp_path: Path) -> None:
    state = StateFolder.open(tmp_path)
    assert not wait_until_gone(tmp_path, 0.1)
    with pytest.raises(Unreachable, match=r"starting or stopping.*`kill` and the number in .*lock"):
        call(tmp_path, "status", dict)
    state.close()
    assert wait_until_gone(tmp_path, 0.1)
