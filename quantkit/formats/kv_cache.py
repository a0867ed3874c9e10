"""The scales of a quantized key/value cache, which are stored with the weights, and its scheme in
the settings.

They are copied, or dropped with a note; `kv_scales` has the scheme that is also run. Their names,
for layer N's attention ``A``, such as ``model.layers.N.self_attn``:

==================================================
==========================================================
``A.k_scale``, ``A.v_scale``, ``A.q_scale``         compressed-tensors, with ``_zero_point`` if
                                                    asymmetric
``A.k_proj.output_scale``, ``A.v_proj...``          older compressed-tensors, AutoFP8, Quark
``A.k_proj.k_scale``, ``A.v_proj.v_scale``          NVIDIA's Model Optimizer
``A.kv_scale``                                      the first releases of AutoFP8: one for both
==================================================
==========================================================

The scheme is ``kv_cache_scheme``: an object, or ``static`` in AutoFP8's settings; Model Optimizer's
``kv_cache_quant_algo`` is a name. Sources: compressed-tensors' `KVCacheScaleType` and
`QuantizationArgs`, vLLM's mapping of these names and its `BaseKVCacheMethod`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.base.json_values import Settings, format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, NonFiniteError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.compressed_tensors import KV_CACHE_SCHEME
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import torch

Scheme = Mapping[str, Any]
TYPES: Mapping[str, tuple[DType, ...]] = {
    "scale": FLOATS,
    "zero_point": (
        *FLOATS,
        DType.FLOAT8_E4M3FN,
        DType.FLOAT8_E4M3FNUZ,
        DType.FLOAT8_E5M2,
        DType.FLOAT8_E5M2FNUZ,
        DType.INT8,
        DType.INT16,
        DType.INT32,
        DType.INT64,
        DType.UINT8,
    ),
}
"""The types of scales and zero points that are read."""
_AGAIN = Message(
    "quantize the cache again, or remove its scales: ",
    Option("dequantize", value=True),
    " writes an unquantized model",
)
Place = tuple[int, str, str]
"""Layer, part and kind of a tensor, see `CacheTensor`."""
_ATTENTION = r"(?:.+\.)?layers\.(?P<layer>\d{1,9})\.(?:self_attn|attention|attn|mixer)\."
_NAME = re.compile(
    rf"{_ATTENTION}(?:attn\.)?(?:"
    r"(?P<direct>[qkv]|kv)_(?P<kind>scale|zero_point)"
    r"|(?:k|v|qkv)_proj\.(?P<inside>[kv])_scale"
    r"|(?P<output>[qkv])_proj\.output_(?P<output_kind>scale|zero_point)"
    r"|(?P<probabilities>prob_output)_scale)"
)
_PROJECTION = re.compile(rf"{_ATTENTION}(?:k|v|qkv)_proj\.")
_ALGORITHM = "kv_cache_quant_algo"
_BY_NAME = ("static", "dynamic")
_BITS: Mapping[str, tuple[int, ...]] = {"int": tuple(range(1, 33)), "float": (4, 6, 8)}
_TENSOR = "tensor"
_ATTN_HEAD = "attn_head"
_TOKEN = "token"
_BLOCK = "block"
_GROUPED = ("group", "tensor_group")
_STRATEGIES = (_TENSOR, "channel", *_GROUPED, _BLOCK, _TOKEN, _ATTN_HEAD)
_DYNAMIC_STRATEGIES = (_TOKEN, _TENSOR, *_GROUPED)
_LOCAL = "local"


@dataclass(frozen=True)
class CacheTensor:
    """What the name of a tensor says of its place in a quantized cache.

    Attributes:
        layer: its number.
        parts: what it scales: ``q``, ``k``, ``v``, the last two together, or ``prob_output``.
        kind: ``scale`` or ``zero_point``.
    """

    layer: int
    parts: tuple[str, ...]
    kind: str

    @property
    def places(self) -> tuple[Place, ...]:
        """Return its places in the cache."""
        return tuple((self.layer, part, self.kind) for part in self.parts)


def cache_tensors(names: Iterable[str]) -> dict[str, CacheTensor]:
    """Recognize the tensors of a quantized cache by name, with their places in it."""
    tensors: dict[str, CacheTensor] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        letters = match["direct"] or match["inside"] or match["output"]
        # `kv` is one scale for keys and values, `prob_output` is no list of letters.
        if letters is None:
            parts = (match["probabilities"],)
        else:
            parts = tuple(letters)
        kind = match["kind"] or match["output_kind"] or "scale"
        tensors[name] = CacheTensor(int(match["layer"]), parts, kind)
    return tensors


@dataclass(frozen=True)
class KvCache:
    """What a folder says of a quantized key/value cache.

    Attributes:
        path: of the folder.
        scheme: as the settings state it; None if they do not.
        tensors: scales and zero points by name, in the order of the layers, and the files that hold
            them.
        layers, num_heads, num_kv_heads: of the model; 0 heads if they are unknown.
        rewritable: whether a folder that is written can say the same: the settings are those of
            compressed-tensors, and no weight is read as other numbers than are stored.
        attention: the modules on disk whose scales are calibrated; empty for a cache that is read.
    """

    path: Path
    scheme: Scheme | None
    tensors: Mapping[str, TensorFile]
    layers: int
    num_heads: int
    num_kv_heads: int
    rewritable: bool = False
    attention: tuple[str, ...] = ()

    def read_tensors(self) -> list[tuple[StoredTensor, bytes]]:
        """Read the tensors, with their bytes."""
        tensors: list[tuple[StoredTensor, bytes]] = []
        for name, file in self.tensors.items():
            tensors.append((file.tensors[name], file.read_bytes(name)))
        return tensors

    def values(self) -> dict[Place, torch.Tensor]:
        """Read the scales and zero points, flat and in the types in which they are stored,
        whatever their names.
        """
        values: dict[Place, torch.Tensor] = {}
        for name, entry in cache_tensors(self.tensors).items():
            value = self.tensors[name].read(name).flatten()
            for place in entry.places:
                values[place] = value
        return values

    def require_sound(self, *, allow_nonfinite: bool) -> None:
        """Check scales and zero points before they are written again.

        Raises:
            NonFiniteError: for NaN and Inf, unless they are allowed.
            CheckpointError: for a scale that is not positive, a tensor whose number of elements
                does not fit the scheme, and an asymmetric scheme without zero points.
        """
        for name, entry in cache_tensors(self.tensors).items():
            file = self.tensors[name]
            tensor = self.tensors[name].tensors[name]
            description = f"tensor '{name}', a {entry.kind.replace('_', ' ')} of the KV cache,"
            count = find_expected_count(
                entry, tensor, self.scheme, self.num_heads, self.num_kv_heads
            )
            if count is not None:
                raise CheckpointError(
                    f"{description} does not match the scheme",
                    path=file.path,
                    found=f"shape {list(tensor.shape)}",
                    expected=f"{count} elements" if count > 1 else "one element",
                    hint=_AGAIN,
                )
            value = file.read(name).double()
            if not value.isfinite().all():
                if allow_nonfinite:
                    continue
                raise NonFiniteError(f"{description} is NaN or Inf", path=file.path)
            if entry.kind == "scale" and not (value > 0).all():
                smallest = f"{value.min().item():g}"
                raise CheckpointError(
                    f"{description} is not positive", path=file.path, found=smallest, hint=_AGAIN
                )
        if not needs_zero_points(self.scheme):
            return
        lacking = find_missing_zero_points(self.tensors, self.layers)
        if lacking:
            layer, part = lacking[0]
            raise CheckpointError(
                f"the KV cache lacks the zero points of layer {layer}'s {part}",
                path=self.path,
                found="an asymmetric scheme",
                expected=f"a tensor '{part}_zero_point' of this layer",
                hint=_AGAIN,
            )

    @property
    def layers_with_scales(self) -> int:
        """Count the layers with scales of their keys and values."""
        return self.layers - len(layers_without_scales(self.tensors, self.layers))

    def line(self) -> str:
        """Describe the cache in a line, for people."""
        return cache_text(self.scheme, self.layers_with_scales, self.layers)

    def note(self, *, run_here: bool) -> str:
        """Describe what becomes of it when the model runs, for people; `run_here` is whether what
        runs the model rounds its keys and values.
        """
        if run_here:
            reason = why_not_run(self.scheme)
        else:
            reason = "what runs the model caches no keys and values of this kind"
        if reason is not None:
            return (
                f"the KV cache is to be quantized ({self.line()}); this is not used here: {reason}"
            )
        note = f"the KV cache is quantized ({self.line()}): keys and values are rounded to it"
        scaled_parts = {part for _, part, _ in _places(self.tensors)}
        if scaled_parts - {"k", "v"}:
            note += "; scales of queries and probabilities are not used"
        return note

    def difference(self, other: KvCache) -> str | None:
        """Describe the difference between two folders, in words; None if they say the same."""
        if _drop_unset_keys(self.scheme) != _drop_unset_keys(other.scheme):
            return (
                f"the schemes of the KV cache differ: {scheme_text(self.scheme)} and"
                f" {scheme_text(other.scheme)}"
            )
        values = self.values()
        other_values = other.values()
        # By place, because formats differ in the names and in how many places share a tensor.
        differing: list[Place] = []
        for place in sorted({*values, *other_values}):
            is_in_both = place in values and place in other_values
            if not is_in_both or not _is_equal(values[place], other_values[place]):
                differing.append(place)
        if not differing:
            return None
        layer, part, kind = differing[0]
        texts = []
        for cache_values in (values, other_values):
            value = cache_values.get(differing[0])
            # Cut off, since a scale may have an element for each head or channel.
            texts.append("none" if value is None else f"{value.tolist()}"[:40])
        return (
            f"scales or zero points of the KV cache differ in {len(differing)} places:"
            f" layer {layer}, {part}_{kind}: {' and '.join(texts)}"
        )


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal to the bit, or the same numbers where their types
    differ.
    """
    # As bytes, so that NaN equals itself.
    if first.dtype == second.dtype:
        return first.view(DType.UINT8.torch).equal(second.view(DType.UINT8.torch))
    return first.double().equal(second.double())


