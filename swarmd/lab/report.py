"""The report of an experiment: a table, figures, and one HTML page that loads nothing from the network."""

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
from swarmd.lab.experiment import Hostile
from swarmd.lab.figures import COLOURS, canvas, comparison_figure
from swarmd.lab.results import BadResults, Results, judged
from swarmd.lab.statistics import Column, SeedInterval, columns, interval, mean_there, over_baseline

# Rounds of a moving mean, as in the paper.
WINDOW_ROUNDS = 100


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
    "entropy, last tenth",
    "pass@1 before",
    "pass@1",
    "pass@8",
    "CPU s",
)


def table(results: Results) -> Sequence[Sequence[str]]:
    """Return the table's headings and a row of text for each setting."""
    found = columns(results)
    rows = []
    for column in found:
        useful, predicted = column.over_seeds("useful"), column.over_seeds("predicted")
        rows.append(
            (
                column.name,
                str(len(column.runs)),
                shown(column.over_seeds("cumulative"), 1),
                shown(over_baseline(results, column, found), 1, signed=True),
                shown(column.over_seeds("late"), 3),
                shown(column.over_seeds("per_thousand"), 2),
                f"{column.over_seeds('mixed').mean:.2f}",
                f"{useful.mean:.2f} ({predicted.mean:.2f})",
                f"{column.over_seeds('external').mean:.2f}",
                f"{100 * column.over_seeds('gated').mean:.1f}",
                shown(column.over_seeds("roughness"), 4),
                shown(column.over_seeds("entropy"), 3),
                shown(column.over_seeds("before"), 3),
                shown(column.pass_at(1), 3),
                shown(column.pass_at(8), 3),
                f"{column.over_seeds('cpu_seconds').mean:.0f}",
            )
        )
    return [HEADS, *rows]


def groups(results: Results) -> Sequence[Sequence[str]]:
    """Return headings and a row for each kind of node, for settings whose nodes differ; [] without such."""
    rows = []
    for column in columns(results):
        kinds: dict[str, list[int]] = {}
        for place, node in enumerate(results.experiment.setting(column.slug).nodes):
            kinds.setdefault(_kind(node), []).append(place)
        for kind, places in kinds.items() if len(kinds) > 1 else ():
            late, form, ends = (
                interval([mean for of in found if (mean := mean_there([of[i] for i in places])) is not None])
                for found in (
                    [run.late_by_node for run in column.runs.values()],
                    [run.form_by_node for run in column.runs.values()],
                    [run.pass_1_by_node for run in column.runs.values() if run.pass_1_by_node],
                )
            )
            rows.append((column.name, str(len(places)), kind, shown(late, 3), shown(form, 3), shown(ends, 3)))
    return (
        [("setting", "nodes", "what they are", "last tenth", "in the form", "pass@1"), *rows] if rows else []
    )


def hostile(results: Results) -> Sequence[Sequence[str]]:
    """Return headings and a row for each setting with hostile peers; [] without such."""
    rows = []
    for column in columns(results):
        setting = results.experiment.setting(column.slug)
        if (peers := setting.hostile) != Hostile():
            taken = interval([100 * run.hostile for run in column.runs.values()])
            marked = interval([100 * run.marked for run in column.runs.values() if run.marked is not None])
            kinds = (*peers, ("honest", len(setting.nodes)))
            said = ", ".join(f"{count} {kind}" for kind, count in kinds if count)
            rows.append((column.name, said, shown(taken, 1), shown(marked, 2)))
    return (
        [("setting", "hostile peers", "of external, hostile, %", "answers with the poison, %"), *rows]
        if rows
        else []
    )


