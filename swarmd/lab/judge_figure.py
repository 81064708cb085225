"""SAPO's Figure 3, drawn from what a judge says of swarm and solo (its /v2/comparison; docs/judge-statistics.md)."""

from collections.abc import Mapping
from typing import Any

from swarmd.lab.demo.figures import COLOURS


def draw(panel: Any, found: Mapping[str, Any]) -> None:
    """Cumulative reward over normalised rounds with 95 % bands; a line where the difference begins to stay significant."""
    for arm, colour in zip(("swarm", "solo"), COLOURS, strict=False):
        curve = found[arm]
        most = max(curve["peers"], default=0)
        rows = zip(*(curve[key] for key in ("round", "reward", "low", "high", "peers")), strict=True)
        points = [point for *point, peers in rows if peers >= min(most, found["fewest_peers"])]  # the mean of a few leaps as they leave
        panel.plot([x for x, *_ in points], [mean for _, mean, *_ in points], color=colour, linewidth=2, label=f"{arm}, {most} nodes")
        band = [(x, low, high) for x, _, low, high in points if low is not None]
        if band:
            panel.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0)
    for (name, words), style in zip({"holm": "Holm", "benjamini_hochberg": "Benjamini-Hochberg"}.items(), ("-", ":"), strict=True):
        if (begins := found["significant_from"][name]) is not None:
            panel.axvline(begins, color="black", linewidth=0.9, linestyle=style, label=f"p < 0.05 from round {begins} ({words})")
    verdict = found["anytime"]
    panel.set_ylim(bottom=0)
    panel.set_title(f"{found['model']}\nat any look: {verdict['verdict']}, p = {verdict['p']:.2g}", fontsize=9)
    panel.legend(frameon=False, fontsize=8, loc="upper left")
    panel.grid(alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)
