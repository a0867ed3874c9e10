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
from quantkit.files.located import read_utf8_text
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.quality.measures import NOT_SCORED, Windows, log_loss, perplexity
from quantkit.text.export import export_json
from quantkit.text.tokenizer import Tokenizer, load_tokenizer

_TITLE = re.compile(r"^ = (?!=).*(?<!=) = $", re.MULTILINE)
# Bytes of an average word, beyond which a text has few spaces: in languages with spaces, a word has
# some 5 to 20.
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
        """List the documents as they are in the file."""
        if self.rows is not None:
            return [*self.rows]
        if self.is_wikitext:
            return articles(self.raw)
        return [self.raw]

    @property
    def readings(self) -> list[str]:
        """Prepare the documents that a model predicts: WikiText detokenized, others unchanged."""
        if self.is_wikitext:
            return [detokenize(document) for document in self.documents]
        return self.documents

    @property
    def words(self) -> int:
        """Count words as the harness does: pieces between white space, empty ones at the ends
        included.
        """
        count = 0
        for document in self.documents:
            # `str.split` would leave out the empty pieces.
            count += len(re.split(r"\s+", document))
        return count

    @property
    def bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)

    @property
    def note(self) -> str | None:
        """Write a note on figures per word for texts with few spaces, as in Chinese or Thai."""
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
    """Read a text from a file or folder, or under a name from a dataset, strings or rows; `column`
    and `chat` are those of `read_documents`.

    Raises:
        RequestError: if it cannot be read, is not what its suffix says, or has nothing but white
            space.
    """
    if not name:
        name = source.stem if isinstance(source, Path) else "text"
    if isinstance(source, Path) and column is None and not has_documents(source):
        text, digest = read_utf8_text(source)
        return Text(name, digest, text)
    # Without a limit: all of a text is measured, whereas calibration needs some of it.
    documents = read_documents(source, sys.maxsize, column=column, chat=chat, name=name)
    rows = tuple(document for document in documents.documents or () if document.strip())
    if not rows:
        raise RequestError("the text is empty", path=source if isinstance(source, Path) else name)
    return Text(
        name=name,
        sha256=documents.sha256,
        raw=documents.text,
        rows=rows,
        in_template=documents.specials,
        notes=documents.notes,
    )


def articles(raw: str) -> list[str]:
    """Split WikiText into articles, each from its title line to the line before the next title.

    The line break before a title belongs to neither side, as in the data set
    EleutherAI/wikitext_document_level; what is blank before the first title is left out.

    Raises:
        RequestError: if no line is a title.
    """
    starts = []
    for title in _TITLE.finditer(raw):
        starts.append(title.start())
    if not starts:
        raise RequestError(
            "has no articles of WikiText",
            found="no title line",
            expected="' = Title = ' in a line of its own, before each article",
            hint="use the raw form of WikiText; `quantkit eval` measures any other text too",
        )
    documents = []
    # A text can begin within an article.
    if starts[0]:
        lead = raw[: starts[0] - 1]
        if lead.strip():
            documents.append(lead)
    ends = [start - 1 for start in starts[1:]] + [len(raw)]
    for start, end in zip(starts, ends, strict=True):
        documents.append(raw[start:end])
    return documents


def detokenize(text: str) -> str:
    """Undo WikiText's tokenization, step by step in the order of lm-evaluation-harness's
    wikitext task.
    """
    text = text.replace("s '", "s'")
    # The harness means to match quotation marks around a digit, but matches slashes. Its figures
    # depend on that.
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text)
    # WikiText writes ``well-known`` as ``well @-@ known``, and ``1,000`` as ``1 @,@ 000``.
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
    """Load a checkpoint's tokenizer; for sentencepiece, the one that `convert` would write. Raises
    `CheckpointError` if there is none, it is damaged, or it knows more tokens than the embedding.

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
    """Encode a text as transformers does: BOS first where the model expects it, and special tokens
    for strings that spell them.
    """
    return tokenizer.encode(text, specials=True)


def prefix_token(tokenizer: Tokenizer, checkpoint: Checkpoint) -> int:
    """Choose the token that the first token of a text is predicted from: BOS, or EOS in a model
    without BOS. Raises `CheckpointError` if the tokenizer has neither.
    """
    for token in (tokenizer.bos_id, *tokenizer.eos_ids):
        if token is not None:
            return token
    raise CheckpointError("the tokenizer has neither BOS nor EOS", path=checkpoint.path)


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
    """Measure the log probability of a text's documents, in rolling windows, per word and byte of
    the raw text. Raises `CheckpointError` if the tokenizer has neither BOS nor EOS to begin with,
    and `NonFiniteError` if the model's logits are NaN or Inf.
    """
    prefix = prefix_token(tokenizer, checkpoint)
    # Windows of one length are a batch, which needs no padding.
    ids_by_length: dict[int, list[list[int]]] = defaultdict(list)
    targets_by_length: dict[int, list[list[int]]] = defaultdict(list)
    for reading in text.readings:
        for ids, targets in rolling(token_ids(tokenizer, reading), prefix, window):
            ids_by_length[len(ids)].append(ids)
            targets_by_length[len(ids)].append(targets)
    windows = []
    for length, ids_of_length in ids_by_length.items():
        targets_of_length = targets_by_length[length]
        windows.append(Windows(torch.tensor(ids_of_length), torch.tensor(targets_of_length)))
    loss = log_loss(checkpoint, windows, group=group, progress=progress)
    # Words and bytes are those of the raw text, so that figures of models with other tokenizers
    # can be compared.
    return DocumentScore(
        perplexity(loss, text.words), perplexity(loss, text.bytes), loss / text.bytes / math.log(2)
    )


def rolling(ids: Sequence[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Cut a document into windows that predict every token once: ids, and targets at the same
    positions.

    Windows are adjacent; the last one reaches back to full length and scores only the remaining
    tokens (lm-evaluation-harness, one token of context).
    """
    # With the prefix before it, the token at a position of `inputs` predicts the one at the same
    # position of `ids`.
    inputs = [prefix, *ids]
    windows = []
    for done in range(0, len(ids), length):
        end = min(done + length, len(ids))
        begin = max(0, end - length)
        # The window before this one has predicted these tokens.
        repeated = [NOT_SCORED] * (done - begin)
        windows.append((inputs[begin:end], repeated + list(ids[done:end])))
    return windows
