"""A quantkit model with the interface of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from itertools import islice
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
from quantkit.tensors.finite import require_finite_logits

_TOKENS_AT_ONCE = 2048
# Positions whose logits are in memory at a time: each has as many floats as the vocabulary.
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
    """Load a model in float32 behind an ``lm_eval.api.model.LM``, which sees a rolling window at
    once. Raises `RequestError` if lm-evaluation-harness is not installed, and as `load_model` does.
    """
    # The class is made here, because its base is a type of an optional package.
    base = optional("lm_eval.api.model").TemplateLM
    # The harness's own progress bar would be drawn over this command's.
    quiet = {"loglikelihood": partialmethod(base.loglikelihood, disable_tqdm=True)}
    return type("QuantkitLM", (Scorer, base), quiet)(model, device, allow_slow, group, progress)


class Scorer:
    """Implements the abstract methods of the harness's ``TemplateLM``; a request's arguments are
    in its ``args``.
    """

    # The harness's base class has an abstract property of this name, which only an attribute of
    # the class replaces; a model sets its own value.
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
        # The harness predicts the first token of a text without a context from this token too.
        self.eot_token_id = prefix_token(model.tokenizer, model.checkpoint)
        self._model = load_model(
            model.checkpoint, device=device, dtype=torch.float32, allow_slow=allow_slow, group=group
        )
        self.backends = backend_names(self._model)
        self._progress = progress

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode a text, with the BOS that the tokenizer adds unless it is declined."""
        return self._tokenizer.encode(string, specials=True, bos=add_special_tokens is not False)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts by their log probabilities, in rolling windows."""
        items = []
        window_counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = rolling(ids, self.eot_token_id, self.max_length)
            for window, targets in windows:
                scored_targets = [target for target in targets if target != NOT_SCORED]
                items.append((window, scored_targets))
            window_counts.append(len(windows))
        # The windows of all texts are scored together, so that equally long ones share a batch.
        scores = iter(self._score(items))
        log_probabilities: list[float] = []
        for window_count in window_counts:
            window_scores = []
            for log_probability, _ in islice(scores, window_count):
                window_scores.append(log_probability)
            log_probabilities.append(sum(window_scores))
        return log_probabilities

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate continuations, each cut before the first of its stop strings."""
        texts = []
        for index, request in enumerate(requests):
            self._progress("tasks", index, len(requests), "texts")
            texts.append(self._continue(*request.args))
        return texts

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        # Tasks spell the limit in one of two ways, the second as in transformers.
        limit = settings.get("max_gen_toks") or settings.get("max_new_tokens") or _NEW_TOKENS
        # At least one position is for the prompt.
        limit = min(limit, self.max_length - 1)
        if settings.get("do_sample"):
            temperature = settings.get("temperature", 1.0)
        else:
            temperature = 0.0
        # The end of a long prompt matters most: the question follows the examples.
        prompt = self.tok_encode(context)[limit - self.max_length :]
        tokens = generate(
            self._model, prompt, max_new_tokens=limit, temperature=temperature, seed=0
        )
        # An empty string would stop at once.
        nonempty_stops = [stop for stop in stops if stop]
        return "".join(text_pieces(self._tokenizer, (), tokens, nonempty_stops))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations of contexts by their log probabilities, and check whether greedy
        decoding generates them.
        """
        items = []
        for text, context, answer in requests:
            if not 0 < len(answer) <= self.max_length:
                raise RequestError(
                    "an answer has no tokens, or more than the model's context",
                    found=repr(text[1][:40]),
                    expected=f"1 to {self.max_length} tokens",
                )
            # The last token predicts nothing, so one more than a window's tokens can be used; the
            # beginning of a longer context is dropped.
            ids = (context + answer)[-self.max_length - 1 : -1]
            items.append((ids, answer))
        return self._score(items)

    @torch.inference_mode()
    def _score(self, items: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Score ids and the targets of their last positions: the log probability of all targets,
        and whether each is the likeliest token.
        """
        scores: dict[int, tuple[float, bool]] = {}
        # The longest come first: lengths within a batch are similar, so little is padded, and a
        # lack of memory shows at once.
        order = sorted(range(len(items)), key=lambda index: -len(items[index][0]))
        while len(scores) < len(items):
            self._progress("tasks", len(scores), len(items), "requests")
            width = len(items[order[len(scores)]][0])
            batch_size = 1
            # Beyond this context, rotary positions depend on a sequence's length: in a batch, they
            # would be those of the longest.
            if width <= self._model.config.max_unscaled_context:
                batch_size = max(1, _TOKENS_AT_ONCE // width)
            batch = order[len(scores) : len(scores) + batch_size]
            padded_ids = []
            for index in batch:
                ids = items[index][0]
                padded_ids.append(ids + [0] * (width - len(ids)))
            tokens = torch.tensor(padded_ids).to(self._model.device)
            positions = torch.arange(width, device=self._model.device)
            # Attention is causal: no token sees the padding on its right.
            hidden = self._model.hidden(tokens, positions)
            for states, index in zip(hidden, batch, strict=True):
                self._progress("tasks", len(scores), len(items), "requests")
                ids, targets = items[index]
                scored_states = states[len(ids) - len(targets) : len(ids)]
                scores[index] = self._score_one(scored_states, torch.tensor(targets))
        return [scores[index] for index in range(len(items))]

    def _score_one(self, states: Tensor, targets: Tensor) -> tuple[float, bool]:
        total = 0.0
        greedy = True
        for start in range(0, len(targets), _POSITIONS_AT_ONCE):
            end = start + _POSITIONS_AT_ONCE
            target_ids = targets[start:end].to(states.device)
            logits = require_finite_logits(self._model.head(states[start:end]), self._path)
            log_probabilities = logits.log_softmax(-1).gather(-1, target_ids.unsqueeze(-1))
            # A sum of thousands of terms in float32 would lose digits.
            total += log_probabilities.sum(dtype=torch.float64).item()
            greedy = greedy and bool((logits.argmax(-1) == target_ids).all())
        return total, greedy
