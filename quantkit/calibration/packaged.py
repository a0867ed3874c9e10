"""Samples of the text that ships with the package: every kind of it in proportion, dialogues as the model is told them,
and nothing that the model does not predict at all."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.data import Calibration, tokenized
from quantkit.data.files import CALIBRATION
from quantkit.errors import CheckpointError, NonFiniteError, RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.progress import Progress, silent
from quantkit.quality.measures import token_losses
from quantkit.text.chat import Chat
from quantkit.text.template_process import Budget
from quantkit.text.tokenizer import Tokenizer

PACKAGED = "packaged"
"""What the manifest calls the text."""

PREFIX = 64
"""Tokens of a piece that tell whether the source predicts it."""
ROUNDS = 3
"""Of drawing, as a rule, so that others take the places of those that are dropped."""
_LEAST_PREFIX = 8  # of fewer tokens a mean loss tells nothing
_NEAR_UNIFORM = 0.85  # of the loss of a uniform guess, on the prefix
_MORE_ROUNDS = 3  # of those kinds of which nothing has been dropped
_SPREAD = 4  # times the tokens that are drawn of a kind are taken of its documents
_MOST_PASSES = 2  # through the text, in windows that overlap
_LEAST_DISTINCT = 16  # tokens that a text is made of
_BETWEEN = "\n\n"
_TEMPLATE_SECONDS = 60.0  # of a chat template for all dialogues
_TEMPLATE_LENGTH = 1 << 22


NearUniform = Callable[[Sequence[Tensor]], list[bool]]


@dataclass(frozen=True)
class _Kind:
    """All documents of a kind, one after the other.

    Attributes:
        weight: the kind's share of the whole text, in bytes.
        tokens: [L].
    """

    name: str
    weight: int
    tokens: Tensor


@dataclass(frozen=True)
class PackagedText:
    """The text as a model's tokenizer sees it.

    Attributes:
        sha256: of its file.
        lead: BOS, where the tokenizer leads a text by it.
        notes: for the user.
    """

    sha256: str
    lead: tuple[int, ...]
    kinds: tuple[_Kind, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat: Chat | None, *, seed: int, wanted: int) -> PackagedText:
        """Tokenize it, the documents of each kind in an order that the seed decides.

        Args:
            chat: what dialogues are rendered by; None for a base model, which reads them as plain text.
            wanted: how many tokens will be drawn; no more of the text is taken than these can be spread over.

        Raises:
            RequestError: if the tokenizer makes next to nothing of it.
        """
        raw = CALIBRATION.read_bytes()
        documents: dict[str, list[dict[str, Any]]] = {}
        for line in raw.decode().splitlines():
            document = json.loads(line)
            documents.setdefault(document["kind"], []).append(document)
        weights = {name: sum(len(_plain(one).encode()) for one in own) for name, own in documents.items()}
        generator = torch.Generator().manual_seed(seed)
        budget = Budget(_TEMPLATE_SECONDS, _TEMPLATE_LENGTH, repeatable=True)
        kinds: list[_Kind] = []
        told: list[list[int] | None] = []
        for name, own in documents.items():
            ids: list[int] = []
            enough = _SPREAD * wanted * weights[name] // sum(weights.values())
            for index in torch.randperm(len(own), generator=generator).tolist():
                if len(ids) > enough:
                    break
                found = _document_tokens(own[index], tokenizer, chat, budget)
                if "messages" in own[index]:
                    told.append(found)
                ids += found or ()
            if ids:
                kinds.append(_Kind(name, weights[name], torch.tensor(ids)))
        if budget.seconds <= 0:  # how many dialogues were rendered in time depends on the machine: none is used
            told = [None for kind in documents.values() for one in kind if "messages" in one]
            kinds = [kind for kind in kinds if not any("messages" in one for one in documents[kind.name])]
        if len({token for kind in kinds for token in kind.tokens.tolist()}) < _LEAST_DISTINCT:
            raise RequestError(
                "the tokenizer makes next to nothing of the calibration text",
                found=f"{sum(len(kind.tokens) for kind in kinds)} tokens", expected=f"{_LEAST_DISTINCT} different ones",
                hint='give text with `calibration`, or round with `method="rtn"`',
            )  # fmt: skip
        lead, _ = tokenized("a", tokenizer)
        return cls(hashlib.sha256(raw).hexdigest(), tuple(lead), tuple(kinds), _template_notes(told, budget))

    def require(self, samples: int, length: int) -> None:
        """
        Raises:
            RequestError: if so many samples of so many tokens are more than the text is good for.
        """
        _require_held(samples, length, sum(len(kind.tokens) for kind in self.kinds))

    def draw(self, *, samples: int, length: int, seed: int, near_uniform: NearUniform) -> Calibration:
        """Samples [N, T] of all kinds in proportion. What the source predicts nearly uniformly is dropped, and other
        pieces drawn in its place where the text has any.

        Args:
            near_uniform: says of pieces of one kind which these are; where they leave less than a sample, none is
                dropped.

        Raises:
            RequestError: as `require` does.
        """
        self.require(samples, length)
        generator = torch.Generator().manual_seed(seed)
        size = length - len(self.lead)
        kinds, missing = list(self.kinds), samples * size
        whole: list[Tensor] = []
        kept: list[Tensor] = []
        seen: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        notes = list(self.notes)
        for number in range(ROUNDS + _MORE_ROUNDS):
            if number >= ROUNDS:
                kinds = [kind for kind in kinds if not dropped[kind.name]] or kinds
            pieces = self._pieces(kinds, missing, size, generator)
            found = near_uniform([torch.tensor([*self.lead, *piece.tolist()]) for _, piece in pieces])
            whole = whole or [piece for _, piece in pieces]
            kept += [piece for (_, piece), one in zip(pieces, found, strict=True) if not one]
            seen.update(name for name, _ in pieces)
            dropped.update(name for (name, _), one in zip(pieces, found, strict=True) if one)
            kinds = [kind for kind in kinds if 2 * dropped[kind.name] <= seen[kind.name]]
            room = _MOST_PASSES * sum(len(kind.tokens) for kind in kinds)
            missing = min(samples * size, room) - sum(map(len, kept))
            if missing <= 0:
                break
        if sum(map(len, kept)) < size:
            notes.append("the source predicts all of the calibration text nearly uniformly; nothing is dropped")
            kept, dropped = whole, Counter()
        if dropped:
            told = ", ".join(f"{name} {count}" for name, count in dropped.most_common())
            notes.append(f"dropped from the calibration samples, as the source predicts them nearly uniformly: {told}")
        tokens = self._joined(kept, size)
        if len(tokens) < samples:
            notes.append(f"{len(tokens)} calibration samples are drawn, not {samples}: the text has no more to keep")
        order = torch.randperm(len(tokens), generator=generator)
        return Calibration(tokens[order], self.sha256, seed, PACKAGED, dict(dropped.most_common()), tuple(notes))

    def _pieces(
        self, kinds: Sequence[_Kind], count: int, size: int, generator: torch.Generator
    ) -> list[tuple[str, Tensor]]:
        """Pieces of documents of so many tokens together, each of one kind and no longer than a sample, by their kinds,
        which get their shares by weight.

        Those of a kind begin at even distances in its documents.
        """
        pieces = []
        for kind, own in zip(kinds, _apportioned(count, [kind.weight for kind in kinds]), strict=True):
            full, rest = divmod(own, size)
            sizes = [size] * full + [rest] * (rest > 0)
            offset = int(torch.randint(len(kind.tokens), (1,), generator=generator))
            for index, one in enumerate(sizes):
                start = offset + index * len(kind.tokens) // len(sizes)
                pieces.append((kind.name, kind.tokens[torch.arange(start, start + one) % len(kind.tokens)]))
        return pieces

    def _joined(self, pieces: Sequence[Tensor], size: int) -> Tensor:
        """Samples [N, T] of pieces, of which those that do not fill one share some; what fills none is left out."""
        tokens = torch.cat(sorted(pieces, key=len, reverse=True))
        windows = tokens[: len(tokens) // size * size].view(-1, size)
        lead = torch.tensor(self.lead, dtype=torch.long).expand(len(windows), len(self.lead))
        return torch.cat([lead, windows], dim=1)


def near_uniform_pieces(
    source: Checkpoint, pieces: Sequence[Tensor], choices: int, progress: Progress = silent
) -> list[bool]:
    """Which pieces [T] of a text a source predicts hardly better than by a uniform guess among so many tokens, by their
    first tokens; none of a source whose logits are NaN or Inf, and none that are too short to tell."""
    by_length: dict[int, list[int]] = {}
    for number, piece in enumerate(pieces):
        if len(piece) >= _LEAST_PREFIX:
            by_length.setdefault(min(len(piece), PREFIX), []).append(number)
    texts = [torch.stack([pieces[number][:length] for number in own]) for length, own in by_length.items()]
    found = [False] * len(pieces)
    try:
        losses = token_losses(source, texts, progress=progress) if texts else []
    except NonFiniteError:
        return found  # the check of the source tells it, where it is wanted
    for own, of_own in zip(by_length.values(), losses, strict=True):
        for number, loss in zip(own, of_own.mean(1).tolist(), strict=True):
            found[number] = loss >= _NEAR_UNIFORM * math.log(choices)
    return found


def require_plausible(samples: int, length: int) -> None:
    """Check, without a tokenizer, that the text is not far too short: it is of fewer tokens than bytes.

    Raises:
        RequestError: as `PackagedText.require` does.
    """
    _require_held(samples, length, CALIBRATION.stat().st_size)


def _require_held(samples: int, length: int, tokens: int) -> None:
    """
    Raises:
        RequestError: if so many samples of so many tokens are more than a text of some tokens is good for.
    """
    if samples * length > _MOST_PASSES * tokens:
        raise RequestError(
            "the packaged calibration text is too short", found=f"{samples} samples of {length} tokens",
            expected=f"at most {_MOST_PASSES * tokens // length}",
            hint="give text of your own with `calibration`, or fewer `samples`",
        )  # fmt: skip


def _document_tokens(
    document: Mapping[str, Any], tokenizer: Tokenizer, chat: Chat | None, budget: Budget
) -> list[int] | None:
    """What a document is to a model; None for a dialogue that its template refuses, or has no steps left for."""
    if chat is None or "messages" not in document:
        return tokenizer.encode(_plain(document) + _BETWEEN, bos=False)
    for messages in _tellings(document["messages"]):
        try:
            ids = chat.encode(messages, add_generation_prompt=False, budget=budget)
        except (RequestError, CheckpointError):
            continue
        return ids[1:] if tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id] else ids
    return None


def _template_notes(told: Sequence[Sequence[int] | None], budget: Budget) -> tuple[str, ...]:
    """What there is to say of what a template made of the dialogues; None is one that was refused."""
    notes = []
    if refused := sum(one is None for one in told):
        reason = "takes too long over them" if budget.spent else "refuses them"
        notes.append(f"{refused} dialogues of the calibration text are left out: the chat template {reason}")
    made = Counter(tuple(one) for one in told if one is not None)
    if empty := made.pop((), 0):
        notes.append(f"the chat template makes nothing of {empty} dialogues of the calibration text")
    if len(made) == 1 and made.total() > 1:
        notes.append(f"the chat template makes the same of all {made.total()} dialogues of the calibration text")
    return tuple(notes)


def _tellings(messages: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """A dialogue, and one that says the same to templates that know no system message."""
    yield messages
    if messages[0]["role"] == "system":
        yield messages[1:]


def _plain(document: Mapping[str, Any]) -> str:
    """A document as text."""
    if "messages" not in document:
        return str(document["text"])
    return "\n\n".join(f"{one['role'].capitalize()}: {one['content']}" for one in document["messages"])


def _apportioned(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of a total by weight."""
    ends = list(itertools.accumulate(weights, initial=0))
    return [total * end // ends[-1] - total * begin // ends[-1] for begin, end in itertools.pairwise(ends)]
