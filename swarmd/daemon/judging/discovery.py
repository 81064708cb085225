"""Judge discovery: a node with a judge announces itself in the DHT and tells the judge's URL on request.

The key in the DHT is the curriculum's.

Question: byte 2. Answer: up to 4 web addresses, each after its length as one byte. `swarmd bootstrap --judge`
answers; a node with judge.url = "auto" asks. An address from a peer is a stranger's word: it is used only
because the operator said so, only with https, and the status says whose word it is. What a judge says is
checked as always (`swarmd.daemon.judging.client`).
"""

import ipaddress
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import trio

from p2p.identity import nickname
from p2p.member import Member
from p2p.nat.dial_back import seen_at
from p2p.netgroup import is_public
from p2p.peers.introduction import ask_each
from p2p.topic import Topic
from p2p.types import Peer, PeerId, PeerRequest, Unanswered
from swarmd.config.addresses import web_origin
from swarmd.errors import ConfigError

MAX_URLS = 4
MAX_URL_BYTES = 200
# Peers that are asked.
MAX_ASKED = 8
# The time for one peer's answer.
PEER_TIMEOUT_S = 10.0
# The gaps double from the first. Records last a day.
FIRST_S, SEEK_EVERY_S, ANNOUNCE_EVERY_S = 3.0, 60.0, 1200.0
AUTO = "auto"
# With a point; the last label begins with a letter, or some read it as a number.
_NAME = r"([a-z0-9_-]+\.)+[a-z][a-z0-9-]*"
_NOT_OUTSIDE = (".localhost", ".local", ".internal", ".home.arpa")

log = logging.getLogger(__name__)


def judges_topic(topic: Topic) -> Topic:
    """Return the topic under which nodes that know a judge of this curriculum announce themselves.

    It is the same for every swarm name; no swarm has its name.
    """
    return replace(topic, name="swarmd", digest=f"judges-{topic.digest}")


def pack(urls: Sequence[str]) -> bytes:
    """Encode judge URLs as length-prefixed ASCII.

    Raises ValueError for more URLs, or longer ones, than a receiver reads.
    """
    encoded = [url.encode("ascii") for url in urls]
    if len(encoded) > MAX_URLS or any(not 0 < len(url) <= MAX_URL_BYTES for url in encoded):
        raise ValueError(f"at most {MAX_URLS} addresses of {MAX_URL_BYTES} letters")
    return b"".join(bytes([len(url)]) + url for url in encoded)


def unpack(message: bytes) -> list[str]:
    """Decode judge URLs from any bytes: at most MAX_URLS, each normalised; [] where it is no such answer."""
    found: list[str] = []
    at = 0
    while at < len(message):
        url = message[at + 1 : at + 1 + message[at]]
        at += 1 + message[at]
        try:
            found.append(web_origin(url.decode("ascii")))
        except ValueError:
            return []
        if at > len(message) or len(url) > MAX_URL_BYTES or len(found) > MAX_URLS:
            return []
    return found


def usable(url: str, *, same_machine: bool) -> bool:
    """Return whether a URL that a peer told may be dialled.

    It may name a host or a public address with https; this machine only by its own word. Where a name leads
    is checked when it is dialled (`public_addresses`).
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return (
            parts.scheme == "https"
            and re.fullmatch(_NAME, host) is not None
            and not host.endswith(_NOT_OUTSIDE)
        )
    if ip.is_loopback:
        return same_machine
    return parts.scheme == "https" and is_public(host)


async def public_addresses(host: str, port: int) -> Sequence[str]:
    """Look up the IP addresses of a host that a peer named.

    Raises OSError where there are none, or where one of them is not public.
    """
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    if not addresses or not all(map(is_public, addresses)):
        raise OSError(f"{host} is no public address")
    return addresses


def advertised(urls: Sequence[str]) -> tuple[str, ...]:
    """Normalise the judge URLs that an operator gave to advertise.

    Raises ConfigError.
    """
    origins = []
    for url in urls:
        try:
            origins.append(web_origin(url))
            pack([origins[-1]])
        except ValueError as error:
            raise ConfigError(
                f"--judge {url!r} is not a judge's address: {error}; give https://host[:port]"
            ) from None
        if not usable(origins[-1], same_machine=True):
            raise ConfigError(
                f"--judge {url}: no node would use it: a judge is advertised with https and a public address"
            )
    if len(origins) > MAX_URLS:
        raise ConfigError(f"--judge: at most {MAX_URLS} judges can be advertised")
    return tuple(origins)


class JudgeAdvertiser:
    """Tells others of these judges. Add `answer` to the member's answers, and run it."""

    def __init__(self, member: Member, urls: Sequence[str]) -> None:
        self._member, self._answer = member, pack(urls)

    def answer(self, _peer: PeerId, message: bytes) -> bytes:
        return self._answer if message == PeerRequest.JUDGES.message() else b""

    async def run(self) -> None:
        """Keep the DHT's records fresh until cancelled."""
        wait = FIRST_S
        while True:
            await trio.sleep(wait)
            try:
                await self._member.engine.announce(judges_topic(self._member.topic))
                wait = min(2 * wait, ANNOUNCE_EVERY_S)  # those that come to the DHT early on hold it too
            except Unanswered as error:
                log.debug("the judges could not be announced: %s", error)
                wait = min(2 * wait, SEEK_EVERY_S)


