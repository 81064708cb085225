"""Pacing: how often a node sends offers, so that gossip does not grow with the swarm; and the send queue.

Pure; `now` and `rng` are arguments.

All nodes of a swarm are on one topic. Each trains on a few rollouts a round, so no node needs every offer. A
node learns its pace from the offers that it hears, as TCP does (slow start, additive increase, multiplicative
decrease: Chiu and Jain, 1989), with the rate of offers instead of losses. No node reports counts or votes, so
a hostile node has nothing to lie about.

- **Free.** While a node hears few authors, or less than half of the target rate, it sends whenever it has
  an offer: once a round. A newcomer has listened for its first round by then. When the topic becomes busy,
  the node becomes paced, and its first pace is FIRST_PACE.
- **Paced.** Every CORRECT_EVERY_S, from a random first moment on, the node corrects its pace. It doubles the
  pace if it hears few authors, and multiplies it by up to two if it hears far less than the target. It halves
  the pace if it hears far more than the target, and lowers it a little if it hears more. Otherwise it adds a
  step. The step is a small share of the pace, multiplied by the logarithm of target over pace, so that slower
  nodes catch up in swarms of any size.
- **Weights.** An author counts for at most AUTHOR_CAP times the median author, and a network group for at
  most GROUP_CAP such authors. An author that never served counts by the share of tries in the last LONG_S in
  which such authors served. Without any try it does not count, once any author has served. So neither a
  crowd of free keys that serves nothing nor a loud author slows other nodes
  (`tests/swarmd/exchange/test_pacing.py` simulates both attacks).

The constants are measured by `benchmarks.network.simulation`; docs/p2p.md has the figures.
"""

import math
import random
from collections import Counter, defaultdict, deque
from statistics import median_low

from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.exchange import offers

# Target for the offers per second of the whole topic. All nodes use the same value: a node with a lower
# target only silences itself.
TARGET_PER_S = 0.2
# With at most this many authors each node sends once in each of its rounds.
FEW_AUTHORS = 16
# Seconds between two corrections of the pace.
CORRECT_EVERY_S = 60.0
# The two windows over which the rate is averaged. Authors are counted over the longer one.
SHORT_S, LONG_S = 60.0, 300.0
# The first pace of a node on a busy topic, as a share of the target.
FIRST_PACE = 1 / 240
# A step, as a share of the pace; it is multiplied by the logarithm of target over pace.
STEP = 0.008
# Maximum number of steps in one correction if less than LOW of the target is heard; they at most double the
# pace.
MAX_STEPS = 10
# The exponent of a correction. It is small, because all nodes correct at the same time, and from a rate of
# only about 60 offers.
GAIN = 0.3
# The factors of one correction.
MIN_FACTOR, MAX_FACTOR = 0.5, 2.0
# As shares of the target: below LOW the pace grows fast, above FAR it is halved.
LOW, FAR = 0.75, 2.0
# A gap between two offers is drawn from 1 - SPREAD to 1 + SPREAD of the mean.
SPREAD = 0.5
# Maximum number of offers that are remembered.
MAX_OFFERS = 16_384
# An author counts for at most this many times the median author.
AUTHOR_CAP = 2.0
# A network group counts for at most this many authors.
GROUP_CAP = 8


class Heard:
    """The offers heard recently, by author, with a weight for each author."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, PeerId]] = deque()  # offers of the last LONG_S
        self._past_of: Counter[PeerId] = Counter()
        self._group: dict[PeerId, str] = {}  # groups of the authors in _past_of
        self._proven: Latest[PeerId, None] = Latest(4096)  # authors that served
        # Fetches in the last LONG_S seconds from authors that had not served yet: (time, whether it served).
        self._tries: deque[tuple[float, bool]] = deque()
        self._now = 0.0

    def offer(self, author: PeerId, group: str, now: float) -> None:
        """Count an offer. group: the author's network group; "" if unknown."""
        self._past.append((now, author))
        self._past_of[author] += 1
        self._group[author] = group
        self._forget(now)

    def tried(self, author: PeerId, served: bool) -> None:
        """Record whether an author served an offered rollout when asked."""
        if author not in self._proven:
            self._tries.append((self._now, served))
        if served:
            self._proven[author] = None
        else:
            self._proven.pop(author, None)

    def authors(self, now: float) -> float:
        """Return the weighted number of authors heard."""
        self._forget(now)
        strangers = self._strangers()
        return sum(1.0 if author in self._proven else strangers for author in self._past_of)

    def rates(self, now: float) -> tuple[float, float]:
        """Return the weighted offers a second over the last SHORT_S and LONG_S."""
        self._forget(now)
        if not self._past_of:
            return 0.0, 0.0
        recent = Counter(author for at, author in self._past if at > now - SHORT_S)
        most = AUTHOR_CAP * median_low(self._past_of.values())
        groups: dict[str, float] = defaultdict(float)
        for author, count in self._past_of.items():
            groups[self._group[author]] += min(count, most)
        strangers, short, long = self._strangers(), 0.0, 0.0
        for author, count in self._past_of.items():
            group = self._group[author]
            within = 1.0 if not group else min(1.0, GROUP_CAP * most / groups[group])
            weight = min(1.0, most / count) * within * (1.0 if author in self._proven else strangers)
            short += weight * recent[author]
            long += weight * count
        return short / SHORT_S, long / LONG_S

    def _strangers(self) -> float:
        """Return the weight, from 0 to 1, of an author that never served."""
        known = [served for _, served in self._tries] or [not self._proven]
        return sum(known) / len(known)

    def _forget(self, now: float) -> None:
        self._now = now
        while self._tries and self._tries[0][0] <= now - LONG_S:
            self._tries.popleft()
        while self._past and (self._past[0][0] <= now - LONG_S or len(self._past) > MAX_OFFERS):
            _, author = self._past.popleft()
            self._past_of[author] -= 1
            if not self._past_of[author]:
                del self._past_of[author], self._group[author]


