"""Names, sizes and speeds of TPU slices, for which programs can be compiled without a TPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from quantkit.errors import RequestError

GIB = 1 << 30
# Topologies by the number of chips: v5e and v6e are two-dimensional, v4 and v5p three-dimensional.
_PLANE = {
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
_SPACE = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
}
_COMPILER_ONLY = {
    # Do not ask a metadata server about this machine.
    "TPU_SKIP_MDS_QUERY": "1",
    # Do not lock a TPU that this machine may have.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # libtpu expects a description of its host, whichever slice it compiles for.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
# The compiler's error for a program that needs more memory than a chip has.
_REFUSED = "RESOURCE_EXHAUSTED: "


@dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Attributes:
        memory: bytes that the compiler allocates at most.
        flops: the peak per second, for products of bfloat16.
        bandwidth: of its memory, bytes per second.
        links: bytes per second that all links together send to other chips of the slice.
        cores: per chip, as the names of slices count them.
        shapes: topologies of slices, by their number of chips.

    Except for `memory`, the values are from Google's documentation of Cloud TPU.
    """

    memory: int
    flops: float
    bandwidth: float
    links: float
    cores: int
    shapes: dict[int, str]


CHIPS = {
    "v4": Chip(
        memory=int(30.75 * GIB), flops=275e12, bandwidth=1228e9, links=300e9, cores=2, shapes=_SPACE
    ),
    "v5e": Chip(
        memory=int(15.75 * GIB), flops=197e12, bandwidth=819e9, links=200e9, cores=1, shapes=_PLANE
    ),
    "v5p": Chip(
        memory=int(94.75 * GIB), flops=459e12, bandwidth=2765e9, links=600e9, cores=2, shapes=_SPACE
    ),
    "v6e": Chip(
        memory=int(31.25 * GIB), flops=918e12, bandwidth=1640e9, links=400e9, cores=1, shapes=_PLANE
    ),
}


@dataclass(frozen=True)
class Slice:
    """One or several slices of the same kind.

    Attributes:
        name: such as ``v5e-64``, or ``2xv5e-64`` for two of them.
        chips: of one slice.
    """

    name: str
    kind: str
    chips: int
    count: int = 1

    @classmethod
    def parse(cls, name: str) -> Slice:
        """Parse the name of a slice; raises `RequestError` for an unknown one."""
        match = re.fullmatch(r"(?:([1-9]\d?)x)?(v\w+)-(\d+)", name)
        if match is not None and match[2] in CHIPS:
            chip = CHIPS[match[2]]
            chips, remainder = divmod(int(match[3]), chip.cores)
            if not remainder and chips in chip.shapes:
                return cls(name, match[2], chips, int(match[1] or 1))
        known_slices: list[str] = []
        for kind, chip in CHIPS.items():
            sizes = ", ".join(str(chips * chip.cores) for chips in chip.shapes)
            known_slices.append(f"{kind}-{sizes}")
        raise RequestError("unknown TPU slice", found=name, expected="; ".join(known_slices))

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    def devices(self) -> list[Any]:
        """List the compiler's devices for the chips, slice after slice.

        Raises:
            RequestError: if libtpu cannot be started.
        """
        return list(self.topology().devices)

    def topology(self) -> Any:
        """Load the compiler's description of the slice. Raises as `devices` does."""
        os.environ.update(_COMPILER_ONLY)
        # JAX itself runs on the CPU; only the compiler is libtpu's.
        jax.config.update("jax_platforms", "cpu")
        options: dict[str, Any] = {}
        if self.chip.cores > 1:
            # Both cores of a chip are one device.
            options["chip_config_name"] = "megacore"
        if self.count > 1:
            options["num_slices"] = self.count
        name = f"{self.kind}:{self.chip.shapes[self.chips]}"
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        except jax.errors.JaxRuntimeError as error:
            raise RequestError(f"libtpu cannot be started: {error}") from error


def make_memory_error(target: str, found: str, memory: str | None) -> RequestError:
    """Make the error for a model that does not fit the memory of a slice."""
    return RequestError(
        f"the model does not fit {target}",
        found=found,
        expected=None if memory is None else f"at most {memory}",
        hint="use more chips, fewer bits, a smaller batch or a shorter context",
    )


def compile_for_target(target: str, lowered: Any, description: str) -> Any:
    """Compile a lowered program.

    Raises:
        RequestError: if it needs more memory than a chip has.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # The first line has the sizes; the following lines list all allocations.
        reason = str(error).partition(_REFUSED)[2].partition("\n")[0]
        if not reason:
            raise
        raise make_memory_error(target, f"for {description}: {reason}", None) from error


def gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / GIB:.2f} GiB"
