"""Write a folder's tokenizer in another form: as GGUF's metadata for llama.cpp, with chat templates
and generation settings; or, if it is a sentencepiece or tiktoken file, as a ``tokenizer.json``, for
which transformers needs no further package.

The result is read back and compared with the original: every token, the order of merges, and sample
texts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, read_settings
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.text import gguf_vocabulary as keys
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.compare import first_difference
from quantkit.text.end_tokens import list_end_tokens
from quantkit.text.folder_vocabulary import (
    UNREACHED,
    FoundTokenizer,
    exportable_vocabulary,
    read_folder_vocabulary,
)
from quantkit.text.generation_settings import (
    FILE,
    SUPPRESS_TOKENS,
    list_unapplied,
    read_other_settings,
)
from quantkit.text.gguf_tokenizer import POST_PROCESSOR, SAMPLING, run_merges, tokenizer_json
from quantkit.text.gguf_vocabulary import Vocabulary
from quantkit.text.sentencepiece_file import PieceType
from quantkit.text.special_tokens import special_tokens
from quantkit.text.text_folder import locate_or_extract_text_folder, write_folder
from quantkit.text.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    ids_around_text,
    load_original_tokenizer,
    load_tokenizer,
)

_NUM_TRIED_SPECIALS = 64


def tokenizer_metadata(
    folder: Path, rows: int, templates: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Build the metadata from which llama.cpp tokenizes, and makes a prompt of a conversation.

    Args:
        folder: with the tokenizer, or a GGUF file.
        rows: of the embedding, to which tokens are filled up.
        templates: chat templates by name; None for those of the folder.

    Returns:
        Plain values by key, as for `build_header`; and notes on what llama.cpp does differently.

    Raises:
        CheckpointError: if there is no tokenizer, it is damaged, or has more tokens than there are
            rows.
        UnsupportedError: for a tokenizer that llama.cpp does not have, or would use differently.
    """
    model = folder
    folder = locate_or_extract_text_folder(folder)
    tokenizer = load_tokenizer(folder)
    folder_vocabulary = read_folder_vocabulary(folder)
    vocabulary = _fill_vocabulary(folder_vocabulary.vocabulary, rows, folder)
    ids = _special_ids(folder, tokenizer, folder_vocabulary)
    around = ids_around_text(tokenizer)
    adds = _find_added_ends(around, ids, folder)
    ends = list(dict.fromkeys([*list_end_tokens(folder), *tokenizer.eos_ids]))
    names_eos = "eos_token" in ids
    if ends and not names_eos:
        # Without this key llama.cpp has a default id, and would end there too.
        ids["eos_token"] = ends[0]
    metadata: dict[str, Any] = {
        keys.MODEL: vocabulary.model,
        keys.PRE: vocabulary.pre or "default",
        keys.TOKENS: list(vocabulary.tokens),
        keys.TYPES: [int(kind) for kind in vocabulary.types],
    }
    if vocabulary.model == keys.SPM:
        metadata |= {
            keys.SCORES: list(vocabulary.scores),
            keys.SPACE_PREFIX: vocabulary.space_prefix,
        }
    else:
        metadata[keys.MERGES] = [" ".join(pair) for pair in vocabulary.merges]
    for name, number in ids.items():
        metadata[keys.ID_KEYS[name]] = number
    if ends:
        metadata[keys.ENDS] = ends
    metadata |= _end_keys(folder, ends, ids, folder_vocabulary.vocabulary)
    metadata |= {keys.ADD_BOS: adds[0], keys.ADD_EOS: adds[1]}
    if templates is None:
        templates = ChatTemplates(folder).sources
    metadata |= _template_keys(templates)
    metadata |= _sampling_keys(folder, len(vocabulary.tokens))
    unadded = _describe_unadded_tokens(around, adds, vocabulary.tokens)
    unexpressed = _list_unexpressed_parts(
        folder_vocabulary, ids, adds, has_unadded_tokens=bool(unadded)
    )
    # llama.cpp requires these tokens, and the tokenizer does not have them.
    if tokenizer.bos_id is None and "bos_token" in ids and not adds[0]:
        unexpressed["bos_token"] = None
    if ends and not names_eos:
        unexpressed["eos_token"] = None
    # An empty object says that GGUF's keys state all parts of the tokenizer.json.
    if unexpressed or folder_vocabulary.pipeline:
        metadata[keys.PIPELINE] = json.dumps(unexpressed, ensure_ascii=False)
    notes = [
        *folder_vocabulary.notes,
        *unadded,
        *_compare_written(tokenizer, folder_vocabulary.vocabulary, metadata, folder),
    ]
    lost = list_unapplied(read_other_settings(folder))
    if SUPPRESS_TOKENS in lost:
        lost.remove(SUPPRESS_TOKENS)
    if lost:
        notes.append(f"GGUF has no keys for these settings of {FILE}: {', '.join(lost)}")
    guessed = sorted(keys.eos_by_spelling(folder_vocabulary.vocabulary.ids()) - set(ends))
    if guessed:
        spellings = ", ".join(folder_vocabulary.vocabulary.tokens[number] for number in guessed)
        notes.append(f"llama.cpp also ends a generation at {spellings}, by the spelling")
    if "eos_token" not in ids:
        # GGUF has no way to say that there is none.
        default = keys.DEFAULT_EOS[vocabulary.model]
        if default < len(vocabulary.tokens) and default not in ends:
            spelled = vocabulary.tokens[default]
            notes.append(
                f"llama.cpp ends a generation at token {default}, {spelled!r}, because the model"
                " names no EOS"
            )
    return metadata, [f"{model}: {note}" for note in notes]


