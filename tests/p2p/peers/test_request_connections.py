from p2p.identity import Identity
from p2p.peers.outbound import DHT_IDLE_S, IDLE_S, MAX_VISITS, RequestConnections
from p2p.rate_limit import counted

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 200)]


def test_connections_opened_for_questions_end_if_idle_or_too_many() -> None:
    visits = RequestConnections()
    for n in range(MAX_VISITS + 3):
        visits.begin(PEERS[n], n / 100)
    visits.used(PEERS[0], 2.0)
    visits.used(PEERS[150], 2.0)  # this connection was not opened for a question
    assert set(visits.prune(PEERS, 1.0)) == set(PEERS[1:4])
    assert set(visits.prune([PEERS[0], *PEERS[4:]], IDLE_S + 0.305)) == set(PEERS[4:31])
    assert not visits.prune([], 1000.0) and not visits.prune(PEERS, 1000.0)  # already ended


def test_a_connection_stays_while_a_question_runs_and_if_the_library_opened_it() -> None:
    visits = RequestConnections()
    visits.begin(PEERS[0], 0.0)
    visits.begin(PEERS[1], 0.0, DHT_IDLE_S)
    visits.used(PEERS[1], 1.0)
    with counted(visits.asked, PEERS[0]), counted(visits.asked, PEERS[0]):
        assert not visits.prune(PEERS, DHT_IDLE_S)
    assert visits.prune(PEERS, DHT_IDLE_S) == [PEERS[0]]
    assert visits.prune(PEERS[1:], DHT_IDLE_S + 1) == [PEERS[1]]
