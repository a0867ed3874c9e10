"""Reading by position: any view and any part of a tensor, as torch has it, a small buffer at a
time.
"""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quantkit.files import pth_io, safetensors_io, source, tensor_file
from quantkit.files.tensor_file import TensorFile, same_tensor
from quantkit.tensors.tensor_slice import TensorSlice

WHOLE = torch.randn(64, 33)
VIEWS: dict[str, Tensor] = {
    "whole": WHOLE,
    "rows": WHOLE[5:50],
    "columns": WHOLE[:, 5:9],
    "turned": WHOLE.T,
    "steps": WHOLE[::3, ::2],
    "cube": WHOLE[:60].view(4, 15, 33).permute(2, 0, 1),
    "repeated": WHOLE[0].expand(7, 33),
    "one": WHOLE[3:4, 2:3],
    "line": WHOLE[:, 7],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TensorFile:
    path = tmp_path_factory.mktemp("views") / "a.pth"
    torch.save(VIEWS, path)
    return pth_io.open_file(path)


@st.composite
def _parts(draw: st.DrawFn) -> tuple[str, TensorSlice]:
    name = draw(st.sampled_from(sorted(VIEWS)))
    axis = draw(st.integers(0, min(VIEWS[name].dim(), 2) - 1))
    size = VIEWS[name].shape[axis]
    pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(
        lambda pair: pair[0] < pair[1]
    )
    return name, TensorSlice(
        axis, tuple(draw(st.lists(pairs, min_size=1, max_size=1 if axis else 3)))
    )


@pytest.mark.parametrize("buffer", [4, 64, 1000, 1 << 23])
def test_a_view_is_read_whole(
    buffer: int, file: TensorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", buffer)
    for name, view in VIEWS.items():
        tensor = file.read(name)
        assert torch.equal(tensor, view), name
        assert tensor.is_contiguous(), name
        assert file.read_bytes(name) == tensor.numpy().tobytes(), name


@pytest.mark.slow
@settings(deadline=None)
@given(name_and_part=_parts(), buffer=st.sampled_from([4, 100, 1 << 23]))
def test_a_part_is_read_as_torch_cuts_it(
    name_and_part: tuple[str, TensorSlice], buffer: int, file: TensorFile
) -> None:
    name, part = name_and_part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BUFFER_BYTES", buffer)
        tensor = file.read(name, part)
        assert file.read_bytes(name, part) == tensor.numpy().tobytes()
        target = torch.zeros(*tensor.shape, 2)[..., 0]
        file.read_into(target, name, part)
    assert torch.equal(tensor, part.of(VIEWS[name]))
    assert torch.equal(target, tensor)


def test_what_is_read_is_fresh(file: TensorFile) -> None:
    file.read("whole").zero_()
    assert torch.equal(file.read("whole"), WHOLE)


def test_some_rows_read_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.arange(4000.0).view(400, 10)}, tmp_path / "a.safetensors")
    file = safetensors_io.open_file(tmp_path / "a.safetensors")
    counts = []
    preadv = os.preadv

    def counting(*arguments: Any) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(source.os, "preadv", counting)
    assert file.read("a", TensorSlice(0, ((390, 400), (3, 5)))).tolist()[-1][-1] == 49
    assert sum(counts) == 12 * 10 * 4


def test_reads_that_come_in_pieces_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": WHOLE}, tmp_path / "a.pth")
    preadv = os.preadv
    monkeypatch.setattr(
        source.os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:100]], at)
    )
    assert torch.equal(pth_io.open_file(tmp_path / "a.pth").read("a"), WHOLE)


def test_columns_of_a_large_tensor_take_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.zeros(2000, 1000)}, tmp_path / "a.safetensors")
    file = safetensors_io.open_file(tmp_path / "a.safetensors")
    sizes = []
    empty = torch.empty

    def recording(*arguments: Any, **options: Any) -> Tensor:
        tensor = empty(*arguments, **options)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", 100_000)
    monkeypatch.setattr(torch, "empty", recording)
    tracemalloc.start()
    file.read("a", TensorSlice(1, ((10, 20),)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(sizes) <= 100_000
    assert peak < 200_000


def test_equal_tensors_are_distinguished_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", 1000)
    other = WHOLE.clone()
    other[-1, -1] += 1
    values = {
        "a": WHOLE,
        "same": WHOLE.clone(),
        "other": other,
        "flat": WHOLE.reshape(-1),
        "half": WHOLE.half(),
    }
    torch.save({**values, "number": torch.tensor(3)}, tmp_path / "a.pth")
    file = pth_io.open_file(tmp_path / "a.pth")
    assert [name for name in file.tensors if same_tensor(file, "a", file, name)] == ["a", "same"]
    assert same_tensor(file, "number", file, "number")


def test_tensors_are_equal_by_their_bits(tmp_path: Path) -> None:
    strange = torch.tensor([[float("nan"), 0.0], [float("inf"), -0.0]])
    torch.save(
        {"a": strange, "turned": strange.T.contiguous().T, "zeros": strange.abs()},
        tmp_path / "a.pth",
    )
    file = pth_io.open_file(tmp_path / "a.pth")
    assert [name for name in file.tensors if same_tensor(file, "a", file, name)] == ["a", "turned"]


def test_rows_of_a_part_are_counted_from_its_first() -> None:
    part, tensor = TensorSlice(0, ((4, 9), (20, 22), (4, 6))), torch.arange(30)
    rows = part.of(tensor)
    for start in range(9):
        for stop in range(start + 1, 10):
            assert torch.equal(part.rows(start, stop).of(tensor), rows[start:stop])
