"""Detects another node with our key, through the members that both are connected to. Sans I/O.

Two peers with one id cannot be connected to each other, and GossipSub does not deliver messages of the own
id. So each node leaves a signed card with some of its neighbours now and then (question: byte 6 and the
card). The answer is the card that another session under the same key left there within the last half minute,
if there is one.

    card: msgpack [1, session, started in ms, nonce, echo, signature over what is before it]

A session has a random name, and a nonce that is drawn anew every minute. Its cards echo the newest nonce of
another session that it was shown. A card under our key that echoes one of our last two nonces proves that
another session with our key ran within the last two minutes: nobody without the key can make one, and a card
from before a restart, or one that is kept and shown later, echoes no such nonce. No clock is trusted. The
session whose card names the later start (then the larger session) has to leave: both come to the same result,
even where a clock is wrong.
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
# The answer where there is no other card.
NOTHING = b"\x00"
# How long a nonce is ours. It is accepted for as long again.
RENEW_S = 60.0
# How long a card left with us is shown.
KEPT_S = 25.0
# Peers whose cards we keep.
MAX_PEERS = 1024
# Sessions of each.
MAX_SESSIONS = 2
# A twin counts as running for so long after the last proof, unless we see that it is gone.
FRESH_S = 90.0
# Peers that are asked.
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
    """Parse a card without checking its signature; None where it is none, or of a later version.

    All its parts are of bounded size, so it has at most MAX_CARD_BYTES.
    """
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError):
        return None


class TwinSession:
    """Our session: makes our cards, and checks those that we are shown."""

    def __init__(self, identity: Identity, started: float, random_bytes: Callable[[int], bytes]) -> None:
        self._identity, self._started, self._random = identity, int(started * 1000), random_bytes
        self._session = random_bytes(16)
        self._nonces = [random_bytes(16)]  # the newest first
        self._renewed = started
        self._echo = bytes(16)
        self._other: tuple[int, bytes] | None = None  # started, session
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
        """Note a card that a member showed us. Returns whether our next card is new, to be sent at once."""
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
        """Note that no member showed us a card.

        A session that had left is back for this check alone, so the other one has ended.
        """
        if self._other is not None and (self._started, self._session) > self._other:
            self._other = None

    def earlier_twin(self, now: float) -> bool | None:
        """Return whether the other session started before ours, so that ours has to leave.

        None where none was proved in the last FRESH_S.
        """
        if self._other is None or not 0 <= now - self._proved_at < FRESH_S:
            return None
        return (self._started, self._session) > self._other

    def whom(self, members: Collection[PeerId]) -> Sequence[PeerId]:
        """Choose the connected peers to leave our card with.

        They are chosen by key, so that two nodes with one key choose alike.
        """
        me = self._identity.peer_id
        return sorted(members, key=lambda peer: sha256(f"{me} {peer}".encode()).digest())[:MAX_ASKED]


class TwinCards:
    """Keeps the cards that others left with us, and answers the question."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Peer -> session -> when, card
        self._left: Latest[PeerId, Latest[bytes, tuple[float, bytes]]] = Latest(MAX_PEERS)

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        """Return the newest card of another session of the same peer, or NOTHING.

        The connection proves who the peer is.
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
