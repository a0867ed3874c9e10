"""The scales of a quantized key/value cache, which lie in a folder beside the weights.

Nothing here uses them: the runtime has a cache of its own. They are carried, or dropped with a note. Their names, of
layer N's attention ``A = model.layers.N.self_attn``:

==================================================  ==========================================================
``A.k_scale``, ``A.v_scale``, ``A.q_scale``         compressed-tensors, with ``_zero_point`` if asymmetric
``A.k_proj.output_scale``, ``A.v_proj...``          older compressed-tensors, AutoFP8, Quark
``A.k_proj.k_scale``, ``A.v_proj.v_scale``          NVIDIA's Model Optimizer
``A.kv_scale``                                      the first releases of AutoFP8: one for both
==================================================  ==========================================================

The scheme is ``kv_cache_scheme`` in the settings: an object, or ``static`` in AutoFP8's; Model Optimizer's
``kv_cache_quant_algo`` is a name. Sources: compressed-tensors' `KVCacheScaleType` and vLLM's mapping of these names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, NonFiniteError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.compressed_tensors import KV_CACHE_SCHEME
from quantkit.json_values import Settings, shown
from quantkit.tensors.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

_ALGORITHM = "kv_cache_quant_algo"
_BY_NAME = ("static", "dynamic")
_NAME = re.compile(
    r"(?:.+\.)?layers\.(?P<layer>\d{1,9})\.(?:self_attn|attention)\.(?:attn\.)?(?:"
    r"(?P<own>[qkv]|kv)_(?P<kind>scale|zero_point)"
    r"|(?:k|v|qkv)_proj\.(?P<inside>[kv])_scale"
    r"|(?P<output>[qkv])_proj\.output_(?P<output_kind>scale|zero_point)"
    r"|prob_output_scale)"
)


@dataclass(frozen=True)
class CacheTensor:
    """What the name of a tensor says of its place in a quantized cache.

    Attributes:
        layer: its number.
        parts: ``k``, ``v`` or both, of which it is the scale; none of queries, probabilities and zero points.
    """

    layer: int
    parts: tuple[str, ...]


def cache_tensor(name: str) -> CacheTensor | None:
    """What a tensor is in a quantized cache; None if its name is no such tensor's."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    zeros = "zero_point" in (match["kind"], match["output_kind"])
    own = match["own"] or match["inside"] or match["output"] or ""
    return CacheTensor(int(match["layer"]), () if zeros else tuple(one for one in own if one in "kv"))


