"""Calibration text: read, tokenized, and cut into samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.base.arguments import as_seed
from quantkit.base.late import LateFunction
from quantkit.base.messages import Message, Option
from quantkit.calibration.conversations import ModelChat
from quantkit.errors import RequestError
from quantkit.text.tokenizer import Tokenizer, prompt_start

# The packaged text is read without these.
if TYPE_CHECKING:
    from quantkit.calibration.collector import DocumentText
    from quantkit.calibration.documents import TextSource, read_documents
else:
    read_documents = LateFunction("quantkit.calibration.documents:read_documents")

SELF = "self"
"""The text that the float model writes itself, as an option and in the manifest."""

# How much of the text is read: four times the samples in English, and at least 4 MiB.
BYTES_PER_TOKEN = 16
MIN_BYTES = 4 * 2**20
MAX_WHOLE_LENGTH = 2**18
CHARACTERS_PER_TOKEN = 8
MAX_REUSE = 4
"""How often samples may use a token of the text on average: more of them would tell the solver
nothing new.
"""
# A thousand times the default; more are a typing error.
_MAX_TOKENS = 1 << 28


@dataclass(frozen=True)
class Calibration:
    """Samples [N, T] of token ids, int64, and their entry in the manifest.

    ``sha256`` is the file's or, without a file, that of the text read; ``source`` names a dataset
    on a hub. ``documents`` is the number of those read, None for plain text. ``dropped`` counts, by
    kind, the samples of the packaged text that the source predicts nearly uniformly, or those in
    which it repeats itself; ``notes`` are for the user. ``temperatures`` and ``has_conversations``
    are those of text that the source has written itself.
    """

    tokens: Tensor
    sha256: str
    seed: int
    source: str | None = None
    dropped: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()
    documents: int | None = None
    temperatures: tuple[float, ...] | None = None
    has_conversations: bool | None = None

    def fingerprint(self) -> str:
        """Return the same for equal samples."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def to_json(self) -> dict[str, object]:
        samples, length = self.tokens.shape
        result: dict[str, object] = {
            "sha256": self.sha256,
            "samples": samples,
            "length": length,
            "seed": self.seed,
        }
        named = {"source": self.source, "documents": self.documents}
        result |= {name: value for name, value in named.items() if value is not None}
        if self.temperatures is not None:
            result["temperatures"] = list(self.temperatures)
        if self.has_conversations is not None:
            result["conversations"] = self.has_conversations
        if self.dropped is not None:
            result |= {"dropped": sum(self.dropped.values()), "dropped_kinds": dict(self.dropped)}
        return result


def is_self(source: object) -> bool:
    """Return whether a source is the float model itself; a file of that name is a `Path`, or
    ``./self``.
    """
    return isinstance(source, str) and source == SELF


def load_calibration(
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    samples: int,
    length: int,
    seed: int,
    column: str | None = None,
    chat: ModelChat | None = None,
) -> Calibration:
    """Draw samples at random positions of the text, each with BOS first where the tokenizer puts
    it.

    No sample is padded. torch's global random state is not used. If the text is long, only the
    first 16 bytes for each token drawn, or the first 4 MiB if that is more, are read; if it has
    more than 256 Ki characters, only the samples are tokenized.

    Args:
        source: a file or folder; as a string where there is no such file, a dataset on the hub:
            ``owner/name``, ``owner/name:config`` or ``owner/name:config:split``; or documents in
            Python. See `read_documents`.
        samples, length: the number of samples, and of tokens in each, BOS included.
        seed: for the positions.
        column, chat: see `read_documents`.

    Raises:
        RequestError: if the text cannot be read, holds less than one sample or less than a quarter
            of the tokens that are drawn, or the seed does not fit 64 bits.
    """
    found = _read(source, samples, length, seed, column, chat)
    text = found.text
    specials = found.specials
    path = _describe_source(source)
    generator = torch.Generator().manual_seed(seed)
    _require_enough_text(text, tokenizer, samples, length, path, specials=specials)
    tokens = None
    if len(text) > max(MAX_WHOLE_LENGTH, CHARACTERS_PER_TOKEN * length):
        tokens = _from_pieces(text, tokenizer, samples, length, generator, specials)
    if tokens is None:
        lead, ids = _tokenize_sample(text, tokenizer, length, path, specials)
        size = length - len(lead)
        starts = torch.randint(len(ids) - size + 1, (samples,), generator=generator)
        windows = torch.tensor(ids).unfold(0, size, 1)[starts]
        tokens = torch.cat(
            [torch.tensor(lead, dtype=torch.long).expand(samples, len(lead)), windows], dim=1
        )
    if found.documents is None:
        count = None
    else:
        count = len(found.documents)
    return Calibration(tokens, found.sha256, seed, found.source, notes=found.notes, documents=count)


