"""Mutations of ``.pth`` and ``.bin`` files of the zip kind: fields of the directory, headers,
records.
"""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from random import Random

from fuzzing.pickles import mutate_pickle
from fuzzing.raw import edge_integer, mutate_bytes

_LOCAL, _CENTRAL, _END, _END64, _LOCATOR = (
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
)
# Offsets and sizes of the integer fields after each signature: APPNOTE 4.3.
_FIELDS = {
    _LOCAL: (
        (4, "<H"),
        (6, "<H"),
        (8, "<H"),
        (14, "<I"),
        (18, "<I"),
        (22, "<I"),
        (26, "<H"),
        (28, "<H"),
    ),
    _CENTRAL: (
        (6, "<H"),
        (8, "<H"),
        (10, "<H"),
        (16, "<I"),
        (20, "<I"),
        (24, "<I"),
        (28, "<H"),
        (30, "<H"),
        (32, "<H"),
        (34, "<H"),
        (42, "<I"),
    ),
    _END: ((4, "<H"), (6, "<H"), (8, "<H"), (10, "<H"), (12, "<I"), (16, "<I"), (20, "<H")),
    _END64: ((4, "<Q"), (16, "<I"), (24, "<Q"), (32, "<Q"), (40, "<Q"), (48, "<Q")),
    _LOCATOR: ((4, "<I"), (8, "<Q"), (16, "<I")),
}
Records = list[tuple[str, bytes, int]]
"""Name, content and compression of each record."""


def mutate_zip(rng: Random, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    """One mutation of a zip, and what it was."""
    kind = rng.choice(
        (
            "field",
            "field",
            "field",
            "records",
            "records",
            "pickle",
            "pickle",
            "in place",
            "bytes",
            "data",
        )
    )
    if kind == "field" and (places := _signatures(data)):
        signature, at = rng.choice(places)
        offset, form = rng.choice(_FIELDS[signature])
        changed, what = edge_integer(rng, data, at + offset, form)
        return changed, f"{signature[2:].hex()} field {offset}: {what}"
    records = _records(data)
    if kind == "bytes" or not records:
        return mutate_bytes(rng, data, others)
    if kind == "records":
        records, what = _mutated(rng, records, others)
        return _zip(records, checksums=rng.random() < 0.9), what
    if kind == "pickle":
        index = next((i for i, (name, _, _) in enumerate(records) if name.endswith("data.pkl")), 0)
        name, content, compression = records[index]
        content, what = mutate_pickle(rng, content, [])
        records[index] = (name, content, compression)
        return _zip(records, checksums=True), f"{name}: {what}"
    name, content, _ = rng.choice(
        records if kind == "data" else [r for r in records if r[0].endswith("data.pkl")] or records
    )
    start = data.find(content) if content else -1
    if start < 0:
        return mutate_bytes(rng, data, others)
    changed, what = mutate_bytes(rng, data, others, (start, start + len(content)))
    return changed, f"{name} in place: {what}"


def _mutated(rng: Random, records: Records, others: list[bytes]) -> tuple[Records, str]:
    index = rng.randrange(len(records))
    name, content, compression = records[index]
    kind = rng.choice(
        (
            "drop",
            "swap",
            "short",
            "short",
            "long",
            "deflate",
            "rename",
            "double",
            "other",
            "all short",
            "names swapped",
        )
    )
    other = rng.randrange(len(records))
    if kind == "drop":
        del records[index]
    elif kind == "swap":
        a, b = records[index], records[other]
        records[index], records[other] = (a[0], b[1], a[2]), (b[0], a[1], b[2])
        name += f" and {b[0]}"
    elif kind == "names swapped":
        records[index], records[other] = records[other], records[index]
    elif kind == "short":
        records[index] = (name, content[: rng.randrange(len(content) + 1)], compression)
    elif kind == "long":
        records[index] = (name, content + bytes(rng.choice((1, 2, 64))), compression)
    elif kind == "deflate":
        records[index] = (
            name,
            content,
            rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
        )
    elif kind == "rename":
        records[index] = (
            rng.choice((name + "x", "../victim", "", name.replace("data/", "data"), "x/" + name)),
            content,
            compression,
        )
    elif kind == "double":
        records.append((name, content[::-1], compression))
    elif kind == "all short":
        records = [(n, c[: len(c) // 2] if "/data/" in n else c, k) for n, c, k in records]
        name = "all data"
    elif found := _records(rng.choice(others)) if others else []:
        records[index] = (name, rng.choice(found)[1], compression)
        kind = "taken from another file"
    return records, f"record {name}: {kind}"


def _signatures(data: bytes) -> list[tuple[bytes, int]]:
    """Where local headers, the directory and its end are."""
    found = []
    for signature in _FIELDS:
        at = data.find(signature)
        while at >= 0 and len(found) < 500:
            found.append((signature, at))
            at = data.find(signature, at + 4)
    return found


def _records(data: bytes) -> Records:
    """The records of a zip; none where it is no longer one."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [
                (info.filename, archive.read(info), info.compress_type)
                for info in archive.infolist()
            ]
    except Exception:  # zipfile raises many kinds; what it cannot read is mutated as bytes
        return []


def _zip(records: Records, *, checksums: bool) -> bytes:
    """A zip of records; with checksums, or with 0 in their place, as torch writes with its CRC
    switched off.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubled names
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content, compression in records:
                archive.writestr(zipfile.ZipInfo(name), content, compression)
    data = bytearray(buffer.getvalue())
    if not checksums:
        for signature, at in _signatures(bytes(data)):
            if signature in (_LOCAL, _CENTRAL):
                struct.pack_into("<I", data, at + (14 if signature == _LOCAL else 16), 0)
    return bytes(data)
