"""Load tokenizers behind one protocol: sentencepiece, tiktoken and ``tokenizer.json``.

A file's content decides its kind: Llama 3 ships a tiktoken file under the name ``tokenizer.model``,
which is a sentencepiece model in Llama 2.
"""

from __future__ import annotations

import functools
import json
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.base.arguments import as_string, as_token_rows, require_flags, wrong_type
from quantkit.base.json_values import Settings, require_plain_file
from quantkit.base.late import LateModule
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.located import locate_existing_model
from quantkit.text.contained import convert_library_errors, is_panic, quiet_on_failure
from quantkit.text.special_tokens import (
    find_bos_eos_ids,
    fixes_mistral_regex,
    read_added_tokens,
    read_tokenizer_config,
    special_tokens,
)
from quantkit.text.stated_tokens import FLAGS, missing_added_tokens
from quantkit.text.text_folder import find_unstated, locate_or_extract_text_folder
from quantkit.text.token_bytes import TokenBytes, fallback_bytes, letters_bytes

# A plain tokenizer.json is read without these.
if TYPE_CHECKING:
    from quantkit.text import (
        canonical_vocabulary,
        pipeline,
        sentencepiece_file,
        tiktoken_file,
        unread_tokenizers,
    )
else:
    canonical_vocabulary = LateModule("quantkit.text.canonical_vocabulary")
    pipeline = LateModule("quantkit.text.pipeline")
    sentencepiece_file = LateModule("quantkit.text.sentencepiece_file")
    tiktoken_file = LateModule("quantkit.text.tiktoken_file")
    unread_tokenizers = LateModule("quantkit.text.unread_tokenizers")

_log = logging.getLogger(__name__)

