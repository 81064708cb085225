"""A real PostgreSQL server for the tests.

It runs in a temporary folder, on a Unix socket, and ends with the tests.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import psycopg
import pytest

from judge.types import QuestionWindow
from swarmd.tasks.held_out import Terms
from swarmd.tasks.sandbox.seccomp import die_with_parent
from tests.doubles import TIMEOUT_S
from tests.processes import wait_until

USUAL = sorted(Path("/usr/lib/postgresql").glob("*/bin"))  # Debian's folder for the server's programs
KINDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.net)]
# Mark for tests of a court's stored data.
on_each_database = pytest.mark.parametrize("court_database", KINDS, indirect=True)


# The question window of evaluations that a test writes to a database itself.
WINDOW = QuestionWindow(Terms("0123456789abcdef", 1, 0, 86_400, 1000), bytes(32), 0.0)


def find(program: str) -> str | None:
    return shutil.which(program) or next(
        (str(path / program) for path in reversed(USUAL) if (path / program).exists()), None
    )


@contextmanager
def cluster() -> Iterator[Callable[[], str]]:
    """Yield a function that creates a database and returns its address. Skip without PostgreSQL."""
    initdb, server = find("initdb"), find("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL's initdb and postgres are not installed (Debian: apt-get install postgresql)")
    # PostgreSQL does not run as root. The folder's name is short, because a Unix socket's path must be short.
    owner = (
        pwd.getpwnam("postgres" if "postgres" in {user.pw_name for user in pwd.getpwall()} else "nobody")
        if os.getuid() == 0
        else None
    )
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    if owner:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    who = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
    try:
        making = [
            initdb,
            "-D",
            str(folder / "data"),
            "-A",
            "trust",
            "-U",
            "judge",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale",
            "C.UTF-8",
        ]
        subprocess.run(making, check=True, capture_output=True, cwd=folder, **who)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", f"unix_socket_directories={folder}"]
        serving = [server, "-D", str(folder / "data"), *options]
        with (folder / "log").open("wb") as log:  # the server ends with this process
            process = subprocess.Popen(
                serving, cwd=folder, stderr=log, preexec_fn=partial(die_with_parent, os.getpid()), **who
            )
        try:
            yield databases(folder, process)
        finally:
            process.send_signal(signal.SIGINT)  # SIGINT ends it at once; SIGTERM waits for clients
            process.wait(TIMEOUT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def databases(folder: Path, process: "subprocess.Popen[bytes]") -> Callable[[], str]:
    numbers = count(1)

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            psycopg.connect(f"host={folder} user=judge dbname=postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def make() -> str:
        name = f"judge{next(numbers)}"
        with psycopg.connect(f"host={folder} user=judge dbname=postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}")
        return f"postgresql://judge@/{name}?host={folder}"

    wait_until(ready)
    return make
