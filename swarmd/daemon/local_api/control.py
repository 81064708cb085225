"""The local control API: how `swarmd status`, `peers`, `pause`, `resume` and `stop` talk to the running node.

Request and reply are one JSON object each, over a Unix socket, so no other machine or web page can reach it:

    -> {"operation": "status", "arguments": {}}
    <- {"ok": true, "result": {...}}        or        <- {"ok": false, "error": "...", "exit_code": 2}

The socket is in a new folder of mode 0700 under the temporary directory, which logging out does not remove.
It is not in the state folder for two reasons: a socket's path is limited to about 104 bytes (108 on Linux),
and some file systems have no sockets. `<state-dir>/run.json` says where it is.
"""

import contextlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from p2p.errors import OperatorError
from p2p.types import Started
from swarmd.errors import NotRunning, SwarmdError, Unreachable
from swarmd.state.folder import LOCK_FILE, LOG_FILE, RUN_FILE, in_use, write_atomically

# The result may be of any type that msgspec can encode.
Handler = Callable[[Mapping[str, Any]], Awaitable[Any]]
R = TypeVar("R")

# Enough for a program's blob or message body, as base64.
MAX_REQUEST_BYTES = 512 * 1024
# A caller rejects a longer reply.
MAX_REPLY_BYTES = 4 * 1024 * 1024
_MAX_SOCKET_PATH_BYTES = 100
# Further connections are closed at once.
_MAX_CONNECTIONS = 16
# Seconds that a connection may be silent.
_IDLE_S = 10.0

log = logging.getLogger(__name__)


async def serve(state_dir: Path, handlers: Mapping[str, Handler], *, task_status: Started) -> None:
    """Answer requests until cancelled.

    Started (`nursery.start`) with the socket's path, once `run.json` is written.

    A handler takes the request's arguments and returns the result. If it raises an OperatorError, the caller
    gets its message and exit code. Only the owner of the state folder (`StateFolder.open`) may call this. A
    killed node leaves a folder with a dead socket in the temporary directory.
    """
    path, record = _socket_folder() / "control", state_dir / RUN_FILE
    try:
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as listener:
            await listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_MAX_CONNECTIONS)
            document = {"schema": 1, "pid": os.getpid(), "socket": str(path), "started_at": time.time()}
            write_atomically(record, document)
            task_status.started(str(path))
            await serve_at_most(
                _MAX_CONNECTIONS, partial(_converse, handlers), [trio.SocketListener(listener)]
            )
    finally:
        # If the disk fails only now, do not report that the node failed.
        with contextlib.suppress(OSError):
            record.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            path.parent.rmdir()


