"""The benchmarks of the exchange, with as few nodes as possible.

The tests check that they run, and that their last line is a JSON object.
"""

import json

import pytest

from benchmarks.network import exchange, exchange_churn
from tests.doubles import TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.net]
ENGINE = "libp2p"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ROUND_LIMIT", TIMEOUT_S)
    monkeypatch.setattr(exchange_churn, "PATIENCE", TIMEOUT_S)
    monkeypatch.setattr(exchange_churn, "SHARE_EVERY", 1.0)


def test_every_node_gathers_its_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    exchange.main(
        ["--nodes", "2", "--kib", "16", "--rounds", "1", "--settle", "1", "--engine", ENGINE, "--json"]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["schema"] == 1 and found["work"]["nodes"] == 2
    assert 0 < found["ours"] < exchange.ROUND_LIMIT and found["peer"] is found["ratio"] is None
    # A single round does not bound this ratio.
    assert found["held"] == 1.0 and isinstance(found["bytes_per_byte"], float)


def test_a_blob_that_one_surviving_node_holds_can_be_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    exchange_churn.main(["--nodes", "4", "--times", "1", "--engine", ENGINE, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["asked"] > 0 and found["unobtainable"] == 0 and found["first_max"] < exchange_churn.PATIENCE
