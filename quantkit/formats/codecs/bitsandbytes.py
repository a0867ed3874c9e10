"""bitsandbytes' NF4, FP4 and LLM.int8(): read only, as floats.

4 bits: ``T`` uint8 [ceil(n / 2), 1], two codes a byte, the high half first; ``T.quant_map`` float32
[16], what each code means; ``T.absmax``, by which the values of a block are multiplied;
``T.quant_state.bitsandbytes__nf4``, the shape, the size of a block and more as the bytes of a JSON
object. With double quantization ``T.absmax`` is uint8, ``absmax = nested_quant_map[code] *
nested_absmax[block] + nested_offset``. 8 bits: ``M.weight`` int8 [O, I] and ``M.SCB`` [O], ``w = q
* SCB / 127``. Source: bitsandbytes' `QuantState`, `dequantize_4bit` and `int8_vectorwise_dequant`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NoReturn

from quantkit.base.json_values import Settings, format_value, parse_object
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.source import make_damaged_file_error
from quantkit.files.tensor_file import (
    StoredTensor,
    TensorFile,
    View,
    check_sizes,
    contiguous_strides,
)
from quantkit.formats.codecs.codec import DAMAGED_FILE, make_unread_settings_error
from quantkit.formats.codecs.layouts import (
    ABSMAX,
    CODE_MAP,
    FORMAT,
    NESTED_ABSMAX,
    NESTED_MAP,
    SCB,
    STATES,
)
from quantkit.formats.codecs.small_floats import DequantizedTensor
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.tensor_slice import TensorSlice

# Bounds of a plausible state: the sizes in a damaged one must not decide how much memory is used.
_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 20
_LARGEST_OFFSET = 1e30
# Double quantization stores each factor in a byte.
_NESTED_CODES = 256
_VALUES = {
    "NF4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    # The second half repeats the first with the other sign.
    "FP4": (
        0.0,
        1 / 192,
        128 / 192,
        192 / 192,
        64 / 192,
        96 / 192,
        32 / 192,
        48 / 192,
        0.0,
        -1 / 192,
        -128 / 192,
        -192 / 192,
        -64 / 192,
        -96 / 192,
        -32 / 192,
        -48 / 192,
    ),
}
# How closely two programs spell the same value of a map.
_CLOSE = 1e-6
# 1 / 127, as bitsandbytes spells it.
_STEP = 7.874015718698502e-3


class FourBitWeight(DequantizedTensor):
    """A weight in NF4 or FP4."""

    def __init__(
        self,
        kind: str,
        weight: StoredTensor,
        stored: Mapping[str, StoredTensor],
        homes: Mapping[str, TensorFile],
        dtype: DType,
    ) -> None:
        """
        Args:
            kind: ``NF4`` or ``FP4``.
            stored: the tensors of the folder.

        Raises:
            CheckpointError: if its state is damaged, or tensors are missing or of other sizes than
                it says.
            UnsupportedError: for other types, or a transposed weight.
        """
        self.kind = self.stored_as = kind
        self._name = weight.name
        self._homes = homes
        self.source = homes[weight.name].source
        state = self._state(stored[weight.name + STATES[kind]])
        tensor = StoredTensor(weight.name, dtype, self._shape(state))
        self._block = self._read_even_size(state, "blocksize")
        self._nested_block = 0
        self._offset = 0.0
        blocks = -(-math.prod(tensor.shape) // self._block)
        absmax = stored.get(weight.name + ABSMAX)
        # For each tensor next to the codes: its types, and how many elements it must have.
        expected = {ABSMAX: (FLOATS, blocks), CODE_MAP: ((DType.FLOAT32,), len(_VALUES[kind]))}
        if absmax is not None and absmax.dtype == DType.UINT8:
            self._nested_block = self._read_even_size(state, "nested_blocksize")
            self._offset = self._read_nested_offset(state)
            expected[ABSMAX] = ((DType.UINT8,), blocks)
            expected[NESTED_ABSMAX] = ((DType.FLOAT32,), -(-blocks // self._nested_block))
            expected[NESTED_MAP] = ((DType.FLOAT32,), _NESTED_CODES)
        self._codes = self._bytes(weight, (math.prod(tensor.shape) + 1) // 2)
        factors: list[StoredTensor] = []
        for suffix, (dtypes, count) in expected.items():
            factors.append(self._require_tensor(stored, suffix, dtypes, count))
        super().__init__(tensor, (weight, *factors, stored[weight.name + STATES[kind]]), homes)
        map_bytes = homes[weight.name + CODE_MAP].read_bytes(weight.name + CODE_MAP)
        values = struct.unpack(f"<{len(_VALUES[kind])}f", map_bytes)
        # bitsandbytes ignores the map: with other values in it, the weight would depend on the
        # program that reads it.
        for value, expected_value in zip(values, _VALUES[kind], strict=True):
            if not abs(value - expected_value) <= _CLOSE:
                self._refuse(
                    "has a 'quant_map' that differs from that of its type",
                    format_value(list(values)),
                )

    def floats(self, part: TensorSlice | None) -> torch.Tensor:
        count, columns = self.tensor.shape
        if part is not None and part.axis == 0:
            rows = part
        else:
            rows = TensorSlice(0, ((0, count),))
        first_column = 0
        end_column = columns
        if part is not None and part.axis == 1:
            first_column, end_column = part.ranges[0]
        absmax = self._absmax()
        values = self._part(CODE_MAP)
        out = self.tensor.dtype.empty((rows.size, end_column - first_column))
        filled = 0
        for first, last in rows.ranges:
            # A few rows at a time in float32 bound the memory; each chunk is rounded once.
            for start, stop in qtensor.row_chunks(last - first, columns):
                chunk = self._rows(first + start, first + stop, values, absmax)
                out[filled : filled + len(chunk)] = chunk[:, first_column:end_column]
                filled += len(chunk)
        return out

    def _rows(
        self, start: int, stop: int, values: torch.Tensor, absmax: torch.Tensor
    ) -> torch.Tensor:
        """Dequantize rows to float32, cut out of their blocks."""
        # Blocks run on across the ends of rows, so the first and last block may have weights of
        # other rows.
        columns = self.tensor.shape[1]
        size = self._block
        first = start * columns // size
        last = -(-stop * columns // size)
        low = first * size // 2
        high = min(last * size // 2, self._codes.shape[0])
        codes = self._homes[self._name].read_view(self._codes, TensorSlice(0, ((low, high),)))
        halves = torch.stack((codes >> 4, codes & 0xF), dim=-1).flatten()
        # The last block of a weight may be shorter than the others.
        missing = (last - first) * size - len(halves)
        blocks = torch.nn.functional.pad(values[halves.int()], (0, missing))
        scaled = (blocks.view(-1, size) * absmax[first:last, None]).flatten()
        offset = start * columns - first * size
        return scaled[offset:][: (stop - start) * columns].view(-1, columns)

    def _absmax(self) -> torch.Tensor:
        absmax = self._part(ABSMAX)
        if not self._nested_block:
            return absmax.float()
        blocks = torch.div(torch.arange(len(absmax)), self._nested_block, rounding_mode="floor")
        factors = self._part(NESTED_MAP)[absmax.int()]
        return factors * self._part(NESTED_ABSMAX)[blocks] + self._offset

    def _part(self, suffix: str) -> torch.Tensor:
        return self._homes[self._name + suffix].read(self._name + suffix).flatten()

    def _state(self, tensor: StoredTensor) -> Settings:
        file = self._homes[tensor.name]
        if tensor.dtype != DType.UINT8 or len(tensor.shape) != 1 or tensor.nbytes > _STATE_BYTES:
            raise CheckpointError(
                f"tensor '{tensor.name}' is not JSON stored as bytes",
                path=file.path,
                found=f"{tensor.dtype} {list(tensor.shape)}",
                expected=f"uint8, at most {_STATE_BYTES}",
            )
        try:
            text = file.read_bytes(tensor.name).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"tensor '{tensor.name}' is not UTF-8: {error}", path=file.path
            ) from error
        state = Settings(parse_object(text, f"{file.path}: {tensor.name}"), file.path, tensor.name)
        kind = state.string("quant_type")
        if kind != self.kind.lower():
            self._refuse("has a different type than its name says", kind, self.kind.lower())
        return state

    def _shape(self, state: Settings) -> tuple[int, ...]:
        try:
            shape = check_sizes(state.need("shape"))
        except ValueError:
            state.wrong_type("shape", "a list of integers")
        if len(shape) != 2 or 0 in shape:
            self._refuse("is not a matrix", list(shape), "rows and columns")
        return shape

    def _read_even_size(self, state: Settings, key: str) -> int:
        size = state.integer(key, 2, _MAX_BLOCK)
        # Two codes share a byte, so only even blocks begin at a byte.
        if size % 2:
            self._refuse(f"has an odd {key}", size)
        return size

    def _read_nested_offset(self, state: Settings) -> float:
        if (dtype := state.string("nested_dtype")) != DType.FLOAT32:
            problem = f"tensor '{self._name}' has nested scales of an unsupported type"
            raise make_unread_settings_error(state, problem, format_value(dtype), "float32")
        return state.number("nested_offset", -_LARGEST_OFFSET, _LARGEST_OFFSET)

    def _bytes(self, weight: StoredTensor, expected: int) -> View:
        """Locate the codes as bytes, whatever type they are stored in."""
        # bitsandbytes can store the bytes under a float type (`bnb_4bit_quant_storage`).
        view = self._homes[weight.name].view(weight.name)
        if len(weight.shape) == 2 and weight.shape[1] != 1:
            problem = f"tensor '{weight.name}' is stored in an unsupported layout"
            raise UnsupportedError(
                problem, path=self.path, found=list(weight.shape), expected="one column"
            )
        if weight.nbytes != expected or view.stride != contiguous_strides(view.shape):
            self._refuse(
                "has the wrong size for its shape", f"{weight.nbytes} bytes", f"{expected}"
            )
        return View(DType.UINT8, view.start, (expected,), (1,))

    def _require_tensor(
        self, stored: Mapping[str, StoredTensor], suffix: str, dtypes: tuple[DType, ...], count: int
    ) -> StoredTensor:
        tensor = stored.get(self._name + suffix)
        if tensor is None or tensor.dtype not in dtypes or math.prod(tensor.shape) != count:
            if tensor is None:
                described = "none"
            else:
                described = f"{tensor.dtype} {list(tensor.shape)}"
            problem = f"has a '{suffix[1:]}' that does not match its state"
            self._refuse(problem, described, f"{' or '.join(dtypes)} [{count}]")
        return tensor

    def _refuse(self, problem: str, found: object, expected: object = None) -> NoReturn:
        raise make_damaged_file_error(
            f"tensor '{self._name}', in {self.kind}, {problem}", self.path, found, expected
        )


class EightBitWeight(DequantizedTensor):
    """A weight of LLM.int8()."""

    kind = stored_as = "LLM.int8()"

    def __init__(
        self,
        weight: StoredTensor,
        scale: StoredTensor,
        form: StoredTensor | None,
        homes: Mapping[str, TensorFile],
        dtype: DType,
    ) -> None:
        """
        Args:
            scale: the largest magnitude of each row.
            form: a number that states the layout.

        Raises:
            CheckpointError: if the scales do not fit the weight.
            UnsupportedError: if it is not stored row by row.
        """
        parts: tuple[StoredTensor, ...] = (weight, scale)
        if form is not None:
            parts = (weight, scale, form)
        super().__init__(StoredTensor(weight.name, dtype, weight.shape), parts, homes)
        if (
            len(weight.shape) != 2
            or 0 in weight.shape
            or scale.dtype not in FLOATS
            or scale.shape != weight.shape[:1]
        ):
            raise CheckpointError(
                f"the scales of '{weight.name}' do not match its shape",
                path=self.path,
                found=f"{scale.dtype} {list(scale.shape)}",
                expected=f"one a row of {list(weight.shape)}",
            )
        # Layouts other than 0 order the codes for one kind of GPU.
        if form is None:
            layout = b""
        elif form.nbytes <= 8:
            layout = homes[form.name].read_bytes(form.name)
        else:
            layout = b"?"
        if any(layout):
            raise UnsupportedError(
                f"tensor '{weight.name}' is stored in a layout for one kind of GPU",
                path=self.path,
                found=f"{FORMAT} {list(layout)}",
                expected="0, row by row",
                hint="save it with a current bitsandbytes",
            )

    def floats(self, part: TensorSlice | None) -> torch.Tensor:
        weight, scale = self.parts[:2]
        codes = self._read(weight, part)
        # There is a scale for each row: only a selection of rows applies to them.
        rows = part if part is not None and part.axis == 0 else None
        factors = self._read(scale, rows)
        out = self.tensor.dtype.empty(codes.shape)
        for start, stop in qtensor.row_chunks(*codes.shape):
            floats = codes[start:stop].float().mul_(factors[start:stop].float().unsqueeze(1))
            out[start:stop] = floats.mul_(_STEP)
        return out


def find_weight(
    name: str, stored: Mapping[str, StoredTensor], homes: Mapping[str, TensorFile], dtype: DType
) -> FourBitWeight | EightBitWeight | None:
    """Find the weight whose codes a tensor of a folder has; None for floats, and for scales and
    states.

    Raises:
        CheckpointError, UnsupportedError: as the weights' classes do; also for codes without
            scales.
    """
    tensor = stored[name]
    kinds = [kind for kind, suffix in STATES.items() if name + suffix in stored]
    if len(kinds) == 1:
        return FourBitWeight(kinds[0], tensor, stored, homes, dtype)
    module, _, leaf = name.rpartition(".")
    scale = stored.get(f"{module}.{SCB}")
    if leaf == "weight" and tensor.dtype == DType.INT8 and scale is not None:
        return EightBitWeight(tensor, scale, stored.get(f"{module}.{FORMAT}"), homes, dtype)
    if leaf == "weight" and tensor.dtype in (DType.INT8, DType.UINT8):
        raise CheckpointError(
            f"tensor '{name}' lacks its quantization state",
            path=homes[name].path,
            found=f"{tensor.dtype} {list(tensor.shape)}",
            expected=f"one of bitsandbytes' states, or {SCB}",
            hint=DAMAGED_FILE,
        )
    return None
