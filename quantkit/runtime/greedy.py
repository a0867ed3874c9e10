"""Draw the likeliest tokens, and check the logits that they are drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kernels.backend import FindLikeliest

# Values of which one maximum is taken first.
_SPAN = 512


def draw_greedily(logits: Tensor, kernel: FindLikeliest | None = None) -> tuple[Tensor, Tensor]:
    """Draw the likeliest tokens [N] from logits [N, V]. Returns them, and again with -1 for each
    row whose logits are NaN or Inf.

    Args:
        kernel: finds them in logits of float32; None is torch.
    """
    if kernel is not None and logits.dtype == torch.float32:
        return kernel(logits)
    tokens = find_likeliest(logits)
    return tokens, mark_nonfinite(tokens, logits)


def find_likeliest(logits: Tensor) -> Tensor:
    """Find the tokens [...] of the largest logits [..., V], of equal ones the first.

    Of logits with NaN it is a token whose logit is NaN.
    """
    vocabulary = logits.shape[-1]
    num_spans = vocabulary // _SPAN
    # On CPUs torch's argmax compares one value at a time, which takes a tenth of a small model's
    # step. Its maximum uses vectors: only the span that has the largest value is searched.
    if logits.device.type != "cpu" or num_spans < 2 or torch.compiler.is_compiling():
        return logits.argmax(-1)
    rest_start = num_spans * _SPAN
    spans = logits[..., :rest_start].view(*logits.shape[:-1], num_spans, _SPAN)
    maxima = spans.amax(-1)
    if rest_start < vocabulary:
        rest = logits[..., rest_start:].amax(-1, keepdim=True)
        maxima = torch.cat((maxima, rest), dim=-1)
    starts = maxima.argmax(-1, keepdim=True) * _SPAN
    # The last span may be shorter: its last value is repeated.
    tokens = (starts + torch.arange(_SPAN)).clamp(max=vocabulary - 1)
    in_span: Tensor = logits.gather(-1, tokens).argmax(-1)
    return starts.squeeze(-1).add(in_span)


def mark_nonfinite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Replace tokens [N] by -1 if the logits [N, V] that they were drawn from are NaN or Inf."""
    # NaN propagates to both extremes, so two values per row decide without a mask of [N, V].
    # torch's `aminmax` of rows would compare one value at a time on CPUs.
    finite = (logits.amin(-1) > -torch.inf) & (logits.amax(-1) < torch.inf)
    return tokens.masked_fill(finite.logical_not(), -1)
