"""Download from the Hugging Face hub into its cache, with progress; interrupted downloads are resumed.

If a process was killed, huggingface_hub restarts its file from the beginning and leaves the partial file
behind. So files are downloaded here, by its `http_get`, to `<cache>/blobs/<etag>.swarmd-part`. A complete
file is renamed to its name in the cache, where `snapshot_download` finds it.
"""

import fcntl
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx2
from huggingface_hub import (
    DryRunFileInfo,
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from swarmd.config.hub_access import cache_name, fault_of, hub_folder
from swarmd.errors import NoModel, SwarmdError
from swarmd.policy.models.files.progress import Download, Progress

PART: Final = ".swarmd-part"
# Bytes that `http_get` writes at once, and that a killed process loses. The default is ten times as much.
constants.DOWNLOAD_CHUNK_SIZE = 2**20
# Without this, small files would use hf_xet. It stalls forever on some connections
# (huggingface/xet-core#869), and its errors are not of the types for the hub, HTTP or the disk.
constants.HF_HUB_DISABLE_XET = True


def _bound(request: httpx2.Request) -> None:
    """Give a request of the library a timeout, since it waits forever for a hub that does not answer."""
    request.extensions["timeout"] = {
        step: seconds or constants.HF_HUB_ETAG_TIMEOUT
        for step, seconds in request.extensions["timeout"].items()
    }


def fetch(
    repository: str,
    revision: str | None,
    patterns: Sequence[str],
    choices: str,
    report: Callable[[Download], None] = lambda _: None,
) -> Path:
    """Download the top-level files of a repository that match. The returned folder is named by the commit.

    Args:
        repository: owner/name.
        revision: a branch, tag or commit; None for the default branch.
        patterns: patterns of file names.
        choices: alternatives to name in an error message.
        report: receives the progress.
    """
    what: Any = {"revision": revision, "allow_patterns": list(patterns), "ignore_patterns": ["*/*"]}
    with _explained(repository, revision, choices):
        if _bound not in (asked := get_session().event_hooks["request"]):
            asked.append(_bound)
        hub_folder()
        try:
            files, unreached = snapshot_download(repository, **what, dry_run=True), None
        except DryRunError as error:
            # The hub is unreachable, so use the cache if it has the files.
            files, unreached = [], error.__cause__
        if missing := [file for file in files if file.will_download]:
            blobs = Path(missing[0].local_path).parents[2] / "blobs"
            total = sum(file.file_size or 0 for file in missing)
            _require_room(repository, total, blobs)
            progress = Progress(repository, total, report)
            for file in missing:
                _fetch_one(repository, file, blobs, progress)
        try:
            return Path(snapshot_download(repository, **what, local_files_only=unreached is not None))
        except LocalEntryNotFoundError as absent:
            raise unreached or absent from None


def _require_room(repository: str, total: int, blobs: Path) -> None:
    """Raise NoModel if the disk has no room for `total` bytes, less the partial files already there."""
    blobs.mkdir(parents=True, exist_ok=True)
    needed, free = (
        total - sum(part.stat().st_size for part in blobs.glob("*" + PART)),
        shutil.disk_usage(blobs).free,
    )
    if needed > free:
        raise NoModel(
            f"{repository} needs {needed / 1e6:,.0f} MB more on the disk of {blobs}, which has"
            f" {free / 1e6:,.0f} MB free. Free some space, or set {cache_name()} to another disk."
        )


def _fetch_one(repository: str, file: DryRunFileInfo, blobs: Path, progress: Progress) -> None:
    """Download one file into `blobs`, resuming an earlier run's partial file."""
    url = hf_hub_url(repository, file.filename, revision=file.commit_hash)
    found = get_hf_file_metadata(url)
    if found.etag is None or not re.fullmatch(r"[0-9A-Za-z-]{8,128}", found.etag):
        # The cache cannot name this file; huggingface_hub will report the error.
        return
    whole, part = blobs / found.etag, blobs / (found.etag + PART)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b") as out:
        # Another node of this machine may be downloading the same file.
        fcntl.flock(out, fcntl.LOCK_EX)
        if whole.exists():
            part.unlink(missing_ok=True)
            return
        size = out.seek(0, os.SEEK_END)
        if found.size is not None and size > found.size:
            out.seek(0)
            size = out.truncate()
        progress.found(size)
        # It calls only `update` of the progress bar, also if the hub sends a file whole instead of its rest.
        bar: Any = progress
        get = partial(http_get, url, out, headers=build_hf_headers(), expected_size=found.size, _tqdm_bar=bar)
        get(resume_size=size)
        if size and not _is(out, found.etag):
            progress.update(-out.tell())
            out.seek(0)
            out.truncate()
            get()
        if not _is(out, found.etag):
            out.truncate(0)
            raise NoModel(
                f"{file.filename} of {repository} does not match the hub's hash: it was damaged on its way."
                " Run the command again."
            )
        out.flush()
        os.fsync(out.fileno())
        part.replace(whole)


def _is(file: io.BufferedRandom, etag: str) -> bool:
    """Return whether the content matches the hub's name for it.

    The name is a SHA-256 for large files and git's SHA-1 for other files. Any other name counts as a match.
    """
    file.flush()
    size = file.seek(0, os.SEEK_END)
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        found = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", etag):
        found = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        return True
    file.seek(0)
    return hashlib.file_digest(file, lambda: found).hexdigest() == etag


@contextmanager
def _explained(repository: str, revision: str | None, choices: str) -> Iterator[None]:
    """Convert download errors to errors with cause and remedy."""
    at = f"{repository} at {revision}" if revision else repository
    try:
        yield
    except HFValidationError:
        raise NoModel(f"{repository!r} is no model's name. {choices}") from None
    except GatedRepoError:
        raise NoModel(
            f"{repository} is gated: accept its terms on huggingface.co, then log in with `hf auth login`,"
            " or set HF_TOKEN, which takes precedence over the login."
        ) from None
    except RepositoryNotFoundError:
        raise NoModel(
            f"the hub has no repository {repository}, or it is private. {choices} For a private one, log in"
            " with `hf auth login`, or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise NoModel(
            f"{repository} has no revision {revision!r}. Correct model.revision, or leave it out."
        ) from None
    except SwarmdError:
        raise
    except Exception as error:
        raise fault_of(at, error, "give --model a local folder; `--model tiny` needs no download") from error
