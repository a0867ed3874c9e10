"""A rule about the sizes of weights: a layer whose weight is out of line with those of the layers around it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

from quantkit.doctor.findings import Finding, finding

_LAYER = re.compile(r"(\D*)\.(\d+)\.(\D*)")  # two numbers are an expert's, whose sizes differ by nature
_FEWEST = 8  # layers, of which it means something that one is out of line
_ENDS = 2  # layers at each end differ by nature: a factor of 2.5 in sound models
_FACTOR = math.log2(1.7)
_VARIED = 12  # of how many layers one may be halfway out of line, before a role is called varied by nature


def check(sizes: Mapping[str, float]) -> Iterator[Finding]:
    """Weights out of line.

    Args:
        sizes: root mean squares of weights, or of their scales, by name.
    """
    roles: dict[tuple[str, str], dict[int, str]] = {}
    for name, size in sizes.items():
        if size > 0 and math.isfinite(size) and (found := _LAYER.fullmatch(name)):
            roles.setdefault((found[1], found[3]), {})[int(found[2])] = name
    for layers in roles.values():
        names = [layers[layer] for layer in sorted(layers)]
        yield from _role(names, [math.log2(sizes[name]) for name in names])


def _role(names: Sequence[str], logs: Sequence[float]) -> Iterator[Finding]:
    """Of one role, layer by layer; each is compared with the median of the two layers on each side."""
    if len(names) < _FEWEST:
        return
    usual = {
        layer: statistics.median([*logs[layer - _ENDS : layer], *logs[layer + 1 : layer + _ENDS + 1]])
        for layer in range(_ENDS, len(names) - _ENDS)
    }
    off = {layer: logs[layer] - one for layer, one in usual.items()}
    if sum(abs(one) > _FACTOR / 2 for one in off.values()) > max(1, len(names) // _VARIED):
        return
    for layer, one in off.items():
        if abs(one) > _FACTOR:
            found = f"root mean square {2 ** logs[layer]:.3g}; {2 ** usual[layer]:.3g} in the layers around it"
            yield finding("unusual-norm", names[layer], found)
