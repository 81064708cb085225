"""A swarm of simulated nodes over the daemon's own pure code: what reaches whom, how soon, and what it costs each node.

    python -m benchmarks.simulate --nodes N [--rounds 3] [--seed 0] [--session SECONDS] [--json]
    python -m benchmarks.simulate --sweep 10,30,100,… [--plot docs/simulation.svg] [--json]
    python -m benchmarks.simulate --growth 10,1000 [--minutes 60] [--json]

--nodes: a swarm that is there already; its cost per node and round of 60 s. --sweep: the same over swarm sizes. --growth: nodes join one
by one; how the shards follow. The model and its limits: docs/simulation.md. Bytes are those received, IP headers included.
"""

import argparse
import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swarmd.lab.simulation.growth import Stage, grow
from swarmd.lab.simulation.internet import HOMES, LOOPBACK
from swarmd.lab.simulation.report import SwarmReport, report
from swarmd.lab.simulation.swarm import SimulatedSwarm, SwarmPlan

TEXT = Path(__file__).parents[1] / "LICENSE"  # what rollouts are cut from: English that stays as it is, so a seed gives one run for good
SETTLING = 2  # rounds before any is measured
WEATHERS = {"homes": HOMES, "loopback": LOOPBACK}
KINDS = {  # of the ledger: label in the plot
    "offers": "offers, with duplicates",
    "control": "GossipSub's control messages",
    "questions": "questions about the size",
    "fetches": "fetches",
    "connections": "connections made",
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = options(argv)
    out = sys.stderr if arguments.json else sys.stdout
    text = TEXT.read_text()
    gc.disable()  # a simulation makes no cycles while it runs, and millions of objects that live long
    try:
        found = measure(arguments, text, out)
    finally:
        gc.enable()
    if arguments.json:
        work = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items() if name != "json"}
        print(json.dumps({"schema": 1, "work": work, **found}), flush=True)


def measure(arguments: argparse.Namespace, text: str, out: Any) -> dict[str, Any]:
    if arguments.growth:
        first, last = arguments.growth
        return {"stages": growth_table(grow(first, last, 60.0 * arguments.minutes, text, seed=arguments.seed), out)}
    reports = [simulate(nodes, arguments, text, out) for nodes in arguments.sweep or [arguments.nodes]]
    if arguments.plot:
        plot(reports, arguments.plot)
    runs = [dataclasses.asdict(one) for one in reports]
    return {"runs": runs} if arguments.sweep else runs[0]


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.split("\n")[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--nodes", type=sizes_at_least(2, one=True), help="how many there are")
    what.add_argument("--sweep", type=sizes_at_least(2), help="several sizes, with commas")
    what.add_argument("--growth", type=sizes_at_least(2), help="from how many to how many, with a comma")
    parser.add_argument("--rounds", type=int, default=3, help=f"measured ones, after {SETTLING} others (3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--session", type=float, default=0.0, help="mean seconds until a node goes, for 120 on average (0: it stays)")
    parser.add_argument("--minutes", type=float, default=60.0, help="in which --growth happens (60)")
    parser.add_argument("--weather", choices=WEATHERS, default="homes", help="what lines are like (homes)")
    parser.add_argument("--plot", type=Path, help="write a figure here (needs matplotlib: pip install 'swarmd[plot]')")
    parser.add_argument("--json", action="store_true", help="the figures as one object on the last line; the table goes to stderr")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    if arguments.growth and (len(arguments.growth) != 2 or arguments.growth[0] >= arguments.growth[1]):
        parser.error("--growth takes two sizes, the smaller first")
    if arguments.plot and not arguments.sweep:
        parser.error("--plot goes with --sweep")
    return arguments


def sizes_at_least(least: int, *, one: bool = False) -> Any:
    def sizes(text: str) -> int | list[int]:
        try:
            found = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
        if one and len(found) != 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not one number")
        if min(found) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a swarm has at least {least} nodes")
        return found[0] if one else found

    return sizes


def simulate(nodes: int, arguments: argparse.Namespace, text: str, out: Any) -> SwarmReport:
    begun = time.monotonic()
    plan = SwarmPlan(nodes, arguments.seed, weather=WEATHERS[arguments.weather], session=arguments.session, formed=True)
    swarm = SimulatedSwarm(plan, text)
    swarm.run(SETTLING * plan.period)
    swarm.measure(arguments.rounds)
    found = report(swarm, arguments.rounds)
    line(found, time.monotonic() - begun, out)
    del swarm
    gc.collect()  # a swarm is one cycle
    return found


def line(found: SwarmReport, seconds: float, out: Any) -> None:
    kinds = "  ".join(f"{kind} {size / 1000:.1f}" for kind, size in found.bytes_by_kind.items())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    text = f"""{found.nodes:6} nodes, {found.shards:.0f} shards; {seconds:.0f} s, {memory} MiB
    delivered {found.delivered:.2%}; offers {found.offers_delivered:.2%}; rounds with all J {found.rounds_full:.2%}
    an offer's way {found.way_p50:.3f} s, 95 % {found.way_p95:.3f} s; with the fetch {found.delay_p50:.2f} s, 95 % {found.delay_p95:.2f} s;\
 and with its wait on the board {found.age_p50:.0f} s
    per node and round: {found.bytes_per_round / 1000:.1f} kB (95 %: {found.bytes_p95 / 1000:.1f}): {kinds}
        {found.messages_per_round:.0f} messages, {found.parsed_per_round:.1f} signatures, {found.copies:.1f} copies of a frame
    received per byte trained on {found.bytes_per_trained:.2f}, per byte as it travels {found.bytes_per_compressed:.2f}\
 (zstd {found.compression:.2f})"""
    print(text, file=out, flush=True)


def growth_table(stages: Iterable[Stage], out: Any) -> list[dict[str, Any]]:
    print(f"{'minute':>6} {'nodes':>6} {'shards':>7} {'agree':>6} {'size':>7} {'rounds with all J':>18} {'kB/node/round':>14}", file=out)
    found = []
    for one in stages:
        found.append(dataclasses.asdict(one))
        print(
            f"{one.minute:6.0f} {one.nodes:6} {one.shards:7.1f} {one.agree:6.0%} {one.size:7.0f} {one.rounds_full:18.1%} "
            f"{one.bytes_per_round / 1000:14.1f}",
            file=out,
            flush=True,
        )
    return found


def plot(reports: Sequence[SwarmReport], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'swarmd[plot]'. The table above is complete.") from None
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [one.nodes for one in reports]
    below = [0.0] * len(reports)
    stacks = [[one.bytes_by_kind[kind] / 1000 for one in reports] for kind in KINDS]
    axes.stackplot(sizes, stacks, labels=list(KINDS.values()), alpha=0.8)
    below = [one.bytes_per_round / 1000 for one in reports]
    axes.plot(sizes, below, color="black", marker="o", linewidth=1)
    axes.axhline(8 * 4 * 4.096, color="black", linestyle=":", linewidth=1)
    axes.annotate("8 bytes for each byte trained on", (sizes[0], 8 * 4 * 4.096), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel="nodes in the swarm", ylabel="kB received per node and round", xlim=(sizes[0], sizes[-1]))
    axes.set_ylim(bottom=0, top=1.45 * max(*below, 131))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.legend(frameon=False, ncols=2, loc="upper left", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
