"""Charts as inline SVG. Pure; all text is escaped, colours come from the page's classes."""

from collections.abc import Sequence
from html import escape

from judge.statistics import Interval

Points = Sequence[tuple[float, float]]


def sparkline(points: Points, width: int = 120, height: int = 28) -> str:
    """One rising curve on its own scale."""
    if not points:
        return ""
    top_x, top_y = points[-1][0], max(1.0, points[-1][1])
    line = _line(points, top_x, top_y, width, height - 4)
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline class="line c0" transform="translate(0 2)" points="{line}"/></svg>'
    )


def whisker(share: float, interval: Interval, width: int = 120) -> str:
    """A share and its interval on the scale 0..1."""
    low, high, dot = (round(3 + value * (width - 6), 1) for value in (interval.low, interval.high, share))
    return (
        f'<svg class="whisker" viewBox="0 0 {width} 14" aria-hidden="true"><line class="axis" x1="3" x2="{width - 3}" y1="7" y2="7"/>'
        f'<line class="range" x1="{low}" x2="{high}" y1="7" y2="7"/><circle class="dot" cx="{dot}" cy="7" r="3.6"/></svg>'
    )


def chart(curves: Sequence[tuple[str, Points]], width: int = 720, height: int = 220) -> str:
    """Several rising curves on one scale, each with its name at its end's height in the legend. At most as many as there are colours."""
    top_x = max((points[-1][0] for _, points in curves if points), default=0)
    if top_x < 2:
        return ""
    top_y = max(1.0, *(points[-1][1] for _, points in curves if points))
    left, foot = 44, 26
    inner_width, inner_height = width - left - 8, height - foot - 8
    lines = "".join(
        f'<polyline class="line c{colour}" points="{_line(points, top_x, top_y, inner_width, inner_height)}"/>'
        for colour, (_, points) in enumerate(curves)
        if points
    )
    labels = "".join(
        f'<line class="axis" x1="0" x2="{inner_width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        for value in _ticks(top_y)
        for y in [inner_height * (1 - value / top_y)]
    ) + "".join(
        f'<text x="{inner_width * value / top_x:.1f}" y="{inner_height + 18}" text-anchor="{"end" if value > top_x * 0.95 else "middle"}">'
        f"{value:g}</text>"
        for value in _ticks(top_x)
    )
    label = f"Cumulative reward over questions of {', '.join(name for name, _ in curves)}"
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f'<g transform="translate({left} 8)">{labels}{lines}</g></svg>'
    )


def _line(points: Points, top_x: float, top_y: float, width: float, height: float) -> str:
    """From nothing, to (`width`, 0) at the top."""
    points = [(0.0, 0.0), *points]
    return " ".join(f"{x / top_x * width:.1f},{height - y / top_y * height:.1f}" for x, y in points)


def _ticks(top: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to at most `top`."""
    step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if top / (s * 10**e) <= wanted)
    return [step * i for i in range(int(top / step) + 1)]
