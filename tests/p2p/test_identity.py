import os
import stat
import threading
from pathlib import Path

import pytest

from p2p.errors import KeyFileUnusable, NoKeyFile
from p2p.identity import Identity, nickname, peer_id_of, public_key_of, verify, verify_key

# The Ed25519 example in github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md.
SPEC_PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SEED = bytes(range(32))


def test_the_peer_id_follows_the_libp2p_specification() -> None:
    from libp2p.crypto.ed25519 import Ed25519PublicKey
    from libp2p.peer.id import ID

    for seed in (SEED, bytes(32), b"\xff" * 32, *(bytes([n]) * 32 for n in range(1, 30))):
        me = Identity(seed)
        assert me.peer_id == str(ID.from_pubkey(Ed25519PublicKey.from_bytes(me.public_key)))
        assert public_key_of(me.peer_id) == me.public_key


def test_a_key_file_of_the_libp2p_specification_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SPEC_PRIVATE_KEY)
    path.chmod(0o600)
    assert Identity.load(path).public_key == SPEC_PRIVATE_KEY[-32:]


def test_a_key_is_created_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == Identity.load(path).peer_id == first.peer_id
    assert [file.name for file in path.parent.iterdir()] == ["key"]  # no temporary file is left
    assert first.seed.hex() not in repr(first)


def test_many_processes_that_start_at_once_get_the_same_key(tmp_path: Path) -> None:
    path, found = tmp_path / "key", list[str]()
    threads = [
        threading.Thread(target=lambda: found.append(Identity.load_or_create(path).peer_id))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666, 0o777])
def test_looser_file_modes_are_rejected(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.chmod(mode)
    for load in (Identity.load, Identity.load_or_create):
        with pytest.raises(KeyFileUnusable, match=rf"{path}.*chmod 600"):
            load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 68, SPEC_PRIVATE_KEY[:-1], SPEC_PRIVATE_KEY + b"\n", SPEC_PRIVATE_KEY[:40], b"x" * 10_000]
    + [
        SPEC_PRIVATE_KEY[:i] + bytes([SPEC_PRIVATE_KEY[i] ^ 1]) + SPEC_PRIVATE_KEY[i + 1 :] for i in range(68)
    ],
)
def test_a_damaged_key_is_rejected_and_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    for load in (Identity.load, Identity.load_or_create):
        with pytest.raises(KeyFileUnusable, match=f"{path}.*backup"):
            load(path)
    assert path.read_bytes() == content


def test_a_missing_key_a_folder_and_a_full_disk_give_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoKeyFile, match="swarmd join"):
        Identity.load(tmp_path / "none")
    with pytest.raises(KeyFileUnusable, match="folder"):
        Identity.load(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileUnusable, match="No space left"):
        Identity.load_or_create(tmp_path / "key")
    assert not (tmp_path / "key").exists()


def test_a_key_is_never_overwritten_on_a_file_system_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    path = tmp_path / "key"
    me = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and Identity.load(path).peer_id == me.peer_id
    Identity(SEED).write(path)
    assert Identity.load(path).peer_id == me.peer_id, "the key was overwritten"


def test_a_signature_is_valid_only_for_its_key_domain_and_message() -> None:
    me, other = Identity(SEED), Identity(bytes(32))
    signature = me.sign(b"judge v1", b"hello")
    assert verify(me.peer_id, b"judge v1", b"hello", signature)
    for who, domain, message in (
        (other, b"judge v1", b"hello"),
        (me, b"judge v2", b"hello"),
        (me, b"judge v1h", b"ello"),
        (me, b"judge v1", b"hello!"),
    ):
        assert not verify(who.peer_id, domain, message, signature)
    for bit in range(512):
        broken = bytearray(signature)
        broken[bit // 8] ^= 1 << bit % 8
        assert not verify(me.peer_id, b"judge v1", b"hello", bytes(broken))
    for length in (0, 63, 65):
        assert not verify(me.peer_id, b"judge v1", b"hello", (signature + b"\0")[:length])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "12D3KooW",
        "1" * 52,
        "0" * 52,
        "z" * 52,
        "1" + "z" * 51,
        "12D3Koo" + "0" * 45,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "é" * 52,
    ],
)
def test_malformed_peer_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        public_key_of(text)
    assert not verify(text, b"d", b"m", bytes(64))


def test_a_peer_id_has_one_spelling() -> None:
    me = Identity(SEED).peer_id
    for i in range(len(me)):
        for letter in "1zAb":
            changed = me[:i] + letter + me[i + 1 :]
            try:
                assert peer_id_of(public_key_of(changed)) == changed
            except ValueError:
                continue
    with pytest.raises(ValueError):
        public_key_of(me + " ")


def test_domains_and_seeds_are_checked() -> None:
    me = Identity(SEED)
    for domain in (b"", b"x" * 65):
        with pytest.raises(ValueError):
            me.sign(domain, b"")
    with pytest.raises(ValueError):
        Identity(b"short")


def test_nicknames_never_change_and_rarely_collide() -> None:
    peers = [peer_id_of(bytes([n]) * 32) for n in range(200)]
    assert nickname(Identity(SEED).peer_id) == "mighty-beaver"
    assert len({nickname(peer) for peer in peers}) > 180


# The points of small order, in every encoding that OpenSSL accepts (listed in libsodium's ed25519_ref10.c).
SMALL_ORDER = [
    *((n % 2**255).to_bytes(32, "little") for n in (0, 1, -20, -19, -18)),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
]


@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda point: point.hex()[:4])
def test_keys_of_small_order_are_refused(point: bytes) -> None:
    """With such a key, OpenSSL accepts a signature without a secret for one message of eight or more."""
    for key in (point, point[:-1] + bytes([point[-1] | 0x80])):
        for n in range(32):
            assert not any(verify_key(key, b"test", bytes([n]), r + bytes(32)) for r in SMALL_ORDER)


def test_a_key_of_another_length_has_no_peer_id() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        peer_id_of(bytes(31))
