"""Record how a model calls its blocks, so that each can be called again, and gradients can pass
from one to the other.

Between blocks autograd records what the model's code computes, as it does in training; in a block
it records nothing. So the graph begins at the outputs of blocks, and ends at their inputs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from quantkit.errors import UnsupportedError
from quantkit.passes.activation_store import ActivationStore

# Of sums over the width of a block's outputs, relative to the largest. The same products in another
# order change them by less.
_SAME = 1e-3


Gradients = dict[int, Tensor]
"""Gradients by tensors, by their numbers; a tensor that has no effect has none."""


def begin_graph(tensors: Sequence[Tensor]) -> Gradients:
    """Make autograd record what is computed from tensors, themselves computed without it. Returns a
    dictionary, to which backward passes add the gradients by them.
    """
    gradients: Gradients = {}
    # A function needs an input that requires gradients. The tensors are no inputs, so that they
    # are not copied.
    with torch.enable_grad():
        _Beginning.apply(torch.zeros((), requires_grad=True), list(tensors), gradients)  # type: ignore[no-untyped-call]
    return gradients


class _Beginning(torch.autograd.Function):
    """A node of autograd's graph that collects gradients by its outputs."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: list[Tensor], gradients: Gradients
    ) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        # Zeros would be added for tensors that have no effect.
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                before = ctx.gradients.get(number)
                ctx.gradients[number] = gradient if before is None else before + gradient
        return None, None, None


class _Kept:
    """An input that depends on outputs of earlier blocks. Its values are in the store."""

    def __init__(self, key: Hashable, edge: GradientEdge, device: torch.device) -> None:
        self.key = key
        self.device = device
        self.edge = edge
        # How many calls have it as an input.
        self.uses = 0


@dataclass(frozen=True)
class _Held:
    """An input that does not depend on blocks, such as a mask, and its version."""

    tensor: Tensor
    version: int


@dataclass
class Call:
    """A call of a block.

    Attributes:
        part: the block's name.
        arguments: the positional and the named arguments, with `_Kept` and `_Held` for tensors.
        places: the places of the block's outputs among all tensors that the call returns or leaves
            in its arguments.
        gradients: by these outputs.
        sums: of the outputs over their last axis, to compare; empty if they are not compared.
    """

    part: str
    arguments: Any
    places: list[int] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)


