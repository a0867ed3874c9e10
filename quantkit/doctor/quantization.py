"""Rules about quantized weights, their zero points and a quantized key/value cache: whether the
tensors are those that the config states, and that runtimes expect.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from quantkit.architectures.families.opaque import may_change_state
from quantkit.architectures.names import is_embedding
from quantkit.architectures.topology import group_fused_linears, parameters
from quantkit.base.json_values import Settings
from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.side_files import CONFIG
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats import kv_cache
from quantkit.formats.codecs.awq import AWQ, Awq
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.codecs.compressed_weights import INT8, PACKED_CODES
from quantkit.formats.codecs.dequantized import MODEL_OPTIMIZER
from quantkit.formats.codecs.gptq import Gptq, writers
from quantkit.formats.codecs.gptq_linear import GPTQ
from quantkit.formats.codecs.gptq_zeros import QZEROS, WRITER
from quantkit.formats.codecs.layout import Description
from quantkit.formats.codecs.mlx import Mlx
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.codecs.table import LAYOUTS
from quantkit.formats.containers.hf_settings import SETTINGS
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import torch

_STATE_BITS = 8
_NUMBER = re.compile(r"\d+")
_MAX_READ_BYTES = 1 << 20
# Methods whose own readers expect quantized embeddings.
_READ_EMBEDDINGS = (Mlx.name,)
# Modules whose zero points are read by default.
_SAMPLED = 4
_TOLERANCE = 0.5  # of a step, for the median of all modules
_BITS = 4  # with steps that are large compared with the mean of a weight


def check(view: View, tp: int) -> Iterator[Finding]:
    """Check the quantized weights of a folder, to run at a degree `tp` of tensor parallelism."""
    claims = view.claims
    for problem in claims.problems:
        yield finding("bad-settings", "quantization_config", problem)
    for module, groups in claims.conflicts.items():
        yield finding("two-schemes", module, f"by {groups}")
    if view.folder.complete:
        for name in claims.unmatched:
            yield finding("names-nothing", name, "is no module of the folder")
    for module in dict.fromkeys([*view.linears, *view.coded]):
        yield from _module(view, module)
    yield from _check_fused_schemes(view)
    yield from _split(view, tp)


def _module(view: View, module: str) -> Iterator[Finding]:
    """Compare what the config says of one linear with its tensors."""
    claim = view.claims.modules.get(module)
    coded = view.coded.get(module)
    if coded is None:
        floats = f"{module}.weight" in view.stored
        if claim is not None and view.claims.certain and floats and _is_meant(view, module):
            if claim.layout is None:
                title = "quantized"
            else:
                title = claim.layout.title
            yield finding("not-quantized", module, f"floats, and by the config {title}")
        return
    missing = coded.missing(claim)
    lacking = [
        suffix for suffix in missing if not view.folder.in_unread_file(coded.tensor_name(suffix))
    ]
    if lacking:
        if coded.tensors:
            there = f"; has {', '.join(coded.tensors)}"
        else:
            there = ""
        yield finding("incomplete", module, f"lacks {', '.join(lacking)}{there}")
    if coded.layout is None:
        return
    if is_embedding(module) and not _embedding_is_read(view, coded):
        yield finding("quantized-embedding", module, coded.title)
    elif claim is None and view.claims.certain:
        if view.folder.settings is None:
            said = "no quantization_config"
        else:
            said = "not among those it quantizes"
        yield finding("not-in-config", module, f"{coded.title}, and in the config {said}")
    if claim is None or claim.bits is None:
        bits = coded.bits
    else:
        bits = claim.bits
    if (
        bits is not None
        and bits < _STATE_BITS
        and view.hints.is_recurrent(module)
        and may_change_state(module)
    ):
        yield finding("low-bit-state", module, f"{coded.title}, {bits} bits")
    for leaf, expected in coded.wrong_types(LAYOUTS):
        yield finding(
            "codes-type",
            f"{module}.{leaf}",
            f"found {coded.tensors[leaf].dtype}, expected {expected}",
        )
    for suffix in coded.foreign:
        foreign = coded.tensors[suffix]
        what = f"{foreign.dtype} {list(foreign.shape)}, which is no part of {coded.title}"
        yield finding("extra-tensor", foreign.name, what)
    shape = view.linears.get(module)
    tensor = view.expected.get(f"{module}.weight")
    if shape is None and tensor is not None:
        shape = tensor.shape
    if shape is not None and len(shape) == 2:
        shape = shape
    else:
        shape = None
    if not missing and shape is not None:
        raw = RawModule(module, view.folder.homes, view.folder.root)
        if problem := coded.layout.problem(raw, shape):
            yield finding("codes-shape", module, problem)
    if claim is None:
        if (
            view.method is not None
            and not view.claims.certain
            and not _may_have(view.method, coded)
        ):
            yield finding(
                "other-kind", module, f"{coded.title}, and by the config {view.folder.method}"
            )
        return
    if claim.layout not in (None, coded.layout):
        yield finding(
            "other-kind", module, f"{coded.title}, and by the config {claim.layout.title}"
        )
        return
    if claim.by_index and coded.layout is PACKED_CODES:
        yield finding("act-order", module, "actorder 'group'")
    if shape is None:
        return
    if claim.group_size and shape[1] % claim.group_size:
        yield finding(
            "uneven-groups", module, f"rows of {shape[1]} in groups of {claim.group_size}"
        )
        return
    for leaf, wanted in coded.wrong_shapes(shape, claim):
        if leaf == coded.layout.codes:
            rule = "codes-shape"
        else:
            rule = "scale-shape"
        found = list(coded.tensors[leaf].shape)
        yield finding(rule, f"{module}.{leaf}", f"found {found}, expected {list(wanted)}")


def _may_have(method: QuantMethod, coded: Description) -> bool:
    """Return whether a method whose settings name no modules has codes in such a layout."""
    # Whose weights are of several types.
    if method.name == MODEL_OPTIMIZER:
        return coded.codes is not None and coded.codes.name.endswith(".weight")
    return not method.layouts or coded.layout in method.layouts


def _embedding_is_read(view: View, coded: Description) -> bool:
    """Return whether transformers, or its method's own reader, loads a quantized embedding: of
    compressed-tensors' layouts int8, if the head is not tied to it (tried with 5.23).
    """
    tied = view.config is None or view.config.tied_embeddings
    plain = isinstance(view.method, CompressedTensors) and coded.layout is INT8
    return view.folder.method in _READ_EMBEDDINGS or (not tied and plain)


def _is_meant(view: View, module: str) -> bool:
    """Return whether a config that lists no modules includes one: in an unknown family, if the same
    module of most layers is quantized.
    """
    if view.has_known_tensors or not isinstance(view.method, Gptq | Awq):
        return True
    same = []
    for linear in view.linears:
        if _NUMBER.sub("*", linear) == _NUMBER.sub("*", module):
            same.append(linear)
    return 2 * sum(one in view.coded for one in same) > len(same)


def _check_fused_schemes(view: View) -> Iterator[Finding]:
    """Linears that runtimes fuse, and experts that they stack."""
    config = view.config
    if config is None or not view.has_known_tensors or not view.coded:
        return
    for layer in range(config.num_layers):
        for fused, modules in group_fused_linears(config, layer).items():
            names = [f"model.layers.{layer}.{module}" for module in modules]
            yield from _compare_schemes(
                view, names, "fused-schemes", f"model.layers.{layer}.{fused}"
            )
    banks: dict[tuple[int | None, str], list[str]] = {}
    for parameter in parameters(config):
        if parameter.expert is not None and parameter.is_linear_weight:
            banks.setdefault((parameter.layer, parameter.role), []).append(parameter.module)
    for (number, role), names in banks.items():
        yield from _compare_schemes(view, names, "expert-schemes", f"layer {number}, {role}")


def _compare_schemes(
    view: View, canonical: Sequence[str], rule: str, location: str
) -> Iterator[Finding]:
    """Yield the first module whose scheme differs from that of the first of a set."""
    tensors = [view.on_disk.get(f"{name}.weight") for name in canonical]
    modules = list(dict.fromkeys(tensor.module for tensor in tensors if tensor is not None))
    present = []
    for one in modules:
        if one in view.coded or f"{one}.weight" in view.stored:
            present.append(one)
    if any(one in view.coded and view.coded[one].missing(None) for one in present):
        # Broken, which another rule reports.
        return
    schemes = [view.scheme(one) for one in present]
    for module, (signature, scheme) in zip(present, schemes, strict=True):
        if signature != schemes[0][0]:
            own, its = (".".join(one.split(".")[-2:]) for one in (present[0], module))
            yield finding(rule, location, f"{own}: {schemes[0][1]}; {its}: {scheme}")
            return


def _split(view: View, tp: int) -> Iterator[Finding]:
    """Widths and groups that the degree of tensor parallelism does not divide."""
    config = view.config
    if tp == 1 or config is None or not view.has_known_tensors:
        return
    if config.num_heads % tp:
        yield finding("tp-heads", "config.json", f"{config.num_heads} heads over {tp}")
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        yield finding("tp-heads", "config.json", f"{config.num_kv_heads} KV heads over {tp}")
    stacked: set[str] = set()
    for parameter in parameters(config):
        tensor = view.on_disk.get(parameter.name)
        if (
            not parameter.is_linear_weight
            or parameter.linear is None
            or tensor is None
            or tensor.name in stacked
        ):
            continue
        if tensor.stacked is not None:
            stacked.add(tensor.name)
        axis = {"row": 1, "column": 0}.get(parameter.linear.parallel)
        if axis is None or parameter.role in ("head", "attention.k", "attention.v"):
            continue
        width = parameter.shape[axis]
        claim = view.claims.modules.get(tensor.module)
        if width % tp:
            if not parameter.role.startswith("attention."):
                yield finding("tp-heads", tensor.module, f"width {width} over {tp}")
            continue
        if claim is None:
            block = None
        elif claim.block:
            block = claim.block[axis]
        elif axis == 1:
            block = claim.group_size
        else:
            block = None
        if block is not None and tensor.module in view.coded and (width // tp) % block:
            yield finding(
                "tp-groups",
                tensor.module,
                f"{width} over {tp} is {width // tp}, in groups of {block}",
            )
        elif (
            axis == 0
            and (width // tp) % 8
            and (own := view.coded.get(tensor.module))
            and own.layout is AWQ
        ):
            yield finding("tp-groups", tensor.module, f"{width} outputs over {tp}, eight to a word")


def check_cache(view: View) -> Iterator[Finding]:
    """Check the scheme and the scales of the cache; the scales, a few bytes each, are read."""
    folder = view.folder
    tensors = kv_cache.cache_tensors(view.stored)
    scales = {
        name: entry
        for name, entry in tensors.items()
        if entry.kind == "scale" and {*entry.parts} & {"k", "v"}
    }
    if folder.settings is None:
        stated = None
    else:
        stated = Settings(folder.settings, folder.root / CONFIG, SETTINGS)
    try:
        scheme = kv_cache.read_cache_scheme(stated)
    except CheckpointError as error:
        yield finding(
            "bad-settings",
            CONFIG,
            f"{error.problem}: found {error.found}, expected {error.expected}",
        )
        return
    if scales and scheme is None:
        yield finding("kv-no-scheme", CONFIG, f"{len(scales)} scales: {next(iter(scales))}")
    if folder.complete and scheme is not None and not scales and not scheme.get("dynamic"):
        yield finding("kv-no-scales", CONFIG, kv_cache.scheme_text(scheme))
    highest = max((entry.layer for entry in tensors.values()), default=0)
    if view.config is None:
        layers = highest + 1
    else:
        layers = view.config.num_layers
    if folder.complete and scales:
        for layer in kv_cache.layers_without_scales(scales, layers):
            found = (
                ", ".join(name for name, entry in scales.items() if entry.layer == layer) or "none"
            )
            yield finding(
                "kv-scales-missing",
                f"layer {layer}",
                f"found {found}, expected scales of keys and values",
            )
    if folder.complete and kv_cache.needs_zero_points(scheme):
        for layer, part in kv_cache.without_zero_points(tensors, layers):
            yield finding("kv-no-zero-points", f"layer {layer}", f"found none of its {part}")
    if view.config is None:
        heads = (0, 0)
    else:
        heads = (view.config.num_heads, view.config.num_kv_heads)
    for name, entry in tensors.items():
        if (count := kv_cache.misfit(entry, view.stored[name], scheme, *heads)) is not None:
            yield finding(
                "kv-scale-shape",
                name,
                f"found {list(view.stored[name].shape)}, expected {count} elements",
            )
        yield from _cache_value(view, name, entry)


def _cache_value(view: View, name: str, entry: kv_cache.CacheTensor) -> Iterator[Finding]:
    tensor = view.stored[name]
    is_scale = entry.kind == "scale"
    if tensor.dtype not in kv_cache.TYPES[entry.kind] or not 0 < tensor.nbytes <= _MAX_READ_BYTES:
        expected = "floats" if is_scale else "numbers"
        yield finding(
            "kv-scale-value",
            name,
            f"found {tensor.dtype} {list(tensor.shape)}, expected {expected}",
        )
        return
    try:
        value = view.folder.homes[name].read(name).double()
    except CheckpointError:
        # Reported by rules about files.
        return
    if not value.isfinite().all() or (is_scale and not (value > 0).all()):
        yield finding("kv-scale-value", name, f"found {value.min().item():g}")


def check_zero_points(view: View, *, deep: bool) -> Iterator[Finding]:
    """Compare zero points with the weights; with `deep`, also asymmetric ones with the means of
    weights, which are near 0.
    """
    sampled = 0
    # The mean code minus the mean zero point, by module.
    above: dict[str, float] = {}
    for module, coded in view.coded.items():
        claim = view.claims.modules.get(module)
        if claim is None or claim.bits not in (4, 8) or not _is_whole(coded):
            continue
        if claim.symmetric and coded.layout is GPTQ and (deep or sampled < _SAMPLED):
            sampled += 1
            yield from _constant(view, coded, claim.bits)
        elif (
            deep
            and claim.bits == _BITS
            and not claim.symmetric
            and coded.layout
            and coded.layout.zeros
        ):
            # Reported by rules about values.
            with contextlib.suppress(CheckpointError):
                codes, zeros = _words(coded)
                above[module] = _mean_code(view, codes) - _mean_code(view, zeros)
    expected = _read_zero_point_offset(view)
    # Which writes the zero points of its source.
    if not above or writers(view.folder.settings or {}) & {WRITER}:
        return
    # The mean of a weight is near 0.
    if abs(statistics.median(above.values()) - expected) > _TOLERANCE:
        for module, distance in above.items():
            what = f"codes lie {distance:.2f} above zero points as stored; by the config {expected}"
            yield finding("zero-version", _words(view.coded[module])[1].name, what)


def _is_whole(coded: Description) -> bool:
    """Return whether there are packed codes and zero points, in words."""
    suffixes = (
        (coded.layout.codes, coded.layout.zeros)
        if coded.layout is not None and coded.layout.zeros
        else ()
    )
    return all(
        tensor is not None
        and tensor.dtype == DType.INT32
        and len(tensor.shape) == 2
        and 0 not in tensor.shape
        for tensor in (coded.tensors.get(suffix) for suffix in suffixes)
    )


def _read_zero_point_offset(view: View) -> int:
    """Return what the config says must be added to stored zero points."""
    settings = view.folder.settings or {}
    stated = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if isinstance(view.method, Gptq) and stated != "gptq_v2":
        return 1
    return 0


def _constant(view: View, coded: Description, bits: int) -> Iterator[Finding]:
    """Check symmetric zero points, which are all the same."""
    tensor = coded.tensors[QZEROS]
    if tensor.nbytes > _MAX_READ_BYTES:
        return
    try:
        data = view.folder.homes[tensor.name].read_bytes(tensor.name)
    except CheckpointError:
        # Reported by rules about values.
        return
    common, _ = Counter(data).most_common(1)[0] if data else (0, 0)
    middle = 1 << (bits - 1)
    code = common & ((1 << bits) - 1)
    expected = middle - _read_zero_point_offset(view)
    if code != expected and code in (middle, middle - 1):
        yield finding(
            "zero-version",
            tensor.name,
            f"symmetric, and {code} is stored; by the config {expected}",
        )


def _words(coded: Description) -> tuple[StoredTensor, StoredTensor]:
    assert coded.layout is not None
    return coded.tensors[coded.layout.codes], coded.tensors[coded.layout.zeros]


def _mean_code(view: View, words: StoredTensor) -> float:
    home = view.folder.homes[words.name]
    total = count = 0
    for part in home.row_parts(words.name):
        data = home.read(words.name, part).contiguous().view(-1).view(torch.uint8)
        data = torch.stack((data & 0xF, data >> 4))
        total += int(data.sum(dtype=torch.int64))
        count += data.numel()
    return total / max(count, 1)
