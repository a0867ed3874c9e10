"""Pickles of `torch.save`: what they mean is what torch says, and nothing in them runs, hangs or
fills the memory.
"""

from __future__ import annotations

import io
import pickle
import random
import resource
import struct
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_names import case
from error_parts import raises
from torch import Tensor, nn

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files import pth_io
from quantkit.files.pickles import Unpickler

PATH = Path("some.pth")


def _load(raw: bytes) -> Any:
    return Unpickler(io.BytesIO(raw), PATH).load()


def _require_as_torch(path: Path, value: object, *, legacy: bool) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    file, expected = pth_io.open_file(path), torch.load(path, weights_only=True, mmap=False)
    expected = expected.get("model", expected)
    assert list(file.tensors) == list(expected)
    for name, tensor in expected.items():
        value = file.read(name)
        assert type(value) is Tensor
        assert not value.requires_grad
        assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(value, tensor), name


WHOLE = torch.randn(64, 33)
VALUES: dict[str, Any] = {
    "shared": {
        "whole": WHOLE,
        "row": WHOLE[3],
        "columns": WHOLE[:, 5:9],
        "turned": WHOLE.T,
        "again": WHOLE,
    },
    "steps": {"a": WHOLE[::2, ::3], "b": WHOLE[None, :, None], "c": torch.ones(3).expand(4, 3)},
    "empty": {
        "a": torch.zeros(0),
        "b": torch.zeros(3, 0, 5),
        "c": torch.tensor(7),
        "d": torch.tensor([True, False]),
    },
    "gradients": {"a": torch.randn(3, 4, requires_grad=True), "b": nn.Parameter(torch.randn(5))},
    "nested": {"model": {"a": torch.randn(3)}},
    "ordered": OrderedDict(a=torch.randn(2), b=torch.randn(3)),
    "module": nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).state_dict(),
    "dtypes": {
        str(dtype): torch.arange(6).to(dtype)
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.complex64,
            torch.complex128,
        )
    },
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", VALUES)
def test_tensors_are_what_torch_says(kind: str, legacy: bool, tmp_path: Path) -> None:
    _require_as_torch(tmp_path / "a.pth", VALUES[kind], legacy=legacy)


def test_types_without_a_storage_of_their_own_are_read(tmp_path: Path) -> None:
    value = torch.arange(4).to(torch.uint16)
    torch.save({"a": value, "b": torch.ones(3).to(torch.float8_e4m3fn)}, tmp_path / "a.pth")
    file = pth_io.open_file(tmp_path / "a.pth")
    assert file.read("a").tolist() == [0, 1, 2, 3]
    assert file.read("b").float().tolist() == [1, 1, 1]


def test_a_tensor_with_attributes_is_read(tmp_path: Path) -> None:
    value = torch.ones(3)
    value.note = "mine"  # type: ignore[attr-defined]
    _require_as_torch(tmp_path / "a.pth", {"a": value}, legacy=False)


ODD: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "negated": lambda: torch.imag(torch.ones(3, dtype=torch.complex64).conj()),
    "meta": lambda: torch.empty(3, device="meta"),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", ODD)
def test_other_kinds_of_tensors_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"odd": ODD[kind]()}, tmp_path / "a.pth")
    with raises(UnsupportedError, "'odd'", path=tmp_path / "a.pth"):
        pth_io.open_file(tmp_path / "a.pth")


# Written by hand


def _text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(raw)]) + raw


def _sizes(values: tuple[Any, ...]) -> bytes:
    parts = [
        _int(value) if type(value) is int else pickle.dumps(value, 2)[2:-1] for value in values
    ]
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def _tensor(
    count: int = 6,
    offset: Any = 0,
    shape: tuple[Any, ...] = (2, 3),
    stride: tuple[Any, ...] = (3, 1),
) -> bytes:
    storage = (
        pickle.MARK
        + _text("storage")
        + b"ctorch\nFloatStorage\n"
        + _text("0")
        + _text("cpu")
        + _int(count)
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + pickle.MARK
        + storage
        + pickle.TUPLE
        + pickle.BINPERSID
        + _sizes((offset,))[1:-1]
        + _sizes(shape)
        + _sizes(stride)
        + pickle.NEWFALSE
        + pickle.EMPTY_DICT
        + pickle.TUPLE
        + pickle.REDUCE
    )


def test_the_hand_written_tensor_is_sound() -> None:
    view = _load(_tensor() + pickle.STOP)
    assert (view.shape, view.stride, view.storage.nbytes) == ((2, 3), (3, 1), 24)


VIEWS_OUTSIDE: list[dict[str, Any]] = [
    {"offset": 1},
    {"offset": -1},
    {"offset": 1 << 62},
    {"offset": 0.0},
    {"shape": (3, 3)},
    {"shape": (-2, 3)},
    {"shape": (True, 3)},
    {"shape": (2.0, 3)},
    {"shape": ("2", 3)},
    {"shape": (None, 3)},
    {"shape": (1 << 90, 3)},
    {"shape": (2,)},
    {"stride": (3, 2)},
    {"stride": (-3, 1)},
    {"stride": (1 << 70, 1)},
    {"count": 5},
    {"count": -1},
    {"count": 1 << 80},
    {"shape": (1,) * 100, "stride": (1,) * 100},
]


