"""How a layer's codes are found: by rounding alone, or by GPTQ on calibration text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.data import Calibration
from quantkit.calibration.pipeline import BlockQuantizer, Effort, Result
from quantkit.calibration.ranks import Ranks
from quantkit.formats.checkpoint import Checkpoint
from quantkit.memory import give_back, keep_out_of_heap
from quantkit.model.load import BLOCK_PREFIX
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme

_LARGE_BUFFER = 8 << 20
_BLOCKS = "model.layers."

LayerSolver = Callable[[str, Tensor, QuantScheme, torch.dtype], Result]
"""Tensor name, weight, scheme and dtype of the scales, to codes and what the manifest says of them."""

Written = Callable[[str], QuantTensor]
"""Reads back what an earlier run wrote, by tensor name."""


def solve_rtn(name: str, weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Result:
    """Round to nearest."""
    return quantize_rtn(weight, scheme, scale_dtype), {"solver": ROUNDING}


class GptqSolver:
    """GPTQ for the layers of decoder blocks, asked for in their order; rounding for others."""

    def __init__(
        self, source: Checkpoint, calibration: Calibration, schemes: Mapping[str, QuantScheme],
        scale_dtype: torch.dtype, *, device: torch.device, memory_bytes: int, effort: Effort,
    ) -> None:  # fmt: skip
        """
        Args:
            schemes: by module.
            memory_bytes: activations held in memory; more go to disk.
            effort: how much to do about drift.
        """
        self._source = source
        self._calibration = calibration
        self._schemes = schemes
        self._scale_dtype = scale_dtype
        self._device = device
        self._memory_bytes = memory_bytes
        self._effort = effort
        self._ranks = Ranks()
        self._ranks.meet()
        self._done: Collection[str] = ()
        self._written: Written | None = None
        self._states: ActivationStore | None = None
        self._blocks: BlockQuantizer | None = None
        self._ready: dict[str, Result] = {}
        self._layer = 0

    def begin(self, done: Collection[str], written: Written, scratch: Path) -> None:
        """Take up where an earlier run stopped, if one did.

        Args:
            done: the tensors it wrote.
            written: reads them back.
            scratch: a folder for activations that do not fit in memory; it is gone in the end.
        """
        keep_out_of_heap(_LARGE_BUFFER)
        self._done = self._ranks.agree(done)
        self._written = written
        self._states = ActivationStore(scratch.with_name(f"{scratch.name}-{self._ranks.rank}"), self._memory_bytes)
        self._blocks = BlockQuantizer(
            self._source, self._calibration.tokens, self._schemes, self._scale_dtype, self._states, self._device,
            self._effort,
        )  # fmt: skip

    def __call__(self, name: str, weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Result:
        """One layer's codes. The first of a block solves the block, and those before it if need be."""
        if not name.startswith(_BLOCKS):
            return solve_rtn(name, weight, scheme, scale_dtype)
        while name not in self._ready:
            self.next_block()
        return self._ready[name]

    def next_block(self) -> None:
        """Solve one more block, or pass through it where an earlier run has solved it."""
        assert self._blocks is not None
        prefix = BLOCK_PREFIX.format(self._layer)
        names = [f"{module}.weight" for module in self._schemes if module.startswith(prefix)]
        finished = bool(names) and all(name in self._done for name in names)
        self._ready = {}
        self._ready = self._blocks.next_block(self._written if finished else None)
        self._layer += 1

    def follow(self) -> None:
        """Take part in the work of another process, which writes the results."""
        try:
            if not self._wanted() <= set(self._done):
                for _ in range(self._source.config.num_layers):
                    self.next_block()
            self.finish()
        finally:
            self.close()

    def _wanted(self) -> set[str]:
        """The weights of blocks that are to be quantized."""
        return {f"{module}.weight" for module in self._schemes if module.startswith(_BLOCKS)}

    def finish(self) -> None:
        """Remove what lies on disk, in all processes."""
        self.close()
        self._ranks.wait()

    def close(self) -> None:
        """Forget the activations and remove what this process has on disk."""
        if self._states is not None:
            self._states.close()
            self._ready = {}
            self._states = self._blocks = None
            give_back()
