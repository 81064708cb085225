"""A short run of `python -m benchmarks.node.churn`: real processes, sockets and SIGKILL."""

from pathlib import Path

import pytest

from benchmarks.node.churn import churn


@pytest.mark.slow
@pytest.mark.net
def test_a_swarm_survives_the_kill_of_any_process(tmp_path: Path) -> None:
    kills = churn(tmp_path, kills=3, seed=2, nodes=2, save=1.0)
    assert {k.process for k in kills} == {"daemon", "trainer", "verifier"}, (
        "not all three kinds of process were killed; choose another seed"
    )
    assert all(k.same_peer and k.others_advanced and k.damaged == 0 for k in kills)
    resumed = [k for k in kills if k.process != "verifier"]
    assert all(0 < k.round_saved <= k.round_resumed <= k.round_before + 1 for k in resumed), (
        "a round in a checkpoint was lost"
    )
    assert all(k.receiving_seconds is not None for k in kills if k.process == "daemon")
