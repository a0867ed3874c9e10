"""Selects a backend: the first of those allowed that supports a case and passes a self-test.

Kernels are compiled where they run, by compilers that no test has used. So a backend first
multiplies a small weight: a miscompiled kernel must be found before it changes a model's output.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit import kernels
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.kernels.backend import EXACT_COLUMNS, EXACT_MAX, REFERENCE, Backend, OfferedKernels
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme, Scales

BACKENDS: tuple[Backend, ...] = tuple(map(resolve_name, kernels.BACKENDS.values()))
"""In the order of `kernels.BACKENDS`."""

_log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()
# What a term adds to the rounding of a sum in float32, at most.
_SUMS = torch.finfo(torch.float32).eps
# Columns that some tokens are confined to where rows have no groups.
_SPAN = 64


def require_backend(name: str | None) -> None:
    """Raise `RequestError` if no backend has the name; None stands for any backend."""
    names = [backend.name for backend in BACKENDS]
    if name is not None and name not in names:
        raise RequestError("unknown backend", found=name, expected=", ".join(names))


def list_allowed_backends(
    name: str | None = None, *, allow_slow: bool = False
) -> tuple[Backend, ...]:
    """List the backends that may run a model, in order of preference: the named one, or all with
    kernels if `name` is None; with `allow_slow` also the reference, for layers that these do not
    support. Raises `RequestError` for an unknown name.
    """
    require_backend(name)
    allowed = []
    for backend in BACKENDS:
        if backend.name == name:
            allowed.append(backend)
        elif backend is REFERENCE:
            # It is so slow that a user has to allow or to name it.
            if allow_slow:
                allowed.append(backend)
        elif name is None:
            allowed.append(backend)
    return tuple(allowed)


def select_backend(
    scheme: QuantScheme,
    device: torch.device,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    allowed: Sequence[Backend],
) -> Backend:
    """Choose the first of the allowed backends that supports activations of `dtype` on `device` and
    weights of `scheme` with scales of `scale_dtype`, and passes the self-test. If it is the
    reference, for lack of kernels, log a warning.

    Raises:
        RequestError: if none supports the case, with every backend's reason.
    """
    # Each reason with the names of the backends that give it.
    reasons: dict[str, list[str]] = {}
    for backend in allowed:
        reason = backend.explain_unsupported(scheme, device, dtype)
        if reason is None and backend is not REFERENCE:
            reason = self_test(backend, scheme, device, dtype, scale_dtype)
        if reason is None:
            if backend is REFERENCE and reasons:
                _warn_once(
                    "quantized layers",
                    _join_reasons(reasons),
                    f"{scheme} runs without kernels ({_describe_slowdown(device)})",
                )
            return backend
        reasons.setdefault(reason, []).append(backend.name)
    if REFERENCE in allowed:
        hint = None
    else:
        hint = Message(
            Option("allow_slow", value=True),
            f" runs it without kernels ({_describe_slowdown(device)})",
        )
    raise RequestError(
        f"no kernels for {scheme} on {device} in {DType.of(dtype)}; {_join_reasons(reasons)}",
        hint=hint,
    )


def _describe_slowdown(device: torch.device) -> str:
    """Describe how the reference compares with kernels; docs/kernels.md has the measurements, which
    are of CPUs.
    """
    if device.type == "cpu":
        return "new tokens 20 to 200 times slower, prompts 5 times slower"
    return "much slower"


def _join_reasons(reasons: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for reason, names in reasons.items():
        parts.append(f"{', '.join(names)}: {reason}")
    return "; ".join(parts)


def offer_kernels_for_floats(
    device: torch.device, dtype: torch.dtype, allowed: Sequence[Backend] = BACKENDS
) -> OfferedKernels | None:
    """Return the kernels of the first allowed backend that has some for a model without quantized
    layers. Without any on a CPU, log a warning and return None.
    """
    reasons: dict[str, list[str]] = {}
    for backend in allowed:
        if backend is REFERENCE:
            continue
        # Float models have no scheme; all backends with kernels support int8 with one scale a row.
        reason = backend.explain_unsupported(QuantScheme(8, None), device, dtype)
        if reason is None:
            return backend.offer_kernels()
        reasons.setdefault(reason, []).append(backend.name)
    joined_reasons = _join_reasons(reasons)
    # Quantized layers are much slower without kernels, and say why.
    is_known = ("quantized layers", joined_reasons) in _warned
    if reasons and device.type == "cpu" and not is_known:
        _warn_once(
            "float layers",
            joined_reasons,
            "float layers run without kernels (new tokens 3 times slower)",
        )
    return None


def _warn_once(layers: str, reasons: str, problem: str) -> None:
    """Warn once for layers of a kind and the same reasons, not for every layer and scheme."""
    if (layers, reasons) not in _warned:
        _warned.add((layers, reasons))
        _log.warning("%s; %s", problem, reasons)


class _Size(NamedTuple):
    """The size of an example: rows and (about) columns of the weight; numbers of tokens, each of
    which may have a separate kernel; a limit on the number of activations for very large groups;
    whether the columns are odd: an odd number of groups, or without groups a multiple of nothing
    that kernels count in.
    """

    rows: int
    columns: int
    tokens: tuple[int, ...]
    max_values: int
    has_odd_columns: bool = True


# 23 is 16 + 4 + 2 + 1, and 600 is 37 * 16 + 8: each leaves a remainder after the largest tiles.
SMALL = _Size(37, 128, (1, 4, 23, 600), 1 << 18)
# Large enough that loops repeat, rows are split, and there are many tiles; and columns as most
# models have them.
ON_GPUS = (
    _Size(293, 4096, (1, 2, 4, 16, 23, 128, 600), 1 << 22),
    _Size(293, 4096, (2, 16, 128), 1 << 22, has_odd_columns=False),
)


@functools.cache
def self_test(
    backend: Backend,
    scheme: QuantScheme,
    device: torch.device,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
) -> str | None:
    """Test a backend's products of activations of `dtype` with weights whose scales are of
    `scale_dtype`. Return what is wrong with them; None if each is within the backend's `Rounding`.
    """
    sizes: tuple[_Size, ...] = (SMALL,)
    if device.type == "cuda":
        sizes = ON_GPUS
    for size in sizes:
        try:
            wrong_tokens = _find_wrong_token_count(
                backend, scheme, device, dtype, scale_dtype, size
            )
        except Exception as error:
            # Drivers and compilers have their own exception types.
            message = " ".join(str(error).split()) or type(error).__name__
            # A compiler's message may be long.
            return f"it fails on this machine: {message}"[:300]
        if wrong_tokens is not None:
            return f"its results for {wrong_tokens} tokens are wrong on this machine"
    return None


def _find_wrong_token_count(
    backend: Backend,
    scheme: QuantScheme,
    device: torch.device,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    size: _Size,
) -> int | None:
    """Multiply an example in each number of tokens; return the first whose products are wrong."""
    weight = _example(scheme, size, scale_dtype).to(device)
    bias = _wave(size.rows).to(device, dtype)
    wide = weight.dequantize().double()
    rounding = backend.rounding(dtype)
    prepared = backend.prepare(weight)
    for count in size.tokens:
        tokens = min(count, size.max_values // wide.shape[1])
        for is_exact, x in _activations(wide, scheme, tokens):
            x = x.to(dtype)
            exact = x.double()
            expected = exact @ wide.t()
            relative_error = rounding.weights
            if is_exact:
                # Backends take these activations exactly: no error of theirs hides a wrong weight.
                product = backend.linear(x, prepared, scheme, size.rows, None)
            else:
                product = backend.linear(x, prepared, scheme, size.rows, bias)
                expected += bias.double()
                relative_error += rounding.activations
            relative_error += _SUMS * wide.shape[1]
            slack = relative_error * _norms(exact) @ _norms(wide).t()
            if not is_within(product, expected, slack, rounding.result):
                return tokens
    return None


def is_within(result: Tensor, right: Tensor, slack: Tensor, steps: float = 0.5) -> bool:
    """Check that each number is right, up to its slack and `steps` steps of its dtype; false if
    one is not finite.
    """
    limits = torch.finfo(result.dtype)
    # A step of the smallest numbers.
    smallest = limits.smallest_normal * limits.eps
    rounding = steps * limits.eps * (right.abs() + slack) + smallest
    if result.shape != right.shape:
        return False
    errors = (result.double() - right).abs()
    # A comparison with NaN is false.
    return bool((errors <= slack + rounding).all())


def _example(scheme: QuantScheme, size: _Size, scale_dtype: torch.dtype) -> QuantTensor:
    """Build a weight with every code in it, all zero points, and scales of either sign and of many
    sizes; in an odd number of groups, or in columns that fill no word of kernels.
    """
    rows = size.rows
    if scheme.group_size is None:
        columns = size.columns
        if size.has_odd_columns:
            columns += 72
    else:
        units = max(1, size.columns // scheme.unit)
        if size.has_odd_columns:
            units = max(3, units | 1)
        columns = scheme.unit * units
    groups = scheme.groups(columns)
    # The factors of codes and zero points are odd: they take all values, for any power of two.
    codes = ((torch.arange(rows * columns) * 37 + 11) % scheme.levels).to(torch.uint8)
    codes = codes.view(rows, columns)
    wave = _wave(rows * groups).view(rows, groups)
    scale = torch.where(wave < 0, -1, 1) * 2 ** (-4 - 8 * wave.abs())
    if scheme.scales in (Scales.BLOCKS, Scales.SUPER_BLOCKS):
        # About half of a group's range, so that values have either sign.
        minimum = None if scheme.symmetric else scale.roll(1, 0) * (scheme.levels // 2)
        return QuantTensor.of_blocks(codes, _nest(scale, minimum, scheme, scale_dtype), scheme)
    if scheme.scales is Scales.POWERS:
        scale = scale.abs().log2().round().exp2()
    zero = None
    if not scheme.symmetric:
        points = (torch.arange(rows * groups) * 5 + 3) % scheme.levels
        zero = points.to(torch.uint8).view(rows, groups)
    return QuantTensor(codes, scale.to(scale_dtype), zero, scheme)


def _nest(
    scale: Tensor, minimum: Tensor | None, scheme: QuantScheme, scale_dtype: torch.dtype
) -> BlockScales:
    """Store scales and minima [O, G] as blocks of GGUF do; integers of K-quants take many values of
    either sign, if they may.
    """
    if scheme.scales is Scales.BLOCKS:
        stored_minimum = None if minimum is None else minimum.to(scale_dtype)
        return BlockScales(scale.to(scale_dtype), stored_minimum, None, None)
    step = scheme.unit // (scheme.group_size or 1)
    numbers = torch.arange(scale.numel()).view_as(scale)
    outer = scale[:, ::step].half()
    if minimum is None:
        return BlockScales(((numbers * 37) % 64 - 32).half(), None, outer, None)
    outer_minimum = minimum[:, ::step].half()
    # Scales and minima of Q2_K have 4 bits, those of Q4_K and Q5_K 6.
    levels = 16 if scheme.bits == 2 else 64
    inner = ((numbers * 37) % levels).half()
    return BlockScales(inner, ((numbers * 29 + 7) % levels).half(), outer, outer_minimum)


def _activations(wide: Tensor, scheme: QuantScheme, tokens: int) -> Iterator[tuple[bool, Tensor]]:
    """Yield exact activations [T, I], see `Rounding`, and then others, for weights [O, I].

    The first leans towards all rows and each of the others towards one, every second of them in one
    group only: so products are as large as they can be, and each row's and each group's mistakes
    are visible among permitted rounding errors.
    """
    rows, columns = wide.shape
    index = torch.arange(tokens, device=wide.device)
    towards = wide / _norms(wide)
    towards = torch.where(index.unsqueeze(1) > 0, towards[index % rows], towards.sum(0))
    span = torch.arange(columns, device=wide.device) // (scheme.group_size or _SPAN)
    chosen = (index // 2 % (span[-1] + 1)).unsqueeze(1)
    towards = towards.masked_fill((index % 2 == 1).unsqueeze(1) & (span != chosen), 0)
    blocks = F.pad(towards, (0, -columns % EXACT_COLUMNS)).view(tokens, -1, EXACT_COLUMNS)
    largest = blocks.abs().amax(-1, keepdim=True)
    integers = (blocks / torch.where(largest > 0, largest, 1) * EXACT_MAX).round()
    powers = (index.unsqueeze(1) + torch.arange(blocks.shape[1], device=wide.device)) % 4
    exact = (integers * 0.5 ** (7 + powers).unsqueeze(-1)).flatten(1)[:, :columns]
    yield True, exact
    yield False, exact * (1 + _wave(exact.numel()).to(wide.device).view_as(exact) / 8)


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return norms


def _wave(count: int) -> Tensor:
    """Compute numbers that look random, without a generator, whose state belongs to callers."""
    return torch.sin(torch.arange(count, dtype=torch.float64).square()).float()