def _kind(node: NodeConfig) -> str:
    specialties = f", asks {', '.join(node.tasks.specialties)}" if node.tasks.specialties else ""
    return (
        node.model.name
        + ("" if node.model.examples in ("auto", "off") else ", with examples")
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
    """Format the tables for a terminal: each setting, followed by its figures, one a line."""
    lines = []
    for heads, *rows in filter(None, (table(results), groups(results), hostile(results))):
        width = max(map(len, heads))
        for row in rows:
            figures = zip(heads[1:], row[1:], strict=True)
            lines += [row[0], *(f"  {head:<{width}}  {cell}" for head, cell in figures), ""]
    return "\n".join(lines)


def pictures_of(results: Results) -> Mapping[str, bytes]:
    """Draw the report's figures as PNG. Raises ConfigError without matplotlib."""
    found = columns(results)
    figures = {"reward": _reward_figure(found), "nodes": _node_figure(found)}
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
        again = f"The runs stay. Fix that, then: swarmd lab report {quote(str(results.folder))}"
        raise BadResults(f"{page}: cannot be written: {error.strerror or error}. {again}") from error
    return page


def _reward_figure(found: Sequence[Column]) -> Any:
    """Draw SAPO's Figure 2: the average agent's reward by setting; the band covers all agents.

    A curve of a single round is drawn as a point.
    """
    figure, (axes,) = canvas(9, 5)
    for column, colour in zip(found, cycle(COLOURS), strict=False):
        agents = [trailing(node) for run in column.runs.values() for node in zip(*run.rewards, strict=True)]
        there = [[mean for mean in each if mean is not None] for each in zip(*agents, strict=True)]
        rounds = [number for number, each in enumerate(there, 1) if each]
        # A curve of one round is drawn as a point.
        there = list(filter(None, there))
        # matplotlib would render text between two $ as mathematics.
        axes.plot(
            rounds,
            list(map(fmean, there)),
            color=colour,
            linewidth=2,
            label=column.name.replace("$", r"\$"),
            marker="." * (len(rounds) == 1),
        )
        axes.fill_between(
            rounds, list(map(min, there)), list(map(max, there)), color=colour, alpha=0.12, linewidth=0
        )
    axes.set(
        xlabel="round",
        ylabel="mean reward",
        title=f"Average agent, over its last {WINDOW_ROUNDS} rounds; band: least to greatest agent",
    )
    # Interrupted runs may have nothing to show.
    if labels := axes.get_legend_handles_labels()[1]:
        # The legend fits about 11 letters per inch, and must not be wider than the figure.
        across = max(1, int(11 * figure.get_figwidth() / (max(map(len, labels)) + 6)))
        figure.legend(frameon=False, loc="outside lower center", ncols=min(5, across))
    return figure


def _node_figure(found: Sequence[Column]) -> Any:
    """Draw SAPO's Figure 1: a panel for each setting, a line for each agent, a colour for each seed."""
    across = min(4, len(found))
    down = math.ceil(len(found) / across)
    figure, panels = canvas(3.2 * across, 2.6 * down, down, across, sharex=True, sharey=True)
    seeds = sorted({seed for column in found for seed in column.runs})
    colours = dict(zip(seeds, cycle(COLOURS), strict=False))
    for column, panel in zip(found, panels, strict=False):
        for seed, run in column.runs.items():
            for node in zip(*run.rewards, strict=True):
                means = [math.nan if mean is None else mean for mean in trailing(node)]
                panel.plot(
                    range(1, len(means) + 1),
                    means,
                    color=colours[seed],
                    linewidth=0.8,
                    alpha=0.8,
                    marker="." * (len(means) == 1),
                )
        # 36 letters fit across a panel.
        panel.set_title(fill(column.name, 36), fontsize=10, parse_math=False)
        # The panel may be the lowest of its column, so it needs its labels.
        panel.tick_params(labelbottom=True)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    for seed, colour in colours.items():
        panels[0].plot([], [], color=colour, label=f"seed {seed}")
    figure.legend(frameon=False, loc="outside upper center", ncols=min(5, 3 * across), fontsize=9)
    figure.supxlabel("round", fontsize=10)
    figure.supylabel("reward of each node", fontsize=10)
    return figure


def trailing(rewards: Sequence[float | None]) -> list[float | None]:
    """Return for each round the mean over the last WINDOW_ROUNDS, or over all so far if they are fewer.

    Rounds in which the node was away do not count.
    """
    return [mean_there(rewards[max(0, end - WINDOW_ROUNDS) : end]) for end in range(1, len(rewards) + 1)]


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
    "reward": (
        f"Average agent's reward over its last {WINDOW_ROUNDS} rounds, by setting; bands: least to greatest"
        " agent (SAPO, Figure 2)."
    ),
    "nodes": "Every node, a colour for each seed (SAPO, Figure 1).",
    "judge": (
        "Cumulative reward by the judge, swarm and solo, over normalised rounds (SAPO, Figure 3); bands: 95 %"
        " of the mean."
    ),
}


def _html(results: Results, pictures: Mapping[str, bytes]) -> str:
    experiment = results.experiment
    facts = {
        "Question": experiment.question,
        "Expected before it was run": experiment.expects,
        "Played": (
            f"{len(results.runs) - len(results.missing)} of {len(results.runs)} runs:"
            f" {len(experiment.settings)} settings, {experiment.seeds} seed{'s' * (experiment.seeds != 1)},"
            f" {experiment.rounds} rounds,"
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
    """Write a column for each row: there are fewer settings than figures, and a page is taller than wide."""
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
