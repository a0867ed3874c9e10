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
# Of the first bucket. With the usual 128, a window of 256 tokens would have two buckets only.
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
        # Targets that are not scored are negative, which is no index; no sample shows them.
        target_indices = targets.clamp(min=0).unsqueeze(-1)
        parts = [kl]
        for log_probabilities in (log_p, log_q):
            likeliest = log_probabilities.topk(min(LIKELIEST, log_probabilities.shape[-1]))
            target_probabilities = log_probabilities.gather(-1, target_indices).squeeze(-1).exp()
            # Half the size of the 64-bit indices that `topk` returns.
            parts += [likeliest.indices.int(), likeliest.values.exp(), target_probabilities]
        self._batches.append(tuple(parts))

    def concatenate(self) -> tuple[Tensor, ...]:
        """Join the batches: KL [N]; then for reference and model: tokens [N, K], probabilities
        [N, K], that of the text's token [N].
        """
        return tuple(torch.cat(parts) for parts in zip(*self._batches, strict=True))


def text_details(
    predictions: dict[str, Predictions], windows: Tensor, tokenizer: Tokenizer
) -> TextDetails:
    """Build samples and divergence by position from the predictions of the models, by name, on one
    text, whose token ids are in `windows` [W, T] one after the other.
    """
    tensors_by_model = {}
    kls = {}
    buckets = {}
    for name, prediction in predictions.items():
        tensors = prediction.concatenate()
        # The likeliest token of the reference and of the model.
        agreed = tensors[1][:, 0] == tensors[4][:, 0]
        tensors_by_model[name] = tensors
        # KL cannot be negative, but sums are rounded.
        kls[name] = tensors[0].clamp(min=0)
        buckets[name] = position_buckets(
            kls[name].view_as(windows), agreed.view_as(windows), _FIRST_POSITIONS
        )
    samples = []
    for places in _choose_parts(kls, windows.flatten().tolist(), tokenizer):
        samples.append(_build_sample(tensors_by_model, windows, places, tokenizer))
    return TextDetails(samples, buckets)


def _choose_parts(kls: dict[str, Tensor], ids: Sequence[int], tokenizer: Tokenizer) -> list[range]:
    """Choose the beginning of a text, and the later part where models, equally weighted, diverge
    most; a short text whole.
    """
    count = len(ids)
    if count <= 2 * SAMPLE_TOKENS:
        return [range(count)]
    total = torch.zeros(count, dtype=torch.float64)
    for kl in kls.values():
        # Divided by its mean, since a model that diverges much would decide alone. A model that is
        # equal to the reference has a mean of 0.
        total = total + kl / max(kl.mean().item(), 1e-30)
    # The difference of two cumulative sums is the sum of the tokens between them.
    sums_before = torch.cat([torch.zeros(1, dtype=torch.float64), total.cumsum(0)])
    part_sums = sums_before[SAMPLE_TOKENS:] - sums_before[:-SAMPLE_TOKENS]
    # The first part has the earlier tokens already.
    worst = SAMPLE_TOKENS + int(part_sums[SAMPLE_TOKENS:].argmax())
    earliest = max(worst - _MAX_SHIFT, SAMPLE_TOKENS)
    for start in range(worst, earliest - 1, -1):
        piece = _pieces(tokenizer, [ids[start]])[ids[start]]
        # A token that begins with white space begins a word.
        if isinstance(piece, bytes) and piece[:1].isspace():
            worst = start
            break
    return [range(SAMPLE_TOKENS), range(worst, worst + SAMPLE_TOKENS)]


def _build_sample(
    predictions: dict[str, tuple[Tensor, ...]], windows: Tensor, places: range, tokenizer: Tokenizer
) -> TextSample:
    """Build one part; a token is predicted one position before it, except the first of a
    window.
    """
    window_length = windows.shape[1]

    def guess_tokens(kls: Tensor, tensors: Sequence[Tensor]) -> tuple[Guess | None, ...]:
        guesses: list[Guess | None] = []
        for place in places:
            if place % window_length == 0:
                guesses.append(None)
                continue
            row = place - 1
            tokens, probabilities, right = (tensor[row] for tensor in tensors)
            guess = Guess(
                tuple(tokens.tolist()),
                tuple(probabilities.tolist()),
                right.item(),
                max(kls[row].item(), 0.0),
            )
            guesses.append(guess)
        return tuple(guesses)

    # The predictions of the reference are the same in the tensors of every model; its KL from
    # itself is 0.
    kl, *reference_tensors = next(iter(predictions.values()))[:4]
    reference = guess_tokens(torch.zeros_like(kl), reference_tensors)
    models = {}
    for name, tensors in predictions.items():
        models[name] = guess_tokens(tensors[0], tensors[4:7])
    tokens = tuple(windows.flatten()[places.start : places.stop].tolist())
    # A page shows the text's tokens and those that are predicted.
    shown_tokens = list(tokens)
    for guesses in (reference, *models.values()):
        for guess in guesses:
            if guess is not None:
                shown_tokens += guess.tokens
    return TextSample(
        start=places.start,
        tokens=tokens,
        pieces=_pieces(tokenizer, shown_tokens),
        reference=reference,
        models=models,
    )


def _pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> dict[int, bytes | str]:
    """Look up the bytes of tokens; names for those without."""
    # The roles of EOS and BOS say more than a tokenizer's own names for them.
    names = {token: name for name, token in (tokenizer.special_tokens or {}).items()}
    names |= dict.fromkeys(tokenizer.eos_ids, "EOS")
    if tokenizer.bos_id is not None:
        names[tokenizer.bos_id] = "BOS"

    def encode_token(token: int) -> bytes:
        if tokenizer.token_bytes is None:
            return tokenizer.decode([token]).encode()
        return tokenizer.token_bytes.of(token) or b""

    pieces: dict[int, bytes | str] = {}
    for token in sorted(set(tokens)):
        pieces[token] = names.get(token) or encode_token(token) or f"token {token}"
    return pieces
