"""Small SVG charts, drawn without any library, readable in light and dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 920, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 14, 26
_COLOURS = tuple(f"--c{number}" for number in range(1, 9))


@dataclass(frozen=True)
class Bar:
    """One bar: its place on the axis, what it is made of by series, and what the pointer shows."""

    label: str
    parts: Mapping[str, float]
    title: str


def bar_chart(bars: Sequence[Bar], *, unit: str, log: bool = False, reference: tuple[str, float] | None = None) -> str:
    """Bars side by side, stacked by series. ``log`` scales by powers of ten, for values that are all above zero;
    ``reference`` is a named line across."""
    totals = [sum(bar.parts.values()) for bar in bars]
    top = max([*totals, reference[1] if reference else 0.0]) or 1.0
    lowest = min((t for t in totals if t > 0), default=top / 10)
    low, high = (10 ** floor(log10(lowest)), 10 ** ceil(log10(top) + 1e-9)) if log else (0.0, top * 1.05)

    def y(value: float) -> float:
        share = value / high
        if log:
            share = (log10(max(value, low)) - log10(low)) / max(log10(high) - log10(low), 1e-9)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    series = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    step = (WIDTH - _LEFT - _RIGHT) / max(len(bars), 1)
    shapes = _axis(low, high, y, unit, log=log)
    every = max(1, ceil(len(bars) / 18))
    for number, bar in enumerate(bars):
        x = _LEFT + number * step
        shapes.append(f'<g class="bar"><title>{escape(bar.title)}</title>')
        shapes.append(_rect(x, _TOP, step, HEIGHT - _TOP - _BOTTOM, 'class="hover"'))
        below = 0.0
        for name, value in bar.parts.items():
            begin, end = y(below if below or not log else low), y(below + value)
            colour = _COLOURS[series.index(name) % len(_COLOURS)]
            shapes.append(
                _rect(x + step * 0.12, end, step * 0.76, max(begin - end, 0.5), f'style="fill:var({colour})"')
            )
            below += value
        shapes.append("</g>")
        if number % every == 0:
            shapes.append(_text(x + step / 2, HEIGHT - 8, bar.label, "middle"))
    if reference:
        at = y(reference[1])
        shapes.append(f'<line class="reference" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(_text(WIDTH - _RIGHT, at + 12, reference[0], "end"))
    legend = _legend(series) if len(series) > 1 else ""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(shapes)}</svg>{legend}'


def _axis(low: float, high: float, y: Callable[[float], float], unit: str, *, log: bool) -> list[str]:
    if log:
        ticks = [10.0**power for power in range(round(log10(low)), round(log10(high)) + 1)]
        ticks = ticks[:: max(1, ceil(len(ticks) / 6))]
    else:
        ticks = [high / 1.05 * share for share in (0, 0.25, 0.5, 0.75, 1)]
    shapes = []
    for tick in ticks:
        at = y(tick)
        shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(_text(_LEFT - 6, at + 4, short(tick, unit), "end"))
    return shapes


def _legend(series: Sequence[str]) -> str:
    entries = [
        f'<span><i style="background:var({_COLOURS[n % len(_COLOURS)]})"></i>{escape(name)}</span>'
        for n, name in enumerate(series)
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def short(value: float, unit: str) -> str:
    """A number with three digits and, for bytes, the fitting prefix: ``68.5 MB``."""
    if unit == "B":
        for prefix in ("", "k", "M", "G", "T"):
            if abs(value) < 1000 or prefix == "T":
                return f"{value:.3g} {prefix}B"
            value /= 1000
    return f"{value:.3g} {unit}".rstrip()
