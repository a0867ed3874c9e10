"""A tokenizer as GGUF's metadata has it: its keys, read strictly.

Source: the loader of llama.cpp (``llama-vocab.cpp``), which is what the keys are written for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, shown
from quantkit.text.pre_tokenizers import ADDS_BOS, named
from quantkit.text.sentencepiece_file import PieceType
from quantkit.text.tiktoken_file import LONGEST_TOKEN

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
PIPELINE = "quantkit.tokenizer_json"
"""A key of our own: JSON with parts of a tokenizer.json that GGUF has no keys for, and that llama.cpp does without."""

ENDS = "quantkit.eos_token_ids"
"""A key of our own: all tokens that end a text of the model, whatever llama.cpp ends one at by its spelling."""

SPM, BPE = "llama", "gpt2"
ID_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id", "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id", "mask_token": "tokenizer.ggml.mask_token_id",
}  # fmt: skip
"""By transformers' names; the spelling of the fourth is GGUF's."""
EOT, EOM = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"
_SPM_DEFAULTS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~[",
}  # fmt: skip
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "[EOT]", "<end_of_utterance>")
_OTHER_TOKENIZERS = {
    "bert": "WordPiece", "t5": "sentencepiece's unigram", "rwkv": "RWKV's", "plamo2": "PLaMo 2's",
    "gemma4": "Gemma 4's",
}  # fmt: skip
_MOST_SPLITS = 1 << 28  # letters in all ways to make tokens of two; Gemma's 256,000 tokens have 2**24
_NO_TOKENIZER = ("none", "no_vocab")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that merges pairs.

    Attributes:
        model: `SPM` (pairs by the scores of what they make, spaces as U+2581) or `BPE` (pairs by a list, bytes as
            letters).
        tokens: their spellings, by number; none twice.
        types: of each.
        scores: of each; empty where pairs are listed.
        merges: pairs, best first; empty where scores decide.
        pre: how a text is cut into words, by llama.cpp's name; empty where it is not.
        space_prefix: whether a space is put before a text, and before what follows a special token.
    """

    model: str
    tokens: Sequence[str]
    types: Sequence[PieceType]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    pre: str
    space_prefix: bool

    def numbers(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def filler(number: int) -> str:
    """The spelling of a row of the embedding that has no token, as llama.cpp's converter has it."""
    return f"[PAD{number}]"


def end_numbers(tokens: Mapping[str, int]) -> set[int]:
    """The tokens that llama.cpp ends a text at by their spelling alone."""
    found = _ENDS & set(tokens)
    if found >= {"<|return|>", "<|call|>"} or found >= {"<|calls|>", "<|flush|>"}:
        found -= {"<|end|>"}
    if "<|tool_response>" in found:
        found -= {"</s>"}
    return {tokens[spelling] for spelling in found}


def read_vocabulary(metadata: Mapping[str, Any], path: Path) -> Vocabulary | None:
    """The tokenizer in a file's metadata, if it has one; rows without tokens at the end are left out.

    Raises:
        CheckpointError: if it contradicts itself.
        UnsupportedError: for a tokenizer of another kind, and texts cut in a way that is not known.
    """
    settings = Settings(metadata, path)
    model = settings.text(MODEL) if settings.has(MODEL) else _NO_TOKENIZER[0]
    if model in _NO_TOKENIZER:
        return None
    if model not in (SPM, BPE):
        what = _OTHER_TOKENIZERS.get(model, "unknown")
        raise UnsupportedError(
            "the tokenizer cannot be rebuilt exactly", path=path, found=f"'{shown(model)[1:-1]}' ({what})",
            expected=f"'{SPM}' (sentencepiece's merges) or '{BPE}' (byte-level merges)",
        )  # fmt: skip
    tokens = _tokens(settings)
    types = _types(settings, tokens)
    while tokens and types[-1] is PieceType.UNUSED and tokens[-1] == filler(len(tokens) - 1):
        tokens.pop(), types.pop()
    if not tokens:
        raise CheckpointError("the tokenizer has no tokens", path=path)
    if model == SPM:
        known = set(tokens)
        missing = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in known), None)
        if missing is not None:
            raise UnsupportedError(
                "the tokenizer lacks tokens for bytes, without which llama.cpp fails on what it does not know",
                path=path, found=f"no <0x{missing:02X}>", expected="all 256",
            )  # fmt: skip
        if sum(len(token) ** 2 for token in tokens) > _MOST_SPLITS:
            raise CheckpointError("the tokenizer's tokens are too long to be taken apart", path=path)
        scores = _scores(settings, len(types))
        return Vocabulary(SPM, tokens, types, scores, [], "", settings.flag(SPACE_PREFIX, True))
    pre = settings.text(PRE) if settings.has(PRE) else ""
    if named(pre) is None:
        raise UnsupportedError(
            "the tokenizer cuts texts in a way that is not known" if pre else f"lacks the key {PRE}", path=path,
            found=f"{PRE} {shown(pre)}" if pre else None, expected="such as 'llama-bpe' or 'qwen2'",
            hint="without it llama.cpp guesses, too" if not pre else None,
        )  # fmt: skip
    if settings.flag(SPACE_PREFIX, False):
        raise UnsupportedError(f"a byte-level tokenizer with {SPACE_PREFIX} is not read", path=path)
    return Vocabulary(BPE, tokens, types, [], _merges(settings, set(tokens)), pre, False)