# Texts to find damage with: each uses another part of a tokenizer.
_TRIALS = ("", "The quick <s> fox,  1234 jumps\n", " \t\u2581", "Größe, 日本語 🚀 e\u0301\x00")
_NUM_TRIED_TOKENS = 256


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        kind: ``sentencepiece``, ``tiktoken`` or ``tokenizer.json``.
        vocab_size: all token ids are below it.
        bos_id: the model's BOS token; None if there is none. Whether text begins with it is what
            `prompt_start` says.
        eos_ids: the tokens that end a generation.
        special_tokens: ids of special tokens by spelling; None if they have no spelling
            (sentencepiece).
        byte_level: whether tokens are of bytes (GPT-2, tiktoken), and not of characters
            (sentencepiece).
        token_bytes: the bytes of each token; None if they depend on adjacent tokens.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, int] | None
    byte_level: bool
    token_bytes: TokenBytes | None

    def __call__(self, text: str) -> list[int]:
        """Encode text as `encode` does by default."""
        return self.encode(text)

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        """Encode text as token ids, by default with the tokens that the tokenizer puts around it,
        such as BOS.

        Args:
            text: any Unicode.
            specials: whether spellings of special tokens, such as ``<|eot_id|>``, become those
                tokens; otherwise they are plain text. Sentencepiece has no such spellings.
            bos: whether to add those tokens; not for the result of a chat template, which spells
                them itself.

        Returns:
            The ids, for `quantkit.generate`.

        Raises:
            RequestError: if it is not a string, or not valid Unicode.
            CheckpointError: if the tokenizer fails on it.

        Example:
            >>> ids = tokenizer.encode("My fellow citizens")
        """
        ...

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Decode token ids to text, by default without special tokens.

        A single token may be a part of a character, and may lose the space before it: decode a text
        as a whole, or in pieces with `quantkit.stream`.

        Args:
            ids: of any tokens; ids beyond the vocabulary are skipped.
            specials: whether to spell out special tokens. Sentencepiece has no spellings of them.

        Returns:
            The text, with U+FFFD for bytes that are no character.

        Raises:
            RequestError: if they are no token ids, or those of several texts.
            CheckpointError: if the tokenizer fails on them.
        """
        ...

    def canonical(self) -> canonical_vocabulary.CanonicalVocabulary:
        """Describe the vocabulary in a form in which tokenizers of all formats can be compared.

        Raises:
            CheckpointError: if the file is damaged.
        """
        ...


class _LibraryTokenizer(Tokenizer):
    """A tokenizer whose library may fail on a damaged file."""

    _path: Path
    # Whether to ignore the files next to it, and where they come from.
    _alone = False

    def encode(self, text: str, *, specials: bool = False, bos: bool = True) -> list[int]:
        require_flags(specials=specials)
        try:
            as_string("text", text).encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not valid Unicode", found=f"{text[error.start]!r}"
            ) from error
        with convert_library_errors(self._path, "cannot tokenize this text"):
            ids = self._encode(text, specials, bos)
        # The model would have no row for it.
        if ids and max(ids) >= self.vocab_size:
            raise CheckpointError(
                "gives tokens outside its own vocabulary",
                path=self._path,
                found=max(ids),
                expected=f"below {self.vocab_size}",
            )
        return ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        require_flags(specials=specials)
        try:
            (row,) = as_token_rows(ids)
        except (TypeError, ValueError) as error:
            raise wrong_type("ids", ids, "integers in a list, or a tensor [T] or [1, T]") from error
        if row and min(row) < 0:
            raise RequestError(
                "`ids` contains a negative number", found=min(row), expected="token ids"
            )
        with convert_library_errors(self._path, "cannot decode these tokens"):
            return self._decode([number for number in row if number < self.vocab_size], specials)

    def canonical(self) -> canonical_vocabulary.CanonicalVocabulary:
        vocabulary = self._canonical()
        if self._alone:
            unstated = None
        else:
            unstated = find_unstated(self._path.parent)
        if unstated is None:
            return vocabulary
        return canonical_vocabulary.as_in_gguf(vocabulary, unstated)

    @abstractmethod
    def _encode(self, text: str, specials: bool, bos: bool) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int], specials: bool) -> str: ...

    @abstractmethod
    def _canonical(self) -> canonical_vocabulary.CanonicalVocabulary: ...

    def _try_out(self) -> None:
        """Find the damage on which a library panics only in use.

        An unknown letter is not damage.
        """
        # A panic and tokens outside the vocabulary are damage. An ordinary error of the library is
        # that of a text which the tokenizer does not support.
        for text in _TRIALS:
            for specials in (True, False):
                try:
                    self.encode(text, specials=specials)
                except CheckpointError as error:
                    if error.__cause__ is None or is_panic(error.__cause__):
                        raise
        # Decoding every token would take too long.
        end = self.vocab_size
        first = range(min(end, _NUM_TRIED_TOKENS))
        last = range(max(end - _NUM_TRIED_TOKENS, len(first)), end)
        with convert_library_errors(self._path, "cannot decode these tokens"):
            for ids in (range(0), first, last):
                self._decode([*ids], specials=False)
                for number in ids:
                    self._decode([number], specials=False)


class SentencePieceTokenizer(_LibraryTokenizer):
    """A sentencepiece model (Llama 1 and 2, CodeLlama, Mistral)."""

    kind = "sentencepiece"
    byte_level = False
    special_tokens: dict[str, int] | None = None

    def __init__(self, path: Path, *, alone: bool = True) -> None:
        """Read a sentencepiece file.

        Text begins with BOS, as in Meta's code, llama.cpp and the tokenizers of Llama and Gemma,
        unless tokenizer_config.json says otherwise.

        Args:
            alone: ignore the files next to it: the tokens that they add, and ``add_bos_token`` and
                ``add_eos_token``. Added tokens are never found in text.

        Raises:
            CheckpointError: if the file is damaged, or the tokenizer_config.json next to it.
        """
        from sentencepiece import SentencePieceProcessor

        self._path = path
        self._alone = alone
        if alone:
            settings = Settings({}, path)
        else:
            settings = read_tokenizer_config(path.parent)
        self._add_bos = settings.flag("add_bos_token", True)
        self._add_eos = settings.flag("add_eos_token", False)
        require_plain_file(path)
        with quiet_on_failure(), convert_library_errors(path, "is not a sentencepiece model"):
            self._model: Any = SentencePieceProcessor(model_file=str(path))
            self.vocab_size: int = self._model.get_piece_size()
            indices = range(self.vocab_size)
            for index in indices:
                tiktoken_file.require_length(len(self._model.id_to_piece(index)), path)
            # The library's id of a token that the model does not have is -1.
            self.bos_id: int | None = None
            if self._model.bos_id() >= 0:
                self.bos_id = self._model.bos_id()
            self.eos_ids: tuple[int, ...] = ()
            if self._model.eos_id() >= 0:
                self.eos_ids = (self._model.eos_id(),)
            if not alone:
                pieces = {self._model.id_to_piece(index): index for index in indices}
                bos_eos_ids = find_bos_eos_ids(path.parent, pieces)
                self.bos_id = bos_eos_ids.get("bos_token", self.bos_id)
                if "eos_token" in bos_eos_ids:
                    self.eos_ids = (bos_eos_ids["eos_token"],)
            self._try_out()
            byte_pieces: dict[str, int] = {}
            controls: set[int] = set()
            for index in indices:
                if self._model.is_byte(index):
                    byte_pieces[self._model.id_to_piece(index)] = index
                if self._model.is_control(index):
                    controls.add(index)
            self.token_bytes: TokenBytes | None = fallback_bytes(
                byte_pieces, self.decode, apart=controls
            )

    def _encode(self, text: str, specials: bool, bos: bool) -> list[int]:
        ids: list[int] = self._model.encode(text)
        if not bos:
            return ids
        if self._add_bos and self.bos_id is not None:
            before = [self.bos_id]
        else:
            before = []
        if self._add_eos:
            after = self.eos_ids[:1]
        else:
            after = ()
        return [*before, *ids, *after]

    def _decode(self, ids: list[int], specials: bool) -> str:
        return str(self._model.decode(ids))

    def _canonical(self) -> canonical_vocabulary.CanonicalVocabulary:
        if self._alone:
            added = []
        else:
            added = read_added_tokens(self._path.parent)
        return canonical_vocabulary.describe_sentencepiece(
            sentencepiece_file.read_sentencepiece(self._path), added
        )


class TiktokenTokenizer(_LibraryTokenizer):
    """Llama 3's byte-pair ranks, with its 256 special tokens after them."""

    kind = "tiktoken"
    byte_level = True

    def __init__(self, path: Path) -> None:
        """Read a tiktoken file; raises `CheckpointError` if it is damaged."""
        import tiktoken

        self._path = path
        ranks = self._ranks = tiktoken_file.read_tiktoken(path)
        specials = self._specials = tiktoken_file.llama3_specials(len(ranks))
        self.special_tokens: dict[str, int] | None = specials
        with quiet_on_failure(), convert_library_errors(path, "is not a tiktoken vocabulary"):
            encoding = self._encoding = tiktoken.Encoding(
                name="llama3",
                pat_str=tiktoken_file.LLAMA3_PATTERN,
                mergeable_ranks=ranks,
                special_tokens=specials,
            )
        self.vocab_size: int = len(ranks) + len(specials)
        self.bos_id: int | None = specials["<|begin_of_text|>"]
        # The file does not state which tokens end a generation: these are Meta's.
        self.eos_ids: tuple[int, ...] = (
            specials["<|end_of_text|>"],
            specials["<|eom_id|>"],
            specials["<|eot_id|>"],
        )
        self.token_bytes: TokenBytes | None = TokenBytes(
            lambda token: encoding.decode_single_token_bytes(token) if token < len(ranks) else b"",
            replaces_each_byte=False,
        )

    def _encode(self, text: str, specials: bool, bos: bool) -> list[int]:
        # Without `disallowed_special=()` the library raises an error for text that spells a special
        # token.
        allowed: Any = "all" if specials else set()
        ids = self._encoding.encode(text, allowed_special=allowed, disallowed_special=())
        if bos:
            return [self._specials["<|begin_of_text|>"], *ids]
        return ids

    def _decode(self, ids: list[int], specials: bool) -> str:
        if specials:
            skipped = set()
        else:
            skipped = set(self._specials.values())
        return self._encoding.decode([number for number in ids if number not in skipped])

    def _canonical(self) -> canonical_vocabulary.CanonicalVocabulary:
        return canonical_vocabulary.describe_tiktoken(self._ranks, self._specials)


