"""The size that a model is quantized to, and the schemes that are chosen from; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.base.arguments import as_integer, as_number
from quantkit.base.memory import size_text
from quantkit.base.messages import Message, Option, join_messages
from quantkit.errors import RequestError
from quantkit.tensors.scheme import QuantScheme

CANDIDATES = tuple(
    map(
        QuantScheme.parse,
        (
            "q2_k",
            "q3_k",
            "iq4_xs",
            "int4-g128",
            "int4-g64",
            "int4-g32",
            "q4_k",
            "q5_0",
            "q5_k",
            "q6_k",
            "int8",
        ),
    )
)
"""The scheme of each unit is chosen among those of them that the format supports, and floats."""


@dataclass(frozen=True)
class SizeTarget:
    """The requested size: mean bits for each weight of the linears, where codes, scales and zero
    points count, or bytes of all files of weights together.
    """

    bits: float | None = None
    bytes: int | None = None

    def to_json(self) -> dict[str, float | int]:
        if self.bits is not None:
            return {"target_bits": self.bits}
        return {"max_size": self.bytes or 0}

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.bits:g} bits a weight"
        return size_text(self.bytes or 0)


def size_target(
    target_bits: float | None, max_size: int | None, scheme: object
) -> SizeTarget | None:
    """Check the requested size; None if a scheme is given instead. More than one of the three, or
    a size that is not a number above 0, is a `RequestError`.
    """
    options = (("scheme", scheme), ("target_bits", target_bits), ("max_size", max_size))
    set_options: list[str] = []
    for name, value in options:
        if value is not None:
            set_options.append(Message(Option(name)))
    if len(set_options) > 1:
        raise RequestError(
            Message(join_messages(" and ", set_options), " are mutually exclusive"),
            hint="a size chooses the schemes",
        )
    if target_bits is not None:
        bits = as_number("target_bits", target_bits)
        if not 0 < bits < math.inf:
            raise RequestError(
                Message(Option("target_bits"), " is not a valid number of bits"),
                found=bits,
                expected="such as 4.5",
            )
        return SizeTarget(bits=bits)
    if max_size is not None:
        size = as_integer("max_size", max_size)
        if size <= 0:
            raise RequestError(Message(Option("max_size"), " must be positive"), found=size)
        return SizeTarget(bytes=size)
    return None
