"""Draws the pictures of the documents.

    python -m benchmarks.lab.pictures pages docs                  docs/judge.webp and page.webp; 4 minutes
    python -m benchmarks.lab.pictures long docs/long.png          lines of docs/data/long.csv
    python -m benchmarks.lab.pictures oscillation docs/oscillation.png  lines of docs/data/oscillation.csv
    python -m benchmarks.lab.pictures figure-3 docs/figure-3.png  lines of docs/data/figure-3.csv
    python -m benchmarks.lab.pictures real docs/real.png          lines of docs/data/real*.csv
    python -m benchmarks.lab.pictures tool docs/tool.png          lines of docs/data/tool-spreads.csv
    scripts/demo --out demo && cp demo/rewards.png docs/demo.png

`pages` takes screenshots of the judge's front page, with made-up nodes, and of a real node's page: wide and
narrow (-narrow), light and dark (-dark). It needs Chromium. `long --export FOLDER` first rewrites
docs/data/long.csv, from the output of `swarmd lab run long --seeds 3; swarmd lab export long FOLDER`.
"""

import argparse
import base64
import csv
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.judge.fill import fill
from swarmd.daemon.local_api import control
from swarmd.lab import figures
from swarmd.lab.figures import COLOURS
from swarmd.lab.local_judge import local_judge
from swarmd.lab.results import TABLE
from testbed import ROOT
from testbed.chromium import Tab, chromium
from testbed.judge_process import serving
from testbed.local_swarm import local_swarm

DATA = ROOT / "docs" / "data"
# Nodes that are away: key, title, the judge's verdict and p, and the nodes of each setting.
AWAY = (
    ("nobody", "nobody away", "better", 0.0011, 48),
    ("a fifth", "a fifth away", "not known", 0.19, 16),
    ("half", "half away", "not known", 1.0, 16),
)
# Height of a line's name in the picture `long`, as a share of right answers.
LINE_OF_TEXT = 0.022
# Rounds in the mean of each point of the picture `long`, and rounds between two points.
WINDOW, STEP = 250, 50
# The suffix of a picture's name, and the page's width in pixels.
WIDTHS = {"": 1280, "-narrow": 390}
QUALITY = 85  # of WebP, in percent
# Space between the last shown element of the page and the picture's edge.
GAP_PX = 12
ROUNDS = 150  # rounds of the node in the picture of its page
REAL_WINDOW = 10  # rounds in the mean of each point of the picture `real`
# The settings of the picture `real`: name, words and colour.
REAL = (
    ("8/0", "8 own, alone", COLOURS[1]),
    ("4/4", "4 own + 4 external", COLOURS[2]),
    ("4/8", "4 own + 8 external", COLOURS[0]),
    ("8/16", "8 own + 16 external", COLOURS[3]),
)
BAR = 0.8 / len(REAL)  # width of a bar
TOOL_WINDOW = 5  # rounds in the mean of each reward in the picture `tool`
# The lines of the picture `tool`: setting, nodes, words and colour.
TOOL = (
    ("swarm 4/8", (0,), "the node with examples, sharing", COLOURS[5]),
    ("swarm 4/8", (1, 2, 3), "the other three, sharing", COLOURS[0]),
    ("alone 8/0", (1, 2, 3), "the other three, alone", COLOURS[1]),
)


def pages(to: Path, scratch: Path) -> None:
    """Draw the judge's front page and a node's page into the folder `to`."""
    judge(to / "judge.webp", scratch)
    node(to / "page.webp", scratch)


def judge(to: Path, scratch: Path) -> None:
    """Draw the judge's front page, with eight made-up nodes that were all seen within minutes."""
    database = scratch / "judge.sqlite3"
    fill(str(database), 4_000, 8, seed=3, alive=True)
    with serving(str(database)) as (_, url), chromium(scratch / "of-judge") as tab:
        shoot(tab, url, to, last="#board section")


def node(to: Path, scratch: Path) -> None:
    """Start three real nodes, and draw the page of one of them."""
    options = ["--model", "tiny-latent", "--pace", "0.8"]
    with local_judge(scratch) as url, local_swarm(scratch, 3, [*options, "--judge", url]) as nodes:
        for each in nodes:
            each.start()
        while len(nodes[0].lines()) < ROUNDS:
            nodes[0].check()
            time.sleep(1)
        with chromium(scratch / "of-node") as tab:
            address = control.call(nodes[0].folder, "ui", dict)["address"]
            shoot(tab, address, to, last="#peers", prepare=ask_20_questions)


def ask_20_questions(tab: Tab) -> None:
    tab.until("document.querySelector('#chart canvas')")
    tab.run("document.getElementById('do-ask-20-questions').click()")
    tab.until("document.getElementById('tally').textContent.startsWith('Of 20')")


