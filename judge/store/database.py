"""Open the judge's database: a SQLite file, or PostgreSQL by its URL.

One judge at a time uses a database. Committed data survives kill -9 and a power cut: SQLite with WAL and
synchronous=FULL, PostgreSQL with synchronous_commit=on.
"""

import contextlib
import fcntl
import math
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    QueuePool,
    String,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from judge.errors import DatabaseInUse, JudgeError
from judge.store.tables import metadata
from swarmd.errors import command_for

T = TypeVar("T")
# A function that gets a connection, and its further arguments.
Step = tuple[Callable[..., Any], Sequence[object]]

# Version of the tables in `judge.store.tables`.
SCHEMA_VERSION = "0003"
# The version table has the name and form of Alembic's, so Alembic can migrate from this version.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
# Errors that a step on the database may raise; sqlite3.Error only at the begin of a transaction.
FAILURES = (SQLAlchemyError, JudgeError, sqlite3.Error)
# Errors whose message is enough, such as a full disk or a lost server; the others are logged with a
# traceback.
FORESEEN = (OperationalError, JudgeError, sqlite3.OperationalError)
# The PostgreSQL advisory lock that a judge holds while it runs.
_LOCK = int.from_bytes(b"swarmd", "big")
# Process id of the server process that answers.
_PROCESS = "SELECT pg_backend_pid()"
# Timeouts after which the loss of the judge's or the server's machine is noticed: about a minute. In seconds;
# tcp_user_timeout is in milliseconds.
_PATIENCE = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "connect_timeout": 10,
}


def database_url(database: Path | str) -> URL:
    """Return the URL of a database; a path means a SQLite file. Raises JudgeError."""
    text = str(database)
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError:
        raise JudgeError("--database is malformed. Give a file, or postgresql://user@host/name.") from None
    if url.get_backend_name() in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise JudgeError(
        f"{shown(url)} is not a supported database. Give a file, or postgresql://user@host/name."
    )


def shown(url: URL) -> str:
    """Return the URL without its password, for messages."""
    return (
        str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    )


class Database:
    """An open database of the current schema. Use it from one thread at a time."""

    def __init__(self, database: Path | str, *, alone: bool = True, writes: bool = False) -> None:
        """Open the database. Raises DatabaseInUse, JudgeError.

        Args:
            alone: hold the lock that excludes other judges, and create the schema of a new database. Without
                it, the database may belong to a running judge: it is read or, with `writes`, also written.
        """
        url = database_url(database)
        self.name = shown(url)
        self._folder = Path(str(url.database)).parent if url.get_backend_name() == "sqlite" else None
        if not alone and url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise JudgeError(f"there is no database {self.name}. Give it with --database.")
        self._lock = (
            _lock_file(Path(str(url.database))) if alone and url.get_backend_name() == "sqlite" else None
        )
        try:
            self.engine = _engine(url, alone, writes or alone)
            with self.engine.begin() as connection:
                _make_or_check(connection, self.name, may_make=alone)
        except ModuleNotFoundError:
            # The package psycopg is missing.
            self.close()
            raise JudgeError(
                f"PostgreSQL needs a package that is not installed. Run `{command_for('judge-postgres')}`."
            ) from None
        except (SQLAlchemyError, sqlite3.Error) as error:
            self.close()
            raise _unusable(self.name, error) from None
        except JudgeError:
            self.close()
            raise

    def begin(self) -> contextlib.AbstractContextManager[Connection]:
        """Begin a transaction: committed at the end, rolled back if an exception is raised."""
        return self.engine.begin()

    def run(self, step: Callable[..., T], *arguments: object) -> T:
        """Run a step, a function of a connection and the arguments, in a transaction."""
        with self.begin() as db:
            return step(db, *arguments)

    def together(self, steps: Sequence[Step]) -> list[Any]:
        """Run the steps in one transaction; return the result or the exception of each.

        If one step fails, every step is retried in a separate transaction.
        """
        try:
            with self.begin() as db:
                return [step(db, *arguments) for step, arguments in steps]
        except Exception as error:
            # A failing step must not fail the other steps; its exception goes to its caller.
            return (
                [error]
                if len(steps) == 1
                else [outcome for step in steps for outcome in self.together([step])]
            )

    def free_bytes(self, db: Connection) -> float:
        """Return the bytes that the database can still take; infinite for PostgreSQL, which reports none.

        Free pages inside the file count too: deleted rows leave them, and new rows use them first.
        """
        if self._folder is None:
            return math.inf
        pages, size = (
            db.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_size")
        )
        return shutil.disk_usage(self._folder).free + float(pages * size)

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.dispose()
        if self._lock is not None:
            self._lock.close()


def _unusable(name: str, error: Exception) -> JudgeError:
    why = " ".join(str(getattr(error, "orig", None) or error).split())
    remedy = "free some space" if "full" in why else "restore it from a backup"
    remedy = "see that the server runs and lets this user in" if "://" in name else remedy
    return JudgeError(
        f"{name} cannot be used as the judge's database: {why}; {remedy}, or give another one with --database"
    )


