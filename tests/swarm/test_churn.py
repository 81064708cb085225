"""Real processes, real sockets, real kill -9. `python -m benchmarks.churn` is the same at length."""

from pathlib import Path

import pytest

from benchmarks.churn import CHECKPOINT, churn


@pytest.mark.slow
@pytest.mark.net
def test_a_swarm_outlives_the_loss_of_any_process(tmp_path: Path) -> None:
    kills = churn(tmp_path, kills=5, seed=3, pace=0.5)
    assert {k.process for k in kills} == {"daemon", "trainer", "verifier"}, "choose a seed that meets all three"
    assert all(k.same_peer and k.others_advanced and k.damaged == 0 for k in kills)
    most = CHECKPOINT / 0.5 + 4  # the rounds of one interval, and those that a save and a busy machine take
    assert all(k.rounds_lost <= most for k in kills), "at most what came since the checkpoint before"
    assert all(k.receiving_seconds is not None for k in kills if k.process == "daemon")
