"""Quantize block after block, each layer against the inputs it will really see.

Two streams run through the model side by side: one through the quantized layers, one,
for half of the samples, through the float ones. A layer's Hessian is that of the
quantized stream; how far the two have drifted apart goes into its target. Within a block
the order is q, k, v; o; gate, up; down. Only the layers at work are in memory, in
float32; the streams lie in `States`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.calibration.ranks import Ranks
from quantkit.calibration.states import States
from quantkit.calibration.statistics import InputStatistics
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Block, causal_mask
from quantkit.model.load import BLOCK_PREFIX, fill
from quantkit.model.rope import Rotary
from quantkit.qtensor import QuantTensor, quantize_rtn
from quantkit.scheme import QuantScheme
from quantkit.solver.gptq import GptqReport, SingularError, compensated, gptq

TOKENS_AT_ONCE = 2048
_FLOAT_STRIDE = 4  # the float stream takes every fourth batch

Result = tuple[QuantTensor, dict[str, object]]
"""Codes, and what the manifest says of how they were found."""


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


class BlockQuantizer:
    """Gives the quantized weights of one decoder block after the other."""

    def __init__(
        self, source: Checkpoint, tokens: Tensor, schemes: Mapping[str, QuantScheme], scale_dtype: torch.dtype,
        states: States, device: torch.device,
    ) -> None:  # fmt: skip
        """Embed the samples.

        Args:
            source: the float model.
            tokens: samples [N, T]; each of several processes takes its share.
            schemes: by module; modules that are not in it stay floats.
            scale_dtype: dtype the scales are stored in.
            states: holds the activations.
            device: where everything is computed.
        """
        self._source = source
        self._schemes = schemes
        self._scale_dtype = scale_dtype
        self._states = states
        self._device = device
        self._ranks = Ranks()
        embedding = source.load("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        own = tokens[self._ranks.share(len(tokens))]
        parts = torch.split(own, max(1, TOKENS_AT_ONCE // tokens.shape[1])) if len(own) else ()
        self._batches = len(parts)
        for index, part in enumerate(parts):
            for stream in ("seen", "float")[: 1 + (index % _FLOAT_STRIDE == 0)]:
                states.put((stream, index), nn.functional.embedding(part, embedding).float())
        self._positions = torch.arange(tokens.shape[1], device=device)
        self._angles = Rotary(source.config).to(device)(self._positions)
        self._layer = 0
        self._pending: nn.Module | None = None

    @torch.inference_mode()
    def next_block(self, finished: Callable[[str], QuantTensor] | None = None) -> dict[str, Result]:
        """Quantize the next block; the results by tensor name.

        Args:
            finished: gives the block's weights by tensor name if an earlier run has
                already found them; they are then passed through.
        """
        config = self._source.config
        with torch.device("meta"):
            floats, seen = Block(config, self._layer), Block(config, self._layer)
        results: dict[str, Result] = {}
        for site in self._sites():
            self._load(site, floats, seen)
            wanted = self._wanted(site)
            statistics = self._run(site, floats, seen, gather=bool(wanted) and finished is None)
            if finished is not None:
                solved: dict[str, Result] = {name: (finished(name + ".weight"), {}) for name in wanted}
            else:
                solved = {} if statistics is None else self._solve(wanted, floats, statistics)
            for name, (quantized, _) in solved.items():
                weight = quantized.to(self._device).dequantize()
                seen.get_submodule(wanted[name]).weight = nn.Parameter(weight, requires_grad=False)
                results[name + ".weight"] = quantized, solved[name][1]
            if site.writes:
                self._pending = seen.get_submodule(site.modules[0])
                for block in (floats, seen):  # its part of the block is done with
                    delattr(block, site.modules[0].partition(".")[0])
        self._layer += 1
        return results

    def _sites(self) -> tuple[Site, ...]:
        config = self._source.config
        mask = causal_mask(self._positions, self._positions, config.windows[self._layer])

        def mixed(block: Block, x: Tensor) -> Tensor:
            return block.self_attn.mix(block.input_layernorm(x), self._positions, self._angles, mask, None)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        head_norms = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()
        return (
            Site(qkv, ("input_layernorm",), lambda block, x: block.input_layernorm(x), False),
            Site(("self_attn.o_proj",), head_norms, mixed, True),
            Site(("mlp.gate_proj", "mlp.up_proj"), ("post_attention_layernorm",),
                 lambda block, x: block.post_attention_layernorm(x), False),
            Site(("mlp.down_proj",), (), lambda block, x: block.mlp.gate(block.post_attention_layernorm(x)), True),
        )  # fmt: skip

    def _load(self, site: Site, floats: Block, seen: Block) -> None:
        """Fill a site's modules with the float weights, in both blocks."""
        for name in (*site.norms, *site.modules):
            prefix = f"{BLOCK_PREFIX.format(self._layer)}{name}."
            for block in (floats, seen):
                fill(block.get_submodule(name), self._source, prefix, self._device, torch.float32, None)

    def _wanted(self, site: Site) -> dict[str, str]:
        """The modules to quantize: full name to name within the block."""
        names = {BLOCK_PREFIX.format(self._layer) + module: module for module in site.modules}
        return {name: module for name, module in names.items() if name in self._schemes}

    def _run(self, site: Site, floats: Block, seen: Block, *, gather: bool) -> InputStatistics | None:
        """Take both streams through a site; what its inputs were like, if asked for."""
        module = site.modules[0]
        width = floats.get_submodule(module).in_features
        assert isinstance(width, int)
        statistics = InputStatistics(width, self._device) if gather else None
        for index in range(self._batches):
            x = self._take("seen", index)
            if self._pending is not None:
                x += self._pending(self._take("inputs", index))
            inputs = site.inputs(seen, x)
            if statistics is not None:
                statistics.add(inputs)
            if index % _FLOAT_STRIDE == 0:
                y = self._take("float", index)
                reference = site.inputs(floats, y)
                if statistics is not None:
                    statistics.add_drift(inputs, reference)
                if site.writes:
                    y += floats.get_submodule(module)(reference)
                self._put("float", index, y)
            if site.writes:
                self._put("inputs", index, inputs)
            self._put("seen", index, x)
        self._pending = None
        if statistics is not None:
            statistics.finish(self._ranks)
        return statistics

    def _solve(self, wanted: Mapping[str, str], floats: Block, statistics: InputStatistics) -> dict[str, Result]:
        """Quantize the modules of a site, those of one scheme together."""
        by_scheme: dict[QuantScheme, list[str]] = defaultdict(list)
        for name in wanted:
            by_scheme[self._schemes[name]].append(name)
        results: dict[str, Result] = {}
        for scheme, names in by_scheme.items():
            weights = [_weight(floats, wanted[name]) for name in names]
            try:
                solved = self._solve_rows(weights[0] if len(weights) == 1 else torch.cat(weights), statistics, scheme)
            except NonFiniteError as error:
                raise NonFiniteError(f"layer '{names[0]}': {error.problem}", path=self._source.path) from error
            except SingularError as error:
                for name, weight in zip(names, weights, strict=True):
                    rounded = quantize_rtn(weight, scheme, self._scale_dtype)
                    results[name] = rounded.to("cpu"), {"solver": "round-to-nearest", "fallback": str(error)}
                continue
            start = 0
            for name, weight in zip(names, weights, strict=True):
                stop = start + weight.shape[0]
                results[name] = solved[0].rows(start, stop), _record(solved[1].rows(start, stop))
                start = stop
        return results

    def _solve_rows(
        self, weight: Tensor, statistics: InputStatistics, scheme: QuantScheme
    ) -> tuple[QuantTensor, GptqReport]:
        """GPTQ on this process's share of the rows, joined with the others'."""
        total = weight.shape[0]
        part = weight[self._ranks.share(total)]
        target = compensated(part, statistics.hessian, statistics.drift)
        quantized, report = gptq(part, statistics.hessian, scheme, self._scale_dtype, target=target)
        codes, error, energy = (
            self._ranks.join(rows, total) for rows in (quantized.codes, report.error, report.energy)
        )
        scale = self._ranks.join(quantized.scale.float(), total).to(self._scale_dtype)
        zero = None if quantized.zero is None else self._ranks.join(quantized.zero, total)
        return (
            QuantTensor(codes, scale, zero, scheme).to("cpu"),
            GptqReport(report.damping, report.dead_columns, error.cpu(), energy.cpu()),
        )

    def _take(self, stream: str, index: int) -> Tensor:
        return self._states.take((stream, index)).to(self._device)

    def _put(self, stream: str, index: int, value: Tensor) -> None:
        self._states.put((stream, index), value.cpu())


def _weight(block: Block, module: str) -> Tensor:
    linear = block.get_submodule(module)
    assert isinstance(linear, nn.Linear)
    return linear.weight


def _record(report: GptqReport) -> dict[str, object]:
    return {
        "solver": "gptq",
        "output_error": float(f"{report.output_error:.4g}"),
        "damping": report.damping,
        "dead_columns": report.dead_columns,
    }
