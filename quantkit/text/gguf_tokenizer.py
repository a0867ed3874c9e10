"""Write a GGUF file's metadata as a folder: tokenizer, chat templates and generation settings, in
files that transformers and `load_tokenizer` read.

They tokenize text as the model's own tokenizer does: llama.cpp's keys say nearly all of it (see
`tokenizer_json`), and quantkit writes the other parts of a tokenizer.json into the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value, parse_object, shorten_float32
from quantkit.errors import CheckpointError
from quantkit.text import gguf_vocabulary as keys
from quantkit.text.end_tokens import find_answer_end
from quantkit.text.generation_settings import SUPPRESS_TOKENS
from quantkit.text.gguf_vocabulary import Vocabulary
from quantkit.text.merges import Pair, merges_by_rank, scores_are_ranks, splits
from quantkit.text.pipeline import (
    PREPEND_SPACE,
    REPLACE_SPACES,
    RESTORE_SPACES,
    SPACE,
    normalizer_of,
    patterns_by_name,
    pre_tokenizer,
)
from quantkit.text.sentencepiece_file import PieceType, SentencePieceFile, sentencepiece_bytes

SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Keys by the names in generation_config.json."""
POST_PROCESSOR = "post_processor"
PIPELINE_PARTS = ("normalizer", "pre_tokenizer", "decoder", POST_PROCESSOR)
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_MIN = 1e-6
_MAX = 1e9
# Gemma, with runs of up to 31 spaces, has 465.
_MAX_RUN_MERGES = 1 << 14
_RANGES = {
    "temperature": (-_MAX, _MAX),
    "top_k": (-_MAX, _MAX),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (_MIN, _MAX),
}


def build_folder_files(metadata: Mapping[str, Any], path: Path) -> dict[str, bytes]:
    """Build the files of a folder with the tokenizer, chat templates and generation settings of a
    GGUF file.

    Returns:
        Contents by name: tokenizer.json or tokenizer.model or both, and their side files; empty for
        a file without a tokenizer.

    Raises:
        CheckpointError: if the metadata contradicts itself.
        UnsupportedError: for a tokenizer that cannot be rebuilt exactly.
    """
    vocabulary = keys.read_vocabulary(metadata, path)
    if vocabulary is None:
        return {}
    settings = Settings(metadata, path)
    ids = keys.read_ids(settings, vocabulary)
    adds = keys.read_added_ends(settings, vocabulary, ids)
    pipeline_settings = _read_pipeline_settings(settings)
    files: dict[str, bytes] = {}
    # A tokenizer.json needs a list of merges; other scores are only written as a tokenizer.model.
    has_merges = vocabulary.model == keys.BPE or len(vocabulary.merges) > 0
    if has_merges or scores_are_ranks(_mergeable(vocabulary, ids), vocabulary.ids()):
        raw = tokenizer_json(vocabulary, ids, adds)
        if keys.PIPELINE in metadata:
            _restore_parts(raw, vocabulary, pipeline_settings)
        else:
            _adapt_added_tokens(raw, vocabulary, str(metadata.get("general.name")))
        files["tokenizer.json"] = _json(raw, indent=None)
    # A sentencepiece model has exactly one unknown piece, and no merges but those of its scores.
    if not has_merges and vocabulary.types.count(PieceType.UNKNOWN) == 1:
        files["tokenizer.model"] = _sentencepiece(vocabulary, ids)
    if not files:
        raise CheckpointError(
            "the tokenizer has several equal scores, and no unknown token", path=path
        )
    names: dict[str, str | None] = {}
    for name in keys.ID_KEYS:
        names[name] = vocabulary.tokens[ids[name]] if name in ids else None
    for name, is_added in zip(("bos_token", "eos_token"), adds, strict=True):
        if name in pipeline_settings.values and not is_added:
            # llama.cpp requires one, the tokenizer has none.
            names[name] = None
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    templates = _templates(settings)
    # A chat_template.jinja would hide the templates with other names.
    if list(templates) == ["default"]:
        files["chat_template.jinja"] = templates["default"].encode()
    elif templates:
        config["chat_template"] = []
        for name, source in templates.items():
            config["chat_template"].append({"name": name, "template": source})
    files["tokenizer_config.json"] = _json(config)
    spellings = {name: token for name, token in names.items() if token is not None}
    files["special_tokens_map.json"] = _json(spellings)
    files["generation_config.json"] = _json(
        _build_generation_config(settings, vocabulary, ids, names, templates.get("default"))
    )
    return files


