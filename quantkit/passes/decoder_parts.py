"""Quantkit's own decoder as a model that samples pass through part by part.

A decoder block is a part with its norms and its router. The linears of each branch are a part of
their own, and so is each expert, so that a block's weights need not be in memory all at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import InputGroup, input_groups
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.formats.kv_scales import attention_name
from quantkit.model.decoder import Backbone, Block, scale_embeddings
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.head_product import compute_head_logits
from quantkit.model.load import BLOCK_PREFIX, float_parameter, meta_init, narrow_to_floats
from quantkit.model.mixers.attention import Attention
from quantkit.model.mixers.mixer import Step
from quantkit.model.samples import make_sample_step
from quantkit.passes.cache_recorder import CacheRecorder
from quantkit.passes.passage import Inputs
from quantkit.passes.routing import list_expert_rows
from quantkit.passes.site import WEIGHT, Brought, Site, Visitor

_LAYER_INPUTS = "model.layer_inputs"
_SHARED_EXPERTS = "mlp.shared_experts."


class DecoderParts:
    """Quantkit's decoder without its head, for samples of one length; see `PartwiseModel`.

    Attributes:
        model: the decoder, whose parameters are on the meta device between `unload` and `load`.
        loaded: the parts whose weights are in memory.
        device: where the decoder computes.
        is_repeatable: its blocks do the same when they are called again.
    """

    is_repeatable = True

    def __init__(self, source: Checkpoint, length: int, device: torch.device) -> None:
        """
        Args:
            source: whose floats are loaded; known to quantkit's decoder.
            length: the tokens of each sample.
            device: where the decoder computes.
        """
        self._source = source
        self.device = device
        config = source.config
        with meta_init():
            backbone = self._make_backbone(config)
        self.model = _SampleDecoder(backbone, config, length, device)
        self.loaded: set[str] = set()
        # The part of each module that is not simply in its block's part.
        self._part_of_module: dict[str, str] = {}
        self._blocks: list[str] = []
        for layer, block in enumerate(backbone.layers):
            self._blocks.append(BLOCK_PREFIX.format(layer).removesuffix("."))
            assert isinstance(block, Block)
            # An attribute of the instance hides the method of its class.
            vars(block)["forward"] = partial(_run_block, block)
            self._divide_block(layer, block)
        self._parameters: dict[str, list[str]] = defaultdict(list)
        self._meta_parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            part = self.part_of(name.rpartition(".")[0])
            assert part is not None
            self._parameters[part].append(name)
            self._meta_parameters[name] = parameter

    def _make_backbone(self, config: ModelConfig) -> Backbone:
        """Make the decoder without its head, on the meta device."""
        return Backbone(config)

    def _divide_block(self, layer: int, block: Block) -> None:
        """Make the linears of a block parts of their own, and let its experts be visited."""
        prefix = BLOCK_PREFIX.format(layer)
        # By what names the parts of the block.
        first_modules: dict[str, str] = {}
        for group in input_groups(self._source.config, layer):
            first = first_modules.setdefault(_find_parent(group), prefix + group.modules[0])
            for module in group.modules:
                self._part_of_module[prefix + module] = first
        if isinstance(block.mlp, Experts):
            visited = _VisitedExperts(block.mlp)
            block.mlp.bank = visited  # type: ignore[assignment]
            if block.mlp.shared_experts is not None:
                vars(block.mlp.shared_experts)["forward"] = visited.run_shared

    @property
    def parts(self) -> list[str]:
        """List the names of all parts."""
        return list(self._parameters)

    @property
    def first_parts(self) -> list[str]:
        """Find the parts that tokens enter first."""
        return [EMBEDDING]

    @property
    def resident_parts(self) -> set[str]:
        """Find the parts that stay loaded for a complete pass: none."""
        return set()

    @property
    def body(self) -> nn.Module:
        """Find the model without its head."""
        return self.model

    def part_of(self, module: str) -> str | None:
        """Find the part that a module is, or is in; None for a module that contains parts."""
        part = self._part_of_module.get(module)
        if part is not None:
            return part
        # The names of a block's modules begin with ``model.layers.N``.
        block = ".".join(module.split(".")[:3])
        if block.startswith("model.layers.") or block in (EMBEDDING, "model.norm"):
            return block
        if block == _LAYER_INPUTS or block.startswith(f"{_LAYER_INPUTS}."):
            return _LAYER_INPUTS
        return None

    def is_listed(self, part: str) -> bool:
        """Check that a part is a decoder block."""
        return part in self._blocks

    def same_as(self, name: str) -> list[str]:
        """List the names of all parameters that are tied to a parameter: only its own."""
        return [name]

    def load(self, part: str) -> None:
        """Load the weights of a part, in float32; those of embeddings in the source's type."""
        self.loaded.add(part)
        for name in self._parameters[part]:
            if name in (f"{EMBEDDING}.weight", f"{_LAYER_INPUTS}.embedding.weight"):
                rows = narrow_to_floats(self._source.load(name)).to(self.device)
                parameter = nn.Parameter(rows, requires_grad=False)
            else:
                parameter = float_parameter(self._source, name, self.device, torch.float32)
            self._set(name, parameter)

    def unload(self, part: str) -> None:
        """Free the weights of a part."""
        self.loaded.discard(part)
        for name in self._parameters[part]:
            self._set(name, self._meta_parameters[name])

    def set_visitor(self, visitor: Visitor | None) -> None:
        """Set what sees the inputs of all of the model's experts."""
        for block in self.model.model.layers:
            assert isinstance(block, Block)
            if isinstance(block.mlp, Experts) and isinstance(block.mlp.bank, _VisitedExperts):
                block.mlp.bank.visitor = visitor

    @contextmanager
    def recording_cache(self, recorder: CacheRecorder) -> Iterator[None]:
        """Record the keys and values of all layers with attention within the context."""
        attention: list[Attention] = []
        for block in self.model.model.layers:
            assert isinstance(block, Block)
            # Another layer's keys and values are recorded there.
            if isinstance(block.mixer, Attention) and block.mixer.source is None:
                attention.append(block.mixer)
        for mixer in attention:
            mixer.as_cached = _Recording(recorder, attention_name(mixer.layer))
        try:
            yield
        finally:
            for mixer in attention:
                mixer.as_cached = None

    @contextmanager
    def open_head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Open the head: yield a function that computes the logits [N, V] of hidden states [N, D]
        after the final norm.
        """
        stored_name = resolve_stored_name(self._source, "lm_head.weight")
        head = narrow_to_floats(self._source.load(stored_name)).to(self.device)
        yield lambda states: compute_head_logits(states, head, self._source.config)

    def silence(self) -> AbstractContextManager[None]:
        """Do nothing: the decoder logs nothing."""
        return nullcontext()

    def list_groups(self) -> list[Inputs]:
        """List the linears that may be quantized, by shared input, in the order in which samples
        reach them.
        """
        groups: list[Inputs] = []
        for layer in range(self._source.config.num_layers):
            prefix = BLOCK_PREFIX.format(layer)
            for group in input_groups(self._source.config, layer):
                sites: list[Site] = []
                for module in group.modules:
                    sites.append(self._find_site(prefix, module, group.expert))
                groups.append(Inputs(tuple(sites)))
        return groups

    def _find_site(self, prefix: str, module: str, expert: int | None) -> Site:
        name = prefix + module
        rows = ((name, 0, self._meta_parameters[f"{name}.{WEIGHT}"].shape[0]),)
        if expert is None and not module.startswith(_SHARED_EXPERTS):
            return Site(name, WEIGHT, None, rows)
        leaf = f"{module.removeprefix('mlp.')}.{WEIGHT}"
        return Site(module=f"{prefix}mlp", leaf=leaf, expert=expert, rows=rows, stacked=False)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(owner), leaf, parameter)


def _find_parent(group: InputGroup) -> str:
    """Find the module of a block that linears with the same input are in."""
    return group.modules[0].rpartition(".")[0]


class _SampleDecoder(nn.Module):
    """Embedding, blocks and final norm, for samples of one length."""

    def __init__(
        self, backbone: Backbone, config: ModelConfig, length: int, device: torch.device
    ) -> None:
        super().__init__()
        # The name makes those of parameters the canonical ones.
        self.model = backbone
        self._multiplier = config.embedding_multiplier
        # All samples share the step, which is made before any of them runs.
        self._step = make_sample_step(config, length, device)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        """Compute hidden states [B, T, D] after the final norm, in float32, for tokens [B, T]."""
        # A list, which each block empties: the frames of a call keep its arguments in memory.
        states = [scale_embeddings(self.model.embed_tokens(input_ids).float(), self._multiplier)]
        layer_inputs: list[Tensor] = []
        if self.model.layer_inputs is not None:
            layer_inputs = self.model.layer_inputs(input_ids, states[0])
        # Arguments of their own, so that gradients pass through them.
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for block in self.model.layers:
            states.append(block(states, self._step, layer_inputs, shared))
        return (self.model.norm(states.pop()),)


def _run_block(
    block: Block,
    states: list[Tensor],
    step: Step,
    layer_inputs: list[Tensor],
    shared: dict[int, tuple[Tensor, Tensor]],
) -> Tensor:
    """Run a block on the hidden states [B, T, D] that it takes from a list; for the other arguments
    see `Step`.
    """
    step = replace(step, layer_inputs=layer_inputs, shared=shared)
    x = states.pop()
    mixed = x
    if "mixer" in block.branches:
        mixed = block.finish("mixer", x, block.inner("mixer", x, step))
    # Frees the block's input, unless the feed-forward needs it.
    x = block.choose_feed_forward_input(x, mixed)
    if "mlp" in block.branches:
        mixed = block.finish("mlp", mixed, block.inner("mlp", x, step))
    return block.complete(mixed, step)


class _Recording(nn.Module):
    """Passes keys and values of an attention module through unchanged, and records them."""

    def __init__(self, recorder: CacheRecorder, attention: str) -> None:
        super().__init__()
        self._recorder = recorder
        self._attention = attention

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._recorder.record(self._attention, keys, values)


class _VisitedExperts:
    """Runs all experts of a block one after the other, each with the tokens that are sent to it,
    and shows their inputs; in place of an `ExpertBank`.
    """

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.visitor: Visitor | None = None

    def __call__(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum the outputs of the chosen experts [N, K] for rows [N, D], weighted: [N, D]."""
        visitor = self.visitor
        places = list_expert_rows(chosen, len(self._experts.experts))
        if visitor is not None:
            visitor.visit_routing(self._experts, [len(tokens) for tokens, _ in places])
        out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for expert, (tokens, choices) in enumerate(places):
            mlp = self._experts.experts[expert]
            assert isinstance(mlp, MLP)
            shares = weights[tokens, choices]

            def select_rows(selected: Tensor | None) -> Tensor:
                return rows if selected is None else rows[selected]

            # The default binds this expert: the visitor may call the function in a later turn.
            def select_inner(selected: Tensor | None, mlp: MLP = mlp) -> Tensor:
                return mlp.inner(select_rows(selected))

            # Experts without tokens are visited too, so that all batches stop at the same places.
            if visitor is not None:
                for leaf in mlp.first_linears:
                    visitor.visit_product(
                        self._experts,
                        f"experts.{expert}.{leaf}.{WEIGHT}",
                        expert,
                        Brought(select_rows(tokens), tokens, shares, select_rows),
                    )
            inner = select_inner(tokens)
            if visitor is not None:
                visitor.visit_product(
                    self._experts,
                    f"experts.{expert}.down_proj.{WEIGHT}",
                    expert,
                    Brought(inner, tokens, shares, select_inner),
                )
            out.index_add_(0, tokens, mlp.output(inner).float() * shares.unsqueeze(-1))
            # They would stay in memory at the next stop.
            del inner
        return out.to(rows.dtype)

    def run_shared(self, x: Tensor) -> Tensor:
        """Compute the output of the shared experts for states [B, T, D], before their gate."""
        experts = self._experts
        mlp = experts.shared_experts
        assert mlp is not None
        shares = None
        # What the gate makes small counts less.
        if experts.shared_expert_gate is not None:
            shares = torch.sigmoid(experts.shared_expert_gate(x)).squeeze(-1)
        for leaf in mlp.first_linears:
            self._visit_shared(leaf, Brought(x, shares=shares))
        inner = mlp.inner(x)
        self._visit_shared("down_proj", Brought(inner, shares=shares))
        return mlp.output(inner)

    def _visit_shared(self, leaf: str, brought: Brought) -> None:
        if self.visitor is not None:
            name = f"shared_experts.{leaf}.{WEIGHT}"
            self.visitor.visit_product(self._experts, name, None, brought)
