"""`swarmd service`: the unit file, and the commands to a stand-in for the service manager."""

import json
import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarmd.errors import ConfigError
from swarmd.system.service import user_service
from tests.doubles import TIMEOUT_S
from tests.swarmd.conftest import Run

MANAGER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *"$(cat {fails} 2>/dev/null || echo nothing-fails)"*) echo "Failed to connect to bus" >&2; exit 1;;
esac
"""


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Return the path of the unit file; `run` uses temporary configuration folders."""
    return tmp_path / "xdg_config_home" / "systemd" / "user" / "swarmd.service"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `systemctl` on PATH that records its calls and fails for the commands in the file `fails`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "systemctl"
    program.write_text(MANAGER.format(log=tmp_path / "calls", fails=tmp_path / "fails"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def calls(manager: Path) -> list[str]:
    return (manager / "calls").read_text().splitlines() if (manager / "calls").exists() else []


def test_a_service_can_be_installed_shown_and_uninstalled(run: Run, manager: Path, unit: Path) -> None:
    assert json.loads(run("service", "status", "--json").out)["installed"] is False
    printed = run("service", "install", "--print").out
    assert not unit.exists() and "is-active" not in "".join(calls(manager)[1:])
    said = run("service", "install")
    assert said.code == 0 and "installed and started" in said.err and "enable-linger" in said.err
    assert unit.read_text() == printed and re.search(r"^ExecStart=.*swarmd.* join$", printed, re.MULTILINE)
    assert calls(manager)[-2:] == ["--user daemon-reload", "--user enable --now swarmd.service"]
    assert "was installed already" in run("service", "install").err
    assert json.loads(run("service", "status", "--json").out) == {
        "schema": 1, "file": str(unit), "installed": True, "current": True, "active": True,
    }  # fmt: skip
    assert run("service", "uninstall").code == 0
    assert calls(manager)[-1] == "--user disable --now swarmd.service" and not unit.exists()
    assert run("service", "uninstall").code == 2  # it is not installed


def test_a_service_file_with_other_contents_is_never_overwritten(run: Run, manager: Path, unit: Path) -> None:
    unit.parent.mkdir(parents=True)
    unit.write_text(mine := "[Service]\nExecStart=/opt/mine\n")
    said = run("service", "install")
    assert said.code == 2 and "with other contents" in said.err and "--print" in said.err
    assert (calls(manager), unit.read_text()) == ([], mine)
    assert "differs from this version's" in run("service", "status").out
    kept = Path(json.loads(run("service", "uninstall", "--json").out)["kept"])
    assert kept.read_text() == mine and not unit.exists()
    assert run("service", "install").code == 0


def test_a_failing_service_manager_leaves_no_unit_behind(run: Run, manager: Path, unit: Path) -> None:
    (manager / "fails").write_text("enable")
    said = run("service", "install")
    assert (
        said.code == 4
        and "Failed to connect to bus" in said.err
        and "Its file was removed. Log in" in said.err
    )
    assert not unit.exists()


def test_without_a_service_manager_the_command_gives_a_message(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    said = run("service", "install")
    assert said.code == 2 and "systemctl is not available" in said.err
    assert run("service", "install", "--print").code == 0
    monkeypatch.setattr(sys, "platform", "win32")
    assert "not on win32" in run("service", "install").err


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("folder", ["state", 'my node\'s 100% $HOME; \\ "state"'])
def test_systemd_reads_the_command_as_intended(tmp_path: Path, folder: str) -> None:
    service = user_service("linux", tmp_path / folder, tmp_path)
    unit = tmp_path / "swarmd.service"
    unit.write_bytes(service.content)
    (tmp_path / "run").mkdir(mode=0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "HOME": str(tmp_path)}
    checked = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Ignore messages about other units of this machine.
    said = [line for line in (checked.stdout + checked.stderr).splitlines() if unit.name in line]
    assert (checked.returncode, said) == (0, [])


def test_characters_with_a_meaning_for_systemd_are_escaped(tmp_path: Path) -> None:
    service = user_service("linux", Path('/x/100% $HOME "a" \\ b;'), tmp_path)
    assert service.content.count(b'--state-dir "/x/100%% $$HOME \\"a\\" \\\\ b;"\n') == 1
    assert user_service("linux", Path("/x/état"), tmp_path).content.count('"/x/état"\n'.encode()) == 1


def test_on_macos_an_agent_for_launchd_is_installed(tmp_path: Path) -> None:
    service = user_service("darwin", tmp_path / "state", tmp_path)
    agent = plistlib.loads(service.content)
    assert service.file == tmp_path / "Library" / "LaunchAgents" / "org.swarmd.node.plist"
    assert (
        agent["ProgramArguments"][-3:] == ["join", "--state-dir", str(tmp_path / "state")]
        and agent["ExitTimeOut"] == 660
    )
    assert [command[1] for command in service.start] == ["bootstrap"] and service.stop[1] == "bootout"


def test_a_path_that_a_unit_cannot_contain_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        user_service("linux", tmp_path / "a\nb", tmp_path)
