"""torch, and `qtensor` and `block_scales`, which need it: they are imported when one of their
attributes is first read, since headers are read without them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch

    from quantkit.tensors import block_scales as block_scales
    from quantkit.tensors import qtensor as qtensor
else:

    class _Late(ModuleType):
        # Python calls this for attributes that the module object lacks: all of the module's.
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self.__name__), name)

    torch = _Late("torch")
    qtensor = _Late("quantkit.tensors.qtensor")
    block_scales = _Late("quantkit.tensors.block_scales")
