"""Read the tokenizer in GGUF's metadata: its keys, strictly validated.

Source: llama.cpp's loader (``llama-vocab.cpp``), for which the keys are written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.text.pipeline import ADDS_BOS, SPACE, patterns_by_name
from quantkit.text.sentencepiece_file import PieceType
from quantkit.text.tiktoken_file import LONGEST_TOKEN

MODEL = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"
MERGES = "tokenizer.ggml.merges"
ADD_BOS = "tokenizer.ggml.add_bos_token"
ADD_EOS = "tokenizer.ggml.add_eos_token"
SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
"""Ids of tokens that are never drawn: llama.cpp adds minus infinity to their logits. They are
``suppress_tokens`` of generation_config.json.
"""
TEMPLATE = "tokenizer.chat_template"
TEMPLATES = "tokenizer.chat_templates"
PIPELINE = "quantkit.tokenizer_json"
"""quantkit's key: JSON with parts of a tokenizer.json that GGUF has no keys for and llama.cpp
does not use.
"""

ENDS = "quantkit.eos_token_ids"
"""quantkit's key: all EOS tokens of the model."""

IGNORE_MERGES = "ignore_merges"
"""In `PIPELINE`: the setting of that name, where it is not that of llama.cpp's name for the
patterns.
"""
RUN_MERGES = "run_merges"
"""In `PIPELINE`: merges that result in runs of spaces, with their places; llama.cpp finds such
runs without merges.
"""

