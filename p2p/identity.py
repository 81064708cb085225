"""The node's Ed25519 key and its libp2p peer id: load, write, sign and verify.

The key file has libp2p's format, a PrivateKey message (github.com/libp2p/specs, peer-ids) with seed ‖ public
key, 68 bytes. A damaged file is detected because its public key does not match its seed.
"""

import functools
import os
from hashlib import sha256
from pathlib import Path
from shlex import quote

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p import durable
from p2p.errors import KeyFileUnusable, NoKeyFile
from p2p.types import PeerId

# Length of a public key, and of the seed of a private key.
KEY_BYTES = 32
SIGNATURE_BYTES = 64
_PRIVATE_HEADER = bytes.fromhex("08011240")  # protobuf: type 1 (Ed25519), 64 bytes follow
# Identity multihash (code 0, 36 bytes) of libp2p's PublicKey message: type 1 (Ed25519), 32 bytes follow.
_PEER_ID_HEADER = bytes.fromhex("002408011220")
# Points of small order with the sign bit cleared (libsodium's list, ed25519_ref10.c). With such a public key
# anybody can make a valid "signature" of a message. OpenSSL accepts these keys, as RFC 8032 5.1.7 allows.
_NOBODYS = frozenset(
    bytes.fromhex(key)
    for key in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


class Identity:
    """A node's private key. Two running nodes must never have the same key.

    Raises:
        ValueError: the seed does not have 32 bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self.public_key)

    def __repr__(self) -> str:
        # Logs contain this text, so it must not show the seed.
        return f"Identity({self.peer_id})"

    @property
    def seed(self) -> bytes:
        """The secret, 32 bytes, for an engine whose library needs it."""
        return self._key.private_bytes_raw()

    @property
    def private_file(self) -> bytes:
        """The content of a key file: libp2p's PrivateKey message. It contains the seed."""
        return _PRIVATE_HEADER + self.seed + self.public_key

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Load the key at `path`. Raises NoKeyFile or KeyFileUnusable."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read(2 * (len(_PRIVATE_HEADER) + KEY_BYTES))
        except FileNotFoundError:
            raise NoKeyFile(
                f"no key file at {path}. Run `swarmd join` to make one, or copy your backup there."
            ) from None
        except OSError as error:
            raise KeyFileUnusable(
                f"cannot read the key file {path}: {error.strerror}. Check who owns it and its folder."
            ) from None
        if status.st_mode & 0o077:
            remedy = (
                f"Run `chmod 600 {quote(str(path))}`"
                if durable.keeps_modes(path.parent)
                else "Its file system has no permissions, so move its folder to another file system"
            )
            raise KeyFileUnusable(
                f"other users of this machine can read the key file {path} (mode {status.st_mode & 0o777:o})."
                f" {remedy}. If someone may have read the key, move the file away and start"
                " with a new key."
            )
        seed = content[len(_PRIVATE_HEADER) : len(_PRIVATE_HEADER) + KEY_BYTES]
        if len(seed) == KEY_BYTES and content == (identity := cls(seed)).private_file:
            return identity
        raise KeyFileUnusable(
            f"the key file {path} is damaged and was left as it is. Restore it from a backup, "
            "or move it away to start with a new key and a new peer id."
        )

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Load the key at `path`, or create one there. Raises like `load`."""
        try:
            return cls.load(path)
        except NoKeyFile:
            cls(os.urandom(KEY_BYTES)).write(path)
        # Another process may have made the file first. In that case, the other process's key is used.
        return cls.load(path)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Return the 64-byte signature of `message` in a domain.

        domain: 1 to 64 bytes that name the purpose, so that a signature is not valid for another purpose.
        """
        return self._key.sign(_separated(domain, message))

    def write(self, path: Path) -> None:
        """Write the key to a new file, mode 0600; never overwrite a file. Raises KeyFileUnusable."""
        try:
            durable.create(path, self.private_file)
        except FileExistsError:
            return
        except OSError as error:
            raise KeyFileUnusable(
                f"cannot write the key file {path}: {error.strerror}. Check its folder and the free space."
            ) from None


# Cached, because it is called for each frame and base58 takes as long as checking a signature.
@functools.lru_cache(maxsize=4096)
def peer_id_of(public_key: bytes) -> PeerId:
    """Return libp2p's peer id of a raw 32-byte Ed25519 public key. Raises ValueError on another length."""
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return PeerId(base58.b58encode(_PEER_ID_HEADER + public_key).decode())


@functools.lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> bytes:
    """Return the raw 32-byte public key in a peer id. Raises ValueError if it is no Ed25519 peer id."""
    if len(peer_id) != 52 or not peer_id.startswith("1"):
        raise ValueError("not an Ed25519 peer id: it has 52 letters and starts with 12D3Koo")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise ValueError(f"not a peer id: {error}") from None
    if len(raw) != len(_PEER_ID_HEADER) + KEY_BYTES or not raw.startswith(_PEER_ID_HEADER):
        raise ValueError("not an Ed25519 peer id")
    return raw[len(_PEER_ID_HEADER) :]


def verify(peer_id: str, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether this peer signed this message in this domain.

    A malformed id or signature gives False, never an exception.
    """
    try:
        return verify_key(public_key_of(peer_id), domain, message, signature)
    except ValueError:
        return False


def verify_key(public_key: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Do the same as `verify`, for a raw 32-byte public key."""
    if len(public_key) == KEY_BYTES and public_key[:-1] + bytes([public_key[-1] & 0x7F]) in _NOBODYS:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _separated(domain, message))
    except (InvalidSignature, ValueError):  # ValueError: not 32 bytes
        return False
    return True


def nickname(peer_id: str) -> str:
    """Return two memorable words such as "brave-otter". Nicknames are not unique."""
    digest = sha256(peer_id.encode()).digest()
    return f"{ADJECTIVES[digest[0] % len(ADJECTIVES)]}-{ANIMALS[digest[1] % len(ANIMALS)]}"


def _separated(domain: bytes, message: bytes) -> bytes:
    """Return the bytes to sign for a message in a domain.

    The length byte separates the domain from the message. The prefix "swarmd" keeps our signatures apart from
    signatures that libp2p makes with the same key.
    """
    if not 1 <= len(domain) <= 64:
        raise ValueError("a signing domain has 1 to 64 bytes")
    return b"swarmd\0" + bytes([len(domain)]) + domain + message


# The words of nicknames. Never reorder them, or peers get other nicknames.
ADJECTIVES = (
    "able",
    "agile",
    "amber",
    "ample",
    "apt",
    "arctic",
    "autumn",
    "bold",
    "brave",
    "breezy",
    "bright",
    "brisk",
    "calm",
    "candid",
    "cheery",
    "civil",
    "clever",
    "cosmic",
    "cosy",
    "crisp",
    "curious",
    "daring",
    "deft",
    "eager",
    "early",
    "earnest",
    "fair",
    "fancy",
    "fleet",
    "fluent",
    "fond",
    "frank",
    "fresh",
    "gentle",
    "glad",
    "golden",
    "grand",
    "hardy",
    "honest",
    "humble",
    "jolly",
    "keen",
    "kind",
    "lively",
    "loyal",
    "lucid",
    "lucky",
    "mellow",
    "merry",
    "mighty",
    "modest",
    "neat",
    "nimble",
    "noble",
    "patient",
    "placid",
    "plucky",
    "polite",
    "proud",
    "quick",
    "quiet",
    "ready",
    "robust",
    "rosy",
)

ANIMALS = (
    "ant",
    "badger",
    "bat",
    "bear",
    "beaver",
    "bee",
    "bison",
    "bobcat",
    "camel",
    "cat",
    "condor",
    "coyote",
    "crab",
    "crane",
    "cricket",
    "crow",
    "deer",
    "dingo",
    "dolphin",
    "dove",
    "duck",
    "eagle",
    "eel",
    "elk",
    "falcon",
    "ferret",
    "finch",
    "fox",
    "frog",
    "gecko",
    "gibbon",
    "goat",
    "horse",
    "ibex",
    "jackal",
    "jay",
    "koala",
    "lark",
    "lemur",
    "lion",
    "llama",
    "lynx",
    "magpie",
    "marten",
    "mole",
    "moose",
    "moth",
    "newt",
    "ocelot",
    "orca",
    "otter",
    "owl",
    "panda",
    "puffin",
    "raven",
    "robin",
    "seal",
    "stork",
    "swan",
    "tiger",
    "wombat",
    "wren",
    "yak",
    "zebra",
)
