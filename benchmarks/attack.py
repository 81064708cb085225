"""One attack of tests/attacks, played on purpose, and its figures beside the bounds that we promise.

    python -m benchmarks.attack NAME [--json] [further options, the attack's own]

NAME is one of liar, flooder, replayer, forger, sybil, eclipse, slow, bomb, names, oversized, scoring, poisoner, phantom,
unserved, or, against a judge, judge-readers, judge-board, judge-sessions.
`python -m benchmarks.attack NAME --help` lists its options. The figures as a table: docs/admission.md, docs/judge-protocol.md.
With --json the last line is one object:
    {"schema": 1, "work": {"attack": name, "options": [...]}, "figures": {...}, "bounds": {figure: most}, "held": bool}
A bound is the most that its figure may be. Exit code 1 where one does not hold; on a busy machine times do not.
"""

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

BOUNDS: Mapping[str, Mapping[str, float]] = {
    "liar": {"false_rewards": 0, "reward_lost": 0.05},
    "flooder": {"never": 0, "cut_off": 2.0, "let_in_again": 0, "cost": 0.05, "honest_lost": 0},
    "replayer": {"let_in": 0},
    "forger": {"let_in": 0, "honest_kept_out": 0},
    "sybil": {"share_of_a_batch": 0.15, "honest_lost": 0.01},
    "eclipse": {"eclipsed": 0.01},
    "slow": {"never": 1.0, "dribble": 1.0, "half_longest": 1.0, "question_longest": 1.0},
    "bomb": {"taken": 0, "ms": 5, "more_MiB": 16},
    "names": {"kept": 1024, "reply_KiB": 512, "honest_hidden": 0},
    "oversized": {"lost_to_size": 0.05, "tokens_over_rollouts": 1.0},
    "scoring": {"scored_of_sent": 0.1},
    "poisoner": {},
    "phantom": {"lost": 0.1},
    "judge-readers": {"page_KiB": 256, "more_MiB": 64, "longest": 0.5, "left": 0},
    "judge-board": {"honest_gone": 0, "worst_rank": 3, "gain": 0},
    "judge-sessions": {"one_known_refused": 0, "one_newcomer_refused": 0, "many_known_refused": 0},
    "unserved": {"lost": 0.2, "standing": 0},
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """p2p says whom it shuts out, and here that is everybody."""
    log = logging.getLogger("p2p")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=BOUNDS, metavar="NAME")
    name = parser.parse_args(given[:1]).name
    options = [option for option in given[1:] if option != "--json"]
    with _quiet(), contextlib.redirect_stdout(sys.stderr if "--json" in given else sys.stdout):
        figures = import_module(f"tests.attacks.test_{name.replace('-', '_')}").figures(options)
    bounds = BOUNDS[name]
    held = all(figures[figure] <= most for figure, most in bounds.items())
    for figure, most in bounds.items():
        sys.stderr.write(f"{figure:24} {figures[figure]:10.4g}   at most {most:g}\n")
    if "--json" in given:
        work = {"attack": name, "options": options}
        print(json.dumps({"schema": 1, "work": work, "figures": figures, "bounds": bounds, "held": held}), flush=True)
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
