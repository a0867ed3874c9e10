"""The options of `quantkit.convert` in one object, from which the job, its plan and the manifest read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.arguments import as_whole, require_flags
from quantkit.formats.detect import WeightKind
from quantkit.formats.registry import TargetName
from quantkit.tensors.dtypes import SHORT_NAMES, DType, FloatName, float_name

if TYPE_CHECKING:
    import torch

_SHORT = {dtype: name for name, dtype in SHORT_NAMES.items()}


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `quantkit.convert`, which describes them; `plan.convert` has the same."""

    to: TargetName | None = None
    mp: int = 1
    dtype: FloatName | torch.dtype | None = None
    dequantize: bool = False
    requantize: bool = False
    split_max_size: int | None = None
    template: str | None = None
    weights: WeightKind | None = None
    resume: bool = False
    allow_nonfinite: bool = False
    source_check: bool = True
    tensors_only: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            RequestError: for a value of the wrong type, or an unknown float type.
        """
        require_flags(
            resume=self.resume, allow_nonfinite=self.allow_nonfinite, source_check=self.source_check,
            tensors_only=self.tensors_only, dequantize=self.dequantize, requantize=self.requantize,
        )  # fmt: skip
        float_name(self.dtype)
        object.__setattr__(self, "mp", as_whole("mp", self.mp))

    @property
    def float_type(self) -> DType | None:
        """The float type of the output; None keeps each tensor's own."""
        return float_name(self.dtype)

    def recorded(self, target: str, *, tensors_only: bool) -> dict[str, object]:
        """What the manifest and the resume fingerprint record: all options that determine the bytes of the weights.

        Args:
            target: the name of the target format.
            tensors_only: whether the source is known by its tensors only.
        """
        options: dict[str, object] = {
            "to": target, "mp": self.mp, "dtype": self.float_type and _SHORT[self.float_type],
            "allow_nonfinite": self.allow_nonfinite,
        }  # fmt: skip
        optional = {
            "dequantize": self.dequantize, "requantize": self.requantize, "split_max_size": self.split_max_size,
            "template": self.template and Path(self.template).name, "tensors_only": tensors_only,
        }  # fmt: skip
        return options | {name: value for name, value in optional.items() if value}
