from benchmarks.network.simulation.__main__ import measure
from swarmd.exchange.pacing import TARGET_PER_S


def test_a_swarm_of_a_hundred_hears_the_target_fills_its_rounds_and_is_fair() -> None:
    found = measure(100, (60.0, 60.0), seed=0)
    assert found == measure(100, (60.0, 60.0), seed=0)
    assert (
        0.5 * TARGET_PER_S < found["offers"] < 1.3 * TARGET_PER_S
        and found["full"] >= 0.99
        and found["jain"] > 0.8
    )
