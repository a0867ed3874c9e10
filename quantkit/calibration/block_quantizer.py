"""Quantize block after block, each linear against the inputs it will really see.

The topology says which linears share an input, and the block itself is run up to there: nothing here knows what a
block does. Only the linears at work are in memory, in float32; the samples lie in an `ActivationStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from quantkit.architectures.topology import InputGroup, input_groups
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.effort import Effort
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.calibration.streams import Streams
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.memory import give_back
from quantkit.model.decoder import Block
from quantkit.model.load import BLOCK_PREFIX, fill, meta_init
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme


class BlockQuantizer:
    """Gives the quantized weights of one decoder block after the other."""

    def __init__(
        self, source: Checkpoint, tokens: Tensor, schemes: Mapping[str, QuantScheme], store: ActivationStore,
        device: torch.device, effort: Effort, group: ProcessGroup,
    ) -> None:  # fmt: skip
        """Embed the samples.

        Args:
            source: the float model.
            tokens: samples [N, T]; each of several processes takes its share.
            schemes: by module; modules that are not in it stay floats.
            store: holds the activations.
            device: where everything is computed.
            effort: how much to do about drift.
            group: the processes that share the work.
        """
        self._source = source
        self._schemes = schemes
        self._device = device
        self._group = group
        self._solver = GroupSolver(schemes, DType(source.config.dtype).torch, effort.damping, group)
        embedding = source.load("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        own = tokens[group.share(len(tokens))]
        self._streams = Streams(source.config, own, embedding, store, device, effort)
        self._layer = 0

    @torch.inference_mode()
    def next_block(self, finished: Callable[[str], Tensor | QuantTensor] | None = None) -> dict[str, Result]:
        """Quantize the next block; the results by tensor name.

        Args:
            finished: gives the block's weights by tensor name if an earlier run has
                already found them; they are then passed through.

        Raises:
            NonFiniteError: if a weight or the inputs of a linear hold NaN or Inf.
        """
        groups = input_groups(self._source.config, self._layer)
        with meta_init():
            floats, quantized = (Block(self._source.config, self._layer) for _ in range(2))
        self._fill_rest(groups, floats, quantized)
        results: dict[str, Result] = {}
        for branch in Block.BRANCHES:
            *leading, last = [group for group in groups if group.branch == branch]
            for group in (*leading, last):
                self._fill(group, floats)
                wanted = self._wanted(group)
                statistics = self._statistics(group, floats) if wanted and finished is None else None
                if group is last:
                    self._streams.reach_end(group, quantized, floats, statistics)
                    _forget(leading, floats, quantized)
                elif statistics is not None:
                    self._streams.gather(group, quantized, floats, statistics)
                give_back()
                solved: dict[str, Result] = {}
                if finished is not None:
                    solved = {module: (_quantized(finished(f"{name}.weight")), {}) for module, name in wanted.items()}
                elif statistics is not None:
                    solved = self._solve(group, wanted, floats, statistics)
                del statistics
                give_back()
                self._install(group, solved, floats, quantized)
                results |= {f"{wanted[module]}.weight": result for module, result in solved.items()}
            self._streams.finish_later(branch, quantized)
            _forget([last], floats)
        self._layer += 1
        return results

    def _fill_rest(self, groups: Iterable[InputGroup], floats: Block, quantized: Block) -> None:
        """Load what both blocks have in common: all that is in no group, as norms."""
        grouped = {module for group in groups for module in group.modules}
        for name, _ in list(floats.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            if owner not in grouped:
                value = self._source.load(BLOCK_PREFIX.format(self._layer) + name)
                assert isinstance(value, Tensor)
                parameter = nn.Parameter(value.to(self._device, torch.float32), requires_grad=False)
                for block in (floats, quantized):
                    setattr(block.get_submodule(owner), leaf, parameter)

    def _fill(self, group: InputGroup, floats: Block) -> None:
        for module in group.modules:
            prefix = f"{BLOCK_PREFIX.format(self._layer)}{module}."
            fill(floats.get_submodule(module), self._source, prefix, self._device, torch.float32, None)

    def _wanted(self, group: InputGroup) -> dict[str, str]:
        """The modules to quantize: name within the block to full name."""
        names = {module: BLOCK_PREFIX.format(self._layer) + module for module in group.modules}
        return {module: name for module, name in names.items() if name in self._schemes}

    def _statistics(self, group: InputGroup, floats: Block) -> HessianAccumulator:
        linear = _linear(floats, group.modules[0])
        drift_width = linear.out_features if group.writes else linear.in_features
        return HessianAccumulator(linear.in_features, drift_width, self._device)

    def _solve(
        self, group: InputGroup, wanted: Mapping[str, str], floats: Block, statistics: HessianAccumulator
    ) -> dict[str, Result]:
        """The results by module within the block."""
        statistics.finish(self._group)
        linears = {name: _linear(floats, module) for module, name in wanted.items()}
        try:
            solved = self._solver.solve(linears, statistics, outputs=group.writes)
        except NonFiniteError as error:
            raise NonFiniteError(f"layer '{next(iter(linears))}': {error.problem}", path=self._source.path) from error
        return {module: solved[name] for module, name in wanted.items()}

    def _install(self, group: InputGroup, solved: Mapping[str, Result], floats: Block, quantized: Block) -> None:
        """Let the quantized block go on with what was found, and with floats for the rest."""
        for module in group.modules:
            linear = _linear(floats, module)
            if module in solved:
                bias = linear.bias
                linear = nn.Linear(1, 1, device="meta")
                weight = solved[module][0].to(self._device).dequantize()
                linear.weight = nn.Parameter(weight, requires_grad=False)
                linear.bias = bias
            _set(quantized, module, linear)


def _linear(block: Block, module: str) -> nn.Linear:
    linear = block.get_submodule(module)
    assert isinstance(linear, nn.Linear)
    return linear


def _quantized(value: Tensor | QuantTensor) -> QuantTensor:
    assert isinstance(value, QuantTensor)
    return value


def _forget(groups: Iterable[InputGroup], *blocks: Block) -> None:
    """Let go of linears that are not needed again."""
    for group in groups:
        for module in group.modules:
            for block in blocks:
                _set(block, module, nn.Module())


def _set(block: Block, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(block.get_submodule(parent), child, module)
