"""Bomb: a blob that is small in transit and has 200 MiB when it is decompressed.

Oversized frames and answers are tested, too.

The code is the product's: `p2p.blobs.blobs`, `swarmd.exchange.fetching`, the inbox. Each bomb has about 200
kB. The bombs state their true size, state 1 MiB or one byte, state no size, hide the content in a second zstd
frame or behind a skippable frame, or ask for a window of 128 MiB. Time and memory are measured in a separate
process: the median time of nine attempts, and the peak resident memory, which includes memory that was freed.
"""

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from p2p.blobs.blobs import BadBlob, content_id, unpack, zstd
from p2p.engines.memory import MemorySwarm
from p2p.envelope import MAX_FRAME_BYTES
from p2p.types import PeerId, Verdict
from swarmd.exchange import offers
from swarmd.exchange.events import Ask, Output
from swarmd.exchange.fetching import Fetch, Fetcher
from swarmd.exchange.offers import Offered
from swarmd.types import TaskRef
from tests import ROOT
from tests.attacks.harness import Attack, show, worst
from tests.doubles import Clock, memory_member

MIB = 1024 * 1024
INFLATED = 200 * MIB


def inflatable() -> list[bytes]:
    """Return 200 MiB in parts of 1 MiB: zeros, with some noise so that they compress to about 200 kB."""
    rng = random.Random(0)
    return [rng.randbytes(900) + bytes(MIB - 900) for _ in range(INFLATED // MIB)]


def compressed(*, says_size: bool, window_log: int = 0) -> bytes:
    stream = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log or 20})
    stream.set_pledged_input_size(INFLATED if says_size else None)
    return b"".join([*map(stream.compress, inflatable()), stream.flush()])


def lying(bomb: bytes, claim: int) -> bytes:
    """Return the bomb with another stated size.

    The size field is rewritten with four bytes (RFC 8878, 3.1.1.1).
    """
    single = bomb[4] & 0b00100000
    window = b"" if single else bomb[5:6]
    size = (bool(single), 2, 4, 8)[bomb[4] >> 6]
    header = 5 + len(window) + size
    return bomb[:4] + bytes([0b10000000 | single]) + window + claim.to_bytes(4, "little") + bomb[header:]


def bombs() -> dict[str, bytes]:
    honest, silent = compressed(says_size=True), compressed(says_size=False)
    small = zstd.compress(b"harmless")
    skipped = b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + bytes(8)
    return {
        "says 200 MiB": honest,
        "says 1 MiB": lying(honest, MIB),
        "says 1 byte": lying(honest, 1),
        "says nothing": silent,
        "second frame": small + honest,
        "behind a skipped one": skipped + honest,
        "128 MiB window": compressed(says_size=True, window_log=27),
    }


def resident(*, anew: bool = False) -> int:
    """Return the peak resident bytes of this process. anew: reset the peak first.

    getrusage would not do on Linux, because its value is inherited from the parent process.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * next(
        int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
    )


def refused(blob: bytes) -> bool:
    try:
        unpack(blob)
    except BadBlob:
        return True
    return False


def fetched(bomb: bytes) -> bytes | None:
    """Return the result of a fetch whose holder offered this bomb and answers with it."""
    outputs = list[Output]()
    fetcher, holder = Fetcher(outputs.append), PeerId("attacker")
    item = Offered(holder, TaskRef("bf", 1), content_id(bomb), len(bomb), holder)
    fetcher.begin(Fetch(item, len(bomb), [holder], 0.0))
    fetcher.advance(0.0)
    (ask,) = [output for output in outputs if isinstance(output, Ask)]
    found = fetcher.answered(ask.number, offers.decode_blob(bomb), 0.1)
    return found[1].data if found else None


def measured() -> dict[str, dict[str, float]]:
    """Return the cost of each hostile input.

    A cost consists of the input's bytes, whether it was accepted, milliseconds, and additional resident MiB.
    """
    # A first call, so that the measurement does not include imports.
    refused(zstd.compress(b"x" * 1000) + b"x")
    figures: dict[str, dict[str, float]] = {}

    def measure(name: str, size: int, attempt: Callable[[], bool]) -> None:
        before, held, times = resident(anew=True), True, []
        for _ in range(9):
            begun = time.process_time()
            held = attempt() and held
            times.append(1000 * (time.process_time() - begun))
        figures[name] = {
            "bytes": size,
            "taken": not held,
            "ms": sorted(times)[4],
            "more_MiB": (resident() - before) / MIB,
        }

    thrown = {Path(name).stem: Path(name).read_bytes() for name in sys.stdin.read().split("\n") if name}
    for name, bomb in thrown.items():
        measure(name, len(bomb), lambda bomb=bomb: refused(bomb))  # type: ignore[misc]
    bomb = thrown["says 1 MiB"]
    # The bomb matches its offer, so only decompression reveals it.
    blob = fetched(bomb)
    measure("fetched as offered", len(bomb), lambda: blob is not None and refused(blob))
    huge = bytes(MAX_FRAME_BYTES * 64)
    victim = memory_member(MemorySwarm(), 3, Clock())
    measure(
        "frame of 16 MiB", len(huge), lambda: victim.deliver(huge, PeerId("hostile")) is not Verdict.ACCEPT
    )
    return figures


def throw(folder: Path) -> dict[str, dict[str, float]]:
    names = []
    for name, bomb in bombs().items():
        (path := folder / f"{name}.zst").write_bytes(bomb)
        names.append(str(path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.test_bomb", "--measure"],
        input="\n".join(names),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    figures: dict[str, dict[str, float]] = json.loads(done.stdout)
    for name, figure in figures.items():
        show(f"bomb, {name}", figure)
    return figures


def test_every_bomb_is_rejected_quickly_and_without_much_memory(tmp_path: Path) -> None:
    figures = throw(tmp_path)
    assert len(figures) == 9 and not worst(figures, "taken") and worst(figures, "more_MiB") < 16
    assert worst(figures, "ms") < 50  # 5 ms on an idle machine
    assert 150_000 < figures["says 200 MiB"]["bytes"] < 256 * 1024


def attack(folder: Path) -> dict[str, float]:
    found = throw(folder)
    return {figure: worst(found, figure) for figure in ("taken", "ms", "more_MiB")}


ATTACK = Attack(attack, {"taken": 0, "ms": 5, "more_MiB": 16})

if __name__ == "__main__" and sys.argv[1:] == ["--measure"]:
    print(json.dumps(measured()))
