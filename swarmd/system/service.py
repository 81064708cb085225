"""The node as a user service: systemd on Linux, launchd on macOS.

It writes the unit file, and lets the service manager load it. Templates of the units are in units/; only the
command line is filled in here.
"""

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2p import durable
from swarmd.errors import ConfigError, Unreachable

UNITS: Final = Path(__file__).parent / "units"
UNIT, AGENT = "swarmd.service", "org.swarmd.node.plist"
# Longest time for stopping a node; the unit allows 660 s.
STOP_TIMEOUT_S: Final = 720.0


@dataclass(frozen=True, slots=True)
class UserService:
    """A service of one user: its file, its contents, and the commands of its manager."""

    manager: str  # the program: systemctl or launchctl
    file: Path
    content: bytes
    start: Sequence[Sequence[str]]
    stop: Sequence[str]
    active: Sequence[str]  # a command with exit code 0 if the service runs or is loaded
    note: str = ""  # a further step for the user

    def install(self) -> bool:
        """Write the file and start the service; return False if the file existed already.

        Raises ConfigError, Unreachable.
        """
        self._require_manager()
        new = not self.file.exists()
        if not new and not self.is_current:
            raise ConfigError(
                f"{self.file}: a service with other contents exists. `swarmd service install --print` shows"
                " this version's file; `swarmd service uninstall` stops the old service and keeps its file"
                " aside. Then install again."
            )
        if new:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self.file, self.content)
        for command in self.start:
            if fault := self._call(command):
                if new:
                    self.file.unlink()
                raise Unreachable(
                    f"the service does not start: `{' '.join(command)}` says: {fault}."
                    f" {'Its file was removed' if new else 'Its file was kept'}. Log in"
                    " as this user directly (su and sudo have no user services), or run `swarmd join`"
                    " under your own service manager."
                )
        return new

    def uninstall(self) -> Path | None:
        """Stop the service and remove its file.

        A file that was changed is renamed instead, and its new path is returned.
        """
        if not self.file.exists():
            raise ConfigError(f"{self.file}: there is no such service. `swarmd service install` makes one.")
        self._require_manager()
        if (fault := self._call(self.stop)) and not self._call(self.active):
            raise Unreachable(
                f"`{' '.join(self.stop)}` says: {fault}. The service still runs, and its file was kept: stop"
                " it by hand."
            )
        if self.is_current:
            self.file.unlink()
            return None
        return self.file.rename(durable.free_aside(self.file))

    @property
    def is_current(self) -> bool:
        """Return whether the file has the contents that this version would write."""
        try:
            return self.file.read_bytes() == self.content
        except OSError:
            return False

    @property
    def is_active(self) -> bool:
        return shutil.which(self.manager) is not None and not self._call(self.active)

    def _require_manager(self) -> None:
        if shutil.which(self.manager) is None:
            raise ConfigError(
                f"{self.manager} is not available. Run `swarmd join` under your own service manager."
            )

    def _call(self, command: Sequence[str]) -> str:
        """Run a command; return its error message, or "" on success."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=STOP_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        said = (done.stderr or done.stdout).strip().splitlines()
        return "" if done.returncode == 0 else said[-1] if said else f"it ended with {done.returncode}"


def user_service(
    platform: str, state_dir: Path | None, home: Path, config_home: Path | None = None
) -> UserService:
    """Return the service definition of a platform (`sys.platform`).

    state_dir: given if it is not the default. Raises ConfigError on a platform without services.
    """
    command = [*_program(), "join", *(("--state-dir", str(state_dir)) if state_dir else ())]
    if platform == "darwin":
        return _launchd(command, home)
    if platform == "linux":
        return _systemd(command, config_home or home / ".config")
    raise ConfigError(
        f"services are supported on Linux and macOS only, not on {platform}. Run `swarmd join`"
        " under your own service manager."
    )


def _program() -> Sequence[str]:
    program = Path(sys.executable).with_name("swarmd")
    return (str(program),) if program.exists() else (sys.executable, "-m", "swarmd")


def _systemd(command: Sequence[str], config_home: Path) -> UserService:
    lines = (UNITS / UNIT).read_text(encoding="utf-8").splitlines(keepends=True)
    start = f"ExecStart={' '.join(map(_quoted, command))}\n"
    content = "".join(start if line.startswith("ExecStart=") else line for line in lines)
    user = ("systemctl", "--user")
    return UserService(
        "systemctl",
        config_home / "systemd" / "user" / UNIT,
        content.encode(),
        start=((*user, "daemon-reload"), (*user, "enable", "--now", UNIT)),
        stop=(*user, "disable", "--now", UNIT),
        active=(*user, "is-active", UNIT),
        note="`loginctl enable-linger` lets it run while you are logged out",
    )


def _quoted(word: str) -> str:
    """Quote a word of ExecStart as systemd reads it (systemd.service(5), systemd.syntax(7)).

    Raises ConfigError for control characters.
    """
    if not word.isprintable():
        raise ConfigError(
            f"{word!r} cannot be written to a unit file. Use a path without control characters."
        )
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if escaped.isascii() and not set(escaped) & set(" \t'\";") else f'"{escaped}"'


def service_word(path: Path) -> bytes:
    """Return a path in the form of a systemd unit, without quotes around it."""
    return _quoted(str(path)).strip('"').encode()


def _launchd(command: Sequence[str], home: Path) -> UserService:
    agent = plistlib.loads((UNITS / AGENT).read_bytes())
    agent["ProgramArguments"] = list(command)
    domain = f"gui/{os.getuid()}"
    label = f"{domain}/{agent['Label']}"
    file = home / "Library" / "LaunchAgents" / AGENT
    return UserService(
        "launchctl",
        file,
        plistlib.dumps(agent),
        start=(("launchctl", "bootstrap", domain, str(file)),),
        stop=("launchctl", "bootout", label),
        active=("launchctl", "print", label),
    )
