"""The model card of a quantized folder: what a stranger reads on a hub."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import oracle
import pytest
import yaml
from command import Capture, run
from partial import contents, interrupted

import quantkit
from quantkit.calibration import packaged
from quantkit.data.files import EXCERPT
from quantkit.errors import RequestError
from quantkit.formats.output.staging import name_partial_folder
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme
from quantkit.version import __version__

WEIGHTS = "1.31 million"
"""Of the demo model."""


@pytest.fixture(scope="module")
def floats(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "floats"
    quantkit.convert(demo_model, folder)
    return folder


def _readme(folder: Path) -> tuple[dict[str, Any], str]:
    """What hubs read of a card, and what people do."""
    _, head, body = (folder / "README.md").read_text().split("---\n", 2)
    facts: dict[str, Any] = yaml.safe_load(head)
    return facts, body


@pytest.mark.slow
def test_the_model_card_states_licence_and_figures(floats: Path, tmp_path: Path) -> None:
    source = oracle.copy(floats, tmp_path / "m")
    (source / "README.md").write_text(
        "---\nlicense: llama2\nlanguage: [en]\ntags: [mine]\n---\n# M\n"
    )
    oracle.edit_json(source / "config.json", _name_or_path="owner/model")
    made = quantkit.quantize(source, tmp_path / "out", "int4-g64", method="rtn")
    facts, body = _readme(tmp_path / "out")
    assert facts == {
        "license": "llama2",
        "language": ["en"],
        "base_model": "owner/model",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantkit", "compressed-tensors", "int4-g64"],
    }
    assert body.startswith("\n# model, int4-g64\n")
    assert f"quantized by quantkit {__version__}" in body
    for one in made.quality.texts:
        assert (
            f"| {one.text} | {one.tokens} | {one.source_perplexity:.4g} | {one.perplexity:.4g} | "
            in body
        )
        assert f" | {one.kl_estimate} | {one.kl_bound:.3g} | " in body
    assert f"{made.weight_bytes / 1e6:.3g} MB" in body
    assert f"{made.bits_per_weight:.2f} bits" in body
    assert "4-bit integers, one scale for each group of 64 weights; 28 linear layers" in body
    assert "embedding and norms; `lm_head` (bfloat16)" in body
    assert "rounded to nearest; no calibration text" in body
    assert "The maximum KL, this model's bound, is 0.25" in " ".join(body.split())
    assert str(tmp_path) not in body


@pytest.mark.slow
def test_columns_and_heads_of_the_table_are_as_many(floats: Path, tmp_path: Path) -> None:
    quantkit.quantize(
        floats,
        tmp_path / "out",
        "int4-g64",
        method="gptq",
        calibration=EXCERPT,
        samples=4,
        length=64,
        accept_quality_loss=True,
    )
    _, body = _readme(tmp_path / "out")
    table = [line for line in body.splitlines() if line.startswith("| ") and line.count("|") > 4]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    heads, *_, mixed = ([cell.strip() for cell in line.split("|")] for line in table)
    assert all(cell for cell in mixed[1:-1])
    assert heads.index("source's perplexity") + 1 == heads.index("this model's perplexity")
    assert "KL of rounding" in heads


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("folder", "config", "title", "base"),
    [
        ("my-model", {}, f"my-model (llama, {WEIGHTS} weights)", None),
        ("m", {"_name_or_path": "owner/model-1.5b"}, "model-1.5b", "owner/model-1.5b"),
        ("m", {"_name_or_path": "model-1.5b"}, "model-1.5b", None),
        ("m", {"_name_or_path": "/home/me/secret"}, f"m (llama, {WEIGHTS} weights)", None),
        ("models--own-er--mo.del/snapshots/0123abcd", {}, "mo.del", "own-er/mo.del"),
        ("a | <b>", {}, f"llama ({WEIGHTS} weights)", None),
    ],
)
def test_the_title_is_the_models_name(
    folder: str, config: dict[str, str], title: str, base: str | None, floats: Path, tmp_path: Path
) -> None:
    source = oracle.copy(floats, tmp_path / folder)
    oracle.edit_json(source / "config.json", **config)
    quantkit.quantize(source, tmp_path / "out", "int8")
    facts, body = _readme(tmp_path / "out")
    assert body.startswith(f"\n# {title}, int8\n")
    assert facts.get("base_model") == base
    assert "secret" not in body


@pytest.mark.slow
def test_the_hubs_name_is_kept_through_a_conversion(floats: Path, tmp_path: Path) -> None:
    source = oracle.copy(floats, tmp_path / "models--own-er--mo.del/snapshots/0123abcd")
    quantkit.convert(source, tmp_path / "bf16")
    quantkit.quantize(tmp_path / "bf16", tmp_path / "out", "int8")
    facts, body = _readme(tmp_path / "out")
    assert body.startswith("\n# mo.del, int8\n")
    assert facts["base_model"] == "own-er/mo.del"


@pytest.mark.slow
def test_a_name_and_a_licence_may_be_given(floats: Path, tmp_path: Path, capfd: Capture) -> None:
    source = oracle.copy(floats, tmp_path / "m")
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: mine\nlanguage: en\n---\n"
    )
    options = ["--scheme", "int8", "--base-model", "some/base", "--license", "apache-2.0"]
    code, _, err = run(capfd, "quantize", source, tmp_path / "out", *options)
    assert code == 0, err
    facts, body = _readme(tmp_path / "out")
    assert (facts["base_model"], facts["license"], facts["language"]) == (
        "some/base",
        "apache-2.0",
        "en",
    )
    assert "license_name" not in facts
    assert body.startswith("\n# base, int8\n")
    quantkit.quantize(source, tmp_path / "same", "int8", license="other")
    assert _readme(tmp_path / "same")[0]["license_name"] == "mine"


@pytest.mark.parametrize(
    "given",
    [
        {"base_model": "a/b/c"},
        {"base_model": "/home/me"},
        {"base_model": ""},
        {"license": "all\nmine"},
    ],
)
def test_what_no_hub_knows_is_refused_at_once(
    given: dict[str, str], floats: Path, tmp_path: Path
) -> None:
    for job in (quantkit.quantize, quantkit.plan.quantize):
        with pytest.raises(
            RequestError, match=f"`{next(iter(given))}` is not in the form that hubs accept"
        ):
            job(floats, tmp_path / "out", "int8", **given)
    assert not list(tmp_path.iterdir())


RECIPE = Recipe(
    QuantScheme.parse("int4-g64"), (Override("*.1.mlp.down_proj", QuantScheme.parse("int8")),)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"scheme": "int4-g64", "keep": ["*.layers.0.*", "*.2.mlp.*"], "license": "mit"},
        {"scheme": RECIPE, "accept_quality_loss": True},
        {
            "scheme": Recipe(
                QuantScheme.parse("int4-g128"), (Override("lm_head", QuantScheme.parse("int8")),)
            ),
            "method": "gptq",
            "calibration": "my-text.txt",
            "samples": 8,
            "length": 64,
            "seed": 3,
            "thorough": True,
            "accept_quality_loss": True,
            "keep": "*.3.*",
        },
        {
            "scheme": "int4-g64",
            "method": None,
            "samples": 8,
            "length": 64,
            "embedding": "int8",
            "certify_positions": 64,
            "certify_text": "my-text.txt",
            "accept_quality_loss": True,
        },
        {
            "target_bits": 8,
            "method": None,
            "samples": 8,
            "length": 64,
            "head": "int8",
            "keep": "*.3.mlp.*",
            "accept_quality_loss": True,
        },
    ],
    ids=["scheme", "recipe", "gptq", "packaged text", "size"],
)
def test_the_command_on_the_model_card_makes_the_same_again(
    given: dict[str, Any],
    floats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
) -> None:
    (tmp_path / "my-text.txt").write_text(EXCERPT.read_text()[:4000])
    (tmp_path / "packaged.jsonl").write_text(
        json.dumps({"kind": "english", "text": EXCERPT.read_text()[:8000]}) + "\n"
    )
    monkeypatch.setattr(packaged, "CALIBRATION", tmp_path / "packaged.jsonl")
    oracle.copy(floats, tmp_path / "mini")
    given = {name: tmp_path / one if one == "my-text.txt" else one for name, one in given.items()}
    quantkit.quantize(tmp_path / "mini", tmp_path / "out", **{"method": "rtn", **given})
    _, body = _readme(tmp_path / "out")
    assert str(tmp_path) not in body
    monkeypatch.chdir(tmp_path)
    if found := re.search(r"```json\n(.*?)```", body, re.DOTALL):
        (tmp_path / "recipe.json").write_text(found[1])
    reported = re.search(r"```\n(quantkit quantize .*)\n```", body)
    assert reported is not None
    command = shlex.split(reported[1])
    code, _, err = run(capfd, *command[1:])
    assert code == 0, err
    assert ("--calibration" in command) == ("calibration" in given)
    again = contents(tmp_path / command[3])
    if not found:
        assert again == contents(tmp_path / "out")
    assert again["model.safetensors"] == contents(tmp_path / "out")["model.safetensors"]


def test_layers_are_reported_in_few_words(floats: Path, tmp_path: Path) -> None:
    overrides = (
        Override("*.[0-2].mlp.*_proj", QuantScheme.parse("int8")),
        Override("*.3.*", None),
        Override("*.1.self_attn.o_proj", None),
    )
    recipe = Recipe(QuantScheme.parse("int4-g64"), overrides)
    quantkit.quantize(floats, tmp_path / "out", recipe, method="rtn")
    _, body = _readme(tmp_path / "out")
    assert body.startswith(f"\n# floats (llama, {WEIGHTS} weights), int4-g64 and int8\n")
    assert "`mlp.gate_proj`, `mlp.up_proj`, `mlp.down_proj` of layers 0, 1 and 2 |" in body
    assert (
        "| embedding and norms; all of layer 3; `self_attn.o_proj` of layer 1; `lm_head`"
        " (bfloat16) |" in body
    )
    assert "vllm serve" not in body


@pytest.mark.slow
def test_zero_points_are_not_said_to_load_in_transformers(floats: Path, tmp_path: Path) -> None:
    quantkit.quantize(floats, tmp_path / "out", "int4-g64-asym", method="rtn")
    facts, body = _readme(tmp_path / "out")
    assert "library_name" not in facts
    assert "| reader | loads this format |" in body
    assert f"| quantkit {__version__} | yes |" in body
    assert "| no: it does not load packed zero points |" in body
    assert "AutoModel" not in body
    assert "vllm serve floats-int4-g64-asym" in body


@pytest.mark.slow
def test_what_is_only_for_the_model_card_does_not_prevent_resuming(
    floats: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    interrupted(
        lambda *a, **b: quantkit.quantize(*a, "int4-g64", method="rtn", license="mit", **b),
        floats,
        dst,
    )
    assert name_partial_folder(dst).exists()
    quantkit.quantize(
        floats, dst, "int4-g64", method="rtn", license="apache-2.0", base_model="a/b", resume=True
    )
    assert _readme(dst)[0]["license"] == "apache-2.0"


@pytest.mark.parametrize("text", ["no head", "---\n: [", "---\n- a\n---\n", "---\nlicense: x"])
def test_a_model_card_with_a_damaged_header_is_replaced(
    text: str, floats: Path, tmp_path: Path
) -> None:
    source = oracle.copy(floats, tmp_path / "m")
    (source / "README.md").write_text(text)
    quantkit.quantize(source, tmp_path / "out", "int8")
    assert "license" not in _readme(tmp_path / "out")[0]


def test_random_tokens_are_reported_as_such(tmp_path: Path) -> None:
    quantkit.quantize(oracle.save(oracle.make("llama"), tmp_path / "m"), tmp_path / "out", "int8")
    assert "random tokens, as there is no tokenizer" in _readme(tmp_path / "out")[1]
    assert (
        json.loads((tmp_path / "out" / "quantkit.json").read_text())["quality"]["texts"][0]["text"]
        == "random tokens"
    )
