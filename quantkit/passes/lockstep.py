"""Pass batches of samples through a model in lockstep: each stops where code on its way calls
`stop`. When all have arrived there, the caller acts, and lets them continue.

Each batch runs the model's own `forward` in a greenlet, so that masks, rotary angles, shared keys
and recurrent states stay where the model's code has them. The tensors of a stopped batch are
tracked; beyond a budget they are moved to a file until the batch continues.
"""

from __future__ import annotations

import weakref
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.errors import UnsupportedError
from quantkit.passes.activation_store import ActivationStore


@dataclass
class Stop:
    """A place where a batch has stopped.

    Attributes:
        key: of the place; the same for all batches.
        value: of the batch there, such as the inputs of a linear.
    """

    key: Hashable
    value: Any = None


def stop(key: Hashable, value: Any = None) -> bool:
    """Stop the current batch until all have arrived at this place.

    Returns:
        Whether it shall stop here again, see `Lockstep.repeats`.
    """
    current = getcurrent()
    assert isinstance(current, _Batch)
    assert current.parent is not None
    # Belongs to the thread, and this may be within code that has turned it off.
    records_gradients = torch.is_grad_enabled()
    repeats: bool = current.parent.switch(Stop(key, value))
    torch.set_grad_enabled(records_gradients)
    return repeats


class _Batch(greenlet):
    """A batch on its way through the model."""


class Lockstep:
    """Batches that pass through a model together.

    Attributes:
        repeats: what `stop` returns to all batches when they continue; the next round sets it to
            False.
    """

    def __init__(
        self,
        forwards: Iterable[Callable[[], object]],
        find_shared: Callable[[], Collection[int]],
        store: ActivationStore,
        silence: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        Args:
            forwards: functions that run the model on each batch.
            find_shared: returns the ids of the storages that belong to no batch, such as those of
                the model's parameters.
            store: keeps the tensors of stopped batches.
            silence: makes a context in which the model's code runs.
        """
        self._batches = [_Batch(forward) for forward in forwards]
        self._trackers = [_Tracker() for _ in self._batches]
        self._find_shared = find_shared
        self._store = store
        self._silence = silence
        self.repeats = False
        # By batch: the stop that it has reached before the others; None if it has ended.
        self._ahead: dict[int, Stop | None] = {}

    def iterate_rounds(
        self,
        on_stop: Callable[[int, Hashable, Any], None],
        on_resume: Callable[[int], None] = lambda index: None,
        runs_ahead: Callable[[int, Hashable], bool] = lambda index, place: False,
    ) -> Generator[Hashable]:
        """Run all batches from place to place, and yield the places where all have stopped, until
        they end.

        Args:
            on_stop: called with the index of a batch, the place where it has stopped, and its
                value; batch after batch.
            on_resume: called with the index of a batch before it continues, or shows its value.
            runs_ahead: called with the index of a batch that has shown its value at a place:
                whether it goes on to the next place at once, so that it does not hold what it has
                at this one. There it waits for the others.

        Raises:
            UnsupportedError: if batches stop at different places.
        """
        try:
            while True:
                place = self._run_round(on_stop, on_resume, runs_ahead)
                if place is None:
                    break
                yield place.key
        finally:
            self.close()

    def _run_round(
        self,
        on_stop: Callable[[int, Hashable, Any], None],
        on_resume: Callable[[int], None],
        runs_ahead: Callable[[int, Hashable], bool],
    ) -> Stop | None:
        """Let all batches continue to the next place; None if they have ended."""
        first_stop: Stop | None = None
        repeats = self.repeats
        self.repeats = False
        for index in range(len(self._batches)):
            on_resume(index)
            self._store.resume_batch(index)
            if index in self._ahead:
                batch_stop = self._ahead.pop(index)
            else:
                batch_stop = self._run_batch(index, repeats=repeats)
            if index == 0:
                first_stop = batch_stop
            first_key = None if first_stop is None else first_stop.key
            key = None if batch_stop is None else batch_stop.key
            # Checked batch after batch, before its value reaches the caller.
            if key != first_key:
                raise UnsupportedError(
                    "samples take different paths through the model",
                    found=f"{_place(first_key)} and {_place(key)}",
                )
            if batch_stop is not None:
                on_stop(index, key, batch_stop.value)
                # The value would keep its tensors alive until the next round.
                batch_stop.value = None
                if runs_ahead(index, key):
                    self._ahead[index] = self._run_batch(index, repeats=False)
                tracker = self._trackers[index]
                self._store.hold_batch(
                    index,
                    tracker.storages(),
                    tracker.take_written_storages(),
                    self._find_shared,
                )
        return first_stop

    def _run_batch(self, index: int, *, repeats: bool) -> Stop | None:
        """Let one batch continue to its next place; None if it has ended."""
        batch = self._batches[index]
        # These contexts belong to the thread, not to the greenlet: they are entered again for each
        # batch.
        with torch.no_grad(), self._silence(), self._trackers[index]:
            # The arguments of the first switch would be those of the batch's function.
            if batch:
                batch_stop: Stop | None = batch.switch(repeats)
            else:
                batch_stop = batch.switch()
        # A batch that has ended returns the result of the model.
        if batch.dead:
            return None
        return batch_stop

    def close(self) -> None:
        """End all batches at their places."""
        for batch in self._batches:
            # A greenlet is true while it runs. `throw` without arguments ends it without an error.
            if batch:
                batch.throw()
        self._batches = []
        self._ahead.clear()
        self._store.release_batches()


class NotLoaded(RuntimeError):
    """The code of a model uses a weight whose part no sample has entered."""


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the tensors that were made while it was active, as long as they live, and the
    storages that were written to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak, so that tracking does not keep tensors alive.
        self._tensor_refs: list[weakref.ref[Tensor]] = []
        self._written = set[int]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler (130 MB) to keep it from this code.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            self._written.update(_iter_written_storages(func, args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else (result,)
        for output in outputs:
            if isinstance(output, Tensor):
                # A result of weights that are not loaded would have arbitrary numbers.
                if output.is_meta:
                    raise NotLoaded("a weight is used outside the module that owns it")
                self._tensor_refs.append(weakref.ref(output))
        return result

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Collect the storages of the tensors that are alive."""
        alive_refs: list[weakref.ref[Tensor]] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for ref in self._tensor_refs:
            tensor = ref()
            if tensor is not None:
                alive_refs.append(ref)
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage
        self._tensor_refs = alive_refs
        return storages

    def take_written_storages(self) -> set[int]:
        """Take the storages that were written to since the last call, and start a new set."""
        written = self._written
        self._written = set()
        return written


def _iter_written_storages(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[int]:
    """Yield the storages of the arguments that an operator writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            if index < len(args):
                value = args[index]
            else:
                value = kwargs.get(argument.name)
            # Operators on lists of tensors take them as one argument.
            elements = value if isinstance(value, tuple | list) else (value,)
            for element in elements:
                if isinstance(element, Tensor):
                    yield element.untyped_storage()._cdata


def _place(key: Hashable) -> str:
    if key is None:
        return "the end"
    return str(key)
