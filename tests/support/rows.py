"""Sequences that run together compared with each of them alone, and tokens that reach the host
late.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.model.decoder import Decoder
from quantkit.runtime import engine as engine_module
from quantkit.runtime.captured import EagerRecorder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate_batch import completions
from quantkit.runtime.request import Completion, Request


def together(engine: Engine, requests: list[Request]) -> list[Completion]:
    """What comes of requests over an engine's slots, in their order."""
    found = completions(engine, requests, None, [()] * len(requests))
    return sorted(found, key=lambda one: (one.prompt, one.sample))


def alone(
    model: Decoder, request: Request, *, cache_dtype: torch.dtype | None = None
) -> list[Completion]:
    """What comes of a request with nothing beside it."""
    return together(
        Engine(model, request.length, cache_dtype=cache_dtype, compiled=False), [request]
    )


def require_same(found: Completion, expected: Completion, bound: float) -> int:
    """Tokens are the same up to where the two likeliest are nearer than a bound, and
    log-probabilities so far differ by less; how many are the same. Both with log-probabilities of
    the two likeliest.
    """
    assert found.logprobs is not None
    assert expected.logprobs is not None
    pairs = list(zip(found.token_ids, expected.token_ids, strict=False))
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    for ours, theirs in zip(
        found.logprobs.tokens[:same], expected.logprobs.tokens[:same], strict=True
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or abs(ours - theirs) < bound
    if same < len(pairs):
        first, second = expected.logprobs.top[same].values()
        assert first - second < bound
    else:
        assert len(found.token_ids) == len(expected.token_ids)
    return same


@torch.inference_mode()
def forward_logprobs(model: Decoder, tokens: list[int]) -> Tensor:
    """Log-probabilities of each token but the first, [T - 1], by one pass without a cache."""
    logits = model(torch.tensor([tokens[:-1]]), torch.arange(len(tokens) - 1))[0]
    return (
        logits.float()
        .log_softmax(-1)
        .gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1))
        .squeeze(-1)
    )


class Late:
    """Tokens that have not arrived until somebody waits for them, which has to be in their
    order.
    """

    def __init__(self, tokens: Tensor, recorder: LateRecorder) -> None:
        self._tokens, self._recorder, self._number = tokens.tolist(), recorder, recorder.steps
        recorder.steps += 1

    @property
    def is_ready(self) -> bool:
        return self._recorder.dice.random() < self._recorder.soon

    def read(self) -> list[int]:
        assert self._number >= self._recorder.read
        self._recorder.read = self._number + 1
        self._recorder.behind.append(self._recorder.steps - 1 - self._number)
        return self._tokens


class LateRecorder(EagerRecorder):
    """Counts what is recorded, run and read."""

    def __init__(self, soon: float = 0.0) -> None:
        self.dice, self.soon = random.Random(1), soon
        self.recorded = self.steps = self.read = 0
        self.behind: list[int] = []

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        for _ in range(3):
            step()
        return step

    def fetch(self, tokens: Tensor) -> Late:
        return Late(tokens, self)


def read_late(monkeypatch: pytest.MonkeyPatch, *, late: bool = True) -> None:
    """Let engines run ahead of the tokens that the host reads, as on a GPU."""
    if late:
        monkeypatch.setattr(engine_module, "EagerRecorder", LateRecorder)
