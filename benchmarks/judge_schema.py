"""Cases made from a judge's own OpenAPI by schemathesis, valid and invalid: none may be a server error.

    python -m benchmarks.judge_schema [--cases 10000] [--seed 1] [--database postgresql://…]

Needs `pip install schemathesis`, which swarmd does not. The judge is a process of its own. Half of the
requests that need a signature get a right one, so that they get past it. Prints what was answered, by
operation; exit code 1 if the judge failed at one.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.judge_load import serving
from swarmd.tasks.curriculum import TINY_9
from tests.judge.peers import SigningPeer

KEYS = 64
# Of what is signed it is the judge's, so that questions are asked
CURRICULUM = re.compile(rb'"curriculum": ?"[^"\\]*"')
LONGEST = 20  # failures that are shown


def play(url: str, cases: int, seed: int) -> tuple[dict[str, Counter[int]], list[str]]:
    """Send the cases; return statuses by operation, and the requests at which the judge failed."""
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.strategies import SearchStrategy
    from schemathesis.generation.modes import GenerationMode

    rng, peers, failed = (
        random.Random(seed),
        [SigningPeer(number, url) for number in range(KEYS)],
        list[str](),
    )
    operations = [
        found.ok() for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
    ]
    seen: dict[str, Counter[int]] = {}
    http = requests.Session()
    each = -(-cases // (len(operations) * len(GenerationMode)))

    def send(case: Any) -> None:
        made = case.as_transport_kwargs(base_url=url)
        request = http.prepare_request(
            requests.Request(**{name: value for name, value in made.items() if name != "timeout"})
        )
        peer = rng.choice(peers)
        if request.method == "POST" and rng.random() < 0.5:
            target = urlsplit(str(request.url))
            body = request.body.encode() if isinstance(request.body, str) else request.body or b""
            if isinstance(body, bytes):
                body = request.body = CURRICULUM.sub(b'"curriculum": "%b"' % TINY_9.digest.encode(), body)
                request.headers["content-length"] = str(len(body))
                request.headers.update(
                    peer.headers("POST", target.path + ("?" + target.query if target.query else ""), body)
                )
        request.headers["x-forwarded-for"] = f"198.18.{rng.randrange(256)}.7"
        answered = http.send(request, timeout=60, allow_redirects=False)
        seen.setdefault(f"{case.operation.method.upper()} {case.operation.path}", Counter())[
            answered.status_code
        ] += 1
        if answered.status_code >= 500:
            failed.append(
                f"{answered.status_code} {request.method} {request.url} {request.body!r:.300}"
                f" {answered.text:.200}"
            )

    def sent() -> int:
        return sum(statuses.total() for statuses in seen.values())

    while sent() < cases:
        for operation in operations:
            for mode in GenerationMode:
                quiet = settings(
                    max_examples=each,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                try:
                    cases_of: SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
                    seeded(seed + sent())(quiet(given(cases_of)(send)))()
                except Exception as error:
                    # Else there is nothing wrong to be sent
                    if type(error).__name__ not in ("Unsatisfiable", "InvalidArgument"):
                        raise
    return seen, failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--database", default="", help="a file or a postgresql:// address; by default a new file"
    )
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            given.database or str(Path(folder) / "judge.sqlite3"), "--key", str(Path(folder) / "judge.key")
        ) as (_, url),
    ):
        try:
            seen, failed = play(url, given.cases, given.seed)
        except ModuleNotFoundError as missing:
            sys.exit(f"{missing.name} is not installed. Run `pip install schemathesis` and try again.")
    for operation, statuses in sorted(seen.items()):
        print(f"{operation:44} {'  '.join(f'{status}: {many}' for status, many in sorted(statuses.items()))}")
    for request in failed[:LONGEST]:
        print(request)
    print(
        json.dumps(
            {"cases": sum(statuses.total() for statuses in seen.values()), "server_errors": len(failed)}
        )
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
