"""What may come from whom how fast: token buckets. Pure; `now` is an argument.

The inbox charges authors, whom only a good signature proves, and connections, which are proved by how they were opened. `Toll` is for
the engines: whoever hands us the bytes is charged before anything is looked into, so that forged and broken messages, which have no
author, are paid for too. A peer in the mesh passes on everybody's frames, so the rate is that of a whole busy swarm and not of one author.
"""

from collections import OrderedDict
from dataclasses import dataclass

LONGEST = 16 * 60.0  # seconds
_DAY = 24 * 3600.0
_PEERS = 1024


class Bucket:
    """Holds `burst` when full, and fills at `rate` a second. What is taken may leave it in debt, of one burst at most."""

    __slots__ = ("at", "left")

    def __init__(self, burst: float, now: float) -> None:
        self.left, self.at = burst, now

    def refill(self, rate: float, burst: float, now: float) -> float:
        """What is in it now. A clock that was set back fills nothing."""
        self.left = min(burst, self.left + max(0.0, now - self.at) * rate)
        self.at = now
        return self.left

    def take(self, amount: float, burst: float) -> None:
        self.left = max(-burst, self.left - amount)


@dataclass(slots=True)
class _Purse:
    frames: float
    broken: float
    at: float


class Toll:
    """Two token buckets per peer, one for all frames and a small one for broken ones.

    Who runs dry is shut out for `ban` seconds, and for twice as long each time it does so again within a day, up to LONGEST.
    """

    def __init__(
        self, rate: float = 200.0, burst: float = 600.0, broken_rate: float = 1.0, broken_burst: float = 30.0, ban: float = 60.0
    ) -> None:
        self.rate, self.burst, self.broken_rate, self.broken_burst, self.ban_seconds = rate, burst, broken_rate, broken_burst, ban
        self._purses: OrderedDict[str, _Purse] = OrderedDict()
        self._banned: OrderedDict[str, float] = OrderedDict()  # peer -> until
        self._again: OrderedDict[str, tuple[int, float]] = OrderedDict()  # peer -> how often it ran dry, and until when it was banned

    def banned(self, peer: str, now: float) -> bool:
        until = self._banned.get(peer)
        if until is not None and until <= now:
            del self._banned[peer]
        return until is not None and until > now

    def pay(self, peer: str, now: float, *, frames: float = 1.0, broken: bool = False) -> bool:
        """False: this was more than the peer had, and from now on it is banned."""
        purse = self._purses.setdefault(peer, _Purse(self.burst, self.broken_burst, now))
        self._purses.move_to_end(peer)
        if len(self._purses) > _PEERS:
            self._purses.popitem(last=False)
        passed, purse.at = max(0.0, now - purse.at), now
        purse.frames = min(self.burst, purse.frames + passed * self.rate) - frames
        purse.broken = min(self.broken_burst, purse.broken + passed * self.broken_rate) - broken
        if purse.frames >= 0 and purse.broken >= 0:
            return True
        del self._purses[peer]
        self.ran_dry(peer, now)
        return False

    def ban(self, peer: str, now: float, seconds: float) -> None:
        """Shut out for so long; a longer ban that there is already stays."""
        self._banned[peer] = max(now + seconds, self._banned.get(peer, 0.0))
        if len(self._banned) > _PEERS:
            self._banned.popitem(last=False)

    def ran_dry(self, peer: str, now: float) -> float:
        """Shut out as one who could not pay; for how many seconds."""
        times, until = self._again.get(peer, (0, now))
        times = times if now - until < _DAY else 0
        seconds = min(LONGEST, self.ban_seconds * float(1 << times))
        self.ban(peer, now, seconds)
        self._again[peer] = (min(times + 1, 16), now + seconds)
        self._again.move_to_end(peer)
        if len(self._again) > _PEERS:
            self._again.popitem(last=False)
        return seconds
