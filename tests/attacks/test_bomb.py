"""Bomb: what is small as it travels and 200 MiB when it is inflated; and frames and answers larger than they may be.

The code is the real one: `p2p.blobs.blobs`, `p2p.blobs.fetch` through a `Member` in a memory swarm, the inbox. The bombs weigh about
200 kB. One says how large it is; one says 1 MiB and holds 200; one says nothing; one hides it in a second zstd frame, behind one that may
be skipped, or asks for a window of 128 MiB. Time and memory are measured in a process of its own: of nine attempts the middle one, and the
highest that the process resided in while it made them, so that nothing that was given back is forgotten.

`python -m tests.attacks.test_bomb` prints the figures; `python -m benchmarks.attack bomb --json` gives them as one object.
"""

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
import zstandard

from p2p.blobs.blobs import BadBlob, content_id, unpack
from p2p.blobs.fetch import FETCH, Want, answer
from p2p.engines.memory import MemorySwarm
from p2p.envelope import MAX_FRAME
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import PeerId, Reason, Verdict

TOPIC = Topic("main", "0123456789abcdef")
NOW = 1_700_000_000.0
MIB = 1024 * 1024
INFLATED = 200 * MIB


def inflatable() -> list[bytes]:
    """200 MiB in parts of 1 MiB: zeros, with a little noise so that the whole weighs about 200 kB."""
    rng = random.Random(0)
    return [rng.randbytes(900) + bytes(MIB - 900) for _ in range(INFLATED // MIB)]


def compressed(*, says_size: bool, window_log: int = 0) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log or 20)
    packer = zstandard.ZstdCompressor(compression_params=parameters)
    stream = packer.compressobj(size=INFLATED) if says_size else packer.compressobj()
    return b"".join([*map(stream.compress, inflatable()), stream.flush()])


def lying(bomb: bytes, claim: int) -> bytes:
    """The same content under another claim of its size: the field is rewritten to four bytes (RFC 8878, 3.1.1.1)."""
    header = zstandard.frame_header_size(bomb)
    single = bomb[4] & 0b00100000
    window = b"" if single else bomb[5:6]
    return bomb[:4] + bytes([0b10000000 | single]) + window + claim.to_bytes(4, "little") + bomb[header:]


def bombs() -> dict[str, bytes]:
    honest, silent = compressed(says_size=True), compressed(says_size=False)
    small = zstandard.ZstdCompressor().compress(b"harmless")
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
    """Bytes; the most that this process had, anew: from now on. (On Linux what getrusage says is inherited from who started us.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def refused(blob: bytes) -> bool:
    try:
        unpack(blob)
    except BadBlob:
        return True
    return False


def member(swarm: MemorySwarm, n: int) -> Member:
    identity = Identity.from_seed(bytes([n]) * 32)
    return Member(identity, TOPIC, partial(swarm.join, identity.peer_id), sequence=itertools.count(1), clock=lambda: NOW)


def fetched(reply: Callable[[bytes], bytes], want: Want) -> tuple[bytes | None, Member]:
    """What the victim gets when the attacker answers its question like this."""
    swarm = MemorySwarm()
    victim, attacker = member(swarm, 1), member(swarm, 2)

    def hostile(_peer: PeerId, question: bytes) -> bytes:
        return reply(question)

    attacker.answers[FETCH] = hostile

    async def fetch() -> bytes | None:
        return await victim.fetch(Want(want.id, want.size, [attacker.identity.peer_id]))

    return trio.run(fetch), victim


def measured() -> dict[str, dict[str, float]]:
    """For each thing thrown at us: its bytes, whether it was refused, milliseconds, and bytes more than before that were resident."""
    refused(zstandard.ZstdCompressor().compress(b"x" * 1000) + b"x")  # so that nothing is loaded in what is measured
    figures: dict[str, dict[str, float]] = {}

    def measure(name: str, size: int, attempt: Callable[[], bool]) -> None:
        before, held, times = resident(anew=True), True, []
        for _ in range(9):
            begun = time.perf_counter()
            held = attempt() and held
            times.append(1000 * (time.perf_counter() - begun))
        figures[name] = {"bytes": size, "refused": held, "ms": sorted(times)[4], "more_bytes": resident() - before}

    thrown = {Path(name).stem: Path(name).read_bytes() for name in sys.stdin.read().split("\n") if name}
    for name, bomb in thrown.items():
        measure(name, len(bomb), lambda bomb=bomb: refused(bomb))  # type: ignore[misc]
    bomb = thrown["says 1 MiB"]
    want = Want(content_id(bomb), len(bomb), [])
    blob, _ = fetched(lambda _: answer([bomb]), want)  # it is what was offered: only inflating it shows what it is
    measure("fetched as offered", len(bomb), lambda: blob is not None and refused(blob))
    huge = bytes(MAX_FRAME * 64)
    victim = member(MemorySwarm(), 3)
    measure("frame of 16 MiB", len(huge), lambda: victim.deliver(huge, PeerId("hostile")) is not Verdict.ACCEPT)
    return figures


def attack(folder: Path) -> dict[str, dict[str, float]]:
    names = []
    for name, bomb in bombs().items():
        (path := folder / f"{name}.zst").write_bytes(bomb)
        names.append(str(path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.test_bomb", "--measure"], input="\n".join(names), capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    figures: dict[str, dict[str, float]] = json.loads(done.stdout)
    for name, figure in figures.items():
        print(
            f"\nbomb, {name}: {figure['bytes'] / 1000:.0f} kB, {'refused' if figure['refused'] else 'TAKEN'} in {figure['ms']:.2f} ms, "
            f"{figure['more_bytes'] / MIB:.1f} MiB more memory",
            end="",
        )
    print()
    return figures


def test_every_bomb_is_refused_at_once_and_costs_no_memory(tmp_path: Path) -> None:
    figures = attack(tmp_path)
    assert len(figures) == 9 and all(f["refused"] for f in figures.values())
    assert all(f["more_bytes"] < 16 * MIB for f in figures.values())
    assert all(f["ms"] < 50 for f in figures.values())  # 5 ms on a machine that has nothing else to do
    assert 150_000 < figures["says 200 MiB"]["bytes"] < 256 * 1024


@pytest.mark.parametrize(
    "reply",
    [
        lambda _: bytes(MIB),  # more than was asked for: the engine hangs up
        lambda _: answer([bytes(4000)]),  # something else
        lambda _: answer([b"x" * 1000, b"y" * 1000]),  # two for one
        lambda _: (2**32 - 1).to_bytes(4, "big") + b"x" * 900,  # a length that is not there
        lambda _: b"\0",
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_not_kept(reply: Callable[[bytes], bytes]) -> None:
    want = Want(content_id(b"what was offered"), 5000, [])
    blob, victim = fetched(reply, want)
    assert blob is None and len(victim.blobs) == 0 and victim.fetcher.received <= 4 + want.size
    if len(reply(b"")) <= 4 + want.size:
        assert victim.rejected[Reason.NOT_ASKED_FOR] == 1


def figures(argv: Sequence[str] | None = None) -> Mapping[str, object]:
    """Throw them, print and return what came of it."""
    argparse.ArgumentParser(prog="python -m tests.attacks.test_bomb", description="throw the bombs and print the figures").parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = attack(Path(folder)).values()
    return {
        "taken": sum(not f["refused"] for f in found),
        "ms": max(f["ms"] for f in found),
        "more_MiB": max(f["more_bytes"] for f in found) / MIB,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measured()))
    else:
        figures()