def require_calibration(
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    samples: int,
    length: int,
    seed: int,
    column: str | None = None,
    chat: ModelChat | None = None,
) -> None:
    """Make the checks of `load_calibration`, which raise its errors, without drawing samples."""
    found = _read(source, samples, length, seed, column, chat)
    text = found.text
    specials = found.specials
    _require_enough_text(
        text, tokenizer, samples, length, _describe_source(source), specials=specials
    )
    beginning = text[: max(MAX_WHOLE_LENGTH, CHARACTERS_PER_TOKEN * length)]
    lead, ids = tokenize_text(beginning, tokenizer, specials=specials)
    if len(lead) + len(ids) < length:
        _tokenize_sample(text, tokenizer, length, _describe_source(source), specials)


def require_samples(samples: int, length: int) -> None:
    """A `RequestError` if there is no sample, it has no token to predict, or there are more than
    any machine holds.
    """
    if samples < 1 or length < 2:
        raise RequestError(
            "calibration needs at least 1 sample of 2 tokens", found=f"{samples} of {length}"
        )
    if samples * length > _MAX_TOKENS:
        raise RequestError(
            "too many calibration tokens",
            found=f"{samples} samples of {length} tokens",
            expected=f"at most {_MAX_TOKENS} tokens in all",
            hint=Message("give fewer ", Option("samples")),
        )


def _describe_source(source: TextSource) -> str | Path:
    """Return a source as errors name it."""
    if isinstance(source, str | Path):
        return source
    return "calibration"


def _read(
    source: TextSource,
    samples: int,
    length: int,
    seed: int,
    column: str | None,
    chat: ModelChat | None,
) -> DocumentText:
    """Return the text that the samples need."""
    as_seed("seed", seed)
    require_samples(samples, length)
    limit = max(BYTES_PER_TOKEN * samples * length, MIN_BYTES)
    documents = read_documents(source, limit, column=column, chat=chat)
    if not documents.text.strip():
        raise RequestError("the calibration text is empty", path=_describe_source(source))
    if samples > len(documents.text):
        raise RequestError(
            "more samples than characters in the calibration text",
            path=_describe_source(source),
            found=f"{samples} samples",
            expected=f"at most {len(documents.text)}",
            hint=Message("give more text, or fewer ", Option("samples")),
        )
    return documents


def _require_enough_text(
    text: str, tokenizer: Tokenizer, samples: int, length: int, path: str | Path, *, specials: bool
) -> None:
    """Raise a `RequestError` if samples would repeat the text more than `MAX_REUSE` times.

    The tokens of a long text are estimated from its beginning; they are not counted if it has
    plenty of characters.
    """
    required = math.ceil(samples * length / MAX_REUSE)
    if len(text) >= CHARACTERS_PER_TOKEN * required:
        return
    beginning = text[:MAX_WHOLE_LENGTH]
    lead, ids = tokenize_text(beginning, tokenizer, specials=specials)
    num_tokens = round(len(ids) * len(text) / len(beginning))
    # A text shorter than one sample has another error.
    if not length - len(lead) <= num_tokens < required:
        return
    fitting = MAX_REUSE * num_tokens // length
    raise RequestError(
        "the calibration text is too short for this number of samples",
        path=path,
        found=f"{num_tokens} tokens for {samples} samples of {length}",
        expected=(
            f"at least {required} tokens, about {math.ceil(required / num_tokens)} times as much"
            " text"
        ),
        hint=Message("give more text, or ", Option("samples", value=fitting)),
    )


def _tokenize_sample(
    text: str, tokenizer: Tokenizer, length: int, path: str | Path, specials: bool
) -> tuple[list[int], list[int]]:
    """As `tokenize_text`; a text with less than one sample is a `RequestError`."""
    lead, ids = tokenize_text(text, tokenizer, specials=specials)
    size = length - len(lead)
    if len(ids) < size:
        raise RequestError(
            "the calibration text is shorter than one sample",
            path=path,
            found=f"{len(ids)} tokens",
            expected=size,
            hint="give more text, or shorter samples",
        )
    return lead, ids


def _from_pieces(
    text: str,
    tokenizer: Tokenizer,
    samples: int,
    length: int,
    generator: torch.Generator,
    specials: bool,
) -> Tensor | None:
    """Samples [N, T], each the first tokens after a random space; None if a piece of the text
    has too few.
    """
    width = CHARACTERS_PER_TOKEN * length
    rows = []
    for start in torch.randint(len(text) - width + 1, (samples,), generator=generator).tolist():
        piece = text[start : start + width]
        word = next((i for i, letter in enumerate(piece) if letter.isspace()), 0)
        lead, ids = tokenize_text(piece[word:].lstrip(), tokenizer, specials=specials)
        # The last word may be cut.
        if len(lead) + len(ids) <= length:
            return None
        rows.append([*lead, *ids][:length])
    return torch.tensor(rows)


def tokenize_text(
    text: str, tokenizer: Tokenizer, *, specials: bool = False
) -> tuple[list[int], list[int]]:
    """Return the tokens that a prompt begins with, such as BOS, and the tokens of a text after
    them.
    """
    start = prompt_start(tokenizer)
    ids = tokenizer.encode(text, specials=specials)
    return start, ids[len(start) :]
