"""Texts to measure on, as in lm-evaluation-harness: read, tokenized, and the perplexity of their
documents.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from quantkit.base.progress import Progress, silent
from quantkit.calibration.conversations import ModelChat
from quantkit.calibration.documents import has_documents, read_documents
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.located import text_of
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.quality.measures import NOT_SCORED, Windows, log_loss, perplexity
from quantkit.text.export import export_json
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

_TITLE = re.compile(r"^ = (?!=).*(?<!=) = $", re.MULTILINE)
# Bytes; in languages with spaces a word has some 5 to 20.
_LONG_WORDS = 40


@dataclass(frozen=True)
class Text:
    """A text as it is in its file, `raw`, with the file's sha256 and a name for tables; and its
    documents.

    WikiText's raw form, known by its title lines (`` = Title = ``), is one document per article, as
    in the data set of lm-evaluation-harness's task; any other plain text is one document. JSON
    lines, Parquet and folders of `datasets` have `rows`; `in_template` is set if these are
    conversations in a chat template. `notes` are for the user.
    """

    name: str
    sha256: str
    raw: str
    rows: tuple[str, ...] | None = None
    in_template: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def is_wikitext(self) -> bool:
        return self.rows is None and _TITLE.search(self.raw) is not None

    @cached_property
    def documents(self) -> list[str]:
        """Return the documents as they are in the file."""
        if self.rows is not None:
            return [*self.rows]
        if self.is_wikitext:
            return articles(self.raw)
        return [self.raw]

    @property
    def readings(self) -> list[str]:
        """Return the documents that a model predicts: WikiText detokenized, others unchanged."""
        if self.is_wikitext:
            return [detokenize(document) for document in self.documents]
        return self.documents

    @property
    def words(self) -> int:
        """Return the harness's count: pieces between white space, empty ones at the ends
        included.
        """
        return sum(len(re.split(r"\s+", document)) for document in self.documents)

    @property
    def bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)

    @property
    def note(self) -> str | None:
        """Return a note on figures per word for texts with few spaces, as in Chinese or Thai."""
        if self.bytes <= _LONG_WORDS * self.words:
            return None
        return (
            f"the text '{self.name}' has few spaces, so word ppl is not meaningful for it; see"
            " bits/byte"
        )


def read_text(
    source: Path | Iterable[object],
    column: str | None = None,
    chat: ModelChat | None = None,
    name: str | None = None,
) -> Text:
    """Return a text from a file or folder, or under a name from a dataset, strings or rows;
    `column` and `chat` are those of `read_documents`.

    Raises:
        RequestError: if it cannot be read, is not what its suffix says, or has nothing but white
            space.
    """
    own = name or (source.stem if isinstance(source, Path) else "text")
    if isinstance(source, Path) and column is None and not has_documents(source):
        text, digest = text_of(source)
        return Text(own, digest, text)
    documents = read_documents(source, sys.maxsize, column=column, chat=chat, name=own)
    rows = tuple(document for document in documents.documents or () if document.strip())
    if not rows:
        raise RequestError("the text is empty", path=source if isinstance(source, Path) else own)
    return Text(own, documents.sha256, documents.text, rows, documents.specials, documents.notes)


def articles(raw: str) -> list[str]:
    """WikiText's articles, each from its title line to the line before the next title.

    The line break before a title belongs to neither side, as in the data set
    EleutherAI/wikitext_document_level; what is blank before the first title is left out.
    """
    starts = [match.start() for match in _TITLE.finditer(raw)]
    ends = [start - 1 for start in starts[1:]] + [len(raw)]
    if starts and starts[0]:
        lead = raw[: starts[0] - 1]
    else:
        lead = ""
    return [
        *([lead] if lead.strip() else []),
        *(raw[a:b] for a, b in zip(starts, ends, strict=True)),
    ]


def detokenize(text: str) -> str:
    """Undo WikiText's tokenization, step by step in the order of lm-evaluation-harness's
    wikitext task.
    """
    text = text.replace("s '", "s'")
    # Meant otherwise there, but figures depend on it.
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text)
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        inner = rf"\{opening}\s*([^\{closing}]*?)\s*\{closing}"
        text = re.sub(inner, rf"{opening}\1{closing}", text)
    for level in (4, 3, 2):
        text = text.replace(" ".join("=" * level), "=" * level)
    for spaced, tight in (
        (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
    ):
        text = text.replace(spaced, tight)
    return text.replace(" 's", "'s")


def measuring_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return a checkpoint's tokenizer; for sentencepiece, the one that `convert` would write.
    Raises `CheckpointError` if there is none, it is damaged, or it knows more tokens than the
    embedding.

    A text may spell special tokens, as WikiText does with ``<unk>``. transformers encodes them as
    these tokens, and so must what is compared with it; sentencepiece cannot.
    """
    tokenizer = load_checked_tokenizer(checkpoint)[0] or load_tokenizer(checkpoint.path)
    if tokenizer.kind != "sentencepiece":
        return tokenizer
    with tempfile.TemporaryDirectory(prefix="quantkit-tokenizer-") as scratch:
        exported = export_json(checkpoint.path / "tokenizer.model", Path(scratch), alone=False)
        if exported is None:
            return tokenizer
        return load_tokenizer(scratch)


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids as in transformers: BOS first where the model expects it, and special tokens for
    strings that spell them.
    """
    return tokenizer.encode(text, specials=True)


def prefix_token(tokenizer: Tokenizer, checkpoint: Checkpoint) -> int:
    """Return the token that the first token of a text is predicted from: BOS, or EOS in a model
    without BOS. Raises `CheckpointError` if the tokenizer has neither.
    """
    found = [token for token in (tokenizer.bos_id, *tokenizer.eos_ids) if token is not None]
    if not found:
        raise CheckpointError("the tokenizer has neither BOS nor EOS", path=checkpoint.path)
    return found[0]


@dataclass(frozen=True)
class DocumentScore:
    """A model's perplexity on a text's documents, independent of its tokenizer."""

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float


def score_documents(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    text: Text,
    window: int,
    *,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> DocumentScore:
    """Return the log probability of a text's documents, in rolling windows, per word and byte of
    the raw text. Raises `CheckpointError` if the tokenizer has neither BOS nor EOS to begin with,
    and `NonFiniteError` if the model's logits are NaN or Inf.
    """
    prefix = prefix_token(tokenizer, checkpoint)
    pairs = (
        pair
        for reading in text.readings
        for pair in rolling(token_ids(tokenizer, reading), prefix, window)
    )
    # Each length is a batch.
    by_length: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for pair in pairs:
        by_length[len(pair[0])].append(pair)
    windows = []
    for own in by_length.values():
        windows.append(Windows(*(torch.tensor(part) for part in zip(*own, strict=True))))
    loss = log_loss(checkpoint, windows, group=group, progress=progress)
    return DocumentScore(
        perplexity(loss, text.words), perplexity(loss, text.bytes), loss / text.bytes / math.log(2)
    )


def rolling(ids: Sequence[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Windows over a document that predict every token once: ids, and targets at the same
    positions.

    Windows are adjacent; the last one reaches back to full length and scores only the remaining
    tokens (lm-evaluation-harness, one token of context).
    """
    source = [prefix, *ids]
    pairs = []
    for done in range(0, len(ids), length):
        end = min(done + length, len(ids))
        begin = max(0, end - length)
        pairs.append((source[begin:end], [NOT_SCORED] * (done - begin) + list(ids[done:end])))
    return pairs
