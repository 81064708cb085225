"""Play one attack and compare its figures with the bounds that we promise: `python -m benchmarks.attack NAME [--json]`.

The attacks are those of tests/attacks, where each says what is real in it and what is played. Last line with --json, one object:
    {"schema": 1, "work": {"attack": name, "seed": s}, "figures": {name: figure}, "bounds": {name: most}, "held": bool}
A bound is the most that its figure may be. Exit code 1 where one did not hold.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

Figures = Mapping[str, float]


def replayer(seed: int) -> Figures:
    from tests.attacks.test_replayer import attack

    with tempfile.TemporaryDirectory() as folder:
        results = attack(Path(folder), seed)
    return {"let_in": sum(results.values()), "times_of_10_000": len(results)}


def forger(seed: int) -> Figures:
    from tests.attacks.test_forger import attack

    results = [attack(connections, seed) for connections in (0, 3, 100)]
    return {
        "let_in": sum(r.let_in for r in results),
        "honest_kept_out": sum(r.honest_sent - r.honest_let_in for r in results),
        "verified_for_nothing_by_three": results[1].looked_at,
    }


def bomb(_seed: int) -> Figures:
    from tests.attacks.test_bomb import MIB, attack

    with tempfile.TemporaryDirectory() as folder:
        found = attack(Path(folder)).values()
    return {
        "taken": sum(not f["refused"] for f in found),
        "ms": max(f["ms"] for f in found),
        "more_MiB": max(f["more_bytes"] for f in found) / MIB,
    }


def sybil(seed: int) -> Figures:
    from tests.attacks.test_sybil import attack
    from tests.attacks.test_sybil_offers import attack as attack_offers

    results = [attack(groups, text, seed=seed, attacked=12) for groups in (1, 4, 100) for text in ("correct", "copied")]
    shares = [*(r.shares for r in results), attack_offers(seed=seed).shares]
    return {
        "share_of_a_batch": max(map(max, shares)),
        "share_mean": max(map(fmean, shares)),
        "honest_lost": 1 - min(r.delivery for r in results),
    }


def eclipse(seed: int) -> Figures:
    from tests.attacks.test_eclipse import RESTARTS, attack

    eclipsed = []
    for groups, lies in ((16, False), (64, True)):
        with tempfile.TemporaryDirectory() as folder:
            eclipsed.append(attack(groups, lies, Path(folder), seed=seed).eclipsed)
    return {"eclipsed": max(eclipsed) / RESTARTS}


ATTACKS: Mapping[str, tuple[Callable[[int], Figures], Mapping[str, float]]] = {
    "replayer": (replayer, {"let_in": 0}),
    "forger": (forger, {"let_in": 0, "honest_kept_out": 0}),
    "bomb": (bomb, {"taken": 0, "ms": 5, "more_MiB": 16}),
    "sybil": (sybil, {"share_of_a_batch": 0.15, "honest_lost": 0.01}),
    "eclipse": (eclipse, {"eclipsed": 0.01}),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description="play one attack; its figures and our bounds")
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    given = parser.parse_args(argv)
    logging.getLogger("p2p").setLevel(logging.ERROR)  # it says whom it shuts out, and here that is everybody
    play, bounds = ATTACKS[given.name]
    figures = play(given.seed)
    held = all(figures[name] <= most for name, most in bounds.items())
    print()
    for name, figure in figures.items():
        print(f"{name:32} {figure:10.4g}" + (f"   at most {bounds[name]:g}" if name in bounds else ""))
    if given.json:
        work = {"attack": given.name, "seed": given.seed}
        print(json.dumps({"schema": 1, "work": work, "figures": dict(figures), "bounds": dict(bounds), "held": held}))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