def _lock_file(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise JudgeError(
            f"cannot write the database {path}: {error.strerror}. Give another file with --database."
        ) from None
    try:
        # The kernel releases the lock, however this process ends.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DatabaseInUse(
            f"another judge is using {path}. Stop it, or give this one another file with --database."
        ) from None
    return lock


def _keep_others_out(connection: Any, url: URL) -> None:
    """Hold PostgreSQL's lock for as long as the connection is open. Raises DatabaseInUse."""
    # Wait a second, because the server releases the lock of a judge that has just ended with a delay.
    connection.execute("SET lock_timeout = '1s'")
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
    except connection.Error as error:
        if error.sqlstate != "55P03":  # lock_not_available
            raise
        raise DatabaseInUse(
            f"another judge is using {shown(url)}. Stop it, or give this one another --database."
        ) from None
    connection.execute("RESET lock_timeout")


def _refuse_to_be_lent(connection: Any, url: URL) -> None:
    """Reject a connection pooler in transaction mode, because locks exclude no other judge there.

    Such a pooler (PgBouncer) reports a process id that differs from the server's. Raises JudgeError.
    """
    process, said = connection.execute(_PROCESS).fetchone(), connection.info
    if process == (said.backend_pid,):
        return
    with type(connection).connect(said.dsn, password=said.password) as other:
        if other.execute(_PROCESS).fetchone() == process:
            raise JudgeError(
                f"{shown(url)} is a pooler in transaction mode, which cannot lock out a second judge. Give"
                " the address of PostgreSQL itself, or of the pooler's session mode, with --database."
            )


def _engine(url: URL, alone: bool, writes: bool) -> Engine:
    sqlite = url.get_backend_name() == "sqlite"
    options: dict[str, Any] = {
        "connect_args": {
            "isolation_level": None,
            "check_same_thread": False,
            # Seconds to wait for another writer; a busy judge leaves only short gaps.
            "timeout": 5 if alone else 30,
        }
    }
    if not sqlite:
        ours = {name: value for name, value in _PATIENCE.items() if name not in url.query}
        # pool_pre_ping: the first step after a restart of the server does not fail. client_encoding: without
        # it, psycopg returns bytes if the server's encoding is SQL_ASCII, as on a server without a locale.
        options = {"pool_pre_ping": True, "connect_args": {**ours, "client_encoding": "utf8"}}
        if not writes:
            # All reads of one transaction see the same snapshot, as in SQLite.
            options["isolation_level"] = "REPEATABLE READ"
    engine = create_engine(url, poolclass=QueuePool, pool_size=1, max_overflow=0, **options)
    if sqlite:

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, _record: object) -> None:
            for pragma in (
                "journal_mode=WAL",
                "synchronous=FULL",
                "foreign_keys=ON",
                "journal_size_limit=67108864",
            ):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            # Called on the driver directly, because SQLAlchemy's way takes as long as a statement.
            driver: Any = connection.connection.driver_connection
            # Python's sqlite3 would begin a transaction only before the first write. IMMEDIATE takes the
            # write lock at once, so no other writer can change the data between a read and its write.
            driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    else:

        @event.listens_for(engine, "connect")
        def claim(connection: Any, _record: object) -> None:
            connection.autocommit = True
            if (encoding := connection.info.parameter_status("server_encoding")) not in ("UTF8", "SQL_ASCII"):
                raise JudgeError(
                    f"{shown(url)} has the encoding {encoding}, which cannot hold every name. Make a database"
                    " with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and give it with --database."
                )
            connection.execute("SET synchronous_commit = on")
            # Timeouts on the server, which release the lock of a judge whose machine is lost.
            for name, value in _PATIENCE.items():
                of = name.replace("keepalives", "tcp_keepalives")
                connection.execute(
                    "SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s", (str(value), of)
                )
            if alone:
                _refuse_to_be_lent(connection, url)
                _keep_others_out(connection, url)
            connection.autocommit = False

    return engine


def _make_or_check(connection: Connection, name: str, may_make: bool) -> None:
    """Create the tables of a new database. Raises JudgeError if the schema has another version."""
    version = connection.scalar(select(_VERSION)) if inspect(connection).has_table(_VERSION.name) else None
    if version == SCHEMA_VERSION:
        return
    if version is not None:
        raise JudgeError(
            f"{name} was written by another version of the judge (schema {version}, this one knows"
            f" {SCHEMA_VERSION}). Run that version, or give another one with --database."
        )
    if not may_make:
        raise JudgeError(f"{name} is not yet a judge's database. `swarmd-judge serve` makes it one.")
    metadata.create_all(connection, checkfirst=False)
    _VERSION.create(connection)
    connection.execute(insert(_VERSION).values(version_num=SCHEMA_VERSION))
