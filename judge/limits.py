"""How often one peer may ask. Pure: the time is an argument."""

from collections import OrderedDict
from dataclasses import dataclass

REMEMBERED_PEERS = 10_000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class TokenBuckets:
    """One token bucket per key: `burst` at once, then one each `seconds`. Memory is bounded; the longest idle are forgotten.

    A forgotten bucket was idle, so it was nearly full: forgetting gives a peer at most one burst.
    """

    def __init__(self, burst: int, seconds: float, remembered: int = REMEMBERED_PEERS) -> None:
        self._burst, self._seconds, self._remembered = burst, seconds, remembered
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, key: str, now: float) -> float:
        """Take one token and return 0.0, or leave the bucket and return the seconds until there is one. `now`: monotonic seconds."""
        bucket = self._buckets.setdefault(key, _Bucket(float(self._burst), now))
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)
        bucket.tokens = min(float(self._burst), bucket.tokens + (now - bucket.at) / self._seconds)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * self._seconds
        bucket.tokens -= 1
        return 0.0
