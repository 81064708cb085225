"""A peer's answer to a question about itself, and the handling of malformed answers."""

from hypothesis import given
from hypothesis import strategies as st

from p2p.engines.memory import MemorySwarm
from p2p.peers.introduction import (
    MAX_ANSWER_BYTES,
    SHOWN_CHARACTERS,
    TRAINING,
    VERSION,
    Introduced,
    Introducer,
    SwarmCount,
    answered,
    ask,
    question,
)
from p2p.topic import Topic
from p2p.types import PeerId, PeerRequest
from tests.doubles import NOW, TOPIC, Clock, identity, memory_member

ASKER = identity(9).peer_id


def introducer(trains: str = "tiny-9", refused: bool = False) -> Introducer:
    topics = [TOPIC, Topic(TOPIC.name, "2" * 16)]
    present = {TOPIC: 3}
    return Introducer(
        topics,
        lambda topic: present.get(topic, 0),
        trains,
        "swarmd 9",
        lambda: TRAINING,
        lambda _: refused,
        Clock(),
    )


def test_a_peer_states_its_version_clock_and_acceptance_of_frames() -> None:
    for refused in (False, True):
        said = answered(introducer(refused=refused)(ASKER, question(TOPIC.name)), NOW - 90)
        seen = (SwarmCount(TOPIC.digest, 3), SwarmCount("2" * 16, 0))
        told = (VERSION, int(NOW * 1000), TOPIC.digest, "tiny-9", "swarmd 9", "training", refused, seen)
        assert said == Introduced(*told, ahead=90.0)


def test_a_question_from_another_swarm_gets_no_answer() -> None:
    assert (
        introducer()(ASKER, question("other"))
        == b""
        == introducer()(ASKER, PeerRequest.INTRODUCTION.message(b"\xff"))
    )


def test_a_long_name_is_truncated_so_that_the_answer_fits() -> None:
    message = introducer(trains="ä" * 1000)(ASKER, question(TOPIC.name))
    said = answered(message, NOW)
    assert said is not None and said.trains == "ä" * SHOWN_CHARACTERS
    crowd = [Topic(TOPIC.name, f"{n:064}") for n in range(100)]
    long = Introducer(
        crowd, lambda _: 10**6, "ä" * 1000, "ä" * 1000, lambda: TRAINING, lambda _: True, Clock()
    )
    assert len(long(ASKER, question(TOPIC.name))) <= MAX_ANSWER_BYTES


def test_answers_may_have_more_fields_but_not_another_version() -> None:
    message = introducer()(ASKER, question(TOPIC.name))
    assert message[:2] == bytes([0x98, 1])
    assert answered(bytes([0x99]) + message[1:] + b"\x05", NOW) == answered(message, NOW)
    assert answered(bytes([0x98, 2]) + message[2:], NOW) is None


@given(
    st.binary(max_size=200)
    | st.binary(min_size=1, max_size=8).map(
        lambda b: introducer()(ASKER, question(TOPIC.name))[: -len(b)] + b
    )
)
def test_any_bytes_parse_as_an_answer_or_as_none(message: bytes) -> None:
    said = answered(message, NOW)
    assert said is None or isinstance(said.ahead, float)


async def test_silent_peers_are_left_out_and_older_versions_have_no_introduction() -> None:
    swarm, clock = MemorySwarm(), Clock()
    us, other, old = (memory_member(swarm, n, clock) for n in (1, 2, 3))
    other.answers[PeerRequest.INTRODUCTION] = introducer()
    gone = PeerId("12D3KooWGone")
    said = await ask(
        us.engine.request, [gone, old.identity.peer_id, other.identity.peer_id], TOPIC.name, clock
    )
    assert (
        gone not in said and said[old.identity.peer_id] is None and said[other.identity.peer_id] is not None
    )
