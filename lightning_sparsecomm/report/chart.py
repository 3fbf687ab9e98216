"""Charts as SVG, which any browser draws without a script."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

COLORS = ("#2563eb", "#dc6803", "#16803c", "#9333ea", "#be123c", "#0e7490", "#854d0e", "#475569")

_WIDTH, _HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44

# Up to so many points of a line are drawn as dots.
_FEW = 40


class Line(NamedTuple):
    """A line in a chart.

    Attributes:
        name: Shown where the pointer rests on it.
        color: As in CSS.
        points: Pairs of x and y; those that cannot be drawn are left out.
    """

    name: str
    color: str
    points: Sequence[tuple[float | None, float | None]]


class Axis(NamedTuple):
    """An axis: what it shows, how a number on it reads, and whether it is logarithmic."""

    label: str
    text: Callable[[float], str]
    logarithmic: bool = False


def plain(value: float) -> str:
    """A number as short as it can be read."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def size(value: float) -> str:
    """Bytes in decimal units."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {unit}"
    return f"{value:.3g} B"


def chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """A chart with a title, as the HTML of a figure. Says so where there is nothing to draw."""
    drawn = [(line, _drawable(line.points, x, y)) for line in lines]
    every = [point for _, points in drawn for point in points]
    if not every:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>Nothing was recorded.</p></figure>"
    horizontal = _Scale(x, [point[0] for point in every], _LEFT, _WIDTH - _RIGHT)
    vertical = _Scale(y, [point[1] for point in every], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(horizontal, vertical)]
    for line, points in drawn:
        path = " ".join(f"{horizontal(a):.1f},{vertical(b):.1f}" for a, b in points)
        tip = f"<title>{escape(line.name)}</title>"
        parts.append(f'<polyline points="{path}" stroke="{line.color}">{tip}</polyline>')
        # Many dots would hide the line: they are there for the pointer alone.
        dot = 'r="2.5"' if len(points) <= _FEW else 'r="4" opacity="0"'
        parts += [
            f'<circle cx="{horizontal(a):.1f}" cy="{vertical(b):.1f}" {dot} fill="{line.color}">'
            f"<title>{escape(f'{line.name}: {x.text(a)}, {y.text(b)}')}</title></circle>"
            for a, b in points
        ]
    body = "".join(parts)
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def bar(pieces: Sequence[tuple[str, float, str]]) -> str:
    """A bar of pieces, each with a text, a share of the whole width in [0, 1], and a color."""
    drawn = "".join(
        f'<span style="width:{100 * max(share, 0):.2f}%;background:{color}" title="{escape(text)}"></span>'
        for text, share, color in pieces
    )
    return f'<div class="bar">{drawn}</div>'


class _Scale:
    """Numbers of an axis as places in the drawing."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self.axis = axis
        low, high = self._of(min(values)), self._of(max(values))
        if not axis.logarithmic and 0 < low < 0.5 * high:
            low = 0.0
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
            around = max(0.5, 1e-3 * abs(high))
            low, high = low - around, high + around
        self._low, self._high, self._begin, self._end = low, high, begin, end

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if not self.axis.logarithmic:
            return _round_numbers(self._low, self._high)
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        factors = (1, 2, 5) if self._high - self._low < 2.2 else (1,)
        found = [factor * 10.0**power for power in powers for factor in factors]
        inside = [each for each in found if self._low - 1e-9 <= math.log10(each) <= self._high + 1e-9]
        if len(inside) < 3:
            # Less than a decade: round numbers lie densely enough.
            return [each for each in _round_numbers(10**self._low, 10**self._high) if each > 0]
        return inside[:: max(1, len(inside) // 6)]

    def _of(self, value: float) -> float:
        return math.log10(value) if self.axis.logarithmic else value


def _round_numbers(low: float, high: float) -> list[float]:
    """About five round numbers in a range."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(horizontal: _Scale, vertical: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in vertical.ticks():
        at = vertical(tick)
        parts.append(f'<path d="M{_LEFT},{at:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{vertical.axis.text(tick)}</text>')
    for tick in horizontal.ticks():
        at = horizontal(tick)
        parts.append(f'<path d="M{at:.1f},{_TOP}V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{horizontal.axis.text(tick)}</text>')
    middle = (_LEFT + right) / 2
    label = escape(horizontal.axis.label)
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle" class="label">{label}</text>')
    return parts


def _drawable(points: Sequence[tuple[float | None, float | None]], x: Axis, y: Axis) -> list[tuple[float, float]]:
    def fits(value: float | None, axis: Axis) -> bool:
        return value is not None and math.isfinite(value) and (value > 0 or not axis.logarithmic)

    return [(a, b) for a, b in points if a is not None and b is not None and fits(a, x) and fits(b, y)]
