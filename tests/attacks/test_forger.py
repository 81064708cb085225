"""Forger: sends 10,000 frames that their supposed authors did not sign, to impersonate an author or to use up
an author's quota.

The code is the product's: `p2p.member`, its inbox and its reputation. The attacker tries frames with flipped
bits, cut, spliced, or in another msgpack encoding; signatures shifted by the order of the group, swapped, or
made for another domain or message; frames in another peer's name with the attacker's signature; and keys of
small order, whose "signatures" are valid for any message. The frames come over a few connections of the
attacker, over a hundred connections, or from a connection that the engine does not name.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from p2p.engines.memory import MemorySwarm
from p2p.envelope import DOMAIN, seal
from p2p.identity import Identity, peer_id_of
from p2p.topic import Topic
from p2p.types import PeerId, Verdict
from tests.attacks.harness import Attack, show, worst
from tests.doubles import TOPIC, Clock, memory_member

FORGED = 10_000
ORDER = 2**252 + 27742317777372353535851937790883648493  # order of the group of Ed25519
TAIL = 66  # a frame's signature with its msgpack header


@dataclass
class World:
    rng: random.Random
    clock: Clock = field(default_factory=Clock)
    honest: list[Identity] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.honest = [Identity(self.rng.randbytes(32)) for _ in range(10)]
        self.mine, victim = Identity(b"m" * 32), Identity(b"v" * 32)
        self.victim = memory_member(MemorySwarm(), victim, self.clock)

    def frame(self, author: Identity) -> bytes:
        """Return an honest frame that the victim has not seen, as the original of a forgery."""
        self.number += 1
        return seal(
            author,
            TOPIC.swarm_id,
            self.number,
            self.clock(),
            "rollouts",
            self.rng.randbytes(self.rng.choice([0, 40, 2000])),
        )


def flipped(world: World, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(world.rng.randint(1, 3)):
        changed[world.rng.randrange(len(frame))] ^= 1 << world.rng.randrange(8)
    return bytes(changed)


def cut_or_spliced(world: World, frame: bytes) -> bytes:
    other, i, j = (
        world.frame(world.rng.choice(world.honest)),
        world.rng.randrange(len(frame)),
        world.rng.randrange(1, 60),
    )
    return world.rng.choice(
        [
            frame[:i],
            frame[:i] + other[i : i + j] + frame[i + j :],
            frame + other[:j],
            frame[:i] + frame[i + j :],
        ]
    )


def respelled(world: World, frame: bytes) -> bytes:
    """Return the same frame in a longer msgpack encoding, or with its signature encoded as text."""
    fields = msgpack.unpackb(frame)
    number = fields[4]
    longer = {
        b"\xcf" + number.to_bytes(8, "big"): msgpack.packb(number),
        b"\xc5" + (32).to_bytes(2, "big") + fields[3]: msgpack.packb(fields[3]),
        b"\xd9\x06swarmd": b"\xa6swarmd",
        b"\xdc\x00\x09" + frame[1:20]: frame[:20],
    }
    long, short = world.rng.choice(list(longer.items()))
    return frame.replace(short, long, 1)


def moved_signature(world: World, frame: bytes) -> bytes:
    """Return the frame with a signature that only a lax verifier accepts: (R, s + order), or −R."""
    r, s = frame[-64:-32], int.from_bytes(frame[-32:], "little")
    moved = [r + n.to_bytes(32, "little") for n in (s + ORDER, (ORDER - s) % ORDER, (s + 2 * ORDER) % 2**256)]
    return frame[:-64] + world.rng.choice([*moved, r[:-1] + bytes([r[-1] ^ 0x80]) + frame[-32:]])


def other_signature(world: World, frame: bytes) -> bytes:
    """Return the frame with the signature of another key, another message or another domain."""
    author = next(a for a in world.honest if a.public_key in frame)
    signatures = [
        world.mine.sign(DOMAIN, frame[:-TAIL]),
        author.sign(b"swarmd offer v1", frame[:-TAIL]),
        author.sign(DOMAIN, frame[:-TAIL] + b"\0"),
        world.frame(author)[-64:],
        bytes(64),
        world.rng.randbytes(64),
    ]
    return frame[:-64] + world.rng.choice(signatures)


def small_order(world: World, frame: bytes) -> bytes:
    """Return a frame with the neutral element as key and R, and s = 0: valid for every message."""
    author = next(a for a in world.honest if a.public_key in frame)
    neutral = (1).to_bytes(32, "little")
    point = world.rng.choice([neutral, neutral[:-1] + b"\x80", bytes.fromhex("ee" + "ff" * 30 + "7f")])
    return frame[:-64].replace(author.public_key, point) + neutral + bytes(32)


def other_swarm(world: World, frame: bytes) -> bytes:
    author = next(a for a in world.honest if a.public_key in frame)
    elsewhere = Topic("main", "fedcba9876543210").swarm_id
    stolen = seal(author, elsewhere, world.number, world.clock(), "rollouts", b"said elsewhere")
    return world.rng.choice([stolen, stolen.replace(elsewhere, TOPIC.swarm_id)])


TRICKS: list[Callable[[World, bytes], bytes]] = [
    flipped, cut_or_spliced, respelled, moved_signature, other_signature, small_order, other_swarm,
]  # fmt: skip


@dataclass
class Result:
    let_in: int = 0
    looked_at: int = 0  # signatures that the victim verified
    honest_sent: int = 0
    honest_let_in: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def forge(connections: int, seed: int = 1) -> Result:
    """Play the attack. connections: the attacker's; 0: the engine does not name a frame's sender."""
    world, result = World(random.Random(seed)), Result()
    rng = world.rng
    his: list[PeerId | None] = [peer_id_of(rng.randbytes(32)) for _ in range(connections)] or [None]
    for n in range(FORGED):
        original = world.frame(rng.choice(world.honest))
        forged = rng.choice(TRICKS)(world, original)
        if forged == original:
            continue
        result.let_in += world.victim.deliver(forged, rng.choice(his)) is Verdict.ACCEPT
        # The attacker sends a thousand frames a second, the honest authors 20.
        world.clock.now += 0.001
        if n % 50 == 0:
            author = rng.choice(world.honest)
            result.honest_sent += 1
            result.honest_let_in += (
                world.victim.deliver(world.frame(author), author.peer_id) is Verdict.ACCEPT
            )
    for author in world.honest:  # the forgeries used up nothing of the authors' bursts
        for _ in range(50):
            result.honest_sent += 1
            result.honest_let_in += (
                world.victim.deliver(world.frame(author), author.peer_id) is Verdict.ACCEPT
            )
    result.reasons = Counter({reason.value: count for reason, count in world.victim.rejected.items()})
    result.looked_at = result.reasons["bad signature"]
    show(f"forger, {FORGED} frames by {connections or 'unnamed'} connections", result)
    return result


def test_all_forged_frames_are_rejected_and_all_honest_frames_admitted() -> None:
    results = {connections: forge(connections) for connections in (0, 3, 100)}
    assert all(r.let_in == 0 and r.honest_let_in == r.honest_sent > 500 for r in results.values())
    unnamed = results[0].reasons
    assert min(unnamed[reason] for reason in ("bad signature", "not a frame", "of another swarm")) > 500
    assert results[3].looked_at < 100  # the attacker's connections were banned


def attack(folder: Path, connections: tuple[int, ...] = (0, 3, 100), seed: int = 1) -> dict[str, float]:
    results = {str(number): forge(number, seed) for number in connections}
    return {
        "let_in": worst(results, "let_in"),
        "honest_kept_out": max(r.honest_sent - r.honest_let_in for r in results.values()),
        "verified_for_nothing": min(r.looked_at for r in results.values()),  # of the case with the fewest
    }


ATTACK = Attack(
    attack,
    {"let_in": 0, "honest_kept_out": 0},
    about={"connections": "the attacker's; 0: the engine does not name a frame's sender; may be repeated"},
)
