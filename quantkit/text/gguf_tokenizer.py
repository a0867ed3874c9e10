"""The folder of a GGUF file's metadata: tokenizer, chat templates and settings of generation, as files that
transformers and `load_tokenizer` read.

What they make of a text is what llama.cpp makes of it, but for parts of a tokenizer.json that quantkit has put into the
file beside what llama.cpp reads.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.json_values import Settings, parsed, shown
from quantkit.text import gguf_vocabulary as keys
from quantkit.text.gguf_vocabulary import Vocabulary
from quantkit.text.merges import merges_by_rank, scores_are_ranks
from quantkit.text.pre_tokenizers import named, pre_tokenizer
from quantkit.text.sentencepiece_file import PieceType, SentencePieceFile, sentencepiece_bytes

SAMPLING = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
"""Keys by the names that generation_config.json has."""
PIPELINE_PARTS = ("normalizer", "pre_tokenizer", "decoder")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_SPACE = "\u2581"
_LEAST, _MOST = 1e-6, 1e9
_RANGES = {
    "temperature": (-_MOST, _MOST), "top_k": (-_MOST, _MOST), "top_p": (0, 1), "min_p": (0, 1),
    "repetition_penalty": (_LEAST, _MOST),
}  # fmt: skip


def folder_files(metadata: Mapping[str, Any], path: Path) -> dict[str, bytes]:
    """The files of a folder that has the tokenizer, chat templates and settings of generation of a GGUF file.

    Args:
        metadata: of its header, in plain values.
        path: the file, for errors.

    Returns:
        Names with contents: tokenizer.json, or tokenizer.model, or both, and what stands beside them; none where the
        file has no tokenizer.

    Raises:
        CheckpointError: if the metadata contradicts itself.
        UnsupportedError: for a tokenizer that cannot be rebuilt exactly.
    """
    vocabulary = keys.read_vocabulary(metadata, path)
    if vocabulary is None:
        return {}
    ids = keys.read_ids(metadata, vocabulary, path)
    adds = keys.begins_and_ends(metadata, vocabulary, ids, path)
    own = _own(metadata, path)
    files: dict[str, bytes] = {}
    if vocabulary.model == keys.BPE or scores_are_ranks(_mergeable(vocabulary), vocabulary.numbers()):
        raw = tokenizer_json(vocabulary, ids, adds)
        raw = _with_own(raw, own) if keys.PIPELINE in metadata else _with_phi3(raw, metadata)
        files["tokenizer.json"] = _json(raw, indent=None)
    if vocabulary.model == keys.SPM and vocabulary.types.count(PieceType.UNKNOWN) == 1:
        files["tokenizer.model"] = _sentencepiece(vocabulary, ids)
    if not files:
        raise CheckpointError("the tokenizer has scores of which several are equal, and no unknown token", path=path)
    names = {name: vocabulary.tokens[ids[name]] if name in ids else None for name in keys.ID_KEYS}
    if "bos_token" in own.values and not adds[0]:
        names["bos_token"] = None  # which llama.cpp has to have, and the model has not
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    templates = read_templates(metadata, path)
    if list(templates) == ["default"]:
        files["chat_template.jinja"] = templates["default"].encode()
    elif templates:
        settings["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    files["tokenizer_config.json"] = _json(settings)
    files["special_tokens_map.json"] = _json({name: token for name, token in names.items() if token is not None})
    files["generation_config.json"] = _json(_generation(metadata, vocabulary, ids, path))
    return files


def tokenizer_json(vocabulary: Vocabulary, ids: Mapping[str, int], adds: tuple[bool, bool]) -> dict[str, Any]:
    """A tokenizer.json that makes of a text what llama.cpp makes of it.

    Args:
        ids: of the special tokens, by transformers' names.
        adds: whether a text gets BOS before it, and EOS after it.
    """
    spm = vocabulary.model == keys.SPM
    control = keys.control_tokens(vocabulary)
    if spm:
        order = {token: -score for token, score in _mergeable(vocabulary).items()}
        merges, whole = merges_by_rank(order, vocabulary.numbers()), False
        spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prefix = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prefix, spaces]} if vocabulary.space_prefix else spaces
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.space_prefix else []
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        steps: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        decoder: dict[str, Any] = {"type": "Sequence", "decoders": steps}
        cut = None
    else:
        patterns, whole = named(vocabulary.pre) or ((), False)
        merges, normalizer, cut = list(vocabulary.merges), None, pre_tokenizer(patterns)
        decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    apart = [number for number, kind in enumerate(vocabulary.types) if kind is PieceType.USER_DEFINED]
    unknown = vocabulary.tokens[ids["unk_token"]] if spm and "unk_token" in ids else None
    model = {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": spm, "byte_fallback": spm, "ignore_merges": whole,
        "vocab": vocabulary.numbers(), "merges": merges,
    }  # fmt: skip
    added: list[dict[str, Any]] = [
        {"id": number, "content": vocabulary.tokens[number], **dict.fromkeys(TOKEN_FLAGS, False),
         "special": number in control}
        for number in sorted({*apart, *control})
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": cut, "post_processor": _around(vocabulary, ids, adds), "decoder": decoder, "model": model,
    }  # fmt: skip


def read_templates(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """A file's chat templates by name.

    Raises:
        CheckpointError: if one of them is missing, or no text.
    """
    settings = Settings(metadata, path)
    found = {"default": settings.text(keys.TEMPLATE)} if settings.has(keys.TEMPLATE) else {}
    for name in settings.texts(keys.TEMPLATES) if settings.has(keys.TEMPLATES) else []:
        found[name] = settings.text(f"{keys.TEMPLATE}.{name}")
    return {name: source.replace("\r\n", "\n").replace("\r", "\n") for name, source in found.items()}


def _around(vocabulary: Vocabulary, ids: Mapping[str, int], adds: tuple[bool, bool]) -> dict[str, Any] | None:
    """What puts BOS before a text and EOS after it."""
    names = [name for name, wanted in zip(("bos_token", "eos_token"), adds, strict=True) if wanted]
    if not names:
        return None
    tokens = {vocabulary.tokens[ids[name]]: ids[name] for name in names}

    def put(letter: str) -> list[dict[str, Any]]:
        around: list[dict[str, Any]] = [{"Sequence": {"id": letter, "type_id": 0}}]
        for name in names:
            token = {"SpecialToken": {"id": vocabulary.tokens[ids[name]], "type_id": 0}}
            around.insert(0 if name == "bos_token" else len(around), token)
        return around

    return {
        "type": "TemplateProcessing", "single": put("A"), "pair": [*put("A"), *put("B")],
        "special_tokens": {token: {"id": token, "ids": [n], "tokens": [token]} for token, n in tokens.items()},
    }  # fmt: skip


def _mergeable(vocabulary: Vocabulary) -> dict[str, float]:
    """The scores of the tokens that are made of others."""
    apart = keys.control_tokens(vocabulary)
    return {
        token: vocabulary.scores[number]
        for number, token in enumerate(vocabulary.tokens)
        if number not in apart and vocabulary.types[number] in (PieceType.NORMAL, PieceType.UNUSED)
    }


def _sentencepiece(vocabulary: Vocabulary, ids: Mapping[str, int]) -> bytes:
    kinds = {PieceType.UNUSED: PieceType.NORMAL}  # llama.cpp makes them of a text as it does others
    pieces = [
        (token.replace(" ", _SPACE) if kind is PieceType.USER_DEFINED else token, score, kinds.get(kind, kind))
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
    ]
    numbers = {"unk": vocabulary.types.index(PieceType.UNKNOWN)}
    numbers |= {name: ids.get(f"{name}_token", -1) for name in ("bos", "eos", "pad")}
    model = SentencePieceFile(
        pieces, byte_pair=True, space_prefix=vocabulary.space_prefix, plain=True, ids=numbers
    )  # fmt: skip
    return sentencepiece_bytes(model)


def _own(metadata: Mapping[str, Any], path: Path) -> Settings:
    """What only quantkit has put into the file."""
    where = f"{path}: {keys.PIPELINE}"
    settings = Settings(metadata, path)
    own = Settings(parsed(settings.text(keys.PIPELINE), where) if settings.has(keys.PIPELINE) else {}, where)
    if unknown := sorted(set(own.values) - {*PIPELINE_PARTS, "added_tokens", "bos_token"}):
        raise CheckpointError("holds a key that is not known", path=where, found=shown(unknown[0]))
    return own


def _with_phi3(raw: dict[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """With what llama.cpp does to a model that is called Phi 3: its marks take the blanks behind them."""
    if any(name in str(metadata.get("general.name")).lower() for name in ("phi-3", "phi3")):
        for token in raw["added_tokens"]:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return raw


def _with_own(raw: dict[str, Any], own: Settings) -> dict[str, Any]:
    raw = {**raw, **{part: own.values[part] for part in PIPELINE_PARTS if part in own.values}}
    flags = own.inside("added_tokens") if own.has("added_tokens") else Settings({}, own.path)
    for token in raw["added_tokens"]:
        if flags.has(number := str(token["id"])):
            token.update({flag: flags.inside(number).flag(flag, False) for flag in TOKEN_FLAGS})
    return raw


def _generation(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: Mapping[str, int], path: Path
) -> dict[str, Any]:  # fmt: skip
    settings = Settings(metadata, path)
    found: dict[str, Any] = {
        f"{name}_id": ids[name] for name in ("bos_token", "pad_token") if name in ids
    } | {"eos_token_id": keys.read_ends(metadata, vocabulary, ids, path)}  # fmt: skip
    sampling = {
        name: _short(settings.number(key, *_RANGES[name])) for name, key in SAMPLING.items() if settings.has(key)
    }
    if sampling.get("top_k", 1) <= 0:  # all tokens, which transformers says by 0
        sampling["top_k"] = 0
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    drawn = {name: value for name, value in sampling.items() if name != "repetition_penalty"}
    if drawn and drawn.get("temperature", 1.0) <= 0:  # the likeliest token, which transformers draws without any
        penalty = {name: value for name, value in sampling.items() if name not in drawn}
        return {**found, "do_sample": False, **penalty}
    return {**found, **({"do_sample": True} if drawn else {}), **sampling}


def _short(value: float) -> float:
    """The shortest number that is the same as a float32."""
    return next(
        short
        for short in (float(f"{value:.{digits}g}") for digits in range(1, 18))
        if struct.pack("<f", short) == struct.pack("<f", value)
    )


def _json(value: Mapping[str, Any], *, indent: int | None = 2) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=False).encode() + b"\n"
