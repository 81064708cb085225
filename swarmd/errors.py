"""Errors that an operator can act on.

The CLI prints the message without a traceback and exits with the class's code. Faults of peers are values
(`p2p.types.Reason`), counted and shown. Bugs are ordinary exceptions, with tracebacks.
"""

import sys
from pathlib import Path

from p2p.errors import OperatorError


def command_for(extra: str) -> str:
    """Return the command that adds an extra to this installation; a uv tool has no pip."""
    return (
        f"SWARMD_EXTRAS={extra} packaging/install.sh"
        if (Path(sys.prefix) / "uv-receipt.toml").exists()
        else f"pip install 'swarmd[{extra}]'"
    )


class SwarmdError(OperatorError):
    """An error that the operator can fix."""


class ConfigError(SwarmdError):
    """The configuration cannot be used."""


class NoModel(SwarmdError):
    """The model or the device cannot be used."""

    exit_code = 3


class Unreachable(SwarmdError):
    """A server or file that is needed cannot be reached."""

    exit_code = 4


class StateFolderInUse(SwarmdError):
    """Another node owns the state folder."""

    exit_code = 5


class NotRunning(SwarmdError):
    """No node runs in the state folder."""

    exit_code = 6


class CannotRecord(SwarmdError):
    """A file in the state folder cannot be written or read."""

    @classmethod
    def to(cls, path: Path, error: OSError) -> "CannotRecord":
        return cls(
            f"{path}: cannot be written: {error.strerror or error}. Free some space, or correct its"
            " permissions."
        )
