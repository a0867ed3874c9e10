"""Pass batches of samples through a model in lockstep: each stops where code on its way calls
`stop`, and when all have arrived there, the caller does something, and lets them go on.

Each batch runs the model's own `forward` in a greenlet, so that masks, rotary angles, shared keys
and recurrent states stay where the model's code has them. What a stopped batch keeps is tracked;
beyond a budget it is moved to a file until the batch goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.errors import UnsupportedError
from quantkit.via_transformers.linears import quiet
from quantkit.via_transformers.spill import Spill


@dataclass
class Stop:
    """Where a batch has stopped.

    Attributes:
        key: of the place; the same for all batches.
        value: what it brings, such as the inputs of a linear.
    """

    key: Hashable
    value: Any = None


def stop(key: Hashable, value: Any = None) -> None:
    """Stop the current batch until all have come here."""
    current = getcurrent()
    assert isinstance(current, _Batch)
    assert current.parent is not None
    current.parent.switch(Stop(key, value))


class _Batch(greenlet):
    """A batch on its way through the model."""


class Lockstep:
    """Batches that pass through a model together."""

    def __init__(
        self, forwards: Iterable[Callable[[], object]], module: nn.Module, spill: Spill
    ) -> None:
        """
        Args:
            forwards: of each batch what runs the model.
            module: the model, whose tensors belong to no batch.
            spill: keeps what stopped batches hold.
        """
        self._batches = [_Batch(forward) for forward in forwards]
        self._trackers = [_Tracker() for _ in self._batches]
        self._module = module
        self._spill = spill

    def iterate_rounds(
        self,
        on_stop: Callable[[int, Hashable, Any], None],
        on_resume: Callable[[int], None] = lambda index: None,
    ) -> Generator[Hashable]:
        """Run all batches from place to place: the places where all have stopped, until they end.

        Args:
            arrived: called with the index of a batch, where it has stopped, and what it brings;
                batch after batch.
            before: called with the index of a batch before it goes on.

        Raises:
            UnsupportedError: if batches stop at different places.
        """
        try:
            while found := self._run_round(on_stop, on_resume):
                yield found.key
        finally:
            self.close()

    def _run_round(
        self, on_stop: Callable[[int, Hashable, Any], None], on_resume: Callable[[int], None]
    ) -> Stop | None:
        """Let all batches go on to the next place; None if they have ended."""
        stops: list[Stop | None] = []
        for index, batch in enumerate(self._batches):
            on_resume(index)
            self._spill.restore(index)
            with torch.no_grad(), quiet(), self._trackers[index]:
                found = batch.switch()
            stops.append(None if batch.dead else found)
            keys = []
            for one in (stops[0], stops[-1]):
                keys.append(None if one is None else one.key)
            if keys[0] != keys[1]:
                raise UnsupportedError(
                    "samples take different ways through the model",
                    found=" and ".join(map(_place, keys)),
                )
            if stops[-1] is not None:
                on_stop(index, stops[-1].key, stops[-1].value)
                stops[-1].value = None
                tracker = self._trackers[index]
                self._spill.keep(
                    index,
                    tracker.storages(),
                    tracker.take_written_storages(),
                    self._collect_model_storages,
                )
        return stops[0] if stops else None

    def close(self) -> None:
        """End all batches where they are."""
        for batch in self._batches:
            if batch:
                # Which ends it without an error.
                batch.throw()
        self._batches = []
        self._spill.close()

    def _collect_model_storages(self) -> set[int]:
        """Return the storages of the model's own tensors, parameters, buffers and attributes."""
        result = set()
        for module in self._module.modules():
            for parameter in (
                *module._parameters.values(),
                *module._buffers.values(),
                *vars(module).values(),
            ):
                if isinstance(parameter, Tensor):
                    result.add(parameter.untyped_storage()._cdata)
        return result


class NotLoaded(RuntimeError):
    """The code of a model uses a weight whose part no sample has entered."""


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the tensors that were made while it was active, as long as they live, and the
    storages written to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensor_refs: list[weakref.ref[Tensor]] = []
        self._written = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            self._written.update(_iter_written_storages(func, args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                # Its numbers would be what lies in memory.
                if one.is_meta:
                    raise NotLoaded("a weight is used outside the module that has it")
                self._tensor_refs.append(weakref.ref(one))
        return result

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages of the tensors that live."""
        living = [(ref, tensor) for ref in self._tensor_refs if (tensor := ref()) is not None]
        self._tensor_refs = [ref for ref, _ in living]
        return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for _, tensor in living}

    def take_written_storages(self) -> set[int]:
        """Return the storages that were written to since this was last called."""
        result = self._written
        self._written = set()
        return result


def _iter_written_storages(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[int]:
    """Yield the storages of the arguments that an operator writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            if index < len(args):
                given = args[index]
            else:
                given = kwargs.get(argument.name)
            for one in given if isinstance(given, tuple | list) else (given,):
                if isinstance(one, Tensor):
                    yield one.untyped_storage()._cdata


def _place(key: Hashable) -> str:
    if key is None:
        return "the end"
    return str(key)
