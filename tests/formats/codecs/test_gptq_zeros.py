"""GPTQ's zero points: any come back, and codes tell which version they are of, not a value that
they happen to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from gptq_words import AWQ, gptq_settings, gptq_tensors, pack_words, stated_settings
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.safetensors_io import open_file
from quantkit.formats.checkpoint import schemes
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.registry import METHODS
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

FORMAT = {1: "gptq", 2: "gptq_v2"}


def _around(weight: Tensor, zero: int | None, bits: int, above: float = 0.0) -> QuantTensor:
    """A weight's codes in groups of 32 around one zero point, or each group's own.

    Args:
        above: how many steps the mean code lies above it.
    """
    scheme, (rows, columns) = QuantScheme(bits, 32, False), weight.shape
    groups, top = weight.float().reshape(rows, columns // 32, 32), scheme.levels - 1
    scale = (groups.abs().amax(-1) / (scheme.levels / 2 - 1)).half()
    points = (
        torch.full(scale.shape, zero) if zero is not None else torch.randint(6, 11, scale.shape)
    )
    codes = (
        (groups / scale.float().unsqueeze(-1) + points.unsqueeze(-1) + above).round().clamp(0, top)
    )
    return QuantTensor(
        codes.reshape(rows, columns).to(torch.uint8), scale, points.to(torch.uint8), scheme
    )


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save(oracle.make("llama"), tmp_path_factory.mktemp("floats") / "source")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("bits", "zero", "above", "only"),
    [
        (4, 7, 1, None),
        (4, 0, 0, None),
        (4, 8, -1, None),
        (8, 127, 1, None),
        (4, 7, 0, "1.mlp.up"),
        (4, 8, 0, "0.mlp"),
        (4, 9, 1, "1."),
    ],
)
def test_any_zero_points_go_to_gptq_and_come_back(
    bits: int, zero: int, above: float, only: str | None, floats: Path, tmp_path: Path
) -> None:
    """What the codes would tell by themselves is wrong of some of these."""
    source, method = oracle.copy(floats, tmp_path / "source"), METHODS["compressed-tensors"]
    tensors, columns = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight, everywhere = tensors.pop(name), only is None or only in name
        value = _around(weight, zero if everywhere else None, bits, above if everywhere else 0)
        assert value.zero is not None
        columns[name.removesuffix(".weight")] = weight.shape[1]
        tensors |= {
            f"{name}_packed": pack_words(value.codes, bits),
            f"{name}_scale": value.scale,
            f"{name}_zero_point": pack_words(value.zero.t(), bits).t().contiguous(),
            f"{name}_shape": torch.tensor(weight.shape),
        }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    settings = method.write_settings(
        dict.fromkeys(columns, value.scheme), {**columns, "lm_head": 0}
    )
    oracle.edit_json(source / "config.json", quantization_config=settings)
    there = quantkit.convert(source, tmp_path / "there", to="gptq", source_check=False)
    assert there.exact is not None
    assert there.exact.tensors == there.exact.equal == len(schemes(open_checkpoint(source)))
    quantkit.convert(tmp_path / "there", tmp_path / "again", to="gptq", source_check=False)
    quantkit.convert(
        tmp_path / "again", tmp_path / "back", to="compressed-tensors", source_check=False
    )
    assert quantkit.verify(source, tmp_path / "back").verdict == quantkit.Verdict.SAME


def _read(
    folder: Path,
    modules: Mapping[str, Mapping[str, Tensor]],
    settings: dict[str, Any],
    shape: tuple[int, int] = (32, 96),
) -> tuple[list[QuantTensor], list[str]]:
    """What modules hold by their settings, and what the user is told."""
    stored = {
        f"{name}.{leaf}": part.contiguous()
        for name, own in modules.items()
        for leaf, part in own.items()
    }
    save_file(stored, folder / "model.safetensors")
    file, notes = open_file(folder / "model.safetensors"), list[str]()
    codecs = METHODS[settings["quant_method"]].read_settings(
        stated_settings(settings), modules, stored
    )
    found = []
    for name, codec in codecs.items():
        raw = RawModule(name, dict.fromkeys(file.tensors, file), folder, notes)
        value = codec.decode(
            raw, codec.spec(raw, TensorSpec(f"{name}.weight", shape, DType.FLOAT32))
        )
        assert isinstance(value, QuantTensor)
        found.append(value)
    return found, notes


def _symmetric(value: QuantTensor) -> bool:
    return value.zero is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("stated", [1, 2, None])
@pytest.mark.parametrize("one", [True, False])
def test_constant_zero_points_report_no_version_where_codes_do(
    one: bool, stated: int | None, version: int, tmp_path: Path
) -> None:
    """7 is stored by version 2 of z = 7, 8 by version 1 of z = 9: neither is symmetric."""
    zero = {1: 9, 2: 7}[version]
    values = [
        _around(torch.randn(32, 96), zero if number == 1 or not one else None, 4)
        for number in range(7)
    ]
    modules = {
        f"m{number}": gptq_tensors(value, version=version) for number, value in enumerate(values)
    }
    settings = gptq_settings(
        sym=False, checkpoint_format=None if stated is None else FORMAT[stated]
    )
    found, notes = _read(tmp_path, modules, settings)
    for value, expected in zip(found, values, strict=True):
        assert torch.equal(value.dequantize(), expected.dequantize())
    assert len(notes) == (version != (stated or 1))


@pytest.mark.parametrize(
    ("stored", "stated", "sym", "means"),
    [
        (7, 1, False, 8),
        (7, 2, False, 7),
        (8, 1, False, 9),
        (8, 2, False, 8),
        (7, None, False, 8),
        (8, None, False, 8),
        (7, 2, True, 8),
        (8, 1, True, 8),
        (5, None, False, 6),
    ],
)
def test_where_codes_cannot_report_the_settings_do_and_then_the_constant(
    stored: int, stated: int | None, sym: bool, means: int, tmp_path: Path
) -> None:
    modules = {
        f"m{number}": gptq_tensors(_around(torch.randn(32, 96) / 4, stored, 4, 0.5), version=2)
        for number in range(7)
    }
    settings = gptq_settings(sym=sym, checkpoint_format=None if stated is None else FORMAT[stated])
    for value in _read(tmp_path, modules, settings)[0]:
        assert _symmetric(value) == (means == 8)
        assert value.zero is None or set(value.zero.flatten().tolist()) == {means}


def test_groups_of_one_sign_report_no_version(tmp_path: Path) -> None:
    """Their zero point is 0, and their codes lie above it: together with others as if all were
    one step off.
    """
    values = []
    for _ in range(7):
        value, positive = (
            _around(torch.randn(32, 96), None, 4),
            _around(torch.randn(32, 96).abs(), 0, 4),
        )
        assert value.zero is not None
        for mixed, own in (
            (value.codes[:, :32], positive.codes[:, :32]),
            (value.scale[:, 0], positive.scale[:, 0]),
        ):
            mixed.copy_(own)
        value.zero[:, 0] = 0
        values.append(value)
    modules = {f"m{number}": gptq_tensors(value, version=2) for number, value in enumerate(values)}
    found, notes = _read(tmp_path, modules, gptq_settings(sym=False, checkpoint_format="gptq_v2"))
    for value, expected in zip(found, values, strict=True):
        assert torch.equal(value.dequantize(), expected.dequantize())
    assert not notes


def test_codes_of_two_versions_are_refused_and_odd_weights_outvoted(tmp_path: Path) -> None:
    values = [_around(torch.randn(32, 96), None, 4, above=3 * (number == 5)) for number in range(8)]
    modules = {f"m{number}": gptq_tensors(value, version=2) for number, value in enumerate(values)}
    settings = gptq_settings(sym=True, checkpoint_format="gptq")
    for value, expected in zip(_read(tmp_path, modules, settings)[0], values, strict=True):
        assert torch.equal(value.dequantize(), expected.dequantize())
    modules |= {f"m{number}": gptq_tensors(values[number], version=1) for number in range(4)}
    with raises(CheckpointError, "'m0'", found="version 1"):
        _read(tmp_path, modules, settings)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("bits", "columns"), [(4, 100), (8, 102)])
def test_whole_rows_whose_inputs_fill_no_word_are_read(
    bits: int, columns: int, indexed: bool, tmp_path: Path
) -> None:
    scheme, modules = QuantScheme(bits, None, False), {}
    for number in range(7):
        weight = torch.randn(32, columns)
        scale = weight.abs().amax(1, keepdim=True).half() / (scheme.levels / 2 - 1)
        zero = torch.randint(6, 11, scale.shape, dtype=torch.uint8) + scheme.levels // 2 - 8
        codes = (weight / scale.float() + zero).round().clamp(0, scheme.levels - 1).to(torch.uint8)
        own = gptq_tensors(QuantTensor(codes, scale, zero, scheme), version=1)
        modules[f"m{number}"] = (
            own if indexed else {name: one for name, one in own.items() if name != "g_idx"}
        )
    found, notes = _read(
        tmp_path, modules, gptq_settings(bits, -1, checkpoint_format="gptq"), (32, columns)
    )
    assert torch.equal(found[6].codes, codes)
    assert found[6].zero is not None
    assert torch.equal(found[6].zero, zero)
    assert not notes


@pytest.mark.parametrize("writer", [None, "gptqmodel:7.0.0"])
def test_a_zero_point_of_0_that_borrows_is_reported_once_unless_its_packer_is_known(
    writer: str | None, tmp_path: Path
) -> None:
    modules = {}
    for number in range(3):
        value = _around(torch.randn(32, 96), None, 4)
        assert value.zero is not None
        value.zero[4 : 4 + number, 1] = 0
        modules[f"m{number}"] = gptq_tensors(value, version=1)
    settings = gptq_settings(checkpoint_format="gptq", meta={"quantizer": [writer]})
    notes = _read(tmp_path, modules, settings)[1]
    assert ["'m1'" in note for note in notes] == [True] * (writer is None)


@pytest.mark.parametrize("settings", [gptq_settings(), AWQ], ids=["gptq", "awq"])
def test_rotated_models_are_refused(settings: dict[str, Any]) -> None:
    for rotation in (None, "", "hadamard"):
        method, stated = (
            METHODS[settings["quant_method"]],
            stated_settings({**settings, "rotation": rotation}),
        )
        if not rotation:
            assert method.read_settings(stated, ["m"], ["m.qweight"])
            continue
        with raises(UnsupportedError, found="rotation 'hadamard'"):
            method.read_settings(stated, ["m"], ["m.qweight"])
