"""The cost of each scheme of each unit in KL(source || quantized) per token, estimated on calibration samples.

KL grows with the square of changes: a change dY of a linear's outputs costs half the mean of ``(g . dY) ** 2``,
where g is the gradient, by these outputs, of the log probability of a token that the model itself draws (its Fisher
information). Outputs are assumed to be independent, so a linear costs half the sum over its rows of their mean squared
gradients times their mean squared errors.

The errors of outputs are predicted from the inputs' Hessian without solving it. GPTQ rounds inputs one after the other,
and later inputs compensate each error. Only the part that they cannot compensate counts: the error's square times the
square of the input's diagonal element in the Cholesky factor that `solve` uses. The errors are those of weights rounded
to the scales that GPTQ would search. In large units only some rows are rounded, and extrapolated to all rows by the
energy of the weights.

One forward pass sums the Hessians and keeps the inputs of each block; one backward pass, which computes each block
again, sums the gradients. One block's weights are in memory at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import input_groups, layer_kinds
from quantkit.bit_allocation.allocation import Unit
from quantkit.calibration.effort import batch_samples, every_group, groups_of
from quantkit.calibration.estimate import forward_flops, largest_block
from quantkit.calibration.streams import embedded, step_of_samples
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint, stored_name
from quantkit.memory import malloc_trim
from quantkit.model.decoder import Block, final_logits, rms_norm
from quantkit.model.load import BLOCK_PREFIX, fill, float_parameter, floats_of, meta_init
from quantkit.progress import Progress, silent
from quantkit.solver.block_grid import search_blocks
from quantkit.solver.gptq import Damped, SingularError
from quantkit.solver.grid import search_scales
from quantkit.tensors.finite import all_finite
from quantkit.tensors.products import add_square_, fill_lower_
from quantkit.tensors.qtensor import QuantTensor, nearest_codes, row_chunks
from quantkit.tensors.scheme import QuantScheme, Scales

_WEIGHTS_TRIED = 1 << 18  # of a unit, about
_MIN_ROWS = 4  # tried of a linear
_TOKENS_THROUGH_THE_HEAD = 64
_HEAD_WEIGHTS = 1 << 24  # of the head that are float32 at a time
_GRADIENT_TOKENS = 8192
_TOKENS_PER_INPUT = 2  # for the Hessian of the widest linear
_STATE_BYTES = 2  # of an element of a block's inputs, kept as bfloat16
_GRADIENT_PASSES = 3  # forward passes that cost as much as the backward one: blocks again, their gradients, the head's


def sample_counts(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> tuple[int, int]:
    """How many samples of a shape [N, T] are used for the Hessians, and how many of these for the gradients;
    `memory_bytes` are for the inputs of the blocks."""
    count, length = shape
    widest = max(group.columns for group, _ in every_group(config))
    kept = memory_bytes // (config.num_layers * length * config.hidden_size * _STATE_BYTES)
    for_gradients = min(count, max(1, min(kept, -(-_GRADIENT_TOKENS // length))))
    for_hessians = min(count, -(-max(_GRADIENT_TOKENS, _TOKENS_PER_INPUT * widest) // length))
    return max(for_hessians, for_gradients), for_gradients


def choice_bytes(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Peak bytes of a block's weights, its Hessians, the samples' states and the inputs of the blocks."""
    for_hessians, for_gradients = (count * shape[1] for count in sample_counts(config, shape, memory_bytes))
    hessians = max(sum(group.columns**2 for group in groups_of(config, layer)) for layer in layer_kinds(config))
    states = 4 * for_hessians + _STATE_BYTES * config.num_layers * for_gradients
    return 4 * (largest_block(config) + hessians) + states * config.hidden_size


def choice_flops(config: ModelConfig, shape: Sequence[int], memory_bytes: int) -> int:
    """Operations of the forward pass with the Hessians, and of the backward pass."""
    for_hessians, for_gradients = (count * shape[1] for count in sample_counts(config, shape, memory_bytes))
    squares = sum(count * 2 * for_hessians * group.share * group.columns**2 for group, count in every_group(config))
    forward = forward_flops(config, for_hessians) + _GRADIENT_PASSES * forward_flops(config, for_gradients)
    return int(forward + squares)


