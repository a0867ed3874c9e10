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
from quantkit.formats.codecs import torchao
from quantkit.formats.codecs.awq import Awq
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.codecs.float_methods import MODEL_OPTIMIZER
from quantkit.formats.codecs.gptq import Gptq, writers
from quantkit.formats.codecs.gptq_zeros import WRITER
from quantkit.formats.codecs.layout import Description
from quantkit.formats.codecs.layouts import AWQ, GPTQ, INT8, PACKED_CODES, QZEROS, TORCHAO
from quantkit.formats.codecs.mlx import Mlx
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.codecs.table import LAYOUTS, LAYOUTS_BY_METHOD
from quantkit.formats.containers.hf_settings import SETTINGS
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import torch

# Recurrent layers carry the errors of fewer bits from token to token.
_STATE_BITS = 8
_NUMBER = re.compile(r"\d+")
# Rules that read tensors by default read only small ones, so that a diagnosis takes seconds.
_MAX_READ_BYTES = 1 << 20
# Methods whose own readers expect quantized embeddings.
_READ_EMBEDDINGS = (Mlx.name,)
# Modules whose zero points are read by default.
_SAMPLED = 4
# Of a step, for the median of all modules; versions of zero points differ by one step.
_TOLERANCE = 0.5
# With this number of bits, steps are large compared with the mean of a weight.
_BITS = 4


def check(view: View, tp: int) -> Iterator[Finding]:
    """Check the quantized weights of a folder, to run at a degree `tp` of tensor parallelism."""
    claims = view.claims
    for problem in claims.problems:
        yield finding("bad-settings", "quantization_config", problem)
    for module, groups in claims.conflicts.items():
        yield finding("two-schemes", module, f"by {groups}")
    # A module may be in a file that could not be read.
    if view.folder.complete:
        for name in claims.unmatched:
            yield finding("names-nothing", name, "is no module of the folder")
    for module in dict.fromkeys([*view.linears, *view.coded]):
        yield from _module(view, module)
    yield from _check_fused_schemes(view)
    yield from _check_tensor_parallelism(view, tp)


