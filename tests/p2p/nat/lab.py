"""A small internet in network namespaces: a public net, and homes behind NAT routers.

It needs root, Linux and nft.

    public places ── bridge ── router of a home (stateful NAT: no unsolicited inbound packets) ── the home's
                       │       machine
                    carrier (the same, 100.64.<number>.0/24 inside) ── routers of its homes ── their machines

Public addresses are 11.0.0.0/24 and 2611::/32, with a /64 for each place. These ranges are not reserved for
special use, so go-libp2p and swarmd treat them as the internet; outside the namespaces they lead nowhere.
IPv6 is routed, not translated, and homes get no unsolicited IPv6 packets either. Names of namespaces begin
with swarmd-<pid>.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.processes import killed_after

_NAT = """
table ip nat {{
  chain out {{ type nat hook postrouting priority 100; oifname "wan" masquerade{ports}; }}
}}
table inet door {{
  chain in {{
    type filter hook forward priority 0; policy accept;
    iifname "wan" ct state established,related accept
    {forward}
    iifname "wan" drop
  }}
  chain self {{
    type filter hook input priority 0; policy accept;
    iifname "wan" ct state established,related accept
    iifname "wan" meta l4proto ipv6-icmp accept
    iifname "wan" drop
  }}
}}
"""
_GATEWAY = "2611:0:0:ffff::1"
_FORWARD = """
table ip nat {{
  chain in {{ type nat hook prerouting priority -100; iifname "wan" tcp dport {port} dnat {machine}; }}
}}
"""


@cache
def missing() -> str | None:
    """Return the reason why the lab cannot run here; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces take root on Linux"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    name = f"swarmd-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    rules = _NAT.format(ports="", forward="")
    ruled = subprocess.run(
        ["ip", "netns", "exec", name, "nft", "-f", "-"], input=rules, capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", name], check=False)
    if ruled.returncode:
        return f"nft cannot translate addresses here: {ruled.stderr.strip().splitlines()[0]}"
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


@dataclass(frozen=True)
class Place:
    """A machine in the lab."""

    name: str  # name of its namespace
    address: str  # its IPv4 or IPv6 address
    python: Path  # a program that runs the interpreter in this place

    def run(self, *arguments: str, timeout: float = TIMEOUT_S) -> "subprocess.CompletedProcess[str]":
        """Run `python -m …` in this place until it ends."""
        return subprocess.run(
            [str(self.python), "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )


class Lab:
    """The lab. As a context manager, it removes everything at the end; end the programs in it first."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stem = folder, f"swarmd-{os.getpid()}"
        self._names: list[str] = []
        self._lines: list[subprocess.Popen[str]] = []
        self._net = self._namespace("net")
        for bridge in ("main", "apart"):
            _ip(f"-n {self._net} link add {bridge} type bridge")
            _ip(f"-n {self._net} link set {bridge} up")
        # The public net routes the homes' IPv6 prefixes.
        _ip(f"-n {self._net} addr add {_GATEWAY}/48 dev main")
        _forward(self._net)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:
            line.kill()
            with line:  # closes the line's pipe and waits for its end
                pass
        for name in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {name}")

    def public(self, number: int, *, ipv4: bool = True) -> Place:
        """Add a machine at 11.0.0.<number> and 2611:0:0:<number>::1, or only at the IPv6 address."""
        name = self._namespace(f"p{number}")
        self._plug(name, number, ipv4=ipv4)
        return self._place(name, f"11.0.0.{number}" if ipv4 else f"2611:0:0:{number}::1")

    def carrier(self, number: int, *, symmetric: bool = False) -> None:
        """Add a carrier's NAT at 11.0.0.<number>, for homes at 100.64.<number>.0/24."""
        name = self._namespace(f"r{number}")
        self._plug(name, number)
        _ip(f"-n {name} link add lan type bridge")
        _ip(f"-n {name} addr add 100.64.{number}.1/24 dev lan")
        _ip(f"-n {name} link set lan up")
        _translate(name, symmetric)

    def home(
        self,
        number: int,
        *,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        forward: int | None = None,
        symmetric: bool = False,
        carrier: int | None = None,
        ipv6: bool = False,
        open6: bool = False,
    ) -> Place:
        """Add a machine at 192.168.<number>.10, behind a router at 11.0.0.<number>.

        delay_ms, loss: of the line between machine and router, in each direction. forward: a TCP port that
        the router forwards to the machine. symmetric: the router uses a new port for each connection; else it
        keeps the machine's port. carrier: the number of the carrier behind whose NAT the router is, at
        100.64.<carrier>.<number>. ipv6: the machine is also at 2611:0:1:<number>::10, behind the router's
        firewall. open6: this firewall lets everything through.
        """
        router, host = self._namespace(f"r{number}"), self._namespace(f"h{number}")
        inside, machine = f"192.168.{number}.1", f"192.168.{number}.10"
        if carrier is None:
            self._plug(router, number)
        else:
            self._plug_into(f"{self._stem}-r{carrier}", "lan", router, number)
            _ip(f"-n {router} addr add 100.64.{carrier}.{number}/24 dev wan")
            _ip(f"-n {router} route add default via 100.64.{carrier}.1")
        if delay_ms or loss:
            self._line(router, inside, host, machine, delay_ms, loss)
            _ip(f"-n {host} route add default via {inside}")
        else:
            _ip(f"link add lan netns {router} type veth peer name lan netns {host}")
            for name, address in ((router, inside), (host, machine)):
                _ip(f"-n {name} addr add {address}/24 dev lan")
                _ip(f"-n {name} link set lan up")
            _ip(f"-n {host} route add default via {inside}")
        if ipv6:
            prefix = f"2611:0:1:{number}:"
            for name, address in ((router, f"{prefix}:1"), (host, f"{prefix}:10")):
                _ip(f"-n {name} addr add {address}/64 dev lan")
            _ip(f"-n {host} route add default via {prefix}:1")
            _ip(f"-n {self._net} route add {prefix}:/64 via 2611:0:0:{number}::1")
        _translate(router, symmetric, forward=forward, machine=machine, open6=open6)
        return self._place(host, machine)

    def cut(self, number: int) -> None:
        """Move the machine at 11.0.0.<number> to the other side of the cut."""
        _ip(f"-n {self._net} link set port{number} master apart")

    def heal(self, number: int) -> None:
        _ip(f"-n {self._net} link set port{number} master main")

    def _namespace(self, what: str) -> str:
        name = f"{self._stem}-{what}"
        _ip(f"netns add {name}")
        self._names.append(name)
        # Do not wait a second on each link for another machine with the same address.
        _set(name, "ipv6/conf/default/accept_dad", 0)
        _ip(f"-n {name} link set lo up")
        return name

    def _plug(self, name: str, number: int, *, ipv4: bool = True) -> None:
        """Connect a namespace to the public net, as 11.0.0.<number> and 2611:0:0:<number>::1."""
        self._plug_into(self._net, "main", name, number)
        if ipv4:
            _ip(f"-n {name} addr add 11.0.0.{number}/24 dev wan")
            # This route leads nowhere. Without it, p2pd announces no IPv4 address if it has an IPv6 address.
            _ip(f"-n {name} route add default via 11.0.0.254")
        _ip(f"-n {name} addr add 2611:0:0:{number}::1/48 dev wan")
        _ip(f"-n {name} route add default via {_GATEWAY}")

    def _plug_into(self, there: str, bridge: str, name: str, number: int) -> None:
        _ip(f"link add wan netns {name} type veth peer name port{number} netns {there}")
        _ip(f"-n {there} link set port{number} master {bridge} up")
        _ip(f"-n {name} link set wan up")

    def _line(self, a: str, address_a: str, b: str, address_b: str, delay_ms: float, loss: float) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.p2p.nat.tunpair",
            a,
            address_a,
            b,
            address_b,
            f"--delay-ms={delay_ms}",
            f"--loss={loss}",
        ]
        line = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._lines.append(line)
        assert line.stdout is not None and line.stdout.readline() == "up\n"

    def _place(self, name: str, address: str) -> Place:
        python = self._folder / f"python-{name}"
        python.write_text(f'#!/bin/sh\nexec ip netns exec {name} {sys.executable} "$@"\n')
        python.chmod(0o755)
        return Place(name, address, python)


class BootstrapProcess:
    """`swarmd bootstrap` at a place. As a context manager, it is stopped at the end."""

    def __init__(self, place: Place, folder: Path, engine: str) -> None:
        self.folder = folder
        command = [str(place.python), "-m", "swarmd", "bootstrap", "--state-dir", str(folder), "--json"]
        own = os.environ | {"SWARMD_SWARM_ENGINE": engine}
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=own)
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            # The program's message is on standard error.
            raise RuntimeError(f"it ended: exit code {self._process.wait()}")
        said = json.loads(line)
        self.topic = str(said["swarm"]["topics"][0])
        self.addresses = [entry["address"] for entry in said["addresses"] if entry["from"] == "internet"]

    def __enter__(self) -> "BootstrapProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with killed_after(self._process):
            self._process.terminate()
            self._process.wait(TIMEOUT_S)


def _translate(
    router: str, symmetric: bool, *, forward: int | None = None, machine: str = "", open6: bool = False
) -> None:
    """Turn a namespace into a router with NAT for IPv4 and a firewall."""
    _forward(router)
    let_in = f'iifname "wan" tcp dport {forward} accept' if forward is not None else ""
    if open6:
        let_in += '\n    iifname "wan" meta nfproto ipv6 accept'
    rules = _NAT.format(ports=" fully-random" if symmetric else "", forward=let_in)
    if forward is not None:
        rules += _FORWARD.format(port=forward, machine=machine)
    subprocess.run(["ip", "netns", "exec", router, "nft", "-f", "-"], input=rules, text=True, check=True)


def _forward(name: str) -> None:
    for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        _set(name, setting, 1)


def _set(name: str, setting: str, value: int) -> None:
    _in(name, "sh -c", f"echo {value} > /proc/sys/net/{setting}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def _in(name: str, program: str, *arguments: str) -> None:
    subprocess.run(
        ["ip", "netns", "exec", name, *program.split(), *arguments], check=True, capture_output=True
    )
