"""The token loop."""

from __future__ import annotations

from collections.abc import Generator

import torch

from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import MAX_NEW_TOKENS, TokenIds, checked_length, prompt_ids, require_model
from quantkit.runtime.sampling import agreed, generator_of, sample
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.tensors.finite import finite_logits


def generate(
    model: Decoder | Engine,
    ids: TokenIds,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Generator[int, None, None]:
    """Continue a prompt, token by token.

    Args:
        model: from `quantkit.load`, or an engine over it, to choose how it runs.
        ids: the prompt, as the tokenizer encodes it, in a list or a tensor [T] or [1, T]; not empty.
            `quantkit.stream` takes a text, and gives one.
        max_new_tokens: at most so many.
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_p: draw from the smallest set of tokens with at least this probability together.
        seed: of the draw; None is unpredictable. Processes that share the model draw the same tokens.

    Returns:
        A generator of the ids of new tokens, which are computed as they are asked for, up to the model's end token
        (not given out); it may be left at any time. To decode them one by one breaks characters and loses spaces;
        that is what `quantkit.stream` is for.

    Raises:
        RequestError: at once, if the prompt is a text or empty, holds unknown ids, or does not fit
            the model's context, or the engine, together with the new tokens.
        NonFiniteError: if the model's logits are NaN or Inf.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> ids = tokenizer.encode("My fellow citizens")
        >>> print(tokenizer.decode(list(quantkit.generate(model, ids, max_new_tokens=50))))
    """
    require_model("model", model, (Decoder, Engine))
    decoder = model.model if isinstance(model, Engine) else model
    params = agreed(SamplingParams(temperature, top_p, seed), decoder.group)
    prompt = prompt_ids(ids)
    length = checked_length(decoder.config, prompt, max_new_tokens)
    engine = model if isinstance(model, Engine) else Engine(model, length)
    if length > engine.length:
        raise RequestError("prompt and new tokens exceed the engine", found=length, expected=f"at most {engine.length}")
    return _tokens(engine, prompt, length - len(prompt), params)


_LOOKS = {"cpu": 1}
_FAR = 8
"""Tokens that a device draws before the host looks at them, but for the first: each look waits for all that was asked
of it."""


def _tokens(engine: Engine, ids: list[int], count: int, params: SamplingParams) -> Generator[int, None, None]:
    """What `generate` gives.

    Inference mode is left before each `yield`: it is the thread's, and a generator that is not run to its end may be
    closed when torch is gone.
    """
    device = engine.model.device
    generator = generator_of(params, device)
    ends = engine.model.config.eos_token_ids
    ahead = _LOOKS.get(device.type, _FAR)
    logits = engine.prefill(torch.tensor([ids], device=device))
    drawn: list[torch.Tensor] = []
    extremes: list[torch.Tensor] = []
    for left in range(count, 0, -1):
        with torch.inference_mode(), engine.model.ops.single_threaded():
            if ahead == 1:
                finite_logits(logits)
            else:
                extremes.append(torch.stack(torch.aminmax(logits)))
                logits = logits.nan_to_num()  # drawn from, but never given out
            tokens = sample(logits, params, generator)
            drawn.append(tokens)
        if len(drawn) == ahead or left in (1, count):
            with torch.inference_mode():
                if extremes:
                    finite_logits(torch.stack(extremes))
                found = torch.cat(drawn).flatten().tolist()
            for token in found:
                if token in ends:
                    return
                yield token
            drawn, extremes = [], []
        if left > 1:
            logits = engine.decode(tokens)