class CallRecorder:
    """Records the calls of a batch.

    Attributes:
        calls: in their order.
    """

    def __init__(
        self, batch: int, store: ActivationStore, dtype: torch.dtype, *, check: bool
    ) -> None:
        """
        Args:
            store: keeps the inputs, in `dtype`.
            check: whether calls that are repeated are compared with those of the forward pass.
                Inputs are kept as they are then.
        """
        self.calls: list[Call] = []
        self._batch = batch
        self._store = store
        self._dtype = dtype
        self._check = check
        self._count = 0
        # By the identity of a tensor, as long as it lives, with its version.
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, _Kept]] = {}

    def run(
        self,
        part: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_gradients: bool,
    ) -> Any:
        """Call a block, and record the call.

        Args:
            has_gradients: whether gradients by its outputs are needed.
        """
        if not has_gradients:
            with torch.no_grad():
                return forward(*args, **kwargs)
        call = Call(part, _replace_tensors((args, kwargs), self._record_input))
        inputs = _Versions((args, kwargs))
        # Autograd would keep the block's weights and inner states.
        with torch.no_grad():
            result = forward(*args, **kwargs)
        outputs: list[Tensor] = []
        for place, tensor in enumerate(iterate_tensors((result, args, kwargs))):
            if not tensor.is_floating_point() or any(tensor is output for output in outputs):
                continue
            # An input that is returned as it was is not an output.
            if inputs.has(tensor):
                continue
            # An input that was written to.
            if tensor.requires_grad:
                tensor.detach_()
            call.places.append(place)
            outputs.append(tensor)
        if self._check:
            call.sums = [_sum_up(output) for output in outputs]
        call.gradients = begin_graph(outputs)
        self.calls.append(call)
        return result

    def _record_input(self, tensor: Tensor) -> _Kept | _Held:
        if not tensor.requires_grad:
            return _Held(tensor, tensor._version)
        recorded = self._kept.get(id(tensor))
        if recorded is not None:
            reference, version, kept = recorded
            # Another tensor may have got the identity of one that is gone.
            if reference() is tensor and version == tensor._version:
                kept.uses += 1
                return kept
        kept = _Kept((_KEY, self._batch, self._count), get_gradient_edge(tensor), tensor.device)
        self._count += 1
        kept.uses = 1
        dtype = tensor.dtype if self._check else self._dtype
        # A copy, because the block may write to it.
        self._store.put(kept.key, tensor.detach().to(dtype, copy=True))
        self._kept[id(tensor)] = weakref.ref(tensor), tensor._version, kept
        return kept

    def repeat(self, call: Call, block: Callable[..., Any]) -> None:
        """Call a block again, and run the gradients by its outputs back through it, up to earlier
        blocks.

        Raises:
            UnsupportedError: if it does not do the same again.
        """
        edges: list[GradientEdge] = []
        inputs: list[Tensor] = []
        restored: dict[int, Tensor] = {}

        def restore(value: _Kept | _Held) -> Tensor:
            if isinstance(value, _Held):
                if value.tensor._version != value.version:
                    raise UnsupportedError(
                        f"block '{call.part}' writes to its inputs, so it cannot be called again"
                    )
                return value.tensor
            # The same input may be passed twice.
            tensor = restored.get(id(value))
            if tensor is not None:
                self._free(value)
            else:
                tensor = self._read(value).to(value.device, torch.float32)
                restored[id(value)] = tensor
                edges.append(value.edge)
                inputs.append(tensor)
            return tensor

        args, kwargs = _replace_kept(call.arguments, restore)
        # Not leaves, because blocks may write to their inputs.
        input_gradients = begin_graph(inputs)
        # The caller's mode is that of its own code.
        with torch.enable_grad():
            result = block(*args, **kwargs)
        tensors = list(iterate_tensors((result, args, kwargs)))
        # Fewer tensors than before.
        if call.places and call.places[-1] >= len(tensors):
            raise _make_difference_error(call.part)
        outputs = [tensors[place] for place in call.places]
        for output, sums in zip(outputs, call.sums, strict=False):
            if not _are_close(_sum_up(output), sums):
                raise _make_difference_error(call.part)
        # Outputs that nothing used, or that depend on nothing trained, have no gradients.
        used = [number for number in call.gradients if outputs[number].requires_grad]
        if used:
            torch.autograd.backward(
                [outputs[number] for number in used],
                [call.gradients[number].to(outputs[number].dtype) for number in used],
            )
        if input_gradients:
            # The graph between blocks is used again for other outputs of an earlier block.
            torch.autograd.backward(
                [edges[number] for number in input_gradients],
                list(input_gradients.values()),
                retain_graph=True,
            )

    def forget(self, call: Call) -> None:
        """Free the inputs of a call that is not repeated."""
        _replace_kept(call.arguments, lambda value: self._free(value))

    def _free(self, value: _Kept | _Held) -> None:
        if isinstance(value, _Kept):
            self._read(value)

    def _read(self, value: _Kept) -> Tensor:
        """Read an input for one of its uses; after the last it is freed."""
        value.uses -= 1
        if value.uses:
            return self._store.get(value.key)
        return self._store.take(value.key)


class _Versions:
    """The versions of the tensors in nested containers, which this does not keep in memory: a block
    may take its inputs out of their containers to free them.
    """

    def __init__(self, value: Any) -> None:
        # By the identity of a tensor.
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        for tensor in iterate_tensors(value):
            self._versions[id(tensor)] = weakref.ref(tensor), tensor._version

    def has(self, tensor: Tensor) -> bool:
        """Check that a tensor is one of them, not written to since."""
        known = self._versions.get(id(tensor))
        if known is None:
            return False
        reference, version = known
        # Another tensor may have got the identity of one that is gone.
        return reference() is tensor and version == tensor._version


_KEY = "inputs of a block"


def _make_difference_error(part: str) -> UnsupportedError:
    return UnsupportedError(f"block '{part}' does not give the same outputs when called again")


def _sum_up(output: Tensor) -> Tensor:
    return output.detach().sum(-1, dtype=torch.float64)


def _are_close(sums: Tensor, expected: Tensor) -> bool:
    if sums.shape != expected.shape:
        return False
    # An empty output has no largest sum.
    if not expected.numel():
        return True
    bound = _SAME * (1 + expected.abs().amax())
    return bool(((sums - expected).abs() <= bound).all())


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, MutableMapping):
        for element in value.values():
            yield from iterate_tensors(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from iterate_tensors(element)


def _replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Copy nested containers with each tensor replaced; other objects stay the same."""
    return _replace(value, Tensor, replace)


def _replace_kept(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Copy nested containers with each record of a tensor replaced."""
    return _replace(value, (_Kept, _Held), replace)


def _replace(value: Any, kinds: Any, replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, kinds):
        return replace(value)
    if isinstance(value, MutableMapping):
        # Of the same class, such as transformers' outputs of modules.
        copied = copy.copy(value)
        for key, element in value.items():
            copied[key] = _replace(element, kinds, replace)
        return copied
    if isinstance(value, list):
        return [_replace(element, kinds, replace) for element in value]
    if isinstance(value, tuple):
        elements = [_replace(element, kinds, replace) for element in value]
        # A named tuple takes its elements one by one.
        if hasattr(value, "_fields"):
            return type(value)(*elements)
        return tuple(elements)
    return value
