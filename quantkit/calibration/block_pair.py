"""One decoder block twice, as floats and as far as it has been quantized, with only the linears at work in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures.topology import InputGroup, input_groups
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Block
from quantkit.model.load import BLOCK_PREFIX, float_parameter, meta_init
from quantkit.tensors.products import bfloat16_linear, compute_dtype, times
from quantkit.tensors.qtensor import QuantTensor


class StreamLinear(nn.Linear):
    """A linear that samples pass through, while the solver has its float32 weight."""

    passing = torch.float32
    _rounded: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.passing == torch.bfloat16:
            out = bfloat16_linear(x, self._rounded_weight())
        else:
            out = times(x.flatten(0, -2), self.weight.t()).view(*x.shape[:-1], -1)
        return out if self.bias is None else out.add_(self.bias)

    def settle(self) -> None:
        """Keep only what samples need to pass through."""
        if self.passing == torch.bfloat16:
            self._rounded_weight()
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def _rounded_weight(self) -> Tensor:
        if self._rounded is None:
            self._rounded = self.weight.bfloat16()
        return self._rounded


Finished = Callable[[str], Tensor | QuantTensor]
"""Gives a block's weights by tensor name where an earlier run has already found them."""


@dataclass(frozen=True)
class BlockPair:
    """A block on its way from floats to codes.

    Attributes:
        source: the float model.
        layer: number of the block.
        floats, quantized: it, without weights at first but for those that are in no group, as norms and routers.
        solver: finds the codes.
    """

    source: Checkpoint
    layer: int
    floats: Block
    quantized: Block
    solver: GroupSolver
    device: torch.device

    @classmethod
    def of(cls, source: Checkpoint, layer: int, solver: GroupSolver, device: torch.device) -> BlockPair:
        """The pair with what both have in common."""
        with meta_init():
            floats, quantized = (Block(source.config, layer) for _ in range(2))
        pair = cls(source, layer, floats, quantized, solver, device)
        grouped = {module for group in pair.groups for module in group.modules}
        for name, _ in list(floats.named_parameters()):
            if name.rpartition(".")[0] not in grouped:
                parameter = pair._parameter(name)
                for block in (floats, quantized):
                    _set_parameter(block, name, parameter)
        return pair

    @property
    def groups(self) -> list[InputGroup]:
        return input_groups(self.source.config, self.layer)

    def fill(self, group: InputGroup) -> None:
        """Load the floats of a group."""
        for module in group.modules:
            _set(self.floats, module, self._linear(linear_of(self.floats, module)))
            for leaf, _ in list(self.floats.get_submodule(module).named_parameters()):
                name = f"{module}.{leaf}"
                _set_parameter(self.floats, name, self._parameter(name))

    def wanted(self, group: InputGroup) -> dict[str, str]:
        """The modules to quantize: name within the block to full name."""
        names = {module: BLOCK_PREFIX.format(self.layer) + module for module in group.modules}
        return {module: name for module, name in names.items() if name in self.solver.schemes}

    def statistics(self, group: InputGroup) -> HessianAccumulator:
        """Sums over a group's inputs, still empty; the drift is that of the outputs where the group writes."""
        linear = linear_of(self.floats, group.modules[0])
        drift_width = linear.out_features if group.writes else linear.in_features
        return HessianAccumulator(linear.in_features, drift_width, self.device)

    def solve(
        self, group: InputGroup, statistics: HessianAccumulator, modules: Collection[str] | None = None
    ) -> dict[str, Result]:
        """The results by module within the block.

        Args:
            statistics: of all processes; used up.
            modules: of the group; None is all that are wanted.

        Raises:
            NonFiniteError: if a weight or the inputs of a linear hold NaN or Inf.
        """
        wanted = {module: name for module, name in self.wanted(group).items() if modules is None or module in modules}
        linears = {name: linear_of(self.floats, module) for module, name in wanted.items()}
        try:
            solved = self.solver.solve(linears, statistics, outputs=group.writes)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"layer '{next(iter(linears))}': {error.problem}", path=self.source.path,
                hint='`method="rtn"` rounds without it',
            ) from error  # fmt: skip
        return {module: solved[name] for module, name in wanted.items()}

    def change(self, module: str, quantized: QuantTensor) -> tuple[float, float]:
        """As `GroupSolver.change`, for a linear whose floats are loaded."""
        return self.solver.change(quantized, linear_of(self.floats, module).weight)

    def rounded(self, module: str) -> QuantTensor:
        """A linear whose floats are loaded, rounded to nearest."""
        return self.solver.rounded(BLOCK_PREFIX.format(self.layer) + module, linear_of(self.floats, module).weight)

    def load_resumed(self, group: InputGroup, finished: Finished) -> dict[str, Result]:
        """What an earlier run has found, by module within the block."""
        return {module: (_quantized(finished(f"{name}.weight")), {}) for module, name in self.wanted(group).items()}

    def install(self, group: InputGroup, solved: Mapping[str, Result]) -> dict[str, Result]:
        """Let the quantized block go on with what was found, and with floats for the rest.

        Returns:
            What was found, by tensor name.
        """
        for module in group.modules:
            linear = linear_of(self.floats, module)
            if module in solved:
                bias = linear.bias
                linear = self._linear(linear)
                weight = solved[module][0].to(self.device).dequantize()
                linear.weight = nn.Parameter(weight, requires_grad=False)
                linear.bias = bias
                linear.settle()
            _set(self.quantized, module, linear)
        prefix = BLOCK_PREFIX.format(self.layer)
        return {f"{prefix}{module}.weight": result for module, result in solved.items()}

    def settle(self, group: InputGroup) -> None:
        """Keep of the floats of a group only what samples need to pass through them."""
        for module in group.modules:
            linear = linear_of(self.floats, module)
            if isinstance(linear, StreamLinear):
                linear.settle()

    def _linear(self, like: nn.Linear) -> StreamLinear:
        """A linear of the same shape, without weights yet."""
        linear = StreamLinear(like.in_features, like.out_features, like.bias is not None, device="meta")
        linear.passing = compute_dtype(self.device)
        return linear

    def _parameter(self, name: str) -> nn.Parameter:
        full = BLOCK_PREFIX.format(self.layer) + name
        return float_parameter(self.source, full, self.device, torch.float32)


def linear_of(block: Block, module: str) -> nn.Linear:
    """A linear of a block that has not been forgotten."""
    linear = block.get_submodule(module)
    assert isinstance(linear, nn.Linear)
    return linear


def forget(groups: Iterable[InputGroup], *blocks: Block) -> None:
    """Let go of linears that are not needed again."""
    for group in groups:
        for module in group.modules:
            for block in blocks:
                _set(block, module, nn.Module())


def _quantized(value: Tensor | QuantTensor) -> QuantTensor:
    assert isinstance(value, QuantTensor)
    return value


def _set(block: Block, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(block.get_submodule(parent), child, module)


def _set_parameter(block: Block, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(block.get_submodule(owner), leaf, parameter)
