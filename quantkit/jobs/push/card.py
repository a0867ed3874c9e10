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
from quantkit.files.gguf_types import GGUF
from quantkit.files.hub import quietly
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
    """Return the model card of a model.

    Args:
        files: what is sent, by name.
        name: of the repository.
        base_model, license: what it is to state; None leaves what it states, or what the manifest
            records.

    Raises:
        RequestError: if README.md is not UTF-8, or its metadata is not what a hub reads.
    """
    readme = files.get(CARD)
    made = manifest_or_empty(model)
    if readme is None and any(name.startswith(f"{CARD}/") for name in files):
        raise RequestError(
            "is a folder, and the place of the model card", path=model / CARD, hint="rename it"
        )
    if readme is None:
        original = b""
    else:
        original = readme.read_bytes()
    card = _read(original, readme or model / CARD)
    before = card.data.to_dict()
    recorded, relation = (
        (read_base_model(model), _choose_relation(made, files)) if made else (None, None)
    )
    new: dict[str, Any] = {}
    if readme is None:
        stated = _gguf_authorship(model, files)
        if recorded is not None:
            stated.pop("base_model", None)  # of the source, of which this is a conversion
        new = stated | _describe_model(model, files, made, stated.get("tags", []))
        before = stated
    base = base_model or before.get("base_model") or recorded
    if base and base != before.get("base_model"):
        new |= {"base_model": base} | ({"base_model_relation": relation} if relation else {})
    elif relation and base and base == recorded and not before.get("base_model_relation"):
        new["base_model_relation"] = relation
    if license is not None and license != before.get("license"):
        new["license"] = license
        for key in LICENSE_DETAILS:  # of the other licence
            card.data.pop(key, None)
            new.pop(key, None)
    for key, value in new.items():
        card.data[key] = value
    if readme is None:
        card.text = _write_body(name, made, base)
    sent = card.data.to_dict()
    if readme is not None and not new:
        content = original
    else:
        content = _text(card, original).encode()
    return Card(content, list(new), readme is None, sent.get("license"), bool(made) and not base)


def _gguf_authorship(model: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """Return what the metadata of GGUF files states; several files of a folder are one model in
    several types.
    """
    paths = [path for name, path in sorted(files.items()) if name.endswith(GGUF)]
    return read_authorship(paths[0] if paths else model)


def _read(content: bytes, path: Path) -> Any:
    from huggingface_hub import ModelCard

    hint = "correct the lines between --- at its beginning"
    try:
        text = content.decode("utf-8-sig")
        if _BEGUN.match(text) and not _ENDED.search(text):
            raise RequestError(
                "its metadata does not end", path=path, expected="a line ---", hint=hint
            )
        with quietly():
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


def _text(card: Any, original: bytes) -> str:
    """Return the text of a card, with the line ends and the order of the metadata that it had;
    older versions of the library have no fixed order for new metadata.
    """
    if not card.data.to_dict():
        return str(card.text)
    end = "\r\n" if b"\r\n" in original else "\n"
    order = list(dict.fromkeys([*getattr(card, "_original_order", ()), *vars(card.data)]))
    return (
        f"---{end}{card.data.to_yaml(line_break=end, original_order=order)}{end}---{end}{card.text}"
    )


def _describe_model(
    model: Path, files: Mapping[str, Path], manifest: Mapping[str, Any], tags: list[str]
) -> dict[str, Any]:
    """Return the metadata of a new model card but for base model and licence, without what is not
    known; `tags` are the model's own.
    """
    floats = any(name.endswith(_FLOATS) and "/" not in name for name in files)
    if "config.json" in files:
        config = read_json(model / "config.json")
    else:
        config = {}
    classes = config.get("architectures")
    causal = isinstance(classes, list) and any(
        str(class_).endswith("ForCausalLM") for class_ in classes
    )
    facts = {
        "library_name": (
            "transformers" if floats and classes and manifest.get("job") != "quantize" else None
        ),
        "pipeline_tag": "text-generation" if causal or (manifest and _has_gguf(files)) else None,
        "tags": list(
            dict.fromkeys(
                [
                    *tags,
                    *(["quantkit"] if manifest else []),
                    *(["gguf"] if _has_gguf(files) else []),
                ]
            )
        ),
    }
    return {key: value for key, value in facts.items() if value}


def _choose_relation(manifest: Mapping[str, Any], files: Mapping[str, Path]) -> str | None:
    """Return how hubs call the relation of what quantkit made to the base model; None leaves it to
    the hub.
    """
    if manifest.get("job") == "quantize" or _has_gguf(files):
        return "quantized"
    if manifest.get("lora"):
        return "finetune"
    return None


def _has_gguf(files: Mapping[str, Path]) -> bool:
    return any(name.endswith(GGUF) for name in files)


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
