"""The choice as a picture in SVG: a column for each layer, a row for each kind of linears, darker where there are more
bits; above it each layer's estimated loss. It follows the reader's light or dark theme."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from quantkit.bit_allocation.allocation import FLOAT, Allocation
from quantkit.bit_allocation.fit import CANDIDATES
from quantkit.quality.figures import significant

NAME = "bit-allocation.svg"
"""The file's name, next to the model card."""
_COLORS = ("#d6e6f4", "#9cc8e2", "#4f9bcb", "#1c5f9f", "#f0883e")  # in the order of the schemes
_CELL, _LETTER, _MARGIN, _TOP = 20, 6.4, 12, 104  # pixels
_MIN_WIDTH = 420.0
_UNIT = "KL x 1e-4"


def picture(allocation: Allocation) -> str:
    """The SVG."""
    names = list(dict.fromkeys(unit.name for unit in allocation.units))
    losses = {unit.layer: 0.0 for unit in allocation.units}
    for unit in allocation.units:
        losses[unit.layer] += unit.loss
    title = f"{allocation.bits:.4g} bits a weight, estimated KL {significant(allocation.kl)}"
    left = _MARGIN + max(len(name) for name in [*names, _UNIT]) * _LETTER + 8
    colors = dict(zip((*map(str, CANDIDATES), FLOAT), _COLORS, strict=True))
    legend, x = [], float(_MARGIN)
    for scheme, color in colors.items():
        legend.append((scheme, color, x))
        x += 30 + len(scheme) * _LETTER
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("picture.svg.jinja").read_text(encoding="utf-8"))
    return template.render(
        allocation=allocation, title=title, unit=_UNIT, names=names, losses=losses, colors=colors, legend=legend,
        max_loss=max(*losses.values(), 1e-30), columns={layer: column for column, layer in enumerate(losses)},
        stride=max(1, len(losses) // 16), left=left, top=_TOP, bottom=_TOP + len(names) * _CELL,
        width=max(left + len(losses) * _CELL + _MARGIN, _MIN_WIDTH, len(title) * _LETTER), significant=significant,
    )  # fmt: skip
