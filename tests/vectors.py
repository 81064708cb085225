"""Test vectors for other implementations of the wire format: entries to accept, and entries to reject.

    python -m tests.vectors # writes docs/vectors

All entries come from swarmd's own codecs and from fixed keys. So the files change only with the wire format,
or with the zstd library that compresses the blob. `reasons` returns the verdicts of swarmd's decoders.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import msgpack

from p2p.address import packed
from p2p.admission.inbox import Inbox
from p2p.blobs.blobs import MAX_CONTENT_BYTES, content_id, unpack
from p2p.engines.memory import MemorySwarm
from p2p.envelope import DOMAIN, seal
from p2p.identity import Identity, peer_id_of, public_key_of, verify
from p2p.peers import dial_back, introduction, twins
from p2p.topic import Topic
from p2p.types import MAX_QUESTION_BYTES, Envelope, Peer, PeerId, PeerRequest, Reason
from swarmd.exchange import acknowledgements, offers, wire
from swarmd.exchange.offers import Offered
from swarmd.types import Completion, Rollout, TaskRef
from tests import ROOT
from tests.doubles import ListeningMember, encoded, memory_member

FOLDER = ROOT / "docs" / "vectors"
ALICE, BOB, CAROL = (Identity(seed) for seed in (bytes(range(32)), bytes(32), b"\x01" * 32))
TOPIC = Topic("main", "0123456789abcdef")
NOW = 1_700_000_000.25
SPECIALTIES = ("basic_arithmetic", "bf", "gcd")
ROLLOUT = Rollout(
    TaskRef("basic_arithmetic", 7),
    (Completion("<answer>3</answer>", True, ("<tool>1+2</tool>",)), Completion("¬", False)),
    ALICE.peer_id,
)
# Reasons without a name in the product: there, a function returns False or raises ValueError.
NO_PEER_ID, NO_TOPIC, UNANSWERED = "not an Ed25519 peer id", "not a topic", "answered with nothing"

Entry = dict[str, Any]
Vectors = dict[str, list[Entry]]


def topics() -> Vectors:
    def entry(topic: Topic) -> Entry:
        record = {"swarm_id": topic.swarm_id.hex(), "provider_key": topic.provider_key.hex()}
        return {"name": topic.name, "digest": topic.digest, "topic": str(topic), **record}

    names = {"no name": "", "a slash": "a/b", "a capital letter": "Main", "65 letters": "a" * 65}
    return {
        "good": [entry(TOPIC), entry(Topic("my-lab-2", "fedcba9876543210"))],
        "bad": [
            {"wrong": wrong, "reason": NO_TOPIC, "name": name, "digest": TOPIC.digest}
            for wrong, name in names.items()
        ],
    }


def topic_reason(entry: Entry) -> str:
    try:
        topic = Topic(entry["name"], entry["digest"])
    except ValueError:
        return NO_TOPIC
    assert (str(topic), topic.swarm_id.hex()) == (entry["topic"], entry["swarm_id"])
    return ""


def keys() -> Vectors:
    message = b"hello"

    def signed(by: Identity, **other: str) -> Entry:
        signature = by.sign(DOMAIN, message).hex()
        parts = {"domain": DOMAIN.decode(), "message": message.hex(), "signature": signature}
        return {"peer_id": by.peer_id, **parts, **other}

    point = (1).to_bytes(32, "little")  # its own negative, so (point, 0) signs any message
    forged = [
        ("signed in another domain", signed(ALICE, domain="swarmd session v1")),
        ("of another message", signed(ALICE, message=b"hallo".hex())),
        ("signed with another key", signed(ALICE, signature=signed(BOB)["signature"])),
        ("63 bytes", signed(ALICE, signature=signed(ALICE)["signature"][:-2])),
        (
            "a key of small order, whose signature of anything holds",
            signed(ALICE, peer_id=peer_id_of(point), signature=(point + bytes(32)).hex()),
        ),
    ]
    names = {
        "an RSA key's": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "one letter less": ALICE.peer_id[:-1],
        "a letter that base58 lacks": ALICE.peer_id[:-1] + "0",
        "another header before the key": "1" + "z" * 51,
    }
    return {
        "good": [
            signed(who) | {k: getattr(who, k).hex() for k in ("seed", "public_key", "private_file")}
            for who in (ALICE, BOB)
        ],
        "bad": [
            *({"wrong": why, "reason": Reason.BAD_SIGNATURE.value, **entry} for why, entry in forged),
            *({"wrong": why, "reason": NO_PEER_ID, **signed(ALICE, peer_id=p)} for why, p in names.items()),
        ],
    }


def key_reason(entry: Entry) -> str:
    try:
        public_key_of(entry["peer_id"])
    except ValueError:
        return NO_PEER_ID
    message, signature = bytes.fromhex(entry["message"]), bytes.fromhex(entry["signature"])
    held = verify(entry["peer_id"], entry["domain"].encode(), message, signature)
    return "" if held else Reason.BAD_SIGNATURE.value


def frame(body: bytes = b"body", **other: Any) -> bytes:
    values = {"identity": ALICE, "swarm_id": TOPIC.swarm_id, "sequence": 7, "now": NOW, "kind": wire.KIND}
    return seal(**values | other, body=body)


def signed_frame(signed: bytes) -> bytes:
    """Return a frame with these bytes and Alice's valid signature, even if their encoding is invalid."""
    return signed + b"\xc4\x40" + ALICE.sign(DOMAIN, signed)


