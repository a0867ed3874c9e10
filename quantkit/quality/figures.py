"""Figures with their standard errors, with no more digits than these justify; and read back from
a manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from quantkit.errors import CheckpointError
from quantkit.formats import manifest

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# An error from 20 parts is itself known to a sixth.
_MAX_PARTS = 20
# Tokens of a part.
_MIN_PART = 16
# Figures outside this range are shown with an exponent.
_MIN_PLAIN = 1e-4
_MAX_PLAIN = 1e7
# An error with a smaller first digit is shown with two digits, else with one.
_TWO_DIGITS = 2.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error; None if that is not known.

    Shown as ``0.0123 ± 0.0004``, as ``(1.23 ± 0.04)e-06`` if it is tiny or huge, and as ``0.0123``
    without an error.
    """

    value: float
    error: float | None = None

    def __str__(self) -> str:
        error = self.error
        if not error or not math.isfinite(error) or not math.isfinite(self.value):
            return significant(self.value)
        exponent = math.floor(math.log10(max(abs(self.value), error)))
        if not _is_plain(exponent):
            scale = 10.0**exponent
            return f"({_with_error(self.value / scale, error / scale)})e{exponent:+03}"
        return _with_error(self.value, error)

    def times(self, factor: float) -> Estimate:
        """Convert the figure to another unit, such as percent."""
        return Estimate(self.value * factor, None if self.error is None else self.error * factor)

    def exp(self) -> Estimate:
        """Compute the exponential of a mean of logarithms; infinite beyond the range of a float."""
        # math.exp raises OverflowError above 709.78.
        if self.value < 709:
            value = math.exp(self.value)
        else:
            value = math.inf
        # By the delta method: the derivative of exp(x) is exp(x).
        return Estimate(value, None if self.error is None else value * self.error)


def significant(value: float, digits: int = 3) -> str:
    """Format a figure with `digits` significant digits; before the point all digits are shown, up
    to seven.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    # Of the rounded figure: 9.996 with three digits is 10.0.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if not _is_plain(exponent):
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def round_figure(value: float, digits: int = 5) -> float:
    """Round a figure to the digits that manifests have."""
    return float(f"{value:.{digits}g}")


def _is_plain(exponent: int) -> bool:
    return _MIN_PLAIN <= 10.0**exponent < _MAX_PLAIN


def average_estimates(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Average independent figures; the mean has an error if all of them have."""
    shares = [weight / sum(weights) for weight in weights]
    value = sum(share * estimate.value for share, estimate in zip(shares, estimates, strict=True))
    errors = []
    for share, estimate in zip(shares, estimates, strict=True):
        if estimate.error is not None:
            errors.append(share * estimate.error)
    return Estimate(value, math.hypot(*errors) if len(errors) == len(estimates) else None)


def mean_estimate(values: Tensor) -> Estimate:
    """Average over a text's tokens [N], float64 and in their order, with the standard error.

    Neighbouring tokens are correlated, so the error is not that of N independent draws. The text is
    cut into 20 parts of equal length, at least 16 tokens, and the parts count as independent (batch
    means; Schmeiser, Operations Research 30, 1982). A single part has no error.
    """
    mean = values.mean()
    count = min(_MAX_PARTS, len(values) // _MIN_PART)
    if count < 2:
        return Estimate(mean.item())
    spread = sum((part - mean).sum().square() for part in values.tensor_split(count))
    # Parts differ in length by a token, so their sums are compared instead of their means.
    return Estimate(mean.item(), math.sqrt(spread * count / (count - 1)) / len(values))


def _with_error(value: float, error: float) -> str:
    """Format both with as many decimals as the error has significant digits."""
    exponent = math.floor(math.log10(error))
    decimals = -exponent
    if error / 10.0**exponent < _TWO_DIGITS:
        decimals += 1
    # A format does not round before the point, `round` does. Adding 0.0 makes -0.0 positive.
    rounded_value = round(value, decimals) + 0.0
    rounded_error = round(error, decimals) + 0.0
    places = max(0, decimals)
    return f"{rounded_value:.{places}f} ± {rounded_error:.{places}f}"


def read_record(kind: type[T], value: Any, path: Path, description: str) -> T:
    """Decode a dataclass from the manifest at a path, for the error with what it states; keys that
    it lacks are ignored. Raises `CheckpointError` if the value has another form, or `kind` raises
    ValueError for it.
    """
    try:
        return cast(T, _decode_value(kind, value))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"does not state {description}", path=path, hint="create it again"
        ) from None


def manifest_or_empty(model: Path) -> dict[str, Any]:
    """Read a model's manifest; empty if it has none that can be read."""
    try:
        return manifest.read(model)
    except CheckpointError:
        return {}


def method_of(model: Path) -> str:
    """Read how a model was quantized; empty if its manifest does not state it."""
    return str(manifest_or_empty(model).get("method") or "")


def layer_errors(folders: Sequence[Path]) -> tuple[list[dict[str, float]], str]:
    """Read the errors of quantized layers from each folder's manifest, worst first, and their kind.

    All are of one kind, so that they can be compared: of outputs if every manifest with errors has
    those.
    """
    folder_records: list[dict[str, Any]] = []
    for folder in folders:
        folder_records.append(manifest_or_empty(folder).get("modules", {}))
    # Errors of outputs are closer to what a model loses, but only some methods record them.
    for kind in ("output_error", "relative_error"):
        errors = [_errors_of_kind(records, kind) for records in folder_records]
        # A folder without records, such as a float model, has no errors of any kind.
        lacks_kind = False
        for records, layers in zip(folder_records, errors, strict=True):
            if records and not layers:
                lacks_kind = True
        if any(errors) and not lacks_kind:
            return [_sort_worst_first(layers) for layers in errors], kind
    return [{} for _ in folders], ""


def _errors_of_kind(records: Mapping[str, Any], kind: str) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, record in records.items():
        if record.get(kind) is not None:
            errors[name] = record[kind]
    return errors


def _sort_worst_first(errors: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def read_module_records(model_manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read what a manifest states of each module; empty if it has another form."""
    modules = model_manifest.get("modules")
    records: dict[str, dict[str, Any]] = {}
    if isinstance(modules, dict):
        for name, module in modules.items():
            if isinstance(module, dict):
                records[name] = module
    return records


def _decode_value(kind: Any, value: Any) -> Any:
    """Decode a value of a type: a dataclass, a list, tuple or dict, an optional value, or a string
    or number.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        decoded: dict[str, Any] = {}
        for field in fields(kind):
            name = field.name
            is_required = field.default is MISSING and field.default_factory is MISSING
            # Manifests of earlier versions lack fields with defaults.
            if is_required or value.get(name) is not None:
                decoded[name] = _decode_value(hints[name], value[name])
        return kind(**decoded)
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is list:
        return [_decode_value(arguments[0], element) for element in value]
    if origin is tuple:
        parts: list[Any] = []
        for argument, part in zip(arguments, value, strict=True):
            parts.append(_decode_value(argument, part))
        return tuple(parts)
    if origin is dict:
        entries: dict[str, Any] = {}
        for key, entry in value.items():
            entries[str(key)] = _decode_value(arguments[1], entry)
        return entries
    # All other types with arguments are X | None.
    if arguments:
        if value is None:
            return None
        return _decode_value(arguments[0], value)
    return kind(value)
