"""Modules without memory, to be filled from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Uninitialised(TorchFunctionMode):
    """Initialises nothing: on the meta device that does nothing, and loads torch's compiler for it (70 MB)."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        options = dict(kwargs or {})
        if getattr(function, "__module__", None) == "torch.nn.init":
            return options["tensor"] if "tensor" in options else args[0]
        return function(*args, **options)


@contextmanager
def meta_init() -> Iterator[None]:
    """Modules made here have their parameters on the meta device."""
    with torch.device("meta"), _Uninitialised():
        yield
