"""The folder of a GGUF file's metadata: tokenizer, chat templates and generation settings, as files
that transformers and `load_tokenizer` read.

They tokenize text as the model's own tokenizer does: llama.cpp's keys say nearly all of it (see
`tokenizer_json`), and quantkit writes the other parts of a tokenizer.json into the file.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value, parse_object, shortest
from quantkit.errors import CheckpointError, name_as
from quantkit.files.located import gguf_file, locate_model, read_parts
from quantkit.text import gguf_vocabulary as keys
from quantkit.text.end_tokens import find_answer_end
from quantkit.text.gguf_vocabulary import GgufUnstated, Vocabulary, gguf_unstated
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
PIPELINE_PARTS = ("normalizer", "pre_tokenizer", "decoder")
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
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_folders: dict[tuple[Path, int, int], Path] = {}
_unstated: dict[Path, GgufUnstated] = {}


def text_folder(path: str | Path) -> Path:
    """Return the folder with a model's tokenizer, chat templates and generation settings. For a
    GGUF file, or a folder whose only tokenizer is in one, it is made from the metadata, and exists
    until the process ends.

    Raises:
        CheckpointError: if the file is damaged, or its tokenizer is.
        UnsupportedError: if its tokenizer cannot be rebuilt exactly.
    """
    model = locate_model(path)
    if any((model / name).is_file() for name in _TOKENIZERS):
        file = None
    else:
        file = gguf_file(model)
    if file is None:
        return model
    state = file.stat()
    version = (file.resolve(), state.st_size, state.st_mtime_ns)
    if version not in _folders or not _folders[version].is_dir():
        _folders[version] = folder = write_folder(read_parts(file)[0].metadata, file)
        name_as(folder, file)
    return _folders[version]


def write_folder(metadata: Mapping[str, Any], path: Path) -> Path:
    """Return a temporary folder with `folder_files`, which exists at most until the process
    ends.
    """
    files = folder_files(metadata, path)
    unstated = gguf_unstated(metadata, path)
    folder = Path(tempfile.mkdtemp(prefix="quantkit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if unstated is not None:
        _unstated[folder] = unstated
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def find_unstated(folder: Path) -> GgufUnstated | None:
    """Return what the GGUF metadata of a folder from `write_folder` does not state; None for any
    other folder.
    """
    return _unstated.get(folder)


def folder_files(metadata: Mapping[str, Any], path: Path) -> dict[str, bytes]:
    """Return the files of a folder with the tokenizer, chat templates and generation settings of a
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
    adds = keys.begins_and_ends(settings, vocabulary, ids)
    pipeline_settings = _read_pipeline_settings(settings)
    files: dict[str, bytes] = {}
    if vocabulary.model == keys.BPE or scores_are_ranks(
        _mergeable(vocabulary, ids), vocabulary.ids()
    ):
        raw = tokenizer_json(vocabulary, ids, adds)
        if keys.PIPELINE in metadata:
            raw |= {
                part: pipeline_settings.values[part]
                for part in PIPELINE_PARTS
                if part in pipeline_settings.values
            }
            if pipeline_settings.has(keys.RUN_MERGES):
                raw["model"]["merges"] = _with_run_merges(
                    raw["model"]["merges"], pipeline_settings, set(raw["model"]["vocab"])
                )
            raw["model"]["ignore_merges"] = pipeline_settings.flag(
                keys.IGNORE_MERGES, raw["model"]["ignore_merges"]
            )
            controls = vocabulary.tokens_of(PieceType.CONTROL, PieceType.UNKNOWN)
            # In quantkit's files the types say which tokens are special.
            for token in raw["added_tokens"]:
                token["special"] = token["id"] in controls
            if pipeline_settings.has("added_tokens"):
                flags = pipeline_settings.inside("added_tokens")
            else:
                flags = Settings({}, pipeline_settings.path)
            for token in raw["added_tokens"]:
                if flags.has(number := str(token["id"])):
                    token.update(
                        {flag: flags.inside(number).flag(flag, False) for flag in TOKEN_FLAGS}
                    )
        else:
            # llama.cpp finds runs of spaces in text. transformers has no added tokens for them,
            # only merges.
            runs = keys.space_runs(vocabulary)
            raw["added_tokens"] = [
                token for token in raw["added_tokens"] if token["id"] not in runs
            ]
            if any(name in str(metadata.get("general.name")).lower() for name in ("phi-3", "phi3")):
                for token in raw["added_tokens"]:  # as llama.cpp does for models of this name
                    token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
        files["tokenizer.json"] = _json(raw, indent=None)
    if vocabulary.model == keys.SPM and vocabulary.types.count(PieceType.UNKNOWN) == 1:
        files["tokenizer.model"] = _sentencepiece(vocabulary, ids)
    if not files:
        raise CheckpointError(
            "the tokenizer has several equal scores, and no unknown token", path=path
        )
    names = {name: vocabulary.tokens[ids[name]] if name in ids else None for name in keys.ID_KEYS}
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
    if list(templates) == ["default"]:
        files["chat_template.jinja"] = templates["default"].encode()
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": source} for name, source in templates.items()
        ]
    files["tokenizer_config.json"] = _json(config)
    files["special_tokens_map.json"] = _json(
        {name: token for name, token in names.items() if token is not None}
    )
    files["generation_config.json"] = _json(
        _generation(settings, vocabulary, ids, names, templates.get("default"))
    )
    return files


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
    vocab = {spelling: number for number, spelling in enumerate(spellings)}
    if spm:
        merges = _order_merges_by_score(vocabulary, ids, vocab)
        ignore_merges = False
        normalizer: dict[str, Any] | None = REPLACE_SPACES
        steps: list[dict[str, Any]] = [RESTORE_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
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
        "post_processor": _around(vocabulary, ids, adds),
        "decoder": decoder,
        "model": model,
    }