def _drop_unset_keys(scheme: Scheme | None) -> dict[str, Any]:
    """Select the keys of a scheme that say something."""
    return {key: value for key, value in (scheme or {}).items() if value is not None}


def layers_without_scales(names: Iterable[str], layers: int) -> list[int]:
    """Find the layers that lack a scale of their keys or values."""
    places = _places(names)
    lacking: list[int] = []
    for layer in range(layers):
        if not {(layer, "k", "scale"), (layer, "v", "scale")} <= places:
            lacking.append(layer)
    return lacking


def find_missing_zero_points(names: Iterable[str], layers: int) -> list[tuple[int, str]]:
    """Find the layers and parts that have a scale and no zero point; if there are no scales, all
    keys and values.
    """
    places = _places(names)
    scaled = set()
    for layer, part, kind in places:
        if kind == "scale" and part in ("q", "k", "v"):
            scaled.add((layer, part))
    if not scaled:
        for layer in range(layers):
            scaled |= {(layer, "k"), (layer, "v")}
    lacking = []
    for layer, part in sorted(scaled):
        if (layer, part, "zero_point") not in places:
            lacking.append((layer, part))
    return lacking


def _places(names: Iterable[str]) -> set[Place]:
    places: set[Place] = set()
    for entry in cache_tensors(names).values():
        for place in entry.places:
            places.add(place)
    return places