def test_a_view_that_leaves_its_storage_is_refused() -> None:
    for change in VIEWS_OUTSIDE:
        with case(change), raises(CheckpointError, path=PATH):
            _load(_tensor(**change) + pickle.STOP)


def test_a_tensor_that_repeats_itself_beyond_its_file_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "a.pth")
    with raises(CheckpointError, "'a'", path=tmp_path / "a.pth"):
        pth_io.open_file(tmp_path / "a.pth")


DEEP = 150_000
BOMBS = {
    "deep-key": pickle.EMPTY_DICT
    + pickle.EMPTY_TUPLE
    + DEEP * pickle.TUPLE1
    + pickle.NONE
    + pickle.SETITEM,
    "deep": pickle.EMPTY_TUPLE + DEEP * pickle.TUPLE1,
    "marks": DEEP * pickle.MARK,
    "memo": pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff",
    "text": pickle.BINUNICODE + b"\xff\xff\xff\xff",
    "bytes": pickle.BINBYTES8 + struct.pack("<Q", 1 << 40),
    "frame": pickle.PROTO + b"\x04" + pickle.FRAME + struct.pack("<Q", 1 << 62),
    "long": pickle.LONG4 + struct.pack("<i", 1 << 30),
    "doubled": pickle.EMPTY_LIST
    + 60 * (pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2),
    "extension": pickle.EXT1 + b"\1",
    "instance": pickle.MARK + pickle.INST + b"os\nsystem\n",
    "object": pickle.MARK + b"cos\nsystem\n" + pickle.OBJ,
    "stack-global": _text("os") + _text("system") + pickle.STACK_GLOBAL,
    "dotted": b"ctorch\nnn.Module\n",
    "reduce-value": _text("a") + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "reduce-dtype": b"ctorch\nfloat32\n" + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "build": _text("a") + pickle.EMPTY_DICT + pickle.BUILD,
    "storage": _int(5) + pickle.BINPERSID,
    "no-mark": pickle.TUPLE,
    "no-memo": pickle.BINGET + b"\7",
    "odd-items": pickle.EMPTY_DICT + pickle.MARK + _text("a") + pickle.SETITEMS,
    "append-to-text": _text("a") + pickle.NONE + pickle.APPEND,
    "twice": pickle.EMPTY_DICT + 2 * (_text("a") + pickle.NONE + pickle.SETITEM),
    "half-a-pair": pickle.EMPTY_DICT
    + pickle.BINUNICODE
    + b"\3\0\0\0\xed\xa0\x80"
    + pickle.NONE
    + pickle.SETITEM,
    "from-type": b"ctorch._tensor\n_rebuild_from_type_v2\n"
    + 3 * pickle.NONE
    + pickle.TUPLE3
    + pickle.REDUCE,
    "nothing": b"",
}


@pytest.mark.sampled(19)
@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_hostile_pickle_is_refused_soon_and_in_little_memory(
    kind: str, legacy: bool, tmp_path: Path
) -> None:
    path, raw = tmp_path / "a.pth", BOMBS[kind] + pickle.STOP
    if legacy:
        path.write_bytes(raw)
    else:
        torch.save({"a": torch.ones(3)}, path)
        _with_pickle(path, raw)
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        pth_io.open_file(path)
    assert len(str(caught.value)) < 500 + len(str(path))
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def _with_pickle(path: Path, raw: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, raw if name.endswith("data.pkl") else data)


def test_a_pickle_longer_than_any_of_tensors_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(3)}, path)
    _with_pickle(path, bytes(pth_io.MAX_BYTES + 1))
    with raises(CheckpointError, path=path):
        pth_io.open_file(path)


@pytest.mark.filterwarnings(
    "ignore:.* invalid escape sequence:DeprecationWarning"
)  # of pickletools, in Python 3.14
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_with_any_bytes_changed_is_refused_or_read_as_torch_reads_it(
    legacy: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.pth"
    value = {"a": torch.ones(3), "b": WHOLE.T}
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    sound = path.read_bytes()
    dice = random.Random(0)
    for _ in range(300):
        raw = bytearray(sound)
        for _ in range(dice.choice([1, 1, 2, 5])):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        if dice.random() < 0.2:
            start, stop = sorted(dice.sample(range(len(raw)), 2))
            del raw[start : start + min(stop - start, 300)]
        path.write_bytes(raw)
        try:
            file = pth_io.open_file(path)
            tensors = {name: file.read(name) for name in file.tensors}
            file.source.sha256()
        except (CheckpointError, UnsupportedError):
            continue
        # A zip has checksums. Devices are ignored: their names may be among the changed bytes.
        expected = torch.load(path, "cpu", weights_only=True, mmap=False) if legacy else value
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name
