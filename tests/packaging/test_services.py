"""The systemd unit and the launchd agent hold the right settings, in words that systemd, launchd and `swarmd`
understand.
"""

import plistlib
import re
import shlex
from collections import defaultdict

from swarmd.daemon.daemon import GRACE_S
from swarmd.system.service import UNITS
from tests.packaging.checkout import node_config

UNIT, AGENT = UNITS / "swarmd.service", UNITS / "org.swarmd.node.plist"


def read_unit() -> dict[str, list[str]]:
    """Section.Key -> values, in order: a unit may give a key more than once, so configparser does not do."""
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


def test_the_unit_starts_a_node_the_parser_accepts() -> None:
    (start,) = read_unit()["Service.ExecStart"]
    words = shlex.split(start.replace("%h", "/home/ada").replace("%E", "/home/ada/.config"))
    assert words[:2] == ["/home/ada/.local/bin/swarmd", "join"]
    node_config(words)


def test_the_unit_waits_for_the_round_restarts_after_crashes_and_has_few_rights() -> None:
    unit = read_unit()
    assert float(unit["Service.TimeoutStopSec"][0]) > GRACE_S
    wanted = {
        "Service.KillMode": ["mixed"],  # SIGTERM to the daemon alone: it tells its trainer itself
        "Service.Restart": ["on-failure"],
        "Service.RestartPreventExitStatus": ["2 3 5 130"],
        "Service.NoNewPrivileges": ["yes"],
        "Service.UMask": ["0077"],
        "Install.WantedBy": ["default.target"],
    }
    assert unit | wanted == unit
    # CUDA and torch compile at run time, and the GPU is a device:
    assert not unit.keys() & {"Service.MemoryDenyWriteExecute", "Service.PrivateDevices"}


def test_the_agent_starts_a_node_the_parser_accepts() -> None:
    program = agent()["ProgramArguments"]
    assert isinstance(program, list) and program[1] == "join"
    node_config(program)


def test_the_agent_is_kept_alive_only_after_failures_and_left_time_to_stop() -> None:
    keys = agent()
    wanted = {"Label": AGENT.stem, "KeepAlive": {"SuccessfulExit": False}, "RunAtLoad": True, "Umask": 0o077}
    assert keys | wanted == keys
    assert isinstance(keys["ExitTimeOut"], int) and keys["ExitTimeOut"] > GRACE_S