def find_expected_count(
    entry: CacheTensor,
    tensor: StoredTensor,
    scheme: Scheme | None,
    num_heads: int,
    num_kv_heads: int,
) -> int | None:
    """Compute how many elements a tensor should have by the scheme; None if it fits, or the scheme
    does not determine it.

    Args:
        num_heads, num_kv_heads: of the model; 0 if unknown.
    """
    if scheme is None or scheme.get("dynamic"):
        return None
    # Names of Model Optimizer's algorithms say nothing of shapes.
    if str(scheme.get("type", "int")).lower() not in _BITS:
        return None
    count: int | None = None
    strategy = _strategy(scheme)
    if strategy == _TENSOR:
        count = 1
    elif strategy == _ATTN_HEAD:
        heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
        count = heads.get(entry.parts[0]) or None
    if count == math.prod(tensor.shape):
        return None
    return count


def extract_kv_cache(
    stored: MutableMapping[str, StoredTensor],
    files: MutableMapping[str, TensorFile],
    settings: Settings | None,
    config: ModelConfig,
    path: Path,
) -> KvCache | None:
    """Take the tensors of a quantized cache out of a folder's tensors.

    Args:
        stored, files: the folder's tensors, and their files; those of the cache are removed.
        settings: of the folder's quantization.

    Returns:
        What the folder says of its cache; None if it says nothing.

    Raises:
        CheckpointError: for an invalid scheme, see `read_cache_scheme`, and tensors of no layer or
            twice for one.
        UnsupportedError: for scales that are not floats, and zero points that are not numbers.
    """
    scheme = read_cache_scheme(settings)
    layers = config.num_layers
    entries = cache_tensors(stored)
    _require_understood(entries, stored, layers, path)
    # In a fixed order, in which they are also written.
    tensors: dict[str, TensorFile] = {}
    for name in sorted(entries, key=lambda name: (entries[name].layer, name)):
        tensors[name] = files[name]
    for name in entries:
        del stored[name], files[name]
    if not tensors and scheme is None:
        return None
    return KvCache(
        path=path,
        scheme=scheme,
        tensors=tensors,
        layers=layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )


