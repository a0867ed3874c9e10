"""llama.cpp's mixes of types, such as Q4_K_M: which tensors get other types than most.

Source: llama.cpp's `llama_tensor_get_type_impl`, where it has an importance matrix if the mix is
IQ4_NL or IQ4_XS: GPTQ measures the same inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import recurrent_linears
from quantkit.formats.gguf.names import gguf_architecture, gguf_tensors
from quantkit.tensors.mix import Mix
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import Q3_K, Q4_K, Q5_K, Q6_K, Q8_0, QuantScheme

# Architectures whose models of 80 layers share keys and values among many queries, so that attn_v
# is small: llama.cpp spends more bits there.
_FEW_KV_HEADS = {"llama", "qwen2", "deci"}
_LARGE_LAYERS = 80
# Queries of a head of keys and values from which llama.cpp spends more bits on the values.
_MANY_QUERIES = 4
_TABLES = ("iq4_nl", "iq4_xs")
_VALUES = ("attn_v", "attn_qkv")
# Weights per block of GGUF's types; rows that it does not divide keep their floats.
_BLOCK = 32
# The head keeps its floats unless a recipe names it.
_HEAD = "output.weight"
# The number of experts of Mixtral 8x7B, for which llama.cpp has rules.
_EXPERTS = 8
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class MixRules:
    """Which tensors of a model get which types by a mix."""

    mix: Mix
    config: ModelConfig

    def recipe(self) -> Recipe:
        """Build the recipe with the schemes of a model's tensors.

        Raises `UnsupportedError` for an architecture that GGUF does not have.
        """
        overrides: dict[str, QuantScheme | None] = {EMBEDDING: self.mix.default}
        # These keep their floats unless a recipe names them, which only users do.
        recurrent = recurrent_linears(self.config)
        for tensor, chosen in self._schemes():
            if tensor.shape[-1] % _BLOCK:
                scheme = None
            else:
                scheme = chosen
            if scheme != self.mix.default or tensor.name == _HEAD:
                for module in _modules(tensor):
                    if module in recurrent:
                        continue
                    # GGUF stacks all experts of a layer in one tensor, which has one type.
                    overrides[_EXPERT.sub(".experts.*.", module)] = scheme
        # The embedding keeps its floats anyway if no recipe names it.
        if overrides[EMBEDDING] is None:
            del overrides[EMBEDDING]
        override_list = []
        for pattern, scheme in overrides.items():
            override_list.append(Override(pattern, scheme))
        return Recipe(self.mix.default, tuple(override_list))

    def _schemes(self) -> Iterator[tuple[DiskTensor, QuantScheme]]:
        """Yield the scheme of each tensor that gets one, in the order of the file."""
        tensors = [tensor for tensor in gguf_tensors(self.config) if _modules(tensor)]
        values = [tensor for tensor in tensors if _role(tensor) in _VALUES]
        architecture = gguf_architecture(self.config).name
        for tensor in tensors:
            role = _role(tensor)
            layer = _layer(tensor)
            is_head = role == "output" or (role == "token_embd" and self.config.tied_embeddings)
            if is_head:
                # The head gets at least Q6_K.
                yield tensor, Q8_0 if self.mix.default == Q8_0 else Q6_K
            elif role in _VALUES:
                yield tensor, self._of_values(values.index(tensor), len(values), architecture)
            elif role == "attn_k" and self._experts == _EXPERTS:
                yield tensor, Q8_0
            elif role == "ffn_down":
                yield tensor, self._of_down(layer, self.config.num_layers)
            elif role == "attn_output":
                yield tensor, self._of_attention_output()
            else:
                yield tensor, self.mix.default

    @property
    def _experts(self) -> int:
        if self.config.experts is None:
            return 0
        return self.config.experts.count

    def _of_values(self, index: int, count: int, architecture: str) -> QuantScheme:
        # `index` counts tensors of values, as llama.cpp's `i_attention_wv` does, not layers.
        scheme = self.mix.default
        shares_values = self.config.num_heads >= _MANY_QUERIES * self.config.num_kv_heads
        if self.mix.name == "q2_k":
            scheme = Q4_K if shares_values else Q3_K
        elif self.mix.name in _TABLES and shares_values:
            scheme = Q5_K
        elif self.mix.name == "q3_k_m":
            scheme = Q5_K if index < 2 else Q4_K
        elif self.mix.name == "q3_k_l":
            scheme = Q5_K
        elif self.mix.name in ("q4_k_m", "q5_k_m") and _needs_more_bits(index, count):
            scheme = Q6_K
        elif self.mix.name == "q4_k_s" and index < 4:
            scheme = Q5_K
        few = self.config.num_heads != self.config.num_kv_heads and architecture in _FEW_KV_HEADS
        if few and self.config.num_layers == _LARGE_LAYERS and scheme in (Q3_K, Q4_K):
            scheme = Q5_K
        if self._experts == _EXPERTS:
            return Q8_0
        return scheme

    def _of_down(self, layer: int, layers: int) -> QuantScheme:
        if self.mix.name == "q2_k":
            return Q3_K
        if self.mix.name == "q3_k_m":
            if layer < layers // 16:
                return Q5_K
            return Q4_K
        if self.mix.name == "q3_k_l" or (self.mix.name == "q4_k_s" and layer < layers // 8):
            return Q5_K
        if self.mix.name in ("q4_k_m", "q5_k_m") and _needs_more_bits(layer, layers):
            return Q6_K
        return self.mix.default

    def _of_attention_output(self) -> QuantScheme:
        if self._experts == _EXPERTS:
            if self.mix.name in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", *_TABLES):
                return Q5_K
            return self.mix.default
        of_mixes = {"q2_k": Q3_K, "q3_k_m": Q4_K, "q3_k_l": Q5_K}
        return of_mixes.get(self.mix.name, self.mix.default)


def _needs_more_bits(layer: int, layers: int) -> bool:
    """Tell whether a layer is in the first or last eighth, or one of every three between them."""
    # llama.cpp's `use_more_bits`, in the same integer arithmetic.
    at_an_end = layer < layers // 8 or layer >= 7 * layers // 8
    return at_an_end or (layer - layers // 8) % 3 == 2


def _modules(tensor: DiskTensor) -> list[str]:
    """List the modules of a tensor's parts, if they may be quantized."""
    able = tensor.quantizable or tensor.stacked is not None or _role(tensor) == "token_embd"
    if not able:
        return []
    modules: list[str] = []
    for part in tensor.parts:
        if part.endswith(".weight"):
            modules.append(part.removesuffix(".weight"))
    return modules


def _role(tensor: DiskTensor) -> str:
    """Extract the role from a name: ``attn_v`` of ``blk.3.attn_v.weight``. All kinds of
    ``ffn_down`` are one role.
    """
    role = tensor.name.removesuffix(".weight").rpartition(".")[2]
    if role.startswith("ffn_down"):
        return "ffn_down"
    return role


def _layer(tensor: DiskTensor) -> int:
    if tensor.name.startswith("blk."):
        return int(tensor.name.split(".")[1])
    return 0
