"""The report of an experiment: a table, figures, and one HTML page that asks nothing of the network."""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from shlex import quote
from statistics import fmean
from textwrap import fill
from typing import Any

from swarmd.config.config import NodeConfig
from swarmd.lab.demo.figures import COLOURS, canvas, comparison_figure, moving_mean
from swarmd.lab.experiment import Hostile
from swarmd.lab.results import BadResults, Results, Run, judged
from swarmd.lab.statistics import Column, SeedInterval, baseline, columns, gain, interval, mean_there

# Paul Tol's "muted" qualitative scheme, for experiments of more settings than the first eight colours tell
# apart.
MORE_COLOURS = ("#332288", "#cc6677", "#117733", "#ddcc77", "#88ccee", "#882255", "#44aa99", "#999933")
# Intervals of each line of the reward figure.
INTERVALS = 8
# A moving mean is over this share of the rounds; the paper's is over 100 of 2,000.
MEANS_PER_RUN = 10


HEADS = (
    "setting",
    "seeds",
    "cumulative reward",
    "over baseline, %",
    "last tenth",
    "reward per 1,000 completions",
    "mixed groups (m)",
    "useful groups (predicted)",
    "external",
    "gated, %",
    "roughness",
    "pass@1",
    "pass@8",
    "CPU s",
)


def table(results: Results) -> Sequence[Sequence[str]]:
    """Return the table's heads and a row of text for each setting."""
    found = columns(results)
    rows = []
    for column in found:
        other = baseline(results, column, found)
        over = gain(column, other) if other is not None and other is not column else None
        useful, predicted = column.over_seeds("useful"), column.over_seeds("predicted")
        rows.append(
            (
                column.name,
                str(len(column.runs)),
                shown(column.over_seeds("cumulative"), 1),
                shown(over, 1, signed=True) if over else "–",
                shown(column.over_seeds("late"), 3),
                shown(column.over_seeds("per_thousand"), 2),
                f"{column.over_seeds('mixed').mean:.2f}",
                f"{useful.mean:.2f} ({predicted.mean:.2f})",
                f"{column.over_seeds('external').mean:.2f}",
                f"{100 * column.over_seeds('gated').mean:.1f}",
                shown(column.over_seeds("roughness"), 4),
                shown(column.pass_at(1), 3),
                shown(column.pass_at(8), 3),
                f"{column.over_seeds('cpu_seconds').mean:.0f}",
            )
        )
    return [HEADS, *rows]


def groups(results: Results) -> Sequence[Sequence[str]]:
    """Return heads and a row for each kind of node, for settings whose nodes differ; [] without such."""
    rows = []
    for column in columns(results):
        kinds: dict[str, list[int]] = {}
        for place, node in enumerate(results.experiment.setting(column.slug).nodes):
            kinds.setdefault(_kind(node), []).append(place)
        for kind, places in kinds.items() if len(kinds) > 1 else ():
            means = [mean_there([run.late_by_node[i] for i in places]) for run in column.runs.values()]
            late = interval([mean for mean in means if mean is not None])
            ends = interval(
                [
                    fmean(ones[i] for i in places)
                    for run in column.runs.values()
                    if (ones := run.pass_1_by_node)
                ]
            )
            rows.append((column.name, str(len(places)), kind, shown(late, 3), shown(ends, 3)))
    return [("setting", "nodes", "what they are", "last tenth", "pass@1"), *rows] if rows else []


def hostile(results: Results) -> Sequence[Sequence[str]]:
    """Return heads and a row for each setting with hostile peers; [] without such."""
    rows = []
    for column in columns(results):
        setting = results.experiment.setting(column.slug)
        if (peers := setting.hostile) != Hostile():
            taken = interval([100 * run.hostile for run in column.runs.values()])
            marked = interval([100 * run.marked for run in column.runs.values() if run.marked is not None])
            said = f"{peers.poisoners} poisoners, {peers.liars} liars, {len(setting.nodes)} honest"
            rows.append((column.name, said, shown(taken, 1), shown(marked, 2)))
    heads = ("setting", "hostile peers", "of external, hostile, %", "answers with the poison, %")
    return [heads, *rows] if rows else []


