"""Schemes by their names, those included that a checkpoint may hold and that nobody is offered."""

from __future__ import annotations

from quantkit.tensors.scheme import GGUF_SCHEMES, QuantScheme


def any_scheme(name: str) -> QuantScheme:
    """What `str` spells as `name`: ``int8-g64-asym``."""
    if name in GGUF_SCHEMES:
        return GGUF_SCHEMES[name]
    kind, *rest = name.split("-")
    groups = [int(part[1:]) for part in rest if part.startswith("g")]
    return QuantScheme(
        int(kind.removeprefix("int")), groups[0] if groups else None, "asym" not in rest
    )
