"""Dial-back: a node asks connected members to dial it, to learn whether other nodes can reach it.

Question: byte 3 and a port as two bytes, big-endian. Answer: one byte for the outcome, then the IP address
from which the asker's connection comes, 4 or 16 bytes. Outcomes: 0, refused; 1, dial in progress, ask again;
2, reached, the asker answered there; 3, not reached.

The member dials only the address from which the connection comes, at a port from 1024 up, within a rate
limit. It reports only whether the asker's key answered there. So nobody can use it to dial or probe a third
party (like libp2p's AutoNAT: github.com/libp2p/specs, autonat, autonat-v1.md, "Security Considerations").
"""

import ipaddress
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import trio

from p2p.address import parse_endpoint
from p2p.netgroup import LOCAL, MIN_PORT, group_of_host
from p2p.peers.introduction import ask_each
from p2p.peers.noise_probe import NoPeer, knock
from p2p.rate_limit import TokenBucket
from p2p.types import Ask, Peer, PeerId, PeerRequest

# Seconds for which an outcome is kept. In that time at most PORTS ports of one peer are dialled.
KEPT_S = 30.0
PORTS = 2
# Dials for all peers together: rate and burst.
DIALS_PER_S, DIALS_AT_ONCE = 1.0, 8.0
ASK_AGAIN_S = 0.5
# Timeout of one member's answer.
MEMBER_TIMEOUT_S = 8.0
# Maximum number of members that we ask.
MAX_ASKED = 4
# The outcome and an IPv6 address.
MAX_REPLY_BYTES = 17
PORT_BYTES = 2

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

log = logging.getLogger(__name__)


class Outcome(IntEnum):
    REFUSED = 0
    TRYING = 1
    REACHED = 2
    NOT_REACHED = 3


@dataclass(frozen=True, slots=True)
class DialBackReply:
    outcome: Outcome
    seen_at: Address | None  # our address, as the asked peer sees it


def question(port: int) -> bytes:
    return PeerRequest.DIAL_BACK.message(port.to_bytes(PORT_BYTES, "big"))


def answered(message: bytes) -> DialBackReply | None:
    """Parse an answer; None if it is malformed."""
    if len(message) not in (1, 5, 17) or message[0] > max(Outcome):
        return None
    return DialBackReply(Outcome(message[0]), ipaddress.ip_address(message[1:]) if len(message) > 1 else None)


def seen_at(peer: Peer | None) -> Address | None:
    """Return the IP address from which the peer's connection comes; None if it comes through a relay."""
    endpoint = parse_endpoint(peer.address) if peer is not None else None
    if endpoint is None or not endpoint.kind.startswith("ip"):
        return None
    address = ipaddress.ip_address(endpoint.host)
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


class DialBack:
    """Answers dial-back questions. Refuses all while it has no nursery, in which it dials."""

    def __init__(
        self,
        peers: Callable[[], Sequence[Peer]],
        clock: Callable[[], float],
        *,
        knock: Callable[[str, int], Awaitable[PeerId]] = knock,
    ) -> None:
        self._peers, self._clock, self._knock = peers, clock, knock
        self._outcomes: OrderedDict[tuple[PeerId, int], tuple[float, Outcome]] = OrderedDict()
        self._dials = TokenBucket(DIALS_PER_S, DIALS_AT_ONCE, clock())
        self.nursery: trio.Nursery | None = None

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        """Answer a dial-back question; empty if it is malformed."""
        if (content := PeerRequest.DIAL_BACK.content(message)) is None or len(content) != PORT_BYTES:
            return b""
        address = seen_at(next((known for known in self._peers() if known.id == peer), None))
        outcome = self._outcome(peer, address, int.from_bytes(content, "big"))
        return bytes([outcome]) + (address.packed if address is not None else b"")

    def _outcome(self, peer: PeerId, address: Address | None, port: int) -> Outcome:
        now = self._clock()
        while self._outcomes and now - next(iter(self._outcomes.values()))[0] > KEPT_S:
            self._outcomes.popitem(last=False)
        if (peer, port) in self._outcomes:
            return self._outcomes[peer, port][1]
        tried = Counter(asker for asker, _ in self._outcomes)[peer]
        if (
            address is None
            or port < MIN_PORT
            or tried >= PORTS
            or self.nursery is None
            or self._dials.wait(now)
        ):
            return Outcome.REFUSED
        self._outcomes[peer, port] = now, Outcome.TRYING
        self.nursery.start_soon(self._try, peer, str(address), port, now)
        return Outcome.TRYING

    async def _try(self, peer: PeerId, host: str, port: int, asked: float) -> None:
        outcome = Outcome.NOT_REACHED
        try:
            if await self._knock(host, port) == peer:
                outcome = Outcome.REACHED
        except NoPeer as error:
            log.debug("%s cannot be dialled back at %s, port %d: %s", peer, host, port, error)
        if (peer, port) in self._outcomes:
            self._outcomes[peer, port] = asked, outcome


def can_be_dialled(replies: Iterable[DialBackReply]) -> bool | None:
    """Return whether nodes on the internet can dial us; None if no member outside our network could tell.

    Being reached over IPv6 alone counts as False, because many members have no IPv6.
    """
    said = {
        (reply.outcome, reply.seen_at.version)
        for reply in replies
        if reply.seen_at is not None and group_of_host(str(reply.seen_at)) != LOCAL
    }
    if (Outcome.REACHED, 4) in said:
        return True
    return False if {outcome for outcome, _ in said} & {Outcome.REACHED, Outcome.NOT_REACHED} else None


def who_dials_back(peers: Iterable[Peer], ports: Mapping[str, int]) -> dict[PeerId, int]:
    """Choose up to MAX_ASKED members, and the port at which each should dial us back.

    IPv4 and IPv6 take turns. Members outside our local network come first, because they see our public
    address; among them members that we dialled.

    ports: our listen ports, by "ip4" and "ip6".
    """
    met = sorted(
        (group_of_host(endpoint.host) == LOCAL, peer.direction != "outbound", peer.id, endpoint.kind)
        for peer in peers
        if (endpoint := parse_endpoint(peer.address)) is not None
    )
    turns = itertools.zip_longest(
        *([(peer, ports[kind]) for *_, peer, its in met if its == kind] for kind in sorted(ports))
    )
    return dict([one for turn in turns for one in turn if one is not None][:MAX_ASKED])


async def ask_members(ask: Ask, members: Mapping[PeerId, int]) -> dict[PeerId, DialBackReply]:
    """Ask these members, all at the same time, to dial us back at the given ports.

    Members that do not know the question, or have no outcome in time, are left out.
    """

    async def until_tried(member: PeerId) -> DialBackReply | None:
        while (
            reply := answered(await ask(member, question(members[member]), MAX_REPLY_BYTES))
        ) is not None and reply.outcome is Outcome.TRYING:
            await trio.sleep(ASK_AGAIN_S)
        return reply

    said = await ask_each(until_tried, members, MEMBER_TIMEOUT_S)
    return {member: reply for member, reply in said.items() if reply is not None}
