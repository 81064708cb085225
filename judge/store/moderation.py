"""Moderation: hides a peer's self-chosen texts, or bans its key.

Each act is stored with its time and reason; a peer's newest act applies.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Row, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from judge.errors import JudgeError
from judge.store.database import Database
from judge.store.tables import moderation as table
from p2p.identity import public_key_of

HIDDEN = "hidden"  # shown in place of a model's name
HIDDEN_FIELDS = ("name", "strategy", "version")  # free text, which is omitted

_later = table.alias()
_newest = (
    ~select(_later.c.number).where(_later.c.peer == table.c.peer, _later.c.number > table.c.number).exists()
)
# Subqueries: peers whose texts are hidden, and peers whose key is refused.
HIDDEN_PEERS = select(table.c.peer).where(table.c.act.in_(("hide", "ban")), _newest)
BANNED_PEERS = select(table.c.peer).where(table.c.act == "ban", _newest)


def act(database: Path | str, act: Literal["hide", "ban", "undo"], peer: str, why: str, now: float) -> None:
    """Record the act. Raises JudgeError.

    A running judge applies it within seconds.
    """
    try:
        public_key_of(peer)
    except ValueError:
        raise JudgeError(
            f"{peer!r} is no peer id. Copy it from the page of the peer: 52 letters that begin with 12D3KooW."
        ) from None
    try:
        with closing(Database(database, alone=False, writes=True)) as opened, opened.begin() as db:
            stands = db.scalar(select(table.c.act).where(table.c.peer == peer, _newest)) or "undo"
            if stands == act:
                said = "is neither hidden nor banned" if act == "undo" else f"has this already: {act}"
                raise JudgeError(f"the peer {said}. See `swarmd-judge moderate log`.")
            number = (db.scalar(select(func.max(table.c.number))) or 0) + 1
            db.execute(insert(table).values(number=number, at=now, act=act, peer=peer, why=why))
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise JudgeError(
            f"nothing was done: {getattr(error, 'orig', None) or error}. Free some space, or try it again."
        ) from None


def history(database: Path | str) -> Sequence[Row[Any]]:
    """List the acts, oldest first. Raises JudgeError."""
    with closing(Database(database, alone=False)) as opened, opened.begin() as db:
        return db.execute(select(table).order_by(table.c.number)).all()


def banned(db: Connection) -> frozenset[str]:
    return frozenset(db.scalars(BANNED_PEERS))


def hidden(db: Connection) -> frozenset[str]:
    return frozenset(db.scalars(HIDDEN_PEERS))
