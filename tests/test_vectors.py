"""docs/vectors equals the output of swarmd's codecs, and swarmd's decoders accept and reject its entries."""

import json
import re

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests import vectors


def stored(name: str) -> vectors.Vectors:
    read: vectors.Vectors = json.loads((vectors.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("name", vectors.FILES)
def test_version_1_is_frozen(name: str) -> None:
    """If this fails, the wire format has changed, and old and new nodes would not understand each other."""
    assert (vectors.FOLDER / f"{name}.json").read_text(encoding="utf-8") == vectors.text(name)


@pytest.mark.parametrize("name", vectors.FILES)
def test_good_entries_are_accepted_and_bad_ones_rejected_for_the_stated_reason(name: str) -> None:
    entries = [*stored(name)["good"], *stored(name)["bad"]]
    said = [(entry.get("wrong"), entry.get("reason", "")) for entry in entries]
    found = vectors.reasons(name, entries)
    assert list(zip([wrong for wrong, _ in said], found, strict=True)) == said


@pytest.mark.parametrize(("name", "field"), [("frames", "frame"), ("rollouts", "body"), ("offers", "body")])
def test_another_library_encodes_the_values_to_the_same_shortest_msgpack(name: str, field: str) -> None:
    for entry in stored(name)["good"]:
        document = msgpack.unpackb(bytes.fromhex(entry[field]))
        assert vectors.readable(document) == entry["value"]
        assert msgpack.packb(document).hex() == entry[field]


def test_frames_are_signed_as_documented() -> None:
    for entry in stored("frames")["good"]:
        frame = bytes.fromhex(entry["frame"])
        author = Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["value"][3]))
        # Raises an error if the signature is not valid.
        author.verify(frame[-64:], b"swarmd\x00\x0fswarmd frame v1" + frame[:-66])


def test_the_example_in_the_documentation_is_one_of_the_vectors() -> None:
    page = (vectors.FOLDER.parent / "wire.md").read_text(encoding="utf-8")
    example = page.partition("\n\n    ")[2].partition("\n\n")[0]
    shown = "".join(re.findall(r"^ *([0-9a-f]{2,})(?:  .*)?$", example, re.MULTILINE))
    assert shown in {entry["frame"] for entry in stored("frames")["good"]}
