"""The families that quantkit supports, and config.json: reading, writing, ignored settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.rope import FULL, SLIDING
from quantkit.base.json_values import Settings, format_value
from quantkit.base.late import LateTable
from quantkit.base.messages import Message, Option
from quantkit.errors import UnsupportedError

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
_THETA = "rope_theta"
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
_NEW = "rope_parameters"
_OLD = "rope_scaling"


FAMILIES: LateTable[Family] = LateTable(
    {
        "bamba": f"{__name__}.bamba:BAMBA",
        "gemma": f"{__name__}.gemma:GEMMA",
        "gemma2": f"{__name__}.gemma:GEMMA2",
        "gemma3_text": f"{__name__}.gemma:GEMMA3",
        "gemma4_text": f"{__name__}.gemma4:GEMMA4",
        "llama": f"{__name__}.llama:LLAMA",
        "llama4_text": f"{__name__}.llama4:LLAMA4",
        "mistral": f"{__name__}.llama:MISTRAL",
        "ministral3": f"{__name__}.llama:MINISTRAL3",
        "mixtral": f"{__name__}.llama:MIXTRAL",
        "granite": f"{__name__}.llama:GRANITE",
        "granitemoehybrid": f"{__name__}.granite_hybrid:GRANITE_HYBRID",
        "nemotron_h": f"{__name__}.nemotron_hybrid:NEMOTRON_H",
        "smollm3": f"{__name__}.llama:SMOLLM3",
        "phi3": f"{__name__}.llama:PHI3",
        "glm": f"{__name__}.llama:GLM",
        "glm4": f"{__name__}.llama:GLM4",
        "olmo2": f"{__name__}.llama:OLMO2",
        "olmo3": f"{__name__}.llama:OLMO3",
        "olmoe": f"{__name__}.llama:OLMOE",
        "lfm2": f"{__name__}.lfm2:LFM2",
        "lfm2_moe": f"{__name__}.lfm2:LFM2_MOE",
        "gpt_oss": f"{__name__}.mixtures:GPT_OSS",
        "deepseek_v3": f"{__name__}.mixtures:DEEPSEEK_V3",
        "cohere2": f"{__name__}.cohere:COHERE2",
        "exaone4": f"{__name__}.exaone:EXAONE4",
        "hunyuan_v1_dense": f"{__name__}.hunyuan:HUNYUAN_DENSE",
        "qwen2": f"{__name__}.qwen:QWEN2",
        "qwen2_moe": f"{__name__}.qwen:QWEN2_MOE",
        "qwen3": f"{__name__}.qwen:QWEN3",
        "qwen3_moe": f"{__name__}.qwen:QWEN3_MOE",
        "qwen3_next": f"{__name__}.qwen_hybrid:QWEN3_NEXT",
        "qwen3_5_text": f"{__name__}.qwen_hybrid:QWEN3_5",
        "qwen3_5_moe_text": f"{__name__}.qwen_hybrid:QWEN3_5_MOE",
    }
)
"""By ``model_type``. To add a family, add a row here."""


def may_be_known_family(raw: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face ``config.json`` names a family that the decoder runs, or none
    at all.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        return True
    family = FAMILIES.get(kind)
    return family is not None and family.runs


def config_from_hf(raw: Mapping[str, Any], path: object) -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        CheckpointError: if a key is missing, or its value of the wrong type or out of range.
        UnsupportedError: for an architecture, activation or setting that is not supported.
    """
    settings = Settings(raw, path)
    # `dim` is Meta's name for the hidden size.
    hint = "this looks like Meta's params.json" if "dim" in raw else None
    kind = settings.string("model_type", hint=hint)
    family = FAMILIES.get(kind)
    if family is None or not family.runs:
        supported = sorted(name for name, candidate in FAMILIES.items() if candidate.runs)
        raise UnsupportedError(
            "architecture is not supported",
            path=settings.path,
            found=kind,
            expected=", ".join(supported),
            hint=Message(
                "quantize, verify and eval run it through transformers after",
                " `pip install 'quantkit[transformers]'`, and so does generate with ",
                Option("backend", value="transformers", job=""),
                "; with ",
                Option("tensors_only", value=True, job=""),
                ", quantize and convert process its tensors without running it",
            ),
        )
    return family.read(settings)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write the keys of a Hugging Face ``config.json`` that say all of `config`."""
    family = FAMILIES[config.architecture]
    ends = config.eos_token_ids
    # The usual forms: null for none, a number for one, a list for several.
    end_value: int | list[int] | None = list(ends)
    if not ends:
        end_value = None
    elif len(ends) == 1:
        end_value = ends[0]
    return {
        "architectures": [family.class_name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ACTIVATIONS.get(config.activation, "silu"),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": end_value,
        **({} if family.writes_rope else config.rope.to_hf(config.head_dim)),
        **family.write(config),
    }


def list_ignored_rope_settings(raw: Mapping[str, Any]) -> list[str]:
    """Describe each rotary setting of a config.json that transformers 5 ignores in favour of
    another value.

    Readers differ in their order of precedence: what one ignores another uses. Values of the wrong
    type are ignored here; the reader of `raw` refuses them.
    """
    new = _object(raw, _NEW)
    old = _object(raw, _OLD)
    family = FAMILIES.get(str(raw.get("model_type")))
    by_layer = family is not None and "windowed_theta" in family.options
    if by_layer or not {FULL, SLIDING}.isdisjoint(new):
        return list(_list_ignored_by_layer(raw, new, old))
    # transformers 5 reads `rope_scaling` first if a file has both.
    if old:
        used = old
        name = _OLD
    else:
        used = new
        name = _NEW
    lines = list(_compare_type_spellings(used, name))
    for key in (_THETA, _PARTIAL):
        lines += _report_difference(raw.get(key), key, used.get(key), f"{name}.{key}")
    lines += _report_difference(
        used.get(_ORIGINAL), f"{name}.{_ORIGINAL}", raw.get(_ORIGINAL), _ORIGINAL
    )
    if old and new:
        # The older spelling keeps some settings outside of `rope_scaling`.
        used_settings = {
            _THETA: raw.get(_THETA),
            _PARTIAL: raw.get(_PARTIAL),
            "rope_type": old.get("type"),
            **old,
        }
        lines += _find_overridden_settings(new, _NEW, used_settings)
    return lines


def _list_ignored_by_layer(
    raw: Mapping[str, Any], new: Mapping[str, Any], old: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each ignored setting of a model with settings by kind of layer."""
    full = _object(new, FULL)
    sliding = _object(new, SLIDING)
    full_name = f"{_NEW}.{FULL}"
    # `rope_scaling` overrides the settings of full attention, but only key by key.
    overlapping = {key: value for key, value in full.items() if key in old}
    yield from _find_overridden_settings(overlapping, full_name, old)
    for settings, name, base in (
        ({**full, **old}, full_name, _THETA),
        (sliding, f"{_NEW}.{SLIDING}", "rope_local_base_freq"),
    ):
        yield from _compare_type_spellings(settings, name)
        yield from _report_difference(raw.get(base), base, settings.get(_THETA), f"{name}.{_THETA}")
        if settings.get("rope_type", settings.get("type")) in _WITH_ORIGINAL:
            original = settings.get(_ORIGINAL)
            original_name = f"{name}.{_ORIGINAL}"
            # transformers does not look for the original context outside of these settings.
            if original is None:
                original = raw.get("max_position_embeddings")
                original_name = "max_position_embeddings"
            yield from _report_difference(raw.get(_ORIGINAL), _ORIGINAL, original, original_name)


def _compare_type_spellings(settings: Mapping[str, Any], name: str) -> Iterator[str]:
    yield from _report_difference(
        settings.get("type"), f"{name}.type", settings.get("rope_type"), f"{name}.rope_type"
    )


def _find_overridden_settings(
    settings: Mapping[str, Any], name: str, by: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings that ``rope_scaling`` states differently, or not at all."""
    for key, value in settings.items():
        # `type` is compared with `rope_type` by `_compare_type_spellings`.
        if value is None or by.get(key) == value or key == "type":
            continue
        if by.get(key) is not None:
            reason = f"states {format_value(by[key])}"
        else:
            reason = "is used and does not contain it"
        yield f"{name}.{key} {format_value(value)} is ignored: {_OLD} {reason}"


def _report_difference(ignored: Any, ignored_key: str, used: Any, used_key: str) -> Iterator[str]:
    if ignored is not None and used is not None and ignored != used:
        yield (
            f"{ignored_key} {format_value(ignored)} is ignored: {used_key} is {format_value(used)}"
        )


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if isinstance(value, dict):
        return value
    return {}
