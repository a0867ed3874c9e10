"""A folder's tokenizer, chat templates and settings of generation as GGUF's metadata, for llama.cpp to load.

What is written is read back and held against the folder's own tokenizer before it is handed out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, read_settings
from quantkit.text import gguf_vocabulary as keys
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.compare import first_difference
from quantkit.text.folder_vocabulary import UNREACHED, FoundTokenizer, folder_vocabulary
from quantkit.text.gguf_tokenizer import SAMPLING, folder_files, tokenizer_json
from quantkit.text.gguf_unstated import gguf_unstated
from quantkit.text.gguf_vocabulary import Vocabulary
from quantkit.text.sentencepiece_file import PieceType
from quantkit.text.special_tokens import special_tokens
from quantkit.text.text_folder import text_folder
from quantkit.text.tokenizer import Tokenizer, folder_tokenizer, load_tokenizer

_TRIED_SPECIALS = 64


def tokenizer_metadata(
    folder: Path, rows: int, templates: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """The metadata that tells llama.cpp how to tokenize, and how to make a prompt of a conversation.

    Args:
        folder: that holds the tokenizer, or a GGUF file.
        rows: of the embedding, to which tokens are filled up.
        templates: chat templates by name; None takes those of the folder.

    Returns:
        Plain values by key, as `build_header` takes them; and notes on where llama.cpp does otherwise.

    Raises:
        CheckpointError: if there is no tokenizer, it is damaged, or has more tokens than there are rows.
        UnsupportedError: for a tokenizer that llama.cpp does not have, or would read texts with otherwise.
    """
    folder = text_folder(folder)
    tokenizer = load_tokenizer(folder)
    found = folder_vocabulary(folder)
    vocabulary = _filled(found.vocabulary, rows, folder)
    ids = _special_ids(folder, tokenizer, found)
    around = _around(tokenizer, ids, folder)
    metadata = {**_vocabulary_keys(vocabulary), **{keys.ID_KEYS[name]: number for name, number in ids.items()}}
    stated = _stated_ends(folder)
    ends = list(dict.fromkeys([*tokenizer.eos_ids, *stated]))
    if ends:
        metadata[keys.ENDS] = stated or ends
    metadata |= _end_keys(folder, ends, ids, found.vocabulary)
    metadata |= {keys.ADD_BOS: around[0], keys.ADD_EOS: around[1]}
    metadata |= _template_keys(ChatTemplates(folder).sources if templates is None else templates)
    metadata |= _sampling_keys(folder)
    own = _own_parts(found, ids, around)
    if tokenizer.bos_id is None and "bos_token" in ids and not around[0]:
        own["bos_token"] = None
    if own or found.pipeline:  # empty, it says that there is nothing that GGUF has no keys for
        metadata[keys.PIPELINE] = json.dumps(own, ensure_ascii=False)
    notes = [*found.notes, *_require_alike(tokenizer, found.vocabulary, metadata, folder)]
    if others := sorted(keys.end_numbers(found.vocabulary.numbers()) - {*(stated or ends)}):
        spellings = ", ".join(found.vocabulary.tokens[number] for number in others)
        notes.append(f"llama.cpp ends a text at {spellings} too, by the spelling")
    return metadata, [f"{folder}: {note}" for note in notes]


def _filled(vocabulary: Vocabulary, rows: int, folder: Path) -> Vocabulary:
    """With a token for each row of the embedding."""
    count = len(vocabulary.tokens)
    if count > rows:
        raise CheckpointError(
            "the tokenizer knows more tokens than the embedding has rows", path=folder, found=f"{count} tokens",
            expected=f"at most {rows}", hint="the tokenizer is another model's",
        )  # fmt: skip
    more = range(count, rows)
    return replace(
        vocabulary,
        tokens=[*vocabulary.tokens, *map(keys.filler, more)],
        types=[*vocabulary.types, *(PieceType.UNUSED for _ in more)],
        scores=[*vocabulary.scores, *(UNREACHED for _ in more)] if vocabulary.model == keys.SPM else [],
    )


def _vocabulary_keys(vocabulary: Vocabulary) -> dict[str, Any]:
    found: dict[str, Any] = {
        keys.MODEL: vocabulary.model, keys.PRE: vocabulary.pre or "default",
        keys.TOKENS: list(vocabulary.tokens), keys.TYPES: [int(kind) for kind in vocabulary.types],
    }  # fmt: skip
    if vocabulary.model == keys.SPM:
        return found | {keys.SCORES: list(vocabulary.scores), keys.SPACE_PREFIX: vocabulary.space_prefix}
    return found | {keys.MERGES: [" ".join(pair) for pair in vocabulary.merges]}


def _special_ids(folder: Path, tokenizer: Tokenizer, found: FoundTokenizer) -> dict[str, int]:
    """The special tokens by transformers' names: as files beside the tokenizer spell them, as it has them itself, as
    config.json numbers them."""
    numbers = found.vocabulary.numbers()
    config = Settings(read_settings(folder / "config.json") if (folder / "config.json").is_file() else {}, folder)
    own = dict(found.ids)
    own |= {"bos_token": tokenizer.bos_id} if tokenizer.bos_id is not None else {}
    own |= {"eos_token": tokenizer.eos_ids[0]} if tokenizer.eos_ids else {}
    spelled = special_tokens(folder, numbers)
    ids: dict[str, int] = {}
    for name in keys.ID_KEYS:
        spelling, numbered = spelled.get(name), config.values.get(f"{name}_id")
        if spelling is not None and spelling in numbers:
            ids[name] = numbers[spelling]
        elif name in own:
            ids[name] = own[name]
        elif type(numbered) is int and 0 <= numbered < len(numbers):
            ids[name] = numbered
    return ids


def _around(tokenizer: Tokenizer, ids: dict[str, int], folder: Path) -> tuple[bool, bool]:
    """Whether a text gets BOS before it, and EOS after it; such a BOS is the tokenizer's, whatever files say."""
    text = tokenizer.encode("a", bos=False)
    whole = tokenizer.encode("a")
    start = next((at for at in range(len(whole)) if whole[at : at + len(text)] == text), 0)
    before, after = whole[:start], whole[start + len(text) :]
    if len(before) > 1 or after not in ([], [ids.get("eos_token")]):
        raise UnsupportedError(
            "llama.cpp puts no more than BOS and EOS around a text", path=folder, found=f"{before} and {after}",
            hint="write another format",
        )  # fmt: skip
    if before:
        ids["bos_token"] = before[0]
    return bool(before), bool(after)


