"""Submissions that a judge must reject: forged, altered, copied, late, replayed, foreign, malformed.

`pytest -s` prints the figures.

The judge is a separate process. An honest peer is evaluated at the same time as the attacker; at the end the
judge must have the honest peer's answers and no other answers.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from swarmd.tasks.curriculum import TINY_9
from testbed.signing_peer import SigningPeer, answering, encode
from tests.attacks.harness import Attack, show
from tests.judge.test_serving import serving

ORIGIN = "http://forged.test"
DEADLINE = 3600
TARGET = "/v1/evaluations"
ASK: dict[str, Any] = {"round": 1, "curriculum": TINY_9.digest, "asker": {"model": "tiny", "name": "x"}}
GIVEN = answering("<answer>0</answer>")
GARBAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b"\x00",
    b'{"text":',
    b"[" * 20_000,
    b'{"text":"\\ud800","ended":true}',
    b"{}" * 9,
    b'{"text":1,"ended":true}',
    b'{"text":"x"}',
    b'{"text":"x","ended":"true"}',
    b'{"text":"x","ended":true,"more":1}',
    b"NaN",
    b"9" * 5_000,
    b'{"answers":[]}',
    b'{"answers":[null]}',
    b'{"answers":[{"text":"x","ended":true},{"text":"y","ended":true}]}',
    b'{"answers":{"0":1}}',
    b'{"answers":[{"text":"' + b"x" * 16_385 + b'","ended":true}]}',
    b'{"answers":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
]
WRONG_WISHES: Sequence[Mapping[str, Any]] = [
    {"round": -1},
    {"round": 2**63},
    {"round": 1e300},
    {"round": "1"},
    {"curriculum": "0" * 16},
    {"curriculum": ""},
    {"questions": 0},
    {"questions": 9},
    {"answers": 0},
    {"answers": 17},
    {"answers": True},
    {"asker": {}},
    {"asker": None},
    {"asker": {"model": "x" * 101}},
    {"asker": {"model": "x", "name": "n" * 41}},
    {"asker": {"model": "x", "hardware": "abacus"}},
    {"asker": {"model": "x", "local": -1}},
    {"more": 1},
    {"asker": {"model": "\ud800"}},
]
WRONG_HEADERS = [
    ("swarmd-peer", "12D3KooW"),
    ("swarmd-peer", "1" * 52),
    ("swarmd-sequence", "-1"),
    ("swarmd-sequence", "01"),
    ("swarmd-sequence", "9" * 19),
    ("swarmd-sequence", "9" * 5_000),
    ("swarmd-signature", "0" * 128),
    ("swarmd-signature", "F" * 128),
    ("swarmd-signature", ""),
    ("swarmd-origin", "ftp://judge.test"),
    ("swarmd-origin", ""),
    ("swarmd-origin", "http://" + "x" * 300),
]


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Forger:
    """An attacker that knows an honest peer's requests, and has its own keys.

    Each method makes one submission that the judge must reject.
    """

    def __init__(self, http: httpx2.Client, url: str, rng: random.Random) -> None:
        self._http, self._url, self._rng = http, url, rng
        self.honest, self.victim, self.other = (SigningPeer(number, ORIGIN) for number in (1, 2, 3))
        self.heard: list[Request] = []  # requests of the honest peer
        self.answered: list[str] = []  # ids of the honest peer's answered evaluations
        self.open = self.opened(self.victim)
        self.own = self.opened(self.other)

    def opened(self, peer: SigningPeer) -> str:
        """Return the id of an open question that this peer was asked and never answers."""
        asked = self.send(self.signed(peer, TARGET, ASK))
        return str(asked.json()["evaluations"][0]["evaluation"])

    def send(self, request: Request) -> httpx2.Response:
        return self._http.request(
            request.method, self._url + request.target, content=request.body, headers=request.headers
        )

    def signed(self, peer: SigningPeer, target: str, document: Any) -> Request:
        body = document if isinstance(document, bytes) else encode(document)
        return Request("POST", target, peer.headers("POST", target, body), body)

    def evaluate_honestly(self) -> None:
        asked = self.signed(self.honest, TARGET, ASK)
        id = str(self.send(asked).json()["evaluations"][0]["evaluation"])
        given = self.signed(self.honest, f"{TARGET}/{id}/answers", GIVEN)
        assert self.send(given).status_code == 200
        self.heard += [asked, given]
        self.answered.append(id)

    def forged(self) -> Request:
        request = self.signed(self.other, f"{TARGET}/{self.open}/answers", GIVEN)
        return self.changed(request, "swarmd-peer", self.victim.identity.peer_id)

    def altered(self) -> Request:
        """Return the victim's signed request with one bit changed."""
        request = self.signed(self.victim, f"{TARGET}/{self.open}/answers", GIVEN)
        body = bytearray(request.body)
        body[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)
        return Request("POST", request.target, request.headers, bytes(body))

    def foreign(self) -> Request:
        return self.signed(self.other, f"{TARGET}/{self.open}/answers", GIVEN)

    def copied(self) -> Request:
        """Return the honest peer's answer, signed with another key or sent to another question."""
        given = self._rng.choice(self.heard[1::2])
        if self._rng.random() < 0.5:
            return self.signed(self.other, given.target, given.body)
        return Request("POST", f"{TARGET}/{self.open}/answers", given.headers, given.body)

    def replayed(self) -> Request:
        return self._rng.choice(self.heard)

    def repeated(self) -> Request:
        """Return a second answer, with a new signature, to an answered question."""
        return self.signed(self.honest, f"{TARGET}/{self._rng.choice(self.answered)}/answers", GIVEN)

    def stale(self) -> Request:
        """Return a request whose sequence number was used before, or is lower.

        A malformed request does not use up its sequence number, so a valid request is sent here first.
        """
        self.send(self.signed(self.other, TARGET, ASK))
        target, body = f"{TARGET}/{self.own}/answers", encode(GIVEN)
        sequence = self._rng.randrange(self.other.sequence + 1)
        return Request("POST", target, self.other.headers("POST", target, body, sequence), body)

    def misdirected(self) -> Request:
        """Return a request signed for another judge, another path or another method."""
        kind, target, body = self._rng.randrange(3), f"{TARGET}/{self.own}/answers", encode(GIVEN)
        if kind == 0:
            elsewhere = SigningPeer(3, "http://other.test")
            elsewhere.sequence = self.other.sequence = self.other.sequence + 1
            return Request("POST", target, elsewhere.headers("POST", target, body), body)
        headers = self.other.headers("POST", TARGET if kind == 1 else target, body)
        return Request(
            "POST" if kind == 1 else self._rng.choice(("PUT", "PATCH", "DELETE")), target, headers, body
        )

    def malformed(self) -> Request:
        if self._rng.random() < 0.3:
            return self.signed(self.other, TARGET, ASK | self._rng.choice(WRONG_WISHES))
        return self.signed(
            self.other, self._rng.choice((TARGET, f"{TARGET}/{self.own}/answers")), self._garbage()
        )

    def _garbage(self) -> bytes:
        if self._rng.random() < 0.7:
            return self._rng.choice(GARBAGE)
        return self._rng.randbytes(self._rng.randrange(1, 400))

    def unknown(self) -> Request:
        id = self._rng.choice(
            (
                f"{self._rng.getrandbits(128):032x}",
                "0" * 32,
                "x",
                "%00",
                "..%2f..",
                "a" * 64,
                "a" * 65,
                "%F0%9F%A6%A6",
            )
        )
        return self.signed(self.other, f"{TARGET}/{id}/answers", GIVEN)

    def too_large(self) -> Request:
        return self.signed(
            self.other,
            f"{TARGET}/{self.own}/answers",
            b'{"answers":[{"text":"' + b"x" * 530_000 + b'","ended":true}]}',
        )

    def misheaded(self) -> Request:
        request = self.signed(self.other, f"{TARGET}/{self.own}/answers", GIVEN)
        if self._rng.random() < 0.2:
            gone = self._rng.choice(list(request.headers))
            return Request(
                "POST",
                request.target,
                {name: value for name, value in request.headers.items() if name != gone},
                request.body,
            )
        return self.changed(request, *self._rng.choice(WRONG_HEADERS))

    def changed(self, request: Request, name: str, value: str) -> Request:
        return Request(request.method, request.target, request.headers | {name: value}, request.body)