SPM = "llama"
BPE = "gpt2"
GEMMA4 = "gemma4"
ID_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
"""By transformers' names; the misspelling is GGUF's."""
EOT = "tokenizer.ggml.eot_token_id"
EOM = "tokenizer.ggml.eom_token_id"
DEFAULT_EOS = {SPM: 2, BPE: 11}
"""The EOS id that llama.cpp uses by the kind of tokenizer if a file names none
(``llama_vocab::impl::load``).
"""
_SPM_DEFAULTS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
# The spellings at which llama.cpp ends a generation.
_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "[e~[",
}
TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<EOT>",
    "[EOT]",
    "<end_of_utterance>",
)
_OTHER_TOKENIZERS = {
    "bert": "WordPiece",
    "t5": "sentencepiece's unigram",
    "rwkv": "RWKV's",
    "plamo2": "PLaMo 2's",
}
# Letters of all splits of tokens into two; Gemma's 256,000 tokens have 2**24.
_MAX_SPLITS = 1 << 28
_NO_TOKENIZER = ("none", "no_vocab")
# Spellings that llama.cpp's converter takes for those of special tokens.
_BRACKETS = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
_LOOKS_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a byte-pair tokenizer.

    Attributes:
        model: `SPM` (merges by the scores of merged tokens, spaces as U+2581) or `BPE` (merges by a
            list, bytes as letters).
        tokens: spellings by id, without duplicates.
        types: of each token.
        scores: of each token; empty for `BPE`.
        merges: pairs, best first; empty for `SPM`, unless a list says what its scores do not, as in
            files of Gemma 4 (`GEMMA4`).
        pre: llama.cpp's name for the splitting of text into words; empty for `SPM`.
        space_prefix: whether a space is added before text, and before text that follows a special
            token.
    """

    model: str
    tokens: Sequence[str]
    types: Sequence[PieceType]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    pre: str
    space_prefix: bool

    def ids(self) -> dict[str, int]:
        """Index the ids by spelling."""
        return {token: number for number, token in enumerate(self.tokens)}

    def tokens_of(self, *types: PieceType) -> set[int]:
        """Select the ids of the tokens of some types."""
        return {number for number, kind in enumerate(self.types) if kind in types}


@dataclass(frozen=True)
class GgufUnstated:
    """What a GGUF file does not state about its tokenizer, and the folder made from it assumes.

    Attributes:
        unused: ids that only fill a row of the embedding.
        set_apart: tokens that are special or added: llama.cpp and its converter decide that by the
            spelling.
        space_runs: tokens that llama.cpp finds in text, and a folder's tokenizer makes by merges;
            they may be added tokens there.
        pipeline: whether quantkit wrote the parts of a tokenizer.json into the file that GGUF has
            no keys for.
    """

    unused: frozenset[int]
    set_apart: frozenset[int]
    space_runs: frozenset[int]
    pipeline: bool


def gguf_unstated(metadata: Mapping[str, Any], path: Path) -> GgufUnstated | None:
    """Find out what a file's metadata does not state; None for a file without a tokenizer.

    Raises as `read_vocabulary` does.
    """
    vocabulary = read_vocabulary(metadata, path)
    if vocabulary is None:
        return None
    pipeline = PIPELINE in metadata
    apart: set[int] = set()
    runs: set[int] = set()
    # In quantkit's files the types and the parts of a tokenizer.json state both.
    if not pipeline:
        ids = read_ids(Settings(metadata, path), vocabulary)
        controls = vocabulary.tokens_of(PieceType.CONTROL)
        unknowns = vocabulary.tokens_of(PieceType.UNKNOWN)
        apart = special_ids(vocabulary, ids) - controls - unknowns
        for number in controls:
            if _looks_special(vocabulary.tokens[number]):
                apart.add(number)
        runs = space_runs(vocabulary)
    return GgufUnstated(
        unused=frozenset(vocabulary.tokens_of(PieceType.UNUSED)),
        set_apart=frozenset(apart),
        space_runs=frozenset(runs),
        pipeline=pipeline,
    )


def _looks_special(token: str) -> bool:
    """Tell whether llama.cpp's converter makes an added token a control token because of its
    spelling.
    """
    if token in _LOOKS_SPECIAL:
        return True
    return any(token.startswith(start) and token.endswith(end) for start, end in _BRACKETS)


def space_runs(vocabulary: Vocabulary) -> set[int]:
    """Select the ids of added tokens that are runs of spaces.

    Converters spell them with spaces, as llama.cpp looks for added tokens before it replaces spaces
    by U+2581.
    """
    if vocabulary.model != SPM:
        return set()
    spellings = set(vocabulary.tokens)
    runs: set[int] = set()
    for number in vocabulary.tokens_of(PieceType.USER_DEFINED):
        token = vocabulary.tokens[number]
        # A tokenizer.json spells the run with U+2581, where no other token may have that spelling.
        if not token.strip(" ") and SPACE * len(token) not in spellings:
            runs.add(number)
    return runs


def filler(number: int) -> str:
    """Spell an embedding row without a token, as llama.cpp's converter writes
    it.
    """
    return f"[PAD{number}]"


def eos_by_spelling(tokens: Mapping[str, int]) -> set[int]:
    """Select the ids at which llama.cpp ends a generation because of their spelling; it makes
    control tokens of them.

    It does so when it runs a file. quantkit only tells users of it.
    """
    spellings = _ENDS & set(tokens)
    # llama.cpp's exception for gpt-oss, whose answers consist of messages that end with <|end|>.
    if spellings >= {"<|return|>", "<|call|>"} or spellings >= {"<|calls|>", "<|flush|>"}:
        spellings -= {"<|end|>"}
    # llama.cpp's exception for Gemma, in whose vocabulary </s> is an HTML tag.
    if "<|tool_response>" in spellings:
        spellings -= {"</s>"}
    return {tokens[spelling] for spelling in spellings}


def read_vocabulary(metadata: Mapping[str, Any], path: Path) -> Vocabulary | None:
    """Read the tokenizer in a file's metadata, if it has one, without filler tokens at the end.

    Raises:
        CheckpointError: if the metadata contradicts itself.
        UnsupportedError: for another kind of tokenizer, or an unknown way to split text.
    """
    settings = Settings(metadata, path)
    if settings.has(MODEL):
        model = settings.string(MODEL)
    else:
        model = _NO_TOKENIZER[0]
    if model in _NO_TOKENIZER:
        return None
    if model not in (SPM, BPE, GEMMA4):
        kind = _OTHER_TOKENIZERS.get(model, "unknown")
        raise UnsupportedError(
            "the tokenizer cannot be rebuilt exactly",
            path=path,
            found=f"'{format_value(model)[1:-1]}' ({kind})",
            expected=f"'{SPM}' (sentencepiece's merges) or '{BPE}' (byte-level merges)",
        )
    tokens = _read_tokens(settings)
    types = [PieceType.NORMAL] * len(tokens)
    if settings.has(TYPES):
        types_by_code = {int(kind): kind for kind in PieceType}
        expected = f"numbers from {min(types_by_code)} to {max(types_by_code)}"
        codes = _read_values(settings, TYPES, (int,), expected, types_by_code)
        types = [types_by_code[code] for code in codes]
    # Fillers at the end only give the embedding's last rows a token.
    while tokens and types[-1] is PieceType.UNUSED and tokens[-1] == filler(len(tokens) - 1):
        tokens.pop()
        types.pop()
    if not tokens:
        raise CheckpointError("the tokenizer has no tokens", path=path)
    if model in (SPM, GEMMA4):
        _require_byte_tokens(tokens, path)
        # A token of n letters has n - 1 splits of n letters each.
        if sum(len(token) ** 2 for token in tokens) > _MAX_SPLITS:
            raise CheckpointError("the tokenizer's tokens are too long to be split", path=path)
        scores = _read_scores(settings, path)
        merges: list[tuple[str, str]] = []
        if model == GEMMA4:
            merges = _read_merges(settings, tokens=set(tokens))
        return Vocabulary(
            model=SPM,
            tokens=tokens,
            types=types,
            scores=scores[: len(types)],
            merges=merges,
            pre="",
            space_prefix=settings.flag(SPACE_PREFIX, model == SPM),
        )
    if settings.has(PRE):
        pre = settings.string(PRE)
    else:
        pre = ""
    if patterns_by_name(pre) is None:
        raise UnsupportedError(
            "the tokenizer splits text in an unknown way" if pre else f"lacks the key {PRE}",
            path=path,
            found=f"{PRE} {format_value(pre)}" if pre else None,
            expected="such as 'llama-bpe' or 'qwen2'",
            hint="without it llama.cpp guesses, too" if not pre else None,
        )
    if settings.flag(SPACE_PREFIX, False):
        raise UnsupportedError(
            f"a byte-level tokenizer with {SPACE_PREFIX} is not supported", path=path
        )
    return Vocabulary(
        model=BPE,
        tokens=tokens,
        types=types,
        scores=[],
        merges=_read_merges(settings, tokens=set(tokens)),
        pre=pre,
        space_prefix=False,
    )


def _require_byte_tokens(tokens: Collection[str], path: Path) -> None:
    spellings = set(tokens)
    for byte in range(256):
        if f"<0x{byte:02X}>" not in spellings:
            raise UnsupportedError(
                "the tokenizer lacks tokens for bytes, without which llama.cpp fails on unknown"
                " characters",
                path=path,
                found=f"no <0x{byte:02X}>",
                expected="all 256",
            )


def _read_scores(settings: Settings, path: Path) -> list[float]:
    scores: list[float] = []
    for number, score in enumerate(_read_values(settings, SCORES, (int, float), "numbers")):
        if not math.isfinite(score):
            raise CheckpointError(
                f"{SCORES} contains a number that is not finite",
                path=path,
                found=f"token {number}",
            )
        scores.append(float(score))
    return scores


def read_ids(settings: Settings, vocabulary: Vocabulary) -> dict[str, int]:
    """Read the ids of special tokens by transformers' names; raises `CheckpointError` for an id
    that is not in the vocabulary.
    """
    ids: dict[str, int] = {}
    for name, key in ID_KEYS.items():
        number = _read_id(settings, key, vocabulary)
        if number is not None:
            ids[name] = number
        # llama.cpp's ids for files that do not state them.
        elif _is_plain_spm(vocabulary) and not settings.has(key) and name in _SPM_DEFAULTS:
            ids[name] = _SPM_DEFAULTS[name]
    return ids


def read_ends(settings: Settings, vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[int]:
    """Read the EOS tokens: those that quantkit listed, or else those of llama.cpp's keys.

    The list counts only if it has the tokens of all keys. Otherwise a tool such as
    ``gguf_set_metadata.py`` changed a key after quantkit wrote the file, and llama.cpp ends at the
    changed token.

    Raises:
        CheckpointError: for an id that is not in the vocabulary.
    """
    ids_by_key = (
        ids.get("eos_token"),
        _read_id(settings, EOT, vocabulary),
        _read_id(settings, EOM, vocabulary),
    )
    ends: list[int] = []
    for number in ids_by_key:
        if number is not None and number not in ends:
            ends.append(number)
    listed_ends = settings.ids(ENDS)
    if not listed_ends:
        return ends
    rows = len(settings.strings(TOKENS))
    highest = max(listed_ends)
    if highest >= rows:
        problem = f"{ENDS} is not in the vocabulary"
        raise CheckpointError(problem, path=settings.path, found=highest, expected=rows - 1)
    if set(ends) <= set(listed_ends):
        return list(dict.fromkeys(listed_ends))
    return ends


def read_suppressed(settings: Settings) -> list[int]:
    """Read the ids of tokens that are never drawn.

    Raises:
        CheckpointError: for an id that is not in the vocabulary.
    """
    suppressed_ids = list(dict.fromkeys(settings.ids(SUPPRESSED)))
    rows = len(settings.strings(TOKENS))
    if suppressed_ids and max(suppressed_ids) >= rows:
        raise CheckpointError(
            f"{SUPPRESSED} is not in the vocabulary",
            path=settings.path,
            found=max(suppressed_ids),
            expected=rows - 1,
        )
    return suppressed_ids


def read_added_ends(
    settings: Settings, vocabulary: Vocabulary, ids: Mapping[str, int]
) -> tuple[bool, bool]:
    """Read whether BOS is added before text, and EOS after it; raises `CheckpointError` if there is
    no such token.
    """
    bos = settings.flag(ADD_BOS, _is_plain_spm(vocabulary) or vocabulary.pre in ADDS_BOS)
    eos = settings.flag(ADD_EOS, False)
    for key, is_added, name in ((ADD_BOS, bos, "bos_token"), (ADD_EOS, eos, "eos_token")):
        if is_added and name not in ids:
            raise CheckpointError(
                f"{key} is true, but there is no {ID_KEYS[name]}", path=settings.path
            )
    return bos, eos


def _is_plain_spm(vocabulary: Vocabulary) -> bool:
    """Return whether a vocabulary is one to which llama.cpp's defaults for sentencepiece apply."""
    return vocabulary.model == SPM and not vocabulary.merges