async def _converse(handlers: Mapping[str, Handler], stream: trio.SocketStream) -> None:
    """Answer a connection's only request. Close it without an answer if the caller is silent too long."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        async with stream:
            with trio.fail_after(_IDLE_S):
                line = await _line(stream)
            reply = await answer(line, handlers)
            with trio.fail_after(_IDLE_S):
                await stream.send_all(reply)


async def _line(stream: trio.SocketStream) -> bytes:
    """Read until the first newline, the end, or more than MAX_REQUEST_BYTES."""
    received = bytearray()
    while b"\n" not in received and len(received) <= MAX_REQUEST_BYTES:
        if not (part := await stream.receive_some(16 * 1024)):
            break
        received += part
    return bytes(received.partition(b"\n")[0])


async def answer(line: bytes, handlers: Mapping[str, Handler]) -> bytes:
    try:
        handler, arguments = _parse(line, handlers)
        reply: dict[str, Any] = {"ok": True, "result": await handler(arguments)}
    except OperatorError as error:
        reply = {"ok": False, "error": str(error), "exit_code": error.exit_code}
    except Exception:
        # A bug in one handler must not stop the training: log the traceback and tell the caller.
        log.exception("a control request failed")
        reply = {
            "ok": False,
            "error": "The node failed to answer; its log says why. Please report it.",
            "exit_code": 1,
        }
    return msgspec.json.encode(reply) + b"\n"


def answering(make: Callable[[], msgspec.Struct | dict[str, Any]]) -> Handler:
    """Wrap `make` as the handler of an operation without arguments."""

    async def handle(_arguments: Mapping[str, Any]) -> object:
        return make()

    return handle


class _Request(msgspec.Struct):
    operation: str
    arguments: dict[str, Any] = {}


def _parse(line: bytes, handlers: Mapping[str, Handler]) -> tuple[Handler, Mapping[str, Any]]:
    if len(line) > MAX_REQUEST_BYTES:
        raise SwarmdError(f"The request is over {MAX_REQUEST_BYTES:,} bytes. Send a smaller one.")
    try:
        request = msgspec.json.decode(line, type=_Request)
    except (ValueError, RecursionError):
        raise SwarmdError('The request is malformed. Send {"operation": name, "arguments": {...}}.') from None
    if (handler := handlers.get(request.operation)) is None:
        raise SwarmdError(
            f"This node knows no operation {request.operation[:40]!r}. Use one of"
            f" {', '.join(sorted(handlers))}."
        )
    return handler, request.arguments


def call(state_dir: Path, operation: str, kind: type[R], *, timeout: float = 10.0, **arguments: Any) -> R:
    """Ask the node that runs in this state folder, and decode its answer as `kind`.

    Blocks for at most `timeout` seconds. Raises NotRunning if no node runs there, Unreachable if it does not
    answer, and SwarmdError if it refuses the request.
    """
    path = _socket_path(state_dir)
    request = json.dumps({"operation": operation, "arguments": arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(path)
            connection.sendall(request)
            line = _receive_line(connection)
    except (TimeoutError, BlockingIOError):
        # BlockingIOError: the queue of connections is full, so the system refuses another one.
        raise Unreachable(
            f"{state_dir}: the node runs but did not answer within {timeout:g} s. Ask again; if it stays"
            f" silent, look into {state_dir / LOG_FILE}."
        ) from None
    except OSError:
        raise _absent(state_dir) from None
    return _result(state_dir, line, kind)


def wait_until_gone(state_dir: Path, timeout: float) -> bool:
    """Wait until no node owns the state folder any more.

    Returns False if one still does after `timeout` seconds.
    """
    until = time.monotonic() + timeout
    while in_use(state_dir):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _receive_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        line = file.readline(MAX_REPLY_BYTES + 1)
    if len(line) > MAX_REPLY_BYTES:
        raise SwarmdError(
            f"The node's answer is over {MAX_REPLY_BYTES:,} bytes. It may be another version of swarmd:"
            " restart it."
        )
    if not line.endswith(b"\n"):
        raise ConnectionResetError(0, "it hung up")
    return line


def _result(state_dir: Path, line: bytes, kind: type[R]) -> R:
    try:
        reply = json.loads(line)
        if reply["ok"]:
            return msgspec.convert(reply["result"], kind)
        error, exit_code = SwarmdError(reply["error"]), int(reply["exit_code"])
    except (ValueError, TypeError, KeyError):
        raise Unreachable(
            f"{state_dir}: the running node is of another version of swarmd. Restart the node."
        ) from None
    error.exit_code = exit_code
    raise error


def _socket_path(state_dir: Path) -> str:
    try:
        path = str(json.loads((state_dir / RUN_FILE).read_text(encoding="utf-8"))["socket"])
    except PermissionError:
        raise NotRunning(f"{state_dir}: this state folder is another user's. Ask as that user.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise _absent(state_dir) from None
    if not in_use(state_dir):
        # This state folder is a copy, and the socket belongs to the node that runs in the original folder.
        raise _absent(state_dir)
    return path


def _absent(state_dir: Path) -> NotRunning | Unreachable:
    """Return why no node answers: none runs here, or it is starting or stopping."""
    if in_use(state_dir):
        return Unreachable(
            f"{state_dir}: the node is starting or stopping. Ask again in a moment. If it stays so, its"
            f" socket was removed, as by a cleaner of temporary folders: stop it with `kill` and the number"
            f" in {state_dir / LOCK_FILE}."
        )
    return NotRunning(
        f"No node is running in {state_dir}. Start one with `swarmd join`, or name another folder with"
        " --state-dir."
    )


def _socket_folder() -> Path:
    """Make a folder of mode 0700 whose path leaves room for a socket's name."""
    # The parent may be writable for everyone: mkdtemp makes a folder for our user alone.
    for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108
        if len(os.fsencode(parent)) < _MAX_SOCKET_PATH_BYTES - len("/swarmd-xxxxxxxx/control"):
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="swarmd-", dir=parent))
    raise SwarmdError(
        "No folder for the control socket can be made. Set TMPDIR to a short path that you can write to."
    )


async def serve_at_most(
    most: int,
    converse: Callable[[trio.SocketStream], Awaitable[None]],
    listeners: Sequence[trio.SocketListener],
) -> None:
    """Serve listeners until cancelled; close connections beyond `most` at once.

    If the process has no free file descriptor, trio waits for one.
    """
    room = trio.Semaphore(most)

    async def admitted(stream: trio.SocketStream) -> None:
        if room.value == 0:
            await trio.aclose_forcefully(stream)
            return
        async with room:
            await converse(stream)

    await trio.serve_listeners(admitted, list(listeners))
