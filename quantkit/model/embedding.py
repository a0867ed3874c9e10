"""Quantized embeddings: only the rows of the requested tokens are dequantized."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.model.linear import QuantLinear
from quantkit.tensors.qtensor import QuantTensor

_TRIED = 64  # rows on which a backend's are tried

_log = logging.getLogger(__name__)


def embedding_rows(tokens: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    """The rows [..., D] of tokens [...]: floats in their type, codes dequantized to float32."""
    if isinstance(weight, Tensor):
        return F.embedding(tokens, weight)
    return weight.take(tokens.flatten()).dequantize().view(*tokens.shape, -1)


class QuantEmbedding(nn.Module):
    """An embedding [V, D] of codes, whose rows are rounded once, to the activations' dtype.

    Where the head is tied to it both read one memory, in the layout of the head's backend; else the codes lie as they
    are.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(
        self, weight: QuantTensor, device: torch.device, dtype: torch.dtype, head: QuantLinear | None = None
    ) -> None:
        """
        Args:
            head: the tied head, made of the same weight.
        """
        super().__init__()
        self.scheme, (self.num_embeddings, self.embedding_dim) = weight.scheme, weight.shape
        self._dtype = dtype
        self.head = head if head is not None and self._gives_rows(head, weight) else None
        if self.head is None:
            own = weight.to(device)
            self.register_buffer("codes", own.codes)
            self.register_buffer("scale", own.scale)
            self.register_buffer("zero", own.zero)

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] to [..., D]."""
        if self.head is not None:
            rows = self._by_head(self.head, tokens.flatten())
        else:
            rows = QuantTensor(self.codes, self.scale, self.zero, self.scheme).take(tokens.flatten()).dequantize()
        return rows.to(self._dtype).view(*tokens.shape, -1)

    def _by_head(self, head: QuantLinear, index: Tensor) -> Tensor:
        return head.backend.rows(head.prepared, self.scheme, self.embedding_dim, index)

    def _gives_rows(self, head: QuantLinear, weight: QuantTensor) -> bool:
        """Whether the head's backend gives the rows of its weight, to the bit; if not, a warning says so."""
        index = torch.linspace(0, self.num_embeddings - 1, min(_TRIED, self.num_embeddings)).long()
        device = next(iter(head.prepared.values())).device
        try:
            if torch.equal(self._by_head(head, index.to(device)).cpu(), weight.take(index).dequantize()):
                return True
            reason = "are wrong on this machine"
        except Exception as error:  # drivers and compilers have their own exception types
            reason = f"fail on this machine ({' '.join(str(error).split()) or type(error).__name__})"[:300]
        _log.warning("rows of the embedding by '%s' %s; its codes are held twice", head.backend_name, reason)
        return False
