"""Keeps replay protection over restarts: a log on disk of the admitted frames.

No frame is admitted twice, and new ones are not refused.

Theory of operation. The file is one msgpack snapshot (`replays.Memory`) followed by a journal: a record of
RECORD_BYTES for each frame admitted since, appended before the frame is used. The kernel has what the process
wrote, so kill -9 loses none of it. A process that reads the file in the same boot of the machine, or after a
clean end, knows every frame: it refuses those, and admits new frames of a peer with a slow clock at once. A
power cut may lose the journal's end. So the file also has a promise, which is durable (fsync) before it is
needed, about once a minute: no frame sent after PROMISED was admitted. A process that may have lost records
refuses everything sent up to then. The promise is never more than PROMISE_S after the moment it was made, by
our clock, whatever times the frames say. Without a file, or with a damaged one, frames sent before now are
refused; also where the file is from the future, because the clock was set back.

    magic 8 | length of the snapshot 4 | its CRC-32 4 | snapshot |
    records: author's key 32, sequence 8, sent at 8, CRC-32 4

A record with the promise alone has zeros for the rest. Numbers are big-endian. The file is written anew where
the journal is longer than the snapshot, so that at most half of all that is written is snapshots. Where a
write fails, the file is removed: the next start then refuses all older frames. At the limits of `replays` the
file has at most MAX_FILE_BYTES.
"""

import contextlib
import errno
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from p2p import durable
from p2p.admission.replays import AHEAD_S, NOBODY, Memory, RememberedAuthor, Replays, Trace

MAGIC = b"swseen\x00\x01"  # the last byte is the version
MAX_FILE_BYTES = 32 * 1024 * 1024
# The file is not written anew while its journal is shorter.
MIN_JOURNAL_BYTES = 256 * 1024
# The times of sending that one fsync covers.
PROMISE_S = 60.0
# When a file that could not be written is tried again.
RETRY_S = 60.0
_HEADER = struct.Struct(">8sII")
_RECORD = struct.Struct(">32sQQ")
_CRC = struct.Struct(">I")
RECORD_BYTES = _RECORD.size + _CRC.size
_NOBODY = bytes(32)

log = logging.getLogger(__name__)


class _Snapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    boot: str  # of the machine, under which it was written
    closed: bool  # the process that wrote it ended cleanly
    promised: int  # ms
    start: int  # ms, as in `Memory`
    horizon: int  # ms
    # Key, horizon, and of its frames the times of sending and sequences, 8 bytes each
    authors: list[tuple[bytes, int, bytes, bytes]]