def stated_scheme(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The scheme of the cache as settings of a quantization state it; None if they state none.

    Raises:
        ValueError: for one that is neither an object nor a known name; its text shows the value.
    """
    value, named = (None if settings is None else settings.get(key) for key in (KV_CACHE_SCHEME, _ALGORITHM))
    if isinstance(value, Mapping):
        return value or None
    if value in _BY_NAME and isinstance(value, str):
        return {"num_bits": 8, "type": "float", "dynamic": value == "dynamic"}
    if value is not None:
        raise ValueError(shown(value))
    if named is not None and not isinstance(named, str):
        raise ValueError(shown(named))
    if named == "FP8":
        return {"num_bits": 8, "type": "float", "dynamic": False}
    return {"type": named} if named else None


@dataclass(frozen=True)
class KvCache:
    """A folder's account of a quantized key/value cache.

    Attributes:
        scheme: as the settings state it; None if they do not.
        tensors: scales and zero points by name, in the order of the layers, and the files that hold them.
        layers: how many there are in the model.
        rewritable: whether a folder that is written can say the same: the settings are those of compressed-tensors, and
            no weight is read as other numbers than are stored.
    """

    scheme: Mapping[str, Any] | None
    tensors: Mapping[str, TensorFile]
    layers: int
    rewritable: bool = False

    @property
    def scaled_layers(self) -> int:
        """How many layers have scales of keys and of values."""
        return self.layers - len(layers_without_scales(self.tensors, self.layers))

    def stored(self) -> list[tuple[StoredTensor, bytes]]:
        """The tensors as they lie, with their bytes."""
        return [(file.tensors[name], file.read_bytes(name)) for name, file in self.tensors.items()]

    def values(self) -> dict[tuple[int, str], Tensor]:
        """The scales in float32 by layer and part, whatever their names."""
        found: dict[tuple[int, str], Tensor] = {}
        for name, file in self.tensors.items():
            told = cache_tensor(name)
            assert told is not None, "only such tensors are taken"
            value = file.read(name).float().flatten()
            found |= {(told.layer, part): value for part in told.parts}
        return found

    def require_sound(self, *, allow_nonfinite: bool) -> None:
        """Check the scales before they are written again.

        Raises:
            NonFiniteError: for NaN and Inf, unless they are allowed.
            CheckpointError: for a scale that is not positive.
        """
        for name, file in self.tensors.items():
            told = cache_tensor(name)
            if told is None or not told.parts:
                continue
            value = file.read(name).float()
            if not value.isfinite().all():
                if allow_nonfinite:
                    continue
                raise NonFiniteError(f"tensor '{name}', a scale of the KV cache, is NaN or Inf", path=file.path)
            if not (value > 0).all():
                raise CheckpointError(
                    f"tensor '{name}', a scale of the KV cache, is not positive", path=file.path,
                    found=f"{value.min().item():g}", hint="quantize the cache again",
                )  # fmt: skip

    def line(self) -> str:
        """For people."""
        count = f"{self.scaled_layers} of {self.layers} layers" if self.tensors else "no layer"
        return f"{scheme_text(self.scheme)}, scales of {count}"

    def difference(self, other: KvCache) -> str | None:
        """In what two folders differ, in words; None if they say the same."""
        if _said(self.scheme) != _said(other.scheme):
            return f"the schemes of the KV cache differ: {scheme_text(self.scheme)} and {scheme_text(other.scheme)}"
        own, others = self.values(), other.values()
        differing = sorted(
            key for key in {*own, *others}
            if key not in own or key not in others or not own[key].equal(others[key])
        )  # fmt: skip
        if not differing:
            return None
        layer, part = differing[0]
        told = (f"{one[layer, part].tolist()}"[:40] if (layer, part) in one else "none" for one in (own, others))
        return f"scales of the KV cache differ in {len(differing)} places: layer {layer}, {part}: {' and '.join(told)}"


def _said(scheme: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a scheme says, without keys that say nothing."""
    return {key: value for key, value in (scheme or {}).items() if value is not None}


def scheme_text(scheme: Mapping[str, Any] | None) -> str:
    """A scheme for people."""
    if scheme is None:
        return "no scheme stated"
    bits, strategy = scheme.get("num_bits", ""), scheme.get("strategy")
    kind = "dynamic" if scheme.get("dynamic") else "static"
    return f"{scheme.get('type', 'int')}{bits}{f' per {strategy}' if strategy else ''}, {kind}"[:80]


def layers_without_scales(names: Iterable[str], layers: int) -> list[int]:
    """The layers that lack a scale of their keys or values."""
    found = {(told.layer, part) for name in names if (told := cache_tensor(name)) is not None for part in told.parts}
    return [layer for layer in range(layers) if not {(layer, "k"), (layer, "v")} <= found]


def take_kv_cache(
    stored: MutableMapping[str, StoredTensor], files: MutableMapping[str, TensorFile], settings: Settings | None,
    layers: int, path: Path,
) -> KvCache | None:  # fmt: skip
    """Take the tensors of a quantized cache out of a folder's tensors.

    Args:
        stored, files: the folder's tensors, and where they lie; those of the cache are removed.
        settings: of the folder's quantization.
        layers: how many the model has.
        path: what errors name.

    Returns:
        What the folder says of its cache; None if it says nothing.

    Raises:
        CheckpointError: for a scheme that is none, and scales of no layer or twice for one.
        UnsupportedError: for scales that are no floats.
    """
    try:
        scheme = stated_scheme(None if settings is None else settings.values)
    except ValueError as error:
        raise CheckpointError(
            "the scheme of the KV cache is none that is known", path=path if settings is None else settings.path,
            found=str(error), expected=f"an object under {KV_CACHE_SCHEME}, or {' or '.join(_BY_NAME)}",
        ) from None  # fmt: skip
    found = {name: told for name in stored if (told := cache_tensor(name)) is not None}
    _require_understood(found, stored, layers, path)
    tensors = {name: files[name] for name in sorted(found, key=lambda name: (found[name].layer, name))}
    for name in found:
        del stored[name], files[name]
    return KvCache(scheme, tensors, layers) if tensors or scheme is not None else None


def _require_understood(
    found: Mapping[str, CacheTensor], stored: Mapping[str, StoredTensor], layers: int, path: Path
) -> None:
    owners: dict[tuple[int, str], str] = {}
    for name, told in found.items():
        if told.layer >= layers:
            raise CheckpointError(
                f"tensor '{name}' is of a layer that the config does not count", path=path, found=f"layer {told.layer}",
                expected=f"layers 0 to {layers - 1}",
            )  # fmt: skip
        tensor = stored[name]
        if told.parts and (tensor.dtype not in FLOATS or 0 in tensor.shape):
            raise UnsupportedError(
                f"tensor '{name}', a scale of the KV cache, is no float", path=path,
                found=f"{tensor.dtype} {list(tensor.shape)}", expected=" or ".join(FLOATS),
            )  # fmt: skip
        for part in told.parts:
            if (other := owners.setdefault((told.layer, part), name)) != name:
                raise CheckpointError(
                    f"the KV cache of layer {told.layer} has two scales of its {part}", path=path,
                    found=f"'{other}' and '{name}'", expected="one of them",
                )  # fmt: skip


def one_sided(first: KvCache | None, second: KvCache | None, paths: Collection[Path]) -> str | None:
    """Which of two folders alone says something of a quantized cache, in words; None if both do, or none."""
    if (first is None) == (second is None):
        return None
    has, lacks = paths if second is None else reversed(list(paths))
    return f"{has} has scales or a scheme of a quantized KV cache, {lacks} has none"
