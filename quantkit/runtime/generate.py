"""The token loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quantkit.errors import RequestError
from quantkit.finite import finite_logits
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.runtime.sampling import SamplingParams, sample


def generate(
    model: Decoder,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[int]:
    """Token ids that continue `ids`, one by one, up to the model's end token (not given out).

    Args:
        model: from `quantkit.load`.
        ids: the prompt, as the tokenizer encodes it; not empty.
        max_new_tokens: at most so many.
        temperature, top_p, seed: see `SamplingParams`; greedy by default.

    Raises:
        RequestError: at once, if the prompt is empty, holds unknown ids, or does not fit
            the model's context together with the new tokens.
        NonFiniteError: if the model's logits are NaN or Inf.
    """
    params = SamplingParams(temperature, top_p, seed)
    config = model.config
    if not ids:
        raise RequestError("the prompt is empty")
    if not all(0 <= i < config.vocab_size for i in ids):
        raise RequestError(
            "the prompt holds token ids outside the vocabulary", expected=f"0 to {config.vocab_size - 1}"
        )
    if max_new_tokens < 1:
        raise RequestError("nothing to generate", found=f"{max_new_tokens} new tokens", expected="at least 1")
    length = len(ids) + max_new_tokens
    if length > config.max_context:
        raise RequestError(
            "prompt and new tokens exceed the model's context", found=length, expected=f"at most {config.max_context}",
            hint="ask for fewer new tokens",
        )  # fmt: skip
    return _tokens(model, list(ids), length, params)


@torch.inference_mode()
def _tokens(model: Decoder, ids: list[int], length: int, params: SamplingParams) -> Iterator[int]:
    device = model.device
    generator = params.generator(device)
    cache = KVCache(model.config, 1, length, model.dtype, device)
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)
    for step in range(length - len(ids)):
        logits = finite_logits(model.head(model.hidden(tokens, positions, cache, first=step == 0)[:, -1]))
        tokens = sample(logits, params, generator)
        token = int(tokens.item())
        if token in model.config.eos_token_ids:
            return
        yield token
        positions = positions[-1:] + 1
