"""torch, and `qtensor` and `block_scales`, which need it: they are imported when one of their
attributes is first read, since headers are read without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.base.late import LateModule

if TYPE_CHECKING:
    import torch as torch

    from quantkit.tensors import block_scales as block_scales
    from quantkit.tensors import qtensor as qtensor
else:
    torch = LateModule("torch")
    qtensor = LateModule("quantkit.tensors.qtensor")
    block_scales = LateModule("quantkit.tensors.block_scales")
