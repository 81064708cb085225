"""Explain why the Hugging Face hub cannot be used: its answer, the connection, the disk, or the environment.

The hub's libraries raise many types for a malformed variable: ValueError for a proxy's scheme,
UnicodeEncodeError for a token.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from swarmd.errors import ConfigError, NoModel, SwarmdError, Unreachable
from swarmd.terminal import printable

PROXIES: Final = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "https_proxy", "http_proxy")
HUB: Final = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def hub_folder() -> Path:
    """Return the folder of the hub's files, which contains its cache. Raises NoModel."""
    from huggingface_hub import constants

    if any(folder.startswith("~") for folder in (constants.HF_HOME, constants.HF_HUB_CACHE)):
        raise NoModel("there is no home folder for the hub's cache: HOME is not set. Set HOME or HF_HOME.")
    return Path(constants.HF_HOME)


def cache_name() -> str:
    """Return the variable that sets the hub's cache: HF_HUB_CACHE takes precedence over HF_HOME."""
    return "HF_HUB_CACHE" if os.environ.get("HF_HUB_CACHE") else "HF_HOME"


def fault_of(
    what: str, error: Exception, otherwise: str, environ: Mapping[str, str] = os.environ
) -> SwarmdError:
    """Return cause and remedy of an error that occurred while `what` was fetched or looked up.

    otherwise: the remedy, in words, if the hub cannot be reached.
    """
    from httpx2 import HTTPError, UnsupportedProtocol

    why = printable((str(error).strip() or type(error).__name__).splitlines()[0])[:300]
    if (status := getattr(getattr(error, "response", None), "status_code", None)) in (401, 403):
        # huggingface_hub prefers HF_TOKEN to the token of a login.
        token, remedy = (
            ("HF_TOKEN", "Set it to a token that may read this, or unset it")
            if environ.get("HF_TOKEN")
            else (
                "a missing token, or the token of `hf auth login`",
                "Log in with a token that may read this",
            )
        )
        return NoModel(f"the Hugging Face hub refuses {token} for {what} (status {status}). {remedy}.")
    if (number := getattr(error, "errno", None)) in (errno.ENOSPC, errno.EDQUOT):
        return NoModel(
            f"no room on the disk to download {what}. Free some space, or set {cache_name()} to another disk."
        )
    if number is not None and getattr(error, "filename", None):
        return NoModel(
            f"cannot store {what}: {why}. Make that folder writable, or set {cache_name()} to another."
        )
    there = [name for name in (*PROXIES, *HUB, *CERTIFICATES) if environ.get(name)]
    if (
        number is None
        and isinstance(error, OSError | HTTPError)
        and not isinstance(error, UnsupportedProtocol)
    ):
        # huggingface_hub also raises OSError if fewer bytes arrived than the hub had announced.
        checks = ["the connection", *[name for name in there if name not in CERTIFICATES]]
        return Unreachable(
            f"cannot fetch {what} from the Hugging Face hub, and it is not in the local cache ({why}). Check"
            f" {', '.join(checks)}, or {otherwise}."
        )
    proxies = [name for name in there if name in PROXIES and "prox" in f"{why}{error!r}".lower()]
    return ConfigError(
        f"the Hugging Face hub cannot be used for {what} ({why}). Correct or unset"
        f" {', '.join(proxies or there) or 'the variables of the hub and of proxies'}."
    )