class Pacing:
    """Decides when a node may send its next offer.

    target: offers a second of the whole topic, the same for all nodes of a swarm.
    """

    def __init__(self, heard: Heard, rng: random.Random, target: float = TARGET_PER_S) -> None:
        self._heard, self._rng, self.target = heard, rng, target
        self.pace = math.inf  # offers a second; infinity: free
        # When the last offer was sent; the next one follows after _gap / pace seconds.
        self._sent_at, self._gap = -math.inf, 1.0
        self._correct_at = 0.0
        self._waited = False  # whether an offer had to wait since the last correction

    @property
    def every(self) -> float | None:
        """The mean seconds between two offers; None if the pace is free."""
        return None if math.isinf(self.pace) else 1 / self.pace

    def next_at(self, now: float) -> float:
        """Return the time of the next call; at most `now` if an offer may be sent at once.

        It is the time when the next offer may be sent, or of the next correction of the pace if that comes
        earlier.
        """
        self._correct(now)
        if math.isinf(self.pace) or now >= (turn := self._sent_at + self._gap / self.pace):
            return now
        self._waited = True
        return min(turn, self._correct_at)

    def sent(self, now: float) -> None:
        """Note that an offer was sent."""
        self._sent_at, self._gap = now, self._rng.uniform(1 - SPREAD, 1 + SPREAD)

    def _correct(self, now: float) -> None:
        if (paced := not math.isinf(self.pace)) and now < self._correct_at:
            return
        authors, (short, long) = self._heard.authors(now), self._heard.rates(now)
        if paced:
            self._correct_at = now + CORRECT_EVERY_S
            self.pace *= self._factor(authors, short, long)
            if authors <= 2 * FEW_AUTHORS:
                # Otherwise some paced nodes could stay silent, and uncounted, while there are more than
                # FEW_AUTHORS free nodes.
                self.pace = max(self.pace, FIRST_PACE * self.target)
            self._waited = False
        elif authors > FEW_AUTHORS and max(short, long) > self.target / 2:
            self.pace = FIRST_PACE * self.target
            self._correct_at = now + CORRECT_EVERY_S * self._rng.random()
            # The first time is random, because many nodes may begin at the same time.
            self._sent_at, self._gap = now, 2 * self._rng.random()
        if self.pace >= self.target:
            self.pace = math.inf

    def _factor(self, authors: float, short: float, long: float) -> float:
        step = STEP * math.log(self.target / self.pace)
        if authors > FEW_AUTHORS and short > FAR * self.target:
            return MIN_FACTOR
        if authors > FEW_AUTHORS and min(short, long) > self.target:
            return math.pow(self.target / min(short, long), GAIN)
        # An unused pace does not grow: no offer had to wait for it (RFC 7661).
        if not self._waited:
            return 1.0
        if authors <= FEW_AUTHORS:
            return MAX_FACTOR
        return 1 + (min(MAX_FACTOR - 1, MAX_STEPS * step) if max(short, long) < LOW * self.target else step)


Message = tuple[str, bytes]  # kind and body
# Maximum number of waiting messages of one round; the oldest are dropped.
MAX_WAITING = 64


class Outgoing:
    """The queue of messages that wait for the node's pace. max_age: our rounds (`round.max_age`).

    It keeps the messages of the last `max_age` rounds and drops older messages, because other nodes train on
    nothing older. At each turn one offer carries as many items as fit, the newest first. A set that is
    gossiped whole is not merged with another: the newest set is sent instead of an offer.
    """

    def __init__(self, pacing: Pacing, max_age: int) -> None:
        self._pacing = pacing
        # Waiting messages by round, the oldest first.
        self._rounds: deque[list[Message]] = deque([[]], maxlen=max_age)

    def put(self, kind: str, body: bytes) -> None:
        """Add a message of the current round."""
        self._rounds[-1].append((kind, body))
        del self._rounds[-1][:-MAX_WAITING]

    def next_round(self) -> None:
        self._rounds.append([])

    @property
    def waits(self) -> bool:
        """Whether a message waits."""
        return any(self._rounds)

    def pop(self, now: float) -> Message | None:
        """Remove and return the next message to send now; it counts as sent.

        Returns None if no message waits or it is not our turn. Call `pop` until it returns None.
        """
        # The newest round first.
        waiting = [message for messages in reversed(self._rounds) for message in messages]
        if not waiting or self._pacing.next_at(now) > now:
            return None
        self._pacing.sent(now)
        kind = waiting[0][0]
        chosen: list[bytes] = []
        for messages in reversed(self._rounds):
            chosen += [body for its, body in messages if its == kind]
            messages.clear()
            if chosen and kind == offers.KIND:
                # Items that do not fit stay in their own round; otherwise they would never become too old.
                first, *rest = offers.join(chosen)
                chosen = [first]
                messages += [(kind, body) for body in rest]
        return kind, chosen[0]
