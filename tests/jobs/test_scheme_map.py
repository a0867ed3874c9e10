"""What is said of layers whose rows a scheme does not divide."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
from command import Capture, run
from config_cases import config_keys

from quantkit.architectures.families import config_from_hf
from quantkit.architectures.names import EMBEDDING
from quantkit.errors import RequestError
from quantkit.jobs.quantize.scheme_map import SchemeMap
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme


def _lines(scheme: str, **sizes: int) -> list[str]:
    config = config_from_hf(config_keys("llama", **sizes), "config.json")
    return SchemeMap.of(Recipe(QuantScheme.parse(scheme)), config).misfit_lines()


@pytest.mark.parametrize(
    ("scheme", "sizes", "expected"),
    [
        ("int4-g32", {}, []),
        ("int8", {"intermediate_size": 72}, []),
        (
            "int4-g64",
            {"intermediate_size": 72},
            [
                "int4-g64 does not divide the rows of 3 linears, model.layers.0.mlp.down_proj"
                " first; int8 is used there"
            ],
        ),
        (
            "int4-g128",
            {"intermediate_size": 96},
            [
                (
                    "int4-g128 does not divide the rows of 18 linears,"
                    " model.layers.0.self_attn.q_proj first; int4-g64 is used there"
                ),
                (
                    "int4-g128 does not divide the rows of 3 linears, model.layers.0.mlp.down_proj"
                    " first; int4-g32 is used there"
                ),
            ],
        ),
        (
            "int4-g128",
            {"intermediate_size": 72, "num_hidden_layers": 1},
            [
                (
                    "int4-g128 does not divide the rows of 6 linears,"
                    " model.layers.0.self_attn.q_proj first; int4-g64 is used there"
                ),
                (
                    "int4-g128 does not divide the rows of model.layers.0.mlp.down_proj; int8 is"
                    " used there"
                ),
            ],
        ),
    ],
)
def test_each_replacement_is_reported_with_its_layers(
    scheme: str, sizes: dict[str, int], expected: list[str]
) -> None:
    assert _lines(scheme, **sizes) == expected


@pytest.mark.parametrize(
    ("scheme", "used"),
    [("int4-g128", "int4-g64"), ("int4-g64", "int4-g64"), ("int8", "int8"), ("q4_k", None)],
)
def test_all_experts_of_a_layer_have_one_scheme(scheme: str, used: str | None) -> None:
    """vLLM has gate, up and down of all experts as one module; llama.cpp does not."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192, "num_hidden_layers": 1}
    config = config_from_hf(config_keys("qwen3_moe", **sizes), "config.json")
    scheme_map = SchemeMap.of(Recipe(QuantScheme.parse(scheme)), config)
    experts = {str(one) for module, one in scheme_map.schemes.items() if ".experts." in module}
    if used is None:
        assert len(experts) == 2
        return
    assert experts == {used}
    changed = used != scheme
    assert any("all experts of a layer" in line for line in scheme_map.misfit_lines()) == changed
    down = "model.layers.0.mlp.experts.0.down_proj"
    assert ("reason" in scheme_map.describe({})[down]) == changed


@pytest.mark.slow
def test_the_notes_of_quantize_name_every_replacement(tmp_path: Path, capfd: Capture) -> None:
    source = oracle.save(oracle.make("llama", intermediate_size=72), tmp_path / "hf")
    arguments = ("quantize", source, tmp_path / "out", "--scheme", "int4-g128", "--method", "rtn")
    code, _, err = run(capfd, *arguments, "--accept-quality-loss")
    assert code == 0, err
    assert "int4-g64 is used there\n" in err
    assert "model.layers.0.mlp.down_proj first; int8 is used there\n" in err
    code, _, err = run(capfd, *arguments[:2], tmp_path / "strict", *arguments[3:], "--strict")
    assert code == 2
    assert "int4-g64" in err
    assert "int8" in err


def test_a_tied_head_can_be_kept_like_its_embedding() -> None:
    config = config_from_hf(config_keys("llama", tie_word_embeddings=True), "config.json")
    int8 = QuantScheme.parse("int8")
    kept_head = Override("lm_head", None)
    scheme_map = SchemeMap.of(Recipe(int8, (kept_head,)), config)
    assert scheme_map.schemes == SchemeMap.of(Recipe(int8), config).schemes
    with pytest.raises(RequestError):
        SchemeMap.of(Recipe(int8, (Override(EMBEDDING, int8), kept_head)), config)
