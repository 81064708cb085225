"""The settings of the systemd unit and the launchd agent are right and valid."""

import plistlib
import re
import shlex
from collections import defaultdict

from swarmd.daemon.daemon import GRACE_S
from swarmd.system.service import UNITS
from tests.packaging.checkout import node_config

UNIT, AGENT = UNITS / "swarmd.service", UNITS / "org.swarmd.node.plist"


def read_unit() -> dict[str, list[str]]:
    """Return the values of each "Section.Key" in order. A unit may repeat a key, unlike in configparser."""
    found: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith(("#", ";")):
            continue
        header = re.fullmatch(r"\[(\w+)\]", line)
        if header:
            section = header[1]
            continue
        key, equals, value = line.partition("=")
        assert equals, line
        found[f"{section}.{key}"].append(value)
    return found


def agent() -> dict[str, object]:
    with AGENT.open("rb") as file:
        return dict(plistlib.load(file))


def test_the_units_command_line_is_accepted_by_the_parser() -> None:
    (start,) = read_unit()["Service.ExecStart"]
    words = shlex.split(start.replace("%h", "/home/ada").replace("%E", "/home/ada/.config"))
    assert words[:2] == ["/home/ada/.local/bin/swarmd", "join"]
    node_config(words)


def test_the_unit_lets_the_round_end_restarts_after_crashes_and_has_few_rights() -> None:
    unit = read_unit()
    assert float(unit["Service.TimeoutStopSec"][0]) > GRACE_S
    wanted = {
        "Service.KillMode": ["mixed"],  # only the daemon gets SIGTERM, and it tells its trainer
        "Service.Restart": ["on-failure"],
        "Service.RestartPreventExitStatus": ["2 3 5 130"],
        "Service.NoNewPrivileges": ["yes"],
        "Service.UMask": ["0077"],
        "Install.WantedBy": ["default.target"],
    }
    assert unit | wanted == unit
    # Not allowed: CUDA and torch compile at run time, and the GPU is a device.
    assert not unit.keys() & {"Service.MemoryDenyWriteExecute", "Service.PrivateDevices"}


def test_the_agents_command_line_is_accepted_by_the_parser() -> None:
    program = agent()["ProgramArguments"]
    assert isinstance(program, list) and program[1] == "join"
    node_config(program)


def test_the_agent_is_restarted_only_after_failures_and_has_time_to_stop() -> None:
    keys = agent()
    wanted = {"Label": AGENT.stem, "KeepAlive": {"SuccessfulExit": False}, "RunAtLoad": True, "Umask": 0o077}
    assert keys | wanted == keys
    assert isinstance(keys["ExitTimeOut"], int) and keys["ExitTimeOut"] > GRACE_S
