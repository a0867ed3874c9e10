"""Samples of the packaged calibration text: all kinds of documents in proportion, dialogues in the
chat template, without pieces that the model predicts nearly uniformly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.calibration.conversations import TEMPLATE_SECONDS, plain, render_conversation
from quantkit.calibration.data import Calibration
from quantkit.data.files import CALIBRATION
from quantkit.errors import CheckpointError, NonFiniteError, RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.quality.measures import token_losses
from quantkit.text.chat import TemplateChat
from quantkit.text.template_process import Budget
from quantkit.text.tokenizer import Tokenizer, prompt_start

PACKAGED = "packaged"
"""The name of the text in the manifest."""

PREFIX = 64
"""Tokens of a piece that show whether the source predicts it."""
# Rounds of drawing by default, as dropped pieces are replaced by others.
_ROUNDS = 3
# Tokens; a mean loss over fewer says nothing.
_MIN_PREFIX = 8
# Of the loss of a uniform guess, on the prefix.
_NEAR_UNIFORM = 0.85
_MORE_ROUNDS = 3  # for kinds of which no piece has been dropped
# Pieces of a kind that are tried first, and their tokens. Fewer tokens have larger losses, as the
# first ones have little context.
_FEW = 2
_SHORT_PREFIX = 32
# Of the loss of a uniform guess, on the short prefix. If the pieces that are tried have no more,
# the other pieces of their kind are far from a loss that is nearly uniform: pieces of a kind differ
# by 0.2 at most in a model that predicts the kind well.
_CLEARLY_PREDICTED = 0.6
# Documents of these kinds differ in language, so that a few say nothing about the others.
_MIXED_KINDS = ("languages", "dialogue-languages", "code")
# Tokenized tokens of a kind per token drawn.
_SPREAD = 4
# Through the text, in windows that overlap.
_MAX_PASSES = 2
_MIN_DISTINCT = 16  # different tokens
_BETWEEN = "\n\n"
TEMPLATE_LENGTH = 1 << 22
# For estimates: kinds of the packaged text, and the share of pieces in kinds of which all are
# tried.
_NUM_KINDS = 27
_DOUBTFUL_SHARE = 0.25

LossMeasure = Callable[[Sequence[Tensor]], list[float]]
"""Measures the mean loss of the beginnings [T] of pieces, in units of the loss of a uniform guess;
see `measure_losses_of_source`.
"""


@dataclass(frozen=True)
class _Kind:
    """The tokens [L] of all documents of a kind, and the bytes of the kind in the text."""

    name: str
    weight: int
    tokens: Tensor


@dataclass(frozen=True)
class PackagedText:
    """The text in the tokens of a model, with the sha256 of its file, BOS where the tokenizer puts
    it first, and notes for the user.
    """

    sha256: str
    lead: tuple[int, ...]
    kinds: tuple[_Kind, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, chat: TemplateChat | None, *, seed: int, token_count: int
    ) -> PackagedText:
        """Tokenize the text, the documents of each kind in an order that depends on the seed, and
        no more documents than `token_count` tokens need. `chat` renders dialogues; None is
        for a base model, which reads them as plain text. If the text has nearly no tokens, a
        `RequestError` is raised.
        """
        raw = CALIBRATION.read_bytes()
        documents: dict[str, list[dict[str, Any]]] = {}
        for line in raw.decode().splitlines():
            document = json.loads(line)
            documents.setdefault(document["kind"], []).append(document)
        weights = {
            name: sum(len(_plain(one).encode()) for one in own) for name, own in documents.items()
        }
        generator = torch.Generator().manual_seed(seed)
        budget = Budget(TEMPLATE_SECONDS, TEMPLATE_LENGTH, repeatable=True)
        kinds: list[_Kind] = []
        dialogues: list[list[int] | None] = []
        for name, own in documents.items():
            ids: list[int] = []
            enough = _SPREAD * token_count * weights[name] // sum(weights.values())
            for index in torch.randperm(len(own), generator=generator).tolist():
                if len(ids) > enough:
                    break
                found = _document_tokens(own[index], tokenizer, chat, budget)
                if "messages" in own[index]:
                    dialogues.append(found)
                ids += found or ()
            if ids:
                kinds.append(_Kind(name, weights[name], torch.tensor(ids)))
        # How many dialogues were rendered in time depends on the machine: none is used.
        if budget.seconds <= 0:
            dialogues = []
            for kind in documents.values():
                for one in kind:
                    if "messages" in one:
                        dialogues.append(None)
            kinds = [
                kind for kind in kinds if not any("messages" in one for one in documents[kind.name])
            ]
        if len({token for kind in kinds for token in kind.tokens.tolist()}) < _MIN_DISTINCT:
            raise RequestError(
                "the tokenizer yields too few distinct tokens for the calibration text",
                found=f"{sum(len(kind.tokens) for kind in kinds)} tokens",
                expected=f"{_MIN_DISTINCT} distinct tokens",
                hint=Message(
                    "provide text with ",
                    Option("calibration"),
                    ", or round with ",
                    Option("method", value="rtn"),
                ),
            )
        start = prompt_start(tokenizer)
        return cls(
            hashlib.sha256(raw).hexdigest(),
            tuple(start),
            tuple(kinds),
            _template_notes(dialogues, budget),
        )

    def require(self, samples: int, length: int) -> None:
        """`require_plausible` for the tokens of the text."""
        require_plausible(samples, length, sum(len(kind.tokens) for kind in self.kinds))

    def draw(
        self,
        *,
        samples: int,
        length: int,
        seed: int,
        measure_losses: LossMeasure,
    ) -> Calibration:
        """Samples [N, T] of all kinds in proportion. Pieces that the source predicts nearly
        uniformly are dropped, and replaced by others where the text has any; if the others are less
        than a sample, none is dropped. Raises the errors of `require`.
        """
        self.require(samples, length)
        generator = torch.Generator().manual_seed(seed)
        size = length - len(self.lead)
        kinds = list(self.kinds)
        missing = samples * size
        whole: list[Tensor] = []
        kept: list[Tensor] = []
        seen = Counter[str]()
        dropped = Counter[str]()
        notes = list(self.notes)
        judge = _Judge(self.lead, measure_losses)
        for number in range(_ROUNDS + _MORE_ROUNDS):
            if number >= _ROUNDS:
                kinds = [kind for kind in kinds if not dropped[kind.name]] or kinds
            pieces = _pieces(kinds, missing, size, generator)
            found = judge.find_near_uniform(pieces)
            whole = whole or [piece for _, piece in pieces]
            kept += [piece for (_, piece), one in zip(pieces, found, strict=True) if not one]
            seen.update(name for name, _ in pieces)
            dropped.update(name for (name, _), one in zip(pieces, found, strict=True) if one)
            kinds = [kind for kind in kinds if 2 * dropped[kind.name] <= seen[kind.name]]
            room = _MAX_PASSES * sum(len(kind.tokens) for kind in kinds)
            missing = min(samples * size, room) - sum(map(len, kept))
            if missing <= 0:
                break
        if sum(map(len, kept)) < size:
            notes.append(
                "the source predicts all of the calibration text nearly uniformly; nothing is"
                " dropped"
            )
            kept = whole
            dropped = Counter()
        if dropped:
            counts = ", ".join(f"{name} {count}" for name, count in dropped.most_common())
            reason = "as the source predicts them nearly uniformly"
            notes.append(f"dropped from the calibration samples, {reason}: {counts}")
        # Pieces shorter than a sample are joined to samples, which they may share; the rest is left
        # out.
        joined = torch.cat(sorted(kept, key=len, reverse=True))
        windows = joined[: len(joined) // size * size].view(-1, size)
        lead = torch.tensor(self.lead, dtype=torch.long).expand(len(windows), len(self.lead))
        tokens = torch.cat([lead, windows], dim=1)
        if len(tokens) < samples:
            notes.append(
                f"{len(tokens)} calibration samples are drawn, not {samples}: the text has no more"
                " to keep"
            )
        order = torch.randperm(len(tokens), generator=generator)
        return Calibration(
            tokens=tokens[order],
            sha256=self.sha256,
            seed=seed,
            source=PACKAGED,
            dropped=dict(dropped.most_common()),
            notes=tuple(notes),
        )


def _pieces(
    kinds: Sequence[_Kind], count: int, size: int, generator: torch.Generator
) -> list[tuple[str, Tensor]]:
    """Pieces of documents with `count` tokens together, each of one kind, with its name, and at
    most a sample long.

    Kinds have shares by weight; the pieces of a kind begin at equal distances in its documents.
    """
    pieces = []
    ends = list(itertools.accumulate([kind.weight for kind in kinds], initial=0))
    for kind, (begin, end) in zip(kinds, itertools.pairwise(ends), strict=True):
        full, rest = divmod(count * end // ends[-1] - count * begin // ends[-1], size)
        sizes = [size] * full + [rest] * (rest > 0)
        offset = int(torch.randint(len(kind.tokens), (1,), generator=generator))
        for index, one in enumerate(sizes):
            start = offset + index * len(kind.tokens) // len(sizes)
            pieces.append(
                (kind.name, kind.tokens[torch.arange(start, start + one) % len(kind.tokens)])
            )
    return pieces


class _Judge:
    """Finds pieces that a source predicts nearly uniformly. Only a few pieces of each kind are
    tried, and all pieces of a kind if the source does not clearly predict these few. Once a piece
    is found, all pieces of all kinds are tried, as the source lacks a part of the text.
    """

    def __init__(self, lead: Sequence[int], measure_losses: LossMeasure) -> None:
        self._lead = list(lead)
        self._measure_losses = measure_losses
        # By kind; what the first pieces of a kind have shown is also true of later ones.
        self._is_clear: dict[str, bool] = {}

    def find_near_uniform(self, pieces: Sequence[tuple[str, Tensor]]) -> list[bool]:
        """Return which pieces, each with the name of its kind, are predicted nearly uniformly."""
        self._try_new_kinds(pieces)
        result = [False] * len(pieces)
        doubtful: list[int] = []
        clear: list[int] = []
        for number, (kind, _) in enumerate(pieces):
            if self._is_clear[kind]:
                clear.append(number)
            else:
                doubtful.append(number)
        self._try_all(pieces, doubtful, result)
        if any(result):
            self._is_clear = dict.fromkeys(self._is_clear, False)
            self._try_all(pieces, clear, result)
        return result

    def _try_all(
        self, pieces: Sequence[tuple[str, Tensor]], numbers: Sequence[int], result: list[bool]
    ) -> None:
        """Write in `result` which of some pieces are predicted nearly uniformly."""
        losses = self._measure(pieces, numbers, PREFIX)
        for number, loss in zip(numbers, losses, strict=True):
            result[number] = loss >= _NEAR_UNIFORM

    def _try_new_kinds(self, pieces: Sequence[tuple[str, Tensor]]) -> None:
        """Decide for each kind that was not tried before whether the source clearly predicts it."""
        long_by_kind: dict[str, list[int]] = {}
        for number, (kind, piece) in enumerate(pieces):
            if kind in self._is_clear:
                continue
            long = long_by_kind.setdefault(kind, [])
            if len(piece) >= _SHORT_PREFIX:
                long.append(number)
        tried: list[int] = []
        for kind, long in long_by_kind.items():
            # Without a long piece, all of its pieces are tried.
            self._is_clear[kind] = bool(long)
            if kind in _MIXED_KINDS:
                tried += long
            else:
                tried += _choose_evenly(long, _FEW)
        losses = self._measure(pieces, tried, _SHORT_PREFIX)
        for number, loss in zip(tried, losses, strict=True):
            if loss > _CLEARLY_PREDICTED:
                kind, _ = pieces[number]
                self._is_clear[kind] = False

    def _measure(
        self, pieces: Sequence[tuple[str, Tensor]], numbers: Sequence[int], length: int
    ) -> list[float]:
        """Measure the losses of the first `length` tokens of some pieces."""
        prefixes = []
        for number in numbers:
            _, piece = pieces[number]
            prefixes.append(torch.tensor([*self._lead, *piece.tolist()][:length]))
        if not prefixes:
            return []
        return self._measure_losses(prefixes)


def _choose_evenly(numbers: Sequence[int], count: int) -> list[int]:
    """Choose some numbers at equal distances; all of them if there are no more than `count`."""
    if len(numbers) <= count:
        return list(numbers)
    return [numbers[(2 * index + 1) * len(numbers) // (2 * count)] for index in range(count)]


def measure_losses_of_source(
    source: Checkpoint, prefixes: Sequence[Tensor], choices: int, progress: Progress = silent
) -> list[float]:
    """Measure the mean loss of each prefix [T] of a text in a source, in units of the loss of a
    uniform guess among `choices` tokens. All are 0 if the source's logits are NaN or Inf, and so
    are those of very short prefixes.
    """
    by_length: dict[int, list[int]] = {}
    for number, prefix in enumerate(prefixes):
        if len(prefix) >= _MIN_PREFIX:
            by_length.setdefault(len(prefix), []).append(number)
    texts = []
    for numbers in by_length.values():
        texts.append(torch.stack([prefixes[number] for number in numbers]))
    result = [0.0] * len(prefixes)
    if not texts:
        return result
    try:
        losses = token_losses(source, texts, progress=progress)
    except NonFiniteError:
        # Reported by the check of the source.
        return result
    for numbers, text_losses in zip(by_length.values(), losses, strict=True):
        for number, loss in zip(numbers, text_losses.mean(1).tolist(), strict=True):
            result[number] = loss / math.log(choices)
    return result


def estimate_tried_tokens(samples: int, length: int) -> int:
    """Estimate on how many tokens a source is tried that predicts nearly all kinds of text."""
    # More pieces than the samples have are not tried; mixed kinds have few.
    pieces = min(_FEW * _NUM_KINDS, samples + _NUM_KINDS)
    doubtful = _DOUBTFUL_SHARE * samples
    return int(pieces * min(length, _SHORT_PREFIX) + doubtful * min(length, PREFIX))


def require_plausible(samples: int, length: int, tokens: int | None = None) -> None:
    """A `RequestError` if the text is too short for a number of samples; `tokens` are those of the
    text, None without a tokenizer, when its bytes are the upper bound.
    """
    if tokens is None:
        tokens = CALIBRATION.stat().st_size
    if samples * length > _MAX_PASSES * tokens:
        raise RequestError(
            "the packaged calibration text is too short",
            found=f"{samples} samples of {length} tokens",
            expected=f"at most {_MAX_PASSES * tokens // length}",
            hint=Message(
                "provide your own text with ",
                Option("calibration"),
                ", or fewer ",
                Option("samples"),
            ),
        )


def _document_tokens(
    document: Mapping[str, Any], tokenizer: Tokenizer, chat: TemplateChat | None, budget: Budget
) -> list[int] | None:
    """Return the tokens of a document; None for a dialogue that the chat template refuses, or for
    which no time is left.
    """
    if chat is None or "messages" not in document:
        return tokenizer.encode(_plain(document) + _BETWEEN, bos=False)
    try:
        ids = tokenizer.encode(
            render_conversation(document["messages"], chat, budget), specials=True, bos=False
        )
    except (RequestError, CheckpointError):
        return None
    # Samples get it again; SmolLM2's BOS is a message's first token, which stays.
    start = prompt_start(tokenizer)
    if ids[: len(start)] == start:
        return ids[len(start) :]
    return ids


def _template_notes(dialogues: Sequence[Sequence[int] | None], budget: Budget) -> tuple[str, ...]:
    """Return notes on the tokens of rendered dialogues; None is a dialogue that the template
    refused.
    """
    refused = sum(dialogue is None for dialogue in dialogues)
    if not refused:
        return ()
    if budget.spent:
        reason = "takes too long over them"
    else:
        reason = "refuses them, or drops parts of them"
    return (
        f"{refused} dialogues of the calibration text are left out: the chat template {reason}",
    )


def _plain(document: Mapping[str, Any]) -> str:
    """Return a document as text."""
    if "messages" in document:
        return plain(document["messages"])
    return str(document["text"])
