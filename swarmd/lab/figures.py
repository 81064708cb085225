"""Figures drawn with matplotlib (the `research` extra), without a display.

SAPO's Figure 3 is drawn from a judge's /v1/comparison (docs/judge-protocol.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from swarmd.errors import ConfigError, command_for

TOGETHER, ALONE = "#0072b2", "#d55e00"
# The palette of Okabe and Ito is distinguishable for colour-blind readers. Then Paul Tol's "muted" scheme,
# for figures with more lines.
COLOURS = (
    *(TOGETHER, ALONE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000"),
    *("#332288", "#cc6677", "#117733", "#ddcc77", "#88ccee", "#882255", "#44aa99", "#999933"),
)


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any) -> tuple[Any, Any]:
    """Return a figure and its empty panels, row by row. Raises ConfigError without matplotlib.

    width, height: in inches. layout: arguments of `Figure.subplots`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"Figures need matplotlib. Run `{command_for('research')}`.") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **layout).flatten()
    for panel in panels:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def comparison_figure(comparisons: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a panel for each comparison: cumulative rewards over rounds with 95 % bands, and the verdict.

    All panels share one scale.
    """
    figure, panels = canvas(
        4.2 * len(comparisons) + 0.6, 4.4, columns=len(comparisons), sharex=True, sharey=True
    )
    handles: dict[str, Any] = {}
    for panel, found in zip(panels, comparisons, strict=True):
        _draw_comparison(panel, found)
        handles |= {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        loc="outside lower center",
        ncols=min(3, 1 + len(panels)),
    )
    panels[0].set_ylabel("right answers, added up over rounds")
    return figure


def _draw_comparison(panel: Any, found: Mapping[str, Any]) -> None:
    for arm, words, colour in (("swarm", "nodes that share", TOGETHER), ("solo", "nodes alone", ALONE)):
        curve = found[arm]
        most = max(curve["peers"], default=0)
        rows = zip(*(curve[key] for key in ("round", "reward", "low", "high", "peers")), strict=True)
        # The mean of a few peers jumps when one of them leaves.
        points = [point for *point, peers in rows if peers >= min(most, found["fewest_peers"])]
        panel.plot(
            [x for x, *_ in points], [mean for _, mean, *_ in points], color=colour, linewidth=2, label=words
        )
        band = [(x, low, high) for x, _, low, high in points if low is not None]
        if band:
            panel.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0)
    verdict = found["anytime"]
    words = {"better": "sharing is better", "worse": "sharing is worse"}.get(
        verdict["verdict"], "not decided yet"
    )
    panel.set_title(f"{found['model']}\n{words} (p = {verdict['p']:.2g})", fontsize=10)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("training rounds of a node")