def read_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary, path: Path) -> dict[str, int]:
    """The special tokens' numbers by transformers' names.

    Raises:
        CheckpointError: for a number that is no token's.
    """
    found: dict[str, int] = {}
    for name, key in ID_KEYS.items():
        if (number := _id(metadata, key, vocabulary, path)) is not None:
            found[name] = number
        elif vocabulary.model == SPM and not Settings(metadata, path).has(key) and name in _SPM_DEFAULTS:
            found[name] = _SPM_DEFAULTS[name]
    return found


def read_ends(metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: Mapping[str, int], path: Path) -> list[int]:
    """The tokens that end a text: those that quantkit has listed, or else those that do in llama.cpp, the one that the
    file names as such first.

    Raises:
        CheckpointError: for a number that is no token's.
    """
    settings = Settings(metadata, path)
    if listed := settings.ids(ENDS):
        if max(listed) >= (rows := len(settings.texts(TOKENS))):
            raise CheckpointError(f"{ENDS} is not in the vocabulary", path=path, found=max(listed), expected=rows - 1)
        return list(dict.fromkeys(listed))
    stated = [ids.get("eos_token"), *(_id(metadata, key, vocabulary, path) for key in (EOT, EOM))]
    ends = [number for number in stated if number is not None]
    return list(dict.fromkeys([*ends, *sorted(end_numbers(vocabulary.numbers()))]))


def begins_and_ends(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: Mapping[str, int], path: Path
) -> tuple[bool, bool]:  # fmt: skip
    """Whether a text gets BOS before it and EOS after it.

    Raises:
        CheckpointError: if it should get one that there is not.
    """
    settings = Settings(metadata, path)
    bos = settings.flag(ADD_BOS, vocabulary.model == SPM or vocabulary.pre in ADDS_BOS)
    eos = settings.flag(ADD_EOS, False)
    for key, wanted, name in ((ADD_BOS, bos, "bos_token"), (ADD_EOS, eos, "eos_token")):
        if wanted and name not in ids:
            raise CheckpointError(f"{key} is true, and there is no {ID_KEYS[name]}", path=path)
    return bos, eos


def control_tokens(vocabulary: Vocabulary) -> set[int]:
    """The tokens that are no text of their own: those typed so, and those that llama.cpp knows by their spelling."""
    typed = {number for number, kind in enumerate(vocabulary.types) if kind in (PieceType.CONTROL, PieceType.UNKNOWN)}
    return typed | end_numbers(vocabulary.numbers())


def _id(metadata: Mapping[str, Any], key: str, vocabulary: Vocabulary, path: Path) -> int | None:
    """A token's number; None where there is none, or it is that of a row without a token."""
    settings = Settings(metadata, path)
    if not settings.has(key):
        return None
    number = settings.whole(key, 0, len(settings.texts(TOKENS)) - 1)
    return number if number < len(vocabulary.tokens) else None


def _tokens(settings: Settings) -> list[str]:
    found = [token or f"[EMPTY_{number}]" for number, token in enumerate(settings.texts(TOKENS))]
    if len(numbers := set(found)) < len(found):
        twice = next(token for number, token in enumerate(found) if token in found[:number])
        raise CheckpointError(f"{TOKENS} holds a token twice", path=settings.path, found=shown(twice))
    if (longest := max(map(len, numbers), default=0)) > LONGEST_TOKEN:
        raise CheckpointError(
            f"{TOKENS} holds a token that is too long", path=settings.path, found=longest,
            expected=f"at most {LONGEST_TOKEN}",
        )  # fmt: skip
    return found


def _types(settings: Settings, tokens: Sequence[str]) -> list[PieceType]:
    if not settings.has(TYPES):
        return [PieceType.NORMAL] * len(tokens)
    values = settings.need(TYPES)
    known = {int(kind): kind for kind in PieceType}
    if not isinstance(values, list) or not all(type(one) is int and one in known for one in values):
        settings.wrong_type(TYPES, f"numbers from {min(known)} to {max(known)}")
    _require_length(settings, TYPES, values, len(tokens))
    return [known[one] for one in values]


def _scores(settings: Settings, count: int) -> list[float]:
    values = settings.need(SCORES)
    if not isinstance(values, list) or not all(type(one) in (int, float) for one in values):
        settings.wrong_type(SCORES, "numbers")
    _require_length(settings, SCORES, values, len(settings.texts(TOKENS)))
    bad = next((number for number, one in enumerate(values) if not math.isfinite(one)), None)
    if bad is not None:
        raise CheckpointError(f"{SCORES} holds a number that is not finite", path=settings.path, found=f"token {bad}")
    return [float(one) for one in values[:count]]


def _merges(settings: Settings, tokens: Collection[str]) -> list[tuple[str, str]]:
    """The pairs; one that comes again counts where it came first."""
    found: dict[tuple[str, str], None] = {}
    for number, line in enumerate(settings.texts(MERGES)):
        cut = line.find(" ", 1)
        pair = (line[:cut], line[cut + 1 :])
        if cut < 0 or not pair[1]:
            _bad_merge(settings, number, line, "is no pair")
        if not (pair[0] in tokens and pair[1] in tokens and "".join(pair) in tokens):
            _bad_merge(settings, number, line, "is of tokens that there are not")
        found[pair] = None
    return list(found)


def _bad_merge(settings: Settings, number: int, line: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{MERGES}: pair {number} {problem}", path=settings.path, found=shown(line))


def _require_length(settings: Settings, key: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise CheckpointError(
            f"{key} and {TOKENS} differ in length", path=settings.path, found=len(values), expected=count
        )
