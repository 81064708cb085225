"""Silent keys: fresh keys that ask a judge for a question and never answer. `pytest -s` prints the figures.

The judge is a separate process behind a proxy that reports the client's address, so that one machine can play
many networks. Peers with a record are evaluated all the time; at the end a peer without a record asks from
another network.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from judge.config import NEWCOMERS_QUESTIONS, OPEN_QUESTIONS
from judge.figures.leaderboard import LISTED_ANSWERS
from testbed.signing_peer import SigningPeer, answering, wish
from tests.attacks.harness import Attack, show
from tests.doubles import TIMEOUT_S
from tests.judge.test_serving import serving

KNOWN = 5  # peers with a record
AT_ONCE = 8  # parallel requests of the attacker


class Town:
    """Sends requests of peers in many networks to one judge."""

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self._url, self._http = url, http

    async def post(
        self, peer: SigningPeer, network: int, target: str, document: Mapping[str, Any]
    ) -> httpx2.Response:
        request = peer.signed(target, document)
        request["headers"]["x-forwarded-for"] = f"198.{network // 256}.{network % 256}.7"
        return await self._http.post(self._url + target, **request)

    async def ask(self, peer: SigningPeer, network: int) -> httpx2.Response:
        return await self.post(peer, network, "/v1/evaluations", wish())

    async def evaluate(self, peer: SigningPeer, network: int) -> bool:
        """Evaluate the peer; return whether the judge asked and graded it."""
        asked = await self.ask(peer, network)
        if asked.status_code != 201:
            return False
        target = f"/v1/evaluations/{asked.json()['evaluations'][0]['evaluation']}/answers"
        return (await self.post(peer, network, target, answering("<answer>0</answer>"))).status_code == 200


async def play(url: str, keys: int, networks: int) -> dict[str, Any]:
    limits = httpx2.Limits(max_connections=AT_ONCE + 2)
    async with httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:
        town = Town(url, http)
        known = [SigningPeer(60_000 + number, url) for number in range(KNOWN)]
        for peer in known:
            for _ in range(LISTED_ANSWERS):
                assert await town.evaluate(peer, 0)
        silent: Counter[int] = Counter()
        served: Counter[bool] = Counter()
        numbers = iter(range(keys))

        async def ask_and_be_silent() -> None:
            for number in numbers:
                silent[(await town.ask(SigningPeer(number, url), 1 + number % networks)).status_code] += 1

        async with trio.open_nursery() as nursery:
            over = trio.Event()

            async def go_on(peer: SigningPeer) -> None:
                while not over.is_set():
                    await trio.sleep(1.1)  # a peer may ask for one question a second
                    served[await town.evaluate(peer, 0)] += 1
                await trio.sleep(1.1)
                served[await town.evaluate(peer, 0)] += 1

            for peer in known:
                nursery.start_soon(go_on, peer)
            async with trio.open_nursery() as attackers:
                for _ in range(AT_ONCE):
                    attackers.start_soon(ask_and_be_silent)
            over.set()
        newcomer = await town.ask(SigningPeer(61_000, url), 1 + networks)
        return {
            "open": (await http.get(url + "/healthz")).json()["open"],
            "asked": silent[201],
            "refused": silent.total() - silent[201],
            "known_served": served[True],
            "known_refused": served[False],
            "newcomer_refused": int(newcomer.status_code != 201),
        }


def crowd(folder: Path, keys: int, networks: int) -> dict[str, Any]:
    with serving(folder, "--proxy", "127.0.0.1", "--deadline", "3600") as (_, ready):
        found = trio.run(play, str(ready["url"]), keys, networks)
    show(f"judge-sessions, {keys} silent keys of {networks} networks", found)
    return found


@pytest.mark.net
@pytest.mark.slow
def test_silent_keys_use_up_only_their_own_networks_limit(tmp_path: Path) -> None:
    found = crowd(tmp_path, NEWCOMERS_QUESTIONS + 40, 1)
    assert (found["asked"], found["refused"]) == (NEWCOMERS_QUESTIONS, 40)
    assert found["known_refused"] == found["newcomer_refused"] == 0


def attack(folder: Path, keys: int = OPEN_QUESTIONS + 500, networks: int = 100) -> dict[str, Any]:
    """Play the attack from one network, then from many networks."""
    found: dict[str, Any] = {}
    for name, many in (("one", 1), ("many", networks)):
        (folder / name).mkdir()
        found |= {f"{name}_{what}": figure for what, figure in crowd(folder / name, keys, many).items()}
    return found


ATTACK = Attack(
    attack,
    {"one_known_refused": 0, "one_newcomer_refused": 0, "many_known_refused": 0},
    about={
        "keys": f"silent keys; the judge keeps at most {OPEN_QUESTIONS} open questions",
        "networks": "networks of the second run; the first run has one",
    },
)
