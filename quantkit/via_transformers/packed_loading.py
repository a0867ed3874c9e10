"""Whether transformers finds all tensors of a packed result, without reading their values."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from quantkit.architectures.families.opaque import is_extra_layer
from quantkit.base.json_values import format_value, read_json
from quantkit.via_transformers.linears import model_class, quiet
from quantkit.via_transformers.own_code import load_code_classes


def loading_problem(folder: Path, code: Path | None = None) -> str | None:
    """Why transformers does not load a folder with packed weights as it is, in words; None if it
    does, or if the packages that it loads them with are not installed.

    Args:
        code: a folder with the same code, which is trusted and was run before. The folder's own is
            not imported, as its name, while it is under construction, would stay in transformers'
            cache of modules.
    """
    if any(importlib.util.find_spec(name) is None for name in ("compressed_tensors", "accelerate")):
        return None
    given: dict[str, Any] = {
        "device_map": "meta",
        "local_files_only": True,
        "output_loading_info": True,
    }
    try:
        raw = read_json(folder / "config.json")
        # Compressed-tensors shows its progress.
        with (
            quiet(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            if code is None:
                cls, _ = model_class(raw)
                _, info = cls.from_pretrained(str(folder), **given)
            else:
                cls, known = load_code_classes(raw, code)
                _, info = cls.from_pretrained(
                    str(folder), config=known.from_pretrained(str(folder)), **given
                )
    except Exception as error:  # of the code of any model
        return f"{type(error).__name__}: {format_value(' '.join(str(error).split()))}"
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        # Layers that predict further tokens, which its classes do not have, are left out.
        if kind == "unexpected":
            names = [name for name in names if not is_extra_layer(name, raw)]
        if names:
            return f"{len(names)} tensors are {kind}, such as {names[0]}"
    return None