class JsonTokenizer(_LibraryTokenizer):
    """A ``tokenizer.json`` of the Hugging Face tokenizers library."""

    kind = "tokenizer.json"

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json; raises `CheckpointError` if it is damaged, or
        ``tokenizer_config.json`` next to it is.
        """
        from tokenizers import Tokenizer as Engine

        self._path = path
        require_plain_file(path)
        settings = read_tokenizer_config(path.parent)
        with quiet_on_failure(), convert_library_errors(path, "is not a tokenizer"):
            self._engine: Any = Engine.from_file(str(path))
            # A file may have saved both; here a text is encoded as a whole.
            self._engine.no_truncation()
            self._engine.no_padding()
            # BPE-dropout (1910.13267) skips merges at random, to train with. Whatever is measured
            # or generated here must have the same tokens each time.
            dropout = getattr(self._engine.model, "dropout", None)
            if dropout:
                self._engine.model.dropout = None
                _warn_of_dropout(path, round(dropout, 6))
            self._add_stated_tokens()
            if fixes_mistral_regex(path.parent, self._engine.get_vocab_size()):
                fixed = pipeline.with_mistral_regex(self._part("pre_tokenizer"))
                self._engine.pre_tokenizer = pipeline.pre_tokenizer_of(fixed)
            vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=True)
            if not vocabulary:
                raise CheckpointError("has no vocabulary", path=path)
            self.vocab_size: int = max(vocabulary.values()) + 1
            added_ids: dict[str, int] = {}
            for number, token in self._engine.get_added_tokens_decoder().items():
                added_ids[str(token)] = number
            self.special_tokens: dict[str, int] | None = added_ids
            spellings = special_tokens(path.parent, vocabulary, ("bos_token", "eos_token"))
            bos_eos_ids: dict[str, int] = {}
            for name, spelling in spellings.items():
                if spelling is not None and spelling in vocabulary:
                    bos_eos_ids[name] = vocabulary[spelling]
            self.bos_id: int | None = bos_eos_ids.get("bos_token")
            self.eos_ids: tuple[int, ...] = ()
            if "eos_token" in bos_eos_ids:
                self.eos_ids = (bos_eos_ids["eos_token"],)
            # Vocabularies of characters have tokens such as <0x00> for bytes.
            self.byte_level: bool = "<0x00>" not in vocabulary
            self._add_bos = settings.flag("add_bos_token", False) and self.bos_id is not None
            self._try_out()
            self.token_bytes: TokenBytes | None = self._token_bytes(vocabulary)

    def _add_stated_tokens(self) -> None:
        """Add the tokens that only the files next to tokenizer.json state, as transformers does."""
        from tokenizers import AddedToken

        engine = self._engine
        added: list[dict[str, Any]] = []
        for number, token in engine.get_added_tokens_decoder().items():
            entry = {"id": number, "content": token.content}
            for flag in FLAGS:
                entry[flag] = getattr(token, flag)
            added.append(entry)
        missing = missing_added_tokens(
            self._path.parent, added, lambda: engine.get_vocab(with_added_tokens=False)
        )
        for missing_token in missing:
            flags = {flag: missing_token[flag] for flag in FLAGS}
            engine.add_tokens([AddedToken(missing_token["content"], **flags)])

    def _encode(self, text: str, specials: bool, bos: bool) -> list[int]:
        self._engine.encode_special_tokens = not specials
        ids: list[int] = self._engine.encode(text, add_special_tokens=bos).ids
        # The post-processor may have added BOS.
        if bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _decode(self, ids: list[int], specials: bool) -> str:
        return str(self._engine.decode(ids, skip_special_tokens=not specials))

    def _canonical(self) -> canonical_vocabulary.CanonicalVocabulary:
        with convert_library_errors(self._path, "is not a tokenizer"):
            raw = json.loads(self._path.read_bytes())
            parts: dict[str, Any] = {}
            for name in ("normalizer", "pre_tokenizer", "decoder"):
                parts[name] = self._part(name)
            added = self._engine.get_added_tokens_decoder()
            return canonical_vocabulary.describe_json(
                raw, added, parts, type(self._engine.model).__name__
            )

    def _part(self, name: str) -> Any:
        """Read a part of the tokenizer with all its settings, also those that the file does not
        state.
        """
        # The library pickles its parts as JSON.
        part = getattr(self._engine, name)
        if part is None:
            return None
        return json.loads(part.__getstate__())

    def _token_bytes(self, vocabulary: Mapping[str, int]) -> TokenBytes | None:
        decoder = self._part("decoder") or {}
        kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
        # The bytes of other decoders depend on adjacent tokens.
        if "ByteFallback" in kinds:
            return fallback_bytes(vocabulary, self.decode)
        if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
            return letters_bytes(
                lambda token: self._engine.id_to_token(token) if self.decode([token]) else None
            )
        return None


@functools.cache
def _warn_of_dropout(path: Path, dropout: float) -> None:
    """Warn once of a file that lets other programs split text at random."""
    _log.warning(
        "%s: its model has dropout %s, with which other programs split the same text into other"
        " tokens each time; quantkit does not apply it. Set it to null",
        path,
        dropout,
    )


def prompt_start(tokenizer: Tokenizer) -> list[int]:
    """Find the token ids that a tokenizer puts before a text: BOS, or none.

    Many tokenizers have a BOS token that they never put before text (Qwen, SmolLM2, gpt-oss), so
    that their models have not seen it there. Everything that cuts text into windows begins each of
    them with these tokens.
    """
    return ids_around_text(tokenizer)[0]


def ids_around_text(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Encode a letter to find the token ids that a tokenizer puts before and after a text, by its
    post-processor or its flags.
    """
    text_ids = tokenizer.encode("a", bos=False)
    all_ids = tokenizer.encode("a")
    start = 0
    for place in range(len(all_ids)):
        if all_ids[place : place + len(text_ids)] == text_ids:
            start = place
            break
    return all_ids[:start], all_ids[start + len(text_ids) :]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    ``tokenizer.json`` wins over ``tokenizer.model``, as in transformers.

    Returns:
        The tokenizer, of whichever kind the file is.

    Raises:
        RequestError: if the folder does not exist.
        CheckpointError: if there is none, or the file is of no known kind.
        UnsupportedError: if it is in files that are not read, such as vocab.json.
    """
    folder = locate_or_extract_text_folder(locate_existing_model(folder))
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder / "tokenizer.json")
    path = folder / "tokenizer.model"
    if not path.is_file():
        unread_tokenizers.require_no_unread_tokenizer(folder)
        raise CheckpointError(
            "has no tokenizer", path=folder, expected="tokenizer.json or tokenizer.model"
        )
    return load_original_tokenizer(path, alone=False)


def load_original_tokenizer(path: Path, *, alone: bool = True) -> Tokenizer:
    """Load the tokenizer of a ``tokenizer.model``, whose content decides its kind; `alone` is as
    for `SentencePieceTokenizer`. Raises `CheckpointError` if the file is damaged.
    """
    if tiktoken_file.is_tiktoken(path):
        return TiktokenTokenizer(path)
    return SentencePieceTokenizer(path, alone=alone)
