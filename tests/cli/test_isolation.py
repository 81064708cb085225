"""Every cause of hearing nobody has its line and its remedy."""

from typing import Any

import pytest

from p2p.types import Reason
from swarmd.daemon.isolation import Facts, why_alone

DEAD = {"address": "/ip4/192.0.2.1/tcp/4001/p2p/x", "answers": False, "says": "nothing listens on that port", "refused": True}
LIVE = {"address": "/ip4/192.0.2.2/tcp/4001/p2p/y", "answers": True, "says": "answers in 9 ms", "refused": False}


@pytest.mark.parametrize(
    "facts, cause, remedy",
    [
        ({}, "no bootstrap address is set", "--bootstrap"),
        ({"bootstrap": [DEAD]}, "192.0.2.1/tcp/4001/p2p/x does not answer: nothing listens", "ask its people"),
        ({"bootstrap": [DEAD, DEAD, DEAD]}, "and 2 others neither", "ask its people"),
        ({"bootstrap": [DEAD, LIVE]}, "the bootstrap address answers", "same swarm.name, curriculum and version"),
        ({"bootstrap": [LIVE], "others": {"tiny-9": 3}}, "only 3 nodes of tiny-9, and this node is of sapo-9", '"tiny-9"'),
        ({"connected": 1, "helpers": 1, "others": {"an unknown curriculum": 1}}, "1 node of an unknown", "same version"),
        ({"connected": 1, "helpers": 1}, "1 bootstrap node is connected, which trains nothing", "wait"),
        ({"connected": 2, "helpers": 1, "companions": 1, "others": {"tiny-9": 3}}, "2 members connected, and none has", "swarmd peers"),
        ({"connected": 2, "refused": {Reason.STALE: 3, Reason.DUPLICATE: 9}}, "refused: 3 outside the time window", "NTP"),
        ({"connected": 2, "refused": {Reason.BAD_SIGNATURE: 1}}, "refused: 1 bad signature", "docs/admission.md"),
        ({"connected": 2, "refused": {Reason.OWN_ECHO: 9}, "shards": 4}, "our part of the swarm, one of 4", "wait"),
    ],
)
def test_the_cause_and_what_to_do(facts: dict[str, Any], cause: str, remedy: str) -> None:
    found = why_alone(Facts(name="main", curriculum="sapo-9", **facts))
    assert cause in found.cause and remedy in found.remedy and "\n" not in found.cause + found.remedy
