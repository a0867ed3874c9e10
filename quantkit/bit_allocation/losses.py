"""The cost of each scheme of each unit in KL(source || quantized) per token, estimated on
calibration samples.

KL grows with the square of changes: a change dY of a linear's outputs costs half the mean of ``(g .
dY) ** 2``, where g is the gradient, by these outputs, of the log probability of a token that the
model itself draws (its Fisher information). Outputs are assumed to be independent, so a linear
costs half the sum over its rows of their mean squared gradients times their mean squared errors.

The errors of outputs are predicted from the inputs' Hessian without solving it. GPTQ rounds inputs
one after the other, and later inputs compensate each error. Only the part that they cannot
compensate counts: the error's square times the square of the input's diagonal element in the
Cholesky factor that `solve` uses. The errors are those of weights rounded to the scales that GPTQ
would search. In large units only some rows are rounded, and extrapolated to all rows by the energy
of the weights.

One forward pass sums the Hessians and keeps the inputs of each block; one backward pass, which
computes each block again, sums the gradients. One block's weights are in memory at a time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import head_layers, input_groups, layer_kinds
from quantkit.base.memory import malloc_trim
from quantkit.base.progress import Progress, Stretches, in_phase, silent
from quantkit.bit_allocation.allocation import Unit
from quantkit.calibration.effort import every_group, groups_of
from quantkit.calibration.estimate import backward_bytes, block_flops, largest_block
from quantkit.calibration.fisher import TURN, FisherPasses
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Block
from quantkit.model.load import BLOCK_PREFIX
from quantkit.solver.block_grid import search_blocks
from quantkit.solver.gptq import Damped, SingularError
from quantkit.solver.grid import search_scales
from quantkit.tensors.finite import all_finite
from quantkit.tensors.products import fill_lower_
from quantkit.tensors.qtensor import QuantTensor, nearest_codes, row_chunks
from quantkit.tensors.scheme import QuantScheme, Scales

_WEIGHTS_TRIED = 1 << 18  # of a unit, about
_MIN_ROWS = 4  # tried of a linear
_GRADIENT_TOKENS = 8192
_TOKENS_PER_INPUT = 2  # for the Hessian of the widest linear
_STATE_BYTES = 2  # of an element of a block's inputs, kept as bfloat16
# forward passes of the blocks that cost as much as the backward one, which computes them again
_GRADIENT_PASSES = 3
_FACTOR_COPIES = 3  # of a Hessian while it is factored
_FACTOR_PRODUCTS = 2  # of a Hessian with itself, in the time that its Cholesky factor takes
CHOICE = "choose schemes"
"""The name of the phase in reports of progress."""


def sample_counts(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> tuple[int, int]:
    """Return how many samples of a shape [N, T] are used for the Hessians, and how many of these
    for the gradients; `memory_bytes` are for the inputs of the blocks.
    """
    count, length = shape
    widest = max(group.columns for group, _ in every_group(config))
    kept = memory_bytes // (config.num_layers * length * config.hidden_size * _STATE_BYTES)
    for_gradients = min(count, max(1, min(kept, -(-_GRADIENT_TOKENS // length))))
    for_hessians = min(count, -(-max(_GRADIENT_TOKENS, _TOKENS_PER_INPUT * widest) // length))
    return max(for_hessians, for_gradients), for_gradients


def choice_bytes(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Peak bytes: of a block's weights, its Hessians, one of them as it is factored, and the states
    of samples, or of the backward pass; and the inputs of the blocks.
    """
    for_hessians, for_gradients = sample_counts(config, shape, memory_bytes)
    length = shape[1]
    hessians = max(
        sum(group.columns**2 for group in groups_of(config, layer)) for layer in layer_kinds(config)
    )
    factored = _FACTOR_COPIES * max(group.columns for group, _ in every_group(config)) ** 2
    forward = 4 * (
        largest_block(config) + hessians + factored + for_hessians * length * config.hidden_size
    )
    kept = _STATE_BYTES * config.num_layers * for_gradients * length * config.hidden_size
    return kept + max(forward, backward_bytes(config, for_gradients, length))