def _list_unexpressed_parts(
    folder_vocabulary: FoundTokenizer,
    ids: Mapping[str, int],
    adds: tuple[bool, bool],
    *,
    has_unadded_tokens: bool,
) -> dict[str, Any]:
    """List the parts of a folder's tokenizer.json that a reader would not rebuild from GGUF's keys
    alone; none without such a file.
    """
    parts: dict[str, Any] = {}
    if not folder_vocabulary.pipeline:
        return parts
    rebuilt = tokenizer_json(folder_vocabulary.vocabulary, ids, adds)
    for part, value in folder_vocabulary.pipeline.items():
        # A post-processor does nothing but add tokens, in several equivalent ways.
        if part == POST_PROCESSOR and not has_unadded_tokens:
            continue
        if part not in rebuilt or rebuilt[part] != value:
            parts[part] = value
    model = rebuilt["model"]
    merges = folder_vocabulary.run_merges
    if merges and merges != run_merges(model["merges"]):
        parts[keys.RUN_MERGES] = merges
    if folder_vocabulary.ignore_merges != model["ignore_merges"]:
        parts[keys.IGNORE_MERGES] = folder_vocabulary.ignore_merges
    return parts


def export_json(path: Path, scratch: Path, *, alone: bool = True) -> dict[str, bytes] | None:
    """Build ``tokenizer.json`` and ``tokenizer_config.json`` for a ``tokenizer.model``.

    Args:
        path: a sentencepiece or tiktoken file.
        scratch: an empty folder for the comparison.
        alone: whether to ignore the files next to it, as for `SentencePieceTokenizer`.

    Returns:
        Contents by file name; None if the result would not tokenize in the same way.
    """
    from tokenizers import Tokenizer as Engine

    original = load_original_tokenizer(path, alone=alone)
    exportable = exportable_vocabulary(path)
    if exportable is None:
        return None
    vocabulary = exportable.vocabulary
    ids = {name: number for name, number in exportable.ids.items() if name != "pad_token"}
    before, after = ids_around_text(original)
    raw = tokenizer_json(vocabulary, ids, (bool(before), bool(after)))
    # The special tokens of a tiktoken file follow its vocabulary, so that the library gives added
    # tokens the same ids.
    if vocabulary.model == keys.BPE:
        for token in raw["added_tokens"]:
            del raw["model"]["vocab"][token["content"]]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos_token", "eos_token", "unk_token"):
        if name in ids:
            settings[name] = vocabulary.tokens[ids[name]]
    # The library writes the file in its own form, as transformers would save it.
    files = {
        "tokenizer.json": str(Engine.from_str(json.dumps(raw)).to_str()).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    written = JsonTokenizer(scratch / "tokenizer.json")
    if first_difference(original, written, ()) is None:
        return files
    return None


def _fill_vocabulary(vocabulary: Vocabulary, rows: int, folder: Path) -> Vocabulary:
    """Add filler tokens to a vocabulary until it has a token for each row of the embedding."""
    count = len(vocabulary.tokens)
    if count > rows:
        raise CheckpointError(
            "the tokenizer has more tokens than the embedding has rows",
            path=folder,
            found=f"{count} tokens",
            expected=f"at most {rows}",
            hint="the tokenizer belongs to another model",
        )
    missing_ids = range(count, rows)
    scores: list[float] = []
    # Only a vocabulary like sentencepiece's has scores.
    if vocabulary.model == keys.SPM:
        scores = [*vocabulary.scores, *[UNREACHED] * len(missing_ids)]
    return replace(
        vocabulary,
        tokens=[*vocabulary.tokens, *map(keys.filler, missing_ids)],
        types=[*vocabulary.types, *[PieceType.UNUSED] * len(missing_ids)],
        scores=scores,
    )


def _special_ids(
    folder: Path, tokenizer: Tokenizer, folder_tokenizer: FoundTokenizer
) -> dict[str, int]:
    """Find the special tokens' ids by transformers' names: from files next to the tokenizer, from
    itself, or from config.json.
    """
    ids_by_spelling = folder_tokenizer.vocabulary.ids()
    path = folder / "config.json"
    config = Settings(read_settings(path) if path.is_file() else {}, folder)
    tokenizer_ids = dict(folder_tokenizer.ids)
    if tokenizer.bos_id is not None:
        tokenizer_ids["bos_token"] = tokenizer.bos_id
    if tokenizer.eos_ids:
        tokenizer_ids["eos_token"] = tokenizer.eos_ids[0]
    spellings = special_tokens(folder, ids_by_spelling)
    ids: dict[str, int] = {}
    for name in keys.ID_KEYS:
        spelling = spellings.get(name)
        config_id = config.values.get(f"{name}_id")
        if spelling is not None and spelling in ids_by_spelling:
            ids[name] = ids_by_spelling[spelling]
        elif name in tokenizer_ids:
            ids[name] = tokenizer_ids[name]
        # `True` is not an id.
        elif type(config_id) is int and 0 <= config_id < len(ids_by_spelling):
            ids[name] = config_id
    return ids


def _find_added_ends(
    around: tuple[list[int], list[int]], ids: dict[str, int], folder: Path
) -> tuple[bool, bool]:
    """Find out whether BOS is added before text, and EOS after it: all that GGUF can state.

    The tokenizer's BOS replaces that of files in `ids`. `around` are the tokens before and after a
    text. Several before it may be left out if none is a BOS, as in GLM-4: chat templates have them
    too.

    Raises:
        UnsupportedError: for other tokens, without which a model sees texts that it does not know.
    """
    before, after = around
    has_several = len(before) > 1
    loses_bos = has_several and ids.get("bos_token") in before
    if loses_bos or after not in ([], [ids.get("eos_token")]):
        raise UnsupportedError(
            "llama.cpp adds only BOS and EOS tokens to text",
            path=folder,
            found=f"{before} and {after}",
            hint="write another format",
        )
    adds_bos = bool(before) and not has_several
    if adds_bos:
        ids["bos_token"] = before[0]
    return adds_bos, bool(after)


def _describe_unadded_tokens(
    around: tuple[list[int], list[int]], adds: tuple[bool, bool], tokens: Sequence[str]
) -> list[str]:
    """Describe the tokens around a text that llama.cpp does not add, such as GLM-4's."""
    lines: list[str] = []
    for ids, is_added, side in zip(around, adds, ("before", "after"), strict=True):
        if ids and not is_added:
            spelled = "".join(tokens[number] for number in ids)
            lines.append(
                f"llama.cpp does not add {spelled} {side} text, as the tokenizer does; a chat"
                " template may contain it"
            )
    return lines


def _end_keys(
    folder: Path, end_ids: list[int], ids: Mapping[str, int], vocabulary: Vocabulary
) -> dict[str, int]:
    """Assign keys to the EOS tokens after the first: llama.cpp knows most by their spelling, and
    has keys for two others.
    """
    ids_by_spelling = vocabulary.ids()
    recognized_ids = keys.eos_by_spelling(ids_by_spelling)
    unrecognized_ids: list[int] = []
    for number in dict.fromkeys(end_ids):
        if number not in recognized_ids and number != ids.get("eos_token"):
            unrecognized_ids.append(number)
    turn_ids: list[int] = []
    for spelling in keys.TURN_ENDS:
        if ids_by_spelling.get(spelling) in end_ids:
            turn_ids.append(ids_by_spelling[spelling])
    if len(unrecognized_ids) > 1:
        # llama.cpp ends at turn ends by their spelling, so both keys are free for the others.
        turn_ids = []
    slots = dict(zip([keys.EOT, keys.EOM], [*turn_ids[:1], *unrecognized_ids], strict=False))
    without_key = set(unrecognized_ids) - set(slots.values())
    if without_key:
        raise UnsupportedError(
            "GGUF has no keys for this number of EOS tokens",
            path=folder,
            found=len(end_ids),
            hint=f"leave {vocabulary.tokens[min(without_key)]!r} out of generation_config.json",
        )
    if unrecognized_ids and max(unrecognized_ids) >= len(vocabulary.tokens):
        raise CheckpointError(
            "'eos_token_id' is not in the vocabulary", path=folder, found=max(unrecognized_ids)
        )
    return slots


def _template_keys(templates: Mapping[str, str]) -> dict[str, Any]:
    """Build the keys for chat templates, spelled as by llama.cpp's converter."""
    metadata: dict[str, Any] = {}
    if "default" in templates:
        metadata[keys.TEMPLATE] = templates["default"]
    sources_by_name: dict[str, str] = {}
    for name, source in templates.items():
        if name != "default":
            sources_by_name[_format_template_name(name)] = source
    # The list precedes the templates in the file.
    if sources_by_name:
        metadata[keys.TEMPLATES] = list(sources_by_name)
    for name, source in sources_by_name.items():
        metadata[f"{keys.TEMPLATE}.{name}"] = source
    return metadata


def _format_template_name(name: str) -> str:
    """Replace the letters that llama.cpp's converter does not write in a key."""
    letters: list[str] = []
    for letter in name:
        if letter.isascii() and letter.isalnum():
            letters.append(letter)
        else:
            letters.append("_")
    return "".join(letters)


def _sampling_keys(folder: Path, rows: int) -> dict[str, Any]:
    """Read the keys for sampling from generation_config.json, for a vocabulary of `rows` tokens."""
    path = folder / "generation_config.json"
    settings = Settings(read_settings(path) if path.is_file() else {}, path)
    do_sample = settings.flag("do_sample", False)
    sampling: dict[str, Any] = {}
    for name, key in SAMPLING.items():
        # Greedy decoding uses the repetition penalty, and no other of these settings.
        if settings.has(name) and (do_sample or name == "repetition_penalty"):
            sampling[key] = settings.number(name, -1e9, 1e9)
    # llama.cpp has another default temperature than transformers.
    if do_sample:
        sampling.setdefault(SAMPLING["temperature"], 1.0)
    top_k_key = SAMPLING["top_k"]
    if top_k_key in sampling:
        sampling[top_k_key] = max(int(sampling[top_k_key]), 0)
    # transformers ignores ids that the vocabulary does not have.
    suppressed_ids = [number for number in settings.ids(SUPPRESS_TOKENS) if number < rows]
    if suppressed_ids:
        sampling[keys.SUPPRESSED] = list(dict.fromkeys(suppressed_ids))
    return sampling


def _compare_written(
    original: Tokenizer, vocabulary: Vocabulary, metadata: Mapping[str, Any], folder: Path
) -> list[str]:
    """Compare the metadata with the folder's tokenizer.

    Returns:
        Notes on tokens that llama.cpp makes special because of their spelling: it differs on text
        that spells them.

    Raises:
        UnsupportedError: if they tokenize differently.
    """
    scratch = write_folder(metadata, folder)
    written = load_tokenizer(scratch)
    difference = first_difference(original, written, ())
    shutil.rmtree(scratch)
    if difference is None and original.special_tokens is not None:
        for spelling in list(original.special_tokens)[:_NUM_TRIED_SPECIALS]:
            # Text next to a token shows what is done to the spaces around it.
            text = f"a{spelling}b {spelling} c\n".replace("\u2581", " ")
            if original.encode(text, specials=True) != written.encode(text, specials=True):
                difference = f"the text {text!r}"
    if difference is not None:
        raise UnsupportedError(
            "llama.cpp would tokenize differently",
            path=folder,
            found=f"a difference in {difference}",
            hint="write another format",
        )
    controls = vocabulary.tokens_of(PieceType.CONTROL, PieceType.UNKNOWN)
    guessed = keys.eos_by_spelling(vocabulary.ids()) - controls
    spellings = ", ".join(vocabulary.tokens[number] for number in sorted(guessed))
    if guessed:
        return [f"llama.cpp treats {spellings} as special tokens, by their spelling"]
    return []
