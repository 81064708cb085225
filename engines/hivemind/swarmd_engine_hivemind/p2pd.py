"""p2pd, the Go libp2p daemon that hivemind ships (go-libp2p 0.32, MIT): its process and control socket.

We use two files of hivemind, the program and the description of its messages. We import neither hivemind nor
torch: hivemind's client has no pubsub, and it cannot be loaded in one process with py-libp2p.

Protocol (github.com/learning-at-home/go-libp2p-daemon, conn.go): one Request, one Response, as protobuf
messages with a varint length before each, on a Unix socket in a folder that only this user can enter. p2pd
gets the key through a pipe; it is never on disk.

p2pd ends when its last "persistent" connection ends. We upgrade one connection to that kind. It also closes
if our process is killed. `-idleTimeout` ends p2pd if we are killed before that upgrade.
"""

import contextlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trio

from p2p.errors import EngineMissing
from p2p.identity import KEY_BYTES, Identity, peer_id_of, public_key_of
from p2p.types import PeerId

INSTALL = "pip install --no-deps hivemind==1.1.12"
# The platforms with hivemind wheels. Only the first was tested.
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
# p2pd's limit.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# A start takes 0.2 s on an idle machine.
START_TIMEOUT_S = 30.0
# If a request that needs no network has no answer in this time, p2pd hangs.
ANSWER_TIMEOUT_S = 20.0
# The beginning of an Ed25519 peer id; the 32 bytes of the key follow.
_PEER_ID_HEADER = bytes.fromhex("002408011220")
# Longest path of the temporary folder. A socket's path may have 107 bytes, and our socket is in a subfolder.
_MAX_ROOT_BYTES = 76

log = logging.getLogger(__name__)


class P2pdGone(Exception):
    """p2pd ended or does not answer. The engine restarts it."""


class P2pdRefused(Exception):
    """p2pd answered a request with an error, for example that a peer cannot be reached. Has p2pd's text."""


def missing() -> str | None:
    """Return why p2pd cannot run here, with a remedy; None if it can."""
    if (sys.platform, platform.machine()) not in MACHINES:
        return (
            f"hivemind has p2pd for Linux (x86-64, ARM) and macOS (ARM) only, and this is {sys.platform} on"
            f" {platform.machine()}"
        )
    program = _program()
    if program is None:
        return f"hivemind is not installed; install it with `{INSTALL}`"
    if not os.access(program, os.X_OK):
        return f"{program} is missing or not executable; reinstall hivemind with `{INSTALL}`"
    return None


def peer_bytes(peer: PeerId) -> bytes:
    return _PEER_ID_HEADER + public_key_of(peer)


def peer_of(raw: bytes) -> PeerId | None:
    """Parse a peer id; None if its key is not Ed25519, so that the peer cannot be a member."""
    if len(raw) != len(_PEER_ID_HEADER) + KEY_BYTES or not raw.startswith(_PEER_ID_HEADER):
        return None
    return peer_id_of(raw[len(_PEER_ID_HEADER) :])


def unix_address(path: Path) -> bytes:
    """Return the multiaddress of a Unix socket. (py-multiaddr would drop the leading slash.)"""
    raw = os.fsencode(path)
    return _varint(400) + _varint(len(raw)) + raw


@dataclass(slots=True)
class ControlBytes:
    """Bytes on the control socket. The counters of p2pd's process contain them besides the peers' bytes."""

    told: int = 0  # bytes that we sent to p2pd
    heard: int = 0  # bytes that we received from p2pd


