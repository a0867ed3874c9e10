"""Weight files whose parts contradict each other, or change under our hands: refused by name,
never read wrong.
"""

from __future__ import annotations

import gc
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.errors import CheckpointError, DestinationError, UnsupportedError
from quantkit.files import pth_io, safetensors_io, source
from quantkit.files.tensor_file import TensorFile
from quantkit.formats import manifest
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.convert.convert import convert

TENSORS = {"first": torch.arange(600.0).view(20, 30), "second": torch.arange(77).bfloat16()}


def _saved(
    path: Path, value: object = TENSORS, *, legacy: bool = False, checksums: bool = True
) -> Path:
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    finally:
        torch.serialization.set_crc32_options(True)
    return path


def _rewritten(
    path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    """The same records with other contents, in a zip file that is sound in itself."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))
    return path


def _flip(path: Path, record: str) -> None:
    """Two flipped bits in the last byte but one of a record."""
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(record))
    raw = bytearray(path.read_bytes())
    name, extra = struct.unpack_from("<HH", raw, info.header_offset + 26)
    raw[info.header_offset + 30 + name + extra + info.file_size - 2] ^= 0x41
    path.write_bytes(raw)


def _require_as_torch(path: Path) -> TensorFile:
    """A file is read as torch reads it."""
    file, expected = pth_io.open_file(path), torch.load(path, weights_only=True, mmap=False)
    assert list(file.tensors) == list(expected)
    for name, tensor in expected.items():
        value = file.read(name)
        assert value.dtype == tensor.dtype
        assert torch.equal(value, tensor), name
    return file


def _weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a ``.bin``."""
    folder = oracle.save(
        oracle.make("llama", num_hidden_layers=1), tmp_path_factory.mktemp("saved") / "model"
    )
    state = {name: tensor.clone() for name, tensor in _weights(folder).items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def pickled(saved: Path, tmp_path: Path) -> Path:
    return oracle.copy(saved, tmp_path / "bin")


# The records of a zip


@pytest.mark.parametrize(
    "cut", [lambda d: d[:-64], lambda d: d[: len(d) // 2], lambda d: b"", lambda d: d + bytes(64)]
)
@pytest.mark.parametrize(
    "command", [("inspect",), ("convert", "OUT"), ("quantize", "OUT", "--scheme", "int8")]
)
def test_a_record_of_another_size_than_its_storage_is_refused(
    cut: Callable[[bytes], bytes], command: tuple[str, ...], pickled: Path, capfd: Capture
) -> None:
    path = pickled / "pytorch_model.bin"
    _rewritten(path, lambda name, data: cut(data) if name.endswith("data/3") else data)
    options = [str(pickled.parent / "out") if word == "OUT" else word for word in command[1:]]
    code, _, err = run(capfd, command[0], pickled, *options)
    assert code == 3, err
    assert f"{path}: " in err
    assert "'pytorch_model/data/3'" in err
    assert not (pickled.parent / "out").exists()


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    with zipfile.ZipFile(path) as archive:
        records = {
            name: archive.read(name) for name in archive.namelist() if not name.endswith("data/1")
        }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    with raises(CheckpointError, "'a/data/1'", path=path):
        pth_io.open_file(path)


def test_a_record_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/data/1", bytes(154))
    with raises(CheckpointError, "'a/data/1'", path=path):
        pth_io.open_file(path)


def test_a_compressed_record_is_refused_by_name(pickled: Path, capfd: Capture) -> None:
    path = _rewritten(pickled / "pytorch_model.bin", lambda name, data: data, zipfile.ZIP_DEFLATED)
    code, _, err = run(capfd, "convert", pickled, pickled.parent / "out")
    assert code == 4
    assert f"{path}: " in err
    assert "'pytorch_model/data.pkl'" in err


def test_records_that_are_stored_by_another_program_are_read(tmp_path: Path) -> None:
    _require_as_torch(_rewritten(_saved(tmp_path / "a.pth"), lambda name, data: data))


@pytest.mark.parametrize("field", ["name", "method", "size", "signature"])
def test_a_record_that_contradicts_the_directory_is_refused(field: str, tmp_path: Path) -> None:
    path = _rewritten(_saved(tmp_path / "a.pth"), lambda name, data: data)
    with zipfile.ZipFile(path) as archive:
        start = next(
            info.header_offset for info in archive.infolist() if info.filename.endswith("data/0")
        )
    raw = bytearray(path.read_bytes())
    raw[start + {"signature": 0, "method": 8, "size": 22, "name": 30}[field]] ^= 1
    path.write_bytes(raw)
    with raises(CheckpointError, "'a/data/0'", path=path):
        pth_io.open_file(path)


@pytest.mark.parametrize("moved", [-64, 64, 1 << 31])
def test_a_directory_that_sends_a_record_elsewhere_is_refused(moved: int, tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"a/data/0") - 46
    (start,) = struct.unpack_from("<I", raw, entry + 42)
    struct.pack_into("<I", raw, entry + 42, start + moved)
    path.write_bytes(raw)
    with raises(CheckpointError, "'a/data/", path=path):
        pth_io.open_file(path)


def test_bytes_cut_out_of_the_middle_are_noticed(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    raw = path.read_bytes()
    path.write_bytes(raw[:1000] + raw[1400:])
    with raises(CheckpointError, path=path):
        pth_io.open_file(path)


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path: Path) -> None:
    path = _rewritten(
        _saved(tmp_path / "a.pth"),
        lambda name, data: b"big" if name.endswith("byteorder") else data,
    )
    with raises(UnsupportedError, path=path):
        pth_io.open_file(path)


@pytest.mark.parametrize("name", ["elsewhere/version", "b.pth/version"])
def test_a_record_outside_the_files_folder_is_refused(name: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(name, b"3")
    with raises(CheckpointError, repr(name), "'a'", path=path):
        pth_io.open_file(path)


@pytest.mark.parametrize(
    ("offset", "value"), [(32, 9), (34, 1), (38, 0x10)], ids=["comment", "disk", "folder"]
)
def test_an_entry_of_the_directory_that_torch_does_not_write_is_refused(
    offset: int, value: int, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "a.pth")
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    raw = bytearray(path.read_bytes())
    position = [i for i in range(start, len(raw)) if raw[i : i + 4] == b"PK\x01\x02"][-1]
    struct.pack_into("<H", raw, position + offset, value)
    path.write_bytes(raw)
    with raises(CheckpointError, path=path):
        pth_io.open_file(path)


@pytest.mark.parametrize(
    ("signature", "offset", "value"),
    [
        (b"PK\x05\x06", 20, 9),
        (b"PK\x05\x06", 4, 1),
        (b"PK\x06\x06", 16, 1),
        (b"PK\x06\x06", 20, 1),
        (b"PK\x06\x07", 16, 2),
    ],
)
def test_a_directory_of_several_disks_or_with_a_comment_is_refused(
    signature: bytes, offset: int, value: int, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "a.pth")
    raw = bytearray(path.read_bytes())
    struct.pack_into("<H", raw, raw.rindex(signature) + offset, value)
    path.write_bytes(raw)
    with raises(CheckpointError, path=path):
        pth_io.open_file(path)


def test_bytes_after_the_directory_are_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    path.write_bytes(path.read_bytes() + b"more")
    with raises(CheckpointError, path=path):
        pth_io.open_file(path)


def test_small_records_are_held_against_their_checksums_when_a_file_is_opened(
    tmp_path: Path,
) -> None:
    path = _saved(tmp_path / "a.pth")
    _flip(path, "serialization_id")
    with raises(CheckpointError, "serialization_id'", path=path):
        pth_io.open_file(path)


# Checksums


@pytest.mark.parametrize("command", [("convert",), ("quantize", "--scheme", "int8")])
def test_flipped_bits_are_reported_by_the_checksum(
    command: tuple[str, ...], pickled: Path, capfd: Capture
) -> None:
    path = pickled / "pytorch_model.bin"
    _flip(path, "data/5")
    assert run(capfd, "inspect", pickled)[0] == 0  # which reads no data
    code, _, err = run(capfd, command[0], pickled, pickled.parent / "out", *command[1:])
    assert code == 3, err
    assert f"{path}: " in err
    assert "'pytorch_model/data/5'" in err
    assert not (pickled.parent / "out").exists()


def test_flipped_bits_in_the_pickle_are_reported_when_it_is_opened(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    _flip(path, "data.pkl")
    with raises(CheckpointError, "'a/data.pkl'", path=path):
        pth_io.open_file(path)


def test_a_file_without_checksums_is_read_with_a_note(
    pickled: Path, tmp_path: Path, capfd: Capture
) -> None:
    path = pickled / "pytorch_model.bin"
    _saved(path, torch.load(path, weights_only=True), checksums=False)
    code, _, err = run(capfd, "convert", pickled, tmp_path / "out")
    assert code == 0, err
    assert f"quantkit: note: {path}: " in err
    expected = torch.load(path, weights_only=True)
    converted = _weights(tmp_path / "out")
    assert all(torch.equal(converted[name], expected[name]) for name in expected)


def test_a_file_with_one_checksum_of_zero_is_damaged(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.pth")
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"a/data/0") - 46
    raw[entry + 16 : entry + 20] = bytes(4)
    path.write_bytes(raw)
    file = pth_io.open_file(path)
    assert not file.notes
    with raises(CheckpointError, "'a/data/0'", path=path):
        file.source.sha256()


# Files that change while they are read


def _written(path: Path, kind: str) -> Path:
    if kind == "safetensors":
        save_file(TENSORS, path)
        return path
    return _saved(path, legacy=kind == "legacy")


def _opened(path: Path, kind: str) -> TensorFile:
    return safetensors_io.open_file(path) if kind == "safetensors" else pth_io.open_file(path)


KINDS = ["safetensors", "zip", "legacy"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_off_after_it_was_opened_is_an_error(kind: str, tmp_path: Path) -> None:
    """Through a map it would be a signal that ends the process."""
    path = _written(tmp_path / "a", kind)
    file, size = _opened(path, kind), path.stat().st_size
    os.truncate(path, 100)
    with raises(CheckpointError, f" {size} ", path=path, found="100 bytes"):
        file.read("second")
    with raises(CheckpointError, path=path):
        manifest.SourceHashes([file.source], tmp_path).result()


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_file_is_read_on_and_reported_in_the_end(kind: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "a", kind)
    file = _opened(path, kind)
    path.unlink()
    assert torch.equal(file.read("first"), TENSORS["first"])
    assert manifest.identity([file.source])[0][0] == "a"
    with raises(CheckpointError, path=path):
        manifest.SourceHashes([file.source], tmp_path).result()


@pytest.mark.parametrize("how", ["cut", "deleted", "touched", "replaced"])
@pytest.mark.parametrize("when", ["opened", "half-way"])
def test_a_source_that_changes_during_a_conversion_is_an_error(
    how: str, when: str, saved: Path, pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pickled / "pytorch_model.bin"

    def change() -> None:
        if how == "cut":
            os.truncate(path, 5000)
        elif how == "touched":
            os.utime(path, ns=(0, 1))
        else:
            path.unlink()
            if how == "replaced":
                path.write_bytes((saved / "pytorch_model.bin").read_bytes())

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if path.exists() and path.stat().st_mtime_ns == before and (when == "opened" or done > 0):
            change()

    before = path.stat().st_mtime_ns
    with raises(CheckpointError, path=path):
        convert(pickled, pickled.parent / "out", progress=progress)
    assert not (pickled.parent / "out").exists()


def test_an_error_of_any_kind_in_the_hashing_thread_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> str:
        raise MemoryError("no more")

    monkeypatch.setattr(source.SourceFile, "sha256", fail)
    hashes = manifest.SourceHashes([source.SourceFile(_saved(tmp_path / "a"))], tmp_path)
    with pytest.raises(MemoryError, match="no more"):
        hashes.result()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "consolidated.00.pth"])
def test_a_pipe_in_place_of_weights_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    open_file = safetensors_io.open_file if name.endswith("safetensors") else pth_io.open_file
    for opening in (open_file, open_checkpoint):
        with raises(CheckpointError, path=tmp_path / name):
            opening(tmp_path / name)


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="this system does not list a process's files"
)
def test_files_are_closed_with_the_checkpoint(pickled: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_checkpoint(pickled)
    assert len(os.listdir("/proc/self/fd")) == before


# Headers of safetensors


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": [2.0, 2]}, "2.0"),
        ({"shape": ["2", 2]}, "'2'"),
        ({"shape": [True, 4]}, "True"),
        ({"shape": [-2, -2]}, "-2"),
        ({"shape": [10**400, 0]}, "1000"),
        ({"shape": [1 << 63, 0]}, "9223372036854775808"),
        ({"shape": 4}, "list"),
        ({"shape": [1] * 1000}, "list"),
        ({"shape": None}, "list"),
        ({"data_offsets": [0.0, 16]}, "0.0"),
        ({"data_offsets": ["0", "16"]}, "'0'"),
        ({"data_offsets": [False, 16]}, "False"),
        ({"data_offsets": [-16, 0]}, "-16"),
        ({"data_offsets": [0, 16, 32]}, "ValueError"),
        ({"data_offsets": [0, 10**5000]}, "ValueError"),
    ],
)
def test_a_header_holds_whole_numbers_only(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **change}
    if change.get("data_offsets", [0])[-1] == 10**5000:
        text = '{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,1' + 5000 * "0" + "]}}"
    else:
        text = json.dumps({"a": entry})
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(16))
    with raises(CheckpointError, word, path=path):
        safetensors_io.open_file(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","dtype":"I32","shape":[4],"data_offsets":[0,16]}}',
        '{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        '{"__metadata__":[],"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    ],
    ids=["tensor-twice", "key-twice", "half-a-pair", "metadata"],
)
def test_a_header_says_each_thing_once_in_valid_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for raw in (text.encode(), text.replace("[]", "null").encode("utf-16")):
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
        with raises(CheckpointError, path=path):
            safetensors_io.open_file(path)


# Files from before the zip


def test_a_legacy_file_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    whole = torch.randn(50, 40)
    value = {
        "whole": whole,
        "turned": whole.T,
        "part": whole[3:9, 5:7],
        "number": torch.tensor(3),
        "none": whole[:0],
    }
    _require_as_torch(_saved(tmp_path / "a.bin", value, legacy=True))


def test_each_step_reads_a_legacy_file_once(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = oracle.copy(saved, tmp_path / "bin")
    path = folder / "pytorch_model.bin"
    _saved(path, torch.load(path, weights_only=True), legacy=True)
    counted = 0
    preadv = os.preadv

    def counting(*arguments: Any) -> int:
        nonlocal counted
        read_bytes = preadv(*arguments)
        counted += read_bytes
        return read_bytes

    monkeypatch.setattr(source.os, "preadv", counting)
    monkeypatch.setattr(pth_io, "MAX_BYTES", 20_000)
    monkeypatch.setattr(source, "SAMPLE_BYTES", 16)
    convert(folder, tmp_path / "out")
    size = path.stat().st_size
    # Its hash, the conversion, and the comparison with the result, which is as large.
    assert 3 * size <= counted <= 4.2 * size
    converted = _weights(tmp_path / "out")
    for name, tensor in torch.load(path, weights_only=True, mmap=False).items():
        assert torch.equal(converted[name], tensor), name


def test_a_legacy_storage_of_another_size_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "a.bin", {"a": torch.ones(1000)}, legacy=True)
    raw = path.read_bytes()
    at = raw.rindex(struct.pack("<q", 1000))
    path.write_bytes(raw[:at] + struct.pack("<q", 999) + raw[at + 8 :])
    with raises(CheckpointError, path=path, found="999 elements", expected=1000):
        pth_io.open_file(path)


def test_a_tar_archive_is_refused_by_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.pth", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    with raises(UnsupportedError, path=tmp_path / "a.pth"):
        pth_io.open_file(tmp_path / "a.pth")


def test_damage_ends_a_job_before_its_end(
    pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pickled / "pytorch_model.bin"
    _flip(path, "data/1")
    phases: list[str] = []

    class Finished(manifest.SourceHashes):
        def __init__(self, files: Any, folder: Path) -> None:
            super().__init__(files, folder)
            self._thread.join()

    monkeypatch.setattr(manifest, "SourceHashes", Finished)
    with raises(CheckpointError, "data/1'", path=path):
        convert(pickled, tmp_path / "out", progress=lambda *now: phases.append(now[0]))
    assert len(phases) == 1


@pytest.mark.parametrize(
    ("written", "instead"), [(b"norm.weight", b"norn.weight"), (b"F32", b"F99")]
)
def test_what_is_written_is_opened_before_it_gets_its_name(
    written: bytes, instead: bytes, pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = safetensors_io.build_header
    broken = "quantkit.formats.containers.hf_encoder.build_header"
    monkeypatch.setattr(broken, lambda tensors: built(tensors).replace(written, instead))
    with pytest.raises(DestinationError):
        convert(pickled, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_safetensors_library_has_a_say(
    pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(pickled, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    safetensors_io.require_readable(file)
    monkeypatch.setattr(safetensors_io, "check_sizes", lambda value: (1, *value))
    with pytest.raises(RuntimeError, match=str(file)):
        safetensors_io.require_readable(file)
