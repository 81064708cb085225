"""Replayer: an attacker recorded 10,000 frames that a node admitted, and sends all of them again.

It sends them at once, later, and after a restart.

The code is the product's: `p2p.member` with its inbox and its files. The attacker has as many connections as
it likes: a new one for every hundred frames, so that the limit of a connection is no obstacle, and the rest
of the frames come from connections that the engine does not name. The attacker sends the frames in random
order. Some of the recorded authors have clocks that are minutes slow or seconds fast. Restarts are clean or
by SIGKILL; a power cut would make no difference, because everything on disk is durable.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p.envelope import seal
from p2p.identity import Identity, peer_id_of
from tests.attacks.harness import Attack, show
from tests.doubles import NOW, TOPIC
from tests.p2p.admission.test_seen_file import Life

AUTHORS, FRAMES = 100, 10_000
DURATION = 200.0  # seconds over which the authors send the frames


def record(victim: Life, rng: random.Random) -> list[bytes]:
    """Return the frames that the attacker recorded; the victim admitted each of them once."""
    authors = [
        (Identity(rng.randbytes(32)), rng.choice([0.0, 0.0, 0.0, -200.0, 5.0, 9.0])) for _ in range(AUTHORS)
    ]
    frames = []
    for n in range(FRAMES):
        # Late enough that frames of slow clocks are also dated after the victim's start.
        victim.clock.now = NOW + 300 + DURATION * n / FRAMES
        author, skew = authors[n % AUTHORS]
        frames.append(
            seal(author, TOPIC.swarm_id, n // AUTHORS, victim.clock.now + skew, "rollouts", rng.randbytes(20))
        )
    for n, frame in enumerate(frames):
        victim.clock.now = NOW + 300 + DURATION * n / FRAMES
        assert victim.hears(frame)
    victim.member.received()
    return frames


def replay(victim: Life, frames: Sequence[bytes], rng: random.Random) -> int:
    """Send the frames in random order; return how many the victim admits again."""
    accepted = 0
    for n, frame in enumerate(rng.sample(frames, len(frames))):
        via = peer_id_of(rng.randbytes(32)) if n % 100 == 0 else None
        accepted += victim.hears(frame, via)
    return accepted


def replays(folder: Path, seed: int = 1) -> dict[str, int]:
    """Return the number of frames that were admitted a second time, for each time of the replay."""
    rng = random.Random(seed)
    results: dict[str, int] = {}
    victim = Life(folder, NOW)
    frames = record(victim, rng)
    end = victim.clock.now
    results["at once"] = replay(victim, frames, rng)
    for how in ("clean", "SIGKILL"):
        if how == "clean":
            victim.end()
        victim = Life(folder, end)
        results[f"after a restart ({how})"] = replay(victim, frames, rng)
    for minutes in (3, 30):
        victim.clock.now = end + 60 * minutes
        results[f"after {minutes} minutes"] = replay(victim, frames, rng)
    victim = Life(folder, victim.clock.now)
    results["after 30 minutes and a restart"] = replay(victim, frames, rng)
    victim.clock.now = end
    results["with our clock set back"] = replay(victim, frames, rng)
    show(f"replayer, {len(frames)} frames, let in", results)
    return results


@pytest.mark.slow
def test_no_frame_is_admitted_twice(tmp_path: Path) -> None:
    results = replays(tmp_path)
    assert len(results) == 7 and not any(results.values())


def attack(folder: Path, seed: int = 1) -> dict[str, int]:
    results = replays(folder, seed)
    return {"let_in": sum(results.values()), "times_of_10_000": len(results)}


ATTACK = Attack(attack, {"let_in": 0})