def spellings() -> Mapping[str, bytes]:
    """Return the values of `frame()` in encodings that are not the shortest, each with a valid signature."""
    signed = frame()[:-66]
    tag, version, swarm, author, rest = signed[1:8], signed[8:9], signed[9:27], signed[27:61], signed[61:]
    head = tag + version + swarm + author
    return {
        "a long array header": b"\xdc\x00\x09" + signed[1:],
        "a longer array header": b"\xdd\x00\x00\x00\x09" + signed[1:],
        "the tag as str 8": b"\x99\xd9\x06swarmd" + signed[8:],
        "the tag as bin": b"\x99\xc4\x06swarmd" + signed[8:],
        "the version as uint 8": b"\x99" + tag + b"\xcc\x01" + signed[9:],
        "the version as float": b"\x99" + tag + b"\xcb\x3f\xf0" + bytes(6) + signed[9:],
        "the swarm id as bin 16": b"\x99" + tag + version + b"\xc5\x00\x10" + swarm[2:] + author + rest,
        "the author as bin 32": b"\x99" + tag + version + swarm + b"\xc6\x00\x00\x00\x20" + author[2:] + rest,
        "the sequence as uint 8": b"\x99" + head + b"\xcc\x07" + rest[1:],
        "the sequence as uint 64": b"\x99" + head + b"\xcf" + bytes(7) + b"\x07" + rest[1:],
        "the sequence as int 64": b"\x99" + head + b"\xd3" + bytes(7) + b"\x07" + rest[1:],
        "the time as int 64": b"\x99" + head + b"\x07\xd3" + rest[2:],
        "the kind as str 8": b"\x99" + head + rest[:10] + b"\xd9\x08" + rest[11:],
        "the body as bin 16": b"\x99" + head + rest[:19] + b"\xc5\x00\x04" + rest[21:],
        "the body as str": b"\x99" + head + rest[:19] + b"\xa4" + rest[21:],
    }


def frames() -> Vectors:
    def entry(whole: bytes, **said: Any) -> Entry:
        return {**said, "swarm_id": TOPIC.swarm_id.hex(), "received_at": NOW, "frame": whole.hex()}

    good = frame()
    values = msgpack.unpackb(good)
    malformed = {
        **{wrong: signed_frame(signed) for wrong, signed in spellings().items()},
        "the signature as bin 16": good[:-66] + b"\xc5\x00\x40" + good[-64:],
        "another tag": signed_frame(good[:-66].replace(b"swarmd", b"swarme")),
        "a byte too much": good + b"\x00",
        "a byte too little": good[:-1],
        "a map": signed_frame(msgpack.packb(dict(enumerate(values[:8])))),
        "ten fields": signed_frame(msgpack.packb([*values[:8], 1, b""])[:-2]),
        "a kind with a capital letter": signed_frame(good[:-66].replace(b"rollouts", b"Rollouts")),
    }
    other = Topic("other", TOPIC.digest).swarm_id
    refused = [
        *((wrong, Reason.MALFORMED, whole) for wrong, whole in malformed.items()),
        ("version 2", Reason.WRONG_VERSION, msgpack.packb(["swarmd", 2, {"another": "form"}])),
        ("of another swarm", Reason.OTHER_SWARM, frame(swarm_id=other)),
        ("sent 301 s before", Reason.STALE, frame(now=NOW - 301)),
        ("sent in 11 s", Reason.STALE, frame(now=NOW + 11)),
        ("a flipped bit of the body", Reason.BAD_SIGNATURE, good.replace(b"body", b"bodx")),
        ("another author's key", Reason.BAD_SIGNATURE, good.replace(ALICE.public_key, CAROL.public_key)),
        ("signed in another domain", Reason.BAD_SIGNATURE, good[:-64] + ALICE.sign(b"other", good[:-66])),
    ]
    whole = wire.encode([ROLLOUT], 3, "tiny")
    return {
        "good": [
            entry(made, value=readable(msgpack.unpackb(made)), author=ALICE.peer_id)
            for made in (good, frame(whole, sequence=2**40), frame(b"", kind="offer-image", now=NOW - 300))
        ],
        "bad": [
            entry(made, wrong=wrong, reason=reason.value, verdict=reason.verdict.value)
            for wrong, reason, made in refused
        ],
    }


