"""The benchmarks of the exchange, with as few nodes as there can be.

They run, and other programs can read their last line.
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


def test_every_node_gets_the_rollouts_that_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    exchange.main(
        ["--nodes", "2", "--kib", "16", "--rounds", "1", "--settle", "1", "--engine", ENGINE, "--json"]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["schema"] == 1 and found["work"]["nodes"] == 2
    assert 0 < found["ours"] < exchange.ROUND_LIMIT and found["peer"] is found["ratio"] is None
    # Of one round it may be anything
    assert found["held"] == 1.0 and isinstance(found["bytes_per_byte"], float)


def test_a_blob_that_one_living_node_holds_can_be_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    exchange_churn.main(["--nodes", "4", "--times", "1", "--engine", ENGINE, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["asked"] > 0 and found["unobtainable"] == 0 and found["first_max"] < exchange_churn.PATIENCE
