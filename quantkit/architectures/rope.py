"""Rotary embedding settings, read from and written to Hugging Face keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, shown

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": (),
}
_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # YaRN's own, where a config says nothing
# Present in published files, without effect on the arithmetic.
_IGNORED = {"rope_type", "type", "rope_theta", "finetuned", "original_max_position_embeddings"}
# What numbers may be: far beyond what is published, and within what float32 computes without loss of sense.
MAX_THETA = 1e15
MIN_THETA = 1.001  # of 1 all dimensions turn alike
DEFAULT_THETA = 10000.0
SCALE = (1e-3, 1e6)
_TURNS = (1e-3, 1e6)
_BOUNDS = {
    "factor": SCALE, "low_freq_factor": _TURNS, "high_freq_factor": _TURNS, "beta_fast": _TURNS, "beta_slow": _TURNS,
    "attention_factor": (1e-3, 1e3), "mscale": (0.0, 1e3), "mscale_all_dim": (0.0, 1e3),
}  # fmt: skip
_MAX_CONTEXT = 2**31 - 1


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base wavelength and the way it is stretched.

    ``original_context`` is the length, in tokens, that the model was trained to
    before its context was extended. Sources: RoFormer (2104.09864), YaRN
    (2309.00071), Llama 3.1's frequency scaling.
    """

    theta: float = DEFAULT_THETA
    type: str = "default"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotary_dim: int | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], path: object, default_theta: float = DEFAULT_THETA) -> RopeConfig:
        """Read ``rope_parameters`` or ``rope_theta`` with ``rope_scaling``.

        Args:
            default_theta: the family's own, where the file says none.

        Raises:
            UnsupportedError: for a rope type or setting that quantkit does not compute.
            CheckpointError: if a setting that the type needs is missing.
        """
        whole = Settings(raw, path)
        given = [whole.inside(key) for key in ("rope_scaling", "rope_parameters") if whole.has(key)]
        inner = next((one for one in given if one.values), Settings({}, path))
        stated, where = inner.values, whole.path
        spelled = next((name for name in ("rope_type", "type") if name in stated), None)
        kind = "default" if spelled is None else inner.text(spelled)
        if kind not in _REQUIRED:
            raise UnsupportedError("rope type is not supported", path=where, found=kind, expected=", ".join(_REQUIRED))
        key = "partial_rotary_factor"
        partial = inner if key in stated else whole
        if partial.has(key) and partial.number(key, 0, 1) != 1:
            raise UnsupportedError("partial rotary embedding is not supported", path=where, found=partial.values[key])
        known = {*_REQUIRED[kind], *_OPTIONAL[kind]}
        if unknown := sorted(set(stated) - known - _IGNORED - {key}):
            raise UnsupportedError(f"unknown setting of {kind} rope scaling", path=where, found=shown(unknown))
        for name in _REQUIRED[kind]:
            if not inner.has(name):
                raise CheckpointError(f"rope scaling lacks the key '{name}'", path=where)
        base = inner if "rope_theta" in stated else whole
        rope = cls(
            theta=base.number("rope_theta", MIN_THETA, MAX_THETA) if base.has("rope_theta") else default_theta,
            type=kind,
            original_context=_original_context(kind, inner, whole),
            truncate=inner.flag("truncate", "truncate" not in stated),  # null is false, as in transformers
            **{name: inner.number(name, *_BOUNDS[name]) for name in known - {"truncate"} if inner.has(name)},
        )
        rope._require_order(where)
        return rope

    def _require_order(self, where: str) -> None:
        """The frequencies between which the scaling blends, in the order that its formula takes for granted."""
        for low, high, names in (
            (self.low_freq_factor, self.high_freq_factor, "low_freq_factor and high_freq_factor"),
            (self.beta_slow or _BETA_SLOW, self.beta_fast or _BETA_FAST, "beta_slow and beta_fast"),
        ):
            if low is not None and high is not None and low >= high:
                raise CheckpointError(
                    f"{names} of rope scaling are in the wrong order", path=where, found=f"{low:g} and {high:g}",
                    expected="the first below the second",
                )  # fmt: skip

    def to_hf(self) -> dict[str, Any]:
        """The keys both older (``rope_theta``, ``rope_scaling``) and newer readers look for."""
        scaling: dict[str, Any] = {"rope_type": self.type}
        for key in _REQUIRED[self.type] + _OPTIONAL[self.type]:
            value = getattr(self, key)
            if value is not None and not (key == "truncate" and value is True):
                scaling[key] = value
        if self.original_context is not None and self.type != "default":
            scaling["original_max_position_embeddings"] = self.original_context
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.type == "default" else scaling,
            "rope_parameters": {"rope_theta": self.theta, **scaling},
        }


def _original_context(kind: str, inner: Settings, whole: Settings) -> int | None:
    if kind not in ("llama3", "yarn"):
        return None
    key = "original_max_position_embeddings"
    for settings, name in ((whole, key), (inner, key), (whole, "max_position_embeddings")):
        if settings.has(name):
            return settings.whole(name, 1, _MAX_CONTEXT)
    return None
