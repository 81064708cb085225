"""Daily budget of bytes written to the database, for a machine and for its network group.

Keys are free, so the limits apply to addresses; they are tighter for peers without a record. Pure: time is an
argument.
"""

from judge import config
from judge.types import Requester
from p2p.netgroup import machine_of_host, share_group_of_host
from p2p.rate_limit import TokenBucket, TokenBuckets

DAY_S = 86_400


class DiskBudget:
    def __init__(self) -> None:
        self._buckets = {
            record: [TokenBuckets[str](most / DAY_S, most, config.REMEMBERED_PEERS) for most in a_day]
            for record, a_day in config.WRITTEN_A_DAY.items()
        }

    def wait(self, asker: Requester, now: float) -> float:
        """Return the seconds until the asker's machine and group may write again; 0.0: now.

        now: seconds.
        """
        return max(bucket.wait(now, 0.0) for bucket in self._of(asker, now))

    def spend(self, asker: Requester, written: int, now: float) -> None:
        """Charge bytes, even into debt: a question that was asked may also be answered."""
        for bucket in self._of(asker, now):
            bucket.refill(now)
            bucket.spend(written)

    def _of(self, asker: Requester, now: float) -> list[TokenBucket]:
        holders = machine_of_host(asker.host), str(share_group_of_host(asker.host))
        return [of.of(holder, now) for of, holder in zip(self._buckets[asker.record], holders, strict=True)]
