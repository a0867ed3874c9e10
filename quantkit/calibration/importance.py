"""How important each input of a linear is for rounding: its mean square on a small sample of text.

The diagonal of the Hessian that GPTQ solves for, at the cost of one pass. llama.cpp calls it an
importance matrix.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from quantkit.base.progress import Progress, silent
from quantkit.calibration.packaged import PackagedText
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.quality.bounds import window_length
from quantkit.text.tokenizer import Tokenizer
from quantkit.via_transformers.forward import observe_inputs

IMPORTANCE = "importance of inputs"
"""The name of the phase in reports of progress."""

_SAMPLES = 4
_LENGTH = 128
# Tokens that reach a linear whose importance is the square root of the mean square.
_EVEN = 32.0
_LEAST = 0.1  # of the mean: other text may use inputs that the sample does not


def input_importance(
    source: Checkpoint,
    tokenizer: Tokenizer | None,
    *,
    linears: Collection[str] | None = None,
    progress: Progress = silent,
) -> dict[str, Tensor]:
    """Return the importance [I] of the inputs of each linear, by name, in float32 on the CPU, in
    units of its mean.

    The fewer tokens reach a linear, the more even it is. Linears that no token reaches, such as an
    expert's, and those whose inputs are not finite are left out.

    Args:
        source: measurable; passed through block by block, by our decoder or by transformers.
        tokenizer: see `sample_tokens`.
        linears: of these alone; None is all.

    Raises:
        UnsupportedError: if transformers cannot run the model.
    """
    tokens = sample_tokens(source, tokenizer, *importance_tokens(source))
    sums, counts = sum_squared_inputs(source, tokens, linears=linears, progress=progress)
    found = {name: importance_of(total, counts[name]) for name, total in sums.items()}
    return {name: weights for name, weights in found.items() if weights is not None}


def sum_squared_inputs(
    source: Checkpoint,
    tokens: Tensor,
    *,
    linears: Collection[str] | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the sums of squared inputs [I] of each linear that samples [B, T] reach, by name, and
    how many tokens these are; for the arguments and errors see `input_importance`.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def observe(linear: str, inputs: Tensor) -> None:
        rows = inputs.flatten(0, -2)
        sums[linear] = sums.get(linear, 0) + rows.square().sum(0)
        counts[linear] = counts.get(linear, 0) + len(rows)

    observe_inputs(source, tokens, observe, linears=linears, progress=progress)
    return sums, counts


def importance_of(total: Tensor, count: float) -> Tensor | None:
    """Return the importance [I] of inputs whose squares are `total`, for a number of tokens; None
    if that gives no finite weights.
    """
    if not (total.isfinite().all() and 0 < total.mean() < torch.inf):
        return None
    return (total / total.mean()).clamp_(min=_LEAST) ** (count / (count + _EVEN))


def importance_tokens(source: Checkpoint) -> tuple[int, int]:
    """Return the samples, and the tokens of each."""
    return _SAMPLES, min(_LENGTH, window_length(source))


def sample_tokens(
    source: Checkpoint, tokenizer: Tokenizer | None, samples: int, length: int
) -> Tensor:
    """Samples of the packaged text [samples, length], the same each time; random tokens without a
    tokenizer, or if it makes nothing of that text.
    """
    if tokenizer is not None:
        try:
            text = PackagedText.of(tokenizer, None, seed=0, token_count=samples * length)
            drawn = text.draw(
                samples=samples,
                length=length,
                seed=0,
                measure_losses=lambda prefixes: [0.0] * len(prefixes),
            )
            return drawn.tokens
        except RequestError:
            pass
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.config.vocab_size, (samples, length), generator=generator)
