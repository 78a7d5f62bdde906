"""A heat map of two checkpoints' differences: layers down, parts across."""

from __future__ import annotations

from html import escape
from math import log10

from dcr_s3.difference import Difference, TensorDifference

_CELL_W, _CELL_H, _LEFT, _TOP = 46, 15, 170, 176
_LOWEST = 1e-5


def heatmap_svg(found: Difference) -> str:
    """An SVG document. Colours go by the logarithm of the share of changed elements, from 0.001 % to all; tensors
    outside of layers stand in rows of their own below."""
    layered = [t for t in found.tensors if t.layer is not None]
    others = [t for t in found.tensors if t.layer is None]
    parts = list(dict.fromkeys(t.part for t in layered))
    layers = sorted({t.layer for t in layered if t.layer is not None})
    shapes = [_label(_LEFT + (n + 0.5) * _CELL_W, _TOP - 8, _tail(part), turned=True) for n, part in enumerate(parts)]
    for row, layer in enumerate(layers):
        shapes.append(_label(_LEFT - 6, _TOP + row * _CELL_H + 11, f"layer {layer}"))
    for tensor in layered:
        row, column = layers.index(tensor.layer or 0), parts.index(tensor.part)
        shapes.append(_cell(_LEFT + column * _CELL_W, _TOP + row * _CELL_H, tensor))
    below = _TOP + len(layers) * _CELL_H + (10 if layered else 0)
    for row, tensor in enumerate(others):
        shapes.append(_label(_LEFT - 6, below + row * _CELL_H + 11, _tail(tensor.name)))
        shapes.append(_cell(_LEFT, below + row * _CELL_H, tensor))
    share = 100 * found.changed_elements / max(found.total_elements, 1)
    title = f"{found.changed_elements:,} of {found.total_elements:,} elements differ ({share:.3g} %)"
    width = max(_LEFT + len(parts) * _CELL_W + 90, 560)
    height = below + len(others) * _CELL_H + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="12" y="20" font-size="14" fill="#1b1f24">{escape(title)}</text>{_scale()}{"".join(shapes)}</svg>\n'
    )


def colour(ratio: float) -> str:
    """Grey for no change, then from pale to dark by the logarithm of the share."""
    if ratio <= 0:
        return "#eceef1"
    share = min(max((log10(ratio) - log10(_LOWEST)) / -log10(_LOWEST), 0.0), 1.0)
    red, green, blue = (round(a + (b - a) * share) for a, b in ((214, 8), (230, 48), (244, 107)))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _cell(x: float, y: float, tensor: TensorDifference) -> str:
    text = f"{tensor.name}: {tensor.changed_elements:,} of {tensor.elements:,} ({100 * tensor.ratio:.3g} %)"
    box = f'x="{x}" y="{y}" width="{_CELL_W - 2}" height="{_CELL_H - 2}" fill="{colour(tensor.ratio)}"'
    return f"<g><title>{escape(text)}</title><rect {box}/></g>"


def _label(x: float, y: float, text: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-50 {x:.0f} {y:.0f})"' if turned else ""
    anchor = "start" if turned else "end"
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#1b1f24"{turn}>{escape(text)}</text>'


def _tail(name: str) -> str:
    return name if len(name) <= 26 else "…" + name[-24:]


def _scale() -> str:
    steps = [(0.0, "none"), (1e-5, "0.001 %"), (1e-3, "0.1 %"), (1e-2, "1 %"), (1e-1, "10 %"), (1.0, "all")]
    return "".join(
        f'<rect x="{12 + 76 * n}" y="30" width="14" height="12" fill="{colour(ratio)}"/>'
        f'<text x="{30 + 76 * n}" y="40" fill="#1b1f24">{text}</text>'
        for n, (ratio, text) in enumerate(steps)
    )
