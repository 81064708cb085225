"""The simulation: runs repeat, fetches end, no peer is blamed for another peer's fault, batches fill."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.network.simulation import network
from benchmarks.network.simulation.comparison import NotComparable, compare, table
from benchmarks.network.simulation.network import (
    DIAL_TIMEOUT_S,
    Asked,
    Event,
    Link,
    Network,
    Node,
    Tally,
)
from benchmarks.network.simulation.play import CPU, Swarm, play
from benchmarks.network.simulation.scenarios import SCENARIOS, Scenario
from p2p.identity import Identity
from swarmd.exchange.events import Answered, Ask

ROUND_S = 20.0


def small(name: str) -> Scenario:
    """Return a scenario with few nodes and short rounds."""
    scenario = SCENARIOS[name]
    return replace(
        scenario,
        nodes=8 if name == "8 nodes" else 12,
        attackers=min(2, scenario.attackers),
        rounds_s=(ROUND_S, ROUND_S) if scenario.rounds_s == (60.0, 60.0) else scenario.rounds_s,
        settle=90.0,
        measured=90.0,
    )


def test_the_same_seed_gives_the_same_figures() -> None:
    scenario = replace(small("churn"), nat=0.3, loss=0.1)
    first, again, other = (dict(play(scenario, seed)) for seed in (0, 0, 1))
    for figures in (first, again, other):
        del figures[CPU]
    assert first == again != other


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_keeps_the_invariants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few connections, so that most offers arrive through a node other than their author.
    monkeypatch.setattr(network, "DIALLED", 2)
    swarm = Swarm(small(name), seed=0)
    started = swarm.tally
    swarm.play(80.0)
    swarm.tally = tally = Tally()
    swarm.play(60.0)
    assert started.wrong == tally.wrong == 0, "a peer was blamed for another peer's fault"
    assert started.hostile == tally.hostile == 0, "a hostile author's rollout was delivered"
    assert tally.rounds > 0
    assert tally.places >= 0.9 * 4 * tally.rounds, "honest nodes received too few external rollouts (J = 4)"
    for node in list(swarm.nodes.values()):
        node.here = node.id not in swarm.hostile
    for honest in swarm.honest:
        honest.runs = False
    swarm.play(90.0)
    for honest in swarm.honest:
        if honest.here:
            assert not honest.open, "a question did not end"
            assert not honest.exchange.market.under_way, "a fetch did not end"


@pytest.mark.parametrize(("name", "reason"), [("liars", "MISLABELLED"), ("copiers", "NOT_ITS_OWN")])
def test_hostile_nodes_are_reported_for_their_own_fault(name: str, reason: str) -> None:
    swarm = Swarm(small(name), seed=0)
    swarm.play(180.0)
    assert set(swarm.tally.blamed) == {reason}


class Recorder(Node):
    """Records its answers, and answers each question with a blob of `blob` bytes."""

    blob = 1000

    def take(self, event: Event) -> None:
        if isinstance(event, Asked):
            self.network.reply(self, event, bytes(self.blob))
        elif isinstance(event, Answered):
            self.answers.append((self.network.now, event))

    answers: list[tuple[float, Answered]]


def node(net: Network, number: int, address: str = "there", places: int = 1) -> Recorder:
    link = Link(latency=0.1, upload=1900.0, host="11.0.0.1", address=address, places=places)
    recorder = Recorder(net, Identity(number.to_bytes(32)), link)
    recorder.answers = []
    net.join(recorder)
    return recorder


def ask(number: int, holder: Node, at: str = "there", limit: int = 1000) -> Ask:
    return Ask(number, holder.id, b"\1", limit, at)


def test_an_answer_takes_a_dial_a_round_trip_and_the_upload_time() -> None:
    net = Network(Scenario(""), seed=0)
    holder, asker = node(net, 1), node(net, 2)
    holder.connected.clear()
    asker.connected.clear()
    net.ask(asker, ask(1, holder))
    net.ask(asker, ask(2, holder))
    net.play(60.0)
    # The dial takes two round trips of 0.4 s, and each blob fills the upload link for a second.
    assert [at for at, _ in asker.answers] == pytest.approx([2.2, 3.2])
    assert [len(event.reply or b"") for _, event in asker.answers] == [1000, 1000]


@pytest.mark.parametrize("case", ["no address", "has left", "too large"])
def test_a_question_without_a_possible_answer_fails(case: str) -> None:
    net = Network(Scenario(""), seed=0)
    holder, asker = node(net, 1), node(net, 2)
    holder.connected.clear()
    asker.connected.clear()
    if case == "has left":
        net.leave(holder)
    net.ask(
        asker, ask(1, holder, "" if case == "no address" else "there", 999 if case == "too large" else 1000)
    )
    net.play(60.0)
    ((at, event),) = asker.answers
    assert event == Answered(1, None)
    assert case != "has left" or at == DIAL_TIMEOUT_S


def test_a_full_node_rejects_dials_until_a_place_is_free() -> None:
    net = Network(Scenario(""), seed=0)
    holder, *askers = (node(net, number) for number in range(1, 4))
    for each in (holder, *askers):
        each.connected.clear()
    for asker in askers:
        net.ask(asker, ask(1, holder))
    net.play(60.0)
    assert [event.reply is None for asker in askers for _, event in asker.answers] == [False, True]
    assert net.tally.refused == 1
    net.ask(askers[1], ask(2, holder))
    net.play(60.0)
    assert askers[1].answers[-1][1].reply is not None


def figures(x: float, y: float, cpu: float) -> Mapping[str, float]:
    return {"x": x, "y": y, CPU: cpu}


def test_the_comparison_table_shows_differences_in_bold_if_clear() -> None:
    before = {"a": [figures(1.0, 100.0, 3.0), figures(2.0, 100.0, 3.0)], "b": [figures(1.0, 2.0, 3.0)]}
    after = {"a": [figures(2.0, 80.0, 9.0), figures(2.0, 80.0, 9.0)], "b": [figures(1.0, 2.0, 4.0)]}
    lines = table(before, after).splitlines()
    assert lines[0] == "| scenario | x | y | CPU, s |"
    # The seeds of x differ by more than the two sides do. CPU seconds are never bold.
    assert lines[2] == "| a | 1.5 → 2 (+0.5) | **100 → 80 (−20)** | 3 → 9 (+6) |"
    assert lines[3] == "| b | 1 | 2 | 3 → 4 (+1) |"
    assert lines[-1].startswith("1 figures differ") and "without any difference: b." in lines[-1]


def test_an_unknown_commit_is_rejected() -> None:
    with pytest.raises(NotComparable, match="not a commit"):
        compare("no-such-commit", [])


@pytest.mark.slow
def test_the_error_of_a_failed_side_is_shown() -> None:
    with pytest.raises(NotComparable, match=r"fail on this tree: .*invalid choice"):
        compare("HEAD", ["--scenario", "none"])


@pytest.mark.slow
def test_a_tree_compared_with_its_own_commit_shows_no_difference() -> None:
    assert "any difference: 8 nodes." in compare("HEAD", ["--scenario", "8 nodes", "--seeds", "1"])
