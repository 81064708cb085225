"""Charts as inline SVG. Pure; all text is escaped, colours come from the page's classes."""

from collections.abc import Sequence

from markupsafe import Markup, escape

from judge.figures.intervals import Interval

Points = Sequence[tuple[float, float]]
Segment = tuple[int, int, float, Interval]  # first and last question, share of right answers, its interval
Banded = Sequence[tuple[float, float, float, float]]  # x, y, and the lower and upper end of the band
Arm = tuple[str, Banded]  # the arm's name; its mean and band over rounds

# The margins of a chart; LEFT has room for "100 %" in the largest font of the style sheet.
LEFT, FOOT, TOP = 80, 34, 14


def sparkline(segments: Sequence[Segment], width: int = 120, height: int = 28) -> Markup:
    """Draw the share of right answers of each segment as a small line, on the scale 0..1."""
    if len(segments) < 2:
        return Markup("")
    middles = [((first + last) / 2, share) for first, last, share, _ in segments]
    line = _line(middles, segments[-1][1], 1.0, width, height - 4)
    return _drawn(
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline class="line c0" transform="translate(0 2)" points="{line}"/></svg>'
    )


def whisker(share: float, interval: Interval, width: int = 120) -> Markup:
    """Draw a share and its interval on the scale 0..1, with marks at 0, a half and 1."""
    low, high, dot = (round(3 + value * (width - 6), 1) for value in (interval.low, interval.high, share))
    marks = f"M3 7H{width - 3}M3 4v6M{width / 2:g} 4v6M{width - 3} 4v6"
    return _drawn(
        f'<svg class="whisker" viewBox="0 0 {width} 14" aria-hidden="true"><path d="{marks}"/><line'
        f' class="range" x1="{low}" x2="{high}" y1="7" y2="7"/><circle class="dot" cx="{dot}" cy="7"'
        ' r="3.6"/></svg>'
    )


def whisker_scale(width: int = 120) -> Markup:
    """Draw the scale of the whiskers that follow below it."""
    return _drawn(
        f'<svg class="whisker" viewBox="0 0 {width} 14" aria-hidden="true"><text x="0" y="11">0</text>'
        f'<text x="{width / 2:g}" y="11" text-anchor="middle">50 %</text>'
        f'<text x="{width}" y="11" text-anchor="end">100 %</text></svg>'
    )


def pass_chart(segments: Sequence[Segment], width: int = 720, height: int = 220) -> Markup:
    """Draw the share of right answers of each segment, with its interval as a band."""
    inner = width - LEFT - 8, height - FOOT - TOP
    top_x = float(segments[-1][1])
    points = [((first + last) / 2, share, i.low, i.high) for first, last, share, i in segments]
    dots = "".join(
        f'<circle class="dot" cx="{x / top_x * inner[0]:.1f}" cy="{inner[1] * (1 - share):.1f}" r="3">'
        f"<title>questions {first} to {last}: {100 * share:.0f} %</title></circle>"
        for (x, *_), (first, last, share, _) in zip(points, segments, strict=True)
    )
    levels = [(part / 4, f"{100 * part / 4:.0f} %") for part in range(5)]
    scale = _scale(levels, [(value / top_x, figure(value)) for value in ticks(top_x)], *inner)
    drawn = scale + _banded(points, 0, top_x, 1.0, *inner) + dots
    return _framed("Share of right answers over this node's questions", drawn, width, height)


def compare_chart(arms: Sequence[Arm], width: int = 720, height: int = 260) -> Markup:
    """Draw mean curves with their bands, each in a different colour."""
    inner = width - LEFT - 8, height - FOOT - TOP
    top_x = max(1.0, *(x for _, points in arms for x, *_ in points))
    top_y = max(1.0, *(high for _, points in arms for *_, high in points))
    drawn = "".join(_banded(points, colour, top_x, top_y, *inner) for colour, (_, points) in enumerate(arms))
    levels, marks = ([(value / top, figure(value)) for value in ticks(top)] for top in (top_y, top_x))
    label = (
        f"Right answers added up over training rounds, means of {' and '.join(name for name, _ in arms)},"
        " with 95 % bands"
    )
    return _framed(label, _scale(levels, marks, *inner) + drawn, width, height)


def ticks(top: float, wanted: int = 5) -> list[float]:
    """Return round numbers from 0 to at most `top`."""
    step = next(s * 10**e for e in range(12) for s in (1, 2, 5) if top / (s * 10**e) <= wanted)
    return [step * i for i in range(int(top / step) + 1)]


def figure(value: float) -> str:
    """Format a number briefly: 25000 is 25k."""
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def _framed(label: str, inside: str, width: int, height: int) -> Markup:
    return _drawn(
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f'<g transform="translate({LEFT} {TOP})">{inside}</g></svg>'
    )


def _scale(
    levels: Sequence[tuple[float, str]], marks: Sequence[tuple[float, str]], width: float, height: float
) -> str:
    """Draw horizontal lines with labels at the left, and labels below. Positions run from 0 to 1."""
    across = "".join(
        f'<line class="axis" x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/><text x="-6" y="{y + 4:.1f}"'
        f' text-anchor="end">{name}</text>'
        for part, name in levels
        for y in [height * (1 - part)]
    )
    return across + "".join(
        f'<text x="{width * part:.1f}" y="{height + 24}"'
        f' text-anchor="{"end" if part > 0.95 else "middle"}">{name}</text>'
        for part, name in marks
    )


def _banded(points: Banded, colour: int, top_x: float, top_y: float, width: float, height: float) -> str:
    """Draw a line and the band around it, which does not go below 0."""
    highs, lows = [(x, high) for x, _, _, high in points], [(x, max(0.0, low)) for x, _, low, _ in points]
    band = _line([*highs, *reversed(lows)], top_x, top_y, width, height)
    line = _line([(x, mean) for x, mean, *_ in points], top_x, top_y, width, height)
    return (
        f'<polygon class="band c{colour}" points="{band}"/><polyline class="line c{colour}" points="{line}"/>'
    )


def _line(points: Points, top_x: float, top_y: float, width: float, height: float) -> str:
    """Return the points of an SVG line; (0, 0) is at the bottom left, (top_x, top_y) at the top right."""
    return " ".join(f"{x / top_x * width:.1f},{height - y / top_y * height:.1f}" for x, y in points)


def _drawn(svg: str) -> Markup:
    """Mark an SVG as safe: every text that came from outside was escaped."""
    return Markup(svg)  # noqa: S704
