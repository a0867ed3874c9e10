"""Being one of several processes that ``torchrun`` started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def together() -> Iterator[bool]:
    """Join the other processes for a while; whether this one is the first, or alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
