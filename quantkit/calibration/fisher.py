"""Gradients by the outputs of linears, of the log probability of tokens that the model draws (its
Fisher information).

One forward pass keeps the inputs of each block, in memory or in a store; one backward pass computes
each block again. One block's weights are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import input_groups
from quantkit.base.progress import Progress, silent
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.effort import batch_samples
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.model.decoder import Block, final_logits, rms_norm
from quantkit.model.load import (
    BLOCK_PREFIX,
    fill_parameters,
    float_parameter,
    meta_init,
    narrow_to_floats,
)
from quantkit.model.samples import embed_batches, make_sample_step
from quantkit.tensors.finite import all_finite
from quantkit.tensors.products import add_square_

_KEY = "inputs of a block"
TURN = 3
"""The passes through the head that take as long as its gradients: products in both directions, and
the draw of a token from each distribution.
"""
HEAD_TOKENS = 64
"""Tokens that go through the head at a time."""
HEAD_WEIGHTS = 1 << 24
"""Weights of the head that are float32 at a time."""


class FisherPasses:
    """The forward and the backward pass of samples, in batches."""

    def __init__(
        self,
        source: Checkpoint,
        samples: Tensor,
        kept: int,
        device: torch.device,
        states: torch.dtype = torch.bfloat16,
        store: ActivationStore | None = None,
    ) -> None:
        """The samples are tokens [N, T], of which there may be none, and the first `kept` have a
        backward pass; the blocks' inputs are kept in the dtype `states`, and in memory if there is
        no store.
        """
        length = samples.shape[1]
        self._source = source
        self._device = device
        self._dtype = states
        step = batch_samples(source.config, length)
        parts = (samples[:kept], samples[kept:])
        batches = []
        for part in parts:
            if len(part):
                for batch in torch.split(part, step):
                    batches.append(batch)
        self._states = list(embed_batches(source, batches))
        self._store, self._inputs = store, dict[tuple[str, int, int], Tensor]()
        self._kept = -(-kept // step)  # batches
        self._step = make_sample_step(source.config, length, device)

    @torch.no_grad()
    def forward(
        self, layer: int, *, with_sums: bool = True
    ) -> tuple[dict[str, tuple[Tensor, int]], Block]:
        """Run a block: the sum of ``X.T @ X`` over the inputs X of its linears, and their number,
        by site; empty without `with_sums`.
        """
        block = self._block(layer)
        # The experts of a layer share a site.
        sums: dict[str, tuple[Tensor, int]] = {}

        def add(site: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            total, count = sums.get(site) or (
                torch.zeros(x.shape[1], x.shape[1], device=x.device),
                0,
            )
            add_square_(total, x.t().contiguous())
            sums[site] = total, count + len(x)

        with ExitStack() as hooks:
            for group in input_groups(self._source.config, layer) if with_sums else ():
                linear = block.get_submodule(group.modules[0])
                hooks.enter_context(linear.register_forward_pre_hook(partial(add, group.site)))
            for index, states in enumerate(self._states):
                if index < self._kept:
                    self._keep(layer, index, states.to(self._dtype))
                self._states[index] = block(states.to(self._device), self._step).cpu()
        return sums, block

    def is_finite(self) -> bool:
        """Return whether the last block's outputs, and the norm and head that follow, are free of
        NaN and Inf.
        """
        following = ("model.norm.weight", resolve_stored_name(self._source, "lm_head.weight"))
        weights = (narrow_to_floats(self._source.load(name)) for name in following)
        return all(map(all_finite, self._states)) and all(map(all_finite, weights))

    def turn(self, first: int, progress: Progress = silent) -> None:
        """Begin the backward pass: gradients of the log probabilities of drawn tokens by the last
        block's outputs.

        Args:
            first: the index of this process's first sample among all samples.
            progress: called with the share of the tokens that have passed the head.
        """
        del self._states[self._kept :]
        norm = rms_norm(self._source.config)
        norm.weight = float_parameter(
            self._source, "model.norm.weight", torch.device("cpu"), torch.float32
        )
        head = narrow_to_floats(
            self._source.load(resolve_stored_name(self._source, "lm_head.weight"))
        )
        done = 0
        total = sum(states.shape[0] * states.shape[1] for states in self._states)

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress("head", done, total, "layers")

        for index, states in enumerate(self._states):
            states.requires_grad_()
            normed = norm(states)
            normed.backward(
                head_gradients(normed.detach(), head, self._source.config, first, advance)
            )
            first += len(states)
            assert states.grad is not None
            self._states[index] = states.grad

    def squares(self, layer: int) -> dict[str, Tensor]:
        """Run the gradients back through a block; the sum of their squares by module, [O] for
        each.
        """
        squares: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor) -> None:
            if name not in squares:
                squares[name] = torch.zeros(gradient.shape[1], device=self._device)
            if len(gradient):
                squares[name].add_(gradient.square().sum(0))

        self.backward(layer, add)
        return squares

    def backward(self, layer: int, add: Callable[[str, Tensor], None]) -> None:
        """Run the gradients back through a block. `add` gets those by the outputs of a linear, [N,
        O], with its full name, batch after batch; first, for each linear of the block, those of no
        token.
        """
        block = self._block(layer)
        prefix = BLOCK_PREFIX.format(layer)

        def add_gradient_hook(
            name: str, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor
        ) -> None:
            out.register_hook(lambda gradient: add(name, gradient.flatten(0, -2)))  # type: ignore[no-untyped-call]

        with ExitStack() as hooks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    add(prefix + name, torch.zeros(0, module.out_features, device=self._device))
                    hooks.enter_context(
                        module.register_forward_hook(partial(add_gradient_hook, prefix + name))
                    )
            for index, gradient in enumerate(self._states):
                inputs = self._take(layer, index).to(self._device, torch.float32).requires_grad_()
                with torch.enable_grad():
                    block(inputs, self._step).backward(gradient.to(self._device))
                assert inputs.grad is not None
                self._states[index] = inputs.grad.cpu()

    def _keep(self, layer: int, index: int, inputs: Tensor) -> None:
        """Keep a batch of a block's inputs up to the backward pass."""
        if self._store is None:
            self._inputs[_KEY, layer, index] = inputs
        else:
            self._store.put((_KEY, layer, index), inputs)

    def _take(self, layer: int, index: int) -> Tensor:
        key = _KEY, layer, index
        if self._store is None:
            return self._inputs.pop(key)
        return self._store.take(key)

    def _block(self, layer: int) -> Block:
        with meta_init():
            block = Block(self._source.config, layer)
        fill_parameters(
            block, self._source, BLOCK_PREFIX.format(layer), self._device, torch.float32, ()
        )
        return block.eval()


