"""Tokenizers behind one protocol: sentencepiece, tiktoken and ``tokenizer.json``.

The kind is told by a file's content: Llama 3 ships a tiktoken file under the name
``tokenizer.model`` that Llama 2 uses for sentencepiece.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from quantkit.config import read_json
from quantkit.errors import CheckpointError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
_LLAMA3_SPECIALS = 256


class Tokenizer(Protocol):
    """Text to token ids and back.

    ``eos_ids`` end a generation. ``byte_level`` is true for the vocabularies of bytes
    (GPT-2's kind, tiktoken) and false for sentencepiece's.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    byte_level: bool

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids as the model expects a text to begin, BOS included where it has one.

        Spellings of special tokens are plain text, unless `specials` is set and the
        vocabulary has such spellings (tiktoken and tokenizer.json).
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        ...


class SentencePieceTokenizer:
    """A sentencepiece model (Llama 1 and 2, CodeLlama, Mistral)."""

    kind = "sentencepiece"
    byte_level = False

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._model: Any = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise CheckpointError("is not a sentencepiece model", path=path) from error
        self.vocab_size: int = self._model.get_piece_size()
        self.bos_id: int | None = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eos_ids: tuple[int, ...] = (self._model.eos_id(),) if self._model.eos_id() >= 0 else ()

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([i for i in ids if i < self.vocab_size])
        return text


class TiktokenTokenizer:
    """Llama 3's byte-pair ranks, with its 256 special tokens after them."""

    kind = "tiktoken"
    byte_level = True

    def __init__(self, path: Path) -> None:
        import tiktoken

        ranks = read_tiktoken(path)
        self._specials = llama3_specials(len(ranks))
        self._encoding = tiktoken.Encoding(
            name="llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=self._specials
        )
        self.vocab_size: int = len(ranks) + len(self._specials)
        self.bos_id: int | None = self._specials["<|begin_of_text|>"]
        ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
        self.eos_ids: tuple[int, ...] = tuple(self._specials[name] for name in ends)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        assert self.bos_id is not None
        allowed: Any = "all" if specials else set()
        return [self.bos_id, *self._encoding.encode(text, allowed_special=allowed, disallowed_special=())]

    def decode(self, ids: Sequence[int]) -> str:
        specials = set(self._specials.values())
        return self._encoding.decode([i for i in ids if i not in specials and i < self.vocab_size])


class JsonTokenizer:
    """A ``tokenizer.json`` of the Hugging Face tokenizers library."""

    kind = "tokenizer.json"

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Engine

        try:
            self._engine: Any = Engine.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"is not a tokenizer: {error}", path=path) from error
        self._engine.no_truncation()  # of whoever saved it; a text is taken whole
        self._engine.no_padding()
        settings_path = path.with_name("tokenizer_config.json")
        settings = read_json(settings_path) if settings_path.exists() else {}
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.bos_id: int | None = vocabulary.get(_content(settings.get("bos_token")))
        eos = vocabulary.get(_content(settings.get("eos_token")))
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.byte_level: bool = "<0x00>" not in vocabulary
        self._add_bos = bool(settings.get("add_bos_token", False)) and self.bos_id is not None

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        self._engine.encode_special_tokens = not specials
        ids: list[int] = self._engine.encode(text).ids
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._engine.decode(list(ids), skip_special_tokens=True)
        return text


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    ``tokenizer.json`` wins over ``tokenizer.model``, as in transformers.

    Raises:
        CheckpointError: if there is none, or the file is of no known kind.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder / "tokenizer.json")
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise CheckpointError("has no tokenizer", path=folder, expected="tokenizer.json or tokenizer.model")
    return TiktokenTokenizer(path) if is_tiktoken(path) else SentencePieceTokenizer(path)


def is_tiktoken(path: Path) -> bool:
    """Whether a file holds lines of base64 token and rank."""
    with path.open("rb") as file:
        parts = file.read(4096).split(b"\n", 1)[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        base64.b64decode(parts[0], validate=True)
    except binascii.Error:
        return False
    return True


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Byte sequences and their ranks.

    Raises:
        CheckpointError: if a line is not base64 and a number, or ranks have gaps.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(f"line {number} is not 'base64 rank'", path=path) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError("has gaps or doubles in its ranks", path=path)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"lacks the single byte {missing[0]:#04x}", path=path, expected="all 256")
    return ranks


def llama3_specials(first: int) -> dict[str, int]:
    """Llama 3's special tokens, numbered from the end of the vocabulary."""
    filler = _LLAMA3_SPECIALS - len(_LLAMA3_NAMED)
    names = [*_LLAMA3_NAMED, *(f"<|reserved_special_token_{i}|>" for i in range(3, 3 + filler))]
    return {name: first + i for i, name in enumerate(names)}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
