"""What each connected peer may cost us, before anything it sends is looked into. Pure; `now` is an argument.

The inbox charges authors, whom only a good signature proves. Here whoever hands us the bytes is charged, so that forged and
broken frames, which have no author, are paid for too. A peer in the mesh passes on everybody's frames, so the rate is that of a
whole busy swarm and not of one author.
"""

from collections import OrderedDict

_PEERS = 1024


class Toll:
    """A token bucket per peer: a good frame costs 1, a bad one `bad`. Who runs dry is shut out for `ban` seconds."""

    def __init__(self, rate: float = 200.0, burst: float = 600.0, bad: float = 20.0, ban: float = 60.0) -> None:
        self.rate, self.burst, self.bad, self.ban = rate, burst, bad, ban
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer -> (tokens, at)
        self._banned: OrderedDict[str, float] = OrderedDict()  # peer -> until

    def banned(self, peer: str, now: float) -> bool:
        until = self._banned.get(peer)
        if until is not None and until <= now:
            del self._banned[peer]
        return until is not None and until > now

    def pay(self, peer: str, now: float, *, bad: bool = False) -> bool:
        """False: this was more than the peer had, and from now on it is banned."""
        tokens, at = self._left.get(peer, (self.burst, now))
        tokens = min(self.burst, tokens + max(0.0, now - at) * self.rate) - (self.bad if bad else 1.0)
        self._left[peer] = (tokens, now)
        self._left.move_to_end(peer)
        if len(self._left) > _PEERS:
            self._left.popitem(last=False)
        if tokens >= 0:
            return True
        del self._left[peer]
        self._banned[peer] = now + self.ban
        if len(self._banned) > _PEERS:
            self._banned.popitem(last=False)
        return False