def head_gradients(
    hidden: Tensor,
    head: Tensor,
    config: ModelConfig,
    first: int,
    advance: Callable[[int], None] | None = None,
) -> Tensor:
    """Gradients by hidden states [B, T, D] of minus the log probability of a token drawn at each of
    them.

    The head is [V, D]; `first` is the seed of the first sample, so that tokens do not depend on the
    processes' number. `advance` is called with the number of tokens that have passed the head since
    its last call.
    """
    result = torch.empty_like(hidden)
    for index, states in enumerate(hidden):
        generator = torch.Generator().manual_seed(first + index)
        for start in range(0, len(states), HEAD_TOKENS):
            rows = states[start : start + HEAD_TOKENS]
            products = torch.cat([rows @ part.float().t() for part in _parts(head)], dim=-1)
            logits = final_logits(products, config)
            gradients = draw_logit_gradients(logits, generator)
            result[index, start : start + HEAD_TOKENS] = through_logits(
                gradients, logits, head, config
            )
            if advance is not None:
                advance(len(rows))
    return result


def differentiate_head(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    first: int,
    advance: Callable[[int], None],
) -> Tensor:
    """Compute what `head_gradients` does through any head, given the function from states [N, D] to
    logits [N, V].
    """
    result = torch.empty_like(hidden)
    for index, states in enumerate(hidden):
        generator = torch.Generator().manual_seed(first + index)
        for start in range(0, len(states), HEAD_TOKENS):
            # A leaf, so that the gradients stop here.
            rows = states[start : start + HEAD_TOKENS].detach().requires_grad_()
            with torch.enable_grad():
                logits = compute_logits(rows)
            logits.backward(draw_logit_gradients(logits.detach(), generator))  # type: ignore[no-untyped-call]
            assert rows.grad is not None
            result[index, start : start + HEAD_TOKENS] = rows.grad
            advance(len(rows))
    return result


def draw_logit_gradients(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each row of logits [N, V], and compute the gradients by them of minus its
    log probability.
    """
    gradients = logits.softmax(-1)
    # On the CPU, whose generator it is; so all devices draw the same.
    drawn = torch.multinomial(gradients.cpu(), 1, generator=generator).to(gradients.device)
    return gradients.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=gradients.dtype))


def through_logits(gradients: Tensor, logits: Tensor, head: Tensor, config: ModelConfig) -> Tensor:
    """Gradients by hidden states [N, D] float32, given those by their logits [N, V], which are
    overwritten, for a head [V, D].
    """
    if config.logit_softcap is not None:
        gradients *= 1 - (logits / config.logit_softcap).square()
    if config.logit_multiplier != 1:
        gradients *= config.logit_multiplier
    result = gradients.new_zeros(len(gradients), head.shape[1])
    place = 0
    for part in _parts(head):
        result.addmm_(
            gradients[:, place : place + len(part)], part.to(gradients.device, torch.float32)
        )
        place += len(part)
    return result


def _parts(head: Tensor) -> Sequence[Tensor]:
    return torch.split(head, max(1, HEAD_WEIGHTS // head.shape[1]))
