"""Quantize block after block, each layer against the inputs it will really see.

Two streams run through the model side by side: one through the quantized layers, one,
for some of the samples, through the float ones. A layer's Hessian is that of the
quantized stream; how far the two have drifted apart goes into its target. Within a block
the order is q, k, v; o; gate, up; down. Only the layers at work are in memory, in
float32; the streams lie in `ActivationStore`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.memory import give_back
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import Block, Step
from quantkit.model.load import BLOCK_PREFIX, fill, meta_init
from quantkit.model.rope import Rotary
from quantkit.solver.gptq import Damped, GptqReport, SingularError, compensated, solve
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn, row_chunks
from quantkit.tensors.scheme import QuantScheme

_TOKENS_AT_ONCE = 2048
_BATCH_VALUES = 1 << 22  # of the feed-forward's inner states
_LEAST_BATCHES = 4

Result = tuple[QuantTensor, dict[str, object]]
"""Codes, and what the manifest says of how they were found."""


@dataclass(frozen=True)
class Effort:
    """How much is done about the drift between the streams.

    Attributes:
        stride: the float stream takes every so many batches, though never fewer than four.
        damping: least damping of the Hessian that tells drift from noise.
    """

    stride: int
    damping: float

    def follows(self, index: int, batches: int) -> bool:
        """Whether the float stream takes a batch."""
        return index % max(1, min(self.stride, batches // _LEAST_BATCHES)) == 0


STANDARD = Effort(4, 0.1)
THOROUGH = Effort(1, 0.01)


def effort_of(thorough: bool) -> Effort:
    """The effort a user asks for."""
    return THOROUGH if thorough else STANDARD


@dataclass(frozen=True)
class Site:
    """Linears that share their inputs.

    Attributes:
        modules: their names within a block.
        norms: the norms that the inputs need and no site before has needed.
        inputs: the inputs, given a block and its hidden states [B, T, D].
        writes: whether the outputs are added to the hidden states; then there is one module.
    """

    modules: tuple[str, ...]
    norms: tuple[str, ...]
    inputs: Callable[[Block, Tensor], Tensor]
    writes: bool


def batch_samples(config: ModelConfig, length: int) -> int:
    """How many samples of a length go through the model together."""
    return max(1, min(_TOKENS_AT_ONCE, _BATCH_VALUES // config.intermediate_size) // length)


def followed_share(config: ModelConfig, shape: Sequence[int], effort: Effort) -> float:
    """The share of the batches of samples of a shape [N, T] that the float stream takes."""
    samples, length = shape
    batches = -(-samples // batch_samples(config, length))
    return sum(effort.follows(index, batches) for index in range(batches)) / batches


def activation_bytes(config: ModelConfig, shape: Sequence[int], effort: Effort, memory_bytes: int) -> tuple[int, int]:
    """What the streams, and the widest inputs between two passes, take up for samples of a shape [N, T].

    It is that of one process with all samples. Several share them and have the memory each, so they put less
    on the disk, unless their shares are so few batches that they follow more of them.

    Returns:
        Bytes in memory, where there is room for so many, and bytes on disk.
    """
    samples, length = shape
    width = max(config.intermediate_size, config.num_heads * config.head_dim)
    total = int(4 * samples * length * ((1 + followed_share(config, shape, effort)) * config.hidden_size + width))
    held = min(total, memory_bytes)
    return held, total - held


class BlockQuantizer:
    """Gives the quantized weights of one decoder block after the other."""

    def __init__(
        self, source: Checkpoint, tokens: Tensor, schemes: Mapping[str, QuantScheme], scale_dtype: torch.dtype,
        states: ActivationStore, device: torch.device, effort: Effort, group: ProcessGroup,
    ) -> None:  # fmt: skip
        """Embed the samples.

        Args:
            source: the float model.
            tokens: samples [N, T]; each of several processes takes its share.
            schemes: by module; modules that are not in it stay floats.
            scale_dtype: dtype the scales are stored in.
            states: holds the activations.
            device: where everything is computed.
            effort: how much to do about drift.
            group: this process among those that share the work.
        """
        self._effort = effort
        self._source = source
        self._schemes = schemes
        self._scale_dtype = scale_dtype
        self._states = states
        self._device = device
        self._group = group
        embedding = source.load("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        own = tokens[self._group.share(len(tokens))]
        parts = torch.split(own, batch_samples(source.config, tokens.shape[1])) if len(own) else ()
        self._batches = len(parts)
        for index, part in enumerate(parts):
            for stream in ("seen", "float")[: 1 + effort.follows(index, len(parts))]:
                states.put((stream, index), nn.functional.embedding(part, embedding).float())
        self._positions = torch.arange(tokens.shape[1], device=device)
        angles = Rotary(source.config).to(device)(self._positions)
        self._step = Step(angles, causal_attention(self._positions, source.config.windows))
        self._layer = 0
        self._pending: nn.Module | None = None

    @torch.inference_mode()
    def next_block(self, finished: Callable[[str], Tensor | QuantTensor] | None = None) -> dict[str, Result]:
        """Quantize the next block; the results by tensor name.

        Args:
            finished: gives the block's weights by tensor name if an earlier run has
                already found them; they are then passed through.
        """
        config = self._source.config
        with meta_init():
            floats, seen = Block(config, self._layer), Block(config, self._layer)
        results: dict[str, Result] = {}
        for site in self._sites():
            self._load(site, floats, seen)
            wanted = self._wanted(site)
            statistics = self._run(site, floats, seen, gather=bool(wanted) and finished is None)
            if site.writes:
                self._pass_on(site.modules[0], floats, seen)
            give_back()
            if finished is not None:
                solved: dict[str, Result] = {name: (_quantized(finished(name + ".weight")), {}) for name in wanted}
            else:
                solved = {} if statistics is None else self._solve(site, wanted, floats, statistics)
            del statistics
            give_back()
            for module in site.modules:  # what stays float
                _set(seen, module, floats.get_submodule(module))
            for name, (quantized, _) in solved.items():
                linear = nn.Linear(1, 1, device="meta")
                linear.weight = nn.Parameter(quantized.to(self._device).dequantize(), requires_grad=False)
                linear.bias = floats.get_submodule(wanted[name]).bias  # type: ignore[assignment]
                _set(seen, wanted[name], linear)
                results[name + ".weight"] = solved[name]
            if site.writes:
                self._pending = seen.get_submodule(site.modules[0])
                _forget(site.modules[0], floats, seen)
        self._layer += 1
        return results

    def _sites(self) -> tuple[Site, ...]:
        config = self._source.config

        def mixed(block: Block, x: Tensor) -> Tensor:
            return block.inner("attention", x, self._step)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        head_norms = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()
        return (
            Site(qkv, ("input_layernorm",), lambda block, x: block.input_layernorm(x), False),
            Site(("self_attn.o_proj",), head_norms, mixed, True),
            Site(("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm",),
                 lambda block, x: block.post_attention_layernorm(x), False),
            Site(("mlp.down_proj",), (), lambda block, x: block.inner("mlp", x, self._step), True),
        )  # fmt: skip

    def _pass_on(self, module: str, floats: Block, seen: Block) -> None:
        """Forget the part of the block that leads up to a module; what is left is to solve that one."""
        linear = floats.get_submodule(module)
        _forget(module, floats, seen)
        _set(floats, module, linear)

    def _load(self, site: Site, floats: Block, seen: Block) -> None:
        """Fill a site's modules with the float weights; the norms serve both blocks."""
        for name in (*site.norms, *site.modules):
            prefix = f"{BLOCK_PREFIX.format(self._layer)}{name}."
            fill(floats.get_submodule(name), self._source, prefix, self._device, torch.float32, None)
        for name in site.norms:
            _set(seen, name, floats.get_submodule(name))

    def _wanted(self, site: Site) -> dict[str, str]:
        """The modules to quantize: full name to name within the block."""
        names = {BLOCK_PREFIX.format(self._layer) + module: module for module in site.modules}
        return {name: module for name, module in names.items() if name in self._schemes}

    def _run(self, site: Site, floats: Block, seen: Block, *, gather: bool) -> HessianAccumulator | None:
        """Take both streams through a site; what its inputs were like, if asked for."""
        first = floats.get_submodule(site.modules[0])
        assert isinstance(first, nn.Linear)
        statistics = None
        if gather:
            drift_width = first.out_features if site.writes else first.in_features
            statistics = HessianAccumulator(first.in_features, drift_width, self._device)
        for index in range(self._batches):
            x = self._take("seen", index)
            if self._pending is not None:
                x += self._pending(self._take("inputs", index))
            inputs = site.inputs(seen, x)
            if self._effort.follows(index, self._batches):
                y = self._take("float", index)
                reference = site.inputs(floats, y)
                if site.writes:
                    outputs = first(reference)
                    y += outputs
                if statistics is not None:
                    statistics.add_pair(inputs, outputs - first(inputs) if site.writes else reference - inputs)
                self._put("float", index, y)
            elif statistics is not None:
                statistics.add(inputs)
            if site.writes:
                self._put("inputs", index, inputs)
            self._put("seen", index, x)
        self._pending = None
        if statistics is not None:
            statistics.finish(self._group)
        return statistics

    def _solve(
        self, site: Site, wanted: Mapping[str, str], floats: Block, statistics: HessianAccumulator
    ) -> dict[str, Result]:
        """Quantize the modules of a site, those of one scheme together."""
        by_scheme: dict[QuantScheme, list[str]] = defaultdict(list)
        for name in wanted:
            by_scheme[self._schemes[name]].append(name)
        weights = {scheme: _stacked(floats, [wanted[name] for name in names]) for scheme, names in by_scheme.items()}
        try:
            solved = self._solve_stacked(weights, statistics, outputs=site.writes)
        except NonFiniteError as error:
            raise NonFiniteError(f"layer '{next(iter(wanted))}': {error.problem}", path=self._source.path) from error
        except SingularError as error:
            return {name: self._rounded(name, _weight(floats, wanted[name]), str(error)) for name in wanted}
        results: dict[str, Result] = {}
        for scheme, names in by_scheme.items():
            start = 0
            for name in names:
                rows = start, start + len(_weight(floats, wanted[name]))
                quantized, report = solved[scheme]
                results[name] = quantized.rows(*rows), _record(report.rows(*rows))
                start = rows[1]
        return results

    def _solve_stacked(
        self, weights: Mapping[QuantScheme, Tensor], statistics: HessianAccumulator, *, outputs: bool
    ) -> dict[QuantScheme, tuple[QuantTensor, GptqReport]]:
        """GPTQ on all rows [O, I] of each scheme; of several processes each solves its share of them.

        Args:
            outputs: whether the drift is that of the outputs.
        """
        parts = {scheme: (rows[self._group.share(len(rows))], len(rows)) for scheme, rows in weights.items()}
        hessian, paired, drift = statistics.release()
        diagonal = paired.diagonal().clone()
        factor = torch.linalg.cholesky(Damped.of_(paired, self._effort.damping).matrix)
        if hessian is None:
            hessian = paired
            hessian.diagonal().copy_(diagonal)
        del paired
        targets = {}
        for scheme, (part, total) in parts.items():
            targets[scheme] = torch.empty_like(part)
            own_drift = drift[self._group.share(total)] if outputs else drift
            for start, stop in row_chunks(*part.shape):
                pull = own_drift[start:stop] if outputs else part[start:stop] @ own_drift
                targets[scheme][start:stop] = compensated(part[start:stop], factor, pull)
        del factor, drift
        damped = Damped.of_(hessian)
        found = {}
        for scheme, (part, total) in parts.items():
            solved = solve(part, damped, scheme, self._scale_dtype, target=targets.pop(scheme))
            found[scheme] = self._joined(*solved, total)
        return found

    def _joined(self, quantized: QuantTensor, report: GptqReport, total: int) -> tuple[QuantTensor, GptqReport]:
        """The rows of all processes, on the CPU."""
        codes, error, energy = (
            self._group.join(rows, total) for rows in (quantized.codes, report.error, report.energy)
        )
        scale = self._group.join(quantized.scale.float(), total).to(self._scale_dtype)
        zero = None if quantized.zero is None else self._group.join(quantized.zero, total)
        return (
            QuantTensor(codes, scale, zero, quantized.scheme).to("cpu"),
            GptqReport(report.damping, report.dead_columns, error.cpu(), energy.cpu()),
        )

    def _rounded(self, name: str, weight: Tensor, reason: str) -> Result:
        """What a layer falls back to."""
        quantized = quantize_rtn(weight, self._schemes[name], self._scale_dtype).to("cpu")
        return quantized, {"solver": ROUNDING, "fallback": reason}

    def _take(self, stream: str, index: int) -> Tensor:
        return self._states.take((stream, index)).to(self._device)

    def _put(self, stream: str, index: int, value: Tensor) -> None:
        self._states.put((stream, index), value.cpu())


def _quantized(value: Tensor | QuantTensor) -> QuantTensor:
    assert isinstance(value, QuantTensor)
    return value


def _weight(block: Block, module: str) -> Tensor:
    linear = block.get_submodule(module)
    assert isinstance(linear, nn.Linear)
    return linear.weight


def _stacked(block: Block, modules: Sequence[str]) -> Tensor:
    """The rows of some linears, one below the other; the linears' own weights become views of them."""
    if len(modules) == 1:
        return _weight(block, modules[0])
    rows = torch.cat([_weight(block, module) for module in modules])
    start = 0
    for module in modules:
        linear = block.get_submodule(module)
        stop = start + len(_weight(block, module))
        linear.weight = nn.Parameter(rows[start:stop], requires_grad=False)
        start = stop
    return rows


def _forget(module: str, *blocks: Block) -> None:
    """Let go of the part of each block that a module is in."""
    for block in blocks:
        setattr(block, module.partition(".")[0], nn.Module())


def _set(block: Block, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(block.get_submodule(parent), child, module)


def _record(report: GptqReport) -> dict[str, object]:
    return {
        "solver": "gptq",
        "output_error": float(f"{report.output_error:.4g}"),
        "damping": report.damping,
        "dead_columns": report.dead_columns,
    }
