"""A linear layer whose weight stays quantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.kernels.dispatch import select_backend
from quantkit.tensors.qtensor import QuantTensor


class QuantLinear(nn.Module):
    """``x @ weight.T + bias`` through a kernel backend; the backend's tensors are its buffers."""

    def __init__(
        self,
        weight: QuantTensor,
        bias: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        backend: str | None = None,
    ) -> None:
        """
        Raises:
            RequestError, UnsupportedError: see `select_backend`.
        """
        super().__init__()
        self.scheme, self.scale_dtype = weight.scheme, weight.scale.dtype
        self.out_features, self.in_features = weight.shape
        self.backend = select_backend(weight.scheme, device, dtype, weight.scale.dtype, backend)
        prepared = self.backend.prepare(weight.to(device))
        self._prepared_names = tuple(prepared)
        for name, tensor in prepared.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.to(device, dtype), requires_grad=False)

    @property
    def backend_name(self) -> str:
        return self.backend.name

    def forward(self, x: Tensor) -> Tensor:
        prepared = {name: getattr(self, name) for name in self._prepared_names}
        return self.backend.linear(x, prepared, self.scheme, self.out_features, self.bias)