def _stated_ends(folder: Path) -> list[int]:
    """The tokens that end a text by what the folder's settings say."""
    paths = (folder / "config.json", folder / "generation_config.json")
    stated = [Settings(read_settings(path), path).ids("eos_token_id") for path in paths if path.is_file()]
    return list(dict.fromkeys(number for ids in stated for number in ids))


def _end_keys(folder: Path, stated: list[int], ids: Mapping[str, int], vocabulary: Vocabulary) -> dict[str, int]:
    """Where texts end besides EOS. Most such tokens llama.cpp knows by their spelling, and it has keys for two."""
    numbers = vocabulary.numbers()
    known = keys.end_numbers(numbers)
    others = [one for one in dict.fromkeys(stated) if one not in known and one != ids.get("eos_token")]
    turns = [numbers[spelling] for spelling in keys.TURN_ENDS if numbers.get(spelling) in stated]
    slots = dict(zip([keys.EOT, keys.EOM], [*turns[:1], *others], strict=False))
    if left := set(others) - set(slots.values()):
        raise UnsupportedError(
            "GGUF has no keys for so many tokens that end a text", path=folder, found=len(stated),
            hint=f"leave {vocabulary.tokens[min(left)]!r} out of generation_config.json",
        )  # fmt: skip
    if others and max(others) >= len(vocabulary.tokens):
        raise CheckpointError("'eos_token_id' is not in the vocabulary", path=folder, found=max(others))
    return slots


def _template_keys(templates: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {keys.TEMPLATE: templates["default"]} if "default" in templates else {}
    named_ones = {_key_name(name): source for name, source in templates.items() if name != "default"}
    if named_ones:
        found[keys.TEMPLATES] = list(named_ones)
    return found | {f"{keys.TEMPLATE}.{name}": source for name, source in named_ones.items()}


def _key_name(name: str) -> str:
    """As llama.cpp's converter spells names in keys."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)


def _sampling_keys(folder: Path) -> dict[str, Any]:
    """How tokens are drawn, where generation_config.json says it."""
    path = folder / "generation_config.json"
    settings = Settings(read_settings(path) if path.is_file() else {}, path)
    drawn = settings.flag("do_sample", False)
    names = [name for name in SAMPLING if settings.has(name) and (drawn or name == "repetition_penalty")]
    found: dict[str, Any] = {SAMPLING[name]: settings.number(name, -1e9, 1e9) for name in names}
    if drawn:
        found.setdefault(SAMPLING["temperature"], 1.0)
    if "top_k" in names:
        found[SAMPLING["top_k"]] = max(int(found[SAMPLING["top_k"]]), 0)
    return found


def _own_parts(found: FoundTokenizer, ids: Mapping[str, int], around: tuple[bool, bool]) -> dict[str, Any]:
    """The parts of a tokenizer.json that are not what is made of GGUF's keys alone."""
    if not found.pipeline:
        return {}
    plain = tokenizer_json(found.vocabulary, ids, around)
    return {part: value for part, value in found.pipeline.items() if part not in plain or plain[part] != value}


def _require_alike(original: Tokenizer, vocabulary: Vocabulary, metadata: Mapping[str, Any], folder: Path) -> list[str]:
    """Hold what was written against the folder's tokenizer.

    Returns:
        Notes on tokens that llama.cpp sets apart by their spelling.

    Raises:
        UnsupportedError: if it does not tokenize as the folder does.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in folder_files(metadata, folder).items():
            (Path(scratch) / name).write_bytes(content)
        written = folder_tokenizer(Path(scratch), gguf_unstated(metadata, folder))
        different = first_difference(original, written, ())
    control = keys.control_tokens(vocabulary)
    apart = [
        vocabulary.tokens[number] for number in sorted(control)
        if vocabulary.types[number] not in (PieceType.CONTROL, PieceType.UNKNOWN)
    ]  # fmt: skip
    if different is None and original.special_tokens is not None:
        for spelling in list(original.special_tokens)[:_TRIED_SPECIALS]:
            text = f"a{spelling}b {spelling} c\n".replace("\u2581", " ")
            if original.encode(text, specials=True) != written.encode(text, specials=True):
                different = f"the text {text!r}"
    if different is not None:
        raise UnsupportedError(
            "llama.cpp would tokenize otherwise", path=folder, found=f"a difference in {different}",
            hint="write another format",
        )  # fmt: skip
    return [f"llama.cpp takes {', '.join(apart)} for special tokens, by their spelling"] if apart else []
