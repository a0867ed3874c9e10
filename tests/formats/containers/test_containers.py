"""A container is one class and one row in the registry: a toy is found, read, verified,
quantized and written.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command import Capture, run
from error_parts import raises
from torch import Tensor

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.architectures.topology import Parameter, parameters
from quantkit.base.json_values import read_settings
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.files.safetensors_io import build_header, open_file
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod
from quantkit.formats.container import Chunk, Container, Output, tensor_bytes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import TOKENIZER_FILES, find_copyable_files, json_bytes
from quantkit.formats.registry import CONTAINERS
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

FILE = "weights.loud"


class LoudCheckpoint:
    """Tensors under their names in capitals."""

    format = "loud"
    layout = "loud (one file)"
    method: str | None = None
    kv_cache = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.extra_config: Mapping[str, Any] = {}
        self.config = config_from_hf(read_settings(path / "loud.json"), path / "loud.json")
        self._file = open_file(path / FILE)

    def names(self) -> list[str]:
        return [parameter.name for parameter in parameters(self.config)]

    def info(self, name: str) -> TensorSpec:
        stored = self._file.tensors[name.upper()]
        return TensorSpec(name, stored.shape, stored.dtype)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor:
        return self._file.read(name.upper(), part)

    def files(self) -> list[SourceFile]:
        return [self._file.source, SourceFile(self.path / "loud.json")]

    def count_stored_bytes(self, name: str) -> int:
        return self._file.tensors[name.upper()].nbytes

    def readers(self) -> str:
        return "this test"


class LoudEncoder:
    rearranges = False
    max_buffered_bytes = 0
    holds = False

    def __init__(self, planned: Sequence[TensorSpec]) -> None:
        self.planned = planned
        self._stored = [StoredTensor(spec.name.upper(), spec.dtype, spec.shape) for spec in planned]
        self._header = build_header(self._stored)

    def total_bytes(self) -> int:
        return len(self._header) + sum(tensor.nbytes for tensor in self._stored)

    def files(self) -> Sequence[str]:
        return [FILE]

    def canonical_name(self, index: int) -> str:
        return self.planned[index].name

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        assert isinstance(value, Tensor)
        if index == 0:
            yield FILE, self._header
        yield FILE, tensor_bytes(value, self._stored[index])

    def decode(self, index: int, folder: Path) -> Tensor:
        raise NotImplementedError

    def finish(self) -> Iterator[Chunk]:
        return iter(())

    def state(self) -> None:
        return None

    def restore(self, state: object) -> None:
        pass

    def extra_files(self) -> dict[str, bytes]:
        return {}


class Loud:
    name = "loud"
    title = "Loud"
    config_file = "loud.json"
    weights: Mapping[str, str] = {"loud": FILE}
    methods: Mapping[str, QuantMethod] = {}
    native: CodeFormat | None = None
    stores_tied_head = False
    states_tokens = True
    model_parallel = False
    derived = False
    read_only = False
    unsplit_by_default = False

    def find_weight_kinds(self, path: Path) -> list[str]:
        return ["loud"] if (path / FILE).is_file() else []

    def has_index(self, path: Path, kind: str) -> bool:
        return False

    def with_codes(self, checkpoint: LoudCheckpoint) -> LoudCheckpoint:
        return checkpoint

    def open(
        self, path: Path, kind: str, *, tensors_only: bool = False, floats_as: DType | None = None
    ) -> LoudCheckpoint:
        return LoudCheckpoint(path)

    def parameters(
        self, config: ModelConfig, quantized: Collection[str], method: object = None
    ) -> list[Parameter]:
        return parameters(config)

    def encoder(self, output: Output) -> LoudEncoder:
        return LoudEncoder(output.planned)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        return {
            self.config_file: json_bytes(config_to_hf(output.config)),
            **find_copyable_files(output.source.path, TOKENIZER_FILES),
        }

    def list_carried_names(self, source: Checkpoint, dst: Path) -> Collection[str]:
        return TOKENIZER_FILES

    def notes(self, output: Output) -> list[str]:
        return [f"{output.source.path}: louder now"]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    container: Container = Loud()
    monkeypatch.setitem(CONTAINERS, container.name, container)


@pytest.fixture
def loud(demo_model: Path, tmp_path: Path) -> Path:
    notes = quantkit.convert(demo_model, tmp_path / "loud", to="loud").notes
    assert f"{demo_model}: louder now" in notes
    return tmp_path / "loud"


@pytest.mark.slow
def test_it_is_written_found_and_the_same_model(
    demo_model: Path, loud: Path, capfd: Capture
) -> None:
    assert open_checkpoint(loud).format == "loud"
    assert open_checkpoint(loud, "loud").names() == open_checkpoint(demo_model).names()
    assert verify(demo_model, loud).verdict is Verdict.SAME
    assert run(capfd, "verify", loud)[0] == 0
    found, before = quantkit.inspect(loud), quantkit.inspect(demo_model)
    assert (found.format, found.readers) == ("loud (one file)", ["this test"])
    assert (found.weight_bytes, found.parameters) == (before.weight_bytes, before.parameters)


@pytest.mark.slow
def test_what_comes_from_it_is_what_comes_from_the_source(
    demo_model: Path, loud: Path, tmp_path: Path
) -> None:
    for source, name in ((demo_model, "direct"), (loud, "over")):
        quantkit.quantize(source, tmp_path / name, "int8")
        quantkit.convert(source, tmp_path / f"{name}-hf")
        quantkit.convert(source, tmp_path / f"{name}-meta", to="meta", mp=2)
    for kind, file in (
        ("", "model.safetensors"),
        ("-hf", "model.safetensors"),
        ("-meta", "consolidated.01.pth"),
    ):
        assert (tmp_path / f"direct{kind}" / file).read_bytes() == (
            tmp_path / f"over{kind}" / file
        ).read_bytes()
    model, tokenizer = quantkit.load(loud)
    assert len(list(quantkit.generate(model, tokenizer.encode("Fellow"), max_new_tokens=4))) == 4


def test_it_takes_what_it_says_it_takes(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "int8", "int8")
    with raises(UnsupportedError, path=tmp_path / "int8", found="int8"):
        quantkit.convert(tmp_path / "int8", tmp_path / "out", to="loud")
    with raises(RequestError, options=["mp", "to"]):
        quantkit.convert(demo_model, tmp_path / "out", to="loud", mp=2)


def test_two_containers_in_one_folder_are_ambiguous(demo_model: Path, loud: Path) -> None:
    for file in demo_model.iterdir():
        shutil.copyfile(file, loud / file.name)
    with raises(CheckpointError, "meta", "loud", path=loud, options=["weights"]):
        open_checkpoint(loud)
    assert open_checkpoint(loud, "meta").format == "meta"
    with raises(RequestError, "meta, safetensors, bin, ", "loud", found="quiet"):
        open_checkpoint(loud, "quiet")
