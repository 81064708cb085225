"""Opens the judge's database: a SQLite file, or PostgreSQL by its address.

One judge at a time uses it, or several that share it. What is committed survives kill -9 and a power cut:
SQLite with WAL and synchronous=FULL, PostgreSQL with synchronous_commit=on.
"""

import contextlib
import fcntl
import math
import shutil
import sqlite3
from pathlib import Path
from typing import Any, TextIO

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

from judge.errors import DatabaseInUse, DatabaseUnusable, JudgeError
from judge.store.tables import metadata
from swarmd.errors import command_for

# Of the tables as `judge.store.tables` has them.
SCHEMA_VERSION = "0003"
# Named as Alembic's, which can change the tables from there when a version has to.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
# What a step on the database may raise; sqlite3.Error only when it begins.
FAILURES = (SQLAlchemyError, JudgeError, sqlite3.Error)
# Those whose words say it all: a full disk, a server that is gone. Of the others the log needs a traceback.
FORESEEN = (OperationalError, JudgeError, sqlite3.OperationalError)
# PostgreSQL's advisory lock, which a judge holds while it runs.
_LOCK = int.from_bytes(b"swarmd", "big")
# The process of the server that answers.
_PROCESS = "SELECT pg_backend_pid()"
# A machine that is gone without a word, the judge's or the server's, is noticed in a minute. Seconds; one is
# milliseconds.
_PATIENCE = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "connect_timeout": 10,
}


def database_url(database: Path | str) -> URL:
    """Return the address of a database: a path is a SQLite file. Raises DatabaseUnusable."""
    text = str(database)
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError:
        raise DatabaseUnusable(
            "--database is no address; give a file, or postgresql://user@host/name"
        ) from None
    if url.get_backend_name() in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise DatabaseUnusable(
        f"{shown(url)} is no database of a judge; give a file, or postgresql://user@host/name"
    )


def shown(url: URL) -> str:
    """Return the address for people, without the password."""
    return (
        str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    )


class Database:
    """An open database of the newest schema. Use it from one thread at a time."""

    def __init__(self, database: Path | str, *, alone: bool = True, writes: bool = False) -> None:
        """Open the database. Raises DatabaseInUse, DatabaseUnusable.

        Args:
            alone: keep other judges out and make the schema of a new database. Otherwise it is only read or,
                with `writes`, written beside a judge.
        """
        url = database_url(database)
        self.name = shown(url)
        self._folder = Path(str(url.database)).parent if url.get_backend_name() == "sqlite" else None
        if not alone and url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise DatabaseUnusable(f"there is no database {self.name}; give it with --database")
        self._lock = (
            _lock_file(Path(str(url.database))) if alone and url.get_backend_name() == "sqlite" else None
        )
        try:
            self.engine = _engine(url, alone, writes or alone)
            with self.engine.begin() as connection:
                _make_or_check(connection, self.name, may_make=alone)
        except ModuleNotFoundError:
            # psycopg is missing.
            self.close()
            raise DatabaseUnusable(
                f"PostgreSQL needs a package that is not installed. Run `{command_for('judge-postgres')}`."
            ) from None
        except (SQLAlchemyError, sqlite3.Error) as error:
            self.close()
            raise _unusable(self.name, error) from None
        except JudgeError:
            self.close()
            raise

    def begin(self) -> contextlib.AbstractContextManager[Connection]:
        """Begin a transaction: committed at the end, undone as a whole where something is raised."""
        return self.engine.begin()

    def free_bytes(self) -> float:
        """Return the space that the database can still take; infinite for PostgreSQL, which does not say.

        Deleted rows leave pages in the file, which are used first.
        """
        if self._folder is None:
            return math.inf
        with self.begin() as db:
            pages, size = (
                db.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("freelist_count", "page_size")
            )
        return shutil.disk_usage(self._folder).free + float(pages * size)

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.dispose()
        if self._lock is not None:
            self._lock.close()


def _unusable(name: str, error: Exception) -> DatabaseUnusable:
    why = " ".join(str(getattr(error, "orig", None) or error).split())
    remedy = "free some space" if "full" in why else "restore it from a backup"
    remedy = "see that the server runs and lets this user in" if "://" in name else remedy
    return DatabaseUnusable(
        f"{name} cannot be used as the judge's database: {why}; {remedy}, or give another one with --database"
    )


