"""Check that transformers finds all tensors of a packed result, without reading their values."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch

from quantkit.architectures.families.opaque import is_extra_layer
from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.json_values import read_json
from quantkit.errors import QuantkitError
from quantkit.formats.codecs.awq import Awq
from quantkit.formats.codecs.gptq import Gptq
from quantkit.formats.codecs.mlx import Mlx
from quantkit.formats.containers.hf_files import read_headers
from quantkit.formats.containers.hf_settings import SETTINGS, find_settings
from quantkit.via_transformers.linears import model_class, quiet
from quantkit.via_transformers.own_code import load_code_classes
from quantkit.via_transformers.packed_linears import find_packed_linear_problem


def loading_problem(folder: Path, code: Path | None = None) -> str | None:
    """Explain why transformers does not load a folder with packed weights as it is; None if it
    does, if the packages that it needs for that are not installed, or if it has no reader of the
    format. Of GPTQ and AWQ, for which it needs gptqmodel, only the linears that it takes for
    quantized are compared with those of the folder.

    Args:
        code: a folder with the same code, which is trusted and was run before. The folder's own
            code is not imported: while it is under construction, its name would stay in
            transformers' cache of modules.
    """
    settings = _read_settings(folder)
    method = settings.get("quant_method")
    if method in (Gptq.name, Awq.name):
        return _find_linear_problem(folder, settings, code)
    if method == Mlx.name:
        return None
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
        offload: Any = importlib.import_module("compressed_tensors.offload.utils")
        # compressed-tensors shows its progress on stderr, and shares its work among all processes
        # of a group, of which only this one is here.
        with (
            quiet(),
            contextlib.redirect_stderr(io.StringIO()),
            offload.as_single_threaded(),
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
        return describe_foreign_error(error)
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        # Layers that predict further tokens, which its classes do not have, are left out.
        if kind == "unexpected":
            names = [name for name in names if not is_extra_layer(name, raw)]
        if names:
            return f"{len(names)} tensors are {kind}, such as {names[0]}"
    return None


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a folder's quantization; empty if there are none, or its config.json
    cannot be read.
    """
    try:
        settings = find_settings(read_json(folder / "config.json"), None)[SETTINGS]
    except QuantkitError:
        return {}
    if isinstance(settings, dict):
        return settings
    return {}


def _find_linear_problem(folder: Path, settings: dict[str, Any], code: Path | None) -> str | None:
    """Explain which linear of a GPTQ or AWQ folder transformers does not load; None if it loads
    all.
    """
    names = read_headers(folder, "safetensors", derived=True).tensors
    try:
        raw = read_json(folder / "config.json")
        with quiet():
            cls, config = model_class(raw, code)
            with torch.device("meta"):
                model = cls(config)
            return find_packed_linear_problem(model, names, settings)
    # The code of a model can raise anything.
    except Exception as error:
        return describe_foreign_error(error)
