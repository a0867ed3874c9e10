"""Whether transformers finds all tensors of a packed result, without reading their values."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from quantkit.json_values import shown
from quantkit.via_transformers.linears import quiet


def loading_problem(folder: Path) -> str | None:
    """Why transformers does not load a folder with packed weights as it is, in words; None if it does, or if
    the packages that it loads them with are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("compressed_tensors", "accelerate")):
        return None
    transformers: Any = importlib.import_module("transformers")
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # compressed-tensors shows its progress
            _, info = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), device_map="meta", local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # of the code of any model
        return f"{type(error).__name__}: {shown(' '.join(str(error).split()))}"
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{kind}_keys"])):
            return f"{len(names)} tensors are {kind}, such as {names[0]}"
    return None
