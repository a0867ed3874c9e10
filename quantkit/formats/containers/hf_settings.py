"""Where Hugging Face folders have the settings of a quantization: in config.json, a part of it,
or their own file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value, read_json
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.codecs.codec import QuantMethod, ReadCodec
from quantkit.formats.codecs.dequantized import MODEL_OPTIMIZER, method_in
from quantkit.formats.codecs.table import SETTINGS_FILES
from quantkit.formats.kv_cache import states_scheme

SETTINGS = "quantization_config"
"""The key of config.json with the settings of a quantization."""
_MLX_SETTINGS = "quantization"
_FLOAT8 = "FP8"
_FLOAT_MODEL = "start from the float model"
NOT_CARRIED = {SETTINGS, _MLX_SETTINGS, "dtype", "rope_scaling", "_name_or_path", "auto_map"}
"""Keys of config.json that are not copied into an output's."""


def read_codecs(
    raw: Mapping[str, Any],
    modules: Iterable[str],
    path: Path,
    methods: Mapping[str, QuantMethod],
    stored: Collection[str] = (),
) -> tuple[QuantMethod | None, Mapping[str, ReadCodec]]:
    """Return the method of quantization in a config.json, and the codec of each module; none for
    floats.

    Args:
        raw: see `settings_in`.
        path: of config.json, for errors.
        stored: the names of all tensors; empty if only the config is read.

    Raises:
        UnsupportedError: for a method that is not read, and for Model Optimizer's with weights
            other than FP8, or with neither weights nor a KV cache; see also
            `QuantMethod.read_settings`.
        CheckpointError: for settings of the wrong type.
    """
    if raw.get(SETTINGS) is None:
        return None, {}
    if not isinstance(raw[SETTINGS], dict):
        raise CheckpointError(
            f"{SETTINGS} is not an object", path=path, found=format_value(raw[SETTINGS])
        )
    settings = Settings(raw[SETTINGS], path, SETTINGS)
    name = method_in(settings)
    if name is not None and name in methods:
        name, settings = methods[name].resolve(settings)
    stated = settings.values.get("quant_algo")
    if (
        name == MODEL_OPTIMIZER
        and stated != _FLOAT8
        and (stated is not None or not states_scheme(settings))
    ):
        problem = "this algorithm of Model Optimizer is not read"
        found = format_value(stated)
        hint = _FLOAT_MODEL
        if "FP4" in str(stated):
            # The same codes are read in another layout, `weight_packed` with `weight_global_scale`.
            hint = (
                f"{_FLOAT_MODEL}, or from the same scheme in compressed-tensors'"
                " nvfp4-pack-quantized; vLLM and TensorRT-LLM run this folder as it is"
            )
        raise UnsupportedError(
            problem, path=settings.path, found=found, expected=_FLOAT8, hint=hint
        )
    if name is None or name not in methods:
        if settings.has("bits"):
            bits = format_value(settings.values["bits"])
        else:
            bits = ""
        if name:
            found = f"{name} {bits}".strip()
        else:
            found = "an unnamed scheme"
        problem = "the source is quantized already in a scheme quantkit does not read"
        expected = ", ".join(methods)
        raise UnsupportedError(
            problem, path=path, found=found, expected=expected, hint=_FLOAT_MODEL
        )
    if methods[name].read_as_floats:
        return None, {}
    codecs = methods[name].read_settings(settings, modules, stored)
    # A format of this method with its own name.
    form = methods.get(str(settings.values.get("format")))
    named = form is not None and all(codec.scheme in form.schemes for codec in codecs.values())
    return form if form is not None and named else methods[name], codecs


def settings_in(raw: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a config.json with the settings of a quantization, which may come from a part of it,
    MLX's key, or another file in the folder; a `CheckpointError` if that is damaged.
    """
    if isinstance(named := raw.get(_MLX_SETTINGS), dict):
        return {**raw, SETTINGS: {"quant_method": "mlx", **named}}
    nested = (part.get(SETTINGS) for part in raw.values() if isinstance(part, dict))
    found = next((one for one in (raw.get(SETTINGS), *nested) if one is not None), None)
    for name, method in SETTINGS_FILES.items() if found is None else ():
        if folder is not None and (path := folder / name).is_file():
            settings = read_json(path)
            # Model Optimizer has them in a part of the file.
            inner = settings.get(_MLX_SETTINGS)
            return {
                **raw,
                SETTINGS: {
                    "quant_method": method,
                    **(inner if isinstance(inner, dict) else settings),
                },
            }
    return {**raw, SETTINGS: found}


def without_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of the same model in floats."""
    result: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in (SETTINGS, _MLX_SETTINGS):
            result[key] = without_settings(value) if isinstance(value, dict) else value
    return result