def _kind(node: NodeConfig) -> str:
    specialties = f", asks {', '.join(node.tasks.specialties)}" if node.tasks.specialties else ""
    return (
        node.model.name
        + (", frozen" if node.round.train == "off" else "")
        + f", {node.round.local}/{node.round.external}"
        + specialties
    )


def shown(of: SeedInterval | None, digits: int, *, signed: bool = False) -> str:
    if of is None or math.isnan(of.mean):
        return "–"
    sign = "+" if signed else ""
    return f"{of.mean:{sign}.{digits}f}" + (f" ± {of.half:.{digits}f}" if of.half is not None else "")


def markdown(results: Results) -> str:
    parts = []
    for heads, *rows in filter(None, (table(results), groups(results), hostile(results))):
        lines = [
            "| " + " | ".join(heads) + " |",
            "|" + "---|" * len(heads),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def facts(results: Results) -> str:
    """Format the tables for a terminal: each setting with its figures below it, one a line."""
    lines = []
    for heads, *rows in filter(None, (table(results), groups(results), hostile(results))):
        width = max(map(len, heads))
        for row in rows:
            figures = zip(heads[1:], row[1:], strict=True)
            lines += [row[0], *(f"  {head:<{width}}  {cell}" for head, cell in figures), ""]
    return "\n".join(lines)


def pictures_of(results: Results) -> Mapping[str, bytes]:
    """Draw the report's figures as PNG. Raises NoMatplotlib."""
    found = columns(results)
    figures = {"reward": _reward_figure(found), "nodes": _node_figure(results, found)}
    if comparisons := judged(results):
        figures["judge"] = comparison_figure(comparisons)
    return {name: _png(figure) for name, figure in figures.items()}


def write_report(results: Results, pictures: Mapping[str, bytes]) -> Path:
    """Write report.html and its figures into the results folder. Raises BadResults."""
    page = results.folder / "report.html"
    try:
        for name, content in pictures.items():
            (results.folder / f"{name}.png").write_bytes(content)
        page.write_text(_html(results, pictures), encoding="utf-8")
    except OSError as error:
        again = f"The runs stay. Mend that, then: swarmd lab report {quote(str(results.folder))}"
        raise BadResults(f"{page}: cannot be written: {error.strerror or error}. {again}") from error
    return page


def _draw(axes: Any, column: Column, values: Sequence[float], **style: Any) -> list[float]:
    """Draw a moving mean, and return it. One round alone is a point, as it has no line."""
    mean = moving_mean(values, _window(column))
    rounds = range(_window(column), _window(column) + len(mean))
    axes.plot(rounds, mean, marker="." if len(mean) == 1 else "", **style)
    return mean


def _reward_figure(found: Sequence[Column]) -> Any:
    """Draw SAPO's Figure 2: average reward by setting.

    A moving mean over nodes and seeds, with the seeds' 95 % interval at a few rounds.
    """
    axes = canvas(9, 5).subplots()
    for place, (column, colour) in enumerate(zip(found, cycle([*COLOURS, *MORE_COLOURS]), strict=False)):
        # Between two $ matplotlib would set mathematics.
        name = column.name.replace("$", r"\$")
        mean = _draw(axes, column, column.curve(), color=colour, linewidth=2, label=name)
        seeds = [moving_mean(run.curve, _window(column)) for run in column.runs.values()]
        step = max(1, len(mean) // INTERVALS)
        first = step * (place + 1) // (len(found) + 1)  # so that each setting's bars stand beside the others'
        for at in range(first, len(mean) if len(seeds) > 1 else 0, step):
            half = interval([seed[at] for seed in seeds]).half
            # A mean reward is between 0 and 1, whatever few seeds leave open.
            ends = [[min(half, mean[at])], [min(half, 1 - mean[at])]] if half is not None else None
            axes.errorbar(_window(column) + at, mean[at], yerr=ends, color=colour, capsize=3, linewidth=1.2)
    axes.set(
        xlabel="round",
        ylabel="mean reward",
        title="Mean over nodes and seeds; bars: 95 % interval over seeds",
    )
    # Runs that were cut off may have nothing to show.
    if labels := axes.get_legend_handles_labels()[1]:
        # The legend has about 11 letters an inch, and is no wider than the figure.
        across = max(1, int(11 * axes.figure.get_figwidth() / (max(map(len, labels)) + 6)))
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=min(5, across))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return axes.figure


def _node_figure(results: Results, found: Sequence[Column]) -> Any:
    """Draw SAPO's Figure 1: a panel for each setting, a line for each node, of the first finished seed."""
    across = min(4, len(found))
    down = math.ceil(len(found) / across)
    figure = canvas(3.2 * across, 2.6 * down)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    for column, panel in zip(found, panels, strict=False):
        seed = min(column.runs)
        lines = [line for line in results.lines(Run(column.slug, seed)) if line["round"]]
        for node in range(len(lines[0]["reward"])):
            _draw(panel, column, _held([line["reward"][node] for line in lines]), linewidth=1)
        # A panel is as wide as 36 letters.
        panel.set_title(fill(f"{column.name} (seed {seed})", 36), fontsize=10, parse_math=False)
        panel.grid(alpha=0.2)
        # Below the last of a column may be none.
        panel.tick_params(labelbottom=True)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    figure.supxlabel("round", fontsize=10)
    figure.supylabel("reward of each node", fontsize=10)
    return figure


def _held(rewards: Sequence[float | None]) -> list[float]:
    """Fill the rounds in which a node was away with its last reward; before the first it has none."""
    held, last = [], math.nan
    for reward in rewards:
        last = last if reward is None else reward
        held.append(last)
    return held


def _window(column: Column) -> int:
    return max(1, len(column.curve()) // MEANS_PER_RUN)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


_STYLE = """
body {
  font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: #111; background: #fff
}
.scroll { overflow-x: auto; margin: 1rem 0 } .scroll:focus-visible { outline: 3px solid #0b5cbd }
table { border-collapse: collapse; font-size: 14px }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .8rem; text-align: right; white-space: nowrap }
thead th { white-space: normal; vertical-align: bottom; min-width: 6rem } th { font-weight: 600 }
th:first-child { text-align: left }
img { max-width: 100%; height: auto } figure { margin: 2rem 0 }
dt { font-weight: 600 } dd { margin: 0 0 .6rem }
"""
_CAPTIONS = {
    "reward": "Reward by setting, moving mean over a tenth of the rounds (SAPO, Figure 2).",
    "nodes": "Every node of one seed (SAPO, Figure 1).",
    "judge": (
        "Cumulative reward by the judge, swarm and solo, over normalised rounds (SAPO, Figure 3); bands: 95 %"
        " of the mean."
    ),
}


def _html(results: Results, pictures: Mapping[str, bytes]) -> str:
    experiment = results.experiment
    missing = len(results.missing)
    facts = {
        "Question": experiment.question,
        "Expected before it was run": experiment.expects,
        "Played": (
            f"{len(results.runs) - missing} of {len(results.runs)} runs: {len(experiment.settings)} settings,"
            f" {experiment.seeds} seed{'s' * (experiment.seeds != 1)}, {experiment.rounds} rounds,"
            f" {' or '.join(map(str, sorted({len(setting.nodes) for setting in experiment.settings})))} nodes"
        ),
        "Versions": ", ".join(f"{name} {value}" for name, value in results.versions.items()),
    }
    described = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items() if value
    )
    tables = "".join(map(_html_table, filter(None, (table(results), groups(results), hostile(results)))))
    fewest = min((len(column.runs) for column in columns(results)), default=0)
    many = f"{fewest} seed{'s' * (fewest != 1)}"
    few = f"<p><strong>{many}: this decides nothing. Play five or more.</strong></p>"
    shown_figures = "".join(
        f'<figure><img alt="{html.escape(_CAPTIONS[name])}"'
        f' src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        f"<figcaption>{html.escape(_CAPTIONS[name])}</figcaption></figure>"
        for name, content in pictures.items()
    )
    name = html.escape(experiment.name)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name}</h1><dl>{described}</dl>{few * (fewest < 3)}{tables}<p>Means"
        " over seeds ± half of the 95 % interval (Student's t). Cumulative reward: mean reward of a node's"
        " own completions, added up over nodes and rounds. m: share of own rollouts that are informative."
        " Roughness: standard deviation around the trend, over windows of equally many"
        f" questions.</p>{shown_figures}</html>\n"
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    """Write a column for each row: there are fewer settings than figures, and a page is higher than wide."""
    (corner, *settings), *figures = zip(*rows, strict=True)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in (corner, *settings))
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in figures
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(figures[0][0])}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
