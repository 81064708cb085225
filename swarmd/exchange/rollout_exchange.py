"""Exchanges rollouts over a Transport: shares ours, collects others'. Never waits for the network."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from p2p.blobs.blobs import MAX_BLOB_BYTES, MAX_CONTENT_BYTES
from p2p.types import PeerId, Reason, Transport
from swarmd.exchange import offers, wire
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Author, Rollout

# Authors that are remembered. The pool holds rollouts of far fewer.
MAX_AUTHORS = 4096

log = logging.getLogger(__name__)


class RolloutExchange:
    """The `Swarm` protocol over a `Transport`. Reports authors that send invalid rollouts."""

    def __init__(
        self,
        transport: Transport,
        model: str,
        curriculum: Curriculum,
        whole: int = offers.WHOLE_BYTES,
        modality: str = wire.TEXT,
    ) -> None:
        """Exchange over this transport.

        whole: bytes up to which a set is gossiped as it is; a larger one is offered. modality: of what is
        shared and collected.
        """
        self.transport, self.model, self.curriculum, self._whole, self._modality = (
            transport,
            model,
            curriculum,
            whole,
            modality,
        )
        self.shared = 0  # rollouts
        # Author -> (its last round, its model), as it says itself
        self.authors: dict[PeerId, tuple[int, str]] = {}
        self._known: OrderedDict[PeerId, Author] = OrderedDict()  # least recently heard first

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        """Gossip a small set whole; offer the rollouts of a larger one, for others to fetch."""
        if not rollouts:
            return
        encoded = [wire.encode_rollout(rollout) for rollout in rollouts]
        whole = wire.join(encoded, round_number, self.model)
        if len(whole) <= self._whole:
            self.transport.publish(wire.tagged(wire.KIND, self._modality), whole)
            self.shared += len(rollouts)
            return
        bodies, blobs = offers.encode(
            rollouts, round_number, self.model, self.curriculum.specialties, encoded
        )
        if len(blobs) < len(rollouts):
            log.warning(
                "%d rollouts were not shared: over %d bytes, or %d compressed; lower generate.max_new_tokens"
                " or round.completions",
                len(rollouts) - len(blobs),
                MAX_CONTENT_BYTES,
                MAX_BLOB_BYTES,
            )
        self.shared += len(blobs)
        for blob in blobs:
            self.transport.hold(blob)
        for body in bodies:
            self.transport.publish(wire.tagged(offers.KIND, self._modality), body)

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        """Return the rollouts received since the last call, oldest first, and refusals by reason.

        Refusals are of frames and rollouts together.
        """
        rollouts: list[Rollout] = []
        refused: Counter[str] = Counter()
        for received in self.transport.received():
            if received.kind != wire.tagged(wire.KIND, self._modality):
                if wire.modality_of(received.kind) not in (None, self._modality):
                    refused[Reason.OTHER_MODALITY.value] += 1  # its author is not to blame: others can use it
                continue  # or a kind of a later version
            decoded = wire.decode(received.body, received.author)
            if isinstance(decoded, Reason):
                refused[decoded.value] += 1
                self.transport.report(received.author, decoded)
                continue
            self.authors[received.author] = (decoded.round, decoded.model)
            self._know(Author(received.author, received.group))
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

    def _know(self, author: Author) -> None:
        """Remember the author, forgetting the one heard least recently: a flood of names fills no memory."""
        self._known[author.id] = author
        self._known.move_to_end(author.id)
        if len(self._known) > MAX_AUTHORS:
            forgotten, _ = self._known.popitem(last=False)
            self.authors.pop(forgotten, None)
