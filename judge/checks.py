"""`swarmd-judge check`: whether a judge of these settings could start, and what to do where it could not.

Nothing is changed, except that models of --verified-model are downloaded.
"""

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from judge import config
from judge.config import JudgeSettings
from judge.evaluation.dialling import dial
from judge.server import listening_socket
from judge.store.database import database_url, inspect_database, shown
from judge.verified.evaluator import Evaluator
from p2p.errors import NoKeyFile, OperatorError
from p2p.identity import Identity
from swarmd.config.invitation import read_invitation
from swarmd.tasks.own import find_curriculum


@dataclass(frozen=True, slots=True)
class CheckFinding:
    what: str
    said: str  # where it is not well, also what to do
    well: bool = True


def check(settings: JudgeSettings, evaluator: Evaluator | None = None) -> Iterator[CheckFinding]:
    """Check each part of a judge. evaluator: of uploaded weights; None: the usual one."""
    lessons = find_curriculum(settings.curriculum)
    yield CheckFinding("curriculum", f"{lessons.name} ({lessons.digest})")
    uploads = partial(_uploads, evaluator=evaluator)
    for what, step in (
        ("database", _database),
        ("key", _key),
        ("address", _address),
        ("disk", _disk),
        ("uploads", uploads),
        ("invitation", _invitation),
    ):
        try:
            yield step(settings)
        except OperatorError as error:
            yield CheckFinding(what, str(error), well=False)


def _database(settings: JudgeSettings) -> CheckFinding:
    url = database_url(settings.database)
    name = shown(url)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        return _new("database", Path(str(url.database)), "--database")
    version, held = inspect_database(settings.database)
    lessons = find_curriculum(settings.curriculum)
    if held is not None and held != f"{lessons.name} {lessons.digest}":
        return CheckFinding(
            "database",
            f"{name} holds answers to {held}; give its --curriculum, or another --database",
            well=False,
        )
    return CheckFinding(
        "database",
        f"{name}, schema {version}" if version else f"{name}, empty: it is filled at the first start",
    )


def _key(settings: JudgeSettings) -> CheckFinding:
    path = settings.key_file
    with suppress(NoKeyFile):
        return CheckFinding("key", f"{path}, peer id {Identity.load(path).peer_id}")
    return _new("key", path, "--key")


def _address(settings: JudgeSettings) -> CheckFinding:
    listening_socket(settings.host, settings.port).close()
    return CheckFinding("address", f"{settings.host} port {settings.port or 'of any number'} is free")


def _disk(settings: JudgeSettings) -> CheckFinding:
    """Check the disk of the database, or else of the key, and of uploaded weights, where they are taken."""
    kept = settings.key_file if "://" in str(settings.database) else Path(settings.database)
    folders = {_existing(kept): config.FREE_BYTES}
    if settings.verified_bytes:
        uploads = _existing(settings.uploads_folder)
        folders[uploads] = folders.get(uploads, 0) + config.VERIFIED_WAITING * settings.verified_bytes
    for folder, wanted in folders.items():
        if (free := shutil.disk_usage(folder).free) < wanted:
            said = (
                f"{folder}: {free / 2**20:,.0f} MiB free, {wanted / 2**20:,.0f} wanted; free some, or name"
                " another place"
            )
            return CheckFinding("disk", said, well=False)
    looked = [f"{folder}: {shutil.disk_usage(folder).free / 2**20:,.0f} MiB free" for folder in folders]
    unknown = ["how much PostgreSQL's disk has free is not known here: watch it there"]
    return CheckFinding("disk", "; ".join(looked + unknown * ("://" in str(settings.database))))


def _uploads(settings: JudgeSettings, evaluator: Evaluator | None) -> CheckFinding:
    """Open the models as a start does, so those that are not here are downloaded."""
    if not settings.verified_bytes:
        return CheckFinding("uploads", "no weights are evaluated")
    if not (folder := _new("uploads", settings.uploads_folder / "upload", "--verified-folder")).well:
        return folder
    evaluator = evaluator or Evaluator(config.VERIFIED_S)
    models = asyncio.run(evaluator.describe(settings.verified_model))
    return CheckFinding(
        "uploads", f"weights of {', '.join(models)}, {settings.verified_bytes:,} bytes at most"
    )


def _invitation(settings: JudgeSettings) -> CheckFinding:
    """Compare the invitation's curriculum with the judge's, and dial its addresses."""
    if not settings.invitation:
        return CheckFinding("invitation", "none is shown at /join; `swarmd invite` prints one")
    name, asked = read_invitation(settings.invitation).curriculum, find_curriculum(settings.curriculum).name
    if name and name != asked:
        said = f"is to a swarm of {name}, which this judge of {asked} refuses; set curriculum = {name!r}"
        return CheckFinding("invitation", f"it {said}", well=False)
    dialled = dial(settings.invitation)
    answers = [address for address, why in dialled.items() if not why]
    said = "; ".join(f"{address}: {why or 'answers'}" for address, why in dialled.items())
    remedy = (
        ". Nobody from elsewhere can join by it: show the invitation of a node that runs now, best of a"
        " `swarmd bootstrap` with a fixed address"
    )
    return CheckFinding("invitation", (said or "it has no address") + remedy * (not answers), bool(answers))


def _new(what: str, path: Path, option: str) -> CheckFinding:
    folder = _existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return CheckFinding(
            what,
            f"{path} is not there, and {folder} cannot be written; give another one with {option}",
            well=False,
        )
    return CheckFinding(what, f"{path}: made at the first start")


def _existing(path: Path) -> Path:
    """Return the nearest folder above that exists."""
    return next(folder for folder in path.absolute().parents if folder.exists())
