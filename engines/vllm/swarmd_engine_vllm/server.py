"""`vllm serve` as a child process: its start, readiness, error output and end."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from swarmd.policy.inference.engine import EngineFailed, EngineOptions, NoEngine
from swarmd_engine_vllm import guard

SERVED: Final = "base"  # the base model's name in requests
# The values that --max-lora-rank accepts (vllm/config/lora.py).
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Seconds between two checks whether the server is ready.
POLL_S: Final = 0.2
# Lines of the server's log in a message.
LAST_LINES: Final = 8

# Variables of swarmd's environment that the server must not see.
_LEFT_OUT: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_SET: Final = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # /v1/load_lora_adapter
    "VLLM_SERVER_DEV_MODE": "1",  # /sleep, /wake_up, /collective_rpc, /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}


def command(asked: EngineOptions, socket: Path) -> list[str]:
    """Return the command that starts the server. Raises NoEngine.

    The server listens on a Unix socket in a private folder, because its development routes need no API key.
    """
    if asked.device == "mps":
        raise NoEngine('vLLM does not run on Apple\'s MPS. Set generate.engine to "own".')
    line = [
        *_program(asked.python),
        "serve",
        str(asked.model),
        "--uds",
        str(socket),
        "--served-model-name",
        SERVED,
        "--dtype",
        asked.dtype,
    ]
    # Log-probabilities include the temperature, and only the request's sampling settings count.
    line += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    # An access log with a line for each question would fill the disk in weeks.
    line += ["--disable-uvicorn-access-log"]
    if asked.lora_rank is not None:
        ranks = [rank for rank in RANKS if rank >= asked.lora_rank]
        if not ranks:
            raise NoEngine(
                f"vLLM supports adapters up to rank {RANKS[-1]}. Lower model.lora_rank, or set"
                ' generate.engine to "own".'
            )
        line += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(ranks[0])]
    if asked.device == "cuda":
        line += ["--gpu-memory-utilization", str(asked.memory), "--enable-sleep-mode"]
    return [*line, *asked.arguments]


def _program(python: str) -> list[str]:
    if python:
        interpreter = Path(python).expanduser()
        if not interpreter.is_file():
            raise NoEngine(
                f"generate.engine_python is {python}, and there is no such file. Name the interpreter of"
                " vLLM's environment."
            )
        return [str(interpreter), "-m", "vllm.entrypoints.cli.main"]
    found = shutil.which("vllm")
    if found is None:
        raise NoEngine(
            "vLLM is not found. Install it in its environment: `python3 -m venv ~/vllm && ~/vllm/bin/pip"
            ' install vllm==0.33.0`, then set generate.engine_python to "~/vllm/bin/python"; or set'
            " generate.engine_url to a server that runs already."
        )
    return [found]


class ServerProcess:
    """The server's process. It ends on `close`, and also if this process ends in any way (guard.py)."""

    def __init__(self, line: list[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start the server.

        log: a file for the server's output. If this process is killed, the file's folder is removed.
        """
        self.log = log
        kept = {name: value for name, value in environment.items() if name not in _LEFT_OUT}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(log.parent), *line],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**kept, **_SET},
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until the server is ready. Raises EngineFailed if the server ends first or takes longer."""
        until = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise EngineFailed(
                    f"vLLM ended while it started. Its last lines:\n{self.last_lines()}\nFix the error"
                    ' (generate.engine_memory, generate.engine_args), or set generate.engine to "own".'
                )
            if time.monotonic() > until:
                raise EngineFailed(
                    f"vLLM was not ready after {seconds:g} s. Its last lines:\n{self.last_lines()}\nRaise"
                    " generate.engine_start_seconds if it only needs longer, or set generate.engine to"
                    ' "own".'
                )
            time.sleep(POLL_S)

    def last_lines(self) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            # The log cannot be read, so the message has no lines.
            lines = []
        return "\n".join(f"    {line}" for line in lines[-LAST_LINES:]) or "    (none)"

    def close(self) -> None:
        """End the server. May be called again."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=guard.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
