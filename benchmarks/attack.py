"""One attack of tests/attacks, played on purpose, and what came of it.

    python -m benchmarks.attack NAME [--json] [further options, the attack's own]

NAME is one of liar, flooder, replayer, forger, sybil, eclipse, slow, bomb, poisoner; `python -m benchmarks.attack NAME --help`
lists its options. The figures as a table: docs/admission.md. With --json the last line is one object,
{"schema": 1, "work": {...}, "figures": {...}}.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from importlib import import_module

NAMES = ("liar", "flooder", "replayer", "forger", "sybil", "eclipse", "slow", "bomb", "poisoner")


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    arguments = parser.parse_args(given[:1])
    options = [option for option in given[1:] if option != "--json"]
    attack = import_module(f"tests.attacks.test_{arguments.name}")
    with contextlib.redirect_stdout(sys.stderr if "--json" in given else sys.stdout):
        figures = attack.figures(options)
    if "--json" in given:
        print(json.dumps({"schema": 1, "work": {"attack": arguments.name, "options": options}, "figures": figures}), flush=True)


if __name__ == "__main__":
    main()
