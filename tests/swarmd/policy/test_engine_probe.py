"""Which engine is quicker: chosen by times alone, remembered, and measured with the real engines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.policy.inference import select
from swarmd.policy.inference.decode import Sampling
from swarmd.policy.inference.engine import EngineFailed
from swarmd.policy.inference.select import Conditions, choose, measure, pick, quickest, recall, remember
from swarmd.policy.models.load import load_model
from tests.swarmd.policy.conftest import config_of

HERE = Conditions("H200", "2.13.0", "5.23.0", "0.1.0", "abc", "bfloat16")


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"own": 1.0, "continuous": 2.0}, "own"),
        ({"own": 2.0, "continuous": 1.0}, "continuous"),
        ({"own": 1.0, "continuous": 0.95}, "own"),  # noise
        ({"own": 1.0, "continuous": 0.89}, "continuous"),
        ({"own": None, "continuous": 9.0}, "continuous"),
        ({"own": 9.0, "continuous": None}, "own"),
        ({"own": None, "continuous": None}, "own"),
        ({"own": float("nan"), "continuous": 1.0}, "continuous"),
        ({"own": 3.0, "continuous": 2.0, "third": 1.0}, "third"),
    ],
)
def test_the_quickest_engine_is_chosen(seconds: dict[str, float | None], chosen: str) -> None:
    assert choose(seconds) == chosen


def engines() -> dict[str, Any]:
    return {"own": object(), "continuous": object()}


def test_a_choice_is_remembered_under_its_conditions(tmp_path: Path) -> None:
    file, asked = tmp_path / "deep" / "engines.json", []

    def measured(given: Mapping[str, Any]) -> dict[str, float | None]:
        asked.append(list(given))
        return {"own": 2.0, "continuous": 1.0}

    assert pick(engines(), HERE, file, measured) == "continuous"
    assert pick(engines(), HERE, file, measured) == "continuous"
    assert len(asked) == 1
    for field in Conditions.__dataclass_fields__:
        other = Conditions(
            **{**{f: getattr(HERE, f) for f in Conditions.__dataclass_fields__}, field: "other"}
        )
        assert recall(file, other, ["own", "continuous"]) is None, field
        pick(engines(), other, file, measured)
    assert len(json.loads(file.read_text())["choices"]) == 7
    assert recall(file, HERE, ["own", "continuous"]) == "continuous"
    assert recall(file, HERE, ["own"]) is None  # where it is no candidate any more
    assert [p.name for p in file.parent.iterdir()] == ["engines.json"]


ENTRIES = [
    json.dumps({"schema": 1, "choices": {HERE.key: entry}})
    for entry in (3, None, {"engine": 3}, {"engine": "evil"}, {})
]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"schema": 2, "choices": {}}', '{"schema": 1, "choices": []}', "\xff", *ENTRIES],
)
def test_a_file_that_cannot_be_read_is_measured_anew_and_written_over(content: str, tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    file.write_text(content, encoding="latin-1")
    assert recall(file, HERE, ["own", "continuous"]) is None
    assert pick(engines(), HERE, file, lambda _: {"own": 1.0, "continuous": 2.0}) == "own"
    assert recall(file, HERE, ["own"]) == "own"


def test_an_unwritable_cache_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file" / "engines.json", HERE, "own", {"own": 1.0})
    assert "measured again at the next start" in caplog.text


def test_the_real_engines_are_measured(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens at the start on CUDA, made to happen on this CPU."""
    monkeypatch.setattr(select, "NEW_TOKENS", 6)
    loaded = load_model(config_of(folders["qwen2"]).model, 0)
    file, sampling = tmp_path / "engines.json", Sampling(12, 128, frozenset({0}), 1.0)
    engine = quickest(loaded, sampling, 100_000, file)
    ((key, entry),) = json.loads(file.read_text())["choices"].items()
    assert key.startswith(f"cpu | {torch.__version__} | ")
    assert key.endswith(f"{loaded.fingerprint} | float32")
    assert all(0 < s < 60 for s in entry["seconds"].values())
    assert list(entry["seconds"]) == ["own", "continuous"]
    assert engine == entry["engine"]
    file.write_text(file.read_text().replace(f'"engine": "{entry["engine"]}"', '"engine": "continuous"'))
    # What is remembered counts
    assert quickest(loaded, sampling, 100_000, file) == "continuous"


def test_a_single_engine_is_not_measured(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_model(config_of(folders["gemma2"]).model, 0)
    asked = Sampling(12, 128, frozenset({0}), 1.0)
    assert quickest(loaded, asked, 100_000, tmp_path / "engines.json") == "own"
    assert not (tmp_path / "engines.json").exists()


def test_an_engine_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def generate(self, *_: Any) -> Any:
            raise EngineFailed("no kernel for this card")

    class Timed:
        """Takes the seconds that the clock is moved by."""

        def __init__(self, clock: list[float], seconds: list[float]) -> None:
            self.clock, self.seconds, self.asked = clock, seconds, []

        def generate(self, prompts: Any, copies: int, sampling: Sampling, generator: Any) -> Any:
            self.asked.append((len(prompts), copies, sampling.limit))
            self.clock[0] += self.seconds[len(self.asked) - 1]

    clock = [0.0]
    good = Timed(clock, [90.0, 5.0, 4.0])
    times = measure(
        {"bad": Failing(), "good": good},
        50,
        Sampling(300, 4096, frozenset({0}), 1.0),
        torch.device("cpu"),
        lambda: clock[0],
    )
    assert times == {"bad": None, "good": 4.0}  # the first run is not timed, the best of the others counts
    assert good.asked == [(8, 8, 64)] * 3
    assert "bad failed while it was tried out, and is left out: no kernel for this card" in caplog.text
