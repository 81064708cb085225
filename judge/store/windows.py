"""Windows of time, each with a fixed set of held-out questions to which the judge committed before.

Rules
1. A window's seed is made, and its commitment published, one window before it opens. Only the first, and the
   first after the judge was down for longer than a window, open when they are made.
2. The open window is the newest that ever opened, whatever the clock does later. So no question of a seed
   that was told is asked again.
3. Where the clock was far ahead and was set back, a new window follows the open one, a window's length from
   now. What had been published for a far date is passed over.
4. The seed is told when a newer window has been open for REVEAL_S and no question of this one is open.
swarmd/tasks/held_out.py has the commitment, and which questions a seed gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, exists, insert, select, update

from judge.store.tables import evaluations, windows
from judge.types import QuestionWindow
from swarmd.tasks.held_out import Terms

# By then every ask that began before has its question.
REVEAL_S = 5
# Questions of a set; a peer that asks for more meets them again.
QUESTIONS = 1_000
# Whether the seed of an evaluation's window is not told.
SECRET = exists().where(windows.c.number == evaluations.c.window_number, windows.c.revealed.is_(None))


def dated_ahead(window: QuestionWindow, now: float, seconds: int) -> bool:
    """Return whether the window's date is over a window's length ahead, as after the clock was set back."""
    return window.published > now + seconds


def due(
    newest: QuestionWindow | None,
    now: float,
    seconds: int,
    curriculum: str,
    seeds: Callable[[], bytes],
) -> list[QuestionWindow]:
    """Return the windows to add now, so that one is open and the next is published.

    newest: of those that exist.
    """
    if newest is not None and dated_ahead(newest, now, seconds):
        opens = int(now) + seconds
        return [
            QuestionWindow(
                Terms(curriculum, newest.number + 1, opens, opens + seconds, QUESTIONS), seeds(), now
            )
        ]
    added: list[QuestionWindow] = []
    last = newest.terms if newest else None
    while last is None or last.opens <= now:
        opens = int(now) if last is None or last.closes <= now else last.closes
        last = Terms(curriculum, last.number + 1 if last else 1, opens, opens + seconds, QUESTIONS)
        added.append(QuestionWindow(last, seeds(), now))
    return added


WINDOWS_PAGE = 50


def turn(
    db: Connection, now: float, seconds: int, curriculum: str, seeds: Callable[[], bytes]
) -> tuple[QuestionWindow, QuestionWindow, int]:
    """Add what is due, open what is to be open, reveal what may be.

    Returns the open window, the next, and how many closed ones are still to be revealed.
    """
    newest = read(db, limit=1)
    for window in due(newest[0] if newest else None, now, seconds, curriculum, seeds):
        row = {**asdict(window.terms), "seed": window.seed.hex(), "published": window.published}
        db.execute(insert(windows).values(row))
    c, newer = windows.c, windows.alias()
    opened = (
        select(c.number).where((c.opens <= now) | c.opened.is_not(None)).order_by(c.number.desc()).limit(1)
    )
    number = db.execute(opened).scalar_one()
    db.execute(update(windows).where(c.number == number, c.opened.is_(None)).values(opened=now))
    hidden = (c.number < number) & c.revealed.is_(None)
    asked = exists().where(evaluations.c.state == "open", evaluations.c.window_number == c.number)
    settled = exists().where(newer.c.number == number, newer.c.opened <= now - REVEAL_S)
    db.execute(update(windows).where(hidden, ~asked, settled).values(revealed=now))
    still = len(db.execute(select(c.number).where(hidden)).all())
    return read(db, number + 1, limit=1)[0], read(db, limit=1)[0], still


def read(db: Connection, before: int = 2**63 - 1, limit: int = WINDOWS_PAGE) -> Sequence[QuestionWindow]:
    """Return the windows with a number below `before`, the newest first."""
    chosen = select(windows).where(windows.c.number < before).order_by(windows.c.number.desc()).limit(limit)
    return [
        QuestionWindow(
            Terms(row.curriculum, row.number, row.opens, row.closes, row.questions),
            bytes.fromhex(row.seed),
            row.published,
            row.opened,
            row.revealed,
        )
        for row in db.execute(chosen)
    ]