def estimate_losses(
    source: Checkpoint, samples: Tensor, units: Sequence[Unit], schemes: Mapping[Unit, Sequence[QuantScheme]], *,
    device: torch.device, memory_bytes: int, scale_dtype: torch.dtype, group: ProcessGroup,
    progress: Progress = silent,
) -> list[dict[QuantScheme, float]]:  # fmt: skip
    """The KL that each unit would cost in each of its schemes, alone, in the order of the units.

    Args:
        samples: tokens [N, T], of which the first ones are used; each of several processes runs its share of these.
        device: runs the blocks.
        memory_bytes: for the inputs of the blocks.

    Raises:
        NonFiniteError: if a weight of a unit, or the inputs of a linear, hold NaN or Inf.
    """
    config = source.config
    counts = sample_counts(config, samples.shape, memory_bytes)
    own = [samples[:count][group.share(count)] for count in counts]
    passes = _Passes(source, own[0], len(own[1]), device)
    errors: dict[str, RowErrors] = {}
    layers = config.num_layers
    for layer in range(layers):
        progress("choose schemes", layer, 2 * layers, "layers")
        hessians, block = passes.forward(layer)
        of_layer = [unit for unit in units if unit.layer == layer]
        if of_layer:
            errors |= _block_errors(source, block, layer, hessians, of_layer, schemes, scale_dtype, group)
        del hessians, block
        malloc_trim()
    gradients: dict[str, Tensor] = {}
    passes.turn(group.share(counts[1]).start)
    for layer in reversed(range(layers)):
        progress("choose schemes", 2 * layers - layer - 1, 2 * layers, "layers")
        for module, squares in passes.backward(layer).items():
            group.sum_(squares)
            gradients[module] = squares.cpu() / (counts[1] * samples.shape[1])
        malloc_trim()
    progress("choose schemes", 2 * layers, 2 * layers, "layers")
    return [
        {scheme: sum(errors[m].loss(gradients[m], scheme) for m in unit.modules) for scheme in schemes[unit]}
        for unit in units
    ]


