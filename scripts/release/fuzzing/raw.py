"""Mutations of bytes: flips, cuts, splices, integers at their edges; and of safetensors files."""

from __future__ import annotations

import struct
from random import Random

from fuzzing.jsons import mutate_json

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4096\n"
)
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>not found</body></html>\n"
_EDGES = (0, -1, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0x7F, 0x80, 0xFFFF)


def mutate_bytes(
    rng: Random, data: bytes, others: list[bytes], span: tuple[int, int] | None = None
) -> tuple[bytes, str]:
    """One mutation without regard to the format, within `span` of the file, and what it was.

    Args:
        others: files to splice with.
    """
    low, high = span or (0, len(data))
    if high <= low:
        return rng.randbytes(rng.randint(1, 64)), "was empty, now noise"
    at = rng.randrange(low, high)
    length = min(rng.choice((1, 2, 4, 8, 64, 512, 4096)), len(data) - at)
    kind = rng.choice(
        (
            "flip",
            "flip",
            "set",
            "cut",
            "insert",
            "delete",
            "double",
            "swap",
            "integer",
            "integer",
            "splice",
        )
    )
    if kind == "flip":
        changed = bytearray(data)
        places = [rng.randrange(low, high) for _ in range(rng.choice((1, 1, 2, 8)))]
        for place in places:
            changed[place] ^= 1 << rng.randrange(8)
        return bytes(changed), f"bits flipped at {places}"
    if kind == "set":
        noise = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
        return data[:at] + noise + data[at + length :], f"{length} bytes set at {at}"
    if kind == "cut":
        return data[:at], f"cut at {at} of {len(data)}"
    if kind == "insert":
        noise = rng.choice((bytes(length), rng.randbytes(length)))
        return data[:at] + noise + data[at:], f"{length} bytes inserted at {at}"
    if kind == "delete":
        return data[:at] + data[at + length :], f"{length} bytes deleted at {at}"
    if kind == "double":
        return data[:at] + data[at : at + length] * 2 + data[
            at + length :
        ], f"{length} bytes doubled at {at}"
    if kind == "swap":
        to = rng.randrange(low, max(low + 1, high - length))
        first, second = sorted((at, to))
        length = min(length, second - first)
        pieces = (
            data[:first],
            data[second : second + length],
            data[first + length : second],
            data[first : first + length],
        )
        return b"".join(pieces) + data[
            second + length :
        ], f"{length} bytes at {first} and {second} swapped"
    if kind == "integer":
        return edge_integer(rng, data, at, rng.choice(("<H", "<I", "<Q", ">I")))
    other = rng.choice(others) if others else data[::-1]
    to = rng.randrange(len(other) + 1)
    return data[:at] + other[to:], f"first {at} bytes, then another file from {to}"


def edge_integer(rng: Random, data: bytes, at: int, form: str) -> tuple[bytes, str]:
    """An integer field replaced by an edge, or moved by a little."""
    size = struct.calcsize(form)
    at = max(0, min(at, len(data) - size))
    if len(data) < size:
        return b"\xff" * size, "was too short, now -1"
    old = struct.unpack_from(form, data, at)[0]
    new = rng.choice((*_EDGES, old + 1, old - 1, old + 64, old - 64, old * 2, old // 2)) % (
        1 << 8 * size
    )
    return data[:at] + struct.pack(form, new) + data[
        at + size :
    ], f"integer {form} at {at}: {old} to {new}"


def mutate_safetensors(rng: Random, data: bytes, others: list[bytes]) -> tuple[bytes, str]:
    """One mutation of a safetensors file: its length field, its header as JSON or as bytes, or
    its data.
    """
    if len(data) < 16:
        return mutate_bytes(rng, data, others)
    length = min(struct.unpack_from("<Q", data)[0], len(data) - 8)
    kind = rng.choice(("header", "header", "header", "bytes", "data", "length", "file"))
    if kind == "header":
        mutated = mutate_json(rng, data[8 : 8 + length])
        if mutated is not None:
            header, what = mutated
            stated = len(header) if rng.random() < 0.95 else length
            return struct.pack("<Q", stated) + header + data[8 + length :], f"header{what}"
    if kind == "length":
        return edge_integer(rng, data, 0, "<Q")
    if kind == "bytes":
        return mutate_bytes(rng, data, others, (0, 8 + length))
    if kind == "data":
        return mutate_bytes(rng, data, others, (8 + length, len(data)))
    return mutate_bytes(rng, data, others)
