"""Charts as inline SVG: curves with bands, and dumbbells on a log axis. Colours and fonts are the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

CHARACTER, BOLD = 6.7, 7.6  # width of an average one, at the 12 px of the labels
HITS = 48  # points of a curve that answer to the pointer
DRAWN = 240  # points of a curve that are drawn
COLOURS = 8  # in the page's CSS; further curves repeat them, dashed


class Band(NamedTuple):
    x: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    label: str
    colour: int
    points: Sequence[tuple[float, float]]
    band: Sequence[Band] = ()
    crossing: tuple[float, float] | None = None  # where it reaches the reference
    stopped: bool = False  # ends in a cross


@dataclass(frozen=True)
class Frame:
    """What a chart shows besides its curves."""

    x_title: str
    y_form: Callable[[float], str]
    x_form: Callable[[float], str]
    log: bool = False
    top: float = math.inf  # curves that leave it run along the edge
    bottom: float = -math.inf
    reference: float | None = None
    tip: Callable[[float], str] = "{:.4g}".format  # values under the pointer


class Size(NamedTuple):
    width: int
    height: int
    labels: bool  # at the ends of curves


@dataclass(frozen=True)
class Axis:
    """Values to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * ((value - low) / (high - low) if high > low else 0.5)


# --- axes ---


def short(value: float) -> str:
    """A tick or a count: 0.001, 250, 12k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.10g}"


def power(value: float) -> str:
    """A tick of a log axis, which may span many decades."""
    if 1e-3 <= value < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}" if mantissa == "1" else f"{mantissa}·10{digits}"


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers inside, about so many."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, or 1-2-5 between them, or round numbers where the range is narrow."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1.0,), (1.0, 2.0, 5.0)):
        ticks = [m * 10.0**e for e in exponents for m in mantissas if low * 0.999 <= m * 10.0**e <= high * 1.001]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / (count + 1))]
    return round_ticks(low, high, count)


def value_axis(
    values: Sequence[float], start: float, stop: float, *, log: bool, top: float = math.inf, bottom: float = -math.inf
) -> Axis:
    """Room above and below the data, and ticks inside."""
    count = max(round(abs(stop - start) / 55), 2)
    low, high = max(min(values), min(bottom, max(values))), min(max(values), max(top, min(values)))
    if log:
        room = max((high / low) ** 0.06, 1.02)
        low, high = low / room, high * room
        return Axis(low, high, start, stop, True, log_ticks(low, high, count))
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (0.0 if 0 <= low < room else low - room), high + room
    return Axis(low, high, start, stop, False, round_ticks(low, high, count))


# --- curves ---


def line_chart(curves: Sequence[Curve], frame: Frame, size: Size, name: str) -> str:
    """An <svg>; `name` is what it says to those who cannot see it."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return '<p class="muted">Nothing to draw: no run has a value of it.</p>'
    values = [y for curve in curves for _, y in curve.points]
    values += [y for curve in curves for band in curve.band for y in (band.low, band.high)]
    values += [] if frame.reference is None else [frame.reference]
    wanted = max(len(curve.label) for curve in curves) * BOLD + 16
    labels = size.labels and len(curves) > 1 and wanted < 0.34 * size.width
    y = value_axis(values, size.height - 40, 12, log=frame.log, top=frame.top, bottom=frame.bottom)
    left = 14 + max(len(frame.y_form(tick)) for tick in y.ticks) * CHARACTER
    right = size.width - (wanted if labels else 14)
    last = max(x for curve in curves for x, _ in curve.points)
    x = Axis(0.0, last or 1.0, left, right, False, round_ticks(0.0, last or 1.0, max(int((right - left) / 80), 2)))
    parts = [_grid(x, y, frame, size)]
    if frame.reference is not None:
        parts.append(_rule(x.start, y(frame.reference), x.stop, y(frame.reference), "reference"))
    parts += [_band(curve, x, y) for curve in curves] + [_line(curve, x, y, frame) for curve in curves]
    parts += [_end_labels(curves, x, y)] if labels else []
    return _svg(size.width, size.height, name, "".join(parts), "curves")


def _svg(width: float, height: float, name: str, inner: str, kind: str) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg class="{kind}" {box} role="img" aria-label="{escape(name)}">{inner}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def style(colour: int) -> str:
    """Classes of the page's CSS."""
    return f"c{colour % COLOURS}{' dashed' if colour >= COLOURS else ''}"