def boot_id() -> str:
    """Return the id of this boot of the machine; empty where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class ReplayLog:
    """The log of one member.

    `load` it once, `note` each admitted frame, and `save` when `due` and at the end. `save` may run in
    another thread: call `begin` before the memory is taken, and what is noted until it ends is in the file
    too.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, boot: str | None = None) -> None:
        self._path, self._clock = path, clock
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()  # of all below
        self._journal: int | None = None  # file descriptor
        self._written = self._snapshot = 0  # bytes of journal and of snapshot
        self._since: bytearray | None = None  # records noted since `begin`
        self._promised = 0  # ms
        self._retry_at = math.inf

    @property
    def due(self) -> bool:
        """Return whether it is time to `save`."""
        return self._written > max(MIN_JOURNAL_BYTES, self._snapshot) or (
            self._journal is None and self._clock() >= self._retry_at
        )

    def load(self) -> Memory:
        """Return what still matters of earlier runs. From here on this process writes the file."""
        memory = self._read()
        now = self._ms()
        if memory is None:
            memory = Memory(start=now)
        elif memory.start > now + int((PROMISE_S + AHEAD_S) * 1000):
            log.warning(
                "the clock was set back since %s was written: frames sent before now are refused", self._path
            )
            memory = Memory(now, memory.horizon, memory.authors)
        self.save(memory)
        return memory

    def note(self, trace: Trace) -> None:
        """Note an admitted frame, which may be used when this returns."""
        with self._lock:
            if trace.sent_at > self._promised:
                self._promised = max(self._ms() + int(PROMISE_S * 1000), trace.sent_at)
                self._append(Trace(_NOBODY, 0, self._promised), sync=True)
            self._append(trace)

    def begin(self) -> None:
        """Mark that the memory for the next `save` is taken now."""
        with self._lock:
            self._since = bytearray()

    def save(self, memory: Memory, *, closed: bool = False) -> None:
        """Write the file anew. closed: nothing more will be noted."""
        with self._lock:
            self._retry_at = math.inf
            self._promised = max(self._promised, self._ms())
            promised = self._promised
        authors = [
            (key, horizon, _packed(sent_at), _packed(sequences))
            for key, horizon, sent_at, sequences in memory.authors
        ]
        snapshot = msgspec.msgpack.encode(
            _Snapshot(self._boot, closed, promised, memory.start, memory.horizon, authors)
        )

        def swap(draft: Path, path: Path) -> None:
            with self._lock:
                self._close()
                self._since, since = None, self._since or b""
                if since:
                    with draft.open("ab") as file:
                        file.write(since)
                    durable.sync(draft)
                draft.replace(path)
                durable.sync(path.parent)
                self._written, self._snapshot = len(since), len(snapshot)
                if not closed:
                    self._journal = os.open(path, os.O_WRONLY | os.O_APPEND)

        try:
            durable.replace(
                self._path, _HEADER.pack(MAGIC, len(snapshot), crc32(snapshot)) + snapshot, step=swap
            )
        except OSError as error:
            with self._lock:
                self._give_up(error)

    def _append(self, trace: Trace, *, sync: bool = False) -> None:
        record = _RECORD.pack(*trace)
        record += _CRC.pack(crc32(record))
        if self._since is not None:
            self._since += record
        if self._journal is None:
            return
        try:
            if os.write(self._journal, record) != RECORD_BYTES:
                self._give_up(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
                return
            if sync:
                os.fsync(self._journal)
            self._written += RECORD_BYTES
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Remove the log: a part of it would admit replays; without one, older frames are refused."""
        log.warning(
            "cannot write %s: %s; after a restart only frames sent from then on are admitted",
            self._path,
            error.strerror,
        )
        self._close()
        self._since = None
        with contextlib.suppress(OSError):  # on a full disk a file can still be removed
            self._path.unlink(missing_ok=True)
        self._retry_at = self._clock() + RETRY_S

    def _close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
        self._journal, self._written = None, 0

    def _ms(self) -> int:
        return int(self._clock() * 1000)

    def _read(self) -> Memory | None:
        """Read the file; None where there is no usable one."""
        try:
            with self._path.open("rb") as file:
                return self._parse(file.read(MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError, struct.error) as error:
            with contextlib.suppress(OSError):  # the folder is not writable: the next `save` says so
                aside = durable.set_aside(self._path)
                log.warning(
                    "%s was damaged (%s) and is now %s; frames sent before now are refused",
                    self._path,
                    error,
                    aside,
                )
            return None

    def _parse(self, data: bytes) -> Memory:
        """Parse the file's content. Raises ValueError, MsgspecError or struct.error."""
        magic, length, checksum = _HEADER.unpack_from(data)
        body = data[_HEADER.size : _HEADER.size + length]
        if magic != MAGIC or len(body) != length or crc32(body) != checksum:
            raise ValueError("not what was written")
        snapshot = msgspec.msgpack.decode(body, type=_Snapshot)
        authors = [
            RememberedAuthor(key, horizon, _unpacked(at), _unpacked(numbers))
            for key, horizon, at, numbers in snapshot.authors
        ]
        replays = Replays(0, Memory(snapshot.start, snapshot.horizon, authors))
        self._promised = snapshot.promised
        journal = data[_HEADER.size + length :]
        traces = _records(journal)
        for trace in traces:
            if trace.author == _NOBODY:
                self._promised = max(self._promised, trace.sent_at)
            else:
                replays.remember(trace, NOBODY, 0.0)
        memory, start = replays.memory(), snapshot.start
        if len(traces) < len(journal) // RECORD_BYTES:  # damaged, and what came after the damage is lost
            start = max(start, self._promised + 1, self._ms())
        elif not snapshot.closed and (self._boot == "" or snapshot.boot != self._boot):
            start = max(start, self._promised + 1)
        return Memory(start, memory.horizon, memory.authors)


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f">{len(numbers)}Q", *numbers)


def _unpacked(numbers: bytes) -> Sequence[int]:
    """Unpack 8-byte numbers. Raises struct.error."""
    return struct.unpack(f">{len(numbers) // 8}Q", numbers)


def _records(journal: bytes) -> list[Trace]:
    """Parse the journal's records up to the first that is not whole.

    Half a record at the end was never noted: the process was killed while it wrote.
    """
    traces: list[Trace] = []
    for at in range(0, len(journal) - RECORD_BYTES + 1, RECORD_BYTES):
        record = journal[at : at + _RECORD.size]
        if _CRC.unpack_from(journal, at + _RECORD.size)[0] != crc32(record):
            break
        traces.append(Trace(*_RECORD.unpack(record)))
    return traces
