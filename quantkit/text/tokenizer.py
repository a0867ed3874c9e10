"""Tokenizers behind one protocol: sentencepiece, tiktoken and ``tokenizer.json``.

The kind is told by a file's content: Llama 3 ships a tiktoken file under the name
``tokenizer.model`` that Llama 2 uses for sentencepiece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from quantkit.arguments import as_text, require_flags, token_rows, wrong_type
from quantkit.errors import CheckpointError, RequestError
from quantkit.json_values import Settings, read_json, require_plain_file
from quantkit.text import canonical_vocabulary
from quantkit.text.canonical_vocabulary import CanonicalVocabulary
from quantkit.text.contained import contained, is_panic, quiet_on_failure
from quantkit.text.gguf_unstated import GgufUnstated
from quantkit.text.sentencepiece_file import read_sentencepiece
from quantkit.text.special_tokens import added_tokens, special_tokens
from quantkit.text.text_folder import text_folder, unstated_in
from quantkit.text.tiktoken_file import LLAMA3_PATTERN, is_tiktoken, llama3_specials, read_tiktoken, require_length
from quantkit.text.token_bytes import TokenBytes, fallback_bytes, letters_bytes

# What a damaged tokenizer is tried on: each makes some part of it work.
_TRIALS = ("", "The quick <s> fox,  1234 jumps\n", " \t\u2581", "Größe, 日本語 🚀 e\u0301\x00")
_TRIED_TOKENS = 256
_NO_TEXT = "cannot tokenize this text"
_NO_TOKENS = "cannot decode these tokens"


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        kind: ``sentencepiece``, ``tiktoken`` or ``tokenizer.json``.
        vocab_size: token ids lie below it.
        bos_id: what a text begins with; None where there is no such token.
        eos_ids: what ends a generation.
        special_tokens: those that no plain text holds, by their spellings; None where they have none (sentencepiece).
        byte_level: whether the vocabulary is of bytes (GPT-2's kind, tiktoken), and not sentencepiece's.
        token_bytes: what each token adds to a text; None where that depends on the tokens beside it.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, int] | None
    byte_level: bool
    token_bytes: TokenBytes | None

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        """Token ids of a text, as a model expects one to begin: with BOS where it has one.

        Args:
            text: any Unicode.
            specials: whether spellings of special tokens, such as ``<|eot_id|>``, mean those tokens; else they are
                plain text. Sentencepiece has no such spellings.
            bos: whether BOS comes first, where the tokenizer puts one; not for what a chat template has made.

        Returns:
            The ids, for `quantkit.generate`.

        Raises:
            RequestError: if the text is none, or holds half a character.
            CheckpointError: if the tokenizer breaks on it.

        Example:
            >>> ids = tokenizer.encode("My fellow citizens")
        """
        ...

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """The text of token ids, by default without special tokens.

        A token alone need not be a whole character, and may lose the space before it: decode a text as a whole, or
        let `quantkit.stream` cut it into pieces.

        Args:
            ids: of any tokens; what is beyond the vocabulary is left out.
            specials: whether special tokens are spelled out. Sentencepiece has no spellings of them.

        Returns:
            The text; bytes that are no character become U+FFFD.

        Raises:
            RequestError: if they are no token ids, or of several texts.
            CheckpointError: if the tokenizer breaks on them.
        """
        ...

    def canonical(self) -> CanonicalVocabulary:
        """The vocabulary in the form in which tokenizers are compared, whatever their formats.

        Raises:
            CheckpointError: if the file is damaged.
        """
        ...


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (Llama 1 and 2, CodeLlama, Mistral)."""

    kind = "sentencepiece"
    byte_level = False
    special_tokens: dict[str, int] | None = None

    def __init__(self, path: Path, *, alone: bool = True, unstated: GgufUnstated | None = None) -> None:
        """
        Args:
            alone: whether files next to it add no tokens to its vocabulary; it never finds such tokens in a text.
            unstated: what the GGUF file leaves open that the file is made of.

        Raises:
            CheckpointError: if the file is damaged.
        """
        from sentencepiece import SentencePieceProcessor

        self._path, self._alone, self._unstated = path, alone, unstated
        require_plain_file(path)
        with quiet_on_failure(), contained(path, "is not a sentencepiece model"):
            self._model: Any = SentencePieceProcessor(model_file=str(path))
            self.vocab_size: int = self._model.get_piece_size()
            for index in range(self.vocab_size):
                require_length(len(self._model.id_to_piece(index)), path)
            self.bos_id: int | None = self._model.bos_id() if self._model.bos_id() >= 0 else None
            self.eos_ids: tuple[int, ...] = (self._model.eos_id(),) if self._model.eos_id() >= 0 else ()
            _try_out(self, path)
            indices = range(self.vocab_size)
            pieces = {self._model.id_to_piece(index): index for index in indices if self._model.is_byte(index)}
            apart = {index for index in indices if self._model.is_control(index)}
            self.token_bytes: TokenBytes | None = fallback_bytes(pieces, self.decode, apart=apart)

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        _require_text(text, specials)
        with contained(self._path, _NO_TEXT):
            ids: list[int] = self._model.encode(text)
        _require_known(ids, self.vocab_size, self._path)
        return ids if self.bos_id is None or not bos else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        require_flags(specials=specials)
        known = _known_ids(ids, self.vocab_size)
        with contained(self._path, _NO_TOKENS):
            text: str = self._model.decode(known)
        return text

    def canonical(self) -> CanonicalVocabulary:
        added = [] if self._alone else added_tokens(self._path.parent)
        found = canonical_vocabulary.of_sentencepiece(read_sentencepiece(self._path), added)
        return found if self._unstated is None else canonical_vocabulary.as_in_gguf(found, self._unstated)