KINDS: Mapping[str, Callable[[Forger], Request]] = {
    name: getattr(Forger, name)
    for name in (
        "forged",
        "altered",
        "foreign",
        "copied",
        "replayed",
        "repeated",
        "stale",
        "misdirected",
        "malformed",
        "unknown",
        "too_large",
        "misheaded",
    )
}


def play(folder: Path, submissions: int, seed: int) -> dict[str, Any]:
    rng, seen = random.Random(seed), Counter[str]()
    with (
        serving(folder, "--origin", ORIGIN, "--deadline", str(DEADLINE)) as (_, ready),
        httpx2.Client(timeout=60, trust_env=False) as http,
    ):
        forger = Forger(http, str(ready["url"]), rng)
        honest = 0
        for number in range(submissions):
            if number % max(1, submissions // 8) == 0 and honest < 8:
                forger.evaluate_honestly()
                honest += 1
            kind = rng.choice(list(KINDS))
            status = forger.send(KINDS[kind](forger)).status_code
            seen[f"{kind} {status // 100}xx"] += 1
        late = lateness(folder / "late", max(1, submissions // 40))
        peers = [
            http.get(f"{ready['url']}/v1/peers/{peer.identity.peer_id}").json()
            for peer in (forger.honest, forger.victim, forger.other)
        ]
    accepted = sum(many for what, many in seen.items() if what.endswith(("2xx", "3xx")))
    errors = sum(many for what, many in seen.items() if what.endswith("5xx"))
    found: dict[str, Any] = {
        "submissions": submissions + late["late"],
        "accepted": accepted + late["accepted"],
        "server_errors": errors + late["server_errors"],
        "miscounted": sum(
            abs(row["answered"] + row["unanswered"] - count)
            for row, count in zip(peers, (honest, 0, 0), strict=True)
        ),
    }
    show(
        f"judge-forger, {submissions} submissions, seed {seed}",
        {**dict(sorted(seen.items())), **late, **found},
    )
    return found


def lateness(folder: Path, answers: int) -> dict[str, int]:
    """Send answers after the deadline to a judge with a deadline of one second."""
    folder.mkdir()
    found = Counter[int]()
    with (
        serving(folder, "--origin", ORIGIN, "--deadline", "1") as (_, ready),
        httpx2.Client(timeout=60, trust_env=False) as http,
    ):
        peer, url = SigningPeer(1, ORIGIN), str(ready["url"])
        asked = http.post(url + TARGET, **peer.signed(TARGET, ASK | {"questions": 4})).json()["evaluations"]
        until = time.monotonic() + max(question["seconds"] for question in asked)
        while time.monotonic() <= until:
            time.sleep(0.05)
        for number in range(answers):
            target = f"{TARGET}/{asked[number % len(asked)]['evaluation']}/answers"
            found[http.post(url + target, **peer.signed(target, GIVEN)).status_code // 100] += 1
    return {"late": answers, "accepted": found[2], "server_errors": found[5]}


@pytest.mark.net
@pytest.mark.slow
def test_forged_requests_and_answers_are_refused(tmp_path: Path) -> None:
    found = play(tmp_path, 160, 7)
    assert (found["accepted"], found["server_errors"], found["miscounted"]) == (0, 0, 0)


def attack(folder: Path, submissions: int = 10_000, seed: int = 1) -> dict[str, Any]:
    return play(folder, submissions, seed)


ATTACK = Attack(attack, {"accepted": 0, "server_errors": 0, "miscounted": 0})
