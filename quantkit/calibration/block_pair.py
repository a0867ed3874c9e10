"""One decoder block twice: with float weights, and as far as it has been quantized.

Only linears in use are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from quantkit.architectures.topology import InputGroup, input_groups
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Block
from quantkit.model.load import BLOCK_PREFIX, float_parameter, meta_init
from quantkit.tensors.products import bfloat16_linear, compute_dtype, times
from quantkit.tensors.qtensor import QuantTensor


class StreamLinear(nn.Linear):
    """A linear that multiplies samples in `compute_dtype`, while the solver uses its float32
    weight.
    """

    compute_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        if self.compute_dtype == torch.bfloat16:
            out = bfloat16_linear(x, self._bfloat16_weight)
        else:
            out = times(x.flatten(0, -2), self.weight.t()).view(*x.shape[:-1], -1)
        if self.bias is None:
            return out
        return out.add_(self.bias)

    def drop_solver_weight(self) -> None:
        """Keep only the weight that multiplies samples."""
        if self.compute_dtype == torch.bfloat16:
            _ = self._bfloat16_weight  # computed once
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    @cached_property
    def _bfloat16_weight(self) -> Tensor:
        return self.weight.bfloat16()


class BlockPair:
    """A decoder block with float weights, and the same block as far as it has been quantized.

    Attributes:
        groups: the linears, by shared input.
        floats, quantized: the blocks. Initially they have only the tensors that are in no group:
            norms and routers.
        load_resumed: loads the block's quantized weights by name, if an earlier run has written
            them all.
    """

    def __init__(
        self,
        source: Checkpoint,
        layer: int,
        solver: GroupSolver,
        device: torch.device,
        load_resumed: Callable[[str], Tensor | QuantTensor] | None = None,
    ) -> None:
        self.source = source
        self.layer = layer
        self.solver = solver
        self.device = device
        self.load_resumed = load_resumed
        self.groups = input_groups(source.config, layer)
        with meta_init():
            self.floats, self.quantized = (Block(source.config, layer) for _ in range(2))
        grouped = set()
        for group in self.groups:
            for module in group.modules:
                grouped.add(module)
        for name, _ in list(self.floats.named_parameters()):
            if name.rpartition(".")[0] not in grouped:
                parameter = self._parameter(name)
                for block in (self.floats, self.quantized):
                    _set(block, name, parameter)

    def full_name(self, module: str) -> str:
        """Return the name of a module of the block within the model."""
        return BLOCK_PREFIX.format(self.layer) + module

    def load(self, group: InputGroup) -> None:
        """Load the floats of a group."""
        for module in group.modules:
            _set(self.floats, module, self._empty_linear(linear_of(self.floats, module)))
            for leaf, _ in list(self.floats.get_submodule(module).named_parameters()):
                name = f"{module}.{leaf}"
                _set(self.floats, name, self._parameter(name))

    def linears(self, group: InputGroup) -> dict[str, nn.Linear]:
        """Return the float linears of a group that have to be solved, by full name."""
        if self.load_resumed is not None:
            return {}
        named = {}
        for module in group.modules:
            named[self.full_name(module)] = linear_of(self.floats, module)
        linears: dict[str, nn.Linear] = {}
        for name, linear in named.items():
            if name in self.solver.schemes:
                linears[name] = linear
        return linears

    def statistics(self, group: InputGroup) -> HessianAccumulator:
        """Empty sums over a group's inputs; the drift is that of the outputs if the group writes
        to the residual.
        """
        linear = linear_of(self.floats, group.modules[0])
        if group.writes:
            drift_width = linear.out_features
        else:
            drift_width = linear.in_features
        return HessianAccumulator(linear.in_features, drift_width, self.device)

    def install(self, group: InputGroup, results: Mapping[str, Result]) -> None:
        """Set the linears of a group in the quantized block: as solved, as an earlier run has
        written them, or floats.

        Of the float weights only those that multiply samples are kept.
        """
        for module in group.modules:
            linear = linear_of(self.floats, module)
            name = self.full_name(module)
            if isinstance(linear, StreamLinear):
                linear.drop_solver_weight()
            if name in results:
                weight = results[name].weight
            else:
                weight = None
            if self.load_resumed is not None and name in self.solver.schemes:
                stored = self.load_resumed(f"{name}.weight")
                assert isinstance(stored, QuantTensor)
                weight = stored
            if weight is not None:
                solved = self._empty_linear(linear)
                solved.weight = nn.Parameter(
                    weight.to(self.device).dequantize(), requires_grad=False
                )
                solved.bias = linear.bias
                solved.drop_solver_weight()
                linear = solved
            _set(self.quantized, module, linear)

    def _empty_linear(self, like: nn.Linear) -> StreamLinear:
        """Return a linear of the same shape, without weights yet."""
        linear = StreamLinear(
            like.in_features, like.out_features, like.bias is not None, device="meta"
        )
        linear.compute_dtype = compute_dtype(self.device)
        return linear

    def _parameter(self, name: str) -> nn.Parameter:
        return float_parameter(self.source, self.full_name(name), self.device, torch.float32)


def linear_of(block: Block, module: str) -> nn.Linear:
    """Return a linear of a block that has not been unloaded."""
    linear = block.get_submodule(module)
    assert isinstance(linear, nn.Linear)
    return linear


def unload(groups: Iterable[InputGroup], *blocks: Block) -> None:
    """Free linears that are not needed again."""
    for group in groups:
        for module in group.modules:
            for block in blocks:
                _set(block, module, nn.Module())


def _set(block: Block, name: str, value: nn.Module | nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(block.get_submodule(owner), leaf, value)
