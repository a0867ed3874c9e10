"""Where Hugging Face folders have the settings of a quantization: in config.json, a part of it,
or their own file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.base.json_values import Settings, format_value, read_json
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import QuantMethod, ReadCodec
from quantkit.formats.codecs.float_methods import MODEL_OPTIMIZER, read_method
from quantkit.formats.codecs.layout import Layout
from quantkit.formats.codecs.table import LAYOUTS_BY_METHOD, SETTINGS_FILES
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
    """Read the method of quantization in a config.json, and the codec of each module; none for
    floats.

    Args:
        raw: see `find_settings`.
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
    name = read_method(settings)
    if name is not None and name in methods:
        name, settings = methods[name].resolve(settings)
    algorithm = settings.values.get("quant_algo")
    if name == MODEL_OPTIMIZER and algorithm != _FLOAT8:
        # Without an algorithm, only the KV cache is quantized.
        has_only_kv_cache = algorithm is None and states_scheme(settings)
        if not has_only_kv_cache:
            raise _make_algorithm_error(algorithm, settings.path)
    if name is None or name not in methods:
        bits = ""
        if settings.has("bits"):
            bits = format_value(settings.values["bits"])
        if name:
            scheme_name = f"{name} {bits}".strip()
        else:
            scheme_name = "an unnamed scheme"
        problem = "the source is quantized already in a scheme quantkit does not read"
        expected = ", ".join(methods)
        raise UnsupportedError(
            problem, path=path, found=scheme_name, expected=expected, hint=_FLOAT_MODEL
        )
    method = methods[name]
    # These weights were replaced by their floats when the headers were read.
    if method.read_as_floats:
        return None, {}
    codecs = method.read_settings(settings, modules, stored)
    # A format of this method may be a method with its own name.
    format_method = methods.get(str(settings.values.get("format")))
    if format_method is not None and all(
        codec.scheme in format_method.schemes for codec in codecs.values()
    ):
        method = format_method
    return method, codecs


def read_weight_layout(
    settings: Settings,
    methods: Mapping[str, QuantMethod],
    stored: Mapping[str, StoredTensor],
    files: Mapping[str, TensorFile],
) -> tuple[dict[str, tuple[int, ...]], tuple[Layout, ...]]:
    """Read the shapes of the weights of quantized modules, see `QuantMethod.read_weight_shapes`;
    none for a method that is not read, or whose weights are read as floats.

    Returns:
        The shapes by module, and the layouts that these modules may have.
    """
    name = read_method(settings)
    if name is None or name not in methods:
        return {}, ()
    name, settings = methods[name].resolve(settings)
    method = methods[name]
    return method.read_weight_shapes(settings, stored, files), LAYOUTS_BY_METHOD.get(name, ())


def _make_algorithm_error(algorithm: object, path: str) -> UnsupportedError:
    """Build the error for an algorithm of Model Optimizer that is not read."""
    hint = _FLOAT_MODEL
    if "FP4" in str(algorithm):
        # The same codes are read in another layout, `weight_packed` with `weight_global_scale`.
        hint = (
            f"{_FLOAT_MODEL}, or from the same scheme in compressed-tensors'"
            " nvfp4-pack-quantized; vLLM and TensorRT-LLM run this folder unchanged"
        )
    return UnsupportedError(
        "this algorithm of Model Optimizer is not supported",
        path=path,
        found=format_value(algorithm),
        expected=_FLOAT8,
        hint=hint,
    )


def find_settings(raw: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Find the settings of a quantization, which may be in a part of a config.json, under MLX's
    key, or in another file of the folder, and put them under the usual key.

    Raises:
        CheckpointError: if another file with the settings is damaged.
    """
    # First, because mlx-lm writes its settings under both keys, without a `quant_method`.
    mlx_settings = raw.get(_MLX_SETTINGS)
    if isinstance(mlx_settings, dict):
        return {**raw, SETTINGS: {"quant_method": "mlx", **mlx_settings}}
    settings = raw.get(SETTINGS)
    if settings is not None:
        return {**raw, SETTINGS: settings}
    # Models of text and images may have them in the config of their text part.
    for part in raw.values():
        if isinstance(part, dict) and part.get(SETTINGS) is not None:
            return {**raw, SETTINGS: part[SETTINGS]}
    if folder is None:
        return {**raw, SETTINGS: None}
    for file_name, method in SETTINGS_FILES.items():
        path = folder / file_name
        if path.is_file():
            file_settings = read_json(path)
            # Model Optimizer has them in a part of the file, under the same key as MLX.
            inner_settings = file_settings.get(_MLX_SETTINGS)
            if isinstance(inner_settings, dict):
                file_settings = inner_settings
            return {**raw, SETTINGS: {"quant_method": method, **file_settings}}
    return {**raw, SETTINGS: None}


def without_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a config.json without the settings of a quantization, also in its parts."""
    float_config: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in (SETTINGS, _MLX_SETTINGS):
            float_config[key] = without_settings(value) if isinstance(value, dict) else value
    return float_config
