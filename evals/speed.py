"""How fast a model decodes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch

from quantkit.distributed.group import ProcessGroup
from quantkit.evals.models import backend_names
from quantkit.evals.tokens import token_ids
from quantkit.formats.checkpoint import DTYPE_NAMES, Checkpoint
from quantkit.model.load import load_model
from quantkit.runtime.generate import generate
from quantkit.text.tokenizer import Tokenizer

PROMPT_TOKENS = 16
NEW_TOKENS = 32
RUNS = 3


@dataclass(frozen=True)
class Speed:
    """Tokens per second of greedy decoding, one sequence at a time.

    Attributes:
        tokens_per_second: the median of `RUNS` runs, the prompt and the first token left out.
        dtype: of activations, as the checkpoint's own.
        backends: of quantized layers; none where there are no such.
        device, threads: what it ran on.
    """

    tokens_per_second: float
    dtype: str
    backends: list[str]
    device: str
    threads: int


def decoding_speed(checkpoint: Checkpoint, tokenizer: Tokenizer, text: str, group: ProcessGroup) -> Speed:
    """Let a model continue the first tokens of a text, past any end token.

    Raises:
        RequestError: if the model's context is too short.
        NonFiniteError: if its logits are NaN or Inf.
    """
    model = load_model(checkpoint, group=group)
    model.config = replace(model.config, eos_token_ids=())
    prompt = token_ids(tokenizer, text)[:PROMPT_TOKENS]
    rates = []
    for _ in range(RUNS):
        tokens = generate(model, prompt, max_new_tokens=NEW_TOKENS + 1)
        next(tokens)
        started = time.perf_counter()
        count = sum(1 for _ in tokens)
        rates.append(count / (time.perf_counter() - started))
    return Speed(
        statistics.median(rates), DTYPE_NAMES[model.dtype], backend_names(model), str(model.device),
        torch.get_num_threads(),
    )  # fmt: skip