def frame_reason(entry: Entry) -> str:
    inbox = Inbox(BOB.peer_id, bytes.fromhex(entry["swarm_id"]))
    outcome = inbox.receive(bytes.fromhex(entry["frame"]), entry["received_at"])
    if isinstance(outcome, Reason):
        return outcome.value
    assert outcome.author == entry["author"]
    return ""


def rollouts() -> Vectors:
    one = ["bf", 1, [[["x"], True]]]
    good = wire.encode([ROLLOUT], 3, "tiny")
    refused = {
        "no rollouts": [2, 1, "m", []],
        "65 rollouts": [2, 1, "m", [one] * 65],
        "a negative round": [2, -1, "m", [one]],
        "a negative n": [2, 1, "m", [["bf", -1, [[["x"], True]]]]],
        "n is no number": [2, 1, "m", [["bf", True, [[["x"], True]]]]],
        "no completions": [2, 1, "m", [["bf", 1, []]]],
        "65 completions": [2, 1, "m", [["bf", 1, [[["x"], True]] * 65]]],
        "a third part of a completion": [2, 1, "m", [["bf", 1, [[["x"], True, 1.0]]]]],
        "a model's name of 97 characters": [2, 1, "m" * 97, [one]],
        "a specialty of 97 characters": [2, 1, "m", [["b" * 97, 1, [[["x"], True]]]]],
        "no texts": [2, 1, "m", [["bf", 1, [[[], True]]]]],
        "65 texts": [2, 1, "m", [["bf", 1, [[["x"] * 65, True]]]]],
        "a text in place of texts": [2, 1, "m", [["bf", 1, [["x", True]]]]],
        "a fifth field": [2, 1, "m", [one], 0],
    }
    bodies = {wrong: msgpack.packb(document) for wrong, document in refused.items()}
    bodies |= {
        "n as uint 8, which is longer": good.replace(b"arithmetic\x07", b"arithmetic\xcc\x07"),
        "a byte too much": good + b"\x00",
        "no UTF-8": good.replace("¬".encode(), b"\xff\xfe"),
    }
    later = msgpack.packb([3, 1, "m", {"new": 1}])
    return {
        "good": [{"value": readable(msgpack.unpackb(good)), "body": good.hex()}],
        "bad": [
            *refusals("body", Reason.UNDECODABLE, bodies),
            *refusals("body", Reason.WRONG_VERSION, {"version 3": later}),
        ],
    }


def rollouts_reason(entry: Entry) -> str:
    return named(wire.decode(bytes.fromhex(entry["body"]), ALICE.peer_id))


