"""Experiment trackers get each round's figures from a separate process, which never delays the node."""

import os
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio

from swarmd.daemon.supervision.trainer_process import run_tracker
from swarmd.daemon.tracking import TRACKERS, Follower, check_installed, figures_of, follow
from swarmd.errors import ConfigError
from swarmd.state.logs import LOG_BYTES
from swarmd.state.metrics import MetricsFile
from swarmd.types import RoundLine, Score, TokenCounts
from tests.doubles import until
from tests.processes import ended, killed_after, wait_until

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def line(number: int, **other: Any) -> RoundLine:
    return RoundLine(round=number, reward_mean=number / 10, tokens=TokenCounts(5, 3), **other)


def test_the_figures_are_the_numbers_of_a_line_including_the_judges() -> None:
    found = dict(figures_of(line(3, judge=Score(0.5, 4), rejected={"too large": 2}, kl=None)))
    assert (
        found.items()
        >= {
            "round": 3.0,
            "reward_mean": 0.3,
            "tokens.generated": 5.0,
            "tokens.trained": 3.0,
            "judge.score": 0.5,
            "judge.n": 4.0,
            "rejected.too large": 2.0,
        }.items()
    )
    assert "kl" not in found and "workers" not in found


def test_each_round_is_read_once_even_if_the_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path, 0)) as file:
        file.append(line(1))
        follower = Follower(path)  # lines from before are not read
        assert not list(follower.read())
        file.append(line(2))
        assert [found.round for found in follower.read()] == [2]
        with path.open("ab") as torn:
            torn.write(b'{"round": 3, "rew')
        assert not list(follower.read())
    with closing(MetricsFile(path, 1)) as file:  # after a crash, round 2 is lost and run again
        for number in (2, 3):
            file.append(line(number))
        assert [found.round for found in follower.read()] == [3]
    path.unlink()
    assert not list(follower.read())


def test_a_missing_tracker_is_reported() -> None:
    check_installed([])
    with pytest.raises(
        ConfigError, match=r"no_tracker is not installed. Run: pip install 'swarmd\[no_tracker\]'"
    ):
        check_installed(["no_tracker"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.skipif(find_spec(n) is None, reason=f"needs {n}")) for n in TRACKERS],
)
def test_a_real_tracker_stores_its_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "tracking" / name))
    with closing(MetricsFile(tmp_path / "metrics.jsonl", 0)) as file:
        looks = 0

        def going() -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                file.append(line(1))
                file.append(line(2, judge=Score(0.75, 4)))
            return False

        follow(tmp_path, PEER, name, going)
    written = [
        path for path in (tmp_path / "tracking" / name).rglob("*") if path.is_file() and path.stat().st_size
    ]
    assert written


async def test_a_tracker_that_cannot_write_its_log_is_reported_and_the_node_continues(tmp_path: Path) -> None:
    (tmp_path / "tracking.log").mkdir()
    said: list[str] = []
    await run_tracker("trackio", tmp_path, PEER, said.append)
    assert len(said) == 1 and "cannot be started" in said[0]


def play_tracker(folder: Path, begin: str) -> None:
    """Replace a tracker's package with a stand-in, because the package may not be installed."""
    (folder / "trackio").mkdir()
    (folder / "trackio" / "__init__.py").write_text(
        "from pathlib import Path\n"
        f"def init(**told): {begin}\n"
        "def log(figures, step): Path(f'logged-{step}').write_text(str(figures))\n"
        "def finish(): Path('finished').touch()\n"
    )


def test_a_tracker_gets_the_run_and_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_tracker(tmp_path, "Path('began').write_text(repr(told))")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.chdir(tmp_path)
    looks = iter((True, False))
    with closing(MetricsFile(tmp_path / "metrics.jsonl", 0)) as file:

        def going() -> bool:
            file.append(RoundLine(round=1 + len(file.path.read_bytes().splitlines()), reward_mean=0.5))
            return next(looks)

        follow(tmp_path, PEER, "trackio", going)
    monkeypatch.delitem(sys.modules, "trackio")
    assert PEER in Path("began").read_text() and "'project': 'swarmd'" in Path("began").read_text()
    for number in (1, 2):
        logged = Path(f"logged-{number}").read_text()
        assert f"'round': {number}.0" in logged and "'reward_mean': 0.5" in logged
    assert Path("finished").exists()


@pytest.mark.net  # starts a process
async def test_a_trackers_output_cannot_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_tracker(tmp_path, f"print('x' * {LOG_BYTES}, flush=True)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # A file in the working folder must not shadow a module.
    monkeypatch.chdir(tmp_path / "trackio")
    Path("json.py").write_text("raise ImportError")
    log = tmp_path / "tracking.log"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_tracker, "trackio", tmp_path, PEER, print)
        await until(lambda: log.with_name("tracking.log.1").exists() and not log.stat().st_size)
        nursery.cancel_scope.cancel()


@pytest.mark.net  # starts a process
def test_the_tracking_process_ends_with_its_parent(tmp_path: Path) -> None:
    play_tracker(tmp_path, f"Path({str(tmp_path / 'up')!r}).touch()")
    command = [sys.executable, "-m", "swarmd.daemon.tracking", str(tmp_path), PEER, "trackio"]
    parent = (
        f"import subprocess, sys; p = subprocess.Popen({command!r}); print(p.pid, flush=True);"
        " sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with killed_after(
        subprocess.Popen([sys.executable, "-c", parent], text=True, env=environment, **pipes)
    ) as process:
        child = psutil.Process(int(process.stdout.readline()))
        wait_until(lambda: (tmp_path / "up").exists())
        process.kill()
        wait_until(lambda: ended(child))


def test_each_round_is_read_once_if_its_file_is_rotated(tmp_path: Path) -> None:
    path, found = tmp_path / "metrics.jsonl", list[int]()
    with closing(MetricsFile(path, 0, most=5 * len(msgspec.json.encode(line(1))))) as file:
        follower = Follower(path)
        for number in range(1, 60):
            file.append(line(number))
            if number % 3 == 0:
                found += [new.round for new in follower.read()]
    assert found == [*range(1, 58)] and (tmp_path / "metrics.jsonl.1").exists()
