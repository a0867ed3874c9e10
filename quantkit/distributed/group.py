"""The processes that share one model, as ``torchrun`` or any other launcher starts them."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from quantkit.errors import GroupError, RequestError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LONGEST = 60
_ENDED, _HEARD = "ended", "heard"
_POLL_SECONDS = 0.1
_PATIENCE = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """This process among those of a group.

    Attributes:
        rank, size: its number, and how many there are.
        device: where it computes.
        name: by which collectives know the group.
        store: what all processes can read and write.
    """

    rank: int
    size: int
    device: torch.device
    name: str
    store: Store

    @property
    def first(self) -> bool:
        return self.rank == 0

    def is_first_to_fail(self) -> bool:
        """Whether no process has asked this before: that one says what went wrong, the others are silent."""
        try:
            return bool(self.store.add("failed", 1) == 1)
        except RuntimeError:  # the launcher, or the process that keeps the store, has gone
            return self.first

    def tell_end(self, code: int) -> None:
        """Say that the first process, which this is, is done, and what it exits with."""
        with contextlib.suppress(RuntimeError):  # nobody is left to be told
            self.store.set(_ENDED, str(code))
            patience = _PATIENCE
            while patience > 0 and self.store.add(_HEARD, 0) < self.size - 1:  # this process may keep the store
                time.sleep(_POLL_SECONDS)
                patience -= _POLL_SECONDS

    def wait_for_end(self, patience: float = math.inf) -> int | None:
        """Wait until the first process is done, by default however long that takes; what it exits with, if it is.

        Raises:
            GroupError: if it is lost.
        """
        try:
            while not self.store.check([_ENDED]):
                if patience <= 0:
                    return None
                time.sleep(_POLL_SECONDS)  # a wait in the store would be deaf to Ctrl-C
                patience -= _POLL_SECONDS
            self.store.add(_HEARD, 1)
            return int(self.store.get(_ENDED))
        except RuntimeError as error:
            raise _lost() from error

    def let_the_first_speak(self) -> None:
        """Wait a little for the first process to end: a launcher stops all others once one has failed."""
        with contextlib.suppress(GroupError):
            self.wait_for_end(_PATIENCE)

    def agree(self, value: T) -> T:
        """What the first process says."""
        said = [value]
        dist.broadcast_object_list(said, device=self.device)
        return said[0]

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Go on only if all processes have the same facts.

        Raises:
            GroupError: on all of them, naming the first fact that differs.
        """
        own = {key: repr(value) for key, value in facts.items()}
        everyone: list[dict[str, str]] = [{} for _ in range(self.size)]
        dist.all_gather_object(everyone, own)
        for rank, theirs in enumerate(everyone):
            for key in {**everyone[0], **theirs}:
                found, expected = theirs.get(key), everyone[0].get(key)
                if found != expected:
                    raise GroupError(
                        f"the processes differ in {key}", found=f"{_short(found)} in process {rank}",
                        expected=f"{_short(expected)} as in process 0",
                    )  # fmt: skip


@contextmanager
def joined(device: str | None = None) -> Iterator[Group | None]:
    """Join the other processes for a while; None if this one is alone.

    Who and where they are is in the environment, as ``torchrun`` sets it. They talk through NCCL on GPUs and
    gloo on CPUs.

    Args:
        device: ``cpu`` or ``cuda``; a GPU for each process if there are any.

    Raises:
        RequestError: if there are fewer GPUs than processes on this machine.
        GroupError: if another process is lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    own = torch.device(device)
    if own.type == "cuda":
        index = int(os.environ["LOCAL_RANK"])
        if index >= torch.cuda.device_count():
            raise RequestError("there are fewer GPUs than processes", found=torch.cuda.device_count())
        torch.cuda.set_device(index)
        own = torch.device("cuda", index)
    store, rank, size = next(rendezvous("env://"))
    backend = "nccl" if own.type == "cuda" else "gloo"
    own_keys = dist.PrefixStore(backend, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own_keys, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    try:
        yield Group(rank, size, own, dist.group.WORLD.group_name, store)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # torch has no error of its own for it
            raise _lost() from error
        raise
    else:
        dist.destroy_process_group()  # not after an error, where NCCL would wait for those that are lost


def _lost() -> GroupError:
    return GroupError("another process was lost", hint="its own message or exit code tells why")


def _short(text: str | None) -> str:
    if text is None:
        return "nothing"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