def shoot(tab: Tab, address: str, to: Path, last: str, prepare: Callable[[Tab], None] | None = None) -> None:
    """Draw a page in each width and colour scheme, from its top to the end of the element `last`.

    last: a CSS selector; no element is cut in two. prepare: called with the open page.
    """
    tab.call("Emulation.setScrollbarsHidden", hidden=True)
    for (narrow, width), dark in product(WIDTHS.items(), (False, True)):
        tab.open(address, width=width, height=860, dark=dark)
        if prepare is not None:
            prepare(tab)
        height = tab.run(f"Math.ceil(document.querySelector('{last}').getBoundingClientRect().bottom)")
        clip = {"x": 0, "y": 0, "width": width, "height": height + GAP_PX, "scale": 1}
        drawn = tab.call(
            "Page.captureScreenshot", format="webp", quality=QUALITY, clip=clip, captureBeyondViewport=True
        )
        name = f"{to.stem}{narrow}{'-dark' if dark else ''}{to.suffix}"
        to.with_name(name).write_bytes(base64.b64decode(drawn["data"]))


def long(to: Path, _scratch: Path) -> None:
    """Draw the share of right answers over 2,000 rounds, by setting; each line is named at its end."""
    rounds, *settings = zip(*csv.reader((DATA / "long.csv").open(encoding="utf-8")), strict=True)
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    ends = []
    for (name, *shares), colour in zip(settings, COLOURS, strict=False):
        axes.plot(
            [int(number) for number in rounds[1:]],
            [float(share) for share in shares],
            color=colour,
            linewidth=2.5 if name.endswith("positive") else 1.5,
        )
        ends.append((float(shares[-1]), batch_words(name), colour))
    # The ends of the lines are too close together for names next to them, so a thin line leads to each name.
    lowest = fmean(share for share, *_ in ends) - LINE_OF_TEXT * (len(ends) - 1) / 2
    for place, (share, words, colour) in enumerate(sorted(ends)):
        axes.annotate(
            words,
            (int(rounds[-1]), share),
            (int(rounds[-1]) + 80, lowest + LINE_OF_TEXT * place),
            color=colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)},
        )
    axes.set(
        xlabel="training round of each node",
        ylabel="share of right answers",
        title="Each point: the mean of the 250 rounds up to it, all nodes, three runs",
    )
    axes.title.set_fontsize(10)
    figure.suptitle("Right answers over 2,000 rounds, by whose answers a batch has")
    axes.set_xlim(250, 2020)
    axes.set_xticks(range(250, 2001, 250))
    axes.set_ylim(0.3, 0.75)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=120)


def oscillation(to: Path, _scratch: Path) -> None:
    """Draw the mean reward of each 25 rounds, alone and at 2/6 with the paper's settings, a line a seed."""
    rounds, *settings = zip(*csv.reader((DATA / "oscillation.csv").open(encoding="utf-8")), strict=True)
    figure, (axes,) = figures.canvas(9, 3)
    for name, *rewards in settings:
        setting, _, later = name.partition(", seed ")
        axes.plot(
            list(map(int, rounds[1:])),
            list(map(float, rewards)),
            color=COLOURS[1] if setting == "8/0" else COLOURS[3],
            label=None if later else batch_words(setting),
        )
    axes.legend(frameon=False)
    axes.set(xlabel="training round of each node", ylabel="mean reward", ylim=(0, 0.55))
    figure.savefig(to, dpi=110)


def write_windows(export: Path, to: Path, window: int = WINDOW, step: int = STEP) -> None:
    """Write the mean reward of each window of rounds, over nodes and seeds, a column for each setting."""
    from pyarrow import parquet

    table = parquet.read_table(export / TABLE, columns=["setting", "round", "reward"])
    # Without threads, groups come in the order of their first rows, so rounds ascend.
    means = table.group_by(["setting", "round"], use_threads=False).aggregate([("reward", "mean")])
    curves: dict[str, list[float]] = {}
    for row in means.to_pylist():
        if row["round"]:
            curves.setdefault(row["setting"], []).append(row["reward_mean"])
    with to.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["round", *curves])
        rows.writerows(
            [last, *(f"{fmean(curve[last - window : last]):.3f}" for curve in curves.values())]
            for last in range(window, min(map(len, curves.values())) + 1, step)
        )


def batch_words(setting: str) -> str:
    """Describe a column of long.csv: "4/4" becomes "4 local + 4 external, paper's weights"."""
    shares, _, weights = setting.partition(" ")
    own, others = shares.split("/")
    if others == "0":
        return f"{own} own, alone"
    return f"{own} local + {others} external, {weights or 'paper’s'} weights"


