"""The table of everything that quantkit reads and writes: kinds of checkpoints, and methods of
quantization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod
from quantkit.formats.codecs.table import METHODS, NATIVE
from quantkit.formats.container import Container
from quantkit.formats.containers.gpt_fast import GptFast
from quantkit.formats.containers.hf import HuggingFace
from quantkit.formats.containers.meta import Meta
from quantkit.formats.folder import SIDE_FILES
from quantkit.formats.gguf.container import Gguf

TargetName = Literal[
    "compressed-tensors", "int-quantized", "gptq", "awq", "mlx", "meta", "hf", "gguf"
]
"""The names of `targets`, spelled out for editors and type checkers; a test compares them."""

HF = HuggingFace(METHODS, NATIVE)
META = Meta()
GGUF = Gguf()

CONTAINERS: dict[str, Container] = {
    container.name: container for container in (META, HF, GptFast(), GGUF)
}
"""By name."""


@dataclass(frozen=True)
class Target:
    """A format in which models are written.

    Attributes:
        name: what ``--to`` calls it.
        container: the kind of checkpoint.
        method: of its quantized weights; None if the container has only one, or for floats.
    """

    name: str
    container: Container
    method: QuantMethod | None = None

    @property
    def codes(self) -> CodeFormat | None:
        """Return the format of quantized weights; None if it holds floats only."""
        return self.method or (None if self.container.methods else self.container.native)

    @property
    def floats(self) -> bool:
        """Return whether it is for models in floats."""
        return self.method is None


def targets() -> dict[str, Target]:
    """Return all formats in which models are written, by name."""
    found: dict[str, Target] = {}
    for container in CONTAINERS.values():
        for method in container.methods.values():
            if method.schemes:
                found[method.name] = Target(method.name, container, method)
    return found | {
        name: Target(name, one) for name, one in CONTAINERS.items() if not one.read_only
    }


def target(name: str) -> Target:
    """Return one of `targets` by its name; any other raises `RequestError`."""
    known = targets()
    if name not in known and name in {*CONTAINERS, *METHODS}:
        raise RequestError(f"{name} is read, not written", expected=", ".join(known))
    if name not in known:
        raise RequestError(
            "unknown target format", found=format_value(name), expected=", ".join(known)
        )
    return known[name]


def read_names() -> set[str]:
    """Return the side files that decide what a model is or generates."""
    return {container.config_file for container in CONTAINERS.values()} | SIDE_FILES
