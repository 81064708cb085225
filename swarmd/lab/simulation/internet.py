"""Model of the internet between nodes: delays and losses. docs/simulation.md names its sources."""

import math
import random
from array import array
from dataclasses import dataclass

# One-way milliseconds between the cores of five regions: North America east and west, Europe, East Asia, South America.
_REGIONS = (
    (12.0, 34.0, 44.0, 88.0, 62.0),
    (34.0, 12.0, 70.0, 60.0, 88.0),
    (44.0, 70.0, 14.0, 110.0, 96.0),
    (88.0, 60.0, 110.0, 22.0, 150.0),
    (62.0, 88.0, 96.0, 150.0, 20.0),
)
_POPULATION = (25.0, 18.0, 32.0, 19.0, 6.0)
_UPLINKS = ((0.1, 5e6), (0.3, 10e6), (0.35, 25e6), (0.2, 100e6), (0.05, 1e9))  # share of homes, bits a second
_PAIRS = 4096


@dataclass(frozen=True, slots=True)
class Weather:
    """Parameters of a network. Seconds, bytes a second."""

    loss: float = 0.005  # share of messages that never arrive: a full queue, a connection that broke under them
    last_mile: float = 0.008  # median of what a home's own line adds, one way
    spread: float = 0.25  # sigma of the log-normal factor of each pair of nodes
    handling: float = 0.004  # median of what a node takes to read, check and pass on one message
    handling_spread: float = 0.5
    regional: bool = True  # False: all nodes are on one machine or LAN
    uplink: float = 0.0  # 0: as homes have it


HOMES = Weather()
LOOPBACK = Weather(loss=0.0, last_mile=0.00005, handling=0.006, handling_spread=0.7, regional=False, uplink=500e6)
QUEUE = 5.0  # seconds of waiting in front of an uplink after which a message is dropped


class Internet:
    """Lines of nodes that are named by their numbers from 0."""

    def __init__(self, rng: random.Random, weather: Weather = HOMES) -> None:
        self.weather = weather
        self._rng = rng
        self._region = array("b")
        self._mile, self._rate, self._free = array("d"), array("d"), array("d")
        self._factor = [math.exp(rng.gauss(0.0, weather.spread)) for _ in range(_PAIRS)]
        self._handling = [weather.handling * math.exp(rng.gauss(0.0, weather.handling_spread)) for _ in range(_PAIRS)]
        self.lost = 0

    def add(self) -> int:
        """A new node's number."""
        rng, weather = self._rng, self.weather
        self._region.append(rng.choices(range(len(_POPULATION)), _POPULATION)[0] if weather.regional else 0)
        self._mile.append(weather.last_mile * math.exp(rng.gauss(0.0, 0.6)))
        shares, rates = zip(*_UPLINKS, strict=True)
        self._rate.append((weather.uplink or rng.choices(rates, shares)[0]) / 8)
        self._free.append(0.0)
        return len(self._rate) - 1

    def way(self, a: int, b: int) -> float:
        """Seconds for a packet from a to b, the same for every packet."""
        way = self._mile[a] + self._mile[b]
        if self.weather.regional:
            low, high = (a, b) if a < b else (b, a)
            way += _REGIONS[self._region[a]][self._region[b]] * self._factor[(low * 40503 + high * 30029) % _PAIRS] / 1000
        return way

    def arrival(self, a: int, b: int, size: int, now: float) -> float | None:
        """Time when b has read a message of `size` bytes that a sends now, after what a is sending already; None: lost."""
        start = self._free[a]
        if start < now:
            start = now
        if start - now > QUEUE or self._rng.random() < self.weather.loss:
            self.lost += 1
            return None
        sent = self._free[a] = start + size / self._rate[a]
        return sent + self.way(a, b) + self._handling[int(self._rng.random() * _PAIRS)]

    def streamed(self, a: int, b: int, size: int, now: float) -> float:
        """The same for bytes of a TCP stream, which are never lost."""
        sent = self._free[a] = max(now, self._free[a]) + size / self._rate[a]
        return sent + self.way(a, b) + self._handling[int(self._rng.random() * _PAIRS)]
