"""All rules, theme by theme."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.doctor.findings import Rule


def rules() -> Mapping[str, tuple[Rule, ...]]:
    """Every rule there is, by what it is about."""
    from quantkit.doctor import against, files, gguf, quantization, readers, text, values, weights, zero_points

    return {
        "Files": files.RULES,
        "Tensors against config.json": weights.RULES,
        "Quantized weights": (*quantization.RULES, *zero_points.RULES),
        "Text": text.RULES,
        "GGUF": gguf.RULES,
        "One runtime, with --for": readers.RULES,
        "Numbers, with --deep": values.RULES,
        "Against its source, with --against": against.RULES,
    }
