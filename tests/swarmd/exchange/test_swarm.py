"""Members exchange rollouts over the memory engine.

All other members collect a shared rollout; malformed rollouts are rejected, and their authors are blamed.
"""

from typing import Any

from p2p.engines.memory import MemorySwarm
from p2p.member import Member
from p2p.types import Reason
from swarmd.config.config import NodeConfig
from swarmd.exchange import wire
from swarmd.exchange.virtual import VirtualNode
from swarmd.types import Author, Completion, Rollout, TaskRef
from tests.doubles import Clock, gossip, memory_node


def join(swarm: MemorySwarm, number: int, **options: Any) -> tuple[Member, VirtualNode]:
    node = memory_node(swarm, number, Clock(), **{"model": f"model-{number}", **options})
    return node.member, node


def rollouts(member: Member, *ns: int, specialty: str = "bf") -> list[Rollout]:
    return [
        Rollout(
            TaskRef(specialty, n), (Completion("a", True), Completion("b", False)), member.identity.peer_id
        )
        for n in ns
    ]


def test_exactly_the_other_members_of_the_swarm_collect_a_shared_rollout() -> None:
    swarm = MemorySwarm()
    (a, from_a), (_, from_b), (_, from_c) = (join(swarm, i) for i in (1, 2, 3))
    from_a.share(rollouts(a, 1, 2), round_number=5)
    from_a.share([], round_number=6)
    for exchange in (from_b, from_c):
        assert exchange.collect() == (rollouts(a, 1, 2), {}) and exchange.collect() == ([], {})
        assert exchange.exchange.market.authors[a.identity.peer_id] == (5, "model-1")
    assert from_a.collect() == ([], {})


def test_the_path_of_a_models_folder_is_not_shared() -> None:
    swarm = MemorySwarm()
    _, from_b = join(swarm, 2)
    for model, said in (
        ("/home/alice/my model/", "my model"),
        (r"C:\\models\mine", "mine"),
        ("Qwen/x", "Qwen/x"),
    ):
        _, other = join(swarm, len(model), model=model)
        other.share(rollouts(other.member, 1), round_number=5)
        from_b.collect()
        assert from_b.exchange.market.authors[other.member.identity.peer_id] == (5, said)


def test_the_author_is_the_signer_even_if_the_body_names_another() -> None:
    swarm = MemorySwarm()
    (a, from_a), (b, _), (_, from_c) = (join(swarm, i) for i in (1, 2, 3))
    from_a.share(rollouts(b, 1), round_number=1)
    (got,), _ = from_c.collect()
    assert got.author == a.identity.peer_id


def test_an_authors_network_group_comes_from_the_connection_of_its_rollouts() -> None:
    swarm = MemorySwarm()
    (a, _), (b, from_b) = (join(swarm, i) for i in (1, 2))
    author = a.identity.peer_id
    b.reputation.met(author, "11.0")
    gossip(a, rollouts(a, 1))
    ((got,), _) = from_b.collect()
    assert got.origin == Author(author, "11.0") and rollouts(b, 1)[0].origin == Author(b.identity.peer_id)


def test_garbage_is_refused_counted_and_reported() -> None:
    swarm = MemorySwarm()
    (a, _), (b, from_b) = (join(swarm, i) for i in (1, 2))
    a.publish(wire.KIND, b"no rollouts")
    a.publish("later", b"whatever")
    assert from_b.collect() == ([], {Reason.UNDECODABLE.value: 1, Reason.UNKNOWN_KIND.value: 1})
    assert b.rejected == {Reason.UNDECODABLE: 1, Reason.UNKNOWN_KIND: 1}


def test_held_out_tasks_are_rejected_and_the_other_rollouts_are_used() -> None:
    swarm = MemorySwarm()
    (a, from_a), (b, from_b) = (join(swarm, i) for i in (1, 2))
    from_a.share(
        [*rollouts(a, 1), *rollouts(a, 1_000_000_001), *rollouts(a, 2, specialty="unheard_of")],
        round_number=1,
    )
    assert from_b.collect() == (rollouts(a, 1), {Reason.UNKNOWN_TASK.value: 1})
    assert b.rejected == {Reason.UNKNOWN_TASK: 1}


def test_frames_rejected_at_admission_are_counted_in_the_next_round() -> None:
    swarm = MemorySwarm()
    (_, from_a), _ = join(swarm, 1), join(swarm, 2)
    swarm.inject(b"noise")
    assert from_a.collect() == ([], {Reason.MALFORMED.value: 1}) and from_a.collect() == ([], {})


def test_more_rollouts_than_fit_into_a_body_are_offered_whatever_their_size() -> None:
    swarm = MemorySwarm()
    (a, from_a), (b, from_b) = (join(swarm, i) for i in (1, 2))
    from_a.share(rollouts(a, *range(wire.MAX_ROLLOUTS + 1)), round_number=1)
    found, refused = from_b.collect()
    assert len(found) == NodeConfig().round.wanted and not refused and not b.rejected
    assert len(a.blobs.held) == wire.MAX_ROLLOUTS + 1
