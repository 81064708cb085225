"""Downloads from the Hugging Face hub into its own cache. Weights show progress, and a download that was cut off resumes.

huggingface_hub begins a file anew where its process was killed, and leaves the part behind. So weights are fetched here, with its own
`http_get`, as `<cache>/blobs/<etag>.swarmd-part`. Once whole they take the cache's name for them, and `snapshot_download` finds them.
"""

import errno
import fcntl
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from huggingface_hub import DryRunFileInfo, get_hf_file_metadata, hf_hub_url, snapshot_download
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

from swarmd.errors import NoModel, Unreachable

Report = Callable[[str], None]  # how far a download is, in words

EVERY: Final = 5.0  # seconds between two words about a download
PART: Final = ".swarmd-part"


def fetch(repository: str, revision: str | None, patterns: Sequence[str], choices: str) -> Path:
    """Top-level files of a repository that match. The folder's name is the commit. choices: what to use instead, in words."""
    with _explained(repository, revision, choices):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]))


def fetch_weights(repository: str, commit: str, folder: Path, patterns: Sequence[str], choices: str, report: Report) -> Path:
    """The same for large files. folder: where `fetch` has put the small ones of this commit."""
    with _explained(repository, commit, choices):
        missing = _missing(repository, commit, patterns)
        progress = Progress(repository, sum(file.file_size or 0 for file in missing), report)
        for file in missing:
            _fetch_one(repository, commit, file, folder.parents[1] / "blobs", progress)
    return fetch(repository, commit, patterns, choices)


class Progress:
    """Says how far a download is: when it begins, and then every few seconds."""

    def __init__(self, source: str, total: int, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        """source: what is downloaded, in words. total: bytes of all files."""
        self._source, self._total, self._report, self._clock = source, total, report, clock
        self._there = self._got = 0  # bytes on the disk, and of them those that came since we began
        self._begun = self._said = clock()

    def found(self, size: int) -> None:
        """An earlier run left so much."""
        self._there += size
        self._say()

    def lost(self, size: int) -> None:
        """So much has to be fetched again."""
        self._there = max(0, self._there - size)

    def got(self, size: int) -> None:
        self._there, self._got = self._there + size, self._got + size
        if self._clock() >= self._said + EVERY:
            self._say()

    def _say(self) -> None:
        self._said = self._clock()
        rate = self._got / max(1e-9, self._said - self._begun)
        self._report(progress_words(self._source, self._there, self._total, rate))


def progress_words(source: str, there: int, total: int, rate: float) -> str:
    """ "downloading qwen2.5-0.5b: 312 of 988 MB, 2 min left". rate: bytes a second; 0: not known yet."""
    words = f"downloading {source}: {there / 1e6:.0f} of {total / 1e6:.0f} MB"
    if rate <= 0 or there >= total:
        return words
    left = (total - there) / rate
    return words + (f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left")


def _missing(repository: str, commit: str, patterns: Sequence[str]) -> list[DryRunFileInfo]:
    try:
        files: Any = snapshot_download(repository, revision=commit, allow_patterns=list(patterns), ignore_patterns=["*/*"], dry_run=True)
    except DryRunError:  # the hub cannot be reached; what is in the cache will have to do
        return []
    return [file for file in files if file.will_download]


def _fetch_one(repository: str, commit: str, file: DryRunFileInfo, blobs: Path, progress: Progress) -> None:
    """One file into `blobs`, from where an earlier run left off."""
    url = hf_hub_url(repository, file.filename, revision=commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or not re.fullmatch(r"[0-9A-Za-z-]{8,128}", found.etag):
        return  # no name of the cache: huggingface_hub will say why
    blobs.mkdir(parents=True, exist_ok=True)
    whole, part = blobs / found.etag, blobs / (found.etag + PART)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with _Counted(io.FileIO(descriptor, "r+b"), progress) as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # another node of this machine may be fetching it
        if whole.exists():
            part.unlink(missing_ok=True)
            return
        size = out.seek(0, os.SEEK_END)
        if found.size is not None and size > found.size:
            size = out.truncate(0)
        progress.found(size)
        http_get(url, out, resume_size=size, headers=build_hf_headers(), expected_size=found.size)
        if size and not _is(out, found.etag):
            out.truncate(0)
            http_get(url, out, headers=build_hf_headers(), expected_size=found.size)
        out.flush()
        os.fsync(out.fileno())
        part.replace(whole)


class _Counted(io.BufferedRandom):
    """A file that says how much is written to it."""

    def __init__(self, raw: io.FileIO, progress: Progress) -> None:
        super().__init__(raw)
        self._progress = progress

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._progress.got(written)
        return written

    def truncate(self, size: int | None = None) -> int:
        """As http_get does where the hub sends the file from its beginning all the same."""
        before = self.seek(0, os.SEEK_END)
        after = super().truncate(0 if size is None else size)
        self.seek(after)
        self._progress.lost(before - after)
        return after


def _is(file: io.BufferedRandom, etag: str) -> bool:
    """Whether the content is what the hub has. Only its large files are named by their SHA-256; of the rest their size is all we know."""
    if not re.fullmatch(r"[0-9a-f]{64}", etag):
        return True
    file.flush()
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest() == etag


@contextmanager
def _explained(repository: str, revision: str | None, choices: str) -> Iterator[None]:
    """What can go wrong, with cause and remedy."""
    at = f"{repository} at {revision}" if revision else repository
    try:
        yield
    except HFValidationError:
        raise NoModel(f"{repository!r} is no model's name. {choices}") from None
    except GatedRepoError:
        raise NoModel(f"{repository} is gated: accept its terms on huggingface.co, then log in with `hf auth login`.") from None
    except RepositoryNotFoundError:
        raise NoModel(f"the hub has no repository {repository}, or it is private (then: `hf auth login`). {choices}") from None
    except RevisionNotFoundError:
        raise NoModel(f"{repository} has no revision {revision!r}. Correct model.revision, or leave it out.") from None
    except (LocalEntryNotFoundError, httpx2.HTTPError) as error:
        raise Unreachable(
            f"cannot fetch {at} from the Hugging Face hub, and it is not in the local cache ({_first_line(error)}). "
            "Check the connection and HF_HUB_OFFLINE, or give --model a local folder; `--model tiny` needs no download."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoModel(f"no room on the disk to download {at}. Free some space, or set HF_HOME to another disk.") from error
        raise NoModel(f"cannot store {at}: {_first_line(error)}. Check the folder that HF_HOME names.") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
