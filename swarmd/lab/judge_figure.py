"""SAPO's Figure 3, drawn from a judge's /v1/comparison (docs/judge-protocol.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

from swarmd.lab.demo.figures import ALONE, TOGETHER

ARMS = (("swarm", "nodes that share", TOGETHER), ("solo", "nodes alone", ALONE))


def draw(figure: Any, comparisons: Sequence[Mapping[str, Any]]) -> None:
    """Draw a panel for each comparison: cumulative rewards over rounds with 95 % bands, and the verdict.

    All panels have one scale. The dashed line is where the difference begins to stay significant (Holm).
    """
    panels = figure.subplots(1, len(comparisons), sharex=True, sharey=True, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    for panel, found in zip(panels, comparisons, strict=True):
        _draw(panel, found)
        handles |= {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        loc="outside lower center",
        ncols=min(3, 1 + len(panels)),
    )
    panels[0].set_ylabel("right answers, added up over rounds")


def _draw(panel: Any, found: Mapping[str, Any]) -> None:
    for arm, words, colour in ARMS:
        curve = found[arm]
        most = max(curve["peers"], default=0)
        rows = zip(*(curve[key] for key in ("round", "reward", "low", "high", "peers")), strict=True)
        # The mean of a few leaps as they leave
        points = [point for *point, peers in rows if peers >= min(most, found["fewest_peers"])]
        panel.plot(
            [x for x, *_ in points], [mean for _, mean, *_ in points], color=colour, linewidth=2, label=words
        )
        band = [(x, low, high) for x, _, low, high in points if low is not None]
        if band:
            panel.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0)
    if (begins := found["significant_from"]["holm"]) is not None:
        panel.axvline(begins, color="0.3", linewidth=1, linestyle="--", label="significant from here on")
    verdict = found["anytime"]
    words = {"better": "sharing is better", "worse": "sharing is worse"}.get(
        verdict["verdict"], "not decided yet"
    )
    panel.set_title(f"{found['model']}\n{words} (p = {verdict['p']:.2g})", fontsize=10)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("training rounds of a node")
    panel.grid(alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)
