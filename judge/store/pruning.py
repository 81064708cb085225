"""Delete the rows that no figure, receipt or check needs any more.

Every evaluation of the last `keep_days` stays, and of at least two windows, so that its seed can be checked.
Of older evaluations, each peer keeps its newest WINDOW_QUESTIONS and those that its curve shows. A silent
peer is forgotten with all its rows: after two windows if it was never listed; otherwise after it was silent
in all the windows that the judge opened during FORGET_DAYS or `keep_days`, if that is longer. So time in
which the judge did not run does not count, and neither does a jump of the clock. The sequence number is
deleted too, so a peer is only forgotten if its number is older than the numbers that unknown peers may use
(`JudgeService.claim`).

Sums keep their value: a peer's totals in its row, the sums of swarm and solo in judge/store/arms.py.
"""

from sqlalchemy import Connection, delete, select

from judge.figures.leaderboard import LISTED_ANSWERS, WINDOW_QUESTIONS, curve_step
from judge.store.tables import (
    arm_bins,
    arm_values,
    evaluations,
    listed,
    peers,
    progress,
    verifications,
    windows,
)

# Peers pruned in one step.
STEP_PEERS = 20
# Maximum number of a peer's old evaluations that are kept for its curve, at even steps; more than
# CURVE_POINTS.
KEPT_POINTS = 64


def prune(db: Connection, after: str, before: float, silent: float, silent_windows: int) -> str | None:
    """Prune the next peers in the order of their ids; return the last id, or None at the end.

    Args:
        after: the last id of the step before.
        before: evaluations asked earlier than this time are pruned.
        silent: unlisted peers that were last seen before this time are forgotten.
        silent_windows: listed peers are forgotten after this many whole windows of silence.
    """
    opened = select(windows.c.opened).where(windows.c.opened.is_not(None)).order_by(windows.c.number.desc())
    left = db.scalar(opened.offset(silent_windows).limit(1)) or 0.0
    columns = peers.c.peer, peers.c.answered, peers.c.unanswered, peers.c.last_seen, peers.c.sequence
    chosen = select(*columns).where(peers.c.peer > after).order_by(peers.c.peer).limit(STEP_PEERS)
    found = db.execute(chosen).all()
    gone = [
        row.peer
        for row in found
        if row.last_seen < (silent if row.answered < LISTED_ANSWERS else left)
        and row.sequence <= silent * 1e9
    ]
    for table in (evaluations, progress, peers):
        db.execute(delete(table).where(table.c.peer.in_(gone)))
    for row in found:
        if row.peer not in gone:
            _thin(db, row.peer, row.answered + row.unanswered, before)
    if found:
        return str(found[-1].peer)
    off_the_board = verifications.c.peer.not_in(select(peers.c.peer).where(listed))
    old = (verifications.c.ended < silent) & (verifications.c.sequence <= int(silent * 1e9))
    db.execute(delete(verifications).where(old, off_the_board))
    for table in (arm_bins, arm_values):
        # A model without peers is on no list.
        db.execute(delete(table).where(table.c.model.not_in(select(progress.c.model))))
    return None


def _thin(db: Connection, peer: str, counted: int, before: float) -> None:
    """Delete a peer's old evaluations, except the newest and those at even steps. counted: their total."""
    c, step = evaluations.c, curve_step(counted, KEPT_POINTS)
    # Read in the order of the numbers, up to the first evaluation that is not old.
    young = select(c.number).where(c.peer == peer, c.number > 0, c.asked_at >= before)
    first_young = db.scalar(young.order_by(c.number).limit(1))
    end = min(counted - WINDOW_QUESTIONS, counted if first_young is None else first_young - 1)
    db.execute(delete(evaluations).where(c.peer == peer, c.number <= end, c.number % step != 0))
    void = c.number.is_(None) & (c.state == "void")
    db.execute(delete(evaluations).where(c.peer == peer, void, c.asked_at < before))
