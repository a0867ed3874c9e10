"""A quantkit model with the interface of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from quantkit.base.progress import Progress, silent
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals import optional
from quantkit.evals.models import Model, backend_names
from quantkit.evals.texts import prefix_token, rolling
from quantkit.model.load import load_model
from quantkit.quality.measures import NOT_SCORED
from quantkit.runtime.generate import generate, text_pieces
from quantkit.tensors.finite import finite_logits

_TOKENS_AT_ONCE = 2048
_POSITIONS_AT_ONCE = 128
_NEW_TOKENS = 256
"""The harness's own limit where a task names none."""


def as_lm(
    model: Model,
    *,
    device: str | torch.device = "cpu",
    allow_slow: bool = False,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> Any:
    """Return an ``lm_eval.api.model.LM`` that answers with this model, in float32, and sees a
    rolling window at once. Raises `RequestError` if lm-evaluation-harness is not installed, and as
    `load_model` does.
    """
    base = optional("lm_eval.api.model").TemplateLM
    quiet = {"loglikelihood": partialmethod(base.loglikelihood, disable_tqdm=True)}
    return type("QuantkitLM", (Scorer, base), quiet)(model, device, allow_slow, group, progress)


class Scorer:
    """Implements the abstract methods of the harness's ``TemplateLM``; a request's arguments are
    in its ``args``.
    """

    # A model has its own.
    eot_token_id = -1

    def __init__(
        self,
        model: Model,
        device: str | torch.device,
        allow_slow: bool,
        group: ProcessGroup,
        progress: Progress,
    ) -> None:
        super().__init__()
        self.max_length = model.rolling_window
        self._tokenizer = model.tokenizer
        self._path = model.checkpoint.path
        # The harness's prefix, too.
        self.eot_token_id = prefix_token(model.tokenizer, model.checkpoint)
        self._model = load_model(
            model.checkpoint, device=device, dtype=torch.float32, allow_slow=allow_slow, group=group
        )
        self.backends = backend_names(self._model)
        self._progress = progress

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Token ids, with the BOS that the tokenizer adds unless it is declined."""
        return self._tokenizer.encode(string, specials=True, bos=add_special_tokens is not False)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log probability of whole texts, in rolling windows."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        windows = [rolling(ids, self.eot_token_id, self.max_length) for ids in texts]
        items = []
        for window in windows:
            for ids, targets in window:
                items.append((ids, [t for t in targets if t != NOT_SCORED]))
        scores = iter(self._score(items))
        result: list[float] = []
        for window in windows:
            result.append(sum(next(scores)[0] for _ in window))
        return result

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each cut before the first of its stop strings."""
        texts = []
        for index, request in enumerate(requests):
            self._progress("tasks", index, len(requests), "texts")
            texts.append(self._continue(*request.args))
        return texts

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        else:
            stops = stops
        limit = min(
            settings.get("max_gen_toks") or settings.get("max_new_tokens") or _NEW_TOKENS,
            self.max_length - 1,
        )
        if settings.get("do_sample"):
            temperature = settings.get("temperature", 1.0)
        else:
            temperature = 0.0
        prompt = self.tok_encode(context)[limit - self.max_length :]
        tokens = generate(
            self._model, prompt, max_new_tokens=limit, temperature=temperature, seed=0
        )
        return "".join(text_pieces(self._tokenizer, (), tokens, [stop for stop in stops if stop]))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log probability of continuations given contexts, and whether greedy decoding
        generates them.
        """
        for text, _, answer in requests:
            if not 0 < len(answer) <= self.max_length:
                raise RequestError(
                    "an answer has no tokens, or more than the model's context",
                    found=repr(text[1][:40]),
                    expected=f"1 to {self.max_length} tokens",
                )
        return self._score(
            [
                ((context + answer)[-self.max_length - 1 : -1], answer)
                for _, context, answer in requests
            ]
        )

    @torch.inference_mode()
    def _score(self, items: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For ids and the targets of their last positions: the log probability, and whether all
        are likeliest.
        """
        scores: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(items)), key=lambda index: -len(items[index][0]))
        while len(scores) < len(items):
            self._progress("tasks", len(scores), len(items), "requests")
            width = len(items[order[len(scores)]][0])
            # Else rotary positions are those of the longest.
            batched = width <= self._model.config.max_unscaled_context
            batch = order[
                len(scores) : len(scores) + max(1, _TOKENS_AT_ONCE // width if batched else 1)
            ]
            tokens = torch.tensor(
                [items[index][0] + [0] * (width - len(items[index][0])) for index in batch]
            )
            tokens = tokens.to(self._model.device)
            positions = torch.arange(width, device=self._model.device)
            # Causal: what is padded on the right is not seen.
            hidden = self._model.hidden(tokens, positions)
            for states, index in zip(hidden, batch, strict=True):
                self._progress("tasks", len(scores), len(items), "requests")
                ids, targets = items[index]
                scores[index] = self._score_one(
                    states[len(ids) - len(targets) : len(ids)], torch.tensor(targets)
                )
        return [scores[index] for index in range(len(items))]

    def _score_one(self, states: Tensor, targets: Tensor) -> tuple[float, bool]:
        total = 0.0
        greedy = True
        for start in range(0, len(targets), _POSITIONS_AT_ONCE):
            wanted = targets[start : start + _POSITIONS_AT_ONCE].to(states.device)
            logits = finite_logits(
                self._model.head(states[start : start + _POSITIONS_AT_ONCE]), self._path
            )
            chosen = logits.log_softmax(-1).gather(-1, wanted.unsqueeze(-1))
            total += chosen.sum(dtype=torch.float64).item()
            greedy = greedy and bool((logits.argmax(-1) == wanted).all())
        return total, greedy
