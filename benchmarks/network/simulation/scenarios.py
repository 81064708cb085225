"""The fixed scenarios of the simulation. A change here changes the figures of every commit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Attack = Literal["copier", "flooder", "silent", "liar", "crowd"]


@dataclass(frozen=True)
class Scenario:
    """One swarm. Times are in seconds, rates in bytes a second."""

    about: str
    nodes: int = 100  # honest nodes
    rounds_s: tuple[float, float] = (60.0, 60.0)  # shortest and longest round of a node (log-uniform)
    latency: float = 0.04  # median one-way delay from a node to the core of the internet
    loss: float = 0.0  # share of lost frames and of questions that are never answered
    upload: float = 1_000_000.0  # median upload rate of a node
    nat: float = 0.0  # share of nodes that nobody can dial directly
    relayed: float = 1.0  # share of those nodes that a relay makes reachable
    stays: float = 0.0  # mean time until a node is killed; 0: never
    away: float = 60.0  # mean time until a killed node is restarted
    attack: Attack | None = None
    attackers: int = 0
    settle: float = 600.0  # time before the measurement begins
    measured: float = 600.0
    # Whether all nodes share one memory of heard offers. If so, offers are counted but not put on the nodes'
    # boards until the last WARM_ROUNDS rounds of the settling time.
    shared: bool = False
    seeds: int = 1


SCENARIOS: Mapping[str, Scenario] = {
    "8 nodes": Scenario("each sends once a round", nodes=8, seeds=3),
    "100 nodes": Scenario("the topic is busy, so nodes are paced"),
    "1,000 nodes": Scenario("each node hears for itself; admission is shared", nodes=1000, measured=300.0),
    "10,000 nodes": Scenario(
        "hearing is shared, too", nodes=10_000, shared=True, settle=1200.0, measured=300.0
    ),
    "mixed rounds": Scenario(
        "rounds of 5 to 120 s", nodes=40, rounds_s=(5.0, 120.0), measured=300.0, seeds=3
    ),
    "churn": Scenario("a node is killed every 5 minutes, and away for one", nodes=40, stays=300.0, seeds=3),
    "slow links": Scenario(
        "300 ms each way, 20 kB/s up, 5 % lost", nodes=40, latency=0.3, upload=20_000.0, loss=0.05, seeds=3
    ),
    "NAT": Scenario(
        "70 % cannot be dialled, half of these have a relay", nodes=40, nat=0.7, relayed=0.5, seeds=3
    ),
    "copiers": Scenario(
        "four copy each offer and serve nothing", nodes=40, attack="copier", attackers=4, seeds=3
    ),
    "flooder": Scenario(
        "one sends eight offers a second without blobs",
        nodes=40,
        attack="flooder",
        attackers=1,
        settle=180.0,
        measured=180.0,
    ),
    "silent": Scenario(
        "eight offer like honest nodes and never answer", nodes=40, attack="silent", attackers=8, seeds=3
    ),
    "liars": Scenario(
        "eight offer another task than they serve", nodes=40, attack="liar", attackers=8, seeds=3
    ),
    "newcomers": Scenario(
        "a new key every two seconds offers nothing", nodes=40, attack="crowd", attackers=1, seeds=3
    ),
}
