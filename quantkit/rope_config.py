"""Rotary embedding settings, read from and written to Hugging Face keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError

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
# Present in published files, without effect on the arithmetic.
_IGNORED = {"rope_type", "type", "rope_theta", "finetuned", "original_max_position_embeddings"}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base wavelength and the way it is stretched.

    ``original_context`` is the length, in tokens, that the model was trained to
    before its context was extended. Sources: RoFormer (2104.09864), YaRN
    (2309.00071), Llama 3.1's frequency scaling.
    """

    theta: float = 10000.0
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

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], path: object) -> RopeConfig:
        """Read ``rope_parameters`` or ``rope_theta`` with ``rope_scaling``.

        Raises:
            UnsupportedError: for a rope type or setting that quantkit does not compute.
            CheckpointError: if a setting that the type needs is missing.
        """
        settings = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        kind = settings.get("rope_type", settings.get("type", "default"))
        where = str(path)
        if kind not in _REQUIRED:
            raise UnsupportedError("rope type is not supported", path=where, found=kind, expected=", ".join(_REQUIRED))
        partial = settings.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise UnsupportedError("partial rotary embedding is not supported", path=where, found=partial)
        known = set(_REQUIRED[kind]) | set(_OPTIONAL[kind])
        if unknown := sorted(set(settings) - known - _IGNORED):
            raise UnsupportedError(f"unknown setting of {kind} rope scaling", path=where, found=unknown)
        for key in _REQUIRED[kind]:
            if settings.get(key) is None:
                raise CheckpointError(f"rope scaling lacks the key '{key}'", path=where)
        theta = settings.get("rope_theta", raw.get("rope_theta"))
        values = {key: float(settings[key]) for key in known - {"truncate"} if settings.get(key) is not None}
        return cls(
            theta=10000.0 if theta is None else float(theta),
            type=kind,
            original_context=_original_context(kind, settings, raw),
            truncate=bool(settings.get("truncate", True)),
            **values,
        )

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


def _original_context(kind: str, settings: Mapping[str, Any], raw: Mapping[str, Any]) -> int | None:
    if kind not in ("llama3", "yarn"):
        return None
    for value in (
        raw.get("original_max_position_embeddings"),
        settings.get("original_max_position_embeddings"),
        raw.get("max_position_embeddings"),
    ):
        if value is not None:
            return int(value)
    return None
