"""The doctor's rules that need a trained model, or many layers: a well-formed folder that is
damaged all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import broken_folders as build
import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.doctor import predictions, values
from quantkit.formats.containers.meta_tensors import to_interleaved, to_rotate_half

WEIGHTS = "model.safetensors"
MANIFEST = "quantkit.json"
LAYERS = 10
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    quantkit.convert(DEMO_MODEL, folder)
    return folder


def _edit_weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / WEIGHTS)

    return damage


def _swap_layers(tensors: dict[str, Tensor]) -> None:
    first, second = "model.layers.0.", "model.layers.1."
    for name in [name for name in tensors if name.startswith(first)]:
        twin = second + name.removeprefix(first)
        tensors[name], tensors[twin] = tensors[twin], tensors[name]


def _reorder(change: Callable[[Tensor, int], Tensor]) -> Damage:
    def reorder(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] = change(tensor, 32)

    return _edit_weights(reorder)


def _repeat_row(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][5].clone()


def _randomize(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.normal_(std=0.02)


def _set_rope_base(base: float) -> Damage:
    settings = {"rope_type": "default", "rope_theta": base}
    return lambda folder: oracle.edit_json(
        folder / "config.json", rope_theta=base, rope_parameters=settings
    )


def _set_heads(heads: int, kv: int, size: int) -> Damage:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": size}
    return lambda folder: oracle.edit_json(folder / "config.json", **changes)


def _scale(name: str, factor: float) -> Damage:
    return _edit_weights(lambda tensors: tensors[name].mul_(factor))


DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "swapped layers": (_edit_weights(_swap_layers), "no-prediction", "uniform"),
    "overflow": (_scale("model.layers.1.mlp.up_proj.weight", 1e38), "no-prediction", "NaN or Inf"),
    "no embedding": (_edit_weights(_repeat_row), "no-prediction", "input"),
    "faint head": (
        _scale("lm_head.weight", 0.05),
        "poor-prediction",
        "frequencies",
    ),
    "pairs": (_reorder(to_interleaved), "other-reading", "from pairs to halves"),
    "halves": (_reorder(to_rotate_half), "other-reading", "from halves to pairs"),
    "large rope base": (_set_rope_base(1e6), "other-reading", "a rope base of 10000;"),
    "small rope base": (_set_rope_base(100.0), "other-reading", "a rope base of 10000;"),
    "small heads": (_set_heads(8, 4, 16), "other-reading", "4 heads of 32;"),
    "large heads": (_set_heads(2, 1, 64), "other-reading", "4 heads of 32;"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_shows_in_what_a_model_predicts(name: str, sound: Path, tmp_path: Path) -> None:
    damage, rule, words = DAMAGES[name]
    folder = oracle.copy(sound, tmp_path / "model")
    (folder / MANIFEST).unlink()
    damage(folder)
    found = quantkit.diagnose(folder, deep=True)
    assert [finding.rule.name for finding in found.findings] == [rule], found.lines()
    assert words in found.findings[0].message
    assert found.is_broken == (rule == "no-prediction")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32"])
def test_a_sound_model_has_nothing_and_its_perplexity_is_reported(
    scheme: str | None, sound: Path, tmp_path: Path
) -> None:
    folder = sound
    if scheme is not None:
        folder = tmp_path / "quantized"
        quantkit.quantize(sound, folder, scheme, method="rtn")
    found = quantkit.diagnose(folder, deep=True)
    notes = (
        {"negative-scales"} if scheme == "int4-g32" else set()
    )  # which the search for scales may choose
    assert {finding.rule.name for finding in found.findings} == notes
    assert any(one.startswith("perplexity ") for one in found.looked_at)
    assert not any("predicts" in one for one in found.left_out)


@pytest.mark.slow
def test_meta_folders_and_gguf_files_are_run_too(sound: Path, tmp_path: Path) -> None:
    quantkit.convert(sound, tmp_path / "model.gguf", to="gguf")
    for path in (DEMO_MODEL, tmp_path / "model.gguf"):
        found = quantkit.diagnose(path, deep=True)
        assert found.findings == []
        assert any(one.startswith("perplexity ") for one in found.looked_at), found.lines()


@pytest.mark.slow
def test_a_model_is_compared_with_its_manifest(sound: Path, tmp_path: Path) -> None:
    folder = oracle.copy(sound, tmp_path / "model")
    _scale("model.layers.2.mlp.down_proj.weight", 2)(folder)
    found = quantkit.diagnose(folder, deep=True)
    assert {finding.rule.name: finding.location for finding in found.findings} == {
        "not-as-written": WEIGHTS,
        "worse-than-source": "model",
    }
    assert not found.is_broken
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"].clear()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    names = {finding.rule.name for finding in quantkit.diagnose(folder, deep=True).findings}
    assert "not-as-written" in names  # files that the manifest does not list
    (folder / MANIFEST).write_text("{")
    assert {finding.location for finding in quantkit.diagnose(folder, deep=True).findings} == {
        MANIFEST
    }


def test_a_model_that_is_not_trained_predicts_nothing(sound: Path, tmp_path: Path) -> None:
    folder = oracle.copy(sound, tmp_path / "model")
    (folder / MANIFEST).unlink()
    _edit_weights(_randomize)(folder)
    (found,) = quantkit.diagnose(folder, deep=True).findings
    assert found.rule.name in (
        "no-prediction",
        "poor-prediction",
    )  # it may be a little better than a guess


def test_what_is_not_run_is_listed(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_out(folder: Path) -> list[str]:
        return [
            part
            for part in quantkit.diagnose(folder, deep=True).left_out
            if part.startswith("what it predicts")
        ]

    (line,) = left_out(build.make(tmp_path / "words"))
    assert "tokenizer" in line
    broken = oracle.copy(sound, tmp_path / "broken")
    _scale("model.layers.1.mlp.up_proj.weight", float("nan"))(broken)
    (line,) = left_out(broken)
    assert "errors" in line
    (broken / "tokenizer.json").unlink()
    monkeypatch.setattr(predictions, "MAX_PARAMETERS", 10**6)
    (line,) = left_out(sound)
    assert "parameters" in line


def _tall(form: str, layer: int, factor: float) -> tuple[build.Tensors, dict[str, object]]:
    """A model of ten layers, and one down_proj that is larger than the others."""
    floats = {name: one for name, one in build.floats().items() if ".layers." not in name}
    generator = torch.Generator().manual_seed(1)
    for number in range(LAYERS):
        for name, one in build.floats().items():
            if name.startswith("model.layers.0."):
                own = (
                    one
                    if one.dim() == 1
                    else torch.randn(one.shape, generator=generator).mul_(0.1).bfloat16()
                )
                floats[name.replace(".0.", f".{number}.")] = own
    floats[f"model.layers.{layer}.mlp.down_proj.weight"].mul_(factor)
    encode, config = build.FORMATS[form]
    for name in [name for name in floats if encode is not None and name.endswith("_proj.weight")]:
        assert encode is not None
        module = name.removesuffix(".weight")
        floats |= {f"{module}.{leaf}": one for leaf, one in encode(floats.pop(name)).items()}
    return floats, {**config, "num_hidden_layers": LAYERS}


@pytest.mark.parametrize(
    ("form", "leaf"), [("floats", "weight"), ("packed", "weight_scale"), ("awq", "scales")]
)
@pytest.mark.parametrize(("layer", "factor"), [(5, 2.0), (2, 0.5), (5, 1.3), (0, 2.0)])
def test_a_weight_out_of_line_with_its_neighbours(
    form: str, leaf: str, layer: int, factor: float, tmp_path: Path
) -> None:
    tensors, config = _tall(form, layer, factor)
    found = quantkit.diagnose(build.write(tmp_path / "model", tensors, config), deep=True)
    expected = [f"model.layers.{layer}.mlp.down_proj.{leaf}"] if layer and factor != 1.3 else []
    assert [finding.location for finding in found.findings] == expected
    assert {finding.rule.name for finding in found.findings} <= {"unusual-norm"}


def test_roles_that_vary_by_nature_have_nothing() -> None:
    rising = {f"layers.{layer}.up.weight": 1.5**layer for layer in range(24)}
    windows = {f"layers.{layer}.up.weight": 3.0 if layer % 6 == 5 else 1.0 for layer in range(24)}
    experts = {
        f"layers.{layer}.experts.3.up.weight": 4.0 if layer == 9 else 1.0 for layer in range(24)
    }
    shallow = {f"layers.{layer}.up.weight": 2.0 if layer == 3 else 1.0 for layer in range(7)}
    for sizes in (rising, windows, experts, shallow):
        assert list(values.unusual_norms(sizes)) == []
    lone = {f"layers.{layer}.up.weight": 4.0 if layer == 9 else 1.0 for layer in range(24)}
    assert [finding.location for finding in values.unusual_norms(lone)] == ["layers.9.up.weight"]
