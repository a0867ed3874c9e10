"""Quantize block after block, each layer against the inputs it will really see.

Two streams run through the model side by side: one through the quantized layers, one
through the float ones. A layer's Hessian is that of the quantized stream; how far the
two have drifted apart goes into its target. Within a block the order is q, k, v; o;
gate, up; down. Two blocks and both streams are in memory, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Block, causal_mask
from quantkit.model.load import BLOCK_PREFIX, load_block
from quantkit.model.rope import Rotary
from quantkit.qtensor import QuantTensor
from quantkit.scheme import QuantScheme
from quantkit.solver.gptq import GptqReport, gptq

_TOKENS_AT_ONCE = 4096

Result = tuple[QuantTensor, GptqReport]


class BlockQuantizer:
    """Gives the quantized weights of one decoder block after the other."""

    def __init__(
        self, source: Checkpoint, tokens: Tensor, schemes: Mapping[str, QuantScheme], scale_dtype: torch.dtype
    ) -> None:
        """Embed the samples.

        Args:
            source: the float model.
            tokens: samples [N, T].
            schemes: by module; modules that are not in it stay floats.
            scale_dtype: dtype the scales are stored in.
        """
        self._source = source
        self._schemes = schemes
        self._scale_dtype = scale_dtype
        embedding = source.load("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        per_batch = max(1, _TOKENS_AT_ONCE // tokens.shape[1])
        self._stream = [nn.functional.embedding(part, embedding).float() for part in torch.split(tokens, per_batch)]
        self._float_stream = list(self._stream)
        self._positions = torch.arange(tokens.shape[1])
        self._angles = Rotary(source.config)(self._positions)
        self._layer = 0

    @torch.inference_mode()
    def next_block(self) -> dict[str, Result]:
        """Quantize the next block; its results by tensor name."""
        layer = self._layer
        block = load_block(self._source, layer, dtype=torch.float32)
        floats = load_block(self._source, layer, dtype=torch.float32)
        mask = causal_mask(self._positions, self._positions, self._source.config.windows[layer])
        results: dict[str, Result] = {}

        def mix(one: Block, x: Tensor) -> Tensor:
            return one.self_attn.mix(one.input_layernorm(x), self._positions, self._angles, mask, None)

        def solve(modules: Sequence[str], site: Callable[[Block, Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            inputs = [site(block, x) for x in self._stream]
            float_inputs = [site(floats, x) for x in self._float_stream]
            results.update(self._solve(block, layer, modules, inputs, float_inputs))
            return inputs, float_inputs

        attention, mlp = block.self_attn, block.mlp
        solve(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), lambda one, x: one.input_layernorm(x))
        self._advance(solve(("self_attn.o_proj",), mix), attention.o_proj, floats.self_attn.o_proj)
        solve(("mlp.gate_proj", "mlp.up_proj"), lambda one, x: one.post_attention_layernorm(x))
        inner = solve(("mlp.down_proj",), lambda one, x: one.mlp.gate(one.post_attention_layernorm(x)))
        self._advance(inner, mlp.down_proj, floats.mlp.down_proj)
        self._layer += 1
        return results

    def _advance(self, inputs: tuple[list[Tensor], list[Tensor]], module: nn.Module, floats: nn.Module) -> None:
        """Add a projection's outputs to both streams."""
        self._stream = [x + module(part) for x, part in zip(self._stream, inputs[0], strict=True)]
        self._float_stream = [x + floats(part) for x, part in zip(self._float_stream, inputs[1], strict=True)]

    def _solve(
        self, block: Block, layer: int, modules: Sequence[str], inputs: Sequence[Tensor], float_inputs: Sequence[Tensor]
    ) -> dict[str, Result]:
        """Quantize the modules that share these inputs, and put them into the block."""
        names = {BLOCK_PREFIX.format(layer) + module: module for module in modules}
        wanted = {name: module for name, module in names.items() if name in self._schemes}
        if not wanted:
            return {}
        width = inputs[0].shape[-1]  # one Hessian per input site
        hessian, drift = torch.zeros(width, width), torch.zeros(width, width)
        for part, float_part in zip(inputs, float_inputs, strict=True):
            x = part.flatten(0, -2)
            hessian.addmm_(x.t(), x)
            drift.addmm_((float_part.flatten(0, -2) - x).t(), x)
        results = {}
        for name, module in wanted.items():
            linear = block.get_submodule(module)
            assert isinstance(linear, nn.Linear)
            try:
                result = gptq(linear.weight, hessian, self._schemes[name], self._scale_dtype, drift=drift)
            except NonFiniteError as error:
                raise NonFiniteError(f"layer '{name}': {error.problem}", path=self._source.path) from error
            linear.weight = nn.Parameter(result[0].dequantize(), requires_grad=False)
            results[name + ".weight"] = result
        return results
