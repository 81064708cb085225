"""Recordings of an exchange can be replayed, are bounded, have no texts, and never disturb the exchange."""

import errno
import json
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p import durable
from p2p.types import Envelope
from swarmd.config.config import MetricsConfig, NodeConfig
from swarmd.errors import SwarmdError
from swarmd.exchange import offers, replay
from swarmd.exchange.events import Admitted, Answered, Connected, RoundBegan, Share, Tick
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.replay import Recording
from swarmd.experience.strategies import SharingSettings
from swarmd.system.bug_report import redacted
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Rollout, TaskRef
from tests.doubles import encoded
from tests.swarmd.exchange.test_exchange import ACTIONS, AUTHORS, PEERS, ROUND, Action, Played, play

TEXT = "an answer é€\U0001f600 of a model"
ADDRESS = "/ip4/11.0.0.7/tcp/4001"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(ACTIONS, max_size=60), st.integers(0, 3), st.integers(1, 20_000))
def test_replaying_a_recording_gives_the_same_outputs(actions: list[Action], seed: int, size: int) -> None:
    """A file may begin with any state. Hiding secrets and addresses does not change the replay."""
    with TemporaryDirectory() as folder, mock.patch.object(replay, "FILE_BYTES", size):
        path, played = Path(folder, "events.jsonl"), Played(seed)
        played.twin = None
        played.exchange.record = Recording(played.exchange, NodeConfig(round=ROUND), path, print)
        play(played, actions)
        for file in Path(folder).iterdir():
            assert all(same for *_, same in replay.replay(file))
            text = file.read_text()
            assert redacted(text, Path("/home/ada"), addresses=True) == text


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(ACTIONS, min_size=20, max_size=60), st.integers(0, 3))
def test_a_recording_begins_with_the_complete_state(actions: list[Action], seed: int) -> None:
    with TemporaryDirectory() as folder:
        path, played = Path(folder, "events.jsonl"), Played(seed)
        played.twin = None
        play(played, actions)
        recording = Recording(played.exchange, NodeConfig(round=ROUND), path, print)
        recording(Tick(), played.now, ())
        begun = replay._restored(json.loads(path.read_text()))
        rebuilt = replay._parts(replay._build(begun))
        for part, state, other in zip(replay._parts(played.exchange), begun["state"], rebuilt, strict=True):
            data = {
                name: value
                for name, value in vars(part).items()
                if not (callable(value) or isinstance(value, replay._BUILT))
            }
            assert state.keys() == data.keys()
            for name, value in data.items():
                assert recording.line({name: value}) == recording.line({name: vars(other)[name]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def recorded(path: Path, *, texts: str = "off", rounds: int = 3, said: list[str] | None = None) -> Exchange:
    """Record a run in which a node shares, and hears an offer that names an address."""
    exchange = Exchange(TINY_9, ROUND, SharingSettings(), "m", random.Random(1), 0)
    config = NodeConfig(round=ROUND, metrics=MetricsConfig(record_texts=texts))
    exchange.record = Recording(exchange, config, path, [].append if said is None else said.append)
    exchange.handle(Connected(PEERS[:3]), 0.5)
    for n in range(1, rounds + 1):
        exchange.handle(RoundBegan(n, {}), float(n))
        mine = Rollout(TaskRef("bf", n), (Completion(TEXT, True),), PEERS[39])
        exchange.handle(Share((mine,), n), n + 0.1)
        (body,), _ = encoded(
            [Rollout(TaskRef("bf", n), mine.completions, AUTHORS[0])], n, "m", TINY_9.specialties
        )
        frame = offers.addressed(body, ADDRESS)
        exchange.handle(Admitted(Envelope(AUTHORS[0], n, 0.0, offers.KIND, frame, group="77.88")), n + 0.2)
    return exchange


@pytest.mark.parametrize("texts", ["off", "on"])
def test_texts_are_recorded_only_on_demand_and_addresses_never(path: Path, texts: str) -> None:
    recorded(path, texts=texts)
    written = path.read_text()
    assert (json.dumps(TEXT)[1:-1] in written) == (texts == "on")
    assert "77.88" not in written and "11.0.0.7" not in written
    played = list(replay.replay(path))
    assert len(played) == 9 and all(same for *_, same in played)
    (shared,) = [event for _, _, event, *_ in played if isinstance(event, Share)][:1]
    (text,) = [each.text for each in shared.rollouts[0].completions]
    assert (text == TEXT) == (texts == "on")
    assert (len(text), len(text.encode())) == (len(TEXT), len(TEXT.encode()))


def test_a_recording_has_at_most_two_files_of_bounded_size(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "FILE_BYTES", 2000)
    recorded(path, rounds=60)
    files = sorted(path.parent.iterdir())
    assert files == [path, path.with_name("events.jsonl.1")]
    for file in files:
        _, *lines = file.read_bytes().splitlines(keepends=True)
        assert sum(map(len, lines[:-1])) < 2000
        assert "77.88" not in file.read_text(), (
            "the recorded state has a network group, which must be left out"
        )
    before, after = (list(replay.replay(file)) for file in reversed(files))
    assert before and all(same for *_, same in [*before, *after])


def test_another_run_keeps_the_events_of_the_last_run(path: Path) -> None:
    recorded(path)
    kept = path.read_bytes()
    recorded(path, rounds=1)
    assert path.with_name("events.jsonl.1").read_bytes() == kept


def test_a_full_disk_is_reported_once_and_the_exchange_continues(path: Path) -> None:
    said, full = list[str](), OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(durable, "replace", side_effect=full):
        exchange = recorded(path, said=said)
    assert exchange.shared == 3 and len(said) == 1 and "No space left" in said[0] and str(path) in said[0]
    exchange = recorded(path, said=said, rounds=1)
    path.unlink()
    path.mkdir()
    exchange.handle(Tick(), 8.0)
    exchange.handle(Tick(), 9.0)
    assert len(said) == 2


@pytest.mark.parametrize("line", [0, 1, 4])
@pytest.mark.parametrize("junk", ["", "junk", "{}", "[1,2]", '{"Exec":["x"]}', '[1.0,{"Ask":[]},"00"]', None])
def test_a_damaged_line_is_reported(path: Path, line: int, junk: str | None) -> None:
    recorded(path)
    lines = path.read_text().splitlines()
    lines[line] = lines[line][:-20] if junk is None else junk
    path.write_text("\n".join(lines))
    with pytest.raises(SwarmdError, match=rf"events\.jsonl, line {line + 1}: "):
        list(replay.replay(path))


def test_an_empty_or_missing_file_is_reported(path: Path) -> None:
    with pytest.raises(SwarmdError, match=r"events\.jsonl"):
        list(replay.replay(path))


def test_an_event_at_which_the_exchange_failed_is_recorded_and_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = recorded(path)
    monkeypatch.setattr("swarmd.exchange.market.Market.answered", None)
    with pytest.raises(TypeError):
        exchange.handle(Answered(7, None), 9.0)
    with pytest.raises(RuntimeError, match=r"line 11: Answered\(number=7, reply=None\)"):
        list(replay.replay(path))


def test_the_command_prints_the_events_and_different_outputs(path: Path) -> None:
    recorded(path)
    command = [sys.executable, "-m", "swarmd.exchange.replay", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    assert "RoundBegan(number=2" in done.stdout and "-> Send(kind='offer'" in done.stdout
    lines = path.read_text().splitlines()
    lines[5] = lines[5].replace(lines[5].split('"')[-2], "0" * 12)
    path.write_text("\n".join(lines))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "line 6" in done.stderr and "!!" in done.stdout
