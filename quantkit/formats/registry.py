"""The one table of what quantkit reads and writes: kinds of checkpoints, and methods of quantization in them."""

from __future__ import annotations

from quantkit.errors import RequestError
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.container import Container
from quantkit.formats.containers.gguf import Gguf
from quantkit.formats.containers.hf import HuggingFace
from quantkit.formats.containers.meta import Meta
from quantkit.formats.folder import READ_BESIDE
from quantkit.json_values import shown

_NATIVE = CompressedTensors()

METHODS: dict[str, QuantMethod] = {method.name: method for method in (_NATIVE,)}
"""By ``quant_method`` in config.json."""

HF = HuggingFace(METHODS, _NATIVE)
META = Meta()
GGUF = Gguf()

CONTAINERS: dict[str, Container] = {container.name: container for container in (META, HF, GGUF)}
"""By name."""


def target(name: str) -> tuple[Container, QuantMethod | None]:
    """What a conversion may be made to: a container, or a method of quantization in the container that carries it.

    Raises:
        RequestError: for another name.
    """
    if name in CONTAINERS:
        return CONTAINERS[name], None
    for container in CONTAINERS.values():
        if name in container.methods:
            return container, container.methods[name]
    raise RequestError("unknown target format", found=shown(name), expected=" or ".join(sorted(CONTAINERS)))


def read_names() -> set[str]:
    """Files beside the weights that decide what a model is or says."""
    return {container.config_file for container in CONTAINERS.values()} | READ_BESIDE
