"""The table of everything that quantkit reads and writes: kinds of checkpoints, and methods of
quantization.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """Return the format of quantized weights; None if it contains floats only."""
        if self.method is not None:
            return self.method
        # A container with several methods is itself the target for floats.
        if self.container.methods:
            return None
        return self.container.native

    @property
    def floats(self) -> bool:
        """Return whether it is for models in floats."""
        return self.method is None


def targets() -> dict[str, Target]:
    """Build the table of all formats in which models are written, by name."""
    by_name: dict[str, Target] = {}
    # The methods come first where targets are listed.
    for name in (*METHODS, *CONTAINERS):
        known_target = find_target(name)
        if known_target is not None:
            by_name[name] = known_target
    return by_name


def find_target(name: str) -> Target | None:
    """Look up one of `targets` by its name; None if there is none."""
    if name in CONTAINERS:
        container = CONTAINERS[name]
        if container.read_only:
            return None
        return Target(name, container)
    # A method without schemes is only read.
    if name in METHODS and METHODS[name].schemes:
        return Target(name, HF, METHODS[name])
    return None


def target(name: str) -> Target:
    """Look up one of `targets` by its name; any other raises `RequestError`."""
    known_target = find_target(name)
    if known_target is not None:
        return known_target
    expected = ", ".join(targets())
    if name in {*CONTAINERS, *METHODS}:
        raise RequestError(f"{name} can be read, but not written", expected=expected)
    raise RequestError("unknown target format", found=format_value(name), expected=expected)


def read_names() -> set[str]:
    """List the side files that decide what a model is or generates."""
    config_files = {container.config_file for container in CONTAINERS.values()}
    return config_files | SIDE_FILES
