"""Continue texts of equal length with transformers' own `generate`, which knows what each
architecture caches.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.messages import Message, Option
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.linears import quiet


def _make_chooser(choose: Callable[[Tensor], Tensor]) -> Any:
    """Make a processor of logits that leaves greedy decoding the chosen tokens alone."""
    from transformers import LogitsProcessor

    stdout = sys.stdout

    class Chooser(LogitsProcessor):
        def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
            with redirect_stdout(stdout):
                tokens = choose(scores)
            return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    return Chooser()


def generate_rows(
    lazy: LazyModel,
    path: Path,
    first: Tensor,
    length: int,
    choose: Callable[[Tensor], Tensor],
) -> Tensor:
    """Continue rows of tokens in lockstep.

    Args:
        lazy: the model, with all its weights in memory.
        path: of the model, for errors.
        first: the first token of each row [B].
        length: T, the tokens of a row at last.
        choose: from the logits [B, V] of the next token to the tokens [B].

    Returns:
        The rows [B, T].

    Raises:
        UnsupportedError: if transformers does not generate with the model, or its code fails.
    """
    from transformers import GenerationConfig

    model = lazy.model
    if not getattr(model, "can_generate", bool)():
        raise UnsupportedError(
            "transformers does not generate text with this model",
            path=path,
            found=type(model).__name__,
        )
    # Rows do not end at end tokens: the caller continues them with the next text.
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True, max_length=length
    )
    chooser = _make_chooser(choose)
    previous_settings = model.generation_config
    model.generation_config = settings
    try:
        # Some models print warnings, between what the caller may print.
        silenced = redirect_stdout(io.StringIO())
        with torch.inference_mode(), quiet(), silenced:
            rows: Tensor = model.generate(
                first[:, None],
                attention_mask=torch.ones(len(first), 1, dtype=torch.long),
                generation_config=settings,
                logits_processor=[chooser],
            )
    except QuantkitError:
        raise
    # The code of a model can raise anything.
    except Exception as error:
        raise UnsupportedError(
            "transformers does not generate text with this model",
            path=path,
            found=describe_foreign_error(error),
            hint=Message("give a text: ", Option("calibration")),
        ) from error
    finally:
        model.generation_config = previous_settings
    return rows