def _require_understood(
    cache_tensors: Mapping[str, CacheTensor],
    stored: Mapping[str, StoredTensor],
    layers: int,
    path: Path,
) -> None:
    owners: dict[Place, str] = {}
    for name, entry in cache_tensors.items():
        if entry.layer >= layers:
            problem = f"tensor '{name}' is of a layer that the config does not count"
            last = layers - 1
            raise CheckpointError(
                problem, path=path, found=f"layer {entry.layer}", expected=f"layers 0 to {last}"
            )
        tensor = stored[name]
        kind = entry.kind.replace("_", " ")
        if tensor.dtype not in TYPES[entry.kind] or 0 in tensor.shape:
            number_kind = "float" if kind == "scale" else "number"
            raise UnsupportedError(
                f"tensor '{name}', a {kind} of the KV cache, is not a {number_kind}",
                path=path,
                found=f"{tensor.dtype} {list(tensor.shape)}",
                expected=" or ".join(TYPES[entry.kind]),
            )
        for place in entry.places:
            # The names of several tools may mean the same place.
            owner = owners.setdefault(place, name)
            if owner != name:
                problem = f"the KV cache of layer {entry.layer} has two {kind}s of its {place[1]}"
                raise CheckpointError(
                    problem, path=path, found=f"'{owner}' and '{name}'", expected="one of them"
                )


def read_cache_scheme(settings: Settings | None) -> Scheme | None:
    """Read the scheme of the cache as settings of a quantization state it; None if they state
    none.

    Raises:
        CheckpointError: for a value that is neither an object nor a known name, and for an object
            that compressed-tensors does not accept, naming the key.
    """
    if settings is None:
        return None
    value = settings.values.get(KV_CACHE_SCHEME)
    algorithm = settings.values.get(_ALGORITHM)
    if isinstance(value, Mapping):
        invalid = _find_invalid_key(value)
        if invalid is not None:
            key, expected = invalid
            raise CheckpointError(
                f"compressed-tensors does not accept {KV_CACHE_SCHEME}.{key}",
                path=settings.path,
                found=format_value(value.get(key)),
                expected=expected,
            )
        return value or None
    # AutoFP8 states only whether scales are stored or computed.
    if value in _BY_NAME and isinstance(value, str):
        return {"num_bits": 8, "type": "float", "dynamic": value == "dynamic"}
    unknown_value = value
    if value is None and not isinstance(algorithm, str):
        unknown_value = algorithm
    if unknown_value is not None:
        raise CheckpointError(
            "the scheme of the KV cache is not known",
            path=settings.path,
            found=format_value(unknown_value),
            expected=f"an object under {KV_CACHE_SCHEME}, or {' or '.join(_BY_NAME)}",
        )
    # Model Optimizer's FP8 has one static scale per tensor.
    if algorithm == "FP8":
        return {"num_bits": 8, "type": "float", "dynamic": False}
    # Its other algorithms are carried by name, and not run.
    if algorithm:
        return {"type": algorithm}
    return None


def states_scheme(settings: Settings) -> bool:
    """Return whether settings of a quantization say anything of the cache."""
    return settings.has(KV_CACHE_SCHEME) or settings.has(_ALGORITHM)


def scheme_text(scheme: Scheme | None) -> str:
    """Describe a scheme for people."""
    if scheme is None:
        return "no scheme stated"
    text = f"{scheme.get('type', 'int')}{scheme.get('num_bits', '')}"
    strategy = scheme.get("strategy")
    if strategy:
        text += f" per {strategy}"
    kind = "dynamic" if scheme.get("dynamic") else "static"
    # Cut off, since its values are those of a file.
    return f"{text}, {kind}"[:80]


