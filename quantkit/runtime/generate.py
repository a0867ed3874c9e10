"""Continue one prompt, token id by token id."""

from __future__ import annotations

from collections.abc import Generator
from typing import Unpack

from quantkit.model.decoder import Decoder
from quantkit.runtime.batch import Batch
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import MAX_NEW_TOKENS, Request, TokenIds, checked_request, prompt_ids, require_model
from quantkit.runtime.sampling_params import SamplingOptions


def generate(
    model: Decoder | Engine,
    ids: TokenIds,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    **sampling: Unpack[SamplingOptions],
) -> Generator[int, None, None]:
    """Continue a prompt, token by token.

    Args:
        model: from `quantkit.load`, or an engine over it, to choose how it runs.
        ids: the prompt, as the tokenizer encodes it, in a list or a tensor [T] or [1, T]; not empty.
            `quantkit.stream` takes a text, and gives one.
        max_new_tokens: at most so many.
        sampling: how tokens are drawn, greedily by default: `temperature`, `top_p`, `top_k`, `min_p`,
            `repetition_penalty`, `logit_bias` and `seed`, as the fields of `quantkit.SamplingParams` say. Processes
            that share the model draw the same tokens.

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
    request = checked_request(decoder.config, prompt_ids(ids), max_new_tokens, sampling)
    if isinstance(model, Engine):
        model.require_length(request.length)
    return _tokens(model if isinstance(model, Engine) else Engine(model, request.length), request)


def _tokens(engine: Engine, request: Request) -> Generator[int, None, None]:
    """What `generate` gives.

    Inference mode is left before each `yield`: it is the thread's, and a generator that is not run to its end may be
    closed when torch is gone.
    """
    batch = Batch(engine)
    (found,) = batch.add(request)
    given = 0
    while found.finish_reason is None:
        batch.step()
        yield from found.tokens[given:]
        given = len(found.tokens)
