"""Swarm and solo arms in the database: running sums by model and normalised round (figures/rounds.py).

No query scans evaluations. An evaluation costs two statements here, and a few more if it closes a bin of its
peer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from judge.figures.comparison import ArmData, ArmsView
from judge.figures.rounds import HORIZONS, PeerProgress, advance
from judge.store import moderation
from judge.store.tables import arm_bins, arm_values, progress
from judge.types import Attributes

# Maximum number of models in the list of models.
MAX_MODELS = 50
# Maximum number of models in which one peer is compared: model names are free, and each adds rows that stay.
PEER_MODELS = 8

_OF = (progress.c.peer == bindparam("of"), progress.c.model == bindparam("its"))
_PROGRESS = select(
    progress.c.sharing,
    progress.c.bin,
    progress.c.answers,
    progress.c.reward,
    progress.c.earned,
    progress.c.counts,
).where(*_OF)
_MOVED = update(progress).where(*_OF)
_MODELS = select(func.count()).select_from(progress).where(_OF[0])
_BIN = (
    arm_bins.c.model == bindparam("its"),
    arm_bins.c.sharing == bindparam("said"),
    arm_bins.c.bin == bindparam("over"),
)
_ADDED = (
    update(arm_bins)
    .where(*_BIN)
    .values(
        peers=arm_bins.c.peers + 1,
        total=arm_bins.c.total + bindparam("value"),
        squares=arm_bins.c.squares + bindparam("value") * bindparam("value"),
    )
)
_PLACE = select(arm_bins.c.peers).where(*_BIN)
_SHOWN = select(progress.c.model).where(progress.c.peer.not_in(moderation.HIDDEN_PEERS))


def counted(db: Connection, peer: str, attributes: Attributes, reward: float) -> None:
    """Add an evaluation that counts. A peer that states neither swarm nor solo is not compared."""
    if attributes.sharing is None:
        return
    key, said = {"of": peer, "its": attributes.model}, attributes.sharing
    row = db.execute(_PROGRESS, key).one_or_none()
    before = (
        None
        if row is None
        else PeerProgress(row.sharing, row.bin, row.answers, row.reward, row.earned, bool(row.counts))
    )
    if before is None and db.execute(_MODELS, key).scalar_one() >= PEER_MODELS:
        return
    after, closed = advance(before, said, attributes.round, reward)
    if before is None:
        db.execute(insert(progress), {"peer": peer, "model": attributes.model, **columns_of(after)})
    elif after != before:
        db.execute(_MOVED, {**key, **columns_of(after)})
    for bin, value in closed.items():
        _close(db, attributes.model, said, bin, value)


def _close(db: Connection, model: str, sharing: str, bin: int, value: float) -> None:
    key = {"its": model, "said": sharing, "over": bin}
    of_arm = {"model": model, "sharing": sharing, "bin": bin}
    if db.execute(_ADDED, {**key, "value": value}).rowcount == 0:
        db.execute(insert(arm_bins), {**of_arm, "peers": 1, "total": value, "squares": value**2})
    if bin in HORIZONS:
        db.execute(insert(arm_values), {**of_arm, "place": db.scalar(_PLACE, key), "value": value})


def view(db: Connection, model: str | None) -> ArmsView:
    """Return the two arms of a model; None: of the model whose smaller arm has the most peers.

    A model whose peers are all hidden is left out. `sizes` lists the largest arms.
    """
    c = arm_bins.c
    sizes = select(c.model, c.sharing, c.peers).where(c.bin == 0, c.model.in_(_SHOWN))
    largest = db.execute(sizes.order_by(c.peers.desc(), c.model).limit(2 * MAX_MODELS)).all()
    chosen = (
        _most_compared(largest)
        if model is None
        else db.scalar(_SHOWN.where(progress.c.model == model).limit(1))
    )
    return ArmsView(largest, chosen, _read(db, chosen or "", "swarm"), _read(db, chosen or "", "solo"))


def _most_compared(found: Sequence[tuple[str, str, int]]) -> str | None:
    """Return the model whose smaller arm has the most peers; if none has both arms, the largest."""
    peers: dict[str, list[int]] = defaultdict(list)
    for model, _, many in found:
        peers[model].append(many)
    return max(peers, key=lambda model: (len(peers[model]), min(peers[model])), default=None)


def _read(db: Connection, model: str, sharing: str) -> ArmData:
    c, v = arm_bins.c, arm_values.c
    rows = db.execute(
        select(c.bin, c.peers, c.total, c.squares)
        .where(c.model == model, c.sharing == sharing)
        .order_by(c.bin)
    )
    bins = {bin: (peers, total, squares) for bin, peers, total, squares in rows}
    got_there = select(v.bin, v.value).where(v.model == model, v.sharing == sharing).order_by(v.bin, v.place)
    by_bin = groupby(db.execute(got_there), key=lambda row: row.bin)
    return ArmData(bins, {bin: [row.value for row in there] for bin, there in by_bin})


def columns_of(its: PeerProgress) -> dict[str, Any]:
    return {**asdict(its), "counts": int(its.counts)}
