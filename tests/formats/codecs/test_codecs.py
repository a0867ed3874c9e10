"""A codec is one class and one row in the registry: two toys are read, verified, run and
written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.base.json_values import Settings
from quantkit.cli.convert import convert
from quantkit.errors import CheckpointError, NotRepresentableError, RequestError
from quantkit.files import tensor_file
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import schemes
from quantkit.formats.codecs.codec import Codec, QuantMethod, Reason
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.container import Output
from quantkit.formats.containers.hf_checkpoint import SETTINGS
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.registry import CONTAINERS, HF, METHODS, targets
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

INT8 = QuantScheme(8, None)


class Steps(QuantMethod):
    """Signed codes [I, O], so transposed, beside scales [O] that are never negative; nothing but
    int8 per row.
    """

    name = "steps"
    keys = (SETTINGS,)
    joins_experts = False
    schemes: tuple[QuantScheme, ...] = (INT8,)
    scale_dtype: DType | None = None
    scheme = INT8

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Codec]:
        return {module: self for module in modules if module in settings.strings("modules")}

    def write_settings(
        self, schemes: Mapping[str, QuantScheme], modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "modules": [module for module in modules if module in schemes],
        }

    def side_files(self, settings: Mapping[str, Any]) -> dict[str, bytes]:
        return {}

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Codec | Reason:
        return (
            self if scheme == INT8 else Reason("it holds nothing else", found=scheme, expected=INT8)
        )

    def readers(self, schemes: Mapping[str, QuantScheme | None], *, without: object = ()) -> str:
        return "this test"

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        codes, scale = raw.find("codes"), raw.find("steps")
        assert codes is not None
        assert scale is not None
        return TensorSpec(expected.name, codes.shape[::-1], scale.dtype, INT8)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        module = spec.name.removesuffix("weight")
        codes = StoredTensor(f"{module}codes", DType.INT8, spec.shape[::-1])
        return [codes, StoredTensor(f"{module}steps", spec.dtype, spec.shape[:1])]

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self.list_stored_tensors(spec)

    def decode(
        self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None
    ) -> QuantTensor:
        turned = None if part is None else TensorSlice(1 - part.axis, part.ranges)
        codes = raw.read("codes", turned).t().contiguous().view(torch.uint8) ^ 128
        scale = raw.read("steps", part if part is not None and part.axis == 0 else None)
        return QuantTensor(codes, scale.unsqueeze(1), None, INT8)

    def misfit(self, shape: tuple[int, ...]) -> None:
        return None

    def encode(self, value: QuantTensor) -> list[Tensor] | Reason:
        if (value.scale < 0).any():
            return Reason("a scale is negative", found=value.scale.min().item())
        return [
            (value.codes ^ 128).view(torch.int8).t().contiguous(),
            value.scale.squeeze(1).contiguous(),
        ]


class Backwards(QuantMethod):
    """Floats whose bytes lie backwards, as those of formats that are dequantized when they are
    read.
    """

    name = "backwards"
    keys = (SETTINGS,)
    joins_experts = False
    schemes: tuple[QuantScheme, ...] = ()
    scale_dtype: DType | None = None
    scheme = None

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Codec]:
        return dict.fromkeys((module for module in modules if module != "lm_head"), self)

    def write_settings(
        self, schemes: Mapping[str, QuantScheme], modules: Iterable[str], *, every: bool = True
    ) -> dict[str, Any]:
        raise NotImplementedError

    def side_files(self, settings: Mapping[str, Any]) -> dict[str, bytes]:
        return {}

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> Reason:
        return Reason("it is only read")

    def readers(self, schemes: Mapping[str, QuantScheme | None], *, without: object = ()) -> str:
        return "this test"

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        return expected

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        rows, columns = spec.shape
        return [StoredTensor(spec.name, DType.UINT8, (rows, columns * 2))]

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self.list_stored_tensors(spec)

    def decode(self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None = None) -> Tensor:
        rows = part if part is not None and part.axis == 0 else None
        value = raw.read("weight", rows).flip(1).view(torch.bfloat16)
        return part.of(value) if part is not None and rows is None else value

    def misfit(self, shape: tuple[int, ...]) -> Reason:
        return Reason("it is only read")

    def encode(self, value: QuantTensor) -> Reason:
        return self.misfit(value.shape)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    methods: tuple[QuantMethod, ...] = (Steps(), Backwards())
    for method in methods:
        monkeypatch.setitem(METHODS, method.name, method)


@pytest.fixture(scope="module")
def int8(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "int8"
    quantkit.quantize(demo_model, folder, "int8")
    return folder


def _rewritten(source: Path, folder: Path, settings: dict[str, Any] | None, change: Any) -> Path:
    """A folder with tensors stored as `change` has them, written by the safetensors library."""
    oracle.copy(source, folder)
    (folder / "quantkit.json").unlink()
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    oracle.edit_json(folder / "config.json", quantization_config=settings)
    return folder


@pytest.fixture
def steps(int8: Path, tmp_path: Path) -> Path:
    """The int8 model in the toy's layout, written without the toy's code."""
    modules = [name.removesuffix(".weight") for name in schemes(open_checkpoint(int8))]

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored = {name: tensor for name, tensor in tensors.items() if ".weight_" not in name}
        for module in modules:
            codes = tensors[f"{module}.weight_packed"].view(torch.uint8).to(torch.int16) - 128
            stored[f"{module}.codes"] = codes.to(torch.int8).t().contiguous()
            stored[f"{module}.steps"] = tensors[f"{module}.weight_scale"].flatten()
        return stored

    return _rewritten(
        int8, tmp_path / "steps", {"quant_method": "steps", "modules": modules}, change
    )


def _equal(one: Tensor | QuantTensor, other: Tensor | QuantTensor) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)


@pytest.mark.slow
def test_a_folder_in_a_codecs_layout_is_the_same_model(int8: Path, steps: Path) -> None:
    first, second = open_checkpoint(int8), open_checkpoint(steps)
    assert schemes(first) == schemes(second) != {}
    for name in first.names():
        assert first.info(name) == second.info(name)
        assert _equal(first.load(name), second.load(name)), name
    assert verify(int8, steps).verdict is Verdict.SAME


def test_it_generates_the_same_tokens(int8: Path, steps: Path) -> None:
    tokens = []
    for folder in (int8, steps):
        model, tokenizer = quantkit.load(folder)
        tokens.append(list(quantkit.generate(model, tokenizer.encode("Fellow"), max_new_tokens=8)))
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8


def test_inspect_reports_its_schemes_sizes_and_readers(
    int8: Path, steps: Path, capfd: Capture
) -> None:
    before, found = quantkit.inspect(int8), quantkit.inspect(steps)
    assert found.tensors == before.tensors
    assert found.readers == ["quantkit", "this test"]
    shapes = 16 * before.tensors["int8"]  # that only the other layout stores
    assert found.weight_bytes == before.weight_bytes - shapes
    assert run(capfd, "verify", int8, steps)[0] == 0


@pytest.mark.parametrize(
    "part", [TensorSlice(0, ((8, 16),)), TensorSlice(1, ((4, 12),))], ids=["rows", "columns"]
)
def test_only_the_part_requested_is_read(
    steps: Path, part: TensorSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(schemes(open_checkpoint(steps)))) + ".weight"
    whole = open_checkpoint(steps).load(name)
    assert isinstance(whole, QuantTensor)
    read = []
    read_tensor = tensor_file.TensorFile.read

    def watched(self: tensor_file.TensorFile, name: str, part: TensorSlice | None = None) -> Tensor:
        tensor = read_tensor(self, name, part)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(tensor_file.TensorFile, "read", watched)
    found = open_checkpoint(steps).load(name, part)
    assert isinstance(found, QuantTensor)
    assert torch.equal(found.dequantize(), part.of(whole.dequantize()))
    assert max(read) == found.codes.numel() == 8 * whole.shape[1 - part.axis]


@pytest.mark.slow
def test_a_codec_may_give_floats(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "floats")
    modules = {f"{p}.weight" for p in _linears(tmp_path / "floats")}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert modules <= set(tensors)
        return {
            n: t.view(torch.uint8).flip(1).contiguous() if n in modules else t
            for n, t in tensors.items()
        }

    folder = _rewritten(
        tmp_path / "floats", tmp_path / "backwards", {"quant_method": "backwards"}, change
    )
    assert schemes(open_checkpoint(folder)) == {}
    assert verify(tmp_path / "floats", folder).verdict is Verdict.SAME
    part = TensorSlice(1, ((4, 12),))
    for name in sorted(modules)[:2]:
        whole = open_checkpoint(tmp_path / "floats").load(name)
        assert isinstance(whole, Tensor)
        assert _equal(open_checkpoint(folder).load(name, part), part.of(whole))
    quantkit.quantize(folder, tmp_path / "again", "int8")
    quantkit.quantize(tmp_path / "floats", tmp_path / "direct", "int8")
    again, direct = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "direct")
    )
    assert again == direct


def _linears(folder: Path) -> list[str]:
    names = [name.removesuffix(".weight") for name in open_checkpoint(folder).names()]
    return [
        name
        for name in names
        if "norm" not in name and name not in ("lm_head", "model.embed_tokens")
    ]


def test_codes_go_from_one_codec_to_another_and_back(
    int8: Path, steps: Path, tmp_path: Path
) -> None:
    quantkit.convert(int8, tmp_path / "there", to="steps")
    quantkit.convert(tmp_path / "there", tmp_path / "back", to="compressed-tensors")
    assert (
        load_file(tmp_path / "there" / "model.safetensors").keys()
        == load_file(steps / "model.safetensors").keys()
    )
    settings = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    assert settings == json.loads((steps / "config.json").read_text())["quantization_config"]
    assert verify(steps, tmp_path / "there").verdict is Verdict.SAME
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (int8 / name).read_bytes(), name


@pytest.mark.parametrize("shape", [(), (3,), (3, 5), (0, 0), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_stored_tensor_of_another_shape_is_named(
    suffix: str, shape: tuple[int, ...], int8: Path, tmp_path: Path
) -> None:
    name = f"model.layers.0.mlp.up_proj.{suffix}"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, name: torch.zeros(shape, dtype=tensors[name].dtype)}

    settings = json.loads((int8 / "config.json").read_text())["quantization_config"]
    folder = _rewritten(int8, tmp_path / "damaged", settings, change)
    with raises(CheckpointError, "model.layers.0.mlp.up_proj.", path=folder):
        open_checkpoint(folder)


def test_what_a_codec_cannot_hold_is_refused_by_the_tensors_name(
    int8: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{name}.weight_scale"][3] *= -1
        return tensors

    settings = json.loads((int8 / "config.json").read_text())["quantization_config"]
    negative = _rewritten(int8, tmp_path / "negative", settings, change)
    with raises(NotRepresentableError, f"'{name}.weight'", "steps"):
        quantkit.convert(negative, tmp_path / "out", to="steps")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["negative"]


def test_a_scheme_that_a_codec_does_not_know_is_refused_before_any_work(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(demo_model, tmp_path / "int4", "int4-g32", method="rtn")
    with raises(NotRepresentableError, "q_proj.weight'", "steps", found="int4-g32"):
        quantkit.convert(tmp_path / "int4", tmp_path / "out", to="steps")
    assert [path.name for path in tmp_path.iterdir()] == ["int4"]


def test_the_targets_are_those_of_the_registry(demo_model: Path, tmp_path: Path) -> None:
    with raises(RequestError, "steps", options=["to"]):
        quantkit.convert(demo_model, tmp_path / "out", to="steps")
    with raises(RequestError, "compressed-tensors, ", "hf", found="'nonsense'"):
        quantkit.convert(demo_model, tmp_path / "out", to="nonsense")


def test_an_encoder_reads_back_what_it_has_written(steps: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(steps)
    planned = [checkpoint.info(name) for name in checkpoint.names()]
    encoder = HF.encoder(
        Output(checkpoint, checkpoint.config, planned, 1 << 19, method=METHODS["steps"])
    )
    assert len(encoder.files()) > 1
    for index, spec in enumerate(planned):
        for name, data in encoder.encode(index, checkpoint.load(spec.name)):
            with (tmp_path / name).open("ab") as file:
                file.write(data)
        assert _equal(encoder.decode(index, tmp_path), checkpoint.load(spec.name))


def test_the_commands_offer_what_is_registered() -> None:
    offered = {parameter.name: parameter.type for parameter in convert.params}
    kinds = {kind for container in CONTAINERS.values() for kind in container.weights}
    assert isinstance(offered["to"], click.Choice)
    assert set(offered["to"].choices) >= {name for name in targets() if name != "steps"}
    assert isinstance(offered["weights"], click.Choice)
    assert set(offered["weights"].choices) == kinds - {"gpt-fast-int4"}  # which is never read
