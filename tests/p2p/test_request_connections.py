from p2p.identity import Identity
from p2p.peers.request_connections import IDLE, VISITS, RequestConnections

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 200)]


def test_connections_made_to_ask_end_when_they_are_idle_or_too_many() -> None:
    visits = RequestConnections()
    for n in range(VISITS + 3):
        visits.begin(PEERS[n], float(n))
    visits.used(PEERS[0], 90.0)
    visits.used(PEERS[150], 90.0)  # not made to ask
    assert set(visits.prune(PEERS, 50.0)) == set(PEERS[1:4])
    assert set(visits.prune(PEERS, 91.0)) == set(PEERS[4:31]) and IDLE == 60
    assert not visits.prune([], 1000.0) and not visits.prune(PEERS, 1000.0)  # gone by themselves
