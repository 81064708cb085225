"""Probes (`python -m testbed.probe`) as child processes for tests and benchmarks, and their output so far."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from testbed import ROOT, TIMEOUT_S

MIB = 1024 * 1024


class ProbeProcess:
    """A running probe. As a context manager, it ends the process with the block."""

    def __init__(
        self,
        folder: Path,
        *,
        listen: str = "/ip4/127.0.0.1/tcp/0",
        bootstrap: Sequence[str] = (),
        digest: str = "0",
        engine: str = "libp2p",
        module: str = "testbed.probe",  # or another module that takes the same options
        more: Sequence[str] = (),  # further options
        python: Path | str = sys.executable,
    ) -> None:
        command = [
            str(python),
            "-m",
            module,
            *more,
            "--folder",
            str(folder),
            "--listen",
            listen,
            "--digest",
            digest,
            "--engine",
            engine,
        ]
        for address in bootstrap:
            command += ["--bootstrap", address]
        folder.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with (folder / "stderr").open("ab") as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        self._folder = folder
        self._said: dict[str, list[dict[str, Any]]] = {}  # lines by key: there may be many
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "ProbeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def addresses(self) -> list[str]:
        up = self.wait(lambda: self.last("up"), TIMEOUT_S)
        return list(up["up"])

    @property
    def peer_id(self) -> str:
        return str(self.wait(lambda: self.last("up"), TIMEOUT_S)["id"])

    def said(self, key: str) -> list[dict[str, Any]]:
        with self._changed:
            return list(self._said.get(key, ()))

    def last(self, key: str) -> dict[str, Any] | None:
        with self._changed:
            said = self._said.get(key)
            return said[-1] if said else None

    def peers(self) -> list[str]:
        found = self.last("peers")
        return list(found["peers"]) if found else []

    def resident(self) -> float:
        """Return the resident set of the process and its children, in MiB."""
        process, total = psutil.Process(self.process.pid), 0
        for part in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # the process has ended
                total += part.memory_info().rss
        return total / MIB

    def errors(self) -> str:
        return (self._folder / "stderr").read_text()

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Wait until the condition is true, and return its value. Raise TimeoutError if that takes too long.

        The condition is checked at each line of the probe's output.
        """
        until = time.monotonic() + seconds
        while True:
            if found := condition():
                return found
            with self._changed:
                if time.monotonic() > until or (
                    self.process.poll() is not None and not self._reader.is_alive()
                ):
                    latest = {key: said[-1] for key, said in self._said.items()}
                    raise TimeoutError(
                        f"exit code {self.process.poll()}, last said {latest}, errors:"
                        f" {self.errors()[-2000:]}"
                    )
                self._changed.wait(0.5)

    def wait_for_peers(self, count: int, seconds: float) -> None:
        self.wait(lambda: len(self.peers()) >= count, seconds)

    def wait_for_peers_to_be(self, count: int, seconds: float) -> None:
        self.wait(lambda: len(self.peers()) == count, seconds)

    def wait_for_frames(self, count: int, seconds: float) -> None:
        self.wait_for("got", count, seconds)

    def wait_for(self, key: str, count: int, seconds: float) -> None:
        self.wait(lambda: len(self._said.get(key, ())) >= count, seconds)

    def kill(self) -> None:
        """Kill the probe (SIGKILL), so that it cannot take leave of its peers."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the process may have ended
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    for key in message:
                        self._said.setdefault(key, []).append(message)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
