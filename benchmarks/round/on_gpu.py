"""Runs all checks and benchmarks that need a GPU, the most important first, and keeps their output.

    python -m benchmarks.round.on_gpu [--only NAME …] [--minutes 60] [--out on-gpu] [--device cuda|cpu]

The parts (`PARTS`) are other programs of this repository: the GPU tests, parity of sampler and learner with
an adapter, models of real sizes with random weights, a round against TRL, a node. If a part fails, the next
parts still run; no part begins once the minutes are over. OUT/NAME.txt has a part's whole output;
OUT/table.md has the device, the versions and a table. TRL runs from a separate environment, which is large
and is created at the first run. --device cpu tests this program itself.

The exit code is 1 if a part failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from testbed import ROOT

HALF_BILLION: Final = "-m benchmarks.round.half_billion --device DEVICE --tokens 256 --rounds 3 --memory"
PARTS: Final = MappingProxyType(
    {
        "tests": "-m pytest -q -m gpu -p no:cacheprovider -n0 tests/swarmd",
        "adapter": "-m benchmarks.round.adapter_bfloat16 --device DEVICE",
        "half-billion": f"{HALF_BILLION} MEMORY",
        "trl": "-m benchmarks.round.cost --peer trl --device DEVICE --size 360m --tokens 256 --pairs 2",
        "join": "-m swarmd join --model tiny --device DEVICE --rounds 50 --state-dir STATE",
        "mu": "-m swarmd plan replay --model tiny-latent --device DEVICE",
        "small-card": f"{HALF_BILLION} 5.6",
        "all-weights": f"{HALF_BILLION} MEMORY --lora off",
        "nf4": f"{HALF_BILLION} 5.6 --dtype nf4",
        "qwen3.5": f"{HALF_BILLION} MEMORY --model qwen3.5-0.8b",
        "one-and-a-half": f"{HALF_BILLION} MEMORY --model qwen2.5-1.5b",
        "trl-14m": "-m benchmarks.round.cost --peer trl --device DEVICE --size 14m --tokens 256 --pairs 2",
    }
)
# Runs in a separate process, which frees the device's memory when it ends.
ABOUT: Final = """
import json, platform, sys, psutil, torch, transformers, peft
cuda = sys.argv[1] == "cuda"
free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
print(json.dumps({
    "device": torch.cuda.get_device_name() if cuda else platform.machine(), "GB free": round(free / 1e9, 1),
    "CUDA": torch.version.cuda, "Python": platform.python_version(), "torch": torch.__version__,
    "transformers": transformers.__version__, "peft": peft.__version__,
}))
"""
# Seconds between SIGTERM and SIGKILL for a part whose time is over.
GRACE_S: Final = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round.on_gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of all parts together (60)")
    parser.add_argument("--out", type=Path, default=Path("on-gpu"), help="folder for the output (on-gpu)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = described(arguments.device)
    if found is None:
        parser.error("torch cannot use a CUDA device here. Run `swarmd doctor model`: it says why.")
    about = "\n".join(f"- {name}: {value}" for name, value in found.items())
    print(about, flush=True)
    lines, failed, until = [], False, time.monotonic() + 60 * arguments.minutes
    for name in arguments.only:
        words = PARTS[name].replace("DEVICE", arguments.device).replace("MEMORY", f"{found['GB free']:.0f}")
        print(f"\n== {name}: python {words}", flush=True)
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as state:
            command = [sys.executable, *(state if word == "STATE" else word for word in words.split())]
            end = play(command, out / f"{name}.txt", until - begun) if begun < until else "not begun"
        failed |= end != "0"
        lines.append(f"| {name} | {end} | {time.monotonic() - begun:.0f} | `python {words}` |")
        table = "\n".join(["| part | exit code | s | command |", "|---|---|---|---|", *lines])
        (out / "table.md").write_text(f"{about}\n\n{table}\n", encoding="utf-8")
    print(f"\n{table}\n\nwhat each said: {out}")
    sys.exit(failed)


def described(device: str) -> dict[str, Any] | None:
    """Describe the device and the versions; return None if torch finds no such device."""
    asked = subprocess.run(
        [sys.executable, "-c", ABOUT, device], stdout=subprocess.PIPE, text=True, check=False
    )
    if asked.returncode:
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {**json.loads(asked.stdout), "commit": commit}


def play(command: Sequence[str], said: Path, limit_s: float) -> str:
    """Run a part; print and save its output. Return its exit code, or a text if it timed out."""
    tee = subprocess.Popen(["tee", said], stdin=subprocess.PIPE)
    part = subprocess.Popen(
        command, stdout=tee.stdin, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )
    try:
        return str(part.wait(limit_s))
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # the part is killed below
            part.wait(GRACE_S)
        return "not done in time"
    finally:
        if part.poll() is None:
            os.killpg(part.pid, signal.SIGKILL)
            part.wait()
        tee.communicate()


if __name__ == "__main__":
    main()