def cache_text(scheme: Scheme | None, scaled: int, layers: int) -> str:
    """Describe the scheme and how many layers have scales, for people."""
    scaled_layers = f"{scaled} of {layers} layers" if scaled else "no layer"
    return f"{scheme_text(scheme)}, scales of {scaled_layers}"


def why_not_run(scheme: Scheme | None) -> str | None:
    """Explain why a cache of a scheme is not run here, in words; None if it is: float8, with one
    static scale per tensor.
    """
    if scheme is None:
        return "the settings state no scheme"
    # The defaults are those of compressed-tensors' `QuantizationArgs`.
    number_type = str(scheme.get("type", "int")).lower()
    if number_type != "float" or scheme.get("num_bits", 8) != 8:
        return "only float8 is supported"
    if scheme.get("dynamic"):
        return "only static scales are supported"
    if _strategy(scheme) != _TENSOR:
        return "only one scale per tensor is supported"
    if not scheme.get("symmetric", True):
        return "zero points are not supported"
    return None


def find_layers_with_attention(names: Iterable[str]) -> set[int]:
    """Find the layers that have projections of keys or values, by the names of the tensors of a
    model of any architecture.
    """
    layers: set[int] = set()
    for name in names:
        match = _PROJECTION.match(name)
        if match is not None:
            layers.add(int(match["layer"]))
    return layers


def needs_zero_points(scheme: Scheme | None) -> bool:
    """Return whether readers take zero points from the folder."""
    return scheme is not None and not scheme.get("symmetric", True) and not scheme.get("dynamic")


def _strategy(scheme: Scheme) -> str | None:
    """Determine the strategy, as stated or from the group size; None if it is unknown."""
    strategy = scheme.get("strategy")
    size = scheme.get("group_size")
    # As `QuantizationArgs` infers it.
    if strategy is None:
        if size is None:
            return _TENSOR
        if size > 0:
            return "group"
        if size == -1:
            return "channel"
        return None
    if isinstance(strategy, str) and strategy.lower() in _STRATEGIES:
        return strategy.lower()
    return None


def _find_invalid_key(scheme: Scheme) -> tuple[str, str] | None:
    """Find the first key with a value that `QuantizationArgs` does not accept, and what it
    accepts; None if there is none.

    Values are of JSON's own types: numbers and booleans in quotes are refused.
    """
    kind = scheme.get("type", "int")
    bits = scheme.get("num_bits", 8)
    size = scheme.get("group_size")
    allowed_bits: tuple[int, ...] = ()
    if isinstance(kind, str):
        allowed_bits = _BITS.get(kind.lower(), ())
    if not allowed_bits:
        return "type", " or ".join(_BITS)
    # Not `isinstance`, which is also true of booleans.
    if type(bits) is not int or bits not in allowed_bits:
        if len(allowed_bits) > 3:
            return "num_bits", f"an integer from 1 to {allowed_bits[-1]}"
        return "num_bits", "4, 6 or 8"
    if not isinstance(scheme.get("symmetric", True), bool):
        return "symmetric", "true or false"
    if size is not None and (type(size) is not int or size < -1):
        return "group_size", "a positive integer, or -1 for channels"
    # After the group size, from which it may be inferred.
    strategy = _strategy(scheme)
    if strategy is None:
        return "strategy", ", ".join(_STRATEGIES)
    if (size is not None and size > 0) != (strategy in _GROUPED):
        expected = f"a positive integer for {' and '.join(_GROUPED)}, and for no other strategy"
        return "group_size", expected
    if (scheme.get("block_structure") is not None) != (strategy == _BLOCK):
        return "block_structure", f"rows and columns for {_BLOCK}, and for no other strategy"
    dynamic = scheme.get("dynamic", False)
    # A static scale per tensor, with dynamic scales of groups.
    is_local = isinstance(dynamic, str) and dynamic.lower() == _LOCAL
    if not (is_local or isinstance(dynamic, bool)):
        return "dynamic", f"true, false or {_LOCAL}"
    if is_local and strategy != "tensor_group":
        return "dynamic", f"true or false for {strategy}"
    if dynamic and strategy not in _DYNAMIC_STRATEGIES:
        return "dynamic", f"false for {strategy}"
    if strategy == _TOKEN and not dynamic:
        return "dynamic", f"true for {strategy}"
    return None
