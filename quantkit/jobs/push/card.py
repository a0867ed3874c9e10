"""The model card that `push` sends: the folder's README.md, with what hubs read of it and it lacks;
or a short new one.

It is made in memory, since the manifest of the folder has the sha256 of its files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.base.json_values import read_json
from quantkit.errors import RequestError
from quantkit.files.gguf_types import GGUF_SUFFIX
from quantkit.files.hub import silence_library
from quantkit.files.hub_failures import short
from quantkit.formats.authorship import CARD, LICENSE_DETAILS, read_authorship
from quantkit.jobs.output.labels import read_base_model
from quantkit.quality.figures import manifest_or_empty

_FLOATS = (".safetensors", ".bin")
_BEGUN = re.compile(r"\s*---[ \t]*[\r\n]")
_ENDED = re.compile(r"[\r\n]---[ \t]*([\r\n]|$)")


@dataclass(frozen=True)
class Card:
    """A model card as it is sent.

    Attributes:
        content: its text, with the line ends of the README.md that it was made from.
        changed: what differs from that; empty if it is sent as it is.
        is_new: whether there is no README.md.
        license: what it states; None if it does not.
        lacks_base: whether it states no base model, of which quantkit made the model.
    """

    content: bytes
    changed: list[str]
    is_new: bool
    license: Any
    lacks_base: bool


def model_card(
    model: Path, files: Mapping[str, Path], name: str, base_model: str | None, license: str | None
) -> Card:
    """Build the model card of a model.

    Args:
        files: what is sent, by name.
        name: of the repository.
        base_model, license: what it is to state; None leaves what it states, or what the manifest
            records.

    Raises:
        RequestError: if README.md is not UTF-8, or its metadata is not what a hub reads.
    """
    readme = files.get(CARD)
    manifest = manifest_or_empty(model)
    if readme is None and any(name.startswith(f"{CARD}/") for name in files):
        raise RequestError(
            "is a folder, but must be the model card", path=model / CARD, hint="rename it"
        )
    if readme is None:
        original = b""
    else:
        original = readme.read_bytes()
    card = _read(original, readme or model / CARD)
    existing = card.data.to_dict()
    recorded_base = None
    relation = None
    # Without a manifest, a name in config.json may be that of the model itself.
    if manifest:
        recorded_base = read_base_model(model)
        relation = _choose_relation(manifest, files)
    added: dict[str, Any] = {}
    if readme is None:
        existing = _gguf_authorship(model, files)
        # The metadata of a GGUF file names the base of the source. The model of the card is a
        # conversion of that source.
        if recorded_base is not None:
            existing.pop("base_model", None)
        added = existing | _describe_model(model, files, manifest, existing.get("tags", []))
    base = base_model or existing.get("base_model") or recorded_base
    if base and base != existing.get("base_model"):
        added["base_model"] = base
        if relation:
            added["base_model_relation"] = relation
    elif relation and base and base == recorded_base and not existing.get("base_model_relation"):
        added["base_model_relation"] = relation
    if license is not None and license != existing.get("license"):
        added["license"] = license
        # Name and link of the licence that is replaced.
        for key in LICENSE_DETAILS:
            card.data.pop(key, None)
            added.pop(key, None)
    for key, value in added.items():
        card.data[key] = value
    if readme is None:
        card.text = _write_body(name, manifest, base)
    sent = card.data.to_dict()
    # A card that needs nothing keeps its bytes, also where YAML could be written in other ways.
    if readme is not None and not added:
        content = original
    elif sent:
        content = str(card).encode()
    else:
        content = card.text.encode()
    lacks_base = bool(manifest) and not base
    return Card(
        content=content,
        changed=list(added),
        is_new=readme is None,
        license=sent.get("license"),
        lacks_base=lacks_base,
    )


def _gguf_authorship(model: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """Read what the metadata of GGUF files states; several files of a folder are one model in
    several types.
    """
    for name in sorted(files):
        if name.endswith(GGUF_SUFFIX):
            return read_authorship(files[name])
    return read_authorship(model)


def _read(content: bytes, path: Path) -> Any:
    # Imported late: it takes long, and only a model that passed the checks needs it.
    from huggingface_hub import ModelCard

    hint = "correct the lines between --- at its beginning"
    try:
        text = content.decode("utf-8-sig")
        # The library takes such a card for one without metadata, and would put new lines above it.
        if _BEGUN.match(text) and not _ENDED.search(text):
            raise RequestError(
                "its metadata is not terminated", path=path, expected="a line ---", hint=hint
            )
        with silence_library():
            return ModelCard(text)
    except UnicodeDecodeError as error:
        raise RequestError(
            "is not plain text", path=path, found=f"byte {error.start}", expected="UTF-8"
        ) from error
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        raise RequestError(
            "its metadata cannot be read", path=path, found=short(error), hint=hint
        ) from error


def _describe_model(
    model: Path, files: Mapping[str, Path], manifest: Mapping[str, Any], tags: list[str]
) -> dict[str, Any]:
    """Collect the metadata of a new model card but for base model and licence, without what is not
    known; `tags` are the model's own.
    """
    has_weights = any(name.endswith(_FLOATS) and "/" not in name for name in files)
    has_gguf = _has_gguf(files)
    if "config.json" in files:
        config = read_json(model / "config.json")
    else:
        config = {}
    classes = config.get("architectures")
    is_causal = isinstance(classes, list) and any(
        str(class_).endswith("ForCausalLM") for class_ in classes
    )
    facts: dict[str, Any] = {}
    if has_weights and classes and manifest.get("job") != "quantize":
        facts["library_name"] = "transformers"
    # Other GGUF files can be of any kind, such as embedding models.
    if is_causal or (manifest and has_gguf):
        facts["pipeline_tag"] = "text-generation"
    all_tags = list(tags)
    if manifest:
        all_tags.append("quantkit")
    if has_gguf:
        all_tags.append("gguf")
    if all_tags:
        facts["tags"] = list(dict.fromkeys(all_tags))
    return facts


def _choose_relation(manifest: Mapping[str, Any], files: Mapping[str, Path]) -> str | None:
    """Choose the relation to the base model, in the words of hubs; None leaves it to the hub."""
    # GGUF counts as quantized on hubs, also with floats.
    if manifest.get("job") == "quantize" or _has_gguf(files):
        return "quantized"
    if manifest.get("lora"):
        return "finetune"
    return None


def _has_gguf(files: Mapping[str, Path]) -> bool:
    return any(name.endswith(GGUF_SUFFIX) for name in files)


def _write_body(name: str, manifest: Mapping[str, Any], base: object) -> str:
    lines = [f"# {name.rpartition('/')[2]}"]
    if isinstance(base, str):
        lines.append(f"Base model: [{base}](https://huggingface.co/{base}).")
    if manifest:
        lines.append(
            f"Made with quantkit {manifest.get('quantkit_version', '')}: `quantkit"
            f" {manifest.get('job', '')}`."
        )
    return "\n" + "\n\n".join(lines) + "\n"
