"""Reputation: the score of each peer, from its offences against us, and the peer's network group.

Pure; `now` is an argument. Figures: docs/admission.md.

Theory of operation. Only our own experience of a peer counts, not reports from other peers. Good conduct
earns nothing, because an attacker can behave well for as long as that pays. A clean peer's score is 0. Each
offence lowers the score, and the score halves in HALF_LIFE_S. Below GRAYLIST_THRESHOLD a peer's frames are
ignored and the peer is not chosen for anything (GossipSub's graylist). At BAN_THRESHOLD the peer is banned,
each time for twice as long, up to MAX_BAN_S.

A forwarder is charged only for frames that it could have checked (the REJECT checks) and for their number.
Faults that only regeneration can find are charged to the author. A forwarder of bad frames is banned already
at GRAYLIST_THRESHOLD, for LONGEST_BAN_S at most, because some engines forward frames before they are
checked (docs/p2p.md).

Only the newest MAX_PEERS scores are remembered. That is no weakness: an attacker can take a new key more
cheaply than it can push out its score.
"""

import math
from collections.abc import Mapping

from p2p.latest import Latest
from p2p.rate_limit import LONGEST_BAN_S, Bans, TokenBuckets
from p2p.types import PeerId, Reason

HALF_LIFE_S = 1800.0
# Below this score a peer's frames are ignored, as in GossipSub's specification.
GRAYLIST_THRESHOLD = -20.0
BAN_THRESHOLD = -50.0
MAX_BAN_S = 24 * 3600.0
MAX_PEERS = 8192
# Duplicate frames that a peer may send without a charge. The peer may send one more each second, and one more
# for each new frame.
REPEATED_FRAMES = 200.0

# Costs of an author's offences. They are guesses, tested by the attacks in tests/attacks.
OWN_COST: Mapping[Reason, float] = {
    Reason.NOT_ASKED_FOR: 10.0,
    Reason.UNDECODABLE: 10.0,
    Reason.UNKNOWN_TASK: 5.0,
    Reason.MISLABELLED: 10.0,
    Reason.NOT_ITS_OWN: 10.0,
    Reason.TOO_LONG: 5.0,
    Reason.UNSERVED: 2.0,  # counted by `swarmd.exchange.serving`; low, as a slow node can look like this
}
# Costs of a forwarder's offences: bad frames that it could have checked, or too many frames.
PASSED_ON_COST: Mapping[Reason, float] = {
    Reason.TOO_LARGE: 2.0,
    Reason.MALFORMED: 1.0,
    Reason.BAD_SIGNATURE: 1.0,
    Reason.OTHER_SWARM: 1.0,
    Reason.FLOODING: 0.005,  # for each frame
    Reason.DUPLICATE: 0.2,  # for each frame beyond REPEATED_FRAMES
}
# Cost of each further frame from a graylisted peer: at ten frames a second it is banned in a minute.
GRAYLISTED_FRAME_COST = 0.05


class Reputation:
    """The scores of all peers. They are not saved, because a banned peer can take a new key for free."""

    def __init__(self, limit: int = MAX_PEERS) -> None:
        self._scores: Latest[PeerId, tuple[float, float]] = Latest(limit)  # score, time of that score
        self._bans = Bans()
        # The network group of each peer when we were last connected.
        self._groups: Latest[PeerId, str] = Latest(limit)
        # Duplicates that each peer may still send without a charge.
        self._repeats = TokenBuckets[PeerId](1.0, REPEATED_FRAMES, limit)

    def offence(self, peer: PeerId, reason: Reason, now: float) -> float | None:
        """Charge the peer for an offence. Return the seconds to ban it for, or None for no ban."""
        own, talks_on = reason in OWN_COST, reason is Reason.SHUNNED
        cost = GRAYLISTED_FRAME_COST if talks_on else OWN_COST.get(reason, PASSED_ON_COST.get(reason, 0.0))
        # The frame's author is graylisted, not this forwarder.
        spared = talks_on and not self.shunned(peer, now)
        if spared or not cost or (reason is Reason.DUPLICATE and not self._repeats.of(peer, now).wait(now)):
            return None
        score = self.score(peer, now) - cost
        self._scores[peer] = score, now
        threshold = BAN_THRESHOLD if own or talks_on else GRAYLIST_THRESHOLD
        if score > threshold or self._bans.banned(peer, now):
            return None
        # The score after the ban: half of BAN_THRESHOLD is still graylisted, half of GRAYLIST_THRESHOLD is
        # probation.
        self._scores[peer] = threshold / 2, now
        return self._bans.ban_again(peer, now, MAX_BAN_S if own else LONGEST_BAN_S)

    def admitted(self, via: PeerId, now: float) -> None:
        """Credit the peer for a new, good frame: it may send one more duplicate."""
        self._repeats.of(via, now).spend(-1.0)

    def met(self, peer: PeerId, group: str) -> None:
        """Note that we are connected to a peer in this network group (`p2p.netgroup`)."""
        self._groups[peer] = group

    def score(self, peer: PeerId, now: float) -> float:
        """Return the peer's score: 0 if it is clean or unknown, below 0 after offences."""
        score, at = self._scores.get(peer, (0.0, now))
        return score * math.exp2(-max(0.0, now - at) / HALF_LIFE_S)

    def shunned(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer is banned or graylisted, so that its frames are ignored."""
        return self._bans.banned(peer, now) or self.score(peer, now) < GRAYLIST_THRESHOLD

    def group(self, peer: PeerId) -> str:
        """Return the peer's network group; empty if we never met the peer."""
        return self._groups.get(peer, "")
