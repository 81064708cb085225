"""Detects a twin, another node with our key, through peers that both are connected to. Sans I/O.

Two nodes with one peer id cannot connect to each other, and GossipSub does not deliver messages that carry
the receiver's id. So each node regularly leaves a signed card with some of its neighbours (question: byte 6
and the card). The neighbour answers with the latest card of another session with the same key, if it got one
within KEPT_S.

    card: msgpack [1, session, started in ms, nonce, echo, signature over the fields before it]

A session is one run of a node. It has a random name, and a nonce that changes every minute. Its cards echo
the newest nonce that it saw in a twin's card. A card with our key that echoes one of our last two nonces
proves that a twin ran within the last two minutes: only an owner of the key can make it, and a card that was
recorded earlier cannot echo such a nonce. No clock is trusted for this proof. The session whose card names
the later start (on a tie, the larger session name) must leave. Both sessions compare the same two cards, so
they agree even if a clock is wrong.
"""

from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec

from p2p.identity import SIGNATURE_BYTES, Identity, verify_key
from p2p.latest import Latest
from p2p.types import PeerId, PeerRequest

VERSION: Final = 1
MAX_CARD_BYTES = 256
# The answer if the peer has no card of another session.
NOTHING = b"\x00"
# Seconds until we draw a new nonce. The old nonce is accepted for as long again.
RENEW_S = 60.0
# Seconds for which we keep a card that was left with us.
KEPT_S = 25.0
# Maximum number of peers whose cards we keep.
MAX_PEERS = 1024
# Maximum number of sessions of one peer whose cards we keep.
MAX_SESSIONS = 2
# After the last proof a twin counts as running for this long, unless `shown_nothing` shows that it ended.
FRESH_S = 90.0
# Maximum number of peers with which we leave our card.
MAX_ASKED = 4
DOMAIN = b"swarmd session v1"

_Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class TwinCard(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: Literal[1]
    session: _Bytes16
    started: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
    nonce: _Bytes16
    echo: _Bytes16
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    def signed(self) -> bytes:
        return _encoder.encode((self.version, self.session, self.started, self.nonce, self.echo))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TwinCard)


def decoded(message: bytes) -> TwinCard | None:
    """Parse a card, but do not check its signature. None if it is malformed or of a later version.

    All fields have bounded sizes, so a card has at most MAX_CARD_BYTES.
    """
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError):
        return None


class TwinSession:
    """Our session: makes our cards, and checks the cards that peers show us."""

    def __init__(self, identity: Identity, started: float, random_bytes: Callable[[int], bytes]) -> None:
        self._identity, self._started, self._random = identity, int(started * 1000), random_bytes
        self._session = random_bytes(16)
        self._nonces = [random_bytes(16)]  # at most two, newest first
        self._renewed = started
        self._echo = bytes(16)
        self._other: tuple[int, bytes] | None = None  # the twin's start (ms) and session
        self._proved_at = float("-inf")

    def question(self, now: float) -> bytes:
        if not 0 <= now - self._renewed < RENEW_S:
            self._nonces, self._renewed = [self._random(16), self._nonces[0]], now
        card = TwinCard(
            VERSION, self._session, self._started, self._nonces[0], self._echo, bytes(SIGNATURE_BYTES)
        )
        signature = self._identity.sign(DOMAIN, card.signed())
        return PeerRequest.TWINS.message(_encoder.encode(msgspec.structs.replace(card, signature=signature)))

    def answered(self, message: bytes, now: float) -> bool:
        """Note a card that a peer showed us. Return True if its nonce is new, so we must echo it at once."""
        card = decoded(message)
        if (
            card is None
            or card.session == self._session
            or not verify_key(self._identity.public_key, DOMAIN, card.signed(), card.signature)
        ):
            return False
        if card.echo in self._nonces:
            self._other, self._proved_at = (card.started, card.session), now
        news, self._echo = card.nonce != self._echo, card.nonce
        return news

    def shown_nothing(self) -> None:
        """Note that every peer that answered had no card of a twin.

        If our session is the one that had to leave, this means that the twin has ended.
        """
        if self._other is not None and (self._started, self._session) > self._other:
            self._other = None

    def earlier_twin(self, now: float) -> bool | None:
        """Return whether the twin started before us, so that we must leave.

        None if no twin was proved in the last FRESH_S.
        """
        other = self._other if 0 <= now - self._proved_at < FRESH_S else None
        return None if other is None else (self._started, self._session) > other

    def whom(self, members: Collection[PeerId]) -> Sequence[PeerId]:
        """Choose the connected peers with which we leave our card.

        The choice depends only on our key and the peers, so that a twin makes the same choice.
        """
        me = self._identity.peer_id
        return sorted(members, key=lambda peer: sha256(f"{me} {peer}".encode()).digest())[:MAX_ASKED]


class TwinCards:
    """Keeps the cards that peers left with us, and answers their questions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Peer -> session -> time of arrival, card.
        self._left: Latest[PeerId, Latest[bytes, tuple[float, bytes]]] = Latest(MAX_PEERS)

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        """Keep the peer's card, and return the newest card of another session of this peer, or NOTHING.

        The connection has proved the peer's id, so the card's signature is not checked here.
        """
        card, now = decoded(message[1:]), self._clock()
        if card is None:
            return b""
        known: dict[bytes, tuple[float, bytes]] = self._left.get(peer) or {}
        sessions = Latest(
            MAX_SESSIONS, ((name, left) for name, left in known.items() if 0 <= now - left[0] < KEPT_S)
        )
        others = sorted(left for name, left in sessions.items() if name != card.session)
        sessions[card.session] = now, message[1:]
        self._left[peer] = sessions
        return others[-1][1] if others else NOTHING
