"""Rotary embedding settings, read from and written to Hugging Face keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor",),
}
_OF_SOME_FAMILIES = {"proportional"}
# The first models with LongRoPE have this name for it.
_OLD_NAMES = {"su": "longrope"}
FULL = "full_attention"
SLIDING = "sliding_attention"
"""The names in configs of layers with full attention, and of layers with a window."""
_BETA = "llama_4_scaling_beta"
_CONTEXT = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_LISTS = {"short_factor", "long_factor"}
# YaRN's defaults
_BETA_FAST = 32.0
_BETA_SLOW = 1.0
# Present in published files in addition to the settings of a type.
_IGNORED = {"rope_type", "type", "rope_theta", "finetuned", _ORIGINAL, "partial_rotary_factor"}
# Bounds far beyond what is published, within what float32 can compute.
MAX_THETA = 1e15
# With a base of 1 all dimensions would have the same frequency.
MIN_THETA = 1.001
DEFAULT_THETA = 10000.0
SCALE = (1e-3, 1e6)
MAX_BETA = 1e3
_TURNS = (1e-3, 1e6)
_BOUNDS = {
    "factor": SCALE,
    "low_freq_factor": _TURNS,
    "high_freq_factor": _TURNS,
    "beta_fast": _TURNS,
    "beta_slow": _TURNS,
    "attention_factor": (1e-3, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
}
_MAX_CONTEXT = 2**31 - 1


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and its scaling.

    Sources: RoFormer (2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1's frequency
    scaling.

    Attributes:
        original_context: the training length, in tokens, before the context was extended.
        short_factor, long_factor: of LongRoPE, for each rotary pair: for sequences up to
            `original_context`, and for longer ones.
        type: ``proportional`` is that of Gemma 4: a part of each half of a head is rotated, with
            the frequencies that these dimensions have in a head that is rotated as a whole.
        rotary_dim: the number of rotated dimensions of a head, which come first; None for all.
        query_scaling_beta: queries are multiplied by 1 + beta log(1 + floor(position /
            original_context)), as in Llama 4; None for no scaling.
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
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    query_scaling_beta: float | None = None

    @property
    def follows_length(self) -> bool:
        """Return whether a position's angles depend on the length of its sequence."""
        return self.type in ("dynamic", "longrope")

    @classmethod
    def from_hf(
        cls,
        raw: Mapping[str, Any],
        path: object,
        default_theta: float = DEFAULT_THETA,
        *,
        head_dim: int = 0,
        partial: float | None = None,
        query_scaling: bool = False,
        proportional: bool = False,
    ) -> RopeConfig:
        """Read ``rope_parameters`` or ``rope_theta`` with ``rope_scaling``.

        Args:
            default_theta: the family's, if the file states none.
            head_dim: of the model.
            partial: the rotated part of a head if the file states none; None in families that must
                rotate all of it.
            query_scaling: whether the family scales queries by position.
            proportional: whether the family's code computes the type of this name.

        Raises:
            UnsupportedError: for a rope type or setting that quantkit does not compute.
            CheckpointError: if a setting that the type needs is missing.
        """
        file_settings = Settings(raw, path)
        # Both names are read before the choice, so that a wrong type of either is an error.
        candidates = []
        for key in ("rope_scaling", "rope_parameters"):
            if file_settings.has(key):
                candidates.append(file_settings.inside(key))
        rope_settings = Settings({}, path)
        for candidate in candidates:
            if candidate.values:
                rope_settings = candidate
                break
        rope_values = rope_settings.values
        path_text = file_settings.path
        if "rope_type" in rope_values:
            kind = rope_settings.string("rope_type")
        elif "type" in rope_values:
            kind = rope_settings.string("type")
        else:
            kind = "default"
        kind = _OLD_NAMES.get(kind, kind)
        supported = set(_REQUIRED)
        if not proportional:
            supported -= _OF_SOME_FAMILIES
        if kind not in supported:
            raise UnsupportedError(
                "rope type is not supported",
                path=path_text,
                found=kind,
                expected=", ".join(name for name in _REQUIRED if name in supported),
            )
        if kind == "proportional" and partial is None:
            # Without a part, it rotates all dimensions.
            partial = 1.0
        key = "partial_rotary_factor"
        part_source = rope_settings if key in rope_values else file_settings
        # null is 1, as in transformers
        if partial is None or key in part_source.values:
            default_part = 1.0
        else:
            default_part = partial
        if part_source.has(key):
            part = part_source.number(key, 0, 1)
        else:
            part = default_part
        rotated = int(head_dim * part)
        if kind == "proportional":
            # A part of each half, so that the number of them is even.
            rotated = 2 * int(head_dim * part // 2)
        # Rotation pairs dimensions, so an odd number of them cannot be rotated.
        if part != 1 and (partial is None or rotated < 2 or rotated % 2):
            raise UnsupportedError(
                "partial rotary embedding is not supported", path=path_text, found=f"{part:g}"
            )
        kind_keys = {*_REQUIRED[kind], *_OPTIONAL.get(kind, ())}
        ignored = set(_IGNORED)
        if query_scaling:
            ignored |= {_BETA, _CONTEXT}
        unknown = sorted(set(rope_values) - kind_keys - ignored)
        if unknown:
            raise UnsupportedError(
                f"unknown setting of {kind} rope scaling",
                path=path_text,
                found=format_value(unknown),
            )
        for name in _REQUIRED[kind]:
            if not rope_settings.has(name):
                raise CheckpointError(f"rope scaling lacks the key '{name}'", path=path_text)
        rope = cls(
            theta=_read_theta(rope_settings, file_settings, default_theta),
            type=kind,
            original_context=_original_context(kind, rope_settings, file_settings),
            # null is false, as in transformers
            truncate=rope_settings.flag("truncate", "truncate" not in rope_values),
            rotary_dim=None if part == 1 else rotated,
        )
        if rope_settings.has(_BETA):
            rope = replace(rope, query_scaling_beta=rope_settings.number(_BETA, 0, MAX_BETA))
        if kind == "longrope":
            rope = replace(
                rope,
                short_factor=rope_settings.numbers("short_factor", *SCALE),
                long_factor=rope_settings.numbers("long_factor", *SCALE),
            )
        numbers: dict[str, Any] = {}
        for name in kind_keys - _LISTS - {"truncate"}:
            if rope_settings.has(name):
                numbers[name] = rope_settings.number(name, *_BOUNDS[name])
        rope = replace(rope, **numbers)
        rope._require_order(path_text)
        # transformers derives the missing factor from both contexts.
        if (
            kind == "longrope"
            and not rope_settings.has("factor")
            and file_settings.has(_CONTEXT)
            and rope.original_context
        ):
            context = file_settings.integer(_CONTEXT, 1, _MAX_CONTEXT)
            return replace(rope, factor=context / rope.original_context)
        return rope

    def _require_order(self, path: str) -> None:
        """Require the order of the blended frequencies that the formula assumes. Equal factors of
        Llama 3's, as in Llama 4, blend none.
        """
        low = self.low_freq_factor
        high = self.high_freq_factor
        beta_slow = self.beta_slow or _BETA_SLOW
        beta_fast = self.beta_fast or _BETA_FAST
        if low is not None and high is not None and low > high:
            problem = "low_freq_factor and high_freq_factor of rope scaling are in the wrong order"
            values = f"{low:g} and {high:g}"
        elif beta_slow >= beta_fast:
            problem = "beta_slow and beta_fast of rope scaling are in the wrong order"
            values = f"{beta_slow:g} and {beta_fast:g}"
        else:
            return
        raise CheckpointError(
            problem, path=path, found=values, expected="the first below the second"
        )

    def require_fits(self, head_dim: int, path: object) -> None:
        """Raise a `CheckpointError` unless there is one factor for each rotary pair."""
        pairs = (self.rotary_dim or head_dim) // 2
        for name in sorted(_LISTS):
            factors = getattr(self, name)
            if factors is not None and len(factors) != pairs:
                raise CheckpointError(
                    f"{name} of rope scaling does not match the head size",
                    path=str(path),
                    found=f"{len(factors)} factors",
                    expected=f"{pairs}",
                )

    def to_hf(self, head_dim: int) -> dict[str, Any]:
        """Write the keys of both older (``rope_theta``, ``rope_scaling``) and newer readers."""
        scaling: dict[str, Any] = {"rope_type": self.type}
        for key in _REQUIRED[self.type] + _OPTIONAL.get(self.type, ()):
            value = getattr(self, key)
            # Files of most models do not have `truncate`, so its default is not written.
            if value is None or (key == "truncate" and value is True):
                continue
            scaling[key] = list(value) if key in _LISTS else value
        if self.query_scaling_beta is not None:
            scaling[_BETA] = self.query_scaling_beta
        if self.original_context is not None:
            scaling[_ORIGINAL] = self.original_context
        if self.rotary_dim is None:
            partial = {}
        else:
            partial = {"partial_rotary_factor": self.rotary_dim / head_dim}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.type == "default" else scaling,
            "rope_parameters": {"rope_theta": self.theta, **partial, **scaling},
            **partial,
        }


