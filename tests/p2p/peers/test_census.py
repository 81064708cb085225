from hypothesis import given
from hypothesis import strategies as st

from p2p.peers.census import MAX_ANSWER_BYTES, Census, answered, ask, question
from p2p.topic import Topic
from p2p.types import PeerId, PeerRequest, Unanswered

TINY, SAPO = Topic("main", "1" * 16), Topic("main", "2" * 16)
PEER = PeerId("12D3KooWPeer")


def test_who_asks_for_our_swarms_name_learns_what_we_are_in_and_how_many_are_there() -> None:
    helper = Census([TINY, SAPO], lambda topic: 3 if topic == TINY else 0, trains=False)
    said = answered(helper(PEER, question("main")))
    assert (
        said is not None
        and not said.trains
        and [(seen.digest, seen.members) for seen in said.swarms] == [("1" * 16, 3), ("2" * 16, 0)]
    )
    # Another swarm's name is nobody's business
    assert helper(PEER, question("lab")) == b"" == helper(PEER, PeerRequest.CENSUS.message())
    crowd = Census([Topic("main", f"{n:064}") for n in range(100)], lambda _: 10**6, trains=True)
    assert len(crowd(PEER, question("main"))) <= MAX_ANSWER_BYTES


@given(st.binary(max_size=64))
def test_any_answer_is_understood_or_is_none(message: bytes) -> None:
    assert (said := answered(message)) is None or said.version == 1


async def test_those_that_do_not_answer_are_left_out() -> None:
    async def request(peer: PeerId, message: bytes, limit: int) -> bytes:
        if peer == PEER:
            return Census([TINY], lambda _: 1, trains=True)(PEER, message)
        if peer == "old":
            return b""
        raise Unanswered("gone")

    found = await ask(request, [PEER, PeerId("old"), PeerId("gone")], "main")
    assert found.keys() == {PEER} and found[PEER].trains
