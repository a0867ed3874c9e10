"""Run a model forward and backward, with one block's weights in memory at a time.

The forward pass records how the model's own code calls its blocks. The backward pass calls each
block again, from the last one, with gradients; what happens between blocks, before the first and
after the last one is recorded by autograd. So gradients also pass through what blocks share, such
as keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.base.progress import Progress, silent
from quantkit.errors import UnsupportedError
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.block_calls import (
    CallRecorder,
    begin_graph,
    iterate_tensors,
)
from quantkit.passes.lockstep import stop
from quantkit.passes.passage import HIDDEN, Observer, Part, Passage, convert_model_errors

OpenBlock = Callable[[str], AbstractContextManager[None]]
"""Makes a context in which the samples go back through a block, given by its part. When it is
entered, the block's weights are loaded, and require no gradients; they are freed after its end.
"""


class BlockPasses:
    """The forward and the backward pass of batches of tokens [B, T]."""

    def __init__(
        self,
        passage: Passage[Any],
        batches: Sequence[Tensor],
        *,
        store: ActivationStore | None = None,
        dtype: torch.dtype = torch.bfloat16,
        to_inputs: bool = False,
    ) -> None:
        """
        Args:
            store: keeps the inputs of blocks up to the backward pass; None is memory.
            dtype: of these; those of the first batch are kept as they are if the model's calls have
                to be compared.
            to_inputs: let gradients go back to the inputs of the first block that they reach, so
                that these are kept in the store too; otherwise they stay in memory as they are.
        """
        self._passage = passage
        self._partwise = passage.partwise
        self._batches = list(batches)
        self._to_inputs = to_inputs
        if store is None:
            store = ActivationStore()
        self._recorders: list[CallRecorder] = []
        for index in range(len(self._batches)):
            # Blocks that behave otherwise when they are called again do so for any batch, so one is
            # enough.
            is_checked = index == 0 and not self._partwise.is_repeatable
            self._recorders.append(CallRecorder(index, store, dtype, check=is_checked))
        self._outputs: list[Tensor] = []
        self._parameters: dict[str, nn.Parameter] = {}

    def forward(
        self,
        trained_parts: Collection[str] | None = None,
        trained_parameters: Collection[str] = (),
        progress: Progress = silent,
    ) -> list[Tensor]:
        """Compute the states [B, T, D] of each batch, in float32, that the model without its head
        returns.

        Args:
            trained_parts: the blocks that the backward pass must reach; None means all.
            trained_parameters: parameters outside of blocks, whose gradients are wanted.

        Raises:
            UnsupportedError: if the model fails, or calls its blocks in a way that cannot be
                repeated.
        """
        parts = [part for part in self._partwise.parts if self._partwise.is_listed(part)]
        entered: list[str] = []

        handle = self._partwise.body.register_forward_hook(
            lambda module, args, output: stop(HIDDEN, output[0])
        )
        observer = _ForwardObserver(self._partwise.model, trained_parameters)
        places = self._passage.iterate_places(self._batches, observer, torch.enable_grad)
        beginning: AbstractContextManager[None] = nullcontext()
        if self._to_inputs:
            beginning = self._begin_at_embedding()
        try:
            with (
                torch.no_grad(),
                beginning,
                self._record_calls(parts, trained_parts, observer),
                closing(places),
            ):
                for place in places:
                    if isinstance(place, Part) and place.name in parts:
                        progress("layers", len(entered), len(parts), "layers")
                        entered.append(place.name)
                    elif place == HIDDEN:
                        break
        finally:
            handle.remove()
        progress("layers", len(parts), len(parts), "layers")
        self._outputs = observer.outputs
        self._parameters = observer.parameters
        self._passage.require_body(len(self._outputs), self._batches)
        self._require_calls(entered)
        return [output.detach() for output in self._outputs]

    @contextmanager
    def _begin_at_embedding(self) -> Iterator[None]:
        """Make autograd record what is computed from the outputs of the embedding."""

        def begin(module: nn.Module, args: Any, output: Any) -> None:
            _begin_at_outputs(output)

        handles: list[Any] = []
        for part in self._partwise.first_parts:
            module = self._partwise.model.get_submodule(part)
            handles.append(module.register_forward_hook(begin))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _record_calls(
        self,
        parts: Sequence[str],
        trained_parts: Collection[str] | None,
        observer: _ForwardObserver,
    ) -> Iterator[None]:
        """Record all calls of blocks from the first trained one on."""
        self._called: set[str] = set()
        reached = [False] * len(self._batches)

        def call(part: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            index = observer.current
            self._called.add(part)
            if trained_parts is None or part in trained_parts:
                reached[index] = True
            result = self._recorders[index].run(
                part, forward, args, kwargs, has_gradients=reached[index]
            )
            if self._to_inputs and not reached[index]:
                _begin_at_outputs(result)
            return result

        # A module's own `forward`, if it is not that of its class.
        before: dict[nn.Module, Any] = {}
        for part in parts:
            module = self._partwise.model.get_submodule(part)
            before[module] = vars(module).get("forward")
            module.forward = partial(call, part, module.forward)
        try:
            yield
        finally:
            for module, forward in before.items():
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _require_calls(self, entered: Sequence[str]) -> None:
        """Raise `UnsupportedError` unless all batches have called the same blocks."""
        for part in entered:
            if part not in self._called:
                raise UnsupportedError(f"the model calls modules of '{part}' instead of it")
        # Calls of the same number are repeated together, with the same weights.
        sequences = [[call.part for call in recorder.calls] for recorder in self._recorders]
        if any(sequence != sequences[0] for sequence in sequences):
            raise UnsupportedError("samples take different paths through the model")

    def turn(self, gradients: Sequence[Tensor]) -> None:
        """Begin the backward pass with the gradients by the states of each batch that `forward` has
        returned.
        """
        for output, gradient in zip(self._outputs, gradients, strict=True):
            if output.requires_grad:
                # Blocks may have the same graph between them in common with what follows.
                torch.autograd.backward(output, gradient, retain_graph=True)
        self._outputs.clear()

    def backward(self, open_block: OpenBlock, progress: Progress = silent) -> dict[str, Tensor]:
        """Run the gradients back through all blocks, from the last to the first trained one.

        Returns:
            The gradients by parameters outside of blocks that have any.

        Raises:
            UnsupportedError: if a block does not do the same again.
        """
        total = len(self._recorders[0].calls) if self._recorders else 0
        for done in range(total):
            progress("layers", done, total, "layers")
            part = self._recorders[0].calls[-1].part
            with self._passage.load_when_entered([part]), open_block(part):
                self._repeat_last_calls(part)
        progress("layers", total, total, "layers")
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        self._parameters.clear()
        return gradients

    def is_pending(self, part: str) -> bool:
        """Check that gradients have still to go back through a block."""
        return any(call.part == part for call in self._recorders[0].calls)

    def _repeat_last_calls(self, part: str) -> None:
        module = self._partwise.model.get_submodule(part)
        for recorder in self._recorders:
            call = recorder.calls.pop()
            with self._partwise.silence(), convert_model_errors(self._passage.path):
                recorder.repeat(call, module)

    def close(self) -> None:
        """Free the inputs of blocks that wait for the backward pass."""
        for recorder in self._recorders:
            while recorder.calls:
                recorder.forget(recorder.calls.pop())
        self._outputs.clear()
        self._parameters.clear()


def _begin_at_outputs(output: Any) -> None:
    """Make autograd record what is computed from the tensors in nested containers."""
    tensors: list[Tensor] = []
    for tensor in iterate_tensors(output):
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensors.append(tensor)
    if tensors:
        begin_graph(tensors)


class _ForwardObserver(Observer):
    """Collects what the forward pass leaves for the backward pass.

    Attributes:
        current: the batch whose code runs.
        outputs: the states that the model's body returns, by batch.
        parameters: those outside of blocks whose gradients are wanted, by name.
    """

    def __init__(self, model: nn.Module, trained_parameters: Collection[str]) -> None:
        self._model = model
        self._trained_parameters = trained_parameters
        self.current = 0
        self.outputs: list[Tensor] = []
        self.parameters: dict[str, nn.Parameter] = {}

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        if place == HIDDEN:
            self.outputs.append(value)

    def resume(self, index: int) -> None:
        self.current = index
        # They are loaded while the samples pass.
        for name in self._trained_parameters:
            parameter: nn.Parameter = self._model.get_parameter(name)
            if not parameter.is_meta:
                parameter.requires_grad_()
                self.parameters[name] = parameter
