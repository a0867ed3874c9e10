"""The processes that share one model or one calibration, as ``torchrun`` or any other launcher
starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from quantkit.errors import GroupError, RequestError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Characters of a value in an error.
_LONGEST = 60
# torch's own timeout is shorter than some waits; a year is longer than any job.
_LONGEST_JOB = timedelta(days=365)
# Keys of the store: the exit code of rank 0, and how many processes have read it.
_ENDED = "ended"
_RECEIVED = "received"
_POLL_SECONDS = 0.1
# Seconds that a process waits for others at its end.
_PATIENCE = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those of a group; `SINGLE` where there is no other, and then no method
    does anything.

    All processes call its collectives in the same order, between the steps of a job; those within a
    model are in `quantkit.model.tensor_parallel`.

    Attributes:
        rank, size: its number, and how many there are.
        device: where it computes; None for `SINGLE`, whose caller chooses.
        name: by which traceable collectives know the group.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    name: str = ""
    _store: Store | None = field(default=None, repr=False)
    _world: dist.ProcessGroup | None = field(default=None, repr=False)
    _patient: dist.ProcessGroup | None = field(default=None, repr=False)
    """The same processes, on CPUs, for waits where one works and the others cannot. Others give up
    after a while (30 minutes in gloo, 10 in NCCL), since there all compute.
    """

    @property
    def is_rank0(self) -> bool:
        """Return whether this process prints and writes for all."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> slice:
        """Compute the part of `count` items that is this process's, or that of process `rank`."""
        if rank is None:
            rank = self.rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    def sum_(self, value: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(value, group=self._world)

    def join(self, value: Tensor, total: int) -> Tensor:
        """Collect all processes' shares of `total` rows, one after the other; equal bits on all
        of them.
        """
        if self.size == 1:
            return value
        whole = torch.empty(total, *value.shape[1:], dtype=value.dtype, device=value.device)
        # One broadcast for each share, since shares may differ in size.
        for rank in range(self.size):
            part = self.share(total, rank)
            if rank == self.rank:
                rows = value.contiguous()
            else:
                rows = torch.empty_like(whole[part])
            dist.broadcast(rows, group=self._world, group_src=rank)
            whole[part] = rows
        return whole

    def copy_from_rank0_(self, value: Tensor) -> None:
        """Replace a tensor by that of the first process."""
        if self.size > 1:
            # NCCL sends only tensors on a GPU.
            sent = value.to(self.device)
            dist.broadcast(sent, group=self._world, group_src=0)
            value.copy_(sent)

    def axes(self, rows: int, columns: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Arrange the processes as a table, filled row by row; return those of this process's
        column and those of its row. All processes of the group call this, which has `rows` times
        `columns`.
        """
        if self.size == 1:
            return SINGLE, SINGLE
        assert self.device is not None
        mesh = init_device_mesh(
            self.device.type, (rows, columns), mesh_dim_names=("rows", "columns")
        )
        groups = []
        for axis in ("rows", "columns"):
            group = mesh.get_group(axis)
            groups.append(
                ProcessGroup(
                    group.rank(), group.size(), self.device, group.group_name, _world=group
                )
            )
        return groups[0], groups[1]

    def broadcast_from_rank0(self, value: T) -> T:
        """Receive the value of the first process, however long it takes."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self._patient)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here, however long that takes."""
        if self.size > 1:
            dist.barrier(self._patient)

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Go on only if all processes have the same facts.

        Raises:
            GroupError: on all of them, naming the first fact that differs.
        """
        if self.size == 1:
            return
        # As text, since not every value can be compared or pickled.
        descriptions: dict[str, str] = {}
        for key, value in facts.items():
            descriptions[key] = repr(value)
        everyone: list[dict[str, str]] = [{} for _ in range(self.size)]
        dist.all_gather_object(everyone, descriptions, group=self._world)
        for rank, theirs in enumerate(everyone):
            # Either process may have a fact that the other does not.
            for key in {**everyone[0], **theirs}:
                actual = theirs.get(key)
                expected = everyone[0].get(key)
                if actual != expected:
                    raise GroupError(
                        f"the processes differ in {key}",
                        found=f"{_short(actual)} in process {rank}",
                        expected=f"{_short(expected)} as in process 0",
                    )

    def send_from_rank0(self, value: object) -> None:
        """Send a value from the first process, which this is, to the others; it does not wait
        for them.
        """
        if self._store is not None:
            # The store holds text.
            self._store.set(self._next_message(), pickle.dumps(value).hex())

    def receive_from_rank0(self) -> Any:
        """Receive the next value that the first process sends, however long it takes.

        Raises:
            GroupError: if it fails before, or is lost.
        """
        store = self._store
        assert store is not None, "a single process receives no messages"
        key = self._next_message()
        try:
            _poll(lambda: store.check([key]) or store.check([_ENDED]))
            if not store.check([key]):
                raise GroupError("the first process failed", hint="its own message says why")
            return pickle.loads(bytes.fromhex(store.get(key).decode()))
        except RuntimeError as error:
            raise _make_lost_error() from error

    def _next_message(self) -> str:
        """Count a message, and return its key; each process counts on its own."""
        assert self._store is not None
        return f"message {self._store.add(f'messages in {self.rank}', 1)}"

    def is_first_to_fail(self) -> bool:
        """Check whether this process is the first that calls this: it reports the error, the
        others are silent.
        """
        if self._store is None:
            return True
        try:
            # The store adds atomically: only one process gets 1.
            return bool(self._store.add("failed", 1) == 1)
        except RuntimeError:
            # The launcher, or the process that keeps the store, has gone.
            return self.is_rank0

    def announce_exit(self, code: int) -> None:
        """Announce that the first process, which this is, is done, and its exit code."""
        store = self._store
        if store is None:
            return
        # An error means that no other process is left.
        with contextlib.suppress(RuntimeError):
            store.set(_ENDED, str(code))
            # This process may keep the store, which ends with it: the others read the code first.
            _poll(lambda: store.add(_RECEIVED, 0) >= self.size - 1, _PATIENCE)

    def wait_for_end(self, patience: float = math.inf) -> int | None:
        """Wait until the first process is done, by default however long that takes; return its exit
        code, or None if it is not done.

        Raises:
            GroupError: if it is lost.
        """
        store = self._store
        if store is None:
            return None
        try:
            if not _poll(lambda: store.check([_ENDED]), patience):
                return None
            store.add(_RECEIVED, 1)
            return int(store.get(_ENDED))
        except RuntimeError as error:
            raise _make_lost_error() from error

    def leave(self) -> None:
        """Announce that this process will not wait for the end of rank 0."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.add(_RECEIVED, 1)

    def wait_for_rank0(self) -> int | None:
        """Wait a little for the first process to end, since a launcher stops all others once one
        has failed; return its exit code, if that is known.
        """
        try:
            return self.wait_for_end(_PATIENCE)
        except GroupError:
            return None


SINGLE = ProcessGroup()
"""A process that is alone."""


@contextmanager
def join_processes(device: str | None = None) -> Iterator[ProcessGroup]:
    """Join the other processes for a while; `SINGLE` if there are none.

    Who and where they are is in the environment, as ``torchrun`` sets it. They use NCCL on GPUs and
    gloo on CPUs.

    Args:
        device: ``cpu`` or ``cuda``; a GPU for each process if there are any.

    Raises:
        RequestError: if there are fewer GPUs than processes on this machine.
        GroupError: if another process is lost.
    """
    if count_processes() == 1:
        yield SINGLE
        return
    with lost_as_error():
        yield _init_process_group(device)
    # Not after an error: NCCL would wait for the processes that are lost.
    dist.destroy_process_group()


def join_until_exit(device: str | torch.device | None = None) -> ProcessGroup:
    """Join the other processes until this one ends; any number of times, and also where a program
    has made torch's process group itself.

    Args:
        device: see `join_processes`.

    Raises:
        RequestError, GroupError: see `join_processes`.
    """
    if count_processes() == 1:
        return SINGLE
    if not dist.is_initialized():
        with lost_as_error():
            group = _init_process_group(device)
        atexit.register(_end)
        return group
    return _group(_select_device(device), None)


@contextmanager
def lost_as_error() -> Iterator[None]:
    """Raise torch's errors about a lost process as a `GroupError`."""
    try:
        yield
    except RuntimeError as error:
        # Torch has no separate exception for it.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise _make_lost_error() from error
        raise


def count_processes() -> int:
    """Count the processes to join, this one included; known before they are joined."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _init_process_group(device: str | torch.device | None) -> ProcessGroup:
    selected_device = _select_device(device)
    store, rank, size = next(rendezvous("env://"))
    if selected_device.type == "cuda":
        backend = "nccl"
    else:
        backend = "gloo"
    # torch's keys have a prefix, so that they do not collide with this module's.
    prefixed_store = dist.PrefixStore(backend, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=prefixed_store, rank=rank, world_size=size)
    return _group(selected_device, store)


def _select_device(device: str | torch.device | None) -> torch.device:
    """Choose where this process computes, and make it torch's current device."""
    if not device:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    selected_device = torch.device(device)
    if selected_device.type != "cuda":
        return selected_device
    index = int(os.environ["LOCAL_RANK"])
    if index >= torch.cuda.device_count():
        raise RequestError("there are fewer GPUs than processes", found=torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _group(device: torch.device, store: Store | None) -> ProcessGroup:
    """Build the group of all processes, once torch knows them."""
    world = dist.group.WORLD
    assert world is not None
    patient = dist.new_group(backend="gloo", timeout=_LONGEST_JOB)
    return ProcessGroup(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        name=world.group_name,
        _store=store,
        _world=world,
        _patient=patient,
    )


def _end() -> None:
    # `sys.last_value` is the error that ended the program, after which NCCL would wait for lost
    # processes.
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _poll(done: Callable[[], bool], patience: float = math.inf) -> bool:
    """Poll until a state of the store is reached, or this time is over; return whether it is
    reached. A wait in the store itself would be deaf to Ctrl-C.
    """
    while not done():
        if patience <= 0:
            return False
        time.sleep(_POLL_SECONDS)
        patience -= _POLL_SECONDS
    return True


def _make_lost_error() -> GroupError:
    return GroupError("another process was lost", hint="its own message or exit code says why")


def _short(text: str | None) -> str:
    if text is None:
        return "nothing"
    if len(text) <= _LONGEST:
        return text
    return text[:_LONGEST] + "..."