def _module(view: View, module: str) -> Iterator[Finding]:
    """Compare what the config says of one linear with its tensors."""
    claim = view.claims.modules.get(module)
    coded = view.coded.get(module)
    if coded is None:
        floats = f"{module}.weight" in view.stored
        if claim is not None and view.claims.certain and floats and _is_claimed(view, module):
            if claim.layout is None:
                title = "quantized"
            else:
                title = claim.layout.title
            yield finding("not-quantized", module, f"floats, and by the config {title}")
        return
    missing = coded.missing(claim)
    lacking: list[str] = []
    for suffix in missing:
        if not view.folder.in_unread_file(coded.tensor_name(suffix)):
            lacking.append(suffix)
    if lacking:
        if coded.tensors:
            present = f"; has {', '.join(coded.tensors)}"
        else:
            present = ""
        yield finding("incomplete", module, f"lacks {', '.join(lacking)}{present}")
    if coded.layout is None:
        return
    if is_embedding(module) and not _embedding_is_read(view, coded):
        yield finding("quantized-embedding", module, coded.title)
    elif claim is None and view.claims.certain:
        if view.folder.settings is None:
            config_entry = "no quantization_config"
        else:
            config_entry = "not among those it quantizes"
        yield finding("not-in-config", module, f"{coded.title}, and in the config {config_entry}")
    # Shapes alone do not always tell the number of bits, so the config has precedence.
    if claim is None or claim.bits is None:
        bits = coded.bits
    else:
        bits = claim.bits
    # A short convolution sees a few tokens, so that errors do not add up.
    if (
        bits is not None
        and bits < _STATE_BITS
        and not (view.config is not None and view.config.short_conv)
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
        message = f"{foreign.dtype} {list(foreign.shape)}, which is no part of {coded.title}"
        yield finding("extra-tensor", foreign.name, message)
    shape = _find_weight_shape(view, module)
    if not missing and shape is not None:
        raw = RawModule(module, view.folder.homes, view.folder.root)
        problem = None
        if coded.layout is TORCHAO:
            problem = torchao.find_problem(raw, shape)
        if problem:
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
    # Uneven groups have no expected shape of scales to compare with.
    if claim.group_size and shape[1] % claim.group_size:
        yield finding(
            "uneven-groups", module, f"rows of {shape[1]} in groups of {claim.group_size}"
        )
        return
    for leaf, expected_shape in coded.wrong_shapes(shape, claim):
        if leaf == coded.layout.codes:
            rule = "codes-shape"
        else:
            rule = "scale-shape"
        stored_shape = list(coded.tensors[leaf].shape)
        yield finding(
            rule, f"{module}.{leaf}", f"found {stored_shape}, expected {list(expected_shape)}"
        )


def _find_weight_shape(view: View, module: str) -> tuple[int, ...] | None:
    """Find the shape [O, I] of a weight; None if it is unknown, or of stacked experts."""
    shape = view.linears.get(module)
    tensor = view.expected.get(f"{module}.weight")
    if shape is None and tensor is not None:
        shape = tensor.shape
    if shape is None or len(shape) != 2:
        return None
    return shape


def _may_have(method: QuantMethod, coded: Description) -> bool:
    """Return whether a method whose settings name no modules has codes in such a layout."""
    # Its checkpoints have weights of several types, all under the name of a float weight.
    if method.name == MODEL_OPTIMIZER:
        return coded.codes is not None and coded.codes.name.endswith(".weight")
    layouts = LAYOUTS_BY_METHOD.get(method.name)
    return layouts is None or coded.layout in layouts


def _embedding_is_read(view: View, coded: Description) -> bool:
    """Return whether transformers, or its method's own reader, loads a quantized embedding."""
    if view.folder.method in _READ_EMBEDDINGS:
        return True
    # transformers 5.23 loads only int8 of compressed-tensors' layouts, and only if the head is not
    # tied to the embedding.
    tied = view.config is None or view.config.tied_embeddings
    return not tied and isinstance(view.method, CompressedTensors) and coded.layout is INT8


def _is_claimed(view: View, module: str) -> bool:
    """Return whether a config that lists no modules includes one: in an unknown family, if the same
    module of most layers is quantized.
    """
    if view.has_known_tensors or not isinstance(view.method, Gptq | Awq):
        return True
    # Names that differ only in numbers are those of the same module in other layers.
    role = _NUMBER.sub("*", module)
    peers = [linear for linear in view.linears if _NUMBER.sub("*", linear) == role]
    quantized_count = sum(peer in view.coded for peer in peers)
    return 2 * quantized_count > len(peers)


def _check_fused_schemes(view: View) -> Iterator[Finding]:
    """Compare the schemes of linears that runtimes fuse, and of experts that they stack."""
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
    """Find the first module whose scheme differs from that of the first of a set."""
    # One tensor on disk may contain several linears, so modules are listed once.
    modules: dict[str, None] = {}
    for name in canonical:
        tensor = view.on_disk.get(f"{name}.weight")
        if tensor is not None:
            modules[tensor.module] = None
    present: list[str] = []
    for module in modules:
        if module in view.coded or f"{module}.weight" in view.stored:
            present.append(module)
    for module in present:
        # Another rule reports the module that lacks tensors.
        if module in view.coded and view.coded[module].missing(None):
            return
    schemes = [view.scheme(module) for module in present]
    for module, (signature, scheme) in zip(present, schemes, strict=True):
        if signature != schemes[0][0]:
            first_name = _shorten_name(present[0])
            name = _shorten_name(module)
            yield finding(rule, location, f"{first_name}: {schemes[0][1]}; {name}: {scheme}")
            return


def _shorten_name(module: str) -> str:
    return ".".join(module.split(".")[-2:])


def _check_tensor_parallelism(view: View, tp: int) -> Iterator[Finding]:
    """Find widths and groups that the degree of tensor parallelism does not divide."""
    config = view.config
    if tp == 1 or config is None or not view.has_known_tensors:
        return
    if config.num_heads % tp:
        yield finding("tp-heads", "config.json", f"{config.num_heads} heads over {tp}")
    # With more ranks than KV heads, several ranks have a copy of the same head.
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
            # One finding is enough for all experts of a stack.
            stacked.add(tensor.name)
        # A column-parallel linear is split by outputs, a row-parallel linear by inputs [O, I].
        axis = {"row": 1, "column": 0}.get(parameter.linear.parallel)
        if axis is None or parameter.role in ("head", "attention.k", "attention.v"):
            continue
        width = parameter.shape[axis]
        claim = view.claims.modules.get(tensor.module)
        if width % tp:
            # The numbers of heads, above, decide for attention.
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
        elif axis == 0 and (width // tp) % 8:
            # AWQ packs the codes of eight outputs in an int32.
            coded = view.coded.get(tensor.module)
            if coded is not None and coded.layout is AWQ:
                yield finding(
                    "tp-groups", tensor.module, f"{width} outputs over {tp}, eight to a word"
                )


def check_cache(view: View) -> Iterator[Finding]:
    """Check the scheme and the scales of the cache; the scales, a few bytes each, are read."""
    folder = view.folder
    tensors = kv_cache.cache_tensors(view.stored)
    # Of keys or values; scales of queries belong to the quantized attention itself.
    scales: dict[str, kv_cache.CacheTensor] = {}
    for name, entry in tensors.items():
        if entry.kind == "scale" and {*entry.parts} & {"k", "v"}:
            scales[name] = entry
    if folder.settings is None:
        settings = None
    else:
        settings = Settings(folder.settings, folder.root / CONFIG, SETTINGS)
    try:
        scheme = kv_cache.read_cache_scheme(settings)
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
    # For an unknown family, the last layer with a scale is taken for the model's last.
    if view.config is None:
        layers = highest + 1
        # Layers of linear attention or a state space cache no keys and values.
        caching_layers = kv_cache.find_layers_with_attention(view.stored) or set(range(layers))
    else:
        layers = view.config.num_layers
        caching_layers = set(view.config.caching_layers)
    if folder.complete and scales:
        for layer in kv_cache.layers_without_scales(scales, layers):
            if layer not in caching_layers:
                continue
            layer_scales = [name for name, entry in scales.items() if entry.layer == layer]
            yield finding(
                "kv-scales-missing",
                f"layer {layer}",
                f"found {', '.join(layer_scales) or 'none'}, expected scales of keys and values",
            )
    if folder.complete and kv_cache.needs_zero_points(scheme):
        for layer, part in kv_cache.find_missing_zero_points(tensors, layers):
            yield finding("kv-no-zero-points", f"layer {layer}", f"found none of its {part}")
    if view.config is None:
        heads = (0, 0)
    else:
        heads = (view.config.num_heads, view.config.num_kv_heads)
    for name, entry in tensors.items():
        count = kv_cache.find_expected_count(entry, view.stored[name], scheme, *heads)
        if count is not None:
            yield finding(
                "kv-scale-shape",
                name,
                f"found {list(view.stored[name].shape)}, expected {count} elements",
            )
        yield from _check_cache_value(view, name, entry)


def _check_cache_value(view: View, name: str, entry: kv_cache.CacheTensor) -> Iterator[Finding]:
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
        if claim is None or claim.bits not in (4, 8) or not _has_packed_zeros(coded):
            continue
        if claim.symmetric and coded.layout is GPTQ and (deep or sampled < _SAMPLED):
            sampled += 1
            yield from _check_symmetric_zeros(view, coded, claim.bits)
        elif (
            deep
            and claim.bits == _BITS
            and not claim.symmetric
            and coded.layout
            and coded.layout.zeros
        ):
            # Reported by rules about values.
            with contextlib.suppress(CheckpointError):
                codes, zeros = _find_packed_tensors(coded)
                above[module] = _mean_code(view, codes) - _mean_code(view, zeros)
    expected = _read_zero_point_offset(view)
    # quantkit copies the zero points of its source, of whichever version.
    if not above or writers(view.folder.settings or {}) & {WRITER}:
        return
    # The mean of a weight is near 0.
    if abs(statistics.median(above.values()) - expected) > _TOLERANCE:
        for module, distance in above.items():
            message = (
                f"codes lie {distance:.2f} above zero points as stored; by the config {expected}"
            )
            _, zeros = _find_packed_tensors(view.coded[module])
            yield finding("zero-version", zeros.name, message)


def _has_packed_zeros(coded: Description) -> bool:
    """Return whether there are packed codes and zero points, in words."""
    # A layout without zero points has nothing to compare, and is skipped later.
    if coded.layout is None or not coded.layout.zeros:
        return True
    for suffix in (coded.layout.codes, coded.layout.zeros):
        tensor = coded.tensors.get(suffix)
        if tensor is None or tensor.dtype != DType.INT32:
            return False
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            return False
    return True


def _read_zero_point_offset(view: View) -> int:
    """Read from the config what must be added to stored zero points."""
    settings = view.folder.settings or {}
    # GPTQ's first format stores zero points minus one.
    version = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if isinstance(view.method, Gptq) and version != "gptq_v2":
        return 1
    return 0


def _check_symmetric_zeros(view: View, coded: Description, bits: int) -> Iterator[Finding]:
    """Check symmetric zero points, which are all the same."""
    tensor = coded.tensors[QZEROS]
    if tensor.nbytes > _MAX_READ_BYTES:
        return
    try:
        data = view.folder.homes[tensor.name].read_bytes(tensor.name)
    except CheckpointError:
        # Reported by rules about values.
        return
    # A symmetric zero point is the middle code, and each byte has one or two of them.
    if data:
        common, _ = Counter(data).most_common(1)[0]
    else:
        common = 0
    middle = 1 << (bits - 1)
    code = common & ((1 << bits) - 1)
    expected = middle - _read_zero_point_offset(view)
    if code != expected and code in (middle, middle - 1):
        yield finding(
            "zero-version",
            tensor.name,
            f"symmetric, and {code} is stored; by the config {expected}",
        )


def _find_packed_tensors(coded: Description) -> tuple[StoredTensor, StoredTensor]:
    assert coded.layout is not None
    return coded.tensors[coded.layout.codes], coded.tensors[coded.layout.zeros]


def _mean_code(view: View, words: StoredTensor) -> float:
    home = view.folder.homes[words.name]
    total = count = 0
    for part in home.row_parts(words.name):
        data = home.read(words.name, part).contiguous().view(-1).view(torch.uint8)
        # The order of codes in a word has no influence on their mean.
        data = torch.stack((data & 0xF, data >> 4))
        total += int(data.sum(dtype=torch.int64))
        count += data.numel()
    return total / max(count, 1)