@dataclass(frozen=True, slots=True)
class Found:
    """A judge, and whose word it is."""

    url: str
    by: Sequence[PeerId]


def choose(told: Iterable[tuple[PeerId, str]], trusted: Collection[PeerId]) -> Found | None:
    """Return the judge that most of the operator's bootstrap peers advertise.

    Ties are broken by the number of all peers that advertise it, then by URL.
    """
    by: dict[str, list[PeerId]] = defaultdict(list)
    for peer, url in told:
        if peer not in by[url]:
            by[url].append(peer)
    ranked = sorted(by, key=lambda url: (-len({*by[url]} & {*trusted}), -len(by[url]), url))
    return Found(ranked[0], tuple(by[ranked[0]])) if ranked else None


class JudgeSearch:
    """Looks for a judge until one is found. trusted: the bootstrap peers that the operator named."""

    def __init__(self, member: Member, trusted: Collection[PeerId]) -> None:
        self._member, self._trusted = member, trusted
        self.found: Found | None = None

    async def run(self, lost: Sequence[str] = ()) -> Found:
        """Ask peers until a judge is found.

        lost: judges that failed, the last one last. The last is not taken, and the others only where nobody
            tells of a new one.
        """
        wait = FIRST_S
        while True:
            await trio.sleep(wait)
            wait = min(2 * wait, SEEK_EVERY_S)
            told = await self._ask()
            for without in (lost, lost[-1:]):
                if found := choose([(peer, url) for peer, url in told if url not in without], self._trusted):
                    self.found = found
                    return found

    async def _ask(self) -> list[tuple[PeerId, str]]:
        try:
            peers = await self._member.engine.find(judges_topic(self._member.topic))
        except Unanswered as error:
            log.debug("no judges were found: %s", error)
            return []
        asked = sorted(dict.fromkeys(peers), key=lambda peer: peer not in self._trusted)[:MAX_ASKED]
        limit = MAX_URLS * (1 + MAX_URL_BYTES)
        said = await ask_each(
            lambda peer: self._member.engine.request(peer, PeerRequest.JUDGES.message(), limit),
            asked,
            PEER_TIMEOUT_S,
        )
        here = {peer: _on_this_machine(self._member.peers(), peer) for peer in said}
        told = [
            (peer, url)
            for peer, message in said.items()
            for url in unpack(message)
            if usable(url, same_machine=here[peer])
        ]
        return sorted(told)

    def document(self) -> dict[str, Any]:
        """Return the status' lines about who advertises the judge, or that nobody does."""
        if self.found is not None:
            return {"advertised_by": [{"id": peer, "name": nickname(peer)} for peer in self.found.by]}
        nobody = {
            "cause": "no peer of this swarm advertises a judge yet",
            "remedy": "wait, or set judge.url to one",
        }
        return {"url": AUTO, "score": None, "n": 0, **nobody, "advertised_by": []}


def _on_this_machine(peers: Sequence[Peer], peer: PeerId) -> bool:
    return any(
        known.id == peer and (address := seen_at(known)) is not None and address.is_loopback
        for known in peers
    )
