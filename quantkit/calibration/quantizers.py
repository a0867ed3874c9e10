"""The tensors of a quantized model, block after block: by rounding to nearest, or by GPTQ on
calibration text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from quantkit.architectures.names import EMBEDDING
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, in_phase, silent
from quantkit.calibration.cache_scales import CACHE_SCALES, scales_on_sample
from quantkit.calibration.group_solver import Result
from quantkit.calibration.scale_range import (
    has_finite_scales,
    scale_out_of_range,
    widen_scales,
)
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import Written
from quantkit.formats.folders_encoder import in_folder
from quantkit.formats.kv_scales import is_scale
from quantkit.model.column_kernels import select_column_kernels
from quantkit.model.load import narrow_to_floats
from quantkit.model.shared_scales import SharedScales
from quantkit.solver.columns import ColumnKernels
from quantkit.solver.rounding import Importance, round_to_nearest
from quantkit.tensors.finite import cast_finite
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec

MMAP_THRESHOLD = 8 << 20

Solved = tuple[str, Tensor | QuantTensor, Mapping[str, object] | None]
"""A tensor's name, its value, and for the manifest how it was found."""
_Recorded = tuple[Tensor | QuantTensor, Mapping[str, object] | None]


@dataclass(frozen=True)
class TensorBlock:
    """Tensors that follow each other in the output.

    Attributes:
        layer: the decoder block that they form; None for tensors before or after the blocks.
        folder: of the output that they belong to, if it has several results.
    """

    layer: int | None
    tensors: tuple[TensorSpec, ...]
    folder: str = ""

    def to_output_name(self, name: str) -> str:
        """Return the name in the output of one of its tensors."""
        return in_folder(self.folder, name)

    def is_complete_in(self, written: Written) -> bool:
        """Return whether an earlier run has written all tensors of the block."""
        return written.names.issuperset(self.to_output_name(spec.name) for spec in self.tensors)

    def is_quantized_in(self, written: Written) -> bool:
        """Return whether an earlier run has written all that is calibrated in the block: quantized
        tensors, and scales of the KV cache.
        """
        calibrated = (
            spec.name for spec in self.tensors if spec.scheme is not None or is_scale(spec.name)
        )
        return written.names.issuperset(map(self.to_output_name, calibrated))


