"""What rounding to nearest makes of a model: the yardstick of the gate."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.formats.checkpoint import FLOAT_DTYPES, Checkpoint
from quantkit.formats.files.source import SourceFile
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_COARSEST = 128


def rtn_baseline(source: Checkpoint, assigned: Mapping[str, QuantScheme]) -> Rounded:
    """The source rounded in the schemes given by module, but int4 never in groups longer than 128."""

    def fine(module: str, scheme: QuantScheme) -> QuantScheme:
        coarse = scheme.bits == 4 and (scheme.group_size is None or scheme.group_size > _COARSEST)
        columns = source.info(module + ".weight").shape[1]
        return QuantScheme(4, _COARSEST, scheme.symmetric).fitted(columns) if coarse else scheme

    return Rounded(source, {module: fine(module, scheme) for module, scheme in assigned.items()})


class Rounded:
    """A float checkpoint as it would be with some layers rounded to nearest, computed as it is read."""

    def __init__(self, source: Checkpoint, assigned: Mapping[str, QuantScheme]) -> None:
        """
        Args:
            assigned: the scheme of each module to round.
        """
        self._source = source
        self._assigned = assigned
        self._scale_dtype = FLOAT_DTYPES[source.config.dtype]
        self.path, self.format, self.config = source.path, source.format, source.config
        self.extra_config, self.notes = source.extra_config, source.notes

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorSpec:
        info = self._source.info(name)
        return TensorSpec(name, info.shape, info.dtype, self._assigned.get(name.removesuffix(".weight")))

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        scheme = self._assigned.get(name.removesuffix(".weight"))
        if scheme is None:
            return self._source.load(name, part)
        by_rows = part is None or part.axis == 0  # whose groups are the same ones
        value = self._source.load(name, part if by_rows else None)
        if isinstance(value, Tensor):
            value = quantize_rtn(value, scheme, self._scale_dtype)
        return value if part is None or by_rows else part.of_weight(value)

    def files(self) -> list[SourceFile]:
        return self._source.files()
