"""Plays one attack of this folder and checks its figures against the promised bounds.

    python -m tests.attacks NAME [--json] [options of the attack]

NAME is one of liar, flooder, replayer, forger, sybil, eclipse, slow, bomb, names, oversized, scoring,
poisoner, unserved, opener, singles, loud, deafener, halver, crowder, starver, leecher, relay-starver,
relay-hoarder, dialler, copier, announcer, or, against a judge, judge-readers, judge-board, judge-sessions,
judge-forger, judge-disk. `python -m tests.attacks NAME --help` lists its options. docs/admission.md and
docs/judge-protocol.md have tables of the figures. With --json the last line is one JSON object:
    {"schema": 1, "work": {"attack": name, "options": [...]}, "figures": {...}, "bounds": {figure: most},
    "held": bool}
A bound is the highest value that its figure may have. The exit code is 1 if a figure exceeds its bound; times
may do so on a busy machine.
"""

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from tests.attacks.harness import Attack

NAMES = (
    "liar",
    "flooder",
    "replayer",
    "forger",
    "sybil",
    "eclipse",
    "slow",
    "bomb",
    "names",
    "oversized",
    "scoring",
    "poisoner",
    "unserved",
    "opener",
    "singles",
    "loud",
    "deafener",
    "halver",
    "crowder",
    "starver",
    "leecher",
    "relay-starver",
    "relay-hoarder",
    "dialler",
    "copier",
    "announcer",
    "judge-readers",
    "judge-board",
    "judge-sessions",
    "judge-forger",
    "judge-disk",
)


def attack_named(name: str) -> Attack:
    """Import `tests/attacks/test_NAME.py` and return its attack."""
    found = import_module(f"tests.attacks.test_{name.replace('-', '_')}").ATTACK
    assert isinstance(found, Attack)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off p2p's log messages about bans."""
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
        prog="python -m tests.attacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    name = parser.parse_args(given[:1]).name
    attack = attack_named(name)
    options = [option for option in given[1:] if option != "--json"]
    with _quiet(), contextlib.redirect_stdout(sys.stderr if "--json" in given else sys.stdout):
        figures = attack.figures(name, options)
        print(flush=True)
    bounds = attack.bounds
    held = all(figures[figure] <= most for figure, most in bounds.items())
    for figure, most in bounds.items():
        sys.stderr.write(f"{figure:24} {figures[figure]:10.4g}   at most {most:g}\n")
    if "--json" in given:
        work = {"attack": name, "options": options}
        print(
            json.dumps({"schema": 1, "work": work, "figures": figures, "bounds": bounds, "held": held}),
            flush=True,
        )
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
