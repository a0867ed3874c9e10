"""The bytes of weight files: what we write as others read it, what others write as we read it."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quantkit.files import pth_io, safetensors_io
from quantkit.files.pth_encoder import PthEncoder
from quantkit.files.safetensors_io import build_header
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.container import tensor_bytes
from quantkit.tensors.dtypes import DType

Tensors = dict[str, Tensor]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12
).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple) | st.tuples(st.integers(1, 300))


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bit pattern, NaN among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


def _tensors(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[Tensors]:
    one = st.builds(_random_bits, SHAPES, st.sampled_from(dtypes), st.integers(0, 1000))
    return st.dictionaries(NAMES, one, min_size=1, max_size=6)


def _stored(tensors: Tensors) -> list[StoredTensor]:
    return [StoredTensor(name, DType.of(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _require_bit_equal(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].is_contiguous()
        assert _bits(found[name]) == _bits(tensor)


def _read(file: TensorFile) -> Tensors:
    return {name: file.read(name) for name in file.tensors}


def _pth_bytes(tensors: Tensors, name: str = "consolidated.00") -> bytes:
    stored = _stored(tensors)
    encoder = PthEncoder(name, stored)
    parts = [encoder.start()]
    for index, tensor in enumerate(tensors.values()):
        data = tensor_bytes(tensor, stored[index])
        parts += [encoder.before(index, data), bytes(data)]
    return b"".join([*parts, encoder.end()])


def _write_pth(tensors: Tensors, path: Path) -> None:
    path.write_bytes(_pth_bytes(tensors))


def _write_safetensors(tensors: Tensors, path: Path) -> None:
    path.write_bytes(build_header(_stored(tensors)) + b"".join(map(_bits, tensors.values())))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the many examples of one property."""
    return tmp_path_factory.mktemp("scratch")


@pytest.mark.slow
@settings(deadline=None)
@given(tensors=_tensors(FLOATS))
def test_torch_reads_what_we_write(scratch: Path, tensors: Tensors) -> None:
    path = scratch / "model.pth"
    _write_pth(tensors, path)
    for mmap in (False, True):
        _require_bit_equal(torch.load(path, weights_only=True, mmap=mmap), tensors)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
    path.unlink()


@settings(deadline=None)
@given(tensors=_tensors(FLOATS))
def test_the_data_of_each_tensor_is_aligned(tensors: Tensors) -> None:
    raw = _pth_bytes(tensors)
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        records = {info.filename: info for info in file.infolist()}
    for index, tensor in enumerate(tensors.values()):
        info = records[f"consolidated.00/data/{index}"]
        name_length, extra_length = struct.unpack(
            "<HH", raw[info.header_offset + 26 : info.header_offset + 30]
        )
        start = info.header_offset + 30 + name_length + extra_length
        assert start % 64 == 0
        assert raw[start : start + info.file_size] == _bits(tensor)


@settings(deadline=None)
@given(tensors=_tensors(FLOATS), data=st.data())
def test_a_restored_encoder_goes_on_with_the_same_bytes(
    tensors: Tensors, data: st.DataObject
) -> None:
    stored = _stored(tensors)
    cut = data.draw(st.integers(1, len(tensors)))
    first, second = PthEncoder("consolidated.00", stored), PthEncoder("consolidated.00", stored)
    raw = first.start()
    for index, tensor in enumerate(tensors.values()):
        if index == cut:
            break
        bits = tensor_bytes(tensor, stored[index])
        raw += first.before(index, bits) + bits
    second.restore(json.loads(json.dumps(first.state())))
    for index, tensor in list(enumerate(tensors.values()))[cut:]:
        bits = tensor_bytes(tensor, stored[index])
        raw += second.before(index, bits) + bits
    assert raw + second.end() == _pth_bytes(tensors)


@settings(deadline=None)
@given(tensors=_tensors(FLOATS))
def test_the_size_is_known_before_as_an_upper_bound(tensors: Tensors) -> None:
    encoder = PthEncoder("consolidated.00", _stored(tensors))
    size = len(_pth_bytes(tensors))
    assert size <= encoder.total_bytes < size + 512 * (len(tensors) + 16)


def test_equal_tensors_give_equal_bytes_whenever_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16()}
    first = _pth_bytes(tensors)
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert _pth_bytes({name: value.clone() for name, value in tensors.items()}) == first


def test_the_order_of_the_tensors_is_kept(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3) for name in ("z", "a", "m")}
    _write_pth(tensors, tmp_path / "model.pth")
    assert list(torch.load(tmp_path / "model.pth", weights_only=True)) == ["z", "a", "m"]


def test_records_past_four_gigabytes_are_found(tmp_path: Path) -> None:
    tensors = {"near": torch.randn(33), "far": torch.randn(17, 5)}
    stored = _stored(tensors)
    gap = 5 << 30
    path = tmp_path / "model.pth"
    encoder = PthEncoder("consolidated.00", stored)
    near, far = (
        tensor_bytes(tensor, part) for tensor, part in zip(tensors.values(), stored, strict=True)
    )
    with path.open("wb") as file:
        file.write(encoder.start() + encoder.before(0, near) + near)
        state = encoder.state()
        encoder.restore({**state, "position": state["position"] + gap})
        file.seek(gap, io.SEEK_CUR)
        file.write(encoder.before(1, far) + far + encoder.end())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        _require_bit_equal(torch.load(path, weights_only=True, mmap=mmap), tensors)


@settings(deadline=None)
@given(tensors=_tensors(FLOATS))
def test_files_of_torch_are_read_bit_equal(scratch: Path, tensors: Tensors) -> None:
    path = scratch / "theirs.pth"
    for zipped in (True, False):
        torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
        assert path.read_bytes().startswith(b"PK") == zipped
        _require_bit_equal(_read(pth_io.open_file(path)), tensors)
        path.unlink()


@settings(deadline=None)
@given(tensors=_tensors(tuple(dtype.torch for dtype in safetensors_io.DTYPES.values())))
def test_safetensors_reads_what_we_write(scratch: Path, tensors: Tensors) -> None:
    path = scratch / "model.safetensors"
    if torch.bool in {t.dtype for t in tensors.values()}:
        tensors = {
            n: t.view(torch.uint8) & 1 if t.dtype == torch.bool else t for n, t in tensors.items()
        }
    _write_safetensors(tensors, path)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    _require_bit_equal({name: found[name] for name in tensors}, tensors)
    assert found.keys() == tensors.keys()
    path.unlink()


@settings(deadline=None)
@given(tensors=_tensors(tuple(dtype.torch for dtype in safetensors_io.DTYPES.values())))
def test_the_data_after_our_header_is_aligned(tensors: Tensors) -> None:
    assert len(build_header(_stored(tensors))) % 64 == 0


@settings(deadline=None)
@given(tensors=_tensors((*FLOATS, torch.int32, torch.int64, torch.uint8)))
def test_our_header_reader_says_what_safetensors_says(scratch: Path, tensors: Tensors) -> None:
    path = scratch / "theirs.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "note": "theirs"})
    file = safetensors_io.open_file(path)
    with safetensors.safe_open(path, framework="pt") as theirs:
        names = set(theirs.keys())
        assert file.tensors.keys() == names
        for name in names:
            tensor = theirs.get_tensor(name)
            assert file.tensors[name] == StoredTensor(
                name, DType.of(tensor.dtype), tuple(tensor.shape)
            )
            assert file.tensors[name].nbytes == tensor.nbytes
            _require_bit_equal({name: file.read(name)}, {name: tensor})
    path.unlink()
