"""The doctor on hybrids that read images, with a layer for multi-token prediction (MTP): a sound
folder has nothing, and each part that is broken is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import broken_folders as build
import pytest
import torch
from broken_folders import HIDDEN, MIDDLE, Tensors

import quantkit

TEXT = "model.language_model."
STATE = "layers.0.linear_attn"
_MLP = {"gate_proj": (MIDDLE, HIDDEN), "up_proj": (MIDDLE, HIDDEN), "down_proj": (HIDDEN, MIDDLE)}
_ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (HIDDEN, HIDDEN))
_DELTA = {"in_proj_qkv": (96, HIDDEN), "in_proj_z": (32, HIDDEN), "out_proj": (HIDDEN, 32)}
_GATES = {"in_proj_a": (8, HIDDEN), "in_proj_b": (8, HIDDEN), "in_proj_ba": (8, HIDDEN)}
_BLOCK = {f"mlp.{name}": shape for name, shape in _MLP.items()} | {
    f"self_attn.{name}": shape for name, shape in _ATTENTION.items()
}
MTP = {
    "mtp.fc": (HIDDEN, 2 * HIDDEN),
    **{f"mtp.layers.0.{name}": shape for name, shape in _BLOCK.items()},
}
BEYOND = {
    "model.layers.2.eh_proj": (HIDDEN, 2 * HIDDEN),
    **{f"model.layers.2.{name}": shape for name, shape in _BLOCK.items()},
}
TOWER = {"model.visual.blocks.0.attn.qkv": (96, 32), "model.connector.proj": (HIDDEN, 32)}
FORMS: dict[str, tuple[Callable[[torch.Tensor], Tensors], str, Callable[[str], object]]] = {
    "packed": (build.packed, "ignore", list),
    "gptq": (build.gptq, "dynamic", dict),
    "awq": (build.awq, "modules_to_not_convert", list),
}


@dataclass(frozen=True)
class Hybrid:
    """A folder to build: two layers, the first with linear attention.

    Attributes:
        quantized: modules in four bits in addition to attention and feed-forward of the layers.
        further: linears and their shapes in addition to those of the layers.
        ignored: what the settings leave in floats; names, and for GPTQ and compressed-tensors
            patterns.
        stated: keys of config.json.
    """

    form: str = "packed"
    prefix: str = TEXT
    quantized: Collection[str] = ()
    further: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {**TOWER, **MTP})
    ignored: Collection[str] = ("linear_attn", "visual", "connector", "mtp")
    stated: Mapping[str, Any] = field(
        default_factory=lambda: {"text_config": {"mtp_num_hidden_layers": 1}}
    )

    def write(self, folder: Path) -> Path:
        inside = {
            f"{self.prefix}{STATE}.{name}": shape for name, shape in (_DELTA | _GATES).items()
        }
        plain = {f"{self.prefix}layers.1.{name}": shape for name, shape in _BLOCK.items()}
        plain |= {f"{self.prefix}layers.0.mlp.{name}": shape for name, shape in _MLP.items()}
        encode, key, _ = FORMS[self.form]
        found: Tensors = {f"{self.prefix}{STATE}.A_log": torch.randn(8)}
        for module, shape in (inside | plain | dict(self.further)).items():
            weight = torch.randn(shape).mul_(0.1).bfloat16()
            if module in plain or module in self.quantized:
                found |= {f"{module}.{leaf}": one for leaf, one in encode(weight).items()}
            else:
                found[module if len(shape) == 3 else f"{module}.weight"] = weight
        found[f"{self.prefix}embed_tokens.weight"] = torch.randn(
            build.VOCABULARY, HIDDEN
        ).bfloat16()
        settings = {"packed": build.groups(), "gptq": build.GPTQ, "awq": build.AWQ}[self.form]
        config = build.config(
            {**settings, key: self._kept()}, model_type="other", num_hidden_layers=2
        )
        text = {"num_hidden_layers": 2, **self.stated.get("text_config", {})}
        return build.write(
            folder, found, {**config, "vision_config": {}, **self.stated, "text_config": text}
        )

    def _kept(self) -> object:
        if self.form == "awq":
            return list(self.ignored)
        names = [one if "." in one else f".*{one}.*" for one in self.ignored]
        if self.form == "gptq":
            return {f"-:{one}": {} for one in names}
        return ["lm_head", *(f"re:{one}" if "*" in one else one for one in names)]


def _found(hybrid: Hybrid, folder: Path, **requested: Any) -> dict[str, set[str]]:
    """Where each rule finds something."""
    found: dict[str, set[str]] = {}
    for one in quantkit.diagnose(hybrid.write(folder), **requested).findings:
        found.setdefault(one.rule.name, set()).add(one.location)
    return found


@pytest.mark.parametrize("prefix", ["model.", TEXT])
@pytest.mark.parametrize("form", FORMS)
def test_a_sound_hybrid_has_nothing(form: str, prefix: str, tmp_path: Path) -> None:
    assert _found(Hybrid(form, prefix), tmp_path / "model", deep=True) == {}


@pytest.mark.parametrize("prefix", ["model.", TEXT])
@pytest.mark.parametrize("form", FORMS)
def test_gates_and_projections_of_linear_attention_in_four_bits(
    form: str, prefix: str, tmp_path: Path
) -> None:
    modules = [f"{prefix}{STATE}.{name}" for name in _DELTA | _GATES]
    hybrid = Hybrid(form, prefix, modules, ignored=("visual", "connector", "mtp"))
    changing = {
        module for module in modules if not module.endswith(".out_proj")
    }  # that reads the state
    assert _found(hybrid, tmp_path / "model") == {"low-bit-state": changing}


NO_MTP = Hybrid(further=TOWER)
OF_LAYERS = Hybrid(
    prefix="model.",
    further=TOWER | BEYOND,
    ignored=("linear_attn", "visual", "connector", r"model\.layers\.2\..*"),
    stated={"num_nextn_predict_layers": 1},
)


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers"]
)
@pytest.mark.parametrize("part", ["", "text_config"])
def test_mtp_that_the_config_states_is_missing(key: str, part: str, tmp_path: Path) -> None:
    stated = {part: {key: 1}} if part else {key: 1}
    assert _found(replace(NO_MTP, stated=stated), tmp_path / "none") == {
        "dropped-prediction": {"config.json"}
    }
    assert _found(Hybrid(stated=stated), tmp_path / "there") == {}


@pytest.mark.parametrize(
    "lost", [["mtp.fc"], [name for name in MTP if "self_attn" in name]], ids=["one", "a module"]
)
def test_some_of_what_predicts_further_tokens_is_missing(lost: list[str], tmp_path: Path) -> None:
    """`ignore` names it; nothing else says that it should be there."""
    others = ("linear_attn", "visual", "connector")
    rest = TOWER | {name: shape for name, shape in MTP.items() if name not in lost}
    hybrid = Hybrid(ignored=(*others, *MTP), further=rest)
    assert _found(hybrid, tmp_path / "model") == {"dropped-prediction": set(lost)}


def test_layers_beyond_those_of_the_model_are_counted(tmp_path: Path) -> None:
    assert _found(OF_LAYERS, tmp_path / "all") == {}
    two = replace(OF_LAYERS, stated={"num_nextn_predict_layers": 2})
    (finding,) = quantkit.diagnose(two.write(tmp_path / "some")).findings
    assert finding.rule.name == "dropped-prediction"
    assert "num_nextn_predict_layers" in finding.message
    assert _found(replace(OF_LAYERS, further=TOWER), tmp_path / "none") == {
        "dropped-prediction": {"config.json"}
    }


@pytest.mark.parametrize("form", FORMS)
def test_mtp_in_floats_that_the_settings_do_not_leave_in_floats(form: str, tmp_path: Path) -> None:
    hybrid = Hybrid(form, ignored=("linear_attn", "visual", "connector"))
    assert _found(hybrid, tmp_path / "model") == {"mtp-not-ignored": set(MTP)}


def test_mtp_in_ignore_under_its_names_or_by_a_pattern(tmp_path: Path) -> None:
    others = ("linear_attn", "visual", "connector")
    patterns = [[r"mtp\..*"], ["^mtp.*"], [".*mtp.*"]]
    for number, names in enumerate([list(MTP), *patterns]):
        assert _found(Hybrid(ignored=(*others, *names)), tmp_path / str(number)) == {}
    one = [name for name in MTP if name != "mtp.fc"]
    assert _found(Hybrid(ignored=(*others, *one)), tmp_path / "fc") == {
        "mtp-not-ignored": {"mtp.fc"}
    }


def test_mtp_in_ignore_under_another_name(tmp_path: Path) -> None:
    others = ("linear_attn", "visual", "connector")
    renamed = [f"model.{name}" for name in MTP]
    found = quantkit.diagnose(
        Hybrid(ignored=(*others, *renamed)).write(tmp_path / "names")
    ).findings
    assert {one.location for one in found if one.rule.name == "mtp-not-ignored"} == set(MTP)
    (joining,) = (one for one in found if one.location == "mtp.fc")
    assert "'model.mtp.fc'" in joining.message
    assert [one.location for one in found if one.rule.name == "names-nothing"] == renamed
    by_pattern = Hybrid(ignored=(*others, r"^model\.mtp.*"))
    assert _found(by_pattern, tmp_path / "pattern") == {"mtp-not-ignored": set(MTP)}
    short = replace(OF_LAYERS, ignored=(*others, *(name.removeprefix("model.") for name in BEYOND)))
    assert _found(short, tmp_path / "beyond")["mtp-not-ignored"] == {
        one for one in BEYOND if "eh_proj" not in one
    }


def test_names_of_modules_that_runtimes_fuse_are_no_other_names(tmp_path: Path) -> None:
    fused = [*MTP, "mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.gate_up_proj"]
    assert (
        _found(Hybrid(ignored=("linear_attn", "visual", "connector", *fused)), tmp_path / "model")
        == {}
    )


def test_experts_of_mtp_in_one_tensor_are_linears_of_each_expert(tmp_path: Path) -> None:
    experts = "mtp.layers.0.mlp.experts"
    stacked = {
        f"{experts}.gate_up_proj": (2, 2 * MIDDLE, HIDDEN),
        f"{experts}.down_proj": (2, HIDDEN, MIDDLE),
    }
    hybrid = Hybrid(further={**TOWER, **MTP, **stacked})
    assert _found(hybrid, tmp_path / "pattern") == {}
    each = [
        f"{experts}.{index}.{name}_proj" for name in ("gate", "up", "down") for index in range(2)
    ]
    others = ("linear_attn", "visual", "connector", *MTP)
    assert _found(replace(hybrid, ignored=(*others, *each)), tmp_path / "names") == {}
    found = _found(replace(hybrid, ignored=(*others, *stacked)), tmp_path / "stacked")
    assert found == {"mtp-not-ignored": set(each)}


def test_quantized_mtp_is_not_in_ignore(tmp_path: Path) -> None:
    hybrid = Hybrid(quantized=list(MTP))
    assert _found(hybrid, tmp_path / "ignored") == {"not-in-config": set(MTP)}
    assert (
        _found(replace(hybrid, ignored=("linear_attn", "visual", "connector")), tmp_path / "sound")
        == {}
    )


@pytest.mark.parametrize("form", FORMS)
def test_parts_for_images_in_four_bits(form: str, tmp_path: Path) -> None:
    hybrid = Hybrid(form, quantized=list(TOWER), ignored=("linear_attn", "mtp"))
    assert _found(hybrid, tmp_path / "model") == {"quantized-tower": set(TOWER)}