class Wire:
    """One connection to the control socket. Adds its bytes to `count`."""

    def __init__(self, stream: trio.abc.Stream, count: ControlBytes | None = None) -> None:
        self._stream, self._buffer = stream, bytearray()
        self._count = count or ControlBytes()

    async def send(self, message: Any) -> None:
        data = message.SerializeToString()
        await self.write(_varint(len(data)) + data)

    async def write(self, data: bytes) -> None:
        """Write bytes, also once the connection is a stream to a peer. Raises P2pdGone."""
        self._count.told += len(data)
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError:
            raise P2pdGone("p2pd closed its control socket") from None

    async def read(self, size: int) -> bytes:
        """Read some bytes of a stream to a peer; b"" at the end. Raises P2pdGone."""
        if self._buffer:
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            return data
        try:
            data = bytes(await self._stream.receive_some(size))
        except trio.BrokenResourceError:
            raise P2pdGone("the stream was reset") from None
        self._count.heard += len(data)
        return data

    async def receive(self, kind: Any) -> Any:
        """Return the next message. Raises P2pdGone at the end."""
        while (bounds := _bounds(self._buffer)) is None or len(self._buffer) < bounds[1]:
            try:
                chunk = await self._stream.receive_some(65536)
            except trio.BrokenResourceError:
                chunk = b""
            if not chunk:
                raise P2pdGone("p2pd closed its control socket")
            self._count.heard += len(chunk)
            self._buffer += chunk
        start, end = bounds
        message = kind.FromString(bytes(self._buffer[start:end]))
        del self._buffer[:end]
        return message


class P2pd:
    """A running p2pd. Use `open_p2pd` to start one."""

    def __init__(self, control: Path, pid: int) -> None:
        self.pb = messages()
        # A folder that only this user can enter.
        self.folder = control.parent
        self.pid = pid
        self.control = ControlBytes()
        self._control = control

    def end(self) -> None:
        """Kill p2pd, without a goodbye to its peers."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    @contextlib.asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        stream = await self.connect()
        async with stream:
            yield Wire(stream, self.control)

    async def connect(self) -> trio.SocketStream:
        """Open a connection to the control socket. Raises P2pdGone."""
        try:
            return await trio.open_unix_socket(str(self._control))
        except OSError as error:
            raise P2pdGone(f"p2pd's control socket: {error.strerror}") from None

    async def ask(self, patience: float = 0.0, /, **fields: Any) -> Any:
        """Send `Request(**fields)` and return its Response.

        patience: seconds that the requested work may take; the timeout is ANSWER_TIMEOUT_S longer.

        Raises:
            P2pdRefused: p2pd answered with an error.
            P2pdGone: p2pd has ended, or there was no response in time.
        """
        async with self.wire() as wire:
            return await self.answer(wire, patience, **fields)

    async def answer(self, wire: Wire, patience: float = 0.0, /, **fields: Any) -> Any:
        """Do the same as `ask`, on an open connection."""
        with trio.move_on_after(patience + ANSWER_TIMEOUT_S):
            await wire.send(self.pb.Request(**fields))
            response = await wire.receive(self.pb.Response)
            if response.type == self.pb.Response.ERROR:
                raise P2pdRefused(response.error.msg)
            return response
        raise P2pdGone(f"p2pd did not answer within {patience + ANSWER_TIMEOUT_S:.0f} s")


@contextlib.asynccontextmanager
async def open_p2pd(identity: Identity, flags: Sequence[str]) -> AsyncIterator[P2pd]:
    """Run a p2pd with this key, and end it afterwards.

    Raises:
        EngineMissing: p2pd cannot run here.
        P2pdGone: p2pd did not start; the message has the last lines of its log.
    """
    if (reason := missing()) is not None:
        raise EngineMissing(reason)
    folder = _private_folder()
    last_words: deque[str] = deque(maxlen=20)
    try:
        process = _start(folder, identity, flags)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_read_log, process, last_words)
                p2pd = P2pd(folder / "control", process.pid)
                async with await _connect_for_life(p2pd, process, last_words):
                    yield p2pd
                nursery.cancel_scope.cancel()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):  # a killed process is gone in milliseconds
                await trio.to_thread.run_sync(process.wait)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _connect_for_life(
    p2pd: P2pd, process: "subprocess.Popen[bytes]", last_words: Sequence[str]
) -> trio.SocketStream:
    """Wait until p2pd answers, and return the persistent connection whose end would end p2pd."""
    with trio.move_on_after(START_TIMEOUT_S):
        while process.poll() is None:
            with contextlib.suppress(P2pdGone):  # it is not listening yet
                stream = await p2pd.connect()
                await p2pd.answer(Wire(stream, p2pd.control), type=p2pd.pb.Request.PERSISTENT_CONN_UPGRADE)
                return stream
            await trio.sleep(0.02)
    # Wait for the last lines of its log.
    await trio.sleep(0.1)
    raise P2pdGone(
        f"p2pd did not start (exit code {process.poll()}): {' / '.join(last_words) or 'no output'}"
    )


def _start(folder: Path, identity: Identity, flags: Sequence[str]) -> "subprocess.Popen[bytes]":
    program = _program()
    assert program is not None
    key, key_in = os.pipe()
    try:
        os.write(key_in, identity.private_file)
        os.close(key_in)
        command = [
            str(program),
            "-q",
            f"-listen=/unix{folder / 'control'}",
            f"-id=/dev/fd/{key}",
            f"-idleTimeout={START_TIMEOUT_S:.0f}s",
        ]
        return subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[key],
            start_new_session=True,  # Ctrl-C in a terminal must reach only us; we then end p2pd
            # p2pd gets none of our variables, which may contain tokens. One thread is enough for its load;
            # more threads would mostly wait for each other.
            env={"GOLOG_LOG_LEVEL": "error", "GOMAXPROCS": "1"},
        )
    except OSError as error:
        raise EngineMissing(
            f"cannot start {program}: {error.strerror}; reinstall hivemind with `{INSTALL}`"
        ) from None
    finally:
        os.close(key)


async def _read_log(process: "subprocess.Popen[bytes]", last_words: deque[str]) -> None:
    assert process.stderr is not None
    async with trio.lowlevel.FdStream(os.dup(process.stderr.fileno())) as stream:
        process.stderr.close()
        async for chunk in stream:
            for line in chunk.decode(errors="replace").splitlines():
                last_words.append(line[:500])
                log.debug("p2pd: %s", line[:500])


def _private_folder() -> Path:
    """Make a folder for the socket, mode 0700."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > _MAX_ROOT_BYTES:
        root = "/tmp"  # noqa: S108  # mkdtemp makes a private folder in it
    return Path(tempfile.mkdtemp(prefix="swarmd-p2pd-", dir=root))