def _lock_file(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise DatabaseUnusable(
            f"cannot write the database {path}: {error.strerror}; give another file with --database"
        ) from None
    try:
        # The kernel gives the lock back, however this process ends.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DatabaseInUse(
            f"another judge is using {path}; stop it, or give this one another file with --database"
        ) from None
    return lock


def _keep_others_out(connection: Any, url: URL) -> None:
    """Hold PostgreSQL's lock while the connection is open. Raises DatabaseInUse."""
    # The server frees the lock of a judge that has just ended a moment later.
    connection.execute("SET lock_timeout = '1s'")
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
    except connection.Error as error:
        if error.sqlstate != "55P03":  # lock_not_available
            raise
        raise DatabaseInUse(
            f"another judge is using {shown(url)}; stop it, or give this one another --database"
        ) from None
    connection.execute("RESET lock_timeout")


def _refuse_to_be_lent(connection: Any, url: URL) -> None:
    """Refuse a pooler that lends its connections by the transaction: a lock would keep nobody out.

    PgBouncer and its kin call the process by a number of their own. Raises DatabaseUnusable.
    """
    process, said = connection.execute(_PROCESS).fetchone(), connection.info
    if process == (said.backend_pid,):
        return
    with type(connection).connect(said.dsn, password=said.password) as other:
        if other.execute(_PROCESS).fetchone() == process:
            raise DatabaseUnusable(
                f"{shown(url)} is a pooler in transaction mode, where no judge can keep others out; give"
                " the address of PostgreSQL itself, or of the pooler's session mode, with --database"
            )


def _engine(url: URL, alone: bool, writes: bool) -> Engine:
    sqlite = url.get_backend_name() == "sqlite"
    options: dict[str, Any] = {
        "connect_args": {
            "isolation_level": None,
            "check_same_thread": False,
            # Seconds to wait for another writer; a busy judge leaves short gaps.
            "timeout": 5 if alone else 30,
        }
    }
    if not sqlite:
        ours = {name: value for name, value in _PATIENCE.items() if name not in url.query}
        # With the first, the first step after a restart of the server is not lost. Without the encoding,
        # psycopg gives bytes of SQL_ASCII, which a server without a locale has.
        options = {"pool_pre_ping": True, "connect_args": {**ours, "client_encoding": "utf8"}}
        if not writes:
            # All that a reader reads in a transaction is of one moment, as in SQLite.
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
            # Directly, as SQLAlchemy's own way takes as long as a statement.
            driver: Any = connection.connection.driver_connection
            # Python's own begins none before it changes a table. What one has read stays so until it has
            # written, or else it fails.
            driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    else:

        @event.listens_for(engine, "connect")
        def claim(connection: Any, _record: object) -> None:
            connection.autocommit = True
            if (encoding := connection.info.parameter_status("server_encoding")) not in ("UTF8", "SQL_ASCII"):
                raise DatabaseUnusable(
                    f"{shown(url)} has the encoding {encoding}, which cannot hold every name; make a database"
                    " with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and give it with --database"
                )
            connection.execute("SET synchronous_commit = on")
            # Timeouts of the server, so that the lock of a judge whose machine is gone becomes free.
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
    """Make the tables of a new database. Raises DatabaseUnusable where another version of the judge did."""
    known = inspect(connection).has_table(_VERSION.name)
    version = connection.scalar(select(_VERSION)) if known else None
    if version == SCHEMA_VERSION:
        return
    if version is not None:
        raise DatabaseUnusable(
            f"{name} was written by another version of the judge (schema {version}, this one knows"
            f" {SCHEMA_VERSION}); run that version, or give another one with --database"
        )
    if not may_make:
        raise DatabaseUnusable(f"{name} is no database of a judge yet; `swarmd-judge serve` makes it one")
    metadata.create_all(connection, checkfirst=False)
    _VERSION.create(connection)
    connection.execute(insert(_VERSION).values(version_num=SCHEMA_VERSION))
