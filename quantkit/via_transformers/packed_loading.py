"""Check that transformers finds all tensors of a packed result, without reading their values."""

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
    """Explain why transformers does not load a folder with packed weights as it is; None if it
    does, or if the packages that it needs for that are not installed.

    Args:
        code: a folder with the same code, which is trusted and was run before. The folder's own
            code is not imported: while it is under construction, its name would stay in
            transformers' cache of modules.
    """
    for package in ("compressed_tensors", "accelerate"):
        if importlib.util.find_spec(package) is None:
            return None
    options: dict[str, Any] = {
        # No values are read.
        "device_map": "meta",
        "local_files_only": True,
        "output_loading_info": True,
    }
    try:
        raw = read_json(folder / "config.json")
        # compressed-tensors shows its progress on stderr.
        with (
            quiet(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            if code is None:
                cls, _ = model_class(raw)
                _, info = cls.from_pretrained(str(folder), **options)
            else:
                cls, config_class = load_code_classes(raw, code)
                config = config_class.from_pretrained(str(folder))
                _, info = cls.from_pretrained(str(folder), config=config, **options)
    # The code of a model can raise anything.
    except Exception as error:
        return f"{type(error).__name__}: {format_value(' '.join(str(error).split()))}"
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        # Layers that predict further tokens, which its classes do not have, are left out.
        if kind == "unexpected":
            names = [name for name in names if not is_extra_layer(name, raw)]
        if names:
            return f"{len(names)} tensors are {kind}, such as {names[0]}"
    return None