def json_spellings(vocabulary: Vocabulary) -> list[str]:
    """Return the spelling of each token in a tokenizer.json.

    llama.cpp finds added tokens in text before it replaces spaces by U+2581, so GGUF spells runs of
    spaces with spaces. tokenizer.json has them with U+2581: there they are made by merges, after
    normalization.
    """
    if vocabulary.model != keys.SPM:
        return list(vocabulary.tokens)
    runs = keys.space_runs(vocabulary)
    result: list[str] = []
    for number, token in enumerate(vocabulary.tokens):
        result.append(SPACE * len(token) if number in runs else token)
    return result


def _order_merges_by_score(
    vocabulary: Vocabulary, ids: Mapping[str, int], vocab: Mapping[str, int]
) -> list[Pair]:
    """Return the merges that a vocabulary with scores stands for: runs of spaces first, then by
    score.

    The scores of added tokens say nothing about the order of merges. transformers takes runs in the
    order of their ids, and of each run the pairs with the longest first part first.
    """
    runs = []
    for number in sorted(keys.space_runs(vocabulary)):
        runs.append(SPACE * len(vocabulary.tokens[number]))
    merges = []
    for run in runs:
        for pair in reversed(list(splits(run, vocab))):
            merges.append(pair)
    order = {token: -score for token, score in _mergeable(vocabulary, ids).items()}
    return merges + merges_by_rank(order, vocab)


def _templates(settings: Settings) -> dict[str, str]:
    """Return a file's chat templates by name."""
    if settings.has(keys.TEMPLATE):
        found = {"default": settings.string(keys.TEMPLATE)}
    else:
        found = {}
    for name in settings.strings(keys.TEMPLATES) if settings.has(keys.TEMPLATES) else []:
        found[name] = settings.string(f"{keys.TEMPLATE}.{name}")
    return {
        name: source.replace("\r\n", "\n").replace("\r", "\n") for name, source in found.items()
    }


