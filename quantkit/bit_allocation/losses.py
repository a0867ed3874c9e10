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
from pathlib import Path

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import count_head_layers, input_groups, layer_kinds
from quantkit.base.memory import malloc_trim
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, Stretches, in_phase, silent
from quantkit.bit_allocation.allocation import Unit
from quantkit.calibration.effort import every_group, groups_of, inner_width
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

# About how many weights of a unit are rounded to estimate its losses.
_WEIGHTS_TRIED = 1 << 18
# Rows of a linear that are rounded at least.
_MIN_ROWS = 4
_GRADIENT_TOKENS = 8192
# For the Hessian of the widest linear, which has no full rank with fewer tokens than inputs.
_TOKENS_PER_INPUT = 2
# An element of a block's inputs is kept as bfloat16.
_STATE_BYTES = 2
# Tensors as wide as the inner states that a sample keeps where it waits for the others.
_WAITING_WIDTHS = 4
# Forward passes of the blocks that cost as much as the backward pass, which computes them again.
_GRADIENT_PASSES = 3
# Copies of a Hessian while it is factored.
_FACTOR_COPIES = 3
# Products of a Hessian with itself that take as long as its Cholesky factor.
_FACTOR_PRODUCTS = 2
CHOICE = "choose schemes"
"""The name of the phase in reports of progress."""