def special_ids(vocabulary: Vocabulary, ids: Mapping[str, int]) -> set[int]:
    """Select the ids of special tokens: control tokens, and BOS and EOS among the added tokens.

    Old files state no types, so there BOS and EOS are special too. Otherwise an ordinary token with
    a role, such as ``!`` for padding, stays one.

    Args:
        ids: of the tokens with a role, by transformers' names.
    """
    added = vocabulary.tokens_of(PieceType.USER_DEFINED)
    special = vocabulary.tokens_of(PieceType.CONTROL, PieceType.UNKNOWN)
    untyped = not special and not added
    ends: set[int] = set()
    for name in ("bos_token", "eos_token"):
        if name in ids:
            ends.add(ids[name])
    if untyped:
        return special | ends
    return special | (ends & added)


def _read_id(settings: Settings, key: str, vocabulary: Vocabulary) -> int | None:
    """Read a token's id; None if there is none, or it is that of a filler token."""
    if not settings.has(key):
        return None
    number = settings.integer(key, 0, len(settings.strings(TOKENS)) - 1)
    if number < len(vocabulary.tokens):
        return number
    return None


def _read_tokens(settings: Settings) -> list[str]:
    tokens: list[str] = []
    spellings: set[str] = set()
    longest = 0
    for number, token in enumerate(settings.strings(TOKENS)):
        # llama.cpp's spelling of a token without letters.
        token = token or f"[EMPTY_{number}]"
        if token in spellings:
            raise CheckpointError(
                f"{TOKENS} contains a token twice", path=settings.path, found=format_value(token)
            )
        tokens.append(token)
        spellings.add(token)
        longest = max(longest, len(token))
    if longest > LONGEST_TOKEN:
        raise CheckpointError(
            f"{TOKENS} contains a token that is too long",
            path=settings.path,
            found=longest,
            expected=f"at most {LONGEST_TOKEN}",
        )
    return tokens


