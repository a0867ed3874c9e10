"""Whether zero points are the ones that the config's version says: stored as they are, or one less."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping

from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.gptq import Gptq, writers
from quantkit.formats.codecs.gptq_linear import GPTQ
from quantkit.formats.codecs.gptq_zeros import QZEROS, WRITER
from quantkit.formats.codecs.layout import Description
from quantkit.tensors.dtypes import DType

_SAMPLED = 4  # modules whose zero points are read without being asked for
_MAX_BYTES = 1 << 20
_SURE = 0.5  # of a step, in the middle of all modules
_TOLD_BY_WEIGHTS = 4  # bits, whose steps are large against the mean of a weight; those of 8 are not


def check(view: View, *, deep: bool) -> Iterator[Finding]:
    """Hold zero points against the weights.

    Args:
        deep: whether to read weights: of asymmetric ones these decide, since they lie around 0.
    """
    sampled = 0
    above: dict[str, float] = {}
    for module, coded in view.coded.items():
        claim = view.claims.modules.get(module)
        if claim is None or claim.bits not in (4, 8) or not _is_whole(coded):
            continue
        if claim.symmetric and coded.layout is GPTQ and (deep or sampled < _SAMPLED):
            sampled += 1
            yield from _constant(view, coded, claim.bits)
        elif deep and claim.bits == _TOLD_BY_WEIGHTS and not claim.symmetric and coded.layout and coded.layout.zeros:
            with contextlib.suppress(CheckpointError):  # told of where values are read
                codes, zeros = _words(coded)
                above[module] = _mean_code(view, codes) - _mean_code(view, zeros)
    yield from _statistical(view, above)


def _is_whole(coded: Description) -> bool:
    """Whether packed codes and zero points are there, in words."""
    suffixes = (coded.layout.codes, coded.layout.zeros) if coded.layout is not None and coded.layout.zeros else ()
    return all(
        tensor is not None and tensor.dtype == DType.INT32 and len(tensor.shape) == 2 and 0 not in tensor.shape
        for tensor in (coded.tensors.get(suffix) for suffix in suffixes)
    )


def _stored_less(view: View) -> int:
    """By how much zero points as stored are less than what they mean, as the config has it."""
    settings = view.folder.settings or {}
    stated = settings.get("checkpoint_format", settings.get("format", "gptq"))
    return 1 if isinstance(view.method, Gptq) and stated != "gptq_v2" else 0


def _constant(view: View, coded: Description, bits: int) -> Iterator[Finding]:
    """Symmetric ones are all the same, which their bytes tell."""
    tensor = coded.tensors[QZEROS]
    if tensor.nbytes > _MAX_BYTES:
        return
    try:
        data = view.folder.homes[tensor.name].read_bytes(tensor.name)
    except CheckpointError:
        return  # told of where values are read
    common, _ = Counter(data).most_common(1)[0] if data else (0, 0)
    middle = 1 << (bits - 1)
    code = common & ((1 << bits) - 1)
    expected = middle - _stored_less(view)
    if code != expected and code in (middle, middle - 1):
        yield finding("zero-version", tensor.name, f"symmetric, and {code} is stored; by the config {expected}")


def _statistical(view: View, above: Mapping[str, float]) -> Iterator[Finding]:
    """Weights lie around 0, so the mean code is the mean zero point: in the middle of all modules.

    Args:
        above: by how much the codes of each module lie above its zero points as they are stored.
    """
    expected = _stored_less(view)
    if not above or writers(view.folder.settings or {}) & {WRITER}:  # whose zero points are the source's
        return
    if abs(statistics.median(above.values()) - expected) <= _SURE:
        return
    for module, distance in above.items():
        zeros = _words(view.coded[module])[1].name
        what = f"codes lie {distance:.2f} above zero points as stored; by the config {expected}"
        yield finding("zero-version", zeros, what)


def _words(coded: Description) -> tuple[StoredTensor, StoredTensor]:
    """The tensors of packed codes and of packed zero points."""
    assert coded.layout is not None
    return coded.tensors[coded.layout.codes], coded.tensors[coded.layout.zeros]


def _mean_code(view: View, words: StoredTensor) -> float:
    """Of all the 4-bit codes in a tensor of words."""
    import torch

    home = view.folder.homes[words.name]
    total = count = 0
    for part in home.row_parts(words.name):
        data = home.read(words.name, part).contiguous().view(-1).view(torch.uint8)
        data = torch.stack((data & 0xF, data >> 4))
        total += int(data.sum(dtype=torch.int64))
        count += data.numel()
    return total / max(count, 1)