def choice_flops(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Count the operations in the blocks: of the forward pass with the Hessians, which are
    factored, and of the backward pass.
    """
    for_hessians, for_gradients = (
        count * shape[1] for count in sample_counts(config, shape, memory_bytes)
    )
    hessians = 0.0
    for group, count in every_group(config):
        summed = 2 * for_hessians * group.share * group.columns**2
        factored = _FACTOR_PRODUCTS * group.columns**3
        hessians += count * (summed + factored)
    passes = block_flops(config, for_hessians) + _GRADIENT_PASSES * block_flops(
        config, for_gradients
    )
    return int(passes + hessians)


def count_trial_weights(
    units: Sequence[Unit], options: Sequence[Sequence[QuantScheme]]
) -> Counter[QuantScheme]:
    """Count the weights that are rounded in each scheme to estimate its losses, given the
    schemes of each unit.
    """
    counts = Counter[QuantScheme]()
    for unit, schemes in zip(units, options, strict=True):
        for scheme in schemes:
            counts[scheme] += min(unit.weights, _WEIGHTS_TRIED)
    return counts


def estimate_losses(
    source: Checkpoint,
    samples: Tensor,
    units: Sequence[Unit],
    schemes: Mapping[Unit, Sequence[QuantScheme]],
    *,
    device: torch.device,
    memory_bytes: int,
    scale_dtype: torch.dtype,
    group: ProcessGroup,
    progress: Progress = silent,
) -> list[dict[QuantScheme, float]]:
    """Return the KL that each unit would cost in each of its schemes, alone, in the order of the
    units.

    Args:
        samples: tokens [N, T], of which the first ones are used; each of several processes runs its
            share of these.
        device: runs the blocks.
        memory_bytes: for the inputs of the blocks.

    Raises:
        NonFiniteError: if a weight of a unit, or the inputs of a linear, hold NaN or Inf.
    """
    config = source.config
    counts = sample_counts(config, samples.shape, memory_bytes)
    own = [samples[:count][group.share(count)] for count in counts]
    passes = FisherPasses(source, own[0], len(own[1]), device)
    errors: dict[str, RowErrors] = {}
    layers = config.num_layers
    head = TURN * head_layers(config)
    total = 2 * layers + head
    for layer in range(layers):
        progress(CHOICE, layer, total, "layers")
        hessians, block = passes.forward(layer)
        of_layer = [unit for unit in units if unit.layer == layer]
        if of_layer:
            errors |= _block_errors(
                source, block, layer, hessians, of_layer, schemes, scale_dtype, group
            )
        del hessians, block
        malloc_trim()
    gradients: dict[str, Tensor] = {}
    stretches = Stretches(in_phase(progress, CHOICE), total)
    stretches.next(layers)
    passes.turn(group.share(counts[1]).start, stretches.next(head))
    for layer in reversed(range(layers)):
        progress(CHOICE, head + 2 * layers - layer - 1, total, "layers")
        for module, squares in passes.squares(layer).items():
            group.sum_(squares)
            gradients[module] = squares.cpu() / (counts[1] * samples.shape[1])
        malloc_trim()
    progress(CHOICE, total, total, "layers")
    result: list[dict[QuantScheme, float]] = []
    for unit in units:
        result.append(
            {
                scheme: sum(errors[m].loss(gradients[m], scheme) for m in unit.modules)
                for scheme in schemes[unit]
            }
        )
    return result


def _block_errors(
    source: Checkpoint,
    block: Block,
    layer: int,
    hessians: dict[str, tuple[Tensor, int]],
    units: Sequence[Unit],
    schemes: Mapping[Unit, Sequence[QuantScheme]],
    scale_dtype: torch.dtype,
    group: ProcessGroup,
) -> dict[str, RowErrors]:
    """Return the errors of all linears of a block that are in units."""
    result: dict[str, RowErrors] = {}
    prefix = BLOCK_PREFIX.format(layer)
    unit_of = {module: unit for unit in units for module in unit.modules}
    # Rows of each linear that are rounded.
    tried: dict[str, int] = {}
    for unit in units:
        share = min(1.0, _WEIGHTS_TRIED / unit.weights)
        tried |= {p.module: math.ceil(share * p.shape[0]) for p in unit.parameters}
    of_site: dict[str, list[str]] = defaultdict(list)
    for input_group in input_groups(source.config, layer):
        of_site[input_group.site] += [
            module for module in input_group.modules if prefix + module in unit_of
        ]
    for site, modules in of_site.items():
        if not modules:
            continue
        weights = {
            prefix + module: block.get_parameter(f"{module}.weight").data for module in modules
        }
        for module, weight in weights.items():
            if not all_finite(weight):
                raise NonFiniteError(
                    f"tensor '{module}.weight' holds NaN or Inf",
                    path=source.path,
                    hint=(
                        f'it has no codes; repair the source, or `keep="{module}"` leaves it as'
                        " it is"
                    ),
                )
        columns = next(iter(weights.values())).shape[1]
        total, count = hessians.pop(site, (torch.zeros(columns, columns, device=weight.device), 0))
        rows = torch.tensor([float(count)], device=total.device)
        group.sum_(total)
        group.sum_(rows)
        fill_lower_(total)
        total.div_(rows.clamp_(min=1))
        wanted = list(dict.fromkeys(s for name in weights for s in schemes[unit_of[name]]))
        try:
            result |= row_errors(weights, total, wanted, scale_dtype, tried)
        except SingularError:
            result |= row_errors(
                weights, torch.eye(columns, device=total.device), wanted, scale_dtype, tried
            )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"linear '{next(iter(weights))}': {error.problem}", path=source.path
            ) from error
    return result


@dataclass(frozen=True)
class RowErrors:
    """The errors of one linear, per token: the indices of the rows that were rounded, their squared
    output errors, [R], by scheme, and the energy of all rows, [O], to which errors are assumed to
    be proportional.
    """

    rows: Tensor
    errors: Mapping[QuantScheme, Tensor]
    energy: Tensor

    def loss(self, gradients: Tensor, scheme: QuantScheme) -> float:
        """Half the squared errors of all rows, weighted by their mean squared gradients [O]."""
        weighted = gradients.double() * self.energy.double()
        tried = weighted[self.rows].sum().item()
        if tried <= 0:
            return 0.0
        lost = (gradients[self.rows].double() * self.errors[scheme].double()).sum().item()
        return 0.5 * lost * weighted.sum().item() / tried


def _round_columns(
    columns: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> Tensor:
    """Weights [I, O] rounded to the scales that GPTQ would search."""
    if scheme.scales is not Scales.FLOATS:
        scales = search_blocks(columns, importance, scheme, search_scales)
        rows = columns.t()
        codes = nearest_codes(
            rows.reshape(len(rows), scheme.groups(len(columns)), -1), scales, scheme
        )
        return QuantTensor.of_blocks(codes, scales, scheme).dequantize().t().contiguous()
    scale, _ = search_scales(columns, importance, scheme, scale_dtype)
    grouped = columns.view(scale.shape[0], -1, columns.shape[1])
    step = scale.float().unsqueeze(1)
    half = scheme.levels // 2  # schemes are symmetric
    return (grouped / step).round_().clamp_(-half, half - 1).mul_(step).view_as(columns)


def row_errors(
    weights: Mapping[str, Tensor],
    hessian: Tensor,
    schemes: Sequence[QuantScheme],
    scale_dtype: torch.dtype,
    tried: Mapping[str, int],
) -> dict[str, RowErrors]:
    """Return the errors of linears that share their inputs.

    Args:
        weights: [O, I] float32, by module.
        hessian: [I, I] mean over tokens; overwritten.
        schemes: with groups that divide the rows.
        tried: how many rows of each are rounded.

    Raises:
        NonFiniteError, SingularError: see `Damped.of_`.
    """
    damped = Damped.of_(hessian)
    # Of each input, given those that GPTQ rounds after it.
    variances = torch.empty_like(damped.diagonal)
    variances[damped.order.flip(0)] = damped.factor.diagonal().square()
    chosen = {}
    for module, weight in weights.items():
        stride = max(1, len(weight) // max(tried[module], _MIN_ROWS))
        chosen[module] = torch.arange(0, len(weight), stride, device=weight.device)
    columns = torch.cat([weights[module][rows] for module, rows in chosen.items()]).t().contiguous()
    counts = [len(rows) for rows in chosen.values()]
    errors: dict[QuantScheme, Sequence[Tensor]] = {}
    for scheme in schemes:
        residual = _round_columns(columns, damped.diagonal, scheme, scale_dtype).sub_(columns)
        errors[scheme] = torch.split((variances @ residual.square_()).cpu(), counts)
    result = {}
    for number, (module, weight) in enumerate(weights.items()):
        parts = []
        for start, stop in row_chunks(*weight.shape):
            parts.append(weight[start:stop].square() @ variances)
        own = {scheme: of_scheme[number] for scheme, of_scheme in errors.items()}
        result[module] = RowErrors(chosen[module].cpu(), own, torch.cat(parts).cpu())
    return result