def _around(
    vocabulary: Vocabulary, ids: Mapping[str, int], adds: tuple[bool, bool]
) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS."""
    names = [name for name, add in zip(("bos_token", "eos_token"), adds, strict=True) if add]
    if not names:
        return None
    tokens = {vocabulary.tokens[ids[name]]: ids[name] for name in names}

    def with_specials(letter: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = [{"Sequence": {"id": letter, "type_id": 0}}]
        for name in names:
            token = {"SpecialToken": {"id": vocabulary.tokens[ids[name]], "type_id": 0}}
            items.insert(0 if name == "bos_token" else len(items), token)
        return items

    return {
        "type": "TemplateProcessing",
        "single": with_specials("A"),
        "pair": [*with_specials("A"), *with_specials("B")],
        "special_tokens": {
            token: {"id": token, "ids": [n], "tokens": [token]} for token, n in tokens.items()
        },
    }


def _mergeable(vocabulary: Vocabulary, ids: Mapping[str, int]) -> dict[str, float]:
    """Return the scores of the tokens that merges result in."""
    numbers = vocabulary.tokens_of(PieceType.NORMAL, PieceType.UNUSED) - keys.special_ids(
        vocabulary, ids
    )
    result: dict[str, float] = {}
    for number in sorted(numbers):
        result[vocabulary.tokens[number]] = vocabulary.scores[number]
    return result


def _sentencepiece(vocabulary: Vocabulary, ids: Mapping[str, int]) -> bytes:
    # llama.cpp merges them like others.
    kinds = {PieceType.UNUSED: PieceType.NORMAL}
    pieces = []
    for token, score, kind in zip(
        vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
    ):
        pieces.append(
            (
                token.replace(" ", SPACE) if kind is PieceType.USER_DEFINED else token,
                score,
                kinds.get(kind, kind),
            )
        )
    numbers = {"unk": vocabulary.types.index(PieceType.UNKNOWN)}
    numbers |= {name: ids.get(f"{name}_token", -1) for name in ("bos", "eos", "pad")}
    return sentencepiece_bytes(
        SentencePieceFile(pieces, True, vocabulary.space_prefix, plain=True, ids=numbers)
    )


def run_merges(merges: Sequence[Pair], apart: Collection[str] = ()) -> list[list[Any]]:
    """Return the merges that result in runs of U+2581, each with its place in the list of merges.

    Args:
        merges: best first.
        apart: other tokens that are found in text before pairs are merged; merges that result in
            them do not count.
    """
    kept = [pair for pair in merges if "".join(pair) not in apart]
    result: list[list[Any]] = []
    for place, pair in enumerate(kept):
        if not "".join(pair).strip(SPACE):
            result.append([place, *pair])
    return result


def _with_run_merges(
    merges: Sequence[Pair], pipeline_settings: Settings, vocab: set[str]
) -> list[Pair]:
    """Put the merges of runs of spaces, whose order scores do not state, where the original
    tokenizer has them.
    """
    where = f"{pipeline_settings.path}: {keys.RUN_MERGES}"
    listed = pipeline_settings.need(keys.RUN_MERGES)
    if not isinstance(listed, list) or len(listed) > _MAX_RUN_MERGES:
        raise CheckpointError("is not a list of merges", path=where, found=format_value(listed))
    result = [pair for pair in merges if "".join(pair).strip(SPACE)]
    for entry in listed:
        place, pair = _run_merge(entry)
        if pair is None or not 0 <= place <= len(result) or not {*pair, "".join(pair)} <= vocab:
            raise CheckpointError("is not a list of merges", path=where, found=format_value(entry))
        result.insert(place, pair)
    return result


def _run_merge(entry: object) -> tuple[int, Pair | None]:
    """Return the place and the pair of an entry of `run_merges` in a file; no pair if it is not
    of that form.
    """
    if not isinstance(entry, list) or len(entry) != 3:
        return 0, None
    place, first, second = entry
    if type(place) is not int or not isinstance(first, str) or not isinstance(second, str):
        return 0, None
    return place, (first, second)


def _read_pipeline_settings(settings: Settings) -> Settings:
    """Return the parts of a tokenizer.json that quantkit wrote into the file."""
    where = f"{settings.path}: {keys.PIPELINE}"
    known = {
        *PIPELINE_PARTS,
        keys.RUN_MERGES,
        keys.IGNORE_MERGES,
        "added_tokens",
        "bos_token",
        "eos_token",
    }
    own = Settings(
        parse_object(settings.string(keys.PIPELINE), where) if settings.has(keys.PIPELINE) else {},
        where,
    )
    if unknown := sorted(set(own.values) - known):
        raise CheckpointError("holds an unknown key", path=where, found=format_value(unknown[0]))
    return own


def _generation(
    settings: Settings,
    vocabulary: Vocabulary,
    ids: Mapping[str, int],
    names: Mapping[str, str | None],
    template: str | None,
) -> dict[str, Any]:
    """Return the contents of generation_config.json: special tokens, end tokens and sampling.

    Args:
        names: spellings of special tokens by their names in templates.
        template: the default chat template.
    """
    found: dict[str, Any] = {}
    for name in ("bos_token", "pad_token"):
        if name in ids:
            found[f"{name}_id"] = ids[name]
    ends = keys.read_ends(settings, vocabulary, ids)
    if template is not None and not settings.has(keys.ENDS):
        specials = {}
        for number in keys.special_ids(vocabulary, ids):
            specials[vocabulary.tokens[number]] = number
        answer_end = find_answer_end(template, names=names, specials=specials, ends=ends)
        if answer_end is None:
            ends += []
        else:
            ends += [answer_end]
    found["eos_token_id"] = ends
    sampling = {}
    for name, key in SAMPLING.items():
        if settings.has(key):
            sampling[name] = shortest(settings.number(key, *_RANGES[name]))
    # All tokens, 0 in transformers.
    if sampling.get("top_k", 1) <= 0:
        sampling["top_k"] = 0
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    random = {}
    for name, value in sampling.items():
        if name != "repetition_penalty":
            random[name] = value
    if random and random.get("temperature", 1.0) <= 0:  # greedy
        penalty = {name: value for name, value in sampling.items() if name not in random}
        return {**found, "do_sample": False, **penalty}
    return {**found, **({"do_sample": True} if random else {}), **sampling}


def _json(value: Mapping[str, Any], *, indent: int | None = 2) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=False).encode() + b"\n"
