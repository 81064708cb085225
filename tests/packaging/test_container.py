"""The container images and the compose files.

All files exist, all command lines are valid, there are no secrets, and nothing runs as root.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from judge.config import SCHEMA
from p2p.address import parse_bootstrap
from swarmd.config.config import NodeConfig
from swarmd.state.folder import IDENTITY_FILE
from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT, entrypoint, node_config, parse

DOCKERFILE = ROOT / "packaging" / "Dockerfile"
INSTRUCTIONS = {
    "FROM",
    "ARG",
    "ENV",
    "RUN",
    "COPY",
    "WORKDIR",
    "USER",
    "VOLUME",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}
PROGRAM = (sys.executable, str(ROOT / "packaging" / "entrypoint.py"))
ENTRY = {**os.environ, "PYTHONPATH": str(ROOT)}
SECRET = re.compile(r"\.pem|\.key|id_rsa|password|secret|token|credential", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """Return the pairs (instruction, arguments) of a Dockerfile, with joined lines and without comments."""
    lines = [
        line
        for line in DOCKERFILE.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    return [
        (word, rest)
        for word, _, rest in (
            line.partition(" ") for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
        )
    ]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "packaging" / name).read_text(encoding="utf-8")))


def command_of(service: dict[str, Any]) -> list[str]:
    """Return a service's command, with the defaults of its variables (${NAME:-default}) filled in."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(word)) for word in service["command"]]


def nodes() -> dict[str, Any]:
    return {name: service for name, service in compose()["services"].items() if name.startswith("node-")}


def test_the_dockerfile_copies_only_files_that_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / "packaging" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    copied: set[str] = set()
    for word, rest in instructions():
        assert word in INSTRUCTIONS
        if word == "COPY" and not rest.startswith("--from="):
            copied.update(rest.split()[:-1])
    assert copied == let_through
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []


def test_the_image_has_no_secrets_no_root_user_and_the_scripts_pinned_versions() -> None:
    assert [rest for _, rest in instructions() if SECRET.search(rest)] == []
    (user,) = [rest for word, rest in instructions() if word == "USER"]
    assert all(int(number) > 0 for number in user.split(":"))
    words = [word for word, _ in instructions()]
    assert words.index("USER") < words.index("ENTRYPOINT")
    (pin,) = set(re.findall(r"torch==[\d.]+", DOCKERFILE.read_text(encoding="utf-8")))
    assert pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f'TORCH="{pin}"' in (ROOT / "scripts" / "setup").read_text(encoding="utf-8")


def test_the_images_command_lines_are_valid() -> None:
    lines = dict(instructions())
    node_config(json.loads(lines["CMD"]))
    health = json.loads(lines["HEALTHCHECK"].partition("CMD ")[2])
    assert (health[:2], parse(health)["state_dir"]) == (["swarmd", "status"], Path("/state"))


def test_the_compose_file_of_the_papers_swarm_has_its_settings() -> None:
    assert list(nodes()) == [f"node-{number}" for number in range(1, 9)]
    configs = {node_config(command_of(service)) for service in nodes().values()}
    (config,) = configs
    assert isinstance(config, NodeConfig)
    assert (config.model.name, config.round.local, config.round.external, config.round.rounds) == (
        "qwen2.5-0.5b",
        4,
        4,
        2000,
    )
    assert (config.profile, config.train.learning_rate, config.sharing.weigh, config.gate.mode) == (
        "sapo-paper",
        1e-3,
        "paper",
        "off",
    )
    judge = parse(command_of(compose()["services"]["judge"]))
    assert config.judge.url == f"http://judge:{judge['port']}"
    assert judge["curriculum"] == "sapo-9"


