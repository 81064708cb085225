"""Invitations: one line of text that names a swarm, its tasks and model, and the peers to dial.

Pure; nothing is looked up, dialled or run. One line, here on three:

    swarm:main,curriculum=sapo-9,digest=0123456789abcdef,model=qwen2.5-0.5b,
    at=192.0.2.7:4001+2001:db8::7:4001/12D3KooW…,
    judge=https://judge.example,check=89abcdef

It is a URI (RFC 3986) of ASCII letters without a special meaning in any shell, so it can be pasted without
quotes. All fields except the name and the check are optional; `at` appears once for each peer. Other
characters are percent-encoded. `check` is the beginning of the SHA-256 of the text before it. An invitation
is untrusted: it has no field for files, for code or for the node's limits.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from p2p.address import parse_bootstrap
from p2p.errors import BadAddress
from p2p.types import PeerId
from swarmd.config.addresses import web_address
from swarmd.config.curriculum_name import BUILT_IN
from swarmd.config.messages import nearest, shown
from swarmd.errors import ConfigError

SCHEME: Final = "swarm:"
# Far more than an invitation with eight addresses needs.
MAX_CHARACTERS: Final = 2000
MAX_ADDRESSES: Final = 8
_PLAIN: Final = ":/@._-+"  # characters that need no escape, besides letters and digits
_FIELDS: Final = ("curriculum", "digest", "model", "at", "judge")


@dataclass(frozen=True, slots=True)
class Invitation:
    """The fields of an invitation, checked for form; "" and () mean not given."""

    name: str
    # A curriculum of swarmd, or the name of own tasks, which the invited node needs to have.
    curriculum: str = ""
    # The swarm's digest (exchange/swarm_id.py), which differs by version and tasks.
    digest: str = ""
    model: str = ""  # a short name or a repository of the hub; never a folder
    bootstrap: tuple[str, ...] = ()
    judge: str = ""  # a web address

    def settings(self) -> Mapping[str, object]:
        """Return the configuration keys that the invitation sets."""
        found: dict[str, object] = {
            "swarm.name": self.name,
            "swarm.curriculum": self.curriculum if self.curriculum in BUILT_IN else "",
            "model.name": self.model,
            "swarm.bootstrap": self.bootstrap,
            "judge.url": self.judge,
        }
        return {key: value for key, value in found.items() if value}


def write_invitation(invitation: Invitation) -> str:
    """Write an invitation as text, with its checksum.

    `read_invitation` turns host names into /dns addresses.
    """
    fields = [(key, getattr(invitation, key)) for key in ("curriculum", "digest", "model")]
    places: dict[PeerId, list[str]] = {}
    for peer, endpoint in map(parse_bootstrap, invitation.bootstrap):
        places.setdefault(peer, []).append(f"{endpoint.host}:{endpoint.port}")
    fields += [("at", f"{'+'.join(there)}/{peer}") for peer, there in places.items()]
    fields += [("judge", invitation.judge)]
    text = SCHEME + ",".join(
        [invitation.name, *(f"{key}={quote(value, safe=_PLAIN)}" for key, value in fields if value)]
    )
    return f"{text},check={_check(text)}"


def read_invitation(text: str) -> Invitation:
    """Read an invitation from another person. Raises ConfigError with cause and remedy.

    Pasted spaces, quotes or <> around it are removed, and the link form `swarm://` is accepted.
    """
    text = text.strip(" \t\r\n'\"<>")
    text = re.sub(r"\Aswarm:(//)?", SCHEME, text, flags=re.IGNORECASE)
    if not text.startswith(SCHEME):
        raise ConfigError(
            f"{shown(text)} is not an invitation. Copy the line of `swarmd invite`: it begins with {SCHEME}"
        )
    if len(text) > MAX_CHARACTERS:
        raise _wrong(f"it has {len(text):,} characters (limit {MAX_CHARACTERS:,})")
    body, marker, check = text.rpartition(",check=")
    if not marker:
        raise _wrong("its end is missing: it ends in ,check= and 8 letters", "Copy the whole line again")
    if check != _check(body):
        raise _wrong("it does not match its check: it was changed or truncated", "Copy the whole line again")
    name, *fields = body.removeprefix(SCHEME).split(",")
    said: dict[str, list[str]] = {key: [] for key in _FIELDS}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals or key not in said:
            raise _wrong(f"it has an unknown field, {shown(key)}{nearest(key, _FIELDS)}")
        said[key].append(_decoded(key, value))
    for key, values in said.items():
        if len(values) > 1 and key != "at":
            raise _wrong(f"it says {key} {len(values)} times (limit 1)")
    one = {key: values[0] if values else "" for key, values in said.items()}
    at = tuple(address for value in said["at"] for address in _addresses(value))
    if len(at) > MAX_ADDRESSES:
        raise _wrong(f"it names {len(at)} addresses (limit {MAX_ADDRESSES})")
    found = Invitation(name, one["curriculum"], one["digest"], one["model"], at, one["judge"])
    _require_form(found)
    return found


def _require_form(found: Invitation) -> None:
    """Raise ConfigError if a field of the invitation is malformed."""
    part = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
    for key, value, form, wanted in (
        (
            "name",
            found.name,
            "[a-z0-9][a-z0-9-]{0,31}",
            "at most 32 lower-case letters, digits and hyphens",
        ),
        ("curriculum", found.curriculum, "[a-z0-9][a-z0-9_-]{0,63}", "a curriculum's name, never a file's"),
        ("digest", found.digest, "[0-9a-f]{16}", "16 hexadecimal digits"),
        ("model", found.model, rf"(?!.*\.\.){part}(/{part})?", "a short name or owner/name, never a folder"),
    ):
        if (value or key == "name") and not re.fullmatch(form, value):
            raise _wrong(f"its {key} is {shown(value)}; expected {wanted}")
    if found.curriculum == "auto" or bool(found.curriculum) != bool(found.digest):
        raise _wrong("it has to name a curriculum and its digest, or neither")
    try:
        web_address(found.judge)
    except ValueError as error:
        raise _wrong(f"its judge is {shown(found.judge)}: {error}") from None


def _addresses(value: str) -> Iterator[str]:
    """Yield the multiaddresses of a peer's `at` field. Raises ConfigError."""
    places, _, peer = value.rpartition("/")
    for text in places.split("+"):
        host, _, port = text.rpartition(":")
        try:
            kind = f"ip{ip_address(host).version}"
        except ValueError:
            kind = "dns"
        try:
            _, endpoint = parse_bootstrap(f"/{kind}/{host}/tcp/{port}/p2p/{peer}")
        except BadAddress:
            raise _wrong(
                f"its at is {shown(value)}; expected addresses and a peer id, such as"
                " 203.0.113.7:4001/12D3KooW…"
            ) from None
        yield f"{endpoint}/p2p/{peer}"


def _decoded(key: str, value: str) -> str:
    try:
        decoded = unquote_to_bytes(value).decode("ascii")
    except UnicodeError:
        decoded = ""
    if not decoded or quote(decoded, safe=_PLAIN) != value:
        raise _wrong(f"its {key} is {shown(value)}, which is not canonically percent-encoded ASCII")
    return decoded


def _check(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _wrong(fault: str, remedy: str = "Ask for a new one, and update swarmd if it is old") -> ConfigError:
    return ConfigError(f"the invitation cannot be used: {fault}{'.' * (fault[-1] != '?')} {remedy}.")
