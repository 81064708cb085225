"""Counts the authors heard in one shard, for the swarm's size. Pure; `now` is an argument.

A new key costs nothing, so an author that only sends counts for nothing. One counts that we were connected to within the last hour, or
that proved useful to us (`p2p.admission.reputation`). A connection costs an address, and usefulness costs work, but neither costs
much. So there are two caps:

- of one network group, GROUP authors count at most; the local network has no such cap;
- authors that we were never connected to count together at most as many as the others do, or FAR where those are fewer.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from p2p.netgroup import LOCAL
from p2p.types import PeerId

GROUP = 8
FAR = 3
_QUIET = 150.0  # seconds after which an author heard once counts as gone
_GAPS = 2.5  # … and one heard more often, in its own mean gaps
_QUIET_RANGE = (60.0, 900.0)
_AUTHORS = 4096  # remembered
_MET = 3600.0  # seconds for which a connection that has ended counts


class Met:
    """Peers that we are or were lately connected to, with their network groups (`p2p.netgroup`)."""

    def __init__(self) -> None:
        self.connected: Mapping[PeerId, str] = {}
        self._until: dict[PeerId, tuple[str, float]] = {}  # soonest forgotten first

    def look(self, connected: Mapping[PeerId, str], now: float) -> None:
        self.connected = connected
        for peer, group in connected.items():
            self._until.pop(peer, None)
            self._until[peer] = (group, now + _MET)
        while self._until and (len(self._until) > _AUTHORS or next(iter(self._until.values()))[1] <= now):
            del self._until[next(iter(self._until))]

    def group(self, peer: PeerId) -> str | None:
        """None: we were not connected to it lately."""
        known = self._until.get(peer)
        return known[0] if known is not None else None


class Headcount:
    """Authors heard lately in one shard. How long each counts follows from how often it speaks. `heard` takes only those that count."""

    def __init__(self, now: float) -> None:
        self.since = now
        # author -> when last, the seconds after which it counts as gone, and whether it proved useful
        self._heard: dict[PeerId, tuple[float, float, bool]] = {}

    def heard(self, author: PeerId, now: float, *, proven: bool) -> None:
        last, quiet, _ = self._heard.pop(author, (None, _QUIET, False))
        if last is not None:
            low, high = _QUIET_RANGE
            quiet += 0.3 * (min(high, max(low, _GAPS * (now - last))) - quiet)
        self._heard[author] = (now, quiet, proven)
        if len(self._heard) > _AUTHORS:
            del self._heard[next(iter(self._heard))]

    def has(self, author: PeerId, now: float) -> bool:
        known = self._heard.get(author)
        return known is not None and now - known[0] <= known[1]

    def count(self, now: float, met: Met, but: Collection[PeerId] = ()) -> int:
        """How many authors are here, as far as they count. but: those that do not, unless they proved useful."""
        here = {author: proven for author, proven in self._here(now).items() if proven or author not in but}
        groups = {author: met.group(author) for author in here}
        near = Counter(group for group in groups.values() if group is not None)
        count = sum(number if group == LOCAL else min(number, GROUP) for group, number in near.items())
        far = sum(proven and groups[author] is None for author, proven in here.items())
        return count + min(far, max(count, FAR))

    def apart(self, now: float, connected: Collection[PeerId]) -> int:
        """How many authors are here that proved useful and are not connected to us."""
        return sum(proven and author not in connected for author, proven in self._here(now).items())

    def proven(self, now: float) -> int:
        """How many authors are here that proved useful."""
        return sum(self._here(now).values())

    def _here(self, now: float) -> Mapping[PeerId, bool]:
        for author in [author for author, (last, quiet, _) in self._heard.items() if now - last > quiet]:
            del self._heard[author]
        return {author: proven for author, (_, _, proven) in self._heard.items()}