def sample_counts(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> tuple[int, int]:
    """Count the samples of a shape [N, T] that are used for the Hessians, and those of them that
    are also used for the gradients; `memory_bytes` are for the inputs of the blocks.
    """
    count, length = shape
    widest = max(group.columns for group, _ in every_group(config))
    # The backward pass needs the inputs of all blocks at once.
    sample_bytes = config.num_layers * length * config.hidden_size * _STATE_BYTES
    fit_in_memory = memory_bytes // sample_bytes
    needed_for_gradients = -(-_GRADIENT_TOKENS // length)
    for_gradients = min(count, max(1, min(fit_in_memory, needed_for_gradients)))
    hessian_tokens = max(_GRADIENT_TOKENS, _TOKENS_PER_INPUT * widest)
    for_hessians = min(count, -(-hessian_tokens // length))
    # Samples of a model whose own code runs wait within its blocks, all in memory, and no gradients
    # are computed.
    if config.tensors is not None:
        waiting_bytes = _WAITING_WIDTHS * inner_width(config) * length * 4
        return min(for_hessians, max(1, memory_bytes // waiting_bytes)), 0
    return max(for_hessians, for_gradients), for_gradients


def choice_bytes(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Estimate the peak memory: a block's weights, its Hessians, one of them as it is factored, and
    the states of samples; or the backward pass; and the inputs of the blocks.
    """
    for_hessians, for_gradients = sample_counts(config, shape, memory_bytes)
    length = shape[1]
    widest = max(group.columns for group, _ in every_group(config))
    if config.tensors is not None:
        waiting = for_hessians * _WAITING_WIDTHS * inner_width(config) * length
        return 4 * (largest_block(config) + (1 + _FACTOR_COPIES) * widest**2 + waiting)
    hessians = 0
    for layer in layer_kinds(config):
        hessians = max(hessians, sum(group.columns**2 for group in groups_of(config, layer)))
    factored = _FACTOR_COPIES * widest**2
    states = for_hessians * length * config.hidden_size
    # All of them are float32.
    forward = 4 * (largest_block(config) + hessians + factored + states)
    block_inputs = _STATE_BYTES * config.num_layers * for_gradients * length * config.hidden_size
    return block_inputs + max(forward, backward_bytes(config, for_gradients, length))


def choice_flops(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Count the operations in the blocks: of the forward pass with the Hessians, which are
    factored, and of the backward pass.
    """
    hessian_samples, gradient_samples = sample_counts(config, shape, memory_bytes)
    hessian_tokens = hessian_samples * shape[1]
    gradient_tokens = gradient_samples * shape[1]
    hessians = 0.0
    for group, count in every_group(config):
        # An expert gets only its share of the tokens.
        summed = 2 * hessian_tokens * group.share * group.columns**2
        factored = _FACTOR_PRODUCTS * group.columns**3
        hessians += count * (summed + factored)
    forward = block_flops(config, hessian_tokens)
    backward = _GRADIENT_PASSES * block_flops(config, gradient_tokens)
    return int(forward + backward + hessians)


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
    """Estimate the KL that each unit would cost in each of its schemes, alone, in the order of the
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
    for_hessians, for_gradients = sample_counts(config, samples.shape, memory_bytes)
    # Each process runs its share of the samples.
    local_samples = samples[:for_hessians][group.share(for_hessians)]
    gradient_share = group.share(for_gradients)
    local_gradient_samples = samples[:for_gradients][gradient_share]
    passes = FisherPasses(source, local_samples, len(local_gradient_samples), device)
    errors: dict[str, RowErrors] = {}
    layers = config.num_layers
    head = TURN * count_head_layers(config)
    # The forward and the backward pass visit each layer once.
    total = 2 * layers + head
    for layer in range(layers):
        progress(CHOICE, layer, total, "layers")
        hessians, block = passes.forward(layer)
        layer_units = [unit for unit in units if unit.layer == layer]
        if layer_units:
            errors |= _block_errors(
                source, block, layer, hessians, layer_units, schemes, scale_dtype, group
            )
        # Freed before the next block is loaded, because one block's weights are in memory at a
        # time.
        del hessians, block
        malloc_trim()
    gradients: dict[str, Tensor] = {}
    stretches = Stretches(in_phase(progress, CHOICE), total)
    stretches.next(layers)
    passes.turn(gradient_share.start, stretches.next(head))
    for layer in reversed(range(layers)):
        progress(CHOICE, head + 2 * layers - layer - 1, total, "layers")
        for module, squares in passes.squares(layer).items():
            group.sum_(squares)
            gradients[module] = squares.cpu() / (for_gradients * samples.shape[1])
        malloc_trim()
    progress(CHOICE, total, total, "layers")
    losses: list[dict[QuantScheme, float]] = []
    for unit in units:
        unit_losses: dict[QuantScheme, float] = {}
        for scheme in schemes[unit]:
            # Linears are assumed to be independent, see above.
            unit_losses[scheme] = sum(errors[m].loss(gradients[m], scheme) for m in unit.modules)
        losses.append(unit_losses)
    return losses


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
    """Estimate the errors of all linears of a block that are in units."""
    errors: dict[str, RowErrors] = {}
    prefix = BLOCK_PREFIX.format(layer)
    unit_of: dict[str, Unit] = {}
    for unit in units:
        unit_of |= dict.fromkeys(unit.modules, unit)
    tried = count_tried_rows(units)
    # Linears of one site share their inputs, and so their Hessian.
    modules_of_site: dict[str, list[str]] = defaultdict(list)
    for input_group in input_groups(source.config, layer):
        for module in input_group.modules:
            if prefix + module in unit_of:
                modules_of_site[input_group.site].append(module)
    for site, modules in modules_of_site.items():
        weights: dict[str, Tensor] = {}
        for module in modules:
            weights[prefix + module] = block.get_parameter(f"{module}.weight").data
        require_finite(weights, source.path)
        weight = next(iter(weights.values()))
        columns = weight.shape[1]
        # An expert may get no tokens in this process. It takes part in the sum with zeros, since
        # all processes must call it.
        total, count = hessians.pop(site, (torch.zeros(columns, columns, device=weight.device), 0))
        rows = torch.tensor([float(count)], device=total.device)
        group.sum_(total)
        group.sum_(rows)
        # Only one triangle of the symmetric Hessian was summed.
        fill_lower_(total)
        total.div_(rows.clamp_(min=1))
        site_units = [unit_of[name] for name in weights]
        errors |= estimate_row_errors(
            weights, total, list_schemes(site_units, schemes), scale_dtype, tried, source.path
        )
    return errors


def count_tried_rows(units: Sequence[Unit]) -> dict[str, int]:
    """Count the rows of each linear that are rounded, by module."""
    tried: dict[str, int] = {}
    for unit in units:
        share = min(1.0, _WEIGHTS_TRIED / unit.weights)
        for parameter in unit.parameters:
            tried[parameter.module] = math.ceil(share * parameter.shape[0])
    return tried


def require_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise a `NonFiniteError` for a weight, given by module, that holds NaN or Inf."""
    for module, weight in weights.items():
        if not all_finite(weight):
            raise NonFiniteError(
                f"tensor '{module}.weight' contains NaN or Inf",
                path=path,
                hint=(
                    Message(
                        "it cannot be quantized; repair the source, or ",
                        Option("keep", value=module),
                        " leaves it unquantized",
                    )
                ),
            )


def list_schemes(
    units: Sequence[Unit], schemes: Mapping[Unit, Sequence[QuantScheme]]
) -> list[QuantScheme]:
    """List all schemes that any of some units may have."""
    listed: list[QuantScheme] = []
    for unit in units:
        for scheme in schemes[unit]:
            if scheme not in listed:
                listed.append(scheme)
    return listed


def estimate_row_errors(
    weights: Mapping[str, Tensor],
    hessian: Tensor,
    schemes: Sequence[QuantScheme],
    scale_dtype: torch.dtype,
    tried: Mapping[str, int],
    path: Path,
) -> dict[str, RowErrors]:
    """Estimate the errors of linears that share their inputs, as `row_errors`, whatever their
    Hessian is. Raises `NonFiniteError` for one that holds NaN or Inf.
    """
    try:
        return row_errors(weights, hessian, schemes, scale_dtype, tried)
    except SingularError:
        # Without a usable Hessian, all inputs count equally, and none compensates another.
        identity = torch.eye(len(hessian), device=hessian.device)
        return row_errors(weights, identity, schemes, scale_dtype, tried)
    except NonFiniteError as error:
        raise NonFiniteError(
            f"linear '{next(iter(weights))}': {error.problem}", path=path
        ) from error


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
        """Estimate half the squared errors of all rows, weighted by their mean squared gradients
        [O].
        """
        weighted = gradients.double() * self.energy.double()
        tried = weighted[self.rows].sum().item()
        if tried <= 0:
            return 0.0
        lost = (gradients[self.rows].double() * self.errors[scheme].double()).sum().item()
        # Extrapolated from the rows that were rounded to all rows, by their weighted energy.
        return 0.5 * lost * weighted.sum().item() / tried


def _round_columns(
    columns: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> Tensor:
    """Round weights [I, O] to the scales that GPTQ would search."""
    if scheme.scales is not Scales.FLOATS:
        scales = search_blocks(columns, importance, scheme, search_scales)
        rows = columns.t()
        grouped_rows = rows.reshape(len(rows), scheme.groups(len(columns)), -1)
        codes = nearest_codes(grouped_rows, scales, scheme)
        return QuantTensor.of_blocks(codes, scales, scheme).dequantize().t().contiguous()
    scale, _ = search_scales(columns, importance, scheme, scale_dtype)
    grouped = columns.view(scale.shape[0], -1, columns.shape[1])
    step = scale.float().unsqueeze(1)
    # The candidates with float scales are symmetric.
    half = scheme.levels // 2
    return (grouped / step).round_().clamp_(-half, half - 1).mul_(step).view_as(columns)


def row_errors(
    weights: Mapping[str, Tensor],
    hessian: Tensor,
    schemes: Sequence[QuantScheme],
    scale_dtype: torch.dtype,
    tried: Mapping[str, int],
) -> dict[str, RowErrors]:
    """Estimate the errors of linears that share their inputs.

    Args:
        weights: [O, I] float32, by module.
        hessian: [I, I] mean over tokens; overwritten.
        schemes: with groups that divide the rows.
        tried: how many rows of each are rounded.

    Raises:
        NonFiniteError, SingularError: see `Damped.of_`.
    """
    damped = Damped.of_(hessian)
    # The variance of each input, given those that GPTQ rounds after it: they compensate the rest of
    # its error. The Cholesky factor is in GPTQ's order, reversed.
    variances = torch.empty_like(damped.diagonal)
    variances[damped.order.flip(0)] = damped.factor.diagonal().square()
    rows_tried: dict[str, Tensor] = {}
    weights_tried: list[Tensor] = []
    counts: list[int] = []
    for module, weight in weights.items():
        stride = max(1, len(weight) // max(tried[module], _MIN_ROWS))
        rows = torch.arange(0, len(weight), stride, device=weight.device)
        rows_tried[module] = rows
        weights_tried.append(weight[rows])
        counts.append(len(rows))
    # One matrix of all linears, so that each scheme searches its scales once.
    columns = torch.cat(weights_tried).t().contiguous()
    split_errors: dict[QuantScheme, Sequence[Tensor]] = {}
    for scheme in schemes:
        residual = _round_columns(columns, damped.diagonal, scheme, scale_dtype).sub_(columns)
        split_errors[scheme] = torch.split((variances @ residual.square_()).cpu(), counts)
    errors_of_linears: dict[str, RowErrors] = {}
    for number, (module, weight) in enumerate(weights.items()):
        energies: list[Tensor] = []
        # In chunks, because the squares are another copy of the weights.
        for start, stop in row_chunks(*weight.shape):
            energies.append(weight[start:stop].square() @ variances)
        errors: dict[QuantScheme, Tensor] = {}
        for scheme, linear_errors in split_errors.items():
            errors[scheme] = linear_errors[number]
        energy = torch.cat(energies).cpu()
        errors_of_linears[module] = RowErrors(rows_tried[module].cpu(), errors, energy)
    return errors_of_linears
