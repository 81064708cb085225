"""Reputation: a score for each peer, from what it did to us, and its network group.

Pure; `now` is an argument. Figures: docs/admission.md.

Theory of operation. What others say of a peer counts for nothing, and good conduct earns it nothing: anybody
can behave well for as long as it pays. A score is 0 while the peer is clean. It falls with each offence, and
half of it comes back in HALF_LIFE_S. Below GRAYLIST_THRESHOLD a peer's frames are ignored and nothing of it
is chosen (GossipSub's graylist). At BAN_THRESHOLD it is banned, each time for twice as long, up to MAX_BAN_S.
A forwarder is blamed only for what it could check itself (the REJECT checks) and for how much it sends; what
only regeneration finds is the author's fault. A connection that brings bad frames is ended as soon as its
peer is at GRAYLIST_THRESHOLD, but for LONGEST_BAN_S at most, because some engines pass on frames before
they are checked (docs/p2p.md).

It remembers MAX_PEERS scores, the newest: who needs a score forgotten can take another key for less.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from p2p.latest import Latest
from p2p.rate_limit import LONGEST_BAN_S, Bans, TokenBuckets
from p2p.types import PeerId, Reason

HALF_LIFE_S = 1800.0
# Below this score a peer's frames are ignored, as in GossipSub's specification.
GRAYLIST_THRESHOLD = -20.0
BAN_THRESHOLD = -50.0
MAX_BAN_S = 24 * 3600.0
MAX_PEERS = 8192
# Frames that a peer may repeat to us. It regains one each second, and one with each frame that is new.
REPEATED_FRAMES = 200.0

# Own offences of a peer. The costs are guesses; the attacks in tests/attacks support them.
OWN_COST: Mapping[Reason, float] = MappingProxyType(
    {
        Reason.NOT_ASKED_FOR: 10.0,
        Reason.UNDECODABLE: 10.0,
        Reason.UNKNOWN_TASK: 5.0,
        Reason.MISLABELLED: 10.0,
        Reason.NOT_ITS_OWN: 10.0,
        Reason.TOO_LONG: 5.0,
        Reason.UNSERVED: 2.0,  # counted by `swarmd.exchange.serving`; low, as a slow node can look like this
    }
)
# Bad frames that it passed on and could have checked, or more frames than it may send.
PASSED_ON_COST: Mapping[Reason, float] = MappingProxyType(
    {
        Reason.TOO_LARGE: 2.0,
        Reason.MALFORMED: 1.0,
        Reason.BAD_SIGNATURE: 1.0,
        Reason.OTHER_SWARM: 1.0,
        Reason.FLOODING: 0.005,  # for each frame
        Reason.DUPLICATE: 0.2,  # for each frame beyond REPEATED_FRAMES
    }
)
# A frame of a peer whose frames are ignored already: at ten a second it is banned in a minute.
GRAYLISTED_FRAME_COST = 0.05


class Reputation:
    """The scores of all peers. A restart begins with none: a new key has none either, and keys are free."""

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._scores: Latest[PeerId, tuple[float, float]] = Latest(limit)  # score, and when it was that
        self._bans = Bans()
        # The network group of each peer when we were last connected.
        self._groups: Latest[PeerId, str] = Latest(limit)
        # Frames that each peer may still repeat.
        self._repeats = TokenBuckets[PeerId](1.0, REPEATED_FRAMES, limit)

    def offence(self, peer: PeerId, reason: Reason, now: float) -> float | None:
        """Charge the peer for an offence. Returns the seconds to ban it for, if it is to be banned now."""
        own, talks_on = reason in OWN_COST, reason is Reason.SHUNNED
        cost = GRAYLISTED_FRAME_COST if talks_on else OWN_COST.get(reason, PASSED_ON_COST.get(reason, 0.0))
        if talks_on and not self.shunned(peer, now):
            # The forwarder is not to blame: it is the author that is graylisted.
            return None
        if not cost or (reason is Reason.DUPLICATE and self._repeats.of(peer, now).wait(now) == 0):
            return None
        score = self.score(peer, now) - cost
        self._scores[peer] = score, now
        threshold = BAN_THRESHOLD if own or talks_on else GRAYLIST_THRESHOLD
        if score > threshold or self._bans.banned(peer, now):
            return None
        # After the ban its frames are ignored for a while still, or it is on probation.
        self._scores[peer] = threshold / 2, now
        return self._bans.ban_again(peer, now, MAX_BAN_S if own else LONGEST_BAN_S)

    def admitted(self, via: PeerId, now: float) -> None:
        """Credit the peer that handed us a new and good frame: it may repeat one more."""
        self._repeats.of(via, now).spend(-1.0)

    def met(self, peer: PeerId, group: str) -> None:
        """Note that we are connected to a peer in this network group (`p2p.netgroup`)."""
        self._groups[peer] = group

    def score(self, peer: PeerId, now: float) -> float:
        """Return 0 for a clean or unknown peer, below 0 for others."""
        score, at = self._scores.get(peer, (0.0, now))
        return score * math.exp2(-max(0.0, now - at) / HALF_LIFE_S)

    def shunned(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer's frames are ignored and nothing of it is chosen."""
        return self._bans.banned(peer, now) or self.score(peer, now) < GRAYLIST_THRESHOLD

    def group(self, peer: PeerId) -> str:
        """Return the peer's network group; empty where we never met it."""
        return self._groups.get(peer, "")
