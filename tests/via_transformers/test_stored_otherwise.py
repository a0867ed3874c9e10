"""Weights that transformers stores, merges, splits or multiplies in its own way."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import quantkit
from quantkit.architectures.topology import linear_columns
from quantkit.base.json_values import read_json
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.passes.site import Brought, Site
from quantkit.text.tokenizer import load_tokenizer
from quantkit.via_transformers.forward import (
    final_hidden,
    final_logits,
    passage_of,
    run_by_transformers,
)
from quantkit.via_transformers.linears import with_linears
from quantkit.via_transformers.sites import find_sites
from quantkit.via_transformers.stacks import unstack

Tiny = Callable[[str], Path]
TEXT_LINEARS = {"gpt2": 8, "jetmoe": 34, "dbrx": 28, "longcat_flash": 56}
"""The number of linears that GPTQ quantizes, by architecture."""
IMAGE_TEXT_LINEARS = {"molmo2": 8, "step3p7": 28, "minimax_m3_vl": 26}
CONV1D = "transformer.h.0.attn.c_attn.weight"


def _open(folder: Path) -> StoredCheckpoint:
    source = open_checkpoint(folder, tensors_only=True)
    unstack(source)
    return source


def _compute_log_probs(folder: Path, tokens: Tensor, *, has_images: bool) -> Tensor:
    """Compute logarithms of probabilities [N, T, V] by transformers alone."""
    cls: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits.log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TEXT_LINEARS, *IMAGE_TEXT_LINEARS])
def test_gptq_solves_them_and_loses_less_than_rounding(
    kind: str, tiny_model: Tiny, tiny_image_text_model: Tiny, tmp_path: Path
) -> None:
    has_images = kind in IMAGE_TEXT_LINEARS
    source = (tiny_image_text_model if has_images else tiny_model)(kind)
    tokens = torch.tensor(load_tokenizer(DEMO_MODEL).encode(excerpt())[: 8 * 128]).view(8, 128)
    reference = _compute_log_probs(source, tokens, has_images=has_images)
    kl: dict[str, float] = {}
    for method, samples in {"gptq": {"samples": 32, "length": 128}, "rtn": {}}.items():
        made = quantkit.quantize(
            source,
            tmp_path / method,
            "int4-g32",
            method=method,
            source_check=False,
            accept_quality_loss=True,
            **samples,
        )
        if method == "gptq":
            assert sum(made.schemes.values()) == (TEXT_LINEARS | IMAGE_TEXT_LINEARS)[kind]
        floats = quantkit.convert(made.path, tmp_path / f"{method}-floats", dequantize=True).path
        result = _compute_log_probs(floats, tokens, has_images=has_images)
        kl[method] = float((reference.exp() * (reference - result)).sum(-1).mean())
        packed = run_by_transformers(open_checkpoint(made.path, tensors_only=True))
        (states,) = final_hidden(packed, [Batch.from_start(tokens[:1])])
        logits = final_logits(packed, [states[0]])[0]
        torch.testing.assert_close(logits.log_softmax(-1), result[0], rtol=1e-3, atol=1e-3)
    assert 0 < kl["gptq"] < kl["rtn"]


def _starve_experts(model: Path, folder: Path) -> Path:
    """Copy a model so that each token is sent to one of the first two of four experts."""
    oracle.copy(model, folder)
    config = read_json(folder / "config.json")
    if "ffn_config" in config:
        oracle.edit_json(
            folder / "config.json", ffn_config={**config["ffn_config"], "moe_top_k": 1}
        )
    else:
        oracle.edit_json(folder / "config.json", num_experts_per_tok=1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "router" in name:
            tensor[1] = -tensor[0]
            tensor[2:] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "calibrated"), [("llama4_text", 2), ("dbrx", 2), ("jetmoe", 0)])
def test_experts_without_tokens_are_solved_for_all_if_their_inputs_are_known(
    kind: str, calibrated: int, tiny_model: Tiny, tmp_path: Path
) -> None:
    source = _starve_experts(tiny_model(kind), tmp_path / "source")
    result = quantkit.quantize(
        source, tmp_path / "dst", "int4-g32", samples=32, length=128, source_check=False
    )
    starved = [
        record
        for record in result.manifest["modules"].values()
        if record.get("tokens") == 0 or record.get("routed_tokens") == 0
    ]
    assert starved
    if calibrated:
        assert {record["tokens_from"] for record in starved} == {"all"}
        assert {record["solver"] for record in starved} == {"gptq"}
    else:
        assert "gptq" not in {record["solver"] for record in starved}
        assert all(record["tokens_reason"] for record in starved)


@pytest.mark.parametrize("kind", ["llama4_text", "dbrx"])
def test_inputs_of_experts_are_known_for_all_tokens(kind: str, tiny_model: Tiny) -> None:
    source = run_by_transformers(open_checkpoint(tiny_model(kind), tensors_only=True))
    passage = passage_of(source)
    linears = [
        tensor.module for tensor in source.config.tensors or () if ".experts." in tensor.name
    ]
    sites, _ = find_sites(passage.partwise, linears)
    tokens = oracle.random_tokens(24, vocabulary=2000)
    inputs_of_site: dict[Site, Tensor] = {}

    def compare(site: Site, brought: Brought) -> None:
        assert brought.at is not None
        assert brought.tokens is not None
        torch.testing.assert_close(brought.at(brought.tokens), brought.inputs)
        inputs = brought.at(None)
        assert inputs.shape == (tokens.numel(), brought.inputs.shape[-1])
        torch.testing.assert_close(inputs[brought.tokens], brought.inputs)
        assert inputs.any(dim=-1).all()
        inputs_of_site[site] = inputs

    passage.compute_hidden_states([tokens], sites=sites, on_product=compare)
    assert inputs_of_site


def test_weights_of_conv1d_are_read_with_outputs_first(tiny_model: Tiny) -> None:
    folder = tiny_model("gpt2")
    source = _open(folder)
    weight = load_file(folder / "model.safetensors")[CONV1D]
    assert source.info(CONV1D).shape == tuple(weight.t().shape)
    assert torch.equal(source.load(CONV1D), weight.t())


def test_a_copy_of_a_model_with_conv1d_is_the_same(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = tiny_model("gpt2")
    made = quantkit.convert(folder, tmp_path / "copy", tensors_only=True)
    before = load_file(folder / "model.safetensors")
    after = load_file(made.path / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("scheme", ["int4-g32", "fp8"])
def test_codes_of_conv1d_have_outputs_first_and_floats_inputs(
    scheme: str, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("gpt2")
    made = quantkit.quantize(
        folder, tmp_path / "made", scheme, method="rtn", tensors_only=True, keep="*.mlp.c_fc"
    )
    before = load_file(folder / "model.safetensors")
    packed = load_file(made.path / "model.safetensors")
    assert packed[f"{CONV1D}_scale"].shape[0] == before[CONV1D].shape[1]
    kept = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(packed[kept], before[kept])
    # The names are enough where transformers is not installed.
    with monkeypatch.context() as patch:
        find_spec = importlib.util.find_spec
        patch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *args: None if name == "transformers" else find_spec(name, *args),
        )
        floats = quantkit.convert(
            made.path, tmp_path / "floats", dequantize=True, tensors_only=True
        )
    after = load_file(floats.path / "model.safetensors")
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name].shape == value.shape
        torch.testing.assert_close(after[name], value, rtol=0.1, atol=0.1)


def test_a_result_with_conv1d_says_that_transformers_does_not_load_it(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    made = quantkit.quantize(
        tiny_model("gpt2"), tmp_path / "made", "int8", source_check=False, method="rtn"
    )
    assert any("does not load the packed weights" in note for note in made.notes)
    assert quantkit.verify(made.path, tiny_model("gpt2")).verdict.name == "WITHIN_BOUND"


def test_parts_of_a_linear_that_is_split_share_their_inputs(tiny_image_text_model: Tiny) -> None:
    source = run_by_transformers(
        open_checkpoint(tiny_image_text_model("molmo2"), tensors_only=True)
    )
    fused = "model.transformer.blocks.0.self_attn.att_proj"
    passage = passage_of(source)
    sites, reasons = find_sites(passage.partwise, [fused])
    assert not reasons
    assert len(sites) == 3
    (group,) = passage.survey(sites, torch.arange(3, 19).unsqueeze(0)).groups
    assert set(group.sites) == set(sites)


def test_experts_in_a_matrix_have_a_site_each(tiny_model: Tiny) -> None:
    folder = tiny_model("dbrx")
    source = run_by_transformers(open_checkpoint(folder, tensors_only=True))
    model = oracle.load(folder)
    module = "transformer.blocks.1.ffn.experts.mlp"
    linears = {f"{module}.{expert}.w2": expert for expert in range(4)}
    sites, reasons = find_sites(passage_of(source).partwise, linears)
    assert not reasons
    parameter = model.get_parameter(f"{module}.w2")
    for linear, expert in linears.items():
        (site,) = (site for site in sites if site.rows[0][0] == linear)
        expected = parameter.view(4, -1, parameter.shape[1])[expert].t()
        assert site == Site(module, "w2", expert, site.rows, transposed=True, count=4)
        assert torch.equal(site.of(parameter), expected)
        assert torch.equal(source.load(f"{linear}.weight"), expected)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"])
def test_what_chooses_tokens_stays_float(kind: str, tiny_model: Tiny) -> None:
    source = _open(tiny_model(kind))
    assert any("index" in name for name in source.names())
    config, _, _ = with_linears(source.config, source.extra_config, source.path)
    assert linear_columns(config)
    assert not any("index" in name for name in linear_columns(config))