def _restore_parts(
    raw: dict[str, Any], vocabulary: Vocabulary, pipeline_settings: Settings
) -> None:
    """Put the parts that quantkit wrote into the file in their places in a tokenizer.json."""
    for part in PIPELINE_PARTS:
        if part in pipeline_settings.values:
            raw[part] = pipeline_settings.values[part]
    model = raw["model"]
    if pipeline_settings.has(keys.RUN_MERGES):
        model["merges"] = _with_run_merges(model["merges"], pipeline_settings, set(model["vocab"]))
    model["ignore_merges"] = pipeline_settings.flag(keys.IGNORE_MERGES, model["ignore_merges"])
    # In quantkit's files the types say which tokens are special.
    controls = vocabulary.tokens_of(PieceType.CONTROL, PieceType.UNKNOWN)
    for token in raw["added_tokens"]:
        token["special"] = token["id"] in controls
    if not pipeline_settings.has("added_tokens"):
        return
    flags_by_id = pipeline_settings.inside("added_tokens")
    for token in raw["added_tokens"]:
        number = str(token["id"])
        if flags_by_id.has(number):
            flags = flags_by_id.inside(number)
            for flag in TOKEN_FLAGS:
                token[flag] = flags.flag(flag, False)


def _adapt_added_tokens(raw: dict[str, Any], vocabulary: Vocabulary, model_name: str) -> None:
    """Change the added tokens of a tokenizer.json whose parts the file does not state, to those of
    transformers.
    """
    # llama.cpp finds runs of spaces in text. transformers has no added tokens for them, only
    # merges.
    runs = keys.space_runs(vocabulary)
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["id"] not in runs]
    # llama.cpp drops the space after special tokens for models of this name.
    lowered_name = model_name.lower()
    if "phi-3" in lowered_name or "phi3" in lowered_name:
        for token in raw["added_tokens"]:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_json(
    vocabulary: Vocabulary, ids: Mapping[str, int], adds: tuple[bool, bool]
) -> dict[str, Any]:
    """Build the tokenizer.json of the model that a GGUF vocabulary belongs to.

    It tokenizes as llama.cpp does, except where llama.cpp is known to differ from the models' own
    tokenizers: text is normalized to NFC for Qwen, and no token is special because of its spelling.

    Args:
        vocabulary: of the file.
        ids: of the special tokens, by transformers' names.
        adds: whether BOS is added before text, and EOS after it.
    """
    spm = vocabulary.model == keys.SPM
    special = keys.special_ids(vocabulary, ids)
    spellings = json_spellings(vocabulary)
    vocab: dict[str, int] = {}
    for number, spelling in enumerate(spellings):
        vocab[spelling] = number
    if spm:
        merges = list(vocabulary.merges) or _order_merges_by_score(vocabulary, ids, vocab)
        ignore_merges = False
        normalizer: dict[str, Any] | None = REPLACE_SPACES
        steps: list[dict[str, Any]] = [RESTORE_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
        # The decoder strips the space that the normalizer adds.
        if vocabulary.space_prefix:
            normalizer = {"type": "Sequence", "normalizers": [PREPEND_SPACE, REPLACE_SPACES]}
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        decoder: dict[str, Any] = {"type": "Sequence", "decoders": steps}
        splitter = None
    else:
        patterns, ignore_merges = patterns_by_name(vocabulary.pre) or ((), False)
        merges = list(vocabulary.merges)
        normalizer = normalizer_of(vocabulary.pre)
        splitter = pre_tokenizer(patterns)
        decoder = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    if spm and "unk_token" in ids:
        unknown = spellings[ids["unk_token"]]
    else:
        unknown = None
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": spm,
        "byte_fallback": spm,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }
    added: list[dict[str, Any]] = []
    for number in sorted(vocabulary.tokens_of(PieceType.USER_DEFINED) | special):
        added.append(
            {
                "id": number,
                "content": spellings[number],
                **dict.fromkeys(TOKEN_FLAGS, False),
                "special": number in special,
            }
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "post_processor": _build_post_processor(vocabulary, ids, adds),
        "decoder": decoder,
        "model": model,
    }


def json_spellings(vocabulary: Vocabulary) -> list[str]:
    """Spell each token as in a tokenizer.json.

    llama.cpp finds added tokens in text before it replaces spaces by U+2581, so GGUF spells runs of
    spaces with spaces. tokenizer.json has them with U+2581: there they are made by merges, after
    normalization.
    """
    if vocabulary.model != keys.SPM:
        return list(vocabulary.tokens)
    runs = keys.space_runs(vocabulary)
    spellings: list[str] = []
    for number, token in enumerate(vocabulary.tokens):
        spellings.append(SPACE * len(token) if number in runs else token)
    return spellings