def ropes_by_layer(
    raw: Mapping[str, Any],
    path: object,
    default_theta: float,
    windowed_theta: tuple[str, float],
    *,
    head_dim: int,
    windowed: Sequence[bool],
) -> tuple[RopeConfig, RopeConfig | None]:
    """Read the rotary positions of the layers with full attention, and of those with a window if
    they differ.

    The order is that of transformers, for families with separate settings: ``rope_parameters`` by
    kind of layer, or older keys, whose scaling is only for full attention. Settings of a kind that
    no layer has are not read.

    Args:
        default_theta: of layers with full attention, if the file states none.
        windowed_theta: its key for layers with a window, and the default.
        windowed: whether each layer has a window.

    Raises:
        UnsupportedError, CheckpointError: see `RopeConfig.from_hf`; also if ``rope_parameters`` are
            not by kind of layer, or a setting has another meaning in other releases of
            transformers.
    """
    file_settings = Settings(raw, path)
    if file_settings.has("rope_parameters"):
        kinds = file_settings.inside("rope_parameters")
    else:
        kinds = Settings({}, path)
    unknown = sorted(set(kinds.values) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedError(
            "rope_parameters has unknown layer types",
            path=file_settings.path,
            found=format_value(unknown),
            expected=f"{FULL} and {SLIDING}",
        )
    # transformers does not look for the original context outside of these settings.
    outer = {**raw, "rope_scaling": None, _ORIGINAL: None}

    def read(settings: Mapping[str, Any], theta: Any, default: float) -> RopeConfig:
        if settings.get("truncate", True) is not True:
            raise UnsupportedError(
                "'truncate' in rope scaling per layer type is used by some readers and ignored by"
                " transformers 5",
                path=file_settings.path,
                found=format_value(settings["truncate"]),
                hint="remove the key to read it as transformers 5 does",
            )
        values = {**outer, "rope_theta": theta, "rope_parameters": dict(settings)}
        return RopeConfig.from_hf(values, path, default, head_dim=head_dim)

    full_rope: RopeConfig | None = None
    window_rope: RopeConfig | None = None
    if not all(windowed):
        full_settings = _merge_full_settings(file_settings, kinds)
        full_rope = read(full_settings, raw.get("rope_theta"), default_theta)
    if any(windowed):
        window_key, window_default = windowed_theta
        window_settings: Mapping[str, Any] = {}
        if kinds.has(SLIDING):
            window_settings = kinds.inside(SLIDING).values
        window_rope = read(window_settings, raw.get(window_key), window_default)
    if full_rope is None:
        # A model has at least one layer.
        assert window_rope is not None
        return window_rope, None
    if window_rope is None:
        return full_rope, None
    if window_rope.follows_length:
        raise UnsupportedError(
            "rope scaling of sliding-window layers is not supported",
            path=file_settings.path,
            found=window_rope.type,
        )
    if window_rope == full_rope:
        return full_rope, None
    return full_rope, window_rope


def _merge_full_settings(whole: Settings, kinds: Settings) -> Mapping[str, Any]:
    """Merge the settings of layers with full attention: ``rope_scaling`` overrides
    ``rope_parameters``.
    """
    if kinds.has(FULL):
        parameters = kinds.inside(FULL).values
    else:
        parameters = {}
    if whole.has("rope_scaling"):
        scaling = whole.inside("rope_scaling").values
    else:
        scaling = {}
    if scaling and whole.has("rope_parameters") and not kinds.has(FULL):
        raise CheckpointError(
            f"rope_scaling overrides rope_parameters, which lack '{FULL}'", path=whole.path
        )
    merged = {**parameters, **scaling}
    if (
        not whole.has("rope_parameters")
        and "rope_type" not in scaling
        and scaling.get("type", "default") != "default"
    ):
        raise UnsupportedError(
            "'type' in rope_scaling is used by transformers 4 and ignored by transformers 5",
            path=whole.path,
            found=format_value(scaling["type"]),
            expected="'rope_type'",
            hint="rename the key to scale positions, or remove rope_scaling",
        )
    return merged


def _read_theta(rope_settings: Settings, file_settings: Settings, default_theta: float) -> float:
    if "rope_theta" in rope_settings.values:
        source = rope_settings
    else:
        source = file_settings
    if source.has("rope_theta"):
        return source.number("rope_theta", MIN_THETA, MAX_THETA)
    return default_theta


def _original_context(kind: str, inner: Settings, whole: Settings) -> int | None:
    if kind not in ("llama3", "yarn", "longrope") and not inner.has(_BETA):
        return None
    # LongRoPE divides by the logarithm of this context, which is 0 for 1.
    low = 2 if kind == "longrope" else 1
    # The order of transformers: the key outside of the rotary settings overrides that inside.
    for settings, name in ((whole, _ORIGINAL), (inner, _ORIGINAL), (whole, _CONTEXT)):
        if settings.has(name):
            return settings.integer(name, low, _MAX_CONTEXT)
    return None