class TiktokenTokenizer(Tokenizer):
    """Llama 3's byte-pair ranks, with its 256 special tokens after them."""

    kind = "tiktoken"
    byte_level = True

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: if the file is damaged.
        """
        import tiktoken

        self._path = path
        ranks = self._ranks = read_tiktoken(path)
        self._ordinary = len(ranks)
        self._specials = llama3_specials(len(ranks))
        self.special_tokens: dict[str, int] | None = self._specials
        with quiet_on_failure(), contained(path, "is not a tiktoken vocabulary"):
            self._encoding = tiktoken.Encoding(
                name="llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=self._specials
            )
        self.vocab_size: int = len(ranks) + len(self._specials)
        self._bos = self._specials["<|begin_of_text|>"]
        self.bos_id: int | None = self._bos
        ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
        self.eos_ids: tuple[int, ...] = tuple(self._specials[name] for name in ends)
        self.token_bytes: TokenBytes | None = TokenBytes(self._bytes, bytewise=False)

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        _require_text(text, specials)
        allowed: Any = "all" if specials else set()
        with contained(self._path, _NO_TEXT):
            ids = self._encoding.encode(text, allowed_special=allowed, disallowed_special=())
        return [self._bos, *ids] if bos else ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        require_flags(specials=specials)
        left_out = set() if specials else set(self._specials.values())
        known = _known_ids(ids, self.vocab_size)
        with contained(self._path, _NO_TOKENS):
            return self._encoding.decode([one for one in known if one not in left_out])

    def canonical(self) -> CanonicalVocabulary:
        return canonical_vocabulary.of_tiktoken(self._ranks, self._specials)

    def _bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token) if token < self._ordinary else b""


class JsonTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the Hugging Face tokenizers library."""

    kind = "tokenizer.json"

    def __init__(self, path: Path, *, unstated: GgufUnstated | None = None) -> None:
        """
        Args:
            unstated: what the GGUF file leaves open that the file is made of.

        Raises:
            CheckpointError: if the file is damaged, or ``tokenizer_config.json`` beside it is.
        """
        from tokenizers import Tokenizer as Engine

        self._path, self._unstated = path, unstated
        require_plain_file(path)
        settings_path = path.with_name("tokenizer_config.json")
        settings = Settings(read_json(settings_path) if settings_path.exists() else {}, settings_path)
        with quiet_on_failure(), contained(path, "is not a tokenizer"):
            self._engine: Any = Engine.from_file(str(path))
            self._engine.no_truncation()  # of whoever saved it; a text is taken whole
            self._engine.no_padding()
            vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=True)
            if not vocabulary:
                raise CheckpointError("has no vocabulary", path=path)
            self.vocab_size: int = max(vocabulary.values()) + 1
            added = self._engine.get_added_tokens_decoder().items()
            self.special_tokens: dict[str, int] | None = {str(token): number for number, token in added}
            named = special_tokens(path.parent, vocabulary, ("bos_token", "eos_token"))
            numbers = {name: vocabulary[one] for name, one in named.items() if one is not None and one in vocabulary}
            self.bos_id: int | None = numbers.get("bos_token")
            self.eos_ids: tuple[int, ...] = (numbers["eos_token"],) if "eos_token" in numbers else ()
            self.byte_level: bool = "<0x00>" not in vocabulary
            self._add_bos = settings.flag("add_bos_token", False) and self.bos_id is not None
            _try_out(self, path)
            self.token_bytes: TokenBytes | None = self._token_bytes(vocabulary)

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        _require_text(text, specials)
        with contained(self._path, _NO_TEXT):
            self._engine.encode_special_tokens = not specials
            ids: list[int] = self._engine.encode(text, add_special_tokens=bos).ids
        _require_known(ids, self.vocab_size, self._path)
        if bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        require_flags(specials=specials)
        known = _known_ids(ids, self.vocab_size)
        with contained(self._path, _NO_TOKENS):
            text: str = self._engine.decode(known, skip_special_tokens=not specials)
        return text

    def canonical(self) -> CanonicalVocabulary:
        with contained(self._path, "is not a tokenizer"):
            raw = json.loads(self._path.read_bytes())
            parts = {name: self._part(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
            added = self._engine.get_added_tokens_decoder()
            found = canonical_vocabulary.of_json(raw, added, parts, type(self._engine.model).__name__)
        return found if self._unstated is None else canonical_vocabulary.as_in_gguf(found, self._unstated)

    def _part(self, name: str) -> Any:
        """A part of the tokenizer with all its settings, those that the file leaves out among them."""
        part = getattr(self._engine, name)
        return None if part is None else json.loads(part.__getstate__())

    def _token_bytes(self, vocabulary: Mapping[str, int]) -> TokenBytes | None:
        decoder = self._part("decoder") or {}
        kinds = {one.get("type") for one in decoder.get("decoders", [decoder])}
        if "ByteFallback" in kinds:
            return fallback_bytes(vocabulary, self.decode)
        if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
            return letters_bytes(lambda token: self._engine.id_to_token(token) if self.decode([token]) else None)
        return None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    ``tokenizer.json`` wins over ``tokenizer.model``, as in transformers.

    Returns:
        The tokenizer, of whichever kind the file is.

    Raises:
        CheckpointError: if there is none, or the file is of no known kind.
    """
    folder = text_folder(folder)
    return folder_tokenizer(folder, unstated_in(folder))


def folder_tokenizer(folder: Path, unstated: GgufUnstated | None) -> Tokenizer:
    """The tokenizer of a folder that may be made of a GGUF file's metadata.

    Args:
        unstated: what that file leaves open; None if there is none.

    Raises:
        CheckpointError: as `load_tokenizer` does.
    """
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder / "tokenizer.json", unstated=unstated)
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise CheckpointError("has no tokenizer", path=folder, expected="tokenizer.json or tokenizer.model")
    return (
        TiktokenTokenizer(path) if is_tiktoken(path) else SentencePieceTokenizer(path, alone=False, unstated=unstated)
    )


def original_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.model`` by itself, whose content decides its kind.

    Raises:
        CheckpointError: if it is damaged.
    """
    return TiktokenTokenizer(path) if is_tiktoken(path) else SentencePieceTokenizer(path)


def _try_out(tokenizer: Tokenizer, path: Path) -> None:
    """Put a tokenizer that was just read to use: its library panics on some damage only then.

    That it does not know the letters of a text is no damage.
    """
    for text in _TRIALS:
        for specials in (True, False):
            try:
                tokenizer.encode(text, specials=specials)
            except CheckpointError as error:
                if error.__cause__ is None or is_panic(error.__cause__):
                    raise
    last = tokenizer.vocab_size
    tried: list[Sequence[int]] = [[], range(min(last, _TRIED_TOKENS)), range(max(last - _TRIED_TOKENS, 0), last)]
    for ids in tried:
        tokenizer.decode(ids)
        for one in ids:
            tokenizer.decode([one])


def _require_text(text: str, specials: bool) -> None:
    """
    Raises:
        RequestError: for arguments of other types, and the halves of characters that Python puts for bytes which are
            no UTF-8.
    """
    require_flags(specials=specials)
    try:
        as_text("text", text).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the text is not valid Unicode", found=f"{text[error.start]!r}") from error


def _known_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Those that a vocabulary has.

    Raises:
        RequestError: if they are no token ids, or of several texts.
    """
    try:
        (row,) = token_rows(ids)
    except (TypeError, ValueError) as error:
        raise wrong_type("ids", ids, "integers in a list, or a tensor [T] or [1, T]") from error
    if row and min(row) < 0:
        raise RequestError("`ids` holds a negative number", found=min(row), expected="token ids")
    return [one for one in row if one < vocab_size]


def _require_known(ids: Sequence[int], vocab_size: int, path: Path) -> None:
    """
    Raises:
        CheckpointError: for an id that is not in the vocabulary: the model would have no row for it.
    """
    if ids and max(ids) >= vocab_size:
        raise CheckpointError(
            "gives tokens outside its own vocabulary", path=path, found=max(ids), expected=f"below {vocab_size}"
        )
