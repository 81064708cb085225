"""Windows of time, each with a fixed set of held-out questions that the judge committed to beforehand.

Rules
1. A window's seed is made, and its commitment published, one window before it opens. Exceptions: the first
   window, and the first after the judge was down for longer than a window, open at once.
2. The open window is the newest that ever opened, even if the clock is set back. So no question of a
   published seed is asked again.
3. If the clock was far ahead and was set back, a new window follows the open one, one window's length from
   now. The window that was published for the far date is skipped.
4. A seed is published once a newer window has been open for REVEAL_S and no question of its window is open.
swarmd/tasks/held_out.py defines the commitment, and the questions of a seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, exists, insert, select, update

from judge.store.tables import evaluations, windows
from judge.types import QuestionWindow
from swarmd.tasks.held_out import Terms

# After this time, every request that began in the old window has its question.
REVEAL_S = 5
# Questions of a set; a peer that asks for more gets the same ones again.
QUESTIONS = 1_000
# Whether the seed of an evaluation's window is still secret.
SECRET = exists().where(windows.c.number == evaluations.c.window_number, windows.c.revealed.is_(None))


def dated_ahead(window: QuestionWindow, now: float, seconds: int) -> bool:
    """Return whether the window was published over a window's length ahead: the clock was set back since."""
    return window.published > now + seconds


def due(
    newest: QuestionWindow | None,
    now: float,
    seconds: int,
    curriculum: str,
    seeds: Callable[[], bytes],
) -> list[QuestionWindow]:
    """Return the windows to add now, so that one is open and the next one is published.

    newest: the newest existing window.
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
    """Add the windows that are due, open the newest whose time has come, and reveal seeds.

    Returns the open window, the next window, and the number of closed windows with a secret seed.
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
    """Return the windows with a number below `before`, newest first."""
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
