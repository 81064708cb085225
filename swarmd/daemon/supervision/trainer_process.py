"""The trainer's process: starts it, sends it messages, watches it, and restarts it if it dies (trio).

Also runs the processes that pass the node's figures to experiment trackers.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from swarmd import link
from swarmd.daemon.supervision.restarts import Death, Deaths
from swarmd.daemon.supervision.watchdog import Stuck, Watchdog
from swarmd.state.logs import LOG_BYTES
from swarmd.system.exits import EXIT_TIMEOUT_S, exit_words

log = logging.getLogger(__name__)

# Seconds between two checks whether the trainer is stuck.
CHECK_EVERY_S = 1.0


class TrainerChild:
    """Runs the trainer, `python -m MODULE FD`, until it finishes, is stopped, or dies too often.

    Args:
        on_message: called for every message, in order.
        on_death: called if it died and will be restarted.
        on_stuck: called if it is stuck (it is killed if that lasts), and with None when it works again.
    """

    def __init__(
        self,
        start: link.StartTrainer,
        log_file: Path,
        on_message: Callable[[link.ToDaemon], None],
        on_death: Callable[[Death], None],
        on_stuck: Callable[[Stuck | None], None] = lambda _: None,
        watchdog: Watchdog | None = None,
        module: str = "swarmd.trainer",
        lingers: float = EXIT_TIMEOUT_S,
    ) -> None:
        self._module, self._lingers, self.start, self.log_file = module, lingers, start, log_file
        self.on_message, self.on_death, self.on_stuck = on_message, on_death, on_stuck
        self.watchdog = watchdog or Watchdog()
        self._stuck: Stuck | None = None
        # Why it ended, if more is known than its exit status.
        self._ending = ""
        self.pid: int | None = None
        self.restarts = 0
        self.failed: link.TrainerFailed | None = None
        self.finished = False
        self.ready = False  # whether the model is loaded, so that rounds can run
        self._told_to_stop = trio.Event()
        self._deaths = Deaths()
        self._outbox = link.MessageQueue()
        self._wake = trio.Event()

    def tell(self, message: link.ToTrainer) -> None:
        """Queue a message and return at once.

        Messages that a dead trainer did not read go to the next one.
        """
        self.watchdog.note_sent(message)
        self._outbox.put(message)
        self._wake.set()

    def stop(self, *, now: bool = False) -> None:
        """Let the trainer finish its round, or with `now` cut it; then it saves and exits.

        A trainer that has not begun is killed, as there is nothing to save.
        """
        if not self.ready:
            self.kill()
            return
        self._told_to_stop.set()
        self.tell(link.Stop(now))

    def kill(self) -> None:
        """Kill it. The rounds since the last checkpoint are lost."""
        self._told_to_stop.set()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    async def run(self) -> None:
        """Run trainers until one finished or was stopped, or they died too often (then `failed` says why)."""
        while True:
            lasting = False
            try:
                process, ours = await self._start()
            except OSError as error:
                # The limit of processes or open files is reached, or the log cannot be written.
                cause = f"it cannot be started: {error}"
            else:
                status = await self._talk_until_end(process, ours)
                cause = self._ending or _cause(status, self.log_file)
                # The process was killed, perhaps by a person or because memory was short for a moment, so the
                # cause need not come again.
                lasting = not self.ready and status not in (-signal.SIGKILL, -signal.SIGTERM)
            if self.finished or self._told_to_stop.is_set() or self.failed is not None:
                return
            death = self._deaths.died(cause, lasting=lasting)
            if death.hopeless:
                how = "in the same way, before its first" if death.again else "without finishing a new"
                said = f"the trainer died {death.count} times in a row {how} round: {death.cause}"
                self.failed = link.TrainerFailed(said, 1)
                return
            self.on_death(death)
            with trio.move_on_after(death.backoff):
                await self._told_to_stop.wait()
            if self._told_to_stop.is_set():
                return
            self.restarts += 1

    async def _start(self) -> tuple[trio.Process, socket.socket]:
        """Start a trainer process; return it and our end of its socket.

        Raises OSError.
        """
        self.ready = False
        with contextlib.suppress(FileNotFoundError):
            # Keep the previous run's log.
            self.log_file.replace(self.log_file.with_name(self.log_file.name + ".1"))
        ours, theirs = socket.socketpair()
        try:
            with theirs, self.log_file.open("ab") as output:
                # Append mode, so that the file can be truncated while the trainer writes to it.
                process = await trio.lowlevel.open_process(
                    # -P: import no file of the working folder
                    [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C must reach only the daemon, which tells the trainer
                    # If other programs compute as well, threads that spin while they wait for each other take
                    # four times as long.
                    env={"OMP_WAIT_POLICY": "passive", **os.environ, "TOKENIZERS_PARALLELISM": "false"},
                )
        except OSError:
            ours.close()
            raise
        return process, ours

    async def _talk_until_end(self, process: trio.Process, ours: socket.socket) -> int:
        self.pid, self._stuck, self._ending = process.pid, None, ""
        if self._told_to_stop.is_set():
            # The request to stop came while the process was starting.
            self.kill()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        try:
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream)
                nursery.start_soon(self._watch, process.pid)
                await self._read(stream)
                nursery.cancel_scope.cancel()
            with trio.move_on_after(self._lingers):
                await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                status = await process.wait()
            self.pid = None
        return status

    async def _read(self, stream: trio.SocketStream) -> None:
        unpacker = link.Unpacker[link.ToDaemon](link.ToDaemon)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in stream:
                try:
                    messages = unpacker.feed(data)
                except ValueError as error:
                    # msgspec's errors are ValueErrors.
                    self._ending = (
                        f"it is of another version of swarmd than the daemon ({error}): stop the node and"
                        " join again"
                    )
                    return
                for message in messages:
                    self._note(message)
                    self.watchdog.note_received(message)
                    self.on_message(message)

    async def _watch(self, pid: int) -> None:
        self.watchdog.started(trio.current_time())
        while True:
            await trio.sleep(CHECK_EVERY_S)
            _keep_short(self.log_file)
            if (stuck := self.watchdog.check(trio.current_time())) != self._stuck:
                self._stuck = stuck
                self.on_stuck(stuck)
            if stuck is not None and stuck.hopeless:
                log.error("the trainer is killed: %s", stuck.cause)
                self._ending = f"killed, for it was stuck: {stuck.cause}"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return

    def _note(self, message: link.ToDaemon) -> None:
        match message:
            case link.TrainerReady():
                self.ready = True
            case link.RoundDone():
                self._deaths.progress(message.line.round)
            case link.TrainerFailed():
                self.failed = message
            case link.Stopped():
                self.finished = True

    async def _write(self, stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_all(link.pack(self.start))
            while True:
                self._wake = trio.Event()
                while (message := self._outbox.pop()) is not None:
                    await stream.send_all(link.pack(message))
                await self._wake.wait()


def _keep_short(log_file: Path) -> None:
    """Limit the log's size: copy a long log to FILE.1, like swarmd.log, and truncate it.

    It is copied, not renamed, because the process goes on writing to the open file.
    """
    with contextlib.suppress(OSError):
        if log_file.stat().st_size <= LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            # Truncate it even if the copy fails on a full disk.
            shutil.copyfile(log_file, log_file.with_name(log_file.name + ".1"))
        os.truncate(log_file, 0)


# The line after a traceback, which names the error. CUDA adds more lines, which are the same for every error.
# If there are several trainers, torch puts the rank in front of each line.
_RAISED = re.compile(r'^(|\[rank0\]: )  File ".*\n(?:\1 .*\n)*\1(.+: \n+.+|.+)', re.MULTILINE)


def _cause(status: int, log_file: Path) -> str:
    """Describe why the trainer ended: its exit status and, unless it was killed, the end of its log."""
    if status < 0:
        return exit_words(status)
    with contextlib.suppress(OSError):
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - 4096))
            text = file.read().decode(errors="replace").strip()
        lines = [found[2] for found in _RAISED.finditer(text)] or text.splitlines()
        if lines:
            return f"{' '.join(lines[-1].split())} ({exit_words(status)}; more in {log_file})"
    return f"{exit_words(status)}; see {log_file}"


LOG_FILE = "tracking.log"


async def run_tracker(name: str, folder: Path, peer: str, talk: Callable[[str], None]) -> None:
    """Run a tracker until cancelled.

    A failure is reported once, and the tracker is not restarted: the figures are in metrics.jsonl.
    """
    try:
        with (folder / LOG_FILE).open("ab") as output:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", "-m", "swarmd.daemon.tracking", str(folder), peer, name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
    except OSError as error:
        talk(f"{name} gets no figures: its process cannot be started: {error}")
        return
    try:
        while process.returncode is None:
            _keep_short(folder / LOG_FILE)
            with trio.move_on_after(CHECK_EVERY_S):
                await process.wait()
        talk(
            f"{name} gets no more figures: its process ended with status {process.returncode}; see"
            f" {folder / LOG_FILE}"
        )
    finally:
        if process.returncode is None:
            process.terminate()
            # Give it time to write its last figures.
            with trio.CancelScope(shield=True), trio.move_on_after(10.0):
                await process.wait()
            if process.returncode is None:
                process.kill()