def figure_3(to: Path, _scratch: Path) -> None:
    """Draw the curves of swarm and solo nodes, with none, a fifth and half of the nodes absent."""
    rows = list(csv.DictReader((DATA / "figure-3.csv").open(encoding="utf-8")))
    shown = []
    for away, title, verdict, p, nodes in AWAY:
        found: dict[str, object] = {
            "model": title,
            "fewest_peers": 6,
            "anytime": {"verdict": verdict, "p": p},
        }
        for arm in ("swarm", "solo"):
            mine = [row for row in rows if (row["away"], row["arm"]) == (away, arm)]
            found[arm] = {"peers": [nodes] * len(mine)} | {
                name: [float(row[name]) for row in mine] for name in ("round", "reward", "low", "high")
            }
        shown.append(found)
    figures.comparison_figure(shown).savefig(to, dpi=120)


def curves(
    rows: Sequence[Mapping[str, str]], setting: str, measure: str, nodes: Iterable[int], window: int
) -> Iterator[list[float]]:
    """Yield each seed's means over `nodes` and the last `window` rounds, from round `window` on."""
    for seed in sorted({row["seed"] for row in rows if row["setting"] == setting}):
        curve = [
            fmean(float(row[f"{measure}_{node}"]) for node in nodes)
            for row in rows
            if (row["setting"], row["seed"]) == (setting, seed)
        ]
        yield [fmean(curve[last - window : last]) for last in range(window, len(curve) + 1)]


def real(to: Path, _scratch: Path) -> None:
    """Draw the rewards of SmolLM2-135M by round, a thin line for each seed, and its held-out results."""
    rows = list(csv.DictReader((DATA / "real.csv").open(encoding="utf-8")))
    figure = Figure(figsize=(10, 4), layout="constrained")
    rewards, held_out = figure.subplots(1, 2, width_ratios=(2, 1))
    found = list(csv.DictReader((DATA / "real-held-out.csv").open(encoding="utf-8")))
    for at, (setting, words, colour) in enumerate(REAL):
        for curve in curves(rows, setting, "reward", range(4), REAL_WINDOW):
            rewards.plot(range(REAL_WINDOW, REAL_WINDOW + len(curve)), curve, color=colour)
        rewards.plot([], [], color=colour, label=words)
        for place, measure in enumerate(("pass@1", "pass@4")):
            before, after = (
                fmean(
                    float(row[measure]) for row in found if (row["setting"], row["round"]) == (setting, when)
                )
                for when in ("0", "120")
            )
            held_out.bar(place + BAR * at, after, 0.95 * BAR, color=colour)
            held_out.bar(place + BAR * at, before, 0.95 * BAR, color="white", alpha=0.6)
            held_out.text(place + BAR * at, after + 0.01, f"{after:.2f}", ha="center", fontsize=9)
    rewards.set(xlabel="training round of each node", ylabel="mean reward of own answers", ylim=(0, 0.42))
    rewards.set_title(f"Each point: {REAL_WINDOW} rounds, four nodes; a line a seed", fontsize=10)
    rewards.legend(frameon=False, loc="lower right")
    held_out.set(xticks=(0.4 - BAR / 2, 1.4 - BAR / 2), xticklabels=("pass@1", "pass@4"), ylim=(0, 0.55))
    held_out.set_title("Held-out questions; pale: before", fontsize=10)
    for axes in (rewards, held_out):
        axes.grid(alpha=0.2, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=120)


def tool(to: Path, _scratch: Path) -> None:
    """Draw how the use of a tool spreads from one node to three nodes, a line a seed."""
    rows = list(csv.DictReader((DATA / "tool-spreads.csv").open(encoding="utf-8")))
    figure, panels = figures.canvas(10, 3.4, columns=2, sharey=True)
    panels[0].set_title("Share of answers that the environment replied to", fontsize=10)
    panels[1].set_title(f"Mean reward; each point: {TOOL_WINDOW} rounds", fontsize=10)
    for (setting, nodes, words, colour), (panel, measure, window) in product(
        TOOL, zip(panels, ("in_form", "reward"), (1, TOOL_WINDOW), strict=True)
    ):
        for curve in curves(rows, setting, measure, nodes, window):
            panel.plot(range(window, window + len(curve)), curve, color=colour)
        panel.plot([], [], color=colour, label=words)
        panel.set(xlabel="training round of each node", ylim=(-0.02, 1.02))
    panels[1].legend(frameon=False, loc="upper left")
    figure.savefig(to, dpi=110)


DRAW = {draw.__name__.replace("_", "-"): draw for draw in (pages, long, oscillation, figure_3, real, tool)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", choices=DRAW)
    parser.add_argument("to", type=Path)
    parser.add_argument("--export", type=Path, help="for `long`: a folder written by `swarmd lab export`")
    given = parser.parse_args()
    if given.export:
        write_windows(given.export, DATA / "long.csv")
    with tempfile.TemporaryDirectory() as scratch:
        DRAW[given.picture](given.to, Path(scratch))


if __name__ == "__main__":
    main()
