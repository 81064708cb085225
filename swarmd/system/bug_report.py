"""The contents of a bug report: a node's versions, settings, status, figures and logs, without secrets."""

import json
import os
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from swarmd.errors import CannotRecord, ConfigError
from swarmd.state.folder import EVENTS_FILE, LOG_FILE, METRICS_FILE

# Bytes from the end of each file. The recorded events are whole, or they could not be replayed.
_LAST_BYTES: Final = {
    **dict.fromkeys((LOG_FILE, "trainer.log", METRICS_FILE), 256 * 1024),
    **dict.fromkeys((EVENTS_FILE, f"{EVENTS_FILE}.1"), 64 * 1024 * 1024),
}
# Patterns of a secret's name and the separator before its value. "tokens" and "an unlikely token" are names
# of figures, not of secrets.
_WORDS: Final = r"(?:passwd|password|secret|(?:api|access|private)[_-]?key|credential)(?:s|[_-][a-z_-]+)?"
_NAMED: Final = rf"""(?i)((?:(?<!unlikely )token|{_WORDS})(?:\\?["'])?\s*[=:]\s*"""
# Patterns of secrets. The node's key file is never read.
_SECRETS: Final = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        "<secret>",
    ),
    (re.compile(r"\b(hf|sk|ghp|gho|github_pat|glpat|xox[abp])[_-][A-Za-z0-9_-]{16,}"), "<secret>"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 <secret>"),
    (re.compile(_NAMED + r"""(\\?["']))(?:(?!\2)[^\n])+"""), r"\1<secret>"),
    (re.compile(_NAMED + r""")[^\s"'&,;{}\[\]\\][^\s"'&,;}\]]*"""), r"\1<secret>"),
    (
        re.compile(r"""(?i)(--(?:[a-z]+-)*(?:token|passwd|password|secret|key)["']?,?\s+["']?)[^\s"',]+"""),
        r"\1<secret>",
    ),
    (re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,31}://)[^/\s@\"']+@"), r"\1<secret>@"),
)
_NAMED_HOST: Final = re.compile(r"(?i)(/(?:dns|dns4|dns6)/|\bhttps?://(?:<secret>@)?)[^/\s\"',:<>]+")
_MAYBE_IP: Final = re.compile(r"(?<![\w.:-])[0-9A-Fa-f:.]{3,45}(?![\w:])")


def redacted(text: str, home: Path, *, addresses: bool) -> str:
    """Replace text that looks like a secret, and the home folder by ~.

    addresses: replace IP addresses and host names, too.
    """
    if len(str(home)) > 1:
        # JSON escapes letters beyond ASCII.
        for written in (str(home), json.dumps(str(home))[1:-1]):
            text = text.replace(written, "~")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    if addresses:
        text = _MAYBE_IP.sub(_without_ip, _NAMED_HOST.sub(r"\1<address>", text))
    return text


def _without_ip(found: re.Match[str]) -> str:
    whole = found[0].rstrip(".:") if not found[0].endswith("::") else found[0]
    host, colon, port = whole.partition(":") if whole.count(":") == 1 else (whole, "", "")
    try:
        ip_address(host)
    except ValueError:
        return found[0]
    return f"<address>{colon}{port}{found[0][len(whole) :]}"


def collect(folder: Path, said: Mapping[str, str], home: Path, *, addresses: bool) -> dict[str, str]:
    """Collect the files of a report, by name, redacted.

    said: files that were already made. addresses: redact IP addresses, too.
    """
    found = dict(said)
    for name, most in _LAST_BYTES.items():
        try:
            with (folder / name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
                found[name] = file.read(most).decode("utf-8", "replace")
        except OSError as error:
            found[name] = f"{error.strerror}\n"
    return {name: redacted(text, home, addresses=addresses) for name, text in found.items()}


def write_report(files: Mapping[str, str], to: Path) -> None:
    """Write a new zip file, mode 0600.

    Raises ConfigError if `to` exists, CannotRecord if it cannot be written.
    """
    try:
        with (
            os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for name, text in files.items():
                archive.writestr(name, text)
    except FileExistsError:
        raise ConfigError(f"{to} exists already. Name another file with --out.") from None
    except OSError as error:
        with suppress(OSError):
            # Remove the partial file.
            to.unlink()
        raise CannotRecord.to(to, error) from None