class _Passes:
    """The forward and the backward pass of the samples, in batches."""

    def __init__(
        self, source: Checkpoint, samples: Tensor, kept: int, device: torch.device,
        states: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        """The samples are tokens [N, T], of which there may be none, and the first `kept` have a backward pass; the
        blocks' inputs are kept in the dtype `states`."""
        length = samples.shape[1]
        self._source, self._device, self._dtype = source, device, states
        step = batch_samples(source.config, length)
        parts = (samples[:kept], samples[kept:])
        batches = [batch for part in parts if len(part) for batch in torch.split(part, step)]
        self._states = list(embedded(source, batches))
        self._inputs: list[list[Tensor]] = [[] for _ in range(-(-kept // step))]
        self._step = step_of_samples(source.config, length, device)

    @torch.no_grad()
    def forward(self, layer: int) -> tuple[dict[str, tuple[Tensor, int]], Block]:
        """Run a block: the sum of ``X.T @ X`` over the inputs X of its linears, and their number, by site."""
        block = self._block(layer)
        sums: dict[str, tuple[Tensor, int]] = {}  # the experts of a layer share a site

        def add(site: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            total, count = sums.get(site) or (torch.zeros(x.shape[1], x.shape[1], device=x.device), 0)
            add_square_(total, x.t().contiguous())
            sums[site] = total, count + len(x)

        with ExitStack() as hooks:
            for group in input_groups(self._source.config, layer):
                linear = block.get_submodule(group.modules[0])
                hooks.enter_context(linear.register_forward_pre_hook(partial(add, group.site)))
            for index, states in enumerate(self._states):
                if index < len(self._inputs):
                    self._inputs[index].append(states.to(self._dtype))
                self._states[index] = block(states.to(self._device), self._step).cpu()
        return sums, block

    def turn(self, first: int) -> None:
        """Begin the backward pass: gradients of the log probabilities of drawn tokens by the last block's outputs.
        `first` is the index of this process's first sample among all samples."""
        del self._states[len(self._inputs) :]
        norm = rms_norm(self._source.config)
        norm.weight = float_parameter(self._source, "model.norm.weight", torch.device("cpu"), torch.float32)
        head = floats_of(self._source.load(stored_name(self._source, "lm_head.weight")))
        for index, states in enumerate(self._states):
            states.requires_grad_()
            normed = norm(states)
            normed.backward(_head_gradients(normed.detach(), head, self._source.config, first))
            first += len(states)
            assert states.grad is not None
            self._states[index] = states.grad

    def backward(self, layer: int) -> dict[str, Tensor]:
        """Run the gradients back through a block; the sum of their squares by module, [O] for each."""
        block = self._block(layer)
        squares: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor) -> None:
            squares[name].add_(gradient.flatten(0, -2).square().sum(0))

        def listen(name: str, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            out.register_hook(partial(add, name))  # type: ignore[no-untyped-call]

        with ExitStack() as hooks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    squares[name] = torch.zeros(module.out_features, device=self._device)
                    hooks.enter_context(module.register_forward_hook(partial(listen, name)))
            for index, gradient in enumerate(self._states):
                inputs = self._inputs[index].pop().to(self._device, torch.float32).requires_grad_()
                with torch.enable_grad():
                    block(inputs, self._step).backward(gradient.to(self._device))
                assert inputs.grad is not None
                self._states[index] = inputs.grad.cpu()
        prefix = BLOCK_PREFIX.format(layer)
        return {prefix + name: found for name, found in squares.items()}

    def _block(self, layer: int) -> Block:
        with meta_init():
            block = Block(self._source.config, layer)
        fill(block, self._source, BLOCK_PREFIX.format(layer), self._device, torch.float32, ())
        return block.eval()


def _block_errors(
    source: Checkpoint, block: Block, layer: int, hessians: dict[str, tuple[Tensor, int]], units: Sequence[Unit],
    schemes: Mapping[Unit, Sequence[QuantScheme]], scale_dtype: torch.dtype, group: ProcessGroup,
) -> dict[str, RowErrors]:  # fmt: skip
    """The errors of all linears of a block that are in units."""
    found: dict[str, RowErrors] = {}
    prefix = BLOCK_PREFIX.format(layer)
    unit_of = {module: unit for unit in units for module in unit.modules}
    tried: dict[str, int] = {}  # rows of each linear that are rounded
    for unit in units:
        share = min(1.0, _WEIGHTS_TRIED / unit.weights)
        tried |= {p.module: math.ceil(share * p.shape[0]) for p in unit.parameters}
    of_site: dict[str, list[str]] = defaultdict(list)
    for one in input_groups(source.config, layer):
        of_site[one.site] += [module for module in one.modules if prefix + module in unit_of]
    for site, modules in of_site.items():
        if not modules:
            continue
        weights = {prefix + module: block.get_parameter(f"{module}.weight").data for module in modules}
        for module, weight in weights.items():
            if not all_finite(weight):
                raise NonFiniteError(
                    f"tensor '{module}.weight' holds NaN or Inf", path=source.path,
                    hint=f'it has no codes; repair the source, or `keep="{module}"` leaves it as it is',
                )  # fmt: skip
        columns = next(iter(weights.values())).shape[1]
        total, count = hessians.pop(site, (torch.zeros(columns, columns, device=weight.device), 0))
        rows = torch.tensor([float(count)], device=total.device)
        group.sum_(total)
        group.sum_(rows)
        fill_lower_(total)
        total.div_(rows.clamp_(min=1))
        wanted = list(dict.fromkeys(s for name in weights for s in schemes[unit_of[name]]))
        try:
            found |= row_errors(weights, total, wanted, scale_dtype, tried)
        except SingularError:
            found |= row_errors(weights, torch.eye(columns, device=total.device), wanted, scale_dtype, tried)
        except NonFiniteError as error:
            raise NonFiniteError(f"linear '{next(iter(weights))}': {error.problem}", path=source.path) from error
    return found


def _head_gradients(hidden: Tensor, head: Tensor, config: ModelConfig, first: int) -> Tensor:
    """Gradients by hidden states [B, T, D] of minus the log probability of a token drawn at each of them.

    The head is [V, D]; `first` is the seed of the first sample, so that tokens do not depend on the processes' number.
    """
    found = torch.empty_like(hidden)
    for index, states in enumerate(hidden):
        generator = torch.Generator().manual_seed(first + index)
        for start in range(0, len(states), _TOKENS_THROUGH_THE_HEAD):
            rows = states[start : start + _TOKENS_THROUGH_THE_HEAD]
            products = torch.cat([rows @ part.float().t() for part in _parts(head)], dim=-1)
            logits = final_logits(products, config)
            gradients = logits.softmax(-1)
            drawn = torch.multinomial(gradients, 1, generator=generator)
            gradients.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=gradients.dtype))
            if config.logit_softcap is not None:
                gradients *= 1 - (logits / config.logit_softcap).square()
            if config.logit_multiplier != 1:
                gradients *= config.logit_multiplier
            out, place = found[index, start : start + _TOKENS_THROUGH_THE_HEAD].zero_(), 0
            for part in _parts(head):
                out.addmm_(gradients[:, place : place + len(part)], part.float())
                place += len(part)
    return found


def _parts(head: Tensor) -> Sequence[Tensor]:
    return torch.split(head, max(1, _HEAD_WEIGHTS // head.shape[1]))


@dataclass(frozen=True)
class RowErrors:
    """The errors of one linear, per token: the indices of the rows that were rounded, their squared output errors, [R],
    by scheme, and the energy of all rows, [O], to which errors are assumed to be proportional."""

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


def _rounded(columns: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Tensor:
    """Weights [I, O] rounded to the scales that GPTQ would search."""
    if scheme.scales is not Scales.FLOATS:
        scales = search_blocks(columns, importance, scheme, search_scales)
        rows = columns.t()
        codes = nearest_codes(rows.reshape(len(rows), scheme.groups(len(columns)), -1), scales, scheme)
        return QuantTensor.of_blocks(codes, scales, scheme).dequantize().t().contiguous()
    scale, _ = search_scales(columns, importance, scheme, scale_dtype)
    grouped, step = columns.view(scale.shape[0], -1, columns.shape[1]), scale.float().unsqueeze(1)
    half = scheme.levels // 2  # schemes are symmetric
    return (grouped / step).round_().clamp_(-half, half - 1).mul_(step).view_as(columns)


def row_errors(
    weights: Mapping[str, Tensor], hessian: Tensor, schemes: Sequence[QuantScheme], scale_dtype: torch.dtype,
    tried: Mapping[str, int],
) -> dict[str, RowErrors]:  # fmt: skip
    """The errors of linears that share their inputs.

    Args:
        weights: [O, I] float32, by module.
        hessian: [I, I] mean over tokens; overwritten.
        schemes: with groups that divide the rows.
        tried: how many rows of each are rounded.

    Raises:
        NonFiniteError, SingularError: see `Damped.of_`.
    """
    damped = Damped.of_(hessian)
    variances = torch.empty_like(damped.diagonal)  # of each input, given those that GPTQ rounds after it
    variances[damped.order.flip(0)] = damped.factor.diagonal().square()
    chosen = {}
    for module, weight in weights.items():
        stride = max(1, len(weight) // max(tried[module], _MIN_ROWS))
        chosen[module] = torch.arange(0, len(weight), stride, device=weight.device)
    columns = torch.cat([weights[module][rows] for module, rows in chosen.items()]).t().contiguous()
    counts = [len(rows) for rows in chosen.values()]
    errors: dict[QuantScheme, Sequence[Tensor]] = {}
    for scheme in schemes:
        residual = _rounded(columns, damped.diagonal, scheme, scale_dtype).sub_(columns)
        errors[scheme] = torch.split((variances @ residual.square_()).cpu(), counts)
    found = {}
    for number, (module, weight) in enumerate(weights.items()):
        parts = [weight[start:stop].square() @ variances for start, stop in row_chunks(*weight.shape)]
        own = {scheme: of_scheme[number] for scheme, of_scheme in errors.items()}
        found[module] = RowErrors(chosen[module].cpu(), own, torch.cat(parts).cpu())
    return found
