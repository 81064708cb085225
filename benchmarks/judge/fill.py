"""Fills a judge's database with made-up evaluations by bulk insert, or measures the judge's response times.

    python -m benchmarks.judge.fill judge.sqlite3 --evaluations 1000000 --peers 5000
    python -m benchmarks.judge.fill judge.sqlite3 --read 200

The first command takes a minute of CPU for a million evaluations. Peers differ in skill, in how often they
are evaluated and in when they begin; half of them are in the swarm and learn a fifth faster. `swarmd-judge
serve --curriculum tiny-9 --database judge.sqlite3` shows the pages.

The second command measures how long the judge takes to answer. The lines "cold" are CPU milliseconds of the
work in this process, without a cache. The other lines are measured over HTTP, from a real judge on loopback
that caches some answers for a few seconds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import httpx2
from sqlalchemy import insert

from benchmarks.judge.load import cpu_seconds
from judge.figures.comparison import comparison_document
from judge.figures.intervals import always
from judge.figures.leaderboard import WINDOW_QUESTIONS, BoardView
from judge.pages.rendering import NAVIGATION
from judge.store import arms, reader
from judge.store.database import Database
from judge.store.store import LAPSED, open_store
from judge.store.tables import evaluations, peers
from judge.store.windows import turn
from p2p.identity import Identity, nickname
from swarmd.tasks.curriculum import TINY_9
from testbed.judge_process import serving
from testbed.recounted_arms import recounted

MODELS = (
    "tiny",
    "tiny",
    "tiny",
    "tiny",
    "tiny",
    "tiny",
    "tiny",
    "qwen2.5-0.5b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
)
EPOCH = time.time() - 35 * 86_400  # 35 days ago, so that some peers were seen today
AT_A_TIME = 50_000  # rows
SINGLE = (
    *(path for path, _ in NAVIGATION if path not in ("/", "/compare")),  # these need a query
    "/metrics",
    "/healthz",
    "/openapi.json",
    "/v1/judge",
    "/v1/windows",
)
WORDS = ("otter", "node 4", "12D3KooWA", "tin", "q")
ORDERS = ("score", "seen", "reward", "new", "questions")


def history(
    number: int, many: int, rng: random.Random, alive: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make a peer and its evaluations, as a judge would have them.

    alive: the peer was seen within the last minutes and has no name, and only one peer of eight is solo.
    """
    swarm, model = number % 8 != 7 if alive else number % 2 == 0, MODELS[number // 2 % len(MODELS)]
    skill, every = rng.lognormvariate(0.0, 0.25), rng.choice((1, 1, 2, 3))
    peer = Identity(number.to_bytes(32, "big")).peer_id
    said = {
        "name": f"node {number}",
        "sharing": "swarm" if swarm else "solo",
        "strategy": "uniform positive",
        "version": "0.2.0",
        "hardware": rng.choice(("cpu", "cuda", "mps")),
        "local": 4 if swarm else 8,
        "external": 4 if swarm else 0,
    }
    begun, pace = EPOCH + rng.uniform(0, 33 * 86_400), rng.uniform(20, 200)
    if alive:
        said.pop("name")
        begun = time.time() - pace * every * many - rng.uniform(0, 600)
    total, answered, rewards, rows = 0.0, 0, [], []
    for place in range(1, many + 1):
        round_number = place * every
        share = min(0.95, skill * (0.1 + 0.4 * round_number / (round_number + (80 if swarm else 100))))
        lapsed = rng.random() < 0.01
        reward = float(not lapsed and rng.random() < share)
        rewards.append(reward)
        total, answered = total + reward, answered + (not lapsed)
        row = {
            "id": f"{rng.getrandbits(128):032x}",
            "peer": peer,
            "round": round_number,
            "model": model,
            "specialty": rng.choice(TINY_9.specialties),
            "n": 10**9 + rng.randrange(10**6),
            "asked_at": begun + pace * round_number,
            "state": "unanswered" if lapsed else "graded",
            "number": place,
            "reward": reward,
            "total": total,
            "answers": 1,
            "reason": LAPSED if lapsed else "correct" if reward else "wrong",
            "seconds": None if lapsed else rng.uniform(0.1, 9.0),
            "answer": None if lapsed else f"I add the numbers. <answer>{rng.randrange(1000)}</answer>",
            "ended": None if lapsed else 1,
            "correct": None if lapsed else int(reward),
            "window_number": 1,
            "place": place - 1,
            **said,
        }
        rows.append(row)
    recent = rewards[-WINDOW_QUESTIONS:]
    score = {
        "low": always(sum(recent), len(recent)).low,
        "recent_right": sum(recent),
        "recent_n": len(recent),
        "window_asked": 0,
    }
    newest = {
        "nickname": nickname(peer),
    }
    seen = {
        "first_seen": rows[0]["asked_at"],
        "last_seen": begun + pace * round_number + 1,
        "sequence": many,
        "window_asked": 0,
    }
    return {
        "peer": peer,
        "model": model,
        "answered": answered,
        "unanswered": many - answered,
        "reward": total,
        **score,
        **newest,
        **seen,
        **said,
    }, rows


def histories(
    many: int, of: int, seed: int, alive: bool = False
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield peers with their evaluations; only a few peers have many, as is usual among volunteers."""
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0.0, 0.8) for _ in range(of)]
    scale = many / sum(weights)
    counts = [max(1, round(weight * scale)) for weight in weights]
    counts[0] = max(1, counts[0] + many - sum(counts))
    for number, count in enumerate(counts):
        yield history(number, count, rng, alive)


def fill(database: str, many: int, of: int, seed: int, alive: bool = False) -> dict[str, float]:
    """Fill a new database."""
    begun = time.process_time()
    open_store(database, f"tiny-9 {TINY_9.digest}").close()
    with closing(Database(database)) as opened, opened.begin() as db:
        turn(db, EPOCH, 86_400, TINY_9.digest, lambda: bytes(32))
        waiting: list[dict[str, Any]] = []
        for peer, rows in histories(many, of, seed, alive):
            db.execute(insert(peers), peer)
            waiting += rows
            if len(waiting) >= AT_A_TIME:
                db.execute(insert(evaluations), waiting)
                waiting.clear()
        if waiting:
            db.execute(insert(evaluations), waiting)
        written = time.process_time()
        for table, rows in recounted(db).rows():
            if rows:
                db.execute(insert(table), rows)
    return {
        "evaluations": many,
        "peers": of,
        "fill_cpu_s": round(written - begun, 1),
        "recount_cpu_s": round(time.process_time() - written, 1),
    }


def read(database: str, times: int) -> Iterator[dict[str, Any]]:
    """Measure how long each answer takes, the judge's CPU time for it, and its size.

    Each request asks for another page or another query.
    """
    yield from cold(database, times)
    with serving(database) as (process, url), httpx2.Client(base_url=url, timeout=60) as http:
        for name, address in targets(http).items():
            took, size, before = [], 0, cpu_seconds([process.pid])["judge"]
            for place in range(times):
                begun = time.monotonic()
                # Wait if this network has used up its limit.
                while (answer := http.get(address(place))).status_code == 429:
                    time.sleep(float(answer.headers["retry-after"]))
                    begun = time.monotonic()
                took.append(1000 * (time.monotonic() - begun))
                assert answer.status_code == 200, (address(place), answer.status_code)
                size = max(size, len(answer.content))
            cuts = statistics.quantiles(took, n=20, method="inclusive")
            figures = {"kB": size / 1000, "p50_ms": cuts[9], "p95_ms": cuts[18], "longest_ms": max(took)}
            figures["cpu_ms"] = 1000 * (cpu_seconds([process.pid])["judge"] - before) / times
            yield {"answer": name, **{name: round(value, 1) for name, value in figures.items()}}


def targets(http: httpx2.Client) -> dict[str, Callable[[int], str]]:
    """Return functions that map a request's number to an address, for every page and answer.

    If an answer has several pages or queries, successive requests ask for different ones.
    """
    after: int | None = 0
    nodes: list[str] = []
    while after is not None and len(nodes) < 200:
        page = http.get("/v1/leaderboard", params={"after": after}).json()
        nodes, after = nodes + [peer["peer"] for peer in page["peers"]], page["more_after"]
    shown = [
        row["evaluation"]
        for node in nodes[:10]
        for row in http.get(f"/v1/peers/{node}", params={"limit": 20}).json()["evaluations"]
    ]
    models = (*sorted(set(MODELS)), "none")
    return {
        "/": lambda i: f"/?after={50 * i % 4900}",
        "/?q=": lambda i: f"/?q={WORDS[i % 5]}&after={i // 5}",
        "/?sort=": lambda i: f"/?sort={ORDERS[i % 5]}&after={i}",
        "/?model=": lambda i: f"/?model={models[i % 4]}&active=1&after={i // 4}",
        "/?tier=": lambda i: f"/?tier={('reported', 'verified')[i % 2]}&after={i}",
        "/v1/leaderboard": lambda i: f"/v1/leaderboard?after={40 * i % 4900}",
        "/nodes/": lambda i: f"/nodes/{nodes[i % len(nodes)]}",
        "/v1/peers/": lambda i: f"/v1/peers/{nodes[i % len(nodes)]}",
        "/evaluations/": lambda i: f"/evaluations/{shown[i % len(shown)]}",
        "/compare": lambda i: f"/compare?model={models[i % 4]}",
        "/v1/comparison": lambda i: f"/v1/comparison?model={models[i % 4]}",
        **{path: partial(str.format, path) for path in SINGLE},
    }


def cold(database: str, times: int) -> Iterator[dict[str, Any]]:
    with closing(Database(database, alone=False)) as reading:
        work: dict[str, Callable[[], object]] = {
            "board": lambda: reading.run(reader.board, BoardView()),
            "comparison": lambda: comparison_document(reading.run(arms.view, None)),
        }
        for name, do in work.items():
            took = []
            for _ in range(times):
                begun = time.process_time()
                do()
                took.append(1000 * (time.process_time() - begun))
            cuts = statistics.quantiles(took, n=20, method="inclusive")
            yield {"cold": name, "p50_cpu_ms": round(cuts[9], 1), "p95_cpu_ms": round(cuts[18], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("database", help="a file or a postgresql:// address; without --read it must be new")
    parser.add_argument("--evaluations", type=int, default=1_000_000)
    parser.add_argument("--peers", type=int, default=5_000)
    parser.add_argument(
        "--read", type=int, default=0, metavar="TIMES", help="measure a judge that serves the database"
    )
    given = parser.parse_args()
    if given.read:
        for line in read(given.database, given.read):
            print(json.dumps(line), flush=True)
    else:
        print(json.dumps(fill(given.database, given.evaluations, given.peers, 1)))


if __name__ == "__main__":
    main()
