"""Parts of a text with the predictions of models at each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quality.position_divergence import position_buckets
from quantkit.quality.positions import PositionDivergence
from quantkit.text.tokenizer import Tokenizer

LIKELIEST = 5
"""Number of likeliest tokens that are kept of a prediction."""
SAMPLE_TOKENS = 192
"""Of one part."""
_FIRST_POSITIONS = 16
# Tokens by which a part may begin earlier, at a word.
_MAX_SHIFT = 16


@dataclass(frozen=True)
class Guess:
    """A model's prediction at one position of a text, the likeliest tokens first; `right` is the
    probability of the token in the text, and `kl` is KL(reference || model) there, in nats.
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    right: float
    kl: float


@dataclass(frozen=True)
class TextSample:
    """A part of a text as models read it.

    Attributes:
        start: the position of its first token in the text.
        tokens: their ids.
        pieces: the bytes of each token that occurs here; special tokens by their names.
        reference: the reference's prediction of each token; None where nothing precedes it.
        models: by name, each model's prediction.
    """

    start: int
    tokens: tuple[int, ...]
    pieces: dict[int, bytes | str]
    reference: tuple[Guess | None, ...]
    models: dict[str, tuple[Guess | None, ...]]


@dataclass(frozen=True)
class TextDetails:
    """What a page shows of a text beyond its figures: parts of it, and divergence by position
    for each model.
    """

    samples: list[TextSample]
    positions: dict[str, list[PositionDivergence]]


class Predictions:
    """A `Listener` that keeps the likeliest tokens of every position, some hundred bytes each."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []

    def __call__(self, log_p: Tensor, log_q: Tensor, kl: Tensor, targets: Tensor) -> None:
        right = targets.clamp(min=0).unsqueeze(-1)
        parts = [kl]
        for log in (log_p, log_q):
            likeliest = log.topk(min(LIKELIEST, log.shape[-1]))
            parts += [
                likeliest.indices.int(),
                likeliest.values.exp(),
                log.gather(-1, right).squeeze(-1).exp(),
            ]
        self._batches.append(tuple(parts))

    def concatenate(self) -> tuple[Tensor, ...]:
        """KL [N]; then for reference and model: tokens [N, K], probabilities [N, K], that of the
        text's token [N].
        """
        return tuple(torch.cat(parts) for parts in zip(*self._batches, strict=True))


def text_details(
    predictions: dict[str, Predictions], windows: Tensor, tokenizer: Tokenizer
) -> TextDetails:
    """Samples and divergence by position from the predictions of the models, by name, on one text,
    whose token ids are in `windows` [W, T] one after the other.
    """
    found = {name: prediction.concatenate() for name, prediction in predictions.items()}
    kls = {name: tensors[0].clamp(min=0) for name, tensors in found.items()}
    samples = []
    for some in _parts(kls, windows.flatten().tolist(), tokenizer):
        samples.append(_sample(found, windows, some, tokenizer))
    buckets = {}
    for name, tensors in found.items():
        agreed = tensors[1][:, 0] == tensors[4][:, 0]
        buckets[name] = position_buckets(
            kls[name].view_as(windows), agreed.view_as(windows), _FIRST_POSITIONS
        )
    return TextDetails(samples, buckets)


def _parts(kls: dict[str, Tensor], ids: Sequence[int], tokenizer: Tokenizer) -> list[range]:
    """Return the beginning of a text, and the later part where models, equally weighted, diverge
    most; a short text whole.
    """
    count = len(ids)
    if count <= 2 * SAMPLE_TOKENS:
        return [range(count)]
    total = sum(
        (kl / max(kl.mean().item(), 1e-30) for kl in kls.values()),
        torch.zeros(count, dtype=torch.float64),
    )
    before = torch.cat([torch.zeros(1, dtype=torch.float64), total.cumsum(0)])
    sums = before[SAMPLE_TOKENS:] - before[:-SAMPLE_TOKENS]
    worst = SAMPLE_TOKENS + int(sums[SAMPLE_TOKENS:].argmax())
    for start in range(worst, max(worst - _MAX_SHIFT, SAMPLE_TOKENS) - 1, -1):
        begins = _pieces(tokenizer, [ids[start]])[ids[start]]
        if isinstance(begins, bytes) and begins[:1].isspace():
            worst = start
            break
    return [range(SAMPLE_TOKENS), range(worst, worst + SAMPLE_TOKENS)]


def _sample(
    predictions: dict[str, tuple[Tensor, ...]], windows: Tensor, places: range, tokenizer: Tokenizer
) -> TextSample:
    """Return one part; a token is predicted one position before it, except the first of a
    window.
    """
    length = windows.shape[1]
    ids = windows.flatten()
    rows = []
    for place in places:
        rows.append(place - 1 if place % length else None)

    def guess(kls: Tensor, of_model: Sequence[Tensor], row: int | None) -> Guess | None:
        if row is None:
            return None
        tokens, probabilities, right = (tensor[row] for tensor in of_model)
        return Guess(
            tuple(tokens.tolist()),
            tuple(probabilities.tolist()),
            right.item(),
            max(kls[row].item(), 0.0),
        )

    kl, *first = next(iter(predictions.values()))[:4]
    reference = tuple(guess(torch.zeros_like(kl), first, row) for row in rows)
    models = {}
    for name, tensors in predictions.items():
        models[name] = tuple(guess(tensors[0], tensors[4:7], row) for row in rows)
    tokens = tuple(ids[places.start : places.stop].tolist())
    every = []
    for some in (reference, *models.values()):
        for one in some:
            if one is not None:
                every.append(one)
    named = [*tokens, *(token for one in every for token in one.tokens)]
    return TextSample(places.start, tokens, _pieces(tokenizer, named), reference, models)


def _pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> dict[int, bytes | str]:
    """Return the bytes of tokens; names for those without."""
    names = {number: name for name, number in (tokenizer.special_tokens or {}).items()}
    names |= dict.fromkeys(tokenizer.eos_ids, "EOS") | (
        {} if tokenizer.bos_id is None else {tokenizer.bos_id: "BOS"}
    )

    def encode_token(token: int) -> bytes:
        if tokenizer.token_bytes is None:
            return tokenizer.decode([token]).encode()
        return tokenizer.token_bytes.of(token) or b""

    pieces: dict[int, bytes | str] = {}
    for token in sorted(set(tokens)):
        pieces[token] = names.get(token) or encode_token(token) or f"token {token}"
    return pieces
