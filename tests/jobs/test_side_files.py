"""Files next to the weights: jobs refuse damaged ones before they begin, and name those that
they do not carry over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_folders as build
import oracle
import pytest
from transformers import AutoTokenizer, GenerationConfig

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.links import find_outside_target
from quantkit.runtime.generation_config import require_valid
from quantkit.text.tokenizer_settings import require_loadable_settings

assert oracle  # which lets transformers be quiet

GENERATION = "generation_config.json"
SETTINGS = "tokenizer_config.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 499723\n" % 0
COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build.make(tmp_path / "src")


def _require_refused(source: Path, name: str, **options: Any) -> CheckpointError:
    """Require that the jobs refuse a source because of a file, and write nothing; return the
    error.
    """
    target = source.with_name("dst")
    errors = []
    jobs: list[Callable[[], object]] = [
        lambda: quantkit.convert(source, target, **options),
        lambda: quantkit.convert(source, target.with_suffix(".gguf")),
        lambda: quantkit.quantize(source, target, "int8", **options),
    ]
    for job in jobs:
        with pytest.raises(CheckpointError) as caught:
            job()
        assert caught.value.path == source / name
        assert caught.value.exit_code == 3
        errors.append(caught.value)
    assert sorted(path.name for path in source.parent.iterdir()) == [source.name]
    return errors[0]


def _put_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _put_pointer(path: Path) -> None:
    path.write_bytes(POINTER)


def _put_nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize(
    "put", [_put_dangling_link, _put_pointer, _put_nothing, Path.mkdir, os.mkfifo]
)
def test_what_is_no_file_is_refused(source: Path, name: str, put: Callable[[Path], object]) -> None:
    (source / name).unlink(missing_ok=True)
    put(source / name)
    _require_refused(source, name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (GENERATION, b'{"eos_token_id": 2,'),
        (GENERATION, b'{"temperature": NaN}'),
        (GENERATION, b'{"eos_token_id": "x"}'),
        (GENERATION, b'{"eos_token_id": 100000}'),
        (GENERATION, b'{"temperature": "hot"}'),
        ("chat_template.jinja", b"{% for message in %}"),
        ("chat_template.jinja", b"{{ messages | nosuchfilter }}"),
        ("added_tokens.json", b'{"<x>": "5"}'),
        ("added_tokens.json", b"{"),
        ("special_tokens_map.json", b'{"additional_special_tokens": 5}'),
        (SETTINGS, b'{"additional_special_tokens": 5}'),
        (SETTINGS, b'{"chat_template": "{% if %}"}'),
        ("vocab.json", b"{"),
        ("tokenizer.model", b"no tokenizer"),
    ],
)
def test_damage_is_refused_before_the_job_begins(source: Path, name: str, content: bytes) -> None:
    if name == SETTINGS:
        (source / "chat_template.jinja").unlink(
            missing_ok=True
        )  # it would hide the one in the settings
    (source / name).write_bytes(content)
    _require_refused(source, name)
    assert quantkit.diagnose(source).is_broken


def test_a_requested_template_replaces_a_damaged_one(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{% if %}")
    template = source.with_name("good.jinja")
    template.write_text("{{ messages[0].content }}")
    made = quantkit.convert(
        source, source.with_name("dst"), template=str(template), source_check=False
    ).path
    assert (made / "chat_template.jinja").read_text() == template.read_text()


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor.jinja"])
def test_files_copied_for_a_model_that_is_not_known_are_read(source: Path, name: str) -> None:
    build.edit(source, "config.json", model_type="nobody_knows")
    (source / name).write_text("{%")
    for job in (
        quantkit.convert,
        lambda *paths, **options: quantkit.quantize(*paths, "int8", **options),
    ):
        with pytest.raises(CheckpointError) as caught:
            job(source, source.with_name("dst"), tensors_only=True)  # type: ignore[operator]
        assert caught.value.path == source / name


REFUSED_BY_GENERATION: list[dict[str, Any]] = [
    {"max_new_tokens": 0},
    {"max_new_tokens": "x"},
    {"pad_token_id": "x"},
    {"pad_token_id": [0]},
    {"early_stopping": "sometimes"},
    {"num_return_sequences": 3},
    {"num_return_sequences": 5, "num_beams": 4},
    {"num_return_sequences": "x"},
    {"watermarking_config": 5},
    {"compile_config": {}},
    {"assistant_ensemble_weight": 3},
]
ACCEPTED_BY_GENERATION: list[dict[str, Any]] = [
    {"num_return_sequences": 3, "num_beams": 4},
    {"num_return_sequences": 3, "do_sample": True},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"cache_implementation": "hybrid"},
    {"pad_token_id": -1},
    {"do_sample": None, "temperature": None},
    {"watermarking_config": {}},
    {"top_k": 50.0, "temperature": 0},
    {"max_length": 20},
]


@pytest.mark.parametrize("settings", REFUSED_BY_GENERATION)
def test_generation_settings_that_transformers_refuses_are_refused(
    source: Path, settings: dict[str, Any]
) -> None:
    (source / GENERATION).write_text(json.dumps(settings))
    with pytest.raises(Exception):  # noqa: B017, PT011 (of whatever type transformers happens to raise)
        GenerationConfig.from_pretrained(source)
    with pytest.raises(CheckpointError):
        require_valid(source)


@pytest.mark.parametrize("settings", ACCEPTED_BY_GENERATION)
def test_generation_settings_that_transformers_accepts_are_accepted(
    source: Path, settings: dict[str, Any]
) -> None:
    (source / GENERATION).write_text(json.dumps(settings))
    GenerationConfig.from_pretrained(source)
    require_valid(source)


TOKEN = {"content": "<a>", "__type": "AddedToken"}
REFUSED_BY_TOKENIZER: list[tuple[str, dict[str, Any]]] = [
    *[
        (SETTINGS, {"additional_special_tokens": tokens})
        for tokens in (5, "x", ["<a>", 5], [{"content": "<a>"}])
    ],
    *[(SETTINGS, {"extra_special_tokens": tokens}) for tokens in (5, {"a": 5})],
    *[(SETTINGS, {"eos_token": token}) for token in (5, ["x"], {"content": 5}, {"content": "<a>"})],
    (SETTINGS, {"mask_token": 5}),
    *[
        (SETTINGS, {"added_tokens_decoder": tokens})
        for tokens in (5, {"x": {"content": "a"}}, {"5": 5})
    ],
    (SETTINGS, {"added_tokens_decoder": {"5": {"content": "<a>", "special": "x"}}}),
    (SETTINGS, {"model_max_length": "x"}),
    (SETTINGS, {"padding_side": "up"}),
    (SETTINGS, {"truncation_side": None}),
    (SETTINGS, {"split_special_tokens": "x"}),
    (SETTINGS, {"model_input_names": 5}),
    (SETTINGS, {"model_specific_special_tokens": 5}),
    (SETTINGS, {"auto_map": 5}),
    ("special_tokens_map.json", {"additional_special_tokens": 5}),
    ("special_tokens_map.json", {"pad_token": 5}),
    ("added_tokens.json", {"<x>": "5"}),
    ("added_tokens.json", {"<x>": None}),
]
ACCEPTED_BY_TOKENIZER: list[tuple[str, dict[str, Any]]] = [
    (SETTINGS, {"additional_special_tokens": ["<a>", TOKEN]}),
    (SETTINGS, {"extra_special_tokens": {"image_token": "<img>"}}),
    (SETTINGS, {"eos_token": None, "pad_token": TOKEN}),
    (SETTINGS, {"model_max_length": 1e30, "padding_side": "left"}),
    (SETTINGS, {"auto_map": {}, "tokenizer_class": None}),
    ("special_tokens_map.json", {"pad_token": {"content": "<a>", "lstrip": False}}),
    ("added_tokens.json", {"<x>": 5}),
]


@pytest.mark.parametrize(("name", "settings"), REFUSED_BY_TOKENIZER)
def test_tokenizer_settings_that_transformers_refuses_are_refused(
    source: Path, name: str, settings: dict[str, Any]
) -> None:
    _update(source / name, settings)
    with pytest.raises(Exception):  # noqa: B017, PT011 (of whatever type transformers happens to raise)
        AutoTokenizer.from_pretrained(source)("w1")
    with pytest.raises(CheckpointError) as caught:
        require_loadable_settings(source)
    assert caught.value.path == source / name


@pytest.mark.parametrize(("name", "settings"), ACCEPTED_BY_TOKENIZER)
def test_tokenizer_settings_that_transformers_accepts_are_accepted(
    source: Path, name: str, settings: dict[str, Any]
) -> None:
    _update(source / name, settings)
    AutoTokenizer.from_pretrained(source)("w1")
    require_loadable_settings(source)


def _update(path: Path, settings: dict[str, Any]) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **settings}))


# Links


@pytest.mark.parametrize("name", ["config.json", GENERATION, "chat_template.jinja", "README.md"])
def test_a_link_out_of_the_folder_is_refused(source: Path, name: str) -> None:
    secret = source.with_name("secret")
    secret.mkdir()
    (source / name).touch()
    (source / name).rename(secret / name)
    (source / name).symlink_to(secret / name)
    for job in (quantkit.convert, lambda *paths: quantkit.quantize(*paths, "int8")):
        with pytest.raises(CheckpointError) as caught:
            job(source, source.with_name("dst"))  # type: ignore[operator]
        assert caught.value.path == source / name
        assert caught.value.found == secret / name
    assert not source.with_name("dst").exists()


def test_a_licence_that_is_a_link_out_of_the_folder_is_not_copied(source: Path) -> None:
    source.with_name("secret").write_text("key")
    (source / "LICENSE").symlink_to(source.with_name("secret"))
    for to in ("hf", "meta"):
        made = quantkit.convert(source, source.with_name(to), to=to, source_check=False)  # type: ignore[arg-type]
        assert not (made.path / "LICENSE").exists()
        assert any("not copied: LICENSE" in note for note in made.notes)


def test_templates_in_an_inner_folder_may_not_be_links_out_of_it(source: Path) -> None:
    inner = source / "additional_chat_templates"
    inner.mkdir()
    source.with_name("secret").write_text("key")
    (inner / "other.jinja").symlink_to(source.with_name("secret"))
    with pytest.raises(CheckpointError) as caught:
        quantkit.convert(source, source.with_name("dst"))
    assert caught.value.path == inner / "other.jinja"


def test_links_within_the_folder_and_links_to_weights_are_followed(source: Path) -> None:
    (source / "LICENSE.txt").write_text("free")
    (source / "LICENSE").symlink_to("LICENSE.txt")
    disk = source.with_name("disk")
    disk.mkdir()
    (source / "model.safetensors").rename(disk / "weights")
    (source / "model.safetensors").symlink_to(disk / "weights")
    link = source.with_name("link")
    link.symlink_to(source)
    made = quantkit.convert(link, source.with_name("dst"), source_check=False).path
    assert (made / "LICENSE").read_text() == "free"


@pytest.mark.parametrize("layout", ["snapshot", "shared blobs", "local folder"])
def test_all_layouts_of_the_hub_cache_are_read(source: Path, layout: str) -> None:
    cache = source.with_name("cache")
    blobs = cache / "models--me--tiny" / "blobs"
    snapshot = cache / "models--me--tiny" / "snapshots" / ("0" * 40)
    if layout == "local folder":
        snapshot = source.with_name("local")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        blob = blobs / digest
        if layout == "shared blobs":
            shared = cache / "blobs" / digest[:2] / digest
            shared.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, shared)
            blob.symlink_to(os.path.relpath(shared, blobs))
        else:
            shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    made = quantkit.convert(snapshot, source.with_name("dst"), source_check=False).path
    assert (made / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "target", ["blobs/" + "a" * 40, "models--x/blobs/id_rsa", "models--x/" + "a" * 64]
)
def test_other_files_are_not_taken_for_blobs(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "LICENSE").symlink_to(tmp_path / target)
    assert find_outside_target(folder / "LICENSE", folder) == tmp_path / target


# Files that are not carried over


def test_one_note_names_every_file_that_is_not_carried(source: Path) -> None:
    for name in (
        "preprocessor_config.json",
        "notes.pdf",
        "optimizer-00001-of-00002.pt",
        "optimizer-00002-of-00002.pt",
    ):
        (source / name).write_text("{}")
    for name in ("README.md", "LICENSE", ".gitattributes", "quantkit.json"):
        (source / name).write_text("")
    (source / "quantkit.json").unlink()
    for name in ("onnx", ".git", "__pycache__"):
        (source / name).mkdir()
    converted = quantkit.convert(source, source.with_name("dst"), source_check=False)
    (note,) = [note for note in converted.notes if "not copied" in note]
    listed = note.partition("not copied: ")[2].partition(";")[0].split(", ")
    expected = [
        "README.md",
        "notes.pdf",
        "onnx/",
        "optimizer-*-of-00002.pt",
        "preprocessor_config.json",
    ]
    assert listed == expected
    assert not {path.name for path in converted.path.iterdir()} & set(expected)


def test_nothing_is_noted_if_all_files_are_carried(source: Path) -> None:
    # Of an earlier quantization: the model does not need it.
    (source / "bit-allocation.svg").write_text("<svg/>")
    converted = quantkit.convert(source, source.with_name("dst"), source_check=False)
    assert not [note for note in converted.notes if "not copied" in note]


def test_an_embedding_model_is_refused_by_name(source: Path) -> None:
    modules = [
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    for job in (
        lambda target: quantkit.convert(source, target),
        lambda target: quantkit.convert(source, target, tensors_only=True),
        lambda target: quantkit.quantize(source, target, "int8"),
        lambda target: quantkit.quantize(source, target, "int8", tensors_only=True),
    ):
        with pytest.raises(UnsupportedError, match="sentence-transformers"):
            job(source.with_name("dst"))
