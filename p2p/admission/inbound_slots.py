"""Places for connections that come in: who gets one, and who has to leave. Pure; `now` is an argument."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from p2p.netgroup import group_of_host, machine_of_host
from p2p.rate_limit import TokenBuckets

K = TypeVar("K")

# libp2p's network has 160 connections in all; the rest is for peers that we dial.
MOST = 112
# Connections from one machine: each costs a handshake before we know whose it is.
ARRIVALS_PER_S, ARRIVALS_AT_ONCE = 2.0, 100.0
# One network group may open so many times as many.
GROUP_FACTOR = 4.0
# Who came so long ago has met others by now.
SERVED_S = 60.0


def one_too_many(held: Mapping[K, Sequence[Hashable]], newcomer: Sequence[Hashable]) -> K | None:
    """Return whose place a newcomer gets if all are taken; None if the newcomer gets none.

    It is the youngest of the largest network group, in it of the largest machine, and so on. The newcomer
    counts, and its own part is the largest of equal ones.

    held: the path of each, such as network group and machine, the oldest first. All have the same length.
    """
    found: dict[K | None, Sequence[Hashable]] = {None: newcomer, **dict([*held.items()][::-1])}
    for level in range(len(newcomer)):
        ((largest, _),) = Counter(path[level] for path in found.values()).most_common(1)
        found = {one: path for one, path in found.items() if path[level] == largest}
    return next(iter(found))


def who_leaves(
    groups: Mapping[K, str], own: str, may_leave: Callable[[K], bool] = lambda _: True
) -> K | None:
    """Return who makes room for a newcomer of the network group `own` if all places are taken, if anybody.

    No group may have too many: the largest loses its youngest (`one_too_many`). Else the oldest leaves that
    may, of the newcomer's group or a larger one.

    groups: the group of each, the oldest first.
    """
    if (youngest := one_too_many({one: (group,) for one, group in groups.items()}, (own,))) is not None:
        return youngest
    held = Counter(groups.values())
    return next(
        (
            one
            for one, group in groups.items()
            if (group == own or held[group] > held[own]) and may_leave(one)
        ),
        None,
    )


@dataclass(slots=True)
class Arrival:
    """A connection that came in and has a place."""

    machine: str
    group: str
    since: float
    peer: Any = None  # once it has proved who it is


class InboundSlots:
    def __init__(self) -> None:
        self.held: dict[Any, Arrival] = {}  # connection -> what is known of it, oldest first
        # Whether a peer has a reservation with us.
        self.reserved: Callable[[Any], bool] = lambda _: False
        self._by_machine = TokenBuckets[str](ARRIVALS_PER_S, ARRIVALS_AT_ONCE)
        self._by_group = TokenBuckets[str](GROUP_FACTOR * ARRIVALS_PER_S, GROUP_FACTOR * ARRIVALS_AT_ONCE)

    def take(self, connection: Any, host: str, now: float) -> Any:
        """Give a place to a connection from a host.

        Returns the connection to close for it, if any: this one itself, where it gets no place.

        Its machine pays first: what it has too many costs its neighbours nothing.
        """
        arrival = Arrival(machine_of_host(host), group_of_host(host) or "", now)
        if any(
            buckets.of(key, now).wait(now) > 0
            for buckets, key in ((self._by_machine, arrival.machine), (self._by_group, arrival.group))
        ):
            return connection
        leaving = None
        if len(self.held) >= MOST:
            leaving = self._least_needed(arrival, now)
            if leaving is None:
                return connection
            del self.held[leaving]
        self.held[connection] = arrival
        return leaving

    def _least_needed(self, newcomer: Arrival, now: float) -> Any:
        """Return the connection that leaves for a newcomer, if any.

        If no group has too many (`who_leaves`), it is one that was served and holds no reservation: members
        would keep all places of a bootstrap node for good. For a machine that is here already only one of its
        own leaves: many nodes behind one router take turns.
        """
        machines = {its.machine for its in self.held.values()}

        def served(one: Any) -> bool:
            its = self.held[one]
            return (
                its.peer is not None
                and (its.machine == newcomer.machine or newcomer.machine not in machines)
                and now - its.since > SERVED_S
                and not self.reserved(its.peer)
            )

        return who_leaves({one: its.group for one, its in self.held.items()}, newcomer.group, served)