def offer_bodies() -> Vectors:
    fields = [1, 999, [1, 0], [300, 5], [77, 40_000], bytes(range(24))]
    good, through = msgpack.packb(fields), f"/ip4/11.0.0.7/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit"
    told = [msgpack.packb([*fields, packed(at)]) for at in ("/ip6/2600::7/tcp/4001", through)]
    refused = {
        "no items": [1, 1, [], [], [], b""],
        "65 items": [1, 1, [0] * 65, [1] * 65, [1] * 65, bytes(12 * 65)],
        "over 1,024 bytes": [1, 1, [0] * 62, [2**40] * 62, [1] * 62, bytes(12 * 62)],
        "fewer n than specialties": [1, 1, [0, 1], [1], [1, 1], bytes(24)],
        "an id of 11 bytes": [1, 1, [0], [1], [1], bytes(11)],
        "a size of 0": [1, 1, [0], [1], [0], bytes(12)],
        "a size over 262,144": [1, 1, [0], [1], [262_145], bytes(12)],
        "a negative n": [1, 1, [0], [-1], [1], bytes(12)],
        "an address that is none": [1, 1, [0], [1], [1], bytes(12), 0],
        "an address of 7 bytes": [1, 1, [0], [1], [1], bytes(12), bytes(7)],
        "an empty address": [1, 1, [0], [1], [1], bytes(12), b""],
        "an eighth field": [1, 1, [0], [1], [1], bytes(12), bytes(6), 0],
    }
    bodies = {wrong: msgpack.packb(document) for wrong, document in refused.items()}
    bodies["the version as uint 8"] = b"\x96\xcc\x01" + good[2:]
    unknown = msgpack.packb([1, 1, [len(SPECIALTIES)], [1], [1], bytes(12)])
    return {
        "good": [
            {"specialties": SPECIALTIES, "value": readable(msgpack.unpackb(body)), "body": body.hex()}
            for body in (good, *told)
        ],
        "bad": [
            {"specialties": SPECIALTIES, **entry}
            for entry in (
                *refusals("body", Reason.UNDECODABLE, bodies),
                *refusals("body", Reason.UNKNOWN_TASK, {"a specialty beyond the last": unknown}),
                *refusals("body", Reason.WRONG_VERSION, {"version 2": msgpack.packb([2, "other"])}),
            )
        ],
    }


def offer_reason(entry: Entry) -> str:
    envelope = Envelope(ALICE.peer_id, 1, NOW, offers.KIND, bytes.fromhex(entry["body"]))
    return named(offers.decode(envelope, entry["specialties"]))


def zstd_frame(content: bytes, claimed: int | None = None, descriptor: int = 0xA0) -> bytes:
    """Return a zstd frame of one raw block (RFC 8878), whose bytes do not depend on the library."""
    size = (len(content) if claimed is None else claimed).to_bytes(4, "little")
    block = ((len(content) << 3) | 1).to_bytes(3, "little")
    return 0xFD2FB528.to_bytes(4, "little") + bytes([descriptor]) + size + block + content


def blobs() -> Vectors:
    def entry(blob: bytes, author: PeerId = ALICE.peer_id, n: int = 7, **said: Any) -> Entry:
        offered = {"specialty": "basic_arithmetic", "n": n, "author": author}
        return {**said, **offered, "id": content_id(blob).hex(), "blob": blob.hex()}

    (_,), (packed,) = encoded([ROLLOUT], 3, "tiny", SPECIALTIES)
    content = unpack(packed)
    two = msgpack.packb([ALICE.public_key, wire.encode([ROLLOUT, ROLLOUT], 3, "tiny")])
    longer = content.replace(b"\xc4\x20", b"\xc5\x00\x20", 1)
    raw = zstd_frame(content)
    wrong = [
        ("another author's", Reason.NOT_ITS_OWN, entry(packed, author=BOB.peer_id)),
        ("another task than was offered", Reason.MISLABELLED, entry(packed, n=8)),
        ("two rollouts", Reason.MISLABELLED, entry(zstd_frame(two))),
        ("claims more than 1 MiB", Reason.UNDECODABLE, entry(zstd_frame(content, MAX_CONTENT_BYTES + 1))),
        (
            "claims a byte more than there is",
            Reason.UNDECODABLE,
            entry(zstd_frame(content, len(content) + 1)),
        ),
        (
            "claims a byte less than there is",
            Reason.UNDECODABLE,
            entry(zstd_frame(content, len(content) - 1)),
        ),
        ("does not say its size", Reason.UNDECODABLE, entry(raw[:4] + b"\x00\x58" + raw[9:])),
        ("a byte behind the zstd frame", Reason.UNDECODABLE, entry(raw + b"\x00")),
        ("not compressed", Reason.UNDECODABLE, entry(content)),
        ("the author as bin 16, which is longer", Reason.UNDECODABLE, entry(zstd_frame(longer))),
    ]
    return {
        "good": [entry(blob, content=content.hex()) for blob in (packed, raw)],
        "bad": [{"wrong": why, "reason": reason.value, **made} for why, reason, made in wrong],
    }


def blob_reason(entry: Entry) -> str:
    blob = bytes.fromhex(entry["blob"])
    assert content_id(blob).hex() == entry["id"]
    ref = TaskRef(entry["specialty"], entry["n"])
    author = entry["author"]
    item = Offered(author, ref, content_id(blob), len(blob), author)
    return named(offers.rollout_of(offers.decode_blob(blob), item))


