"""Exchanges rollouts over a Transport: shares ours, collects others'. Never waits for the network."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from p2p.blobs.blobs import MAX_BLOB_BYTES, MAX_CONTENT_BYTES
from p2p.latest import Latest
from p2p.types import PeerId, Reason, Sender, Transport
from swarmd.exchange import offers, wire
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Author, Rollout

# Authors that are remembered. The pool holds rollouts of far fewer.
MAX_AUTHORS = 4096

log = logging.getLogger(__name__)


def share(
    sender: Sender,
    rollouts: Sequence[Rollout],
    round_number: int,
    model: str,
    specialties: Sequence[str],
    whole: int = offers.WHOLE_BYTES,
) -> int:
    """Gossip a small set whole; offer the rollouts of a larger one, for others to fetch.

    specialties: the curriculum's. whole: bytes up to which a set is gossiped. Returns the rollouts shared.
    """
    if not rollouts:
        return 0
    body = wire.encode(rollouts, round_number, model)
    if len(body) <= whole and len(rollouts) <= wire.MAX_ROLLOUTS:
        sender.publish(wire.KIND, body)
        return len(rollouts)
    bodies, blobs = offers.encode(rollouts, round_number, model, specialties)
    if len(blobs) < len(rollouts):
        log.warning(
            "%d rollouts were not shared: over %d bytes, or %d compressed; lower generate.max_new_tokens"
            " or round.completions",
            len(rollouts) - len(blobs),
            MAX_CONTENT_BYTES,
            MAX_BLOB_BYTES,
        )
    for blob in blobs:
        sender.hold(blob)
    for offer in bodies:
        sender.publish(offers.KIND, offer)
    return len(blobs)


class RolloutExchange:
    """The `Swarm` protocol over a `Transport`. Reports authors that send invalid rollouts.

    whole: as in `share`.
    """

    def __init__(
        self, transport: Transport, model: str, curriculum: Curriculum, whole: int = offers.WHOLE_BYTES
    ) -> None:
        self.transport, self.curriculum, self._whole = transport, curriculum, whole
        self.model = wire.model_for_others(model)
        self.shared = 0  # rollouts shared so far
        # Author -> (its last round, its model), as it says itself
        self.authors: Latest[PeerId, tuple[int, str]] = Latest(MAX_AUTHORS)
        self._known: Latest[PeerId, Author] = Latest(MAX_AUTHORS)

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        self.shared += share(
            self.transport,
            rollouts,
            round_number,
            self.model,
            self.curriculum.specialties,
            self._whole,
        )

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        """Return the rollouts received since the last call, oldest first, and refusals by reason.

        Refusals are of frames and rollouts together.
        """
        rollouts: list[Rollout] = []
        refused: Counter[str] = Counter()
        for received in self.transport.received():
            if received.kind != wire.KIND:
                # A kind of a later version.
                continue
            decoded = wire.decode(received.body, received.author)
            if isinstance(decoded, Reason):
                refused[decoded.value] += 1
                self.transport.report(received.author, decoded)
                continue
            self.authors[received.author] = (decoded.round, decoded.model)
            self._known[received.author] = Author(received.author, received.group)
            good = [
                replace(r, heard=received.heard) for r in decoded.rollouts if self.curriculum.trains_on(r.ref)
            ]
            if len(good) < len(decoded.rollouts):
                refused[Reason.UNKNOWN_TASK.value] += len(decoded.rollouts) - len(good)
                self.transport.report(received.author, Reason.UNKNOWN_TASK)
            rollouts += good
        refused.update({reason.value: count for reason, count in self.transport.refused().items()})
        return rollouts, dict(refused)

    def author(self, peer: PeerId) -> Author:
        return self._known.get(peer) or Author(peer)

    def charge(self, authors: Iterable[PeerId]) -> None:
        for author in authors:
            self.transport.report(author, Reason.USELESS)
