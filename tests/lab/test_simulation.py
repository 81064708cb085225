"""The simulator: virtual time, lines, GossipSub, and a swarm that is the same whenever it is played again."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import simulate
from p2p.types import Reason
from swarmd.lab.simulation.events import Events
from swarmd.lab.simulation.fetches import Fetches
from swarmd.lab.simulation.gossip import DEGREE_HIGH, Gossip, Message
from swarmd.lab.simulation.growth import grow
from swarmd.lab.simulation.internet import HOMES, LOOPBACK, Internet, Weather
from swarmd.lab.simulation.ledger import Ledger
from swarmd.lab.simulation.report import SwarmReport, report
from swarmd.lab.simulation.swarm import SimulatedSwarm, SwarmPlan

TEXT = " ".join(f"{i} {i * i}" for i in range(3000))
LOSSY = Weather(loss=0.3)


def played(plan: SwarmPlan, rounds: int = 3) -> tuple[SimulatedSwarm, SwarmReport]:
    swarm = SimulatedSwarm(plan, TEXT)
    swarm.run(120.0)
    swarm.measure(rounds)
    return swarm, report(swarm, rounds)


# Virtual time.


def test_what_is_due_at_once_happens_in_the_order_it_was_asked_for() -> None:
    events = Events()
    happened: list[str] = []
    events.at(2.0, happened.append, "c")
    events.at(1.0, happened.append, "a")
    events.at(1.0, happened.append, "b")
    events.at(3.5, happened.append, "d")
    events.run(3.0)
    assert happened == ["a", "b", "c"]
    assert events.now == 3.0
    events.at(1.0, happened.append, "late")
    events.run(3.0)
    assert happened[-1] == "late"


def test_the_digest_is_of_everything_that_happened() -> None:
    def digest(*times: float) -> str:
        events = Events()
        for when in times:
            events.at(when, lambda: None)
        events.run(10.0)
        return events.digest()

    assert digest(1.0, 2.0) == digest(1.0, 2.0)
    assert len({digest(1.0, 2.0), digest(1.0, 2.5), digest(2.0, 1.0), digest(1.0), digest()}) == 5


# Lines.


def lines(weather: Weather = HOMES, nodes: int = 20) -> Internet:
    internet = Internet(random.Random(1), weather)
    for _ in range(nodes):
        internet.add()
    return internet


def test_a_way_is_as_long_as_the_way_back() -> None:
    internet = lines()
    ways = [internet.way(a, b) for a in range(20) for b in range(a)]
    assert ways == [internet.way(b, a) for a in range(20) for b in range(a)]
    assert 0.01 < min(ways) < max(ways) < 0.6


def test_what_is_sent_waits_for_what_is_being_sent() -> None:
    internet = lines(Weather(loss=0.0, handling_spread=0.0, uplink=8e6))
    first, second = internet.arrival(0, 1, 100_000, 0.0), internet.arrival(0, 1, 100_000, 0.0)
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(0.1)


def test_an_uplink_with_too_much_in_front_of_it_drops() -> None:
    internet = lines(Weather(loss=0.0, uplink=8e3))
    sent = [internet.arrival(0, 1, 1000, 0.0) for _ in range(10)]
    assert sent[0] is not None
    assert sent[-1] is None
    assert internet.lost == sent.count(None)


def test_streams_lose_nothing() -> None:
    internet = lines(Weather(loss=1.0))
    assert internet.arrival(0, 1, 100, 0.0) is None
    assert internet.streamed(0, 1, 100, 0.0) > 0


# GossipSub.


class Talk:
    """Gossip alone, all nodes in shard 0."""

    def __init__(self, nodes: int, weather: Weather = HOMES, seed: int = 1) -> None:
        self.events, self.ledger = Events(), Ledger()
        self.internet = Internet(random.Random(seed), weather)
        self.got: list[tuple[int, int]] = []
        self.gossip = Gossip(self.events, self.internet, self.ledger, random.Random(seed), self.delivered)
        for _ in range(nodes):
            node = self.internet.add()
            self.ledger.add()
            self.gossip.add()
            self.events.after(node / 10, self.gossip.start, node)
        self.events.run(nodes / 10 + 20)

    def delivered(self, node: int, message: Message, via: int) -> bool:
        self.got.append((node, via))
        return True

    def say(self, author: int, seconds: float = 10.0) -> Message:
        message = Message(b"x" * 300, 0, author, "offers", self.events.now)
        self.gossip.publish(message)
        self.events.run(self.events.now + seconds)
        return message


def test_meshes_are_of_the_size_that_gossipsub_keeps() -> None:
    talk = Talk(100)
    meshes = talk.gossip.mesh[0]
    assert all(4 <= len(mesh) <= DEGREE_HIGH for mesh in meshes.values())
    assert all(node in meshes[other] for node, mesh in meshes.items() for other in mesh)
    assert all(other in talk.gossip.links[node] for node, mesh in meshes.items() for other in mesh)


def test_everybody_gets_a_message_once_and_what_comes_again_is_counted() -> None:
    talk = Talk(60, Weather(loss=0.0))
    talk.say(5)
    assert sorted(node for node, _ in talk.got) == [node for node in range(60) if node != 5]
    assert talk.ledger.firsts == 59
    assert 3 * 59 < talk.ledger.copies < 12 * 59
    assert sum(talk.ledger.bytes["offers"]) == talk.ledger.copies * Message(b"x" * 300, 0, 5, "offers", 0.0).size


def test_a_node_that_everybody_dials_keeps_a_mesh_as_others_have() -> None:
    talk = Talk(80)
    for node in range(1, 80):
        talk.gossip.connect(node, 0)
    for node in range(1, 80, 2):
        talk.gossip.stop(node)
    talk.events.run(talk.events.now + 60)
    assert len(talk.gossip.links[0]) >= 39
    assert all(4 <= len(mesh) <= DEGREE_HIGH for mesh in talk.gossip.mesh[0].values())


def test_what_the_mesh_loses_is_asked_for() -> None:
    talk = Talk(60, Weather(loss=0.6))
    whole = sum(len(talk.say(author, 20.0).seen) == 60 for author in range(10))
    assert whole >= 7  # 2 by the mesh alone


def test_who_refuses_a_message_does_not_pass_it_on() -> None:
    talk = Talk(40, Weather(loss=0.0))
    talk.gossip._delivered = lambda node, message, via: False
    message = talk.say(3)
    assert 1 < len(message.seen) <= 1 + DEGREE_HIGH + 6


def test_a_mesh_closes_up_when_neighbours_are_gone() -> None:
    talk = Talk(60)
    for node in [node for node in range(60) if node % 3 != 1]:
        talk.gossip.stop(node)
    talk.events.run(talk.events.now + 4.0)  # before those who lost a connection of theirs have another
    assert len(talk.say(1, 15.0).seen) == 20
    assert all(len(mesh) >= 4 for mesh in talk.gossip.mesh[0].values())


# Swarms.


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    plan = SwarmPlan(25, 7, session=300.0)
    (first, one), (_, two), (_, other) = played(plan), played(plan), played(SwarmPlan(25, 8, session=300.0))
    assert one == two
    assert one.digest != other.digest
    assert first.events.done > 5_000


def test_a_small_swarm_hears_everything_and_gets_what_it_chooses() -> None:
    swarm, found = played(SwarmPlan(10))
    assert found.delivered == found.offers_delivered == found.rounds_full == 1.0
    assert found.shards == 1
    assert found.parsed_per_round >= 9
    assert found.delay_p50 < found.delay_p95 < 3.0
    assert found.bytes_per_trained < 6
    assert not swarm.tally.refused


def test_shards_keep_the_cost_as_it_is() -> None:
    small, large = (played(SwarmPlan(nodes, formed=True))[1] for nodes in (30, 90))
    assert large.shards > 2 * small.shards
    assert large.bytes_per_round < 1.35 * small.bytes_per_round
    assert large.offers_delivered > 0.99
    assert large.delivered > 0.99


@pytest.mark.slow
def test_a_large_swarm_costs_each_node_no_more() -> None:
    middle, large = (played(SwarmPlan(nodes, formed=True))[1] for nodes in (300, 900))
    kinds = ("offers", "fetches", "connections")
    middle_bytes, large_bytes = (sum(found.bytes_by_kind[kind] for kind in kinds) for found in (middle, large))
    assert large_bytes == pytest.approx(middle_bytes, rel=0.25)
    assert large.bytes_per_trained <= 8
    assert large.delivered > 0.99


def test_a_bad_network_costs_little_of_what_is_chosen() -> None:
    _, found = played(SwarmPlan(20, weather=LOSSY))
    assert found.offers_delivered > 0.99
    assert found.delivered > 0.99


def test_frames_are_real_and_the_inbox_looks_into_them() -> None:
    swarm, _ = played(SwarmPlan(10))
    message = next(message for message in swarm.tally.published)
    forged = Message(message.frame[:-1] + bytes([message.frame[-1] ^ 1]), 0, message.author, "offers", swarm.events.now)
    assert not swarm._delivered((message.author + 1) % 10, forged, message.author)
    assert swarm.tally.refused.total() == 1
    assert set(swarm.tally.refused) <= {Reason.BAD_SIGNATURE, Reason.DUPLICATE}


def test_nodes_that_come_and_go_cost_the_others_no_round() -> None:
    swarm, found = played(SwarmPlan(40, session=240.0, absence=60.0), rounds=6)
    assert swarm.tally.left > 20
    assert found.rounds_full > 0.97


class Search:
    """A node of a small swarm, an item on its board that its author alone has, and another node that could hold it."""

    def __init__(self, nodes: int) -> None:
        self.swarm, _ = played(SwarmPlan(nodes))
        swarm, self.node = self.swarm, self.swarm.nodes[0]
        owners = {item: [n.number for n in swarm.nodes if item.id in n.held] for item in self.node.board}
        self.item = next(item for item, numbers in owners.items() if numbers == [swarm._numbers[item.author]])
        self.author = swarm._numbers[self.item.author]
        self.holder = next(other for other in swarm.nodes if other.number not in (0, self.author))

    def fetch(self) -> tuple[bool, float]:
        """Whether the blob came, and after how many seconds."""
        swarm, since, outcome = self.swarm, self.swarm.events.now, list[tuple[bool, float]]()
        parts = swarm.events, swarm.internet, swarm.ledger, swarm.gossip, swarm.nodes, swarm._numbers
        fetches = Fetches(*parts, lambda _, here: outcome.append((here, swarm.events.now - since)))
        fetch = fetches.begin(self.node, self.item, self.author, self.author)
        swarm.events.run(since + 60.0)
        assert fetch.settled
        (only,) = outcome
        return only


def test_a_holder_that_lets_us_wait_is_not_waited_for() -> None:
    search = Search(8)
    search.holder.held[search.item.id] = 1
    search.swarm.internet._free[search.author] = search.swarm.events.now + 30.0  # its line is full
    here, seconds = search.fetch()
    assert here and 0.5 < seconds < 8.0


@pytest.mark.parametrize(
    ("somebody", "nodes", "connected"), [(True, 8, True), (False, 8, True), (True, 16, False)],
    ids=["one holder lives", "nobody has it", "a holder that was heard of"],
)  # fmt: skip
def test_an_author_that_left_is_no_obstacle_while_one_holder_lives(somebody: bool, nodes: int, connected: bool) -> None:
    search = Search(nodes)
    if somebody:
        search.holder.held[search.item.id] = search.holder.round
    search.swarm._stop(search.swarm.nodes[search.author])
    for other in list(search.swarm.gossip.links[0]) if not connected else ():
        search.swarm.gossip.disconnect(0, other)
    assert search.fetch()[0] == somebody


@pytest.mark.slow
def test_a_growing_swarm_is_followed_and_nobody_goes_without() -> None:
    stages = list(grow(10, 60, 900.0, TEXT))
    assert stages[0].shards == 1
    assert 5 <= stages[-1].shards <= 13
    assert stages[-1].nodes == 60
    assert min(stage.rounds_full for stage in stages) > 0.95


# The benchmark.


def last_line(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    simulate.main(argv)
    out = capsys.readouterr().out
    assert out.endswith("}\n")
    return dict(json.loads(out.splitlines()[-1]))


def test_what_other_programs_read_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = last_line(["--nodes", "8", "--rounds", "1", "--json"], capsys)
    assert {"schema", "work", "nodes", "delivered", "delay_p50", "delay_p95", "bytes_per_round", "messages_per_round"} <= set(found)
    assert found["schema"] == 1
    assert found["nodes"] == 8
    assert found["delivered"] == 1.0


def test_a_sweep_draws_what_it_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "cost.svg"
    found = last_line(["--sweep", "4,8", "--rounds", "1", "--weather", "loopback", "--plot", str(picture), "--json"], capsys)
    runs = found["runs"]
    assert isinstance(runs, list)
    assert [run["nodes"] for run in runs] == [4, 8]
    assert b"<svg" in picture.read_bytes()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--nodes", "1"], "a swarm has at least 2 nodes"),
        (["--nodes", "3,4"], "is not one number"),
        (["--nodes", "ten"], "no list of whole numbers"),
        (["--growth", "10"], "takes two sizes"),
        (["--nodes", "5", "--plot", "x.svg"], "--plot goes with --sweep"),
        ([], "required"),
    ],
)
def test_what_cannot_be_simulated_is_said(argv: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        simulate.main(argv)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_on_one_machine_lines_are_short() -> None:
    internet = lines(LOOPBACK)
    assert max(internet.way(a, b) for a in range(20) for b in range(a)) < 0.002
