"""Who made a model, and under which licence: the metadata of a model card, and GGUF's ``general.*``
keys.

Both say the same, so a conversion carries one over as the other. The keys of a card are those that
hubs know, or else those that llama.cpp's converter reads (``Metadata.apply_metadata_heuristic`` of
the gguf package).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.files.located import gguf_file, read_part_headers

CARD = "README.md"
LICENSE_DETAILS = ("license_name", "license_link")
"""Keys of a card that belong to the licence that it states."""

_LICENSE = ("license", *LICENSE_DETAILS)
_NAME = "general.name"
# Keys of a card for each key of GGUF. The first is written. All are read, and the last of them that
# is stated counts, as in llama.cpp's converter.
_TEXTS: dict[str, tuple[str, ...]] = {
    "general.license": ("license",),
    "general.license.name": ("license_name",),
    "general.license.link": ("license_link",),
    _NAME: ("model_name", "name"),
    "general.author": ("model_creator", "model_author", "author"),
    "general.version": ("model_version", "version"),
    "general.organization": ("model_organization", "organization"),
    "general.description": ("model_description", "description"),
    "general.finetune": ("model_finetune", "finetune"),
    "general.basename": ("model_basename", "basename"),
    "general.size_label": ("model_size_label", "size_label"),
    "general.source.url": ("model_url", "url"),
    "general.source.doi": ("model_doi", "doi"),
    "general.source.repo_url": ("model_repo_url", "repo_url"),
}
_LISTS = {"general.languages": "language", "general.tags": "tags"}
# Each model or data set has several keys, such as `general.base_model.0.name`.
_SOURCES = {"general.base_model": "base_model", "general.dataset": "datasets"}
_RELATION = "base_model_relation"
CARRIED_KEYS = (
    *_LICENSE,
    "base_model",
    _RELATION,
    *(keys[0] for keys in _TEXTS.values() if keys[0] not in _LICENSE),
    *_LISTS.values(),
    "datasets",
)
"""The keys of a card that are carried over, in the order in which they are written."""

_OWN_TAG = "quantkit"
_HUB = "https://huggingface.co/"
_HUB_PAGE = re.compile(r"https?://huggingface\.co/(?:datasets/)?([\w.-]+/[\w.-]+)/?", re.ASCII)
# Names stand in titles and commands of model cards, so those with other characters are not used.
_PLAIN_NAME = re.compile(r"\w[\w .,+&'()/:-]{0,199}")
_LICENSE_IDS = re.compile(r"[a-z0-9.-]+(, ?[a-z0-9.-]+)+")
"""Several licences in GGUF's one string, which llama.cpp's converter joins."""
_NULL_TAG = "tag:yaml.org,2002:null"
_MAX_SOURCES = 64
# Keys of GGUF that belong to one file: its architecture, layout and types, who quantized it, and
# its identity. The name and sampling settings are written elsewhere.
_OF_ONE_FILE = {
    "general.architecture",
    "general.type",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "general.quantized_by",
    "general.uuid",
    _NAME,
}
_SAMPLING = "general.sampling."


def read_front_matter(path: Path) -> dict[str, Any]:
    """Read the YAML head of a card, with all values but null as text; empty if there is no card, or
    none that can be read.

    YAML 1.1 would read the language ``no`` as false and the version ``1.10`` as a number. Hubs and
    llama.cpp's converter do not.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    class TextLoader(yaml.SafeLoader):
        """Reads YAML as spelled."""

    TextLoader.yaml_implicit_resolvers = _keep_null_resolvers(
        yaml.SafeLoader.yaml_implicit_resolvers
    )
    try:
        block = REGEX_YAML_BLOCK.search(path.read_text(encoding="utf-8-sig"))
        if block is None:
            front_matter = None
        else:
            front_matter = yaml.load(block[2], TextLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if isinstance(front_matter, dict):
        return front_matter
    return {}


def _keep_null_resolvers(resolvers: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Select the rules with which YAML recognizes null, by a value's first character.

    A loader without the other rules reads numbers, dates and booleans as text.
    """
    null_resolvers: dict[str, list[Any]] = {}
    for first_character, rules in resolvers.items():
        null_rules = []
        for tag, pattern in rules:
            if tag == _NULL_TAG:
                null_rules.append((tag, pattern))
        null_resolvers[first_character] = null_rules
    return null_resolvers


def read_authorship(path: Path) -> dict[str, Any]:
    """Read who made a model and under which licence.

    Args:
        path: a folder, whose card is read, or a GGUF file; for a folder without a card, the GGUF
            file in it.

    Returns:
        Values by keys of a card, of `CARRIED_KEYS`.
    """
    if (path / CARD).is_file():
        return _select_carried_keys(read_front_matter(path / CARD))
    return _translate_to_card(_read_general(path))


def read_model_name(path: Path) -> str | None:
    """Read the name that a model's card or GGUF's metadata states; None if there is none, or
    not a plain one.
    """
    name: str = read_authorship(path).get("model_name", "")
    if _PLAIN_NAME.fullmatch(name):
        return name
    return None


def gguf_authorship(source: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """Build the ``general.*`` keys of a GGUF file that is made from a model, without its name.

    Args:
        source: the model. From another GGUF file, all keys are carried that do not belong to that
            file alone.
        card: what the output states, by keys of a card.
    """
    if (source / CARD).is_file():
        source_metadata = {}
    else:
        source_metadata = _read_general(source)
    source_card = _translate_to_card(source_metadata)
    # A GGUF file states more than a card can, such as base models without a page on the hub. So
    # its keys are copied as they are, and only those that the output changes are translated.
    changed_keys = set()
    for key in {*source_card, *card}:
        if source_card.get(key) != card.get(key):
            changed_keys.add(key)
    carried = {}
    for key, value in source_metadata.items():
        if _is_carried(key, value) and _card_key(key) not in changed_keys:
            carried[key] = value
    # Sorted, because a set has another order in every process and files must be reproducible.
    changed_card = {key: card[key] for key in sorted(changed_keys) if key in card}
    return carried | _translate_to_gguf(changed_card)


def _is_carried(key: str, value: object) -> bool:
    """Return whether a key describes the model, so that it is also true of another file.

    Keys with values of other types are unknown, and are left out.
    """
    if key in _OF_ONE_FILE or key.startswith(_SAMPLING):
        return False
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    # Not `isinstance`, which is also true of booleans.
    is_count = type(value) is int and key.endswith(".count")
    return is_count or isinstance(value, str)


def _select_carried_keys(front_matter: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keys of a card that are carried, in a fixed order and without values of
    unexpected types.
    """
    card: dict[str, Any] = {}
    # A later name of a key overrides an earlier one, as in llama.cpp's converter.
    for names in _TEXTS.values():
        for name in names:
            value = front_matter.get(name)
            if isinstance(value, str):
                card[names[0]] = value
            elif isinstance(value, list) and name not in _LICENSE:
                # Several authors.
                card[names[0]] = ", ".join(_texts_of(value))
    for key in ("license", *_LISTS.values()):
        value = front_matter.get(key)
        card[key] = _texts_of(value) if isinstance(value, list) else value
    for key in _SOURCES.values():
        value = front_matter.get(key)
        names_on_hub = _names_on_hub(_texts_of(value))
        if isinstance(value, str) and names_on_hub:
            card[key] = names_on_hub[0]
        else:
            card[key] = names_on_hub
    if isinstance(front_matter.get(_RELATION), str):
        card[_RELATION] = front_matter[_RELATION]
    tags = card["tags"]
    if isinstance(tags, str | list) and _OWN_TAG in tags:
        # They name the format and the schemes of a folder that quantkit wrote.
        del card["tags"]
    carried_card: dict[str, Any] = {}
    for key in CARRIED_KEYS:
        value = card.get(key)
        if value and isinstance(value, str | list):
            carried_card[key] = value
    return carried_card


def _translate_to_card(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Translate GGUF's keys to a card's.

    Base models and data sets without an address on the hub are left out.
    """
    card: dict[str, Any] = {}
    for key, names in _TEXTS.items():
        value = metadata.get(key)
        card[names[0]] = value if isinstance(value, str) else None
    licenses = card["license"]
    if licenses is not None and _LICENSE_IDS.fullmatch(licenses):
        card["license"] = licenses.replace(" ", "").split(",")
    for key, name in _LISTS.items():
        card[name] = metadata.get(key)
    for prefix, name in _SOURCES.items():
        names_on_hub: list[str] = []
        for index in range(_count(metadata, prefix)):
            page = _HUB_PAGE.fullmatch(str(metadata.get(f"{prefix}.{index}.repo_url")))
            if page is not None:
                names_on_hub.append(page[1])
        if name == "base_model" and len(names_on_hub) == 1:
            card[name] = names_on_hub[0]
        else:
            card[name] = names_on_hub
    return _select_carried_keys(card)


def _translate_to_gguf(card: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a card's keys to GGUF's, as llama.cpp's converter writes them."""
    metadata: dict[str, Any] = {}
    for key, names in _TEXTS.items():
        if key != _NAME and names[0] in card:
            metadata[key] = ",".join(_as_list(card[names[0]]))
    for key, name in _LISTS.items():
        if name in card:
            metadata[key] = _as_list(card[name])
    for prefix, name in _SOURCES.items():
        sources = _as_list(card.get(name, []))[:_MAX_SOURCES]
        if sources:
            metadata[f"{prefix}.count"] = len(sources)
        for index, source in enumerate(sources):
            for key, value in _source_keys(source).items():
                metadata[f"{prefix}.{index}.{key}"] = value
    return metadata


def _source_keys(source: str) -> dict[str, str]:
    """Build GGUF's keys about a base model or data set on a hub."""
    owner, separator, name = source.rpartition("/")
    if not separator:
        return {"name": _title(name)}
    return {"name": _title(name), "organization": _title(owner), "repo_url": f"{_HUB}{source}"}


def _names_on_hub(sources: Iterable[str]) -> list[str]:
    """Select the base models or data sets that are on a hub, by their names there."""
    names = []
    for source in sources:
        name = _name_on_hub(source)
        if name is not None:
            names.append(name)
    return names


def _name_on_hub(source: str) -> str | None:
    """Find the name on a hub of a base model or data set; None for anything else, such as a path.

    Hubs refuse a card that names something else, and a path shows the folders of a machine.
    """
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils
    page = _HUB_PAGE.fullmatch(source)
    name = source if page is None else page[1]
    try:
        utils.validate_repo_id(name)
    except utils.HFValidationError:
        return None
    return name


def _texts_of(value: object) -> list[str]:
    """Return a string, or the strings in a list, as a list; other values are left out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, str)]
    return []


def _title(name: str) -> str:
    """Spell a name on a hub as a title, as the gguf package does (``Metadata.id_to_title``)."""
    words = []
    for word in name.strip().replace("-", " ").split():
        # Versions and sizes, such as `v2` and `7b`, keep their spelling.
        is_version = re.match(r"^(v\d+(?:\.\d+)*|\d.*)$", word)
        if word.islower() and not is_version:
            words.append(word.title())
        else:
            words.append(word)
    return " ".join(words)


def _as_list(value: str | Iterable[str]) -> list[str]:
    if isinstance(value, str):
        return [value]
    return list(value)


def _count(metadata: Mapping[str, Any], prefix: str) -> int:
    count = metadata.get(f"{prefix}.count", 0)
    if type(count) is int:
        return min(count, _MAX_SOURCES)
    return 0


def _card_key(key: str) -> str | None:
    """Return the key of a card that says the same as a key of GGUF; None if there is none."""
    if key in _TEXTS:
        return _TEXTS[key][0]
    if key in _LISTS:
        return _LISTS[key]
    for prefix, name in _SOURCES.items():
        if key.startswith(f"{prefix}."):
            return name
    return None


def _read_general(path: Path) -> dict[str, Any]:
    """Read the ``general.*`` keys of a GGUF file; empty for any other model."""
    file = gguf_file(path)
    if file is None:
        return {}
    # Size and time are part of the cache's key, so a file that was replaced is read again.
    state = file.stat()
    return _read_general_metadata(file.resolve(), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_general_metadata(file: Path, size: int, modified: int) -> dict[str, Any]:
    """Read the keys once, since a header with a large vocabulary takes a second."""
    general_metadata: dict[str, Any] = {}
    for key, value in read_part_headers(file)[0].metadata.items():
        if key.startswith("general."):
            general_metadata[key] = value
    return general_metadata


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


LICENSE = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}", re.ASCII)
