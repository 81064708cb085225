from p2p.types import PeerId
from swarmd.daemon.local_api.roster import FIRST_SILENCE_S, MAX_AUTHORS, MAX_SILENCE_S, MIN_SILENCE_S, Roster

A, B = PeerId("a"), PeerId("b")


def test_an_author_counts_as_gone_after_a_silence_that_depends_on_its_pace() -> None:
    roster = Roster()
    for second in range(100):
        roster.heard(A, float(second))
    for minute in range(20):
        roster.heard(B, -1200.0 + 60.0 * minute + 99.0)
    assert set(roster.present(99.0)) == {A, B}
    assert MIN_SILENCE_S < FIRST_SILENCE_S < MAX_SILENCE_S
    assert (roster.present(99.0 + MIN_SILENCE_S + 5.0), roster.present(99.0 + 240.0)) == ([B], [])


def test_no_author_counts_as_present_beyond_the_limit() -> None:
    roster = Roster()
    for hour in range(20):
        roster.heard(A, 3600.0 * hour)
    assert (
        roster.present(19 * 3600.0 + MAX_SILENCE_S - 5) == [A]
        and roster.present(19 * 3600.0 + MAX_SILENCE_S + 1) == []
    )


def test_an_author_that_offers_every_25_minutes_stays_present_from_its_second_offer_on() -> None:
    """Offers are so rare in a swarm of three hundred nodes, or if a round takes twenty minutes on a CPU."""
    roster = Roster()
    for offer in range(8):
        roster.heard(A, 1500.0 * offer)
        assert (roster.present(1500.0 * offer + 1495.0) == [A]) is (offer > 0)
    for second in range(20):  # now the author's rounds are short
        roster.heard(A, 11_000.0 + second)
    assert roster.present(11_019.0 + 100.0) == []


def test_a_crowd_of_names_displaces_only_its_own_members() -> None:
    roster = Roster()
    roster.heard(A, 0.0)
    roster.useful(A, "gcd")
    for name in range(3 * MAX_AUTHORS):
        roster.heard(PeerId(f"crowd {name}"), 1.0)
        roster.bad(PeerId(f"crowd {name}"))
    assert len(roster) == MAX_AUTHORS and roster.present(1.0)[0] == A
    for name in range(2 * MAX_AUTHORS):  # useful authors are bounded, too
        roster.heard(PeerId(f"useful {name}"), 2.0)
        roster.useful(PeerId(f"useful {name}"), "gcd")
    assert len(roster) <= MAX_AUTHORS and roster.get(A) is None
    roster.heard(A, 3.0)
    assert roster.present(3.0)[-1] == A  # newcomers still get a place


def test_reports_about_unknown_authors_are_dropped() -> None:
    roster = Roster()
    roster.bad(A)
    roster.useful(A, "gcd")
    assert len(roster) == 0 and roster.get(A) is None


def test_an_author_that_left_is_not_present_until_it_sends_again() -> None:
    roster = Roster()
    for peer in (A, B):
        roster.heard(peer, 1000.0)
    roster.gone(B)
    assert roster.present(1001.0) == [A]
    roster.heard(B, 1002.0)
    assert set(roster.present(1003.0)) == {A, B}
    assert roster.present(400.0) == []


def test_rollouts_trained_on_are_counted_by_author_and_specialty() -> None:
    roster = Roster()
    roster.heard(A, 0.0)
    for specialty in ("gcd", "legs", "gcd"):
        roster.useful(A, specialty)
    roster.useful(B, "gcd")
    record = roster.get(A)
    assert record is not None and record.learnt == {"gcd": 2, "legs": 1} and roster.get(B) is None
