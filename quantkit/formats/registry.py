"""The one table of what quantkit reads and writes: kinds of checkpoints, and methods of quantization in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import RequestError
from quantkit.formats.codecs.codec import CodeFormat, QuantMethod
from quantkit.formats.codecs.table import METHODS, NATIVE
from quantkit.formats.container import Container
from quantkit.formats.containers.gguf import Gguf
from quantkit.formats.containers.gpt_fast import GptFast
from quantkit.formats.containers.hf import HuggingFace
from quantkit.formats.containers.meta import Meta
from quantkit.formats.folder import READ_BESIDE
from quantkit.json_values import shown

TargetName = Literal["compressed-tensors", "int-quantized", "gptq", "awq", "mlx", "meta", "hf", "gguf"]
"""The names of `targets`, spelled out for editors and type checkers; a test compares them."""

HF = HuggingFace(METHODS, NATIVE)
META = Meta()
GGUF = Gguf()

CONTAINERS: dict[str, Container] = {container.name: container for container in (META, HF, GptFast(), GGUF)}
"""By name."""


@dataclass(frozen=True)
class Target:
    """What models are written as.

    Attributes:
        name: what ``--to`` calls it.
        container: the kind of checkpoint.
        method: of the quantized weights in it; None where none has to be named.
    """

    name: str
    container: Container
    method: QuantMethod | None = None

    @property
    def codes(self) -> CodeFormat | None:
        """What quantized weights are written in; None where all are floats."""
        return self.method or (None if self.container.methods else self.container.native)

    @property
    def floats(self) -> bool:
        """Whether a model of floats is written so."""
        return self.method is None


def targets() -> dict[str, Target]:
    """All that models are written as, by name."""
    found: dict[str, Target] = {}
    for container in CONTAINERS.values():
        for method in container.methods.values():
            if method.schemes:
                found[method.name] = Target(method.name, container, method)
    return found | {name: Target(name, one) for name, one in CONTAINERS.items() if not one.read_only}


def target(name: str) -> Target:
    """
    Raises:
        RequestError: for another name than of `targets`.
    """
    known = targets()
    if name not in known and name in {*CONTAINERS, *METHODS}:
        raise RequestError(f"{name} is read, not written", expected=", ".join(known))
    if name not in known:
        raise RequestError("unknown target format", found=shown(name), expected=", ".join(known))
    return known[name]


def read_names() -> set[str]:
    """Files beside the weights that decide what a model is or says."""
    return {container.config_file for container in CONTAINERS.values()} | READ_BESIDE