def answering() -> ListeningMember:
    """Return Alice's member, which has the first good blob and is connected to Bob at 203.0.113.7."""
    member = memory_member(MemorySwarm(), ALICE, lambda: NOW, topic=TOPIC)
    for blob in encoded([ROLLOUT], 3, "tiny", SPECIALTIES)[1]:
        member.blobs.put(blob)
    bob = Peer(BOB.peer_id, "/ip4/203.0.113.7/tcp/50000", "inbound", NOW)
    member.answers |= {
        PeerRequest.DIAL_BACK: dial_back.DialBack(lambda: [bob], lambda: NOW),
        PeerRequest.USED: acknowledgements.AcknowledgementCounter(lambda: 0),
        PeerRequest.INTRODUCTION: introduction.Introducer(
            [TOPIC],
            lambda _: 2,
            "tiny-9",
            "swarmd 0.1.0",
            lambda: introduction.TRAINING,
            lambda _: False,
            lambda: NOW,
        ),
    }
    return member


def asks() -> Vectors:
    randbytes = Random(26).randbytes
    here, there = (twins.TwinSession(BOB, NOW - age, randbytes) for age in (60, 30))
    (_,), (blob,) = encoded([ROLLOUT], 3, "tiny", SPECIALTIES)
    card = here.question(NOW)
    good = {
        "fetch": PeerRequest.BLOBS.message(content_id(blob)),
        "fetch missing rollouts": PeerRequest.BLOBS.message(bytes(12)),
        "dial-back": dial_back.question(4001),
        "twins, the first card": card,
        "twins, another session's card: it is shown the first": there.question(NOW),
        "used": acknowledgements.encode(1_700_000_000_250, 3),
        "introduction": introduction.question(TOPIC.name),
    }
    bad = {
        "fetch: an id of 11 bytes": PeerRequest.BLOBS.message(bytes(11)),
        "dial-back: a port of four bytes": PeerRequest.DIAL_BACK.message(bytes(4)),
        "twins: a card with a byte too much": card + b"\x00",
        "used: version 2": PeerRequest.USED.message(msgpack.packb([2, 1, 3])),
        "used: a negative number": PeerRequest.USED.message(msgpack.packb([1, -1, 3])),
        "introduction: another swarm's name": introduction.question("other"),
        "a type that nobody knows": b"\xff",
        "no type": b"",
    }
    member = answering()
    return {
        "good": [
            {"asked": asked, "question": q.hex(), "answer": member.answer(BOB.peer_id, q).hex()}
            for asked, q in good.items()
        ],
        "bad": [{"wrong": wrong, "reason": UNANSWERED, "question": q.hex()} for wrong, q in bad.items()],
    }


def ask_reasons(entries: Iterator[Entry]) -> Iterator[str]:
    member = answering()
    for entry in entries:
        question = bytes.fromhex(entry["question"])
        assert len(question) <= MAX_QUESTION_BYTES
        answer = member.answer(BOB.peer_id, question)
        yield "" if answer and answer.hex() == entry["answer"] else UNANSWERED if not answer else "another"


def readable(value: Any) -> Any:
    """Return decoded msgpack with bytes as hexadecimal text, because JSON has no bytes."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def refusals(field: str, reason: Reason, made: Mapping[str, bytes]) -> list[Entry]:
    return [{"wrong": wrong, "reason": reason.value, field: data.hex()} for wrong, data in made.items()]


def named(outcome: object) -> str:
    return outcome.value if isinstance(outcome, Reason) else ""


FILES: Mapping[str, Callable[[], Vectors]] = {
    "topics": topics,
    "keys": keys,
    "frames": frames,
    "rollouts": rollouts,
    "offers": offer_bodies,
    "blobs": blobs,
    "asks": asks,
}
REASONS: Mapping[str, Callable[[Entry], str]] = {
    "topics": topic_reason,
    "keys": key_reason,
    "frames": frame_reason,
    "rollouts": rollouts_reason,
    "offers": offer_reason,
    "blobs": blob_reason,
}


def reasons(name: str, entries: list[Entry]) -> list[str]:
    """Return, per entry of a file, the reason why swarmd's decoder rejects it, or "" if it accepts it."""
    return list(ask_reasons(iter(entries)) if name == "asks" else map(REASONS[name], entries))


def text(name: str) -> str:
    return json.dumps(FILES[name](), ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file in FILES:
        (FOLDER / f"{file}.json").write_text(text(file), encoding="utf-8")
