"""A rule about GPTQ's zero points: whether they are stored as they are or one less, as the config says."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator

from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.gptq import Gptq, writers
from quantkit.formats.codecs.gptq_linear import GPTQ
from quantkit.formats.codecs.gptq_zeros import QZEROS, WRITER
from quantkit.formats.codecs.layout import Description
from quantkit.tensors.dtypes import DType

_SAMPLED = 4  # modules whose zero points are read by default
_MAX_BYTES = 1 << 20
_TOLERANCE = 0.5  # of a step, for the median of all modules
_BITS = 4  # with steps that are large compared with the mean of a weight


def check(view: View, *, deep: bool) -> Iterator[Finding]:
    """Compare zero points with the weights; with `deep`, also asymmetric ones with the means of weights, which are
    near 0."""
    sampled = 0
    above: dict[str, float] = {}  # the mean code minus the mean zero point, by module
    for module, coded in view.coded.items():
        claim = view.claims.modules.get(module)
        if claim is None or claim.bits not in (4, 8) or not _is_whole(coded):
            continue
        if claim.symmetric and coded.layout is GPTQ and (deep or sampled < _SAMPLED):
            sampled += 1
            yield from _constant(view, coded, claim.bits)
        elif deep and claim.bits == _BITS and not claim.symmetric and coded.layout and coded.layout.zeros:
            with contextlib.suppress(CheckpointError):  # reported by rules about values
                codes, zeros = _words(coded)
                above[module] = _mean_code(view, codes) - _mean_code(view, zeros)
    expected = _stated_offset(view)
    if not above or writers(view.folder.settings or {}) & {WRITER}:  # which writes the zero points of its source
        return
    if abs(statistics.median(above.values()) - expected) > _TOLERANCE:  # the mean of a weight is near 0
        for module, distance in above.items():
            what = f"codes lie {distance:.2f} above zero points as stored; by the config {expected}"
            yield finding("zero-version", _words(view.coded[module])[1].name, what)


def _is_whole(coded: Description) -> bool:
    """Whether there are packed codes and zero points, in words."""
    suffixes = (coded.layout.codes, coded.layout.zeros) if coded.layout is not None and coded.layout.zeros else ()
    return all(
        tensor is not None and tensor.dtype == DType.INT32 and len(tensor.shape) == 2 and 0 not in tensor.shape
        for tensor in (coded.tensors.get(suffix) for suffix in suffixes)
    )


def _stated_offset(view: View) -> int:
    """What the config says must be added to stored zero points."""
    settings = view.folder.settings or {}
    stated = settings.get("checkpoint_format", settings.get("format", "gptq"))
    return 1 if isinstance(view.method, Gptq) and stated != "gptq_v2" else 0


def _constant(view: View, coded: Description, bits: int) -> Iterator[Finding]:
    """Check symmetric zero points, which are all the same."""
    tensor = coded.tensors[QZEROS]
    if tensor.nbytes > _MAX_BYTES:
        return
    try:
        data = view.folder.homes[tensor.name].read_bytes(tensor.name)
    except CheckpointError:
        return  # reported by rules about values
    common, _ = Counter(data).most_common(1)[0] if data else (0, 0)
    middle = 1 << (bits - 1)
    code = common & ((1 << bits) - 1)
    expected = middle - _stated_offset(view)
    if code != expected and code in (middle, middle - 1):
        yield finding("zero-version", tensor.name, f"symmetric, and {code} is stored; by the config {expected}")


def _words(coded: Description) -> tuple[StoredTensor, StoredTensor]:
    assert coded.layout is not None
    return coded.tensors[coded.layout.codes], coded.tensors[coded.layout.zeros]


def _mean_code(view: View, words: StoredTensor) -> float:
    import torch

    home = view.folder.homes[words.name]
    total = count = 0
    for part in home.row_parts(words.name):
        data = home.read(words.name, part).contiguous().view(-1).view(torch.uint8)
        data = torch.stack((data & 0xF, data >> 4))
        total += int(data.sum(dtype=torch.int64))
        count += data.numel()
    return total / max(count, 1)