def _hivemind() -> Path | None:
    found = importlib.util.find_spec("hivemind")  # does not import it
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def _program() -> Path | None:
    folder = _hivemind()
    return folder / "hivemind_cli" / "p2pd" if folder is not None else None


@cache
def messages() -> Any:
    """Load hivemind's module of protocol messages by its path, without importing hivemind.

    Raises EngineMissing.
    """
    folder = _hivemind()
    spec = (
        importlib.util.spec_from_file_location("p2pd_pb2", folder / "proto" / "p2pd_pb2.py")
        if folder is not None
        else None
    )
    if spec is None or spec.loader is None:
        raise EngineMissing(f"hivemind is not installed; install it with `{INSTALL}`")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:  # another version of hivemind, or an incomplete one
        raise EngineMissing(
            f"hivemind's messages cannot be loaded ({error}); reinstall it with `{INSTALL}`"
        ) from None
    return module


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bounds(buffer: bytearray) -> tuple[int, int] | None:
    """Return the start and end of the first message; None if its length is incomplete.

    Raises P2pdGone if the length is malformed or too large.
    """
    length = 0
    for index, byte in enumerate(buffer[:5]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if length > MAX_MESSAGE_BYTES:
                break
            return index + 1, index + 1 + length
    else:
        if len(buffer) < 5:
            return None
    raise P2pdGone("p2pd sent a malformed message")