def test_each_node_has_a_separate_state_and_gpu_and_all_share_the_address_file() -> None:
    states, declared = [], set(compose()["volumes"])
    for name, service in nodes().items():
        mounts = dict(volume.split(":", 1) for volume in service["volumes"])
        assert set(mounts) <= declared
        states += [volume for volume, path in mounts.items() if path == "/state"]
        assert mounts["meeting"] == ("/meeting" if name == "node-1" else "/meeting:ro")
        assert (
            service["environment"]["MEETING_FILE"] == "/meeting/bootstrap"
            and "--state-dir" in service["command"]
        )
    first, *rest = nodes().values()
    assert len(set(states)) == len(nodes()) and "node-1" not in first["depends_on"]
    assert all(service["depends_on"]["node-1"] == {"condition": "service_healthy"} for service in rest)
    assert first["environment"]["MEETING_AS"].split("/")[2] == "node-1"
    override = yaml.safe_load((ROOT / "packaging" / "compose.gpu.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    given = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in override.values()
    ]
    assert (list(override), given) == (list(nodes()), [[str(number)] for number in range(8)])


def test_services_have_no_more_rights_than_needed() -> None:
    for service in compose()["services"].values():
        assert (service["cap_drop"], service["read_only"], service.get("privileged")) == (["ALL"], True, None)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def stage(name: str) -> dict[str, str]:
    """Return the instructions of one image; of several with the same name, the last one."""
    lines = instructions()
    first = next(
        place for place, (word, rest) in enumerate(lines) if word == "FROM" and rest.endswith(f" AS {name}")
    )
    return dict(itertools.takewhile(lambda line: line[0] != "FROM", lines[first + 1 :]))


def test_the_judges_image_uses_only_existing_settings() -> None:
    judge = stage("judge")
    assert json.loads(judge["CMD"]) == ["swarmd-judge", "serve"] and "/healthz" in judge["HEALTHCHECK"]
    service = compose("compose.judge.yaml")["services"]["judge"]
    assert (service["build"]["target"], "command" in service) == ("judge", False)
    given = [word.partition("=")[0] for word in judge["ENV"].split()] + list(service["environment"])
    assert set(given) <= SCHEMA.variables.keys()
    assert (
        f"SWARMD_JUDGE_PORT={judge['EXPOSE']}" in judge["ENV"] and "SWARMD_JUDGE_HOST=0.0.0.0" in judge["ENV"]
    )


def test_the_compose_file_of_a_judge_with_caddy_and_postgresql_is_sound() -> None:
    file = compose("compose.judge.yaml")
    caddy, judge, database = (file["services"][name] for name in ("caddy", "judge", "database"))
    (subnet,) = file["networks"]["inside"]["ipam"]["config"]
    proxy = caddy["networks"]["inside"]["ipv4_address"]
    assert judge["environment"]["SWARMD_JUDGE_PROXY"] == proxy and ip_address(proxy) in ip_network(
        subnet["subnet"]
    )
    assert ip_address(proxy) not in ip_network(
        subnet["ip_range"]
    )  # else another container could get the proxy's address
    assert "ports" not in judge and "ports" not in database  # all requests go through Caddy
    assert (judge["cap_drop"], judge["read_only"], judge["depends_on"]) == (
        ["ALL"],
        True,
        {"database": {"condition": "service_healthy"}},
    )
    mounted = {volume.split(":")[0] for service in (caddy, judge, database) for volume in service["volumes"]}
    assert mounted == {*file["volumes"], "./Caddyfile.example"}
    password = "${POSTGRES_PASSWORD:?}"  # compose requires the variable; the file has no password
    assert database["environment"]["POSTGRES_PASSWORD"] == password
    assert judge["environment"]["SWARMD_JUDGE_DATABASE"] == f"postgresql://judge:{password}@database/judge"


@pytest.mark.net
def test_caddy_uses_the_name_and_the_judge_of_the_compose_file() -> None:
    program = shutil.which("caddy") or pytest.skip("caddy is not installed")
    said = compose("compose.judge.yaml")["services"]["caddy"]["environment"]
    command = [
        program,
        "adapt",
        "--config",
        str(ROOT / "packaging" / "Caddyfile.example"),
        "--adapter",
        "caddyfile",
    ]
    environment = {**os.environ, "JUDGE": said["JUDGE"], "DOMAIN": "ours.example"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"host":["ours.example"]' in done.stdout and f'"dial":"{said["JUDGE"]}"' in done.stdout


def docker_has_compose() -> bool:
    try:
        return (
            subprocess.run(
                ["docker", "compose", "version"], capture_output=True, timeout=TIMEOUT_S, check=False
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not docker_has_compose(), reason="no docker compose here")
def test_docker_compose_accepts_the_files() -> None:
    given = {**os.environ, "DOMAIN": "judge.example", "POSTGRES_PASSWORD": "x"}
    for files in (
        "-f packaging/compose.yaml -f packaging/compose.gpu.yaml",
        "-f packaging/compose.judge.yaml",
    ):
        words = f"docker compose {files} config --quiet".split()
        checked = subprocess.run(
            words, cwd=ROOT, env=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_later_nodes_start_with_the_address_that_the_first_node_wrote(tmp_path: Path) -> None:
    (first, second, *_) = nodes().values()
    meeting = str(tmp_path / "bootstrap")
    here = [str(tmp_path / "one") if word == "/state" else word for word in command_of(first)]
    program = entrypoint()
    assert program.command(here, {**first["environment"], "MEETING_FILE": meeting}) == here
    joined = program.command(command_of(second), {**second["environment"], "MEETING_FILE": meeting})
    (address,) = node_config(joined).swarm.bootstrap
    peer, endpoint = parse_bootstrap(address)
    assert str(endpoint) == first["environment"]["MEETING_AS"]
    again = entrypoint().announce(tmp_path / "one", str(endpoint), Path(meeting))
    assert again.endswith(peer)  # the key, and so the address, outlives the container
    assert program.KEY_FILE == IDENTITY_FILE  # the file name that the node uses


def test_a_node_waits_for_the_address_file_and_reports_a_timeout(tmp_path: Path) -> None:
    program, now = entrypoint(), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 3:
            program.announce(tmp_path / "one", "/dns4/node-1/tcp/4001", tmp_path / "bootstrap")

    assert program.meet(tmp_path / "bootstrap", 300, lambda: now[0], sleep).startswith(
        "/dns4/node-1/tcp/4001/p2p/12D3KooW"
    )
    assert now[0] == 3
    with pytest.raises(program.NobodyToMeet, match="did not appear in 2 s"):
        program.meet(
            tmp_path / "never", 2, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds)
        )


def test_other_commands_are_not_changed() -> None:
    words = ["swarmd-judge", "serve"]
    assert entrypoint().command(words, {"MEETING_FILE": "/nowhere/bootstrap"}) == words
    assert entrypoint().command(["swarmd", "join"], {}) == ["swarmd", "join"]


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ("", {}, "name a program"),
        ("swarmd join", {"MEETING_FILE": "nowhere", "MEETING_WAIT": "0"}, "nowhere did not appear in 0 s"),
        ("swarmd join", {"MEETING_FILE": "nowhere", "MEETING_WAIT": "soon"}, "soon"),
        ("swarmd join", {"MEETING_FILE": "f", "MEETING_AS": "/dns4/n/tcp/1"}, "needs --state-dir"),
        (
            "swarmd join --state-dir s",
            {"MEETING_FILE": "f", "MEETING_AS": "node-1:4001"},
            "is not a bootstrap address",
        ),
        ("no-such-program-here", {}, "No such file"),
    ],
)
@pytest.mark.net
def test_an_operators_mistake_gives_a_one_line_message(
    tmp_path: Path, words: str, environment: dict[str, str], said: str
) -> None:
    ran = subprocess.run(
        [*PROGRAM, *words.split()],
        cwd=tmp_path,
        env=ENTRY | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 1 and said in ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr


@pytest.mark.net
def test_the_entrypoint_execs_the_program_with_the_address_that_it_waited_for(tmp_path: Path) -> None:
    """A stand-in for the program prints its arguments."""
    (tmp_path / "swarmd").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "swarmd").chmod(0o755)
    environment = {
        **ENTRY,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MEETING_FILE": str(tmp_path / "bootstrap"),
    }
    with subprocess.Popen(
        [*PROGRAM, "swarmd", "join"], env=environment, stdout=subprocess.PIPE, text=True
    ) as second:
        address = entrypoint().announce(tmp_path / "one", "/ip4/127.0.0.1/tcp/4001", tmp_path / "bootstrap")
        said, _ = second.communicate(timeout=TIMEOUT_S)
    assert (second.returncode, said) == (0, f"join --bootstrap {address}\n")