def _order_merges_by_score(
    vocabulary: Vocabulary, ids: Mapping[str, int], vocab: Mapping[str, int]
) -> list[Pair]:
    """List the merges that a vocabulary with scores stands for: runs of spaces first, then by
    score.

    The scores of added tokens say nothing about the order of merges. transformers takes runs in the
    order of their ids, and of each run the pairs with the longest first part first.
    """
    merges: list[Pair] = []
    for number in sorted(keys.space_runs(vocabulary)):
        run = SPACE * len(vocabulary.tokens[number])
        merges += reversed(list(splits(run, vocab)))
    order = {token: -score for token, score in _mergeable(vocabulary, ids).items()}
    return merges + merges_by_rank(order, vocab)


def _templates(settings: Settings) -> dict[str, str]:
    """Read a file's chat templates by name."""
    sources: dict[str, str] = {}
    if settings.has(keys.TEMPLATE):
        sources["default"] = settings.string(keys.TEMPLATE)
    if settings.has(keys.TEMPLATES):
        for name in settings.strings(keys.TEMPLATES):
            sources[name] = settings.string(f"{keys.TEMPLATE}.{name}")
    # Jinja expects the newlines of a text file.
    for name, source in sources.items():
        sources[name] = source.replace("\r\n", "\n").replace("\r", "\n")
    return sources


