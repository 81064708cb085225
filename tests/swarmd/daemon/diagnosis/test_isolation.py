"""Every cause of isolation has a message and a remedy."""

import runpy
from typing import Any

import pytest

from p2p.peers.introduction import Introduced
from p2p.types import Reason
from swarmd.daemon.diagnosis.isolation import BEHIND_S, Facts, another, certain, why_alone
from tests import ROOT

DEAD = {
    "address": "/ip4/192.0.2.1/tcp/4001/p2p/x",
    "answers": False,
    "says": "nothing listens on that port",
}
LIVE = {
    "address": "/ip4/192.0.2.2/tcp/4001/p2p/y",
    "answers": True,
    "says": "answers in 9 ms",
}


def peer(
    ahead: float = 0.0, *, refuses: bool = False, doing: str = "training", digest: str = "ours"
) -> Introduced:
    return Introduced(1, 0, digest, "sapo-9", "swarmd 9", doing, refuses, (), ahead)


LATE, EARLY = peer(-BEHIND_S - 60), peer(BEHIND_S + 60)
REFUSES, HELPS = peer(refuses=True), peer(doing="helping", digest="another")


@pytest.mark.parametrize(
    "facts, cause, remedy",
    [
        ({}, "you are the first here", "swarmd invite"),
        ({"bootstrap": [DEAD]}, "192.0.2.1/tcp/4001 does not answer: nothing listens", "ask its operator"),
        ({"offline": True}, "this machine is offline", "connect it to a network"),
        (
            {"offline": True, "settled": False, "bootstrap": [DEAD]},
            "this machine is offline",
            "connect it to a network",
        ),
        ({"bootstrap": [DEAD, DEAD, DEAD]}, "(and 2 more)", "ask its operator"),
        (
            {"bootstrap": [DEAD, LIVE]},
            "the bootstrap address answers",
            "same swarm.name, curriculum and version",
        ),
        (
            {"bootstrap": [LIVE], "others": {"tiny-9": 3}},
            "only 3 nodes of tiny-9, and this node trains on sapo-9",
            '"tiny-9"',
        ),
        (
            {"connected": 1, "helpers": 1, "others": {"an unknown curriculum": 1}},
            "1 node of an unknown",
            "same version",
        ),
        ({"connected": 1, "helpers": 1}, "only 1 bootstrap node connected, and no node", "wait"),
        (
            {"connected": 2, "helpers": 1, "companions": 1, "others": {"tiny-9": 3}},
            "2 members connected, and none has",
            "swarmd peers",
        ),
        (
            {"connected": 2, "refused": {Reason.STALE: 3, Reason.DUPLICATE: 9}},
            "refused (3 outside the time window)",
            "NTP",
        ),
        (
            {"connected": 2, "refused": {Reason.BAD_SIGNATURE: 1}},
            "refused (1 bad signature)",
            "docs/admission.md",
        ),
        (
            {"connected": 2, "companions": 1, "refused": {Reason.UNKNOWN_KIND: 1}},
            "a kind unknown to this version",
            "update swarmd",
        ),
        ({"connected": 2, "introduced": [EARLY, EARLY]}, "clock is 5 minutes behind all 2 peers", "NTP"),
        ({"connected": 2, "introduced": [LATE]}, "clock is 5 minutes ahead of the only peer", "NTP"),
        (
            {"connected": 2, "introduced": [peer(-30), peer(-29)]},
            "clock is 29 seconds ahead of all 2 peers",
            "NTP",
        ),
        ({"connected": 2, "introduced": [REFUSES, REFUSES, HELPS]}, "refused by all 2 peers asked", "wait"),
        ({"connected": 1, "introduced": [REFUSES]}, "refused by the only peer that could be asked", "wait"),
        (
            {"connected": 1, "companions": 1, "introduced": [peer(doing="paused"), HELPS]},
            "1 node connected, and paused",
            "resumed",
        ),
    ],
)
def test_each_set_of_facts_gives_its_cause_and_remedy(facts: dict[str, Any], cause: str, remedy: str) -> None:
    found = why_alone(Facts(name="main", curriculum="sapo-9", digest="ours", **facts))
    assert cause in found.cause and remedy in found.remedy and "\n" not in found.cause + found.remedy


@pytest.mark.parametrize(
    "facts",
    [
        {"connected": 1, "companions": 1},  # the companion's rounds may be long
        # The peer did not name its tasks.
        {"connected": 1, "unknown": 1, "others": {"tiny-9": 3}},
        # Frames from before the start are normal.
        {"connected": 2, "companions": 1, "refused": {Reason.STALE: 9, Reason.BAD_SIGNATURE: 9}},
        {"connected": 2, "companions": 1, "refused": {Reason.OLD: 9}},
        {"connected": 2, "companions": 1, "introduced": [LATE, EARLY]},  # another node's clock is wrong
        {"connected": 2, "companions": 1, "introduced": [LATE, peer()]},
        {"connected": 2, "companions": 1, "introduced": [REFUSES, peer()]},
        {"connected": 2, "companions": 1, "introduced": [peer(doing="paused"), peer()]},
        {"settled": False},  # too soon to say
        {"settled": False, "bootstrap": [DEAD, LIVE]},
        {"settled": False, "bootstrap": [LIVE], "others": {"tiny-9": 3}},
        {"heard": True, "introduced": [EARLY]},  # another node's frames have the right time
        {"heard": True, "introduced": [REFUSES]},
        {"heard": True, "bootstrap": [DEAD], "others": {"tiny-9": 3}},
    ],
)
def test_facts_that_may_be_normal_are_not_reported(facts: dict[str, Any]) -> None:
    assert certain(Facts(name="main", curriculum="sapo-9", digest="ours", **facts)) is None


@pytest.mark.parametrize(
    "facts",
    [
        {"settled": False, "bootstrap": [DEAD]},
        {"heard": True, "introduced": [LATE, LATE]},
        {"heard": True, "introduced": [REFUSES] * 2},
    ],
)
def test_certain_causes_are_reported_at_once(facts: dict[str, Any]) -> None:
    assert certain(Facts(name="main", curriculum="sapo-9", digest="ours", **facts)) is not None


def test_the_name_of_a_stranger_cannot_move_the_cursor() -> None:
    assert (
        another(Introduced(1, 0, "d", "x\x1b[2J" + "y" * 500, "z\r", "", False, (), 0.0))
        == "x\\x1b[2J" + "y" * 56 + " (d) with z\\r"
    )


def test_the_document_has_the_table_of_causes() -> None:
    """`scripts/tables causes` prints it."""
    table = runpy.run_path(str(ROOT / "scripts" / "tables"))["causes"]()
    assert "\n".join(table) in (ROOT / "docs" / "p2p.md").read_text()
