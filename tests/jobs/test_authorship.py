"""Who made a model and under which licence, through conversions; judged by the gguf package and
by hubs' keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import oracle
import pytest
import yaml
from gguf.metadata import Metadata
from huggingface_hub.utils import validate_repo_id

import quantkit
from quantkit.files.gguf_io import build_header, read_header
from quantkit.jobs.push.card import model_card

FRONT_MATTER = """---
license: other
license_name: a-licence
license_link: https://example.org/licence
base_model: some-owner/base-1b
model_name: Talker 2
model_creator: A. N. Author
language: [en, de]
datasets: [owner/texts]
tags: [chat]
---
# Talker
"""
GENERAL = {
    "general.license": "other",
    "general.license.name": "a-licence",
    "general.license.link": "https://example.org/licence",
    "general.author": "A. N. Author",
    "general.languages": ["en", "de"],
    "general.tags": ["chat"],
    "general.base_model.count": 1,
    "general.base_model.0.name": "Base 1b",
    "general.base_model.0.organization": "Some Owner",
    "general.base_model.0.repo_url": "https://huggingface.co/some-owner/base-1b",
    "general.dataset.count": 1,
    "general.dataset.0.name": "Texts",
    "general.dataset.0.organization": "Owner",
    "general.dataset.0.repo_url": "https://huggingface.co/owner/texts",
}
OF_ONE_FILE = {
    "general.architecture",
    "general.type",
    "general.file_type",
    "general.quantization_version",
}


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authorship") / "talker"
    quantkit.convert(demo_model, path, source_check=False)
    (path / "README.md").write_text(FRONT_MATTER)
    return path


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return quantkit.convert(folder, folder.with_name("talker.gguf"), source_check=False).path


def _general(path: Path) -> dict[str, Any]:
    """The keys about the model in a GGUF file, as the gguf package reads them."""
    fields = gguf.GGUFReader(path).fields
    general = {key: field.contents() for key, field in fields.items() if key.startswith("general.")}
    return {key: value for key, value in general.items() if key not in OF_ONE_FILE}


def _front_matter(path: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load((path / "README.md").read_text().split("---\n")[1])
    return metadata


def _with_metadata(source: Path, target: Path, changes: Mapping[str, Any]) -> Path:
    """Copy a GGUF file with other metadata."""
    header = read_header(source)
    tensors = list(header.tensors.values())
    data = source.read_bytes()[min(tensor.offset for tensor in tensors) :]
    metadata = {
        key: value for key, value in {**header.metadata, **changes}.items() if value is not None
    }
    target.write_bytes(build_header(metadata, tensors) + data)
    return target


def test_a_model_card_becomes_the_metadata_that_llama_cpp_writes(folder: Path, file: Path) -> None:
    general = _general(file)
    assert general == {"general.name": "Talker 2", **GENERAL}
    expected = Metadata.load(model_path=folder)
    assert (general["general.name"], general["general.author"]) == (expected.name, expected.author)
    assert (general["general.license"], general["general.license.name"]) == (
        expected.license,
        expected.license_name,
    )
    assert (general["general.tags"], general["general.languages"]) == (
        expected.tags,
        expected.languages,
    )
    assert expected.base_models is not None
    assert expected.datasets is not None
    for key, source in (("base_model", expected.base_models[0]), ("dataset", expected.datasets[0])):
        assert {name: general[f"general.{key}.0.{name}"] for name in source} == source


def test_gguf_metadata_becomes_a_model_card_that_others_read(file: Path, tmp_path: Path) -> None:
    quantkit.convert(file, tmp_path / "back", source_check=False)
    metadata, expected = (
        _front_matter(tmp_path / "back"),
        yaml.safe_load(FRONT_MATTER.split("---\n")[1]),
    )
    assert metadata == expected
    read = Metadata.load(model_path=tmp_path / "back")
    assert (read.name, read.author) == ("Talker 2", "A. N. Author")
    assert (read.license, read.license_name) == ("other", "a-licence")
    assert read.base_models is not None
    assert read.base_models[0]["repo_url"] == "https://huggingface.co/some-owner/base-1b"
    quantkit.convert(tmp_path / "back", tmp_path / "again.gguf", source_check=False)
    assert _general(tmp_path / "again.gguf") == _general(file)


def test_a_folder_keeps_its_metadata_in_another_format(folder: Path, tmp_path: Path) -> None:
    for target in ("hf", "meta"):
        quantkit.convert(folder, tmp_path / target, to=target, dtype="fp32", source_check=False)
        assert _front_matter(tmp_path / target) == _front_matter(folder)


def test_other_keys_of_a_gguf_file_go_to_another_one(file: Path, tmp_path: Path) -> None:
    stated = {
        "general.doi": "10.1/x",
        "general.base_model.0.author": "B",
        "general.base_model.0.repo_url": None,
    }
    of_the_file = {"general.uuid": "1-2-3", "general.quantized_by": "somebody"}
    source = _with_metadata(file, tmp_path / "a.gguf", {**stated, **of_the_file})
    quantkit.convert(source, tmp_path / "b.gguf", source_check=False)
    expected = {key: value for key, value in _general(source).items() if key not in of_the_file}
    assert _general(tmp_path / "b.gguf") == expected
    assert expected["general.base_model.0.author"] == "B"


def test_metadata_of_wrong_types_is_left_out(file: Path, tmp_path: Path) -> None:
    wrong = {
        "general.license": 5,
        "general.tags": "chat",
        "general.base_model.count": "many",
        "general.name": 7,
    }
    source = _with_metadata(file, tmp_path / "a.gguf", wrong)
    quantkit.convert(source, tmp_path / "out", source_check=False)
    metadata = _front_matter(tmp_path / "out")
    assert metadata.keys().isdisjoint({"license", "base_model", "model_name"})
    assert metadata["license_name"] == "a-licence"


@pytest.mark.slow
def test_the_card_of_a_quantized_model_states_them(file: Path, tmp_path: Path) -> None:
    quantkit.convert(file, tmp_path / "folder", source_check=False)
    quantkit.quantize(tmp_path / "folder", tmp_path / "int8", "int8")
    metadata = _front_matter(tmp_path / "int8")
    assert (metadata["license"], metadata["license_name"]) == ("other", "a-licence")
    assert (metadata["model_name"], metadata["model_creator"]) == ("Talker 2", "A. N. Author")
    assert metadata["base_model"] == "some-owner/base-1b"
    assert "base_model_relation" not in metadata  # it was not quantized from that, but trained
    assert metadata["tags"] == ["quantkit", "compressed-tensors", "int8"]
    body = (tmp_path / "int8" / "README.md").read_text()
    assert "\n# Talker 2, int8\n" in body
    assert "\nquantkit quantize folder Talker-2-int8 " in body


@pytest.mark.slow
def test_a_requested_licence_replaces_all_of_the_other(
    folder: Path, file: Path, tmp_path: Path
) -> None:
    for source in (folder, file):
        target = tmp_path / f"{source.name}.int8.gguf"
        quantkit.quantize(
            source, target, "q8_0", method="rtn", license="mit", base_model="me/talker"
        )
        general = _general(target)
        assert general["general.license"] == "mit"
        assert not {"general.license.name", "general.license.link"} & general.keys()
        assert general["general.base_model.0.repo_url"] == "https://huggingface.co/me/talker"
        assert general["general.author"] == "A. N. Author"


def test_push_states_what_a_gguf_file_states(file: Path, tmp_path: Path) -> None:
    source = _with_metadata(file, tmp_path / "talker.gguf", {})
    files = {source.name: source}
    card = model_card(source, files, "me/talker", None, None)
    metadata = yaml.safe_load(card.content.decode().split("---\n")[1])
    assert (metadata["license"], metadata["license_name"]) == ("other", "a-licence")
    assert (metadata["base_model"], metadata["model_name"]) == ("some-owner/base-1b", "Talker 2")
    assert metadata["tags"] == ["chat", "gguf"]
    assert (card.license, card.is_new) == ("other", True)
    other = model_card(source, files, "me/talker", "me/base", "mit")
    metadata = yaml.safe_load(other.content.decode().split("---\n")[1])
    assert (metadata["license"], metadata["base_model"]) == ("mit", "me/base")
    assert "license_name" not in metadata


def test_a_name_that_is_no_plain_one_is_not_used(folder: Path, tmp_path: Path) -> None:
    source = oracle.copy(folder, tmp_path / "talker")
    (source / "README.md").write_text("---\nmodel_name: '`rm` [x](y) | <b>'\nlicense: mit\n---\n")
    quantkit.convert(source, tmp_path / "a.gguf", source_check=False)
    assert _general(tmp_path / "a.gguf") == {"general.name": "talker", "general.license": "mit"}


def _rewrite_card(folder: Path, target: Path, front_matter: str) -> Path:
    """Copy a model, with another head of its card."""
    source = oracle.copy(folder, target)
    (source / "README.md").write_text(f"---\n{front_matter}---\n")
    return source


def test_values_of_a_card_are_read_as_spelled(folder: Path, tmp_path: Path) -> None:
    """YAML 1.1 reads ``no``, Norwegian, as false, and a version as a number or a date."""
    front_matter = (
        "language:\n- no\n- en\nmodel_version: 1.10\nmodel_name: 7\nlicense: null\ntags: [chat,"
        " 2024-01-01]\n"
    )
    source = _rewrite_card(folder, tmp_path / "talker", front_matter)
    quantkit.convert(source, tmp_path / "a.gguf", source_check=False)
    assert _general(tmp_path / "a.gguf") == {
        "general.name": "7",
        "general.version": "1.10",
        "general.languages": Metadata.load(model_path=source).languages,
        "general.tags": ["chat", "2024-01-01"],
    }
    quantkit.convert(tmp_path / "a.gguf", tmp_path / "back", source_check=False)
    assert _front_matter(tmp_path / "back")["language"] == ["no", "en"]


def test_one_value_of_a_wrong_type_loses_no_others(folder: Path, tmp_path: Path) -> None:
    source = _rewrite_card(
        folder,
        tmp_path / "talker",
        "language: [en, null]\nauthor: [A, B]\ndatasets: [{a: b}, a/b]\n",
    )
    quantkit.convert(source, tmp_path / "a.gguf", source_check=False)
    general = _general(tmp_path / "a.gguf")
    assert (general["general.languages"], general["general.author"]) == (["en"], "A, B")
    assert (general["general.dataset.count"], general["general.dataset.0.repo_url"][-4:]) == (
        1,
        "/a/b",
    )


@pytest.mark.slow
def test_a_card_names_base_models_that_hubs_know_alone(folder: Path, tmp_path: Path) -> None:
    """Hubs refuse a card with a path, which also shows the folders of a machine."""
    names = ["/home/me/model", "./model", "C:\\model", "https://example.org/model", "gpt2"]
    expected = ["gpt2", "owner/model"]
    front_matter = yaml.safe_dump({"base_model": [*names, "https://huggingface.co/owner/model"]})
    source = _rewrite_card(folder, tmp_path / "talker", front_matter)
    quantkit.quantize(source, tmp_path / "int8", "int8")
    assert _front_matter(tmp_path / "int8")["base_model"] == expected
    for name in _front_matter(tmp_path / "int8")["base_model"]:
        validate_repo_id(name)
    quantkit.convert(source, tmp_path / "a.gguf", source_check=False)
    general = _general(tmp_path / "a.gguf")
    assert [general["general.base_model.0.name"], general["general.base_model.1.name"]] == [
        "Gpt2",
        "Model",
    ]
    path_alone = _rewrite_card(folder, tmp_path / "other", "base_model: /home/me/model\n")
    quantkit.quantize(path_alone, tmp_path / "of-other", "int8")
    assert "/home/me" not in (tmp_path / "of-other" / "README.md").read_text()


@pytest.mark.slow
def test_several_licences_stay_several(folder: Path, tmp_path: Path) -> None:
    source = _rewrite_card(folder, tmp_path / "talker", "license: [mit, apache-2.0]\n")
    quantkit.convert(source, tmp_path / "a.gguf", source_check=False)
    assert _general(tmp_path / "a.gguf")["general.license"] == "mit,apache-2.0"
    quantkit.convert(tmp_path / "a.gguf", tmp_path / "back", source_check=False)
    assert _front_matter(tmp_path / "back")["license"] == ["mit", "apache-2.0"]


def test_of_two_keys_that_say_the_same_the_one_of_llama_cpp_counts(
    folder: Path, tmp_path: Path
) -> None:
    front_matter = (
        "author: First\nmodel_author: Second\nmodel_creator: Third\nname: One\nmodel_name: Two\n"
    )
    source = _rewrite_card(folder, tmp_path / "talker", front_matter)
    quantkit.convert(source, tmp_path / "a.gguf", source_check=False)
    general, expected = _general(tmp_path / "a.gguf"), Metadata.load(model_path=source)
    assert (general["general.author"], general["general.name"]) == (expected.author, expected.name)
