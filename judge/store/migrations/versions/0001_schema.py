"""Version 1: the whole schema."""

from alembic import op
from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from judge.store.tables import NAME, NUMBER, REAL_NUMBER

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "about",
        Column("name", NAME, primary_key=True),
        Column("value", Text, nullable=False),
        sqlite_strict=True,
    )
    _create_peers_and_evaluations()
    _create_comparison()
    _create_windows()
    _create_verifications()
    _create_moderation()


def _said() -> list[Column[str] | Column[int]]:
    """Return the columns of what a peer says of itself, but for round and model."""
    texts = [Column(name, Text) for name in ("name", "sharing", "strategy", "version", "hardware")]
    return [*texts, Column("local", NUMBER), Column("external", NUMBER)]


def _create_peers_and_evaluations() -> None:
    op.create_table(
        "peers",
        Column("peer", NAME, primary_key=True),
        Column("model", Text, nullable=False),
        *(Column(name, REAL_NUMBER, nullable=False) for name in ("first_seen", "last_seen")),
        Column("sequence", NUMBER, nullable=False),
        *(Column(name, NUMBER, nullable=False) for name in ("answered", "unanswered")),
        *(Column(name, REAL_NUMBER, nullable=False) for name in ("reward", "low")),
        Column("window_number", NUMBER),  # `window` is a keyword of SQL
        *(Column(name, NUMBER, nullable=False) for name in ("window_asked", "recent_right", "recent_n")),
        Column("nickname", NAME, nullable=False),
        Column("round", NUMBER),
        *(Column(name, REAL_NUMBER) for name in ("round_at", "pace")),
        *_said(),
        sqlite_strict=True,
    )
    evaluations: Table = op.create_table(
        "evaluations",
        Column("id", NAME, primary_key=True),
        Column("peer", NAME, ForeignKey("peers.peer"), nullable=False),
        Column("round", NUMBER, nullable=False),
        Column("model", Text, nullable=False),
        Column("specialty", NAME, nullable=False),
        Column("n", NUMBER, nullable=False),
        Column("asked_at", REAL_NUMBER, nullable=False),
        Column("state", NAME, nullable=False),
        Column("number", NUMBER),
        Column("reward", REAL_NUMBER),
        Column("reason", Text),
        *(Column(name, REAL_NUMBER) for name in ("total", "seconds")),
        Column("answer", Text),
        Column("ended", NUMBER),
        Column("answers", NUMBER, nullable=False),
        Column("correct", NUMBER),
        Column("further", Text),
        *(Column(name, NUMBER) for name in ("window_number", "place")),
        Column("answered_at", REAL_NUMBER),
        *_said(),
        CheckConstraint("state IN ('open', 'graded', 'unanswered', 'void')"),
        CheckConstraint(
            "(state = 'graded') = (number IS NOT NULL AND reward IS NOT NULL AND answer IS NOT NULL)"
        ),
        sqlite_strict=True,
    )
    numbered, still_open = text("number IS NOT NULL"), text("state = 'open'")
    graded = (evaluations.c.peer, evaluations.c.number)
    for index in (
        Index("evaluations_graded", *graded, unique=True, sqlite_where=numbered, postgresql_where=numbered),
        Index("evaluations_open", evaluations.c.state, sqlite_where=still_open, postgresql_where=still_open),
    ):
        index.create(op.get_bind())
    op.execute("CREATE INDEX peers_board ON peers (low DESC, peer) WHERE answered >= 10")
    op.execute("CREATE INDEX evaluations_asked ON evaluations (asked_at)")


def _create_comparison() -> None:
    op.create_table(
        "progress",
        Column("peer", NAME, primary_key=True),
        Column("model", Text, primary_key=True),
        Column("sharing", NAME, nullable=False),
        *(Column(name, NUMBER, nullable=False) for name in ("bin", "answers", "counts")),
        Column("reward", REAL_NUMBER, nullable=False),
        Column("earned", REAL_NUMBER),
        CheckConstraint("sharing IN ('swarm', 'solo')"),
        sqlite_strict=True,
    )
    op.create_table(
        "arm_bins",
        *_bin_of_an_arm(),
        Column("peers", NUMBER, nullable=False),
        *(Column(name, REAL_NUMBER, nullable=False) for name in ("total", "squares")),
        sqlite_strict=True,
    )
    op.create_table(
        "arm_values",
        *_bin_of_an_arm(),
        Column("place", NUMBER, primary_key=True),
        Column("value", REAL_NUMBER, nullable=False),
        sqlite_strict=True,
    )
    op.execute("CREATE INDEX arm_bins_models ON arm_bins (peers DESC, model) WHERE bin = 0")


def _bin_of_an_arm() -> list[Column[str] | Column[int]]:
    return [
        Column("model", Text, primary_key=True),
        Column("sharing", NAME, primary_key=True),
        Column("bin", NUMBER, primary_key=True),
    ]


def _create_windows() -> None:
    op.create_table(
        "windows",
        Column("number", NUMBER, primary_key=True, autoincrement=False),
        Column("curriculum", NAME, nullable=False),
        *(Column(name, NUMBER, nullable=False) for name in ("opens", "closes", "questions")),
        Column("seed", Text, nullable=False),
        Column("published", REAL_NUMBER, nullable=False),
        *(Column(name, REAL_NUMBER) for name in ("opened", "revealed")),
        sqlite_strict=True,
    )


def _create_verifications() -> None:
    op.create_table(
        "verifications",
        Column("id", NAME, primary_key=True),
        Column("peer", NAME, nullable=False),
        Column("model", Text, nullable=False),
        Column("lora_rank", NUMBER),
        Column("digest", NAME, nullable=False),
        *(Column(name, NUMBER, nullable=False) for name in ("size", "answers", "sequence")),
        Column("at", REAL_NUMBER, nullable=False),
        Column("state", NAME, nullable=False),
        Column("tries", NUMBER, nullable=False),
        Column("ended", REAL_NUMBER),
        *(Column(name, Text) for name in ("error", "remedy", "receipt", "signature")),
        *(Column(name, NUMBER) for name in ("correct", "questions")),
        Column("source", NAME, nullable=False),
        Column("found", Text),
        CheckConstraint("state IN ('queued', 'running', 'done', 'refused')"),
        CheckConstraint("(state = 'done') = (receipt IS NOT NULL AND found IS NOT NULL)"),
        sqlite_strict=True,
    )
    op.create_index("verifications_of_peer", "verifications", ["peer", "ended"])


def _create_moderation() -> None:
    op.create_table(
        "moderation",
        Column("number", NUMBER, primary_key=True, autoincrement=False),
        Column("at", REAL_NUMBER, nullable=False),
        Column("act", NAME, nullable=False),
        Column("peer", NAME, nullable=False),
        Column("why", Text, nullable=False),
        CheckConstraint("act IN ('hide', 'ban', 'undo')"),
        sqlite_strict=True,
    )
    op.create_index("moderation_of_peer", "moderation", ["peer", "number"])