def _grid(x: Axis, y: Axis, frame: Frame, size: Size) -> str:
    parts = []
    for tick in y.ticks:
        parts += [
            _rule(x.start, y(tick), x.stop, y(tick), "grid"),
            _text(x.start - 8, y(tick) + 4, frame.y_form(tick), "end"),
        ]
    for tick in x.ticks:
        parts += [
            _rule(x(tick), y.start, x(tick), y.start + 5, "axis"),
            _text(x(tick), y.start + 19, frame.x_form(tick), "middle"),
        ]
    parts += [_rule(x.start, y.start, x.stop, y.start, "axis")]
    return "".join(parts) + _text((x.start + x.stop) / 2, size.height - 4, frame.x_title, "middle", "title")


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Some of many points, evenly, always with the last."""
    stride = math.ceil(len(points) / most)
    return [*points[:-1:stride], points[-1]]


def _band(curve: Curve, x: Axis, y: Axis) -> str:
    if len(curve.band) < 2:
        return ""
    upper = [f"{x(b.x):.1f},{y(b.high):.1f}" for b in curve.band]
    lower = [f"{x(b.x):.1f},{y(b.low):.1f}" for b in reversed(curve.band)]
    return f'<polygon class="band {style(curve.colour)}" points="{" ".join(upper + lower)}"/>'


def _line(curve: Curve, x: Axis, y: Axis, frame: Frame) -> str:
    look = style(curve.colour)
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in thinned(curve.points, DRAWN))
    end_x, end_y = x(curve.points[-1][0]), y(curve.points[-1][1])
    parts = [f'<polyline class="line {look}" points="{path}"/>']
    if curve.crossing is not None:
        at, height = x(curve.crossing[0]), y(curve.crossing[1])
        parts.append(_rule(at, height, at, y.start, f"drop {look}"))
        parts.append(f'<circle class="ring {look}" cx="{at:.1f}" cy="{height:.1f}" r="4.5"/>')
    if curve.stopped:
        parts.append(f'<path class="cross {look}" d="M{end_x - 5:.1f},{end_y - 5:.1f}l10,10m0,-10l-10,10"/>')
    else:
        parts.append(f'<circle class="dot {look}" cx="{end_x:.1f}" cy="{end_y:.1f}" r="3"/>')
    for a, b in thinned(curve.points, HITS):
        tip = f"{curve.label}: {frame.tip(b)} at {a:,.0f} {frame.x_title}"
        parts.append(
            f'<circle class="hit {look}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="6"><title>{escape(tip)}</title></circle>'
        )
    return "".join(parts)


def _end_labels(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """In the right margin at the heights of the last points, moved apart, with leaders from curves that end early."""
    order = sorted(curves, key=lambda curve: y(curve.points[-1][1]))
    heights = spread([y(curve.points[-1][1]) for curve in order], 15.0, y.stop, y.start)
    parts = []
    for curve, height in zip(order, heights, strict=True):
        end_x, end_y = x(curve.points[-1][0]), y(curve.points[-1][1])
        if x.stop + 8 - end_x > 12 or abs(height - end_y) > 3:
            parts.append(_rule(end_x, end_y, x.stop + 8, height, f"leader {style(curve.colour)}"))
        parts.append(_text(x.stop + 11, height + 4, curve.label, kind=f"label {style(curve.colour)}"))
    return "".join(parts)


def spread(heights: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Ascending heights moved as little as it takes to be `gap` apart and inside."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else max(height, top))
    limit = bottom
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed


# --- dumbbells ---


class Dumbbell(NamedTuple):
    """A layer: its input as it is, and what the weights see of it."""

    name: str
    raw: float
    seen: float


def dumbbell_chart(rows: Sequence[Dumbbell], colour: int, limits: tuple[float, float], width: int, name: str) -> str:
    """One line for each layer on a log axis."""
    longest = max(len(clipped(row.name)) for row in rows)
    bottom = 14 + 19.0 * len(rows)
    start, stop = 12 + longest * CHARACTER, width - 14.0
    x = Axis(*limits, start, stop, True, log_ticks(*limits, max(int((stop - start) / 60), 2)))
    parts = [
        _rule(x(tick), 6, x(tick), bottom, "grid") + _text(x(tick), bottom + 17, power(tick), "middle")
        for tick in x.ticks
    ]
    for index, row in enumerate(rows):
        parts.append(_dumbbell(row, x, 14 + 19.0 * index + 6, style(colour)))
    parts.append(_text((start + stop) / 2, bottom + 36, "condition number", "middle", "title"))
    return _svg(width, bottom + 42, name, "".join(parts), "dumbbells")


def clipped(name: str) -> str:
    """With its middle left out: the end says which layer."""
    return name if len(name) <= 22 else f"{name[:6]}…{name[-15:]}"


def _dumbbell(row: Dumbbell, x: Axis, y: float, look: str) -> str:
    parts = [
        f'<text class="tick" x="{x.start - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(clipped(row.name))}</text>'
    ]
    tips = {"input": row.raw, "seen by the weights": row.seen}
    known = [f"{word} {value:,.3g}" for word, value in tips.items() if math.isfinite(value)]
    if math.isfinite(row.raw):
        parts.append(_rule(x(row.raw), y - 6, x(row.raw), y + 6, "raw"))
    if math.isfinite(row.raw) and math.isfinite(row.seen):
        parts.append(_rule(x(row.raw), y, x(row.seen), y, f"bar {look}"))
    if math.isfinite(row.seen):
        tip = f"<title>{escape(row.name)}: {escape(', '.join(known))}</title>"
        parts.append(f'<circle class="dot {look}" cx="{x(row.seen):.1f}" cy="{y:.1f}" r="4.5">{tip}</circle>')
    return "".join(parts)
