"""Which models other programs load from folders of the methods of quantization, among those for
which there is no decoder here, by their ``model_type``: see `known_models.toml`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

Program = Literal["gptqmodel", "mlx-lm"]


def knows_model(program: Program, model_type: object) -> bool:
    """Return whether a program loads quantized models of a type."""
    return model_type in list_models(program)


@cache
def list_models(program: Program) -> tuple[str, ...]:
    """List the types of the models that a program loads."""
    text = files(__package__).joinpath("known_models.toml").read_text("utf-8")
    types: list[str] = tomllib.loads(text)[program]["types"]
    return tuple(types)