@dataclass
class RtnQuantizer:
    """Computes the tensors of an output, block after block: rounds to nearest, one tensor at a
    time. If the output has several results, those with the same type of scales share what is
    rounded.

    Attributes:
        importance: returns that of the inputs of linears; called once, when `running` begins, if
            any quantized tensor is not written yet.
        cache_sample: returns the tokens [B, T] for the scales of a KV cache, if the output has any;
            called at most once.
        shared: the outer scales of NVFP4; None if no linear is to have some.
        kernels_of: returns the kernels of a device.
        notes: for the user, on what could not be measured.
    """

    source: Checkpoint
    _: KW_ONLY
    allow_nonfinite: bool
    importance: Callable[[], Importance] = dict
    cache_sample: Callable[[], Tensor] | None = None
    shared: SharedScales | None = None
    progress: Progress = silent
    kernels_of: Callable[[torch.device], ColumnKernels] = select_column_kernels
    notes: list[str] = field(default_factory=list, init=False)
    _done: frozenset[str] = field(default=frozenset(), init=False)
    _importance: Importance = field(default_factory=dict, init=False)
    _scales: dict[str, Tensor] = field(default_factory=dict, init=False)
    _uses: Counter[TensorSpec] = field(default_factory=Counter, init=False)
    _rounded_before: dict[TensorSpec, Result] = field(default_factory=dict, init=False)

    @contextmanager
    def running(self, blocks: Sequence[TensorBlock], written: Written) -> Iterator[None]:
        """The context in which `solve` is called for each of all blocks, in order; `written` are
        the tensors that an interrupted run has written.
        """
        self._begin(blocks, written)
        if self._uses:
            self._importance = self.importance()
        specs = {}
        for block in blocks:
            for spec in block.tensors:
                specs[spec.name] = spec
        scales = (
            block.to_output_name(spec.name)
            for block in blocks
            for spec in block.tensors
            if is_scale(spec.name)
        )
        lacking = not self._done.issuperset(scales)
        if self.cache_sample is not None and lacking:
            observed = in_phase(self.progress, CACHE_SCALES)
            tokens = self.cache_sample()
            self._scales = scales_on_sample(
                self.source, specs, lambda spec: self._round_tensor(spec)[0], tokens, observed
            )
        yield

    def solve(self, block: TensorBlock) -> Iterator[Solved]:
        """Return the tensors of a block that are not written yet, in order; each is made when the
        iterator reaches it.

        Raises:
            NonFiniteError: for NaN or Inf where they must not be, and weights too large for their
                scales.
        """
        return self._tensors(block, {})

    def _begin(self, blocks: Sequence[TensorBlock], written: Written) -> None:
        """Note which tensors an earlier run has written, and how often others that are quantized
        are in the output.
        """
        self._done = written.names
        self._uses = Counter(
            spec
            for block in blocks
            for spec in block.tensors
            if spec.scheme is not None and block.to_output_name(spec.name) not in self._done
        )

    def _tensors(self, block: TensorBlock, results: dict[str, Result]) -> Iterator[Solved]:
        for spec in block.tensors:
            name = block.to_output_name(spec.name)
            result = results.pop(spec.name.removesuffix(".weight"), None)
            if name in self._done:
                continue
            if spec.name in self._scales:
                yield name, self._scales[spec.name], None
            else:
                yield (
                    name,
                    *(
                        self._round_tensor(spec)
                        if result is None
                        else self._check_result(spec, result)
                    ),
                )

    def _round_tensor(self, spec: TensorSpec) -> _Recorded:
        """Return one tensor of the output, rounded to nearest if it is to be quantized."""
        if spec in self._rounded_before:
            self._uses[spec] -= 1
            keeps = self._uses[spec] > 0
            return self._check_result(
                spec, self._rounded_before[spec] if keeps else self._rounded_before.pop(spec)
            )
        weight = narrow_to_floats(self.source.load(spec.name))
        path = self.source.path
        if spec.scheme is None:
            return (
                cast_finite(weight, spec.dtype.torch, spec.name, path, self.allow_nonfinite),
                None,
            )
        module = spec.name.removesuffix(".weight")
        keep = Message(
            Option("keep", value=module),
            " and ",
            Option("allow_nonfinite", value=True),
            " leave it unchanged",
        )
        if module == EMBEDDING:
            keep = Message(
                "do not quantize the embedding: then ",
                Option("allow_nonfinite", value=True),
                " leaves it unchanged",
            )
        hint = Message("it cannot be quantized; repair the source, or ", keep)
        cast_finite(weight, weight.dtype, spec.name, path, allow_nonfinite=False, hint=hint)
        importance = self._importance.get(module)
        if self.shared is None:
            outer = None
        else:
            outer = self.shared.of(module)
        quantized, solver = round_to_nearest(
            weight, spec.scheme, spec.dtype.torch, self.kernels_of, importance, outer
        )
        result = Result.of(quantized, weight, {"solver": solver})
        self._uses[spec] -= 1
        if self._uses[spec] > 0:
            self._rounded_before[spec] = result
        return self._check_result(spec, result)

    def _explain_error(self, error: NonFiniteError, block: TensorBlock) -> NonFiniteError:
        """Return an error of solving a block, with the path; raises another that names a tensor
        that holds NaN or Inf.
        """
        # The first that is not finite explains the others.
        for spec in block.tensors:
            if is_scale(spec.name):
                continue
            value = narrow_to_floats(self.source.load(spec.name))
            cast_finite(value, value.dtype, spec.name, self.source.path, allow_nonfinite=False)
        return NonFiniteError(error.problem, path=self.source.path, hint=error.hint)

    def _check_result(self, spec: TensorSpec, result: Result) -> _Recorded:
        """Return a quantized tensor of the output; a scale that overflows is a `NonFiniteError`."""
        if not has_finite_scales(result.weight):
            raise scale_out_of_range(spec.name, spec.dtype, self.source)
        weight = widen_scales(result.weight, spec.dtype)
        return weight, {**result.record, "relative_error": float(f"{result.error:.4g}")}