def _build_post_processor(
    vocabulary: Vocabulary, ids: Mapping[str, int], adds: tuple[bool, bool]
) -> dict[str, Any] | None:
    """Build the post-processor that adds BOS and EOS."""
    adds_bos, adds_eos = adds
    before: list[str] = []
    after: list[str] = []
    special_tokens: dict[str, dict[str, Any]] = {}
    for name, is_added, side in (("bos_token", adds_bos, before), ("eos_token", adds_eos, after)):
        if is_added:
            token = vocabulary.tokens[ids[name]]
            side.append(token)
            special_tokens[token] = {"id": token, "ids": [ids[name]], "tokens": [token]}
    if not special_tokens:
        return None

    def with_specials(letter: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for token in before:
            items.append({"SpecialToken": {"id": token, "type_id": 0}})
        items.append({"Sequence": {"id": letter, "type_id": 0}})
        for token in after:
            items.append({"SpecialToken": {"id": token, "type_id": 0}})
        return items

    # The library requires a template for pairs of texts too.
    return {
        "type": "TemplateProcessing",
        "single": with_specials("A"),
        "pair": [*with_specials("A"), *with_specials("B")],
        "special_tokens": special_tokens,
    }


def _mergeable(vocabulary: Vocabulary, ids: Mapping[str, int]) -> dict[str, float]:
    """Select the scores of the tokens that merges result in."""
    # llama.cpp merges unused tokens like others.
    mergeable_ids = vocabulary.tokens_of(PieceType.NORMAL, PieceType.UNUSED)
    mergeable_ids -= keys.special_ids(vocabulary, ids)
    scores: dict[str, float] = {}
    for number in sorted(mergeable_ids):
        scores[vocabulary.tokens[number]] = vocabulary.scores[number]
    return scores


def _sentencepiece(vocabulary: Vocabulary, ids: Mapping[str, int]) -> bytes:
    pieces: list[tuple[str, float, PieceType]] = []
    for token, score, kind in zip(
        vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
    ):
        # GGUF spells added tokens with spaces, sentencepiece with U+2581.
        if kind is PieceType.USER_DEFINED:
            token = token.replace(" ", SPACE)
        # llama.cpp merges unused tokens like others.
        if kind is PieceType.UNUSED:
            kind = PieceType.NORMAL
        pieces.append((token, score, kind))
    special_ids = {"unk": vocabulary.types.index(PieceType.UNKNOWN)}
    for name in ("bos", "eos", "pad"):
        special_ids[name] = ids.get(f"{name}_token", -1)
    return sentencepiece_bytes(
        SentencePieceFile(pieces, True, vocabulary.space_prefix, plain=True, ids=special_ids)
    )


def run_merges(merges: Sequence[Pair], apart: Collection[str] = ()) -> list[list[Any]]:
    """List the merges that result in runs of U+2581, each with its place in the list of merges.

    Args:
        merges: best first.
        apart: other tokens that are found in text before pairs are merged; merges that result in
            them do not count.
    """
    entries: list[list[Any]] = []
    place = 0
    for pair in merges:
        piece = "".join(pair)
        if piece in apart:
            continue
        if not piece.strip(SPACE):
            entries.append([place, *pair])
        place += 1
    return entries


def _with_run_merges(
    merges: Sequence[Pair], pipeline_settings: Settings, vocab: set[str]
) -> list[Pair]:
    """Put the merges of runs of spaces, whose order scores do not state, where the original
    tokenizer has them.
    """
    path = f"{pipeline_settings.path}: {keys.RUN_MERGES}"
    entries = pipeline_settings.need(keys.RUN_MERGES)
    if not isinstance(entries, list) or len(entries) > _MAX_RUN_MERGES:
        raise CheckpointError("is not a list of merges", path=path, found=format_value(entries))
    ordered_merges = [pair for pair in merges if "".join(pair).strip(SPACE)]
    # Places are those in the complete list, so entries must be inserted in their order.
    for entry in entries:
        place, pair = _run_merge(entry)
        in_range = 0 <= place <= len(ordered_merges)
        if pair is None or not in_range or not {*pair, "".join(pair)} <= vocab:
            raise CheckpointError("is not a list of merges", path=path, found=format_value(entry))
        ordered_merges.insert(place, pair)
    return ordered_merges


def _run_merge(entry: object) -> tuple[int, Pair | None]:
    """Parse the place and the pair of an entry of `run_merges` in a file; no pair if it is not of
    that form.
    """
    if not isinstance(entry, list) or len(entry) != 3:
        return 0, None
    place, first, second = entry
    if type(place) is not int or not isinstance(first, str) or not isinstance(second, str):
        return 0, None
    return place, (first, second)


def _read_pipeline_settings(settings: Settings) -> Settings:
    """Read the parts of a tokenizer.json that quantkit wrote into the file."""
    path = f"{settings.path}: {keys.PIPELINE}"
    known_keys = {
        *PIPELINE_PARTS,
        keys.RUN_MERGES,
        keys.IGNORE_MERGES,
        "added_tokens",
        "bos_token",
        "eos_token",
    }
    if settings.has(keys.PIPELINE):
        parts = parse_object(settings.string(keys.PIPELINE), path)
    else:
        parts = {}
    # A key that is not known may change how text is tokenized.
    unknown_keys = sorted(set(parts) - known_keys)
    if unknown_keys:
        first_key = format_value(unknown_keys[0])
        raise CheckpointError("has an unknown key", path=path, found=first_key)
    return Settings(parts, path)


def _build_generation_config(
    settings: Settings,
    vocabulary: Vocabulary,
    ids: Mapping[str, int],
    names: Mapping[str, str | None],
    template: str | None,
) -> dict[str, Any]:
    """Build the contents of generation_config.json: special tokens, end tokens and sampling.

    Args:
        names: spellings of special tokens by their names in templates.
        template: the default chat template.
    """
    generation_config: dict[str, Any] = {}
    for name in ("bos_token", "pad_token"):
        if name in ids:
            generation_config[f"{name}_id"] = ids[name]
    ends = keys.read_ends(settings, vocabulary, ids)
    # quantkit's key lists all end tokens. Other files may leave out one that llama.cpp recognizes
    # by its spelling.
    if template is not None and not settings.has(keys.ENDS):
        specials: dict[str, int] = {}
        for number in keys.special_ids(vocabulary, ids):
            specials[vocabulary.tokens[number]] = number
        answer_end = find_answer_end(template, names=names, specials=specials, ends=ends)
        if answer_end is not None:
            ends.append(answer_end)
    generation_config["eos_token_id"] = ends
    suppressed_ids = keys.read_suppressed(settings)
    if suppressed_ids:
        generation_config[SUPPRESS_TOKENS] = suppressed_ids
    sampling: dict[str, float] = {}
    for name, key in SAMPLING.items():
        if settings.has(key):
            sampling[name] = shorten_float32(settings.number(key, *_RANGES[name]))
    # llama.cpp keeps all tokens if it is not positive, transformers if it is 0.
    if sampling.get("top_k", 1) <= 0:
        sampling["top_k"] = 0
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    penalty_name = "repetition_penalty"
    if not sampling.keys() - {penalty_name}:
        return {**generation_config, **sampling}
    # llama.cpp decodes greedily at such temperatures, where only the penalty has an effect.
    if sampling.get("temperature", 1.0) <= 0:
        generation_config["do_sample"] = False
        if penalty_name in sampling:
            generation_config[penalty_name] = sampling[penalty_name]
        return generation_config
    return {**generation_config, "do_sample": True, **sampling}


def _json(value: Mapping[str, Any], *, indent: int | None = 2) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=False).encode() + b"\n"
