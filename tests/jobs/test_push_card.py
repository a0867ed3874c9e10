"""The model card that `push` sends, as huggingface_hub reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from quantkit.jobs.push.card import Card, model_card

README = "README.md"


def _folder(
    path: Path, readme: bytes | None, made: dict[str, Any] | None = None, config: object = None
) -> Path:
    if readme is not None:
        (path / README).write_bytes(readme)
    if made is not None:
        files = {"format_version": 2, "quantkit_version": "1", "files": {}}
        (path / "quantkit.json").write_text(json.dumps({**files, **made}))
    (path / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
    (path / "model.safetensors").touch()
    return path


def _card(folder: Path, base: str | None = None, license: str | None = None) -> Card:
    return model_card(
        folder, {path.name: path for path in folder.iterdir()}, "me/model", base, license
    )


QUANTIZED = {"job": "quantize", "source": {"hub": {"name": "some/base", "commit": "1" * 40}}}


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_what_a_card_lacks_is_added_with_its_line_ends(
    ends: str, mark: str, tmp_path: Path
) -> None:
    text = (
        f"{mark}---\nlanguage: en\nlicense: mit\nown: [1, 2]\n---\n\n#"
        f" M\N{LATIN SMALL LETTER I WITH DIAERESIS}ne\n"
    )
    text = text.replace("\n", ends)
    card = _card(_folder(tmp_path, text.encode(), QUANTIZED))
    read = ModelCard(card.content.decode())
    expected = {"language": "en", "license": "mit", "own": [1, 2], "base_model": "some/base"}
    assert read.data.to_dict() == {**expected, "base_model_relation": "quantized"}
    assert card.content.decode().endswith(
        f"---{ends}{ends}# M\N{LATIN SMALL LETTER I WITH DIAERESIS}ne{ends}"
    )
    assert card.content.count(b"\n") == card.content.count(ends.encode())
    head = card.content.decode().split(ends)
    assert [line.partition(":")[0] for line in head[1:4]] == ["language", "license", "own"]
    assert (card.changed, card.license, card.lacks_base) == (
        ["base_model", "base_model_relation"],
        "mit",
        False,
    )


@pytest.mark.parametrize(
    "text",
    [
        "---\nbase_model: other/base\nlicense: mit # a comment\n---\n",
        "# no metadata\n",
        "",
        "---\n\n---\n# empty\n",
        "---\nbase_model:\n- a/b\n- c/d\n---\n",
    ],
)
def test_a_card_that_lacks_nothing_that_is_known_is_sent_as_it_is(
    text: str, tmp_path: Path
) -> None:
    assert _card(_folder(tmp_path, text.encode())).content == text.encode()
    if "base_model" in text:
        (tmp_path / "made").mkdir()
        card = _card(_folder(tmp_path / "made", text.encode(), QUANTIZED))
        assert (card.content, card.changed) == (text.encode(), [])


def test_what_is_requested_replaces_what_the_card_states(tmp_path: Path) -> None:
    text = (
        "---\nlicense: other\nlicense_name: theirs\nlicense_link: https://x\nbase_model:"
        " a/b\n---\n# Mine\n"
    )
    card = _card(_folder(tmp_path, text.encode(), QUANTIZED), "c/d", "apache-2.0")
    read = ModelCard(card.content.decode())
    assert read.data.to_dict() == {
        "license": "apache-2.0",
        "base_model": "c/d",
        "base_model_relation": "quantized",
    }
    assert read.text == "# Mine\n"
    same = _card(tmp_path, "a/b", "other")
    assert (same.content, same.changed) == (text.encode(), [])


@pytest.mark.parametrize(
    ("made", "config", "base", "relation"),
    [
        (QUANTIZED, None, "some/base", "quantized"),
        ({**QUANTIZED, "job": "convert", "lora": []}, None, "some/base", None),
        ({**QUANTIZED, "job": "convert", "lora": [{"path": "x"}]}, None, "some/base", "finetune"),
        (
            {"job": "quantize", "source": {}},
            {"_name_or_path": "in/config"},
            "in/config",
            "quantized",
        ),
        (
            {"job": "quantize", "source": {"hub": {"name": "../x"}}},
            {"_name_or_path": "/a/b"},
            None,
            None,
        ),
        (None, {"_name_or_path": "in/config"}, None, None),
    ],
)
def test_the_base_model_is_what_the_manifest_records(
    made: dict[str, Any] | None,
    config: object,
    base: str | None,
    relation: str | None,
    tmp_path: Path,
) -> None:
    card = _card(_folder(tmp_path, None, made, config))
    stated = ModelCard(card.content.decode()).data.to_dict()
    assert (stated.get("base_model"), stated.get("base_model_relation")) == (base, relation)
    assert (card.is_new, card.license, card.lacks_base) == (
        True,
        None,
        made is not None and base is None,
    )


def test_a_new_card_states_what_is_known_alone(tmp_path: Path) -> None:
    card = _card(_folder(tmp_path, None), license="mit")
    assert (
        card.content.decode()
        == "---\nlibrary_name: transformers\nlicense: mit\npipeline_tag: text-generation\n---\n\n#"
        " model\n"
    )
    (tmp_path / "other").mkdir()
    assert _card(_folder(tmp_path / "other", None, config={"a": 1})).content == b"\n# model\n"
