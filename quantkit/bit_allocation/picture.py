"""The choice as a picture in SVG: a column for each layer, a row for each kind of linears, darker where there are more
bits; above it what each layer is estimated to lose. It follows the reader's light or dark theme."""

from __future__ import annotations

from html import escape

from quantkit.bit_allocation.allocation import FLOAT, Allocation
from quantkit.bit_allocation.fit import CANDIDATES
from quantkit.quality.figures import significant

NAME = "bit-allocation.svg"
"""Of the file beside the model card."""
_SCHEMES = (*map(str, CANDIDATES), FLOAT)
_COLORS = ("#d6e6f4", "#9cc8e2", "#4f9bcb", "#1c5f9f", "#f0883e")  # in the order of the schemes
_CELL, _GAP, _BARS, _LETTER, _MARGIN = 20, 2, 70, 6.4, 12
_NARROWEST = 420.0
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.bar{fill:#8a8f98}.line{stroke:#8a8f98}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def picture(found: Allocation) -> str:
    """The SVG."""
    names = list(dict.fromkeys(unit.name for unit in found.units))
    layers = list(dict.fromkeys(unit.layer for unit in found.units))
    lost = [sum(unit.loss for unit in found.units if unit.layer == layer) for layer in layers]
    left = _MARGIN + max(len(name) for name in [*names, "KL x 1e-4"]) * _LETTER + 8
    top = 34 + _BARS
    width = max(left + len(layers) * _CELL + _MARGIN, _NARROWEST, len(_title(found)) * _LETTER)
    bottom = top + len(names) * _CELL
    parts = [_text(_MARGIN, 18, _title(found)), *_bars(layers, lost, left, top)]
    for row, name in enumerate(names):
        y = top + row * _CELL
        parts.append(_text(left - 8, y + 14, name, "end"))
        for unit in found.units:
            if unit.name == name:
                place, color = left + layers.index(unit.layer) * _CELL, _COLORS[_SCHEMES.index(unit.scheme)]
                told = f"layer {unit.layer}, {name}: {unit.scheme}, estimated KL {significant(unit.loss)}"
                parts.append(
                    f'<rect x="{place:g}" y="{y}" width="{_CELL - _GAP}" height="{_CELL - _GAP}" rx="2" fill="{color}">'
                    f"<title>{escape(told)}</title></rect>"
                )
    every = max(1, len(layers) // 16)
    parts += [
        _text(left + column * _CELL + _CELL / 2 - 1, bottom + 13, str(layer), "middle")
        for column, layer in enumerate(layers) if column % every == 0
    ]  # fmt: skip
    x: float = _MARGIN
    for scheme, color in zip(_SCHEMES, _COLORS, strict=True):
        parts.append(f'<rect x="{x:g}" y="{bottom + 26}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(_text(x + 17, bottom + 36, scheme))
        x += 30 + len(scheme) * _LETTER
    height = bottom + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" viewBox="0 0 {width:g} {height}"'
        f' role="img" aria-label="{escape(_title(found))}"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _title(found: Allocation) -> str:
    return f"{found.bits:.4g} bits a weight, estimated KL {significant(found.kl)}"


def _bars(layers: list[int], lost: list[float], left: float, top: int) -> list[str]:
    """What each layer loses, as bars that stand on the grid."""
    most = max(*lost, 1e-30)
    parts = [
        _text(left - 8, top - _BARS + 12, "KL x 1e-4", "end"),
        _text(left - 8, top - _BARS + 26, f"up to {significant(1e4 * most)}", "end"),
    ]
    for column, (layer, loss) in enumerate(zip(layers, lost, strict=True)):
        height = round((_BARS - 8) * loss / most, 1)
        parts.append(
            f'<rect class="bar" x="{left + column * _CELL:g}" y="{top - 4 - height:g}" width="{_CELL - _GAP}"'
            f' height="{height:g}"><title>layer {layer}: {significant(loss)}</title></rect>'
        )
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