def _read_values(
    settings: Settings,
    key: str,
    kinds: tuple[type, ...],
    expected: str,
    allowed_values: Collection[int] = (),
) -> Any:
    """Read a list with a value for each token."""
    values = settings.need(key)
    if not isinstance(values, list):
        settings.wrong_type(key, expected)
    for value in values:
        # `isinstance` would accept booleans as numbers.
        if type(value) not in kinds or (allowed_values and value not in allowed_values):
            settings.wrong_type(key, expected)
    count = len(settings.strings(TOKENS))
    if len(values) != count:
        problem = f"{key} and {TOKENS} differ in length"
        raise CheckpointError(problem, path=settings.path, found=len(values), expected=count)
    return values


def _read_merges(settings: Settings, tokens: Collection[str]) -> list[tuple[str, str]]:
    """Read the pairs; of equal ones the first counts."""
    # A dict keeps the order, and each pair once.
    pairs: dict[tuple[str, str], None] = {}
    for number, line in enumerate(settings.strings(MERGES)):
        # As in llama.cpp: the first part may begin with a space.
        cut = line.find(" ", 1)
        pair = (line[:cut], line[cut + 1 :])
        problem = None
        if cut < 0 or not pair[1]:
            problem = "is not a pair"
        elif not (pair[0] in tokens and pair[1] in tokens and "".join(pair) in tokens):
            problem = "is not made of tokens"
        if problem is not None:
            raise CheckpointError(
                f"{MERGES}: pair {number} {problem}", path=settings.path, found=format_value(line)
            )
        pairs[pair] = None
    return list(pairs)
