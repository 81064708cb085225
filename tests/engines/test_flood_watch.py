"""Flood detection: finds connections whose bytes no useful traffic explains, with the kernel's counters."""

import logging
import os
import socket
import subprocess
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from swarmd_engine_hivemind import flood_watch
from swarmd_engine_hivemind.flood_watch import FloodWatch, sockets_of
from swarmd_engine_hivemind.p2pd import ControlBytes
from swarmd_engine_hivemind.unexplained_bytes import BURST_BYTES, BYTES_PER_S, Unexplained

HERE = ("a", "b", "c")
LINUX = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the kernel counts bytes by connection on Linux only"
)


class Line:
    """Connections, and the bytes received on each so far."""

    def __init__(self) -> None:
        self.account = Unexplained[str]()
        self.brought = dict.fromkeys(HERE, 0)

    def passes(self, seconds: float, more: dict[str, int], explained: int) -> list[str]:
        for each, size in more.items():
            self.brought[each] += size
        if self.account.passed(seconds, sum(more.values()), explained):
            return self.account.over(self.brought)
        return []


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3 * int(BURST_BYTES)), max_size=5), st.floats(0.01, 10)),
        max_size=30,
    ),
    st.data(),
)
def test_a_connection_that_forwards_each_message_once_is_never_flagged(
    ticks: list[tuple[list[int], float]], data: st.DataObject
) -> None:
    line = Line()
    for messages, seconds in ticks:
        gossip = data.draw(st.integers(0, int(BYTES_PER_S * seconds)))
        some = {each: sum(size for size in messages if data.draw(st.booleans())) + gossip for each in HERE}
        assert line.passes(seconds, some, sum(messages)) == []


def test_junk_is_flagged_within_a_second_and_other_peers_are_not() -> None:
    line, junk = Line(), 10_000 * 250
    found = [
        line.passes(0.5, {"a": 400_000 + junk // 2, "b": 400_000, "c": 400_000}, 400_000) for _ in range(2)
    ]
    assert found == [[], ["a"]]


@pytest.mark.parametrize("calm", [0.0, 3600.0])
def test_a_long_quiet_time_gives_a_new_connection_no_credit(calm: float) -> None:
    line = Line()
    for _ in range(int(2 * calm)):
        line.passes(0.5, dict.fromkeys(HERE, 1000), 1000)
    line.brought["new"] = 0
    found = [line.passes(0.5, {"new": 1_250_000, **dict.fromkeys(HERE, 1000)}, 1000) for _ in range(3)]
    assert ["new"] in found


def test_credit_of_other_peers_does_not_hide_a_new_flooder() -> None:
    line = Line()
    line.passes(0.5, {}, int(3 * BURST_BYTES))
    line.brought["new"] = 0
    assert line.passes(0.5, {"new": int(BURST_BYTES + BYTES_PER_S)}, 0) == ["new"]


def test_junk_is_flagged_only_above_the_rate() -> None:
    line = Line()
    assert not any(line.passes(0.5, {"a": int(BYTES_PER_S / 2)}, 0) for _ in range(1000))
    assert any(line.passes(0.5, {"a": int(BYTES_PER_S)}, 0) for _ in range(1000))


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, int(BURST_BYTES)), min_size=3, max_size=3),
            st.integers(0, int(BURST_BYTES)),
        ),
        max_size=40,
    )
)
def test_no_connection_over_its_limit_goes_unchecked(ticks: list[tuple[list[int], int]]) -> None:
    line = Line()
    for sizes, explained in ticks:
        for each, size in zip(HERE, sizes, strict=True):
            line.brought[each] += size
        if line.account.passed(0.5, sum(sizes), explained):
            line.account.over(line.brought)
        else:
            assert deepcopy(line.account).over(line.brought) == []


def test_a_new_connection_has_no_debt_and_pulses_do_not_evade_the_limit() -> None:
    line = Line()
    assert line.passes(0.5, {"a": int(BURST_BYTES)}, 0) == []
    line.brought.pop("a")
    assert line.account.over(line.brought) == []
    line.brought["a"] = 0
    assert line.passes(0.5, {"a": int(BURST_BYTES)}, 0) == []  # a new connection with the same name
    pulses = [line.passes(0.5, {"a": int(BURST_BYTES) if n % 2 else 0}, 0) for n in range(8)]
    assert ["a"] in pulses


@LINUX
@pytest.mark.net
@pytest.mark.parametrize(
    "family, host", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "127.0.0.1")]
)
def test_the_kernel_counts_the_bytes_of_a_connection(family: socket.AddressFamily, host: str) -> None:
    wildcard = "::" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server(
        (wildcard, 0), family=family, dualstack_ipv6=family == socket.AF_INET6
    ) as server:
        with socket.create_connection((host, server.getsockname()[1])) as ours, server.accept()[0] as theirs:
            ours.sendall(b"x" * 12_345)
            received = 0
            while received < 12_345:
                received += len(theirs.recv(4096))
            found = {each.inode: each for each in sockets_of(os.getpid())}
            there = found[os.fstat(theirs.fileno()).st_ino]
            assert (there.host, there.port, there.received) == (host, ours.getsockname()[1], 12_345)
            assert found[os.fstat(ours.fileno()).st_ino].received == 0
            with subprocess.Popen(["sleep", "60"]) as other:
                assert sockets_of(other.pid) == []
                other.kill()
        # The listening socket is not a connection.
        assert os.fstat(server.fileno()).st_ino not in {each.inode for each in sockets_of(os.getpid())}


@LINUX
def test_reading_sockets_of_an_ended_process_raises_an_error() -> None:
    with pytest.raises(OSError):
        sockets_of(2**22 + 1)


@LINUX
async def test_without_kernel_counters_no_peer_is_cut_off_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, autojump_clock: Any
) -> None:
    def forbidden(pid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(flood_watch, "sockets_of", forbidden)
    cut: list[str] = []
    p2pd: Any = SimpleNamespace(pid=os.getpid(), control=ControlBytes())
    with caplog.at_level(logging.INFO), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(FloodWatch(p2pd, cut.append).run)
            await trio.sleep(1.1)
            with Path("/dev/zero").open("rb", buffering=0) as zeros:
                zeros.read(int(2 * BURST_BYTES))
            while "cannot be seen" not in caplog.text:
                await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
    assert not cut and "cannot be seen" in caplog.text and "Operation not permitted" in caplog.text
