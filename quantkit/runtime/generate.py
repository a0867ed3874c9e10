"""The token loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import checked_length
from quantkit.runtime.sampling import SamplingParams, agreed, sample
from quantkit.tensors.finite import finite_logits


def generate(
    model: Decoder | Engine,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[int]:
    """Token ids that continue `ids`, one by one, up to the model's end token (not given out).

    Args:
        model: from `quantkit.load`, or an engine over it, to choose how it runs.
        ids: the prompt, as the tokenizer encodes it; not empty.
        max_new_tokens: at most so many.
        temperature, top_p, seed: see `SamplingParams`; greedy by default. Processes that share the model
            draw the same tokens.

    Raises:
        RequestError: at once, if the prompt is empty, holds unknown ids, or does not fit
            the model's context, or the engine, together with the new tokens.
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    decoder = model.model if isinstance(model, Engine) else model
    params = agreed(SamplingParams(temperature, top_p, seed), decoder.group)
    length = checked_length(decoder.config, ids, max_new_tokens)
    engine = model if isinstance(model, Engine) else Engine(model, length)
    if length > engine.length:
        raise RequestError("prompt and new tokens exceed the engine", found=length, expected=f"at most {engine.length}")
    return _tokens(engine, list(ids), max_new_tokens, params)


_LOOKS = {"cpu": 1}
_FAR = 8
"""Tokens that a device draws before the host looks at them: each look waits for all that was asked of it."""


@torch.inference_mode()
def _tokens(engine: Engine, ids: list[int], count: int, params: SamplingParams) -> Iterator[int]:
    device = engine.model.device
    generator = params.generator(device)
    ends = engine.model.config.eos_token_ids
    ahead = _LOOKS.get(device.type, _FAR)
    logits = engine.prefill(torch.tensor([ids], device=device))
    drawn: list[torch.Tensor] = []
    extremes: list[torch.Tensor] = []
    for left in range(count, 0, -1):
        with engine.model.ops.single_threaded():
            if ahead == 1:
                finite_logits(logits)
            else:
                extremes.append(torch.stack(torch.aminmax(logits)))
                logits = logits.nan_to_num()  # drawn from, but never given out
            tokens = sample(logits, params, generator)
        drawn.append(tokens)
        if len(drawn) == ahead or left == 1:
            if extremes:
                finite_logits(torch.stack(extremes))
            for token in torch.cat(drawn).flatten().tolist():
                if token in ends:
                    return
                yield token
            drawn, extremes = [], []
        if left > 1:
            logits = engine.decode(tokens)
