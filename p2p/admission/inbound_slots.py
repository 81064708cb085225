"""Inbound connection slots: which connections get one, and which is evicted. Pure; `now` is an argument."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from p2p.netgroup import group_of_host, machine_of_host
from p2p.rate_limit import TokenBuckets

K = TypeVar("K")

# Inbound connections. The libp2p engine has 160 connections in all; the rest is for peers that we dial.
MOST = 112
# New connections from one machine: rate and burst. Each costs a handshake before we know the peer.
ARRIVALS_PER_S, ARRIVALS_AT_ONCE = 2.0, 100.0
# A network group may open this many times as many connections as one machine.
GROUP_FACTOR = 4.0
# A peer that connected this long ago has found other members by now, so it can be evicted.
SERVED_S = 60.0


def one_too_many(held: Mapping[K, Sequence[Hashable]], newcomer: Sequence[Hashable]) -> K | None:
    """Return the holder to evict for a newcomer if all slots are taken; None to refuse the newcomer.

    It is the youngest holder in the largest network group, there in the largest machine, and so on. The
    newcomer counts as a member of its group; of equally large groups, the newcomer's group is chosen.

    held: the path of each holder, for example network group and machine, oldest first. All paths have the
        same length.
    """
    found: dict[K | None, Sequence[Hashable]] = {None: newcomer, **dict([*held.items()][::-1])}
    for level in range(len(newcomer)):
        ((largest, _),) = Counter(path[level] for path in found.values()).most_common(1)
        found = {one: path for one, path in found.items() if path[level] == largest}
    return next(iter(found))


def who_leaves(
    groups: Mapping[K, str], own: str, may_leave: Callable[[K], bool] = lambda _: True
) -> K | None:
    """Return the holder to evict for a newcomer if all slots are taken; None to refuse the newcomer.

    If one group has too many holders, it loses its youngest (`one_too_many`). Otherwise the oldest holder is
    evicted that is in the newcomer's group or a larger one and for which `may_leave` is true.

    Args:
        groups: the network group of each holder, oldest first.
        own: the newcomer's network group.
        may_leave: whether a holder may be evicted though its group does not have too many.
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
    """An inbound connection that holds a slot."""

    machine: str
    group: str
    since: float
    peer: Any = None  # the peer id, once the connection has proved it


class InboundSlots:
    def __init__(self) -> None:
        self.held: dict[Any, Arrival] = {}  # by connection, oldest first
        # Whether a peer has a relay reservation with us.
        self.reserved: Callable[[Any], bool] = lambda _: False
        self._by_machine = TokenBuckets[str](ARRIVALS_PER_S, ARRIVALS_AT_ONCE)
        self._by_group = TokenBuckets[str](GROUP_FACTOR * ARRIVALS_PER_S, GROUP_FACTOR * ARRIVALS_AT_ONCE)

    def take(self, connection: Any, host: str, now: float) -> Any:
        """Give a slot to a new connection from a host.

        Returns the connection to close, if any: an evicted one, or this one if it gets no slot.

        The machine's rate limit is charged before its group's, so a machine over its limit takes nothing from
        its neighbours.
        """
        arrival = Arrival(machine_of_host(host), group_of_host(host) or "", now)
        if any(
            buckets.of(key, now).wait(now) > 0
            for buckets, key in ((self._by_machine, arrival.machine), (self._by_group, arrival.group))
        ):
            return connection
        leaving = None
        if len(self.held) >= MOST:
            if (leaving := self._least_needed(arrival, now)) is None:
                return connection
            del self.held[leaving]
        self.held[connection] = arrival
        return leaving

    def _least_needed(self, newcomer: Arrival, now: float) -> Any:
        """Return the connection to evict for a newcomer, if any.

        If no group has too many (`who_leaves`), the oldest connection is evicted that is older than SERVED_S
        and holds no reservation. Otherwise early members would fill a bootstrap node for good. If the
        newcomer's machine already has slots, only a connection from that machine is evicted, so that many
        nodes behind one router take turns.
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
