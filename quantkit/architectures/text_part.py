"""The text part of models that also read images or sound, where a family computes it on text alone:
its settings in config.json, and the names of its tensors.

Sources: transformers' configs of these models, with their defaults, and the published files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantkit.architectures.config import Limits
from quantkit.architectures.disk import DiskTensor
from quantkit.architectures.names import EMBEDDING
from quantkit.base.json_values import Settings
from quantkit.errors import CheckpointError, UnsupportedError

# The default of `tie_word_embeddings` differs between transformers' classes of these models.
_Tied = Literal["by default", "if stated", "if either states it"]
_MODEL, _EMBEDDING = EMBEDDING.split(".")
_NORM = "norm"
_HEAD = "lm_head"
_PART = "text_config"
_KIND = "model_type"
_TIED = "tie_word_embeddings"
_ROTARY = ("rope_parameters", "rope_scaling")
_IDS = ("bos_token_id", "eos_token_id")
_OF_FILES = ("dtype", "torch_dtype", "quantization_config")
# One part of a head's angles each for time, row, column.
_SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
# The type in the first configs with sections; positions of text are the same in all three.
_WITH_SECTIONS = "mrope"

_WHOLES: dict[str, tuple[str, _Tied]] = {
    "deepseek_vl": ("llama", "by default"),
    "deepseek_vl_hybrid": ("llama", "by default"),
    "gemma3": ("gemma3_text", "by default"),
    "gemma4": ("gemma4_text", "by default"),
    "glm46v": ("glm4v_text", "if stated"),
    "glm4v": ("glm4v_text", "if either states it"),
    "glmga": ("glm4v_text", "if stated"),
    "got_ocr2": ("qwen2", "by default"),
    "idefics2": ("mistral", "if stated"),
    "idefics3": ("llama", "if stated"),
    "internvl": ("qwen2", "by default"),
    "janus": ("llama", "by default"),
    "lighton_ocr": ("qwen3", "by default"),
    "llama4": ("llama4_text", "if stated"),
    "llava": ("llama", "if either states it"),
    "llava_next": ("llama", "if stated"),
    "llava_next_video": ("llama", "if either states it"),
    "llava_onevision": ("qwen2", "if either states it"),
    "mistral3": ("mistral", "by default"),
    "ovis2": ("qwen2", "by default"),
    "pp_chart2table": ("qwen2", "by default"),
    "qwen2_5_omni_thinker": ("qwen2_5_omni_text", "if stated"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "if either states it"),
    "qwen2_vl": ("qwen2_vl_text", "if either states it"),
    "qwen3_5": ("qwen3_5_text", "if stated"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "if stated"),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text", "if stated"),
    "qwen3_vl": ("qwen3_vl_text", "if stated"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "if stated"),
    "smolvlm": ("llama", "if stated"),
    "video_llama_3": ("qwen2", "if either states it"),
    "video_llava": ("llama", "if stated"),
    "vipllava": ("llama", "if stated"),
}
"""The models by ``model_type``: the default of their text part's, and when the head is the
embedding.
"""

# Older files of these models have the settings of text among those of the whole model.
_FLAT = (
    "qwen2_5_vl",
    "qwen2_vl",
)


@dataclass(frozen=True)
class _Text:
    """The text part of a kind.

    Attributes:
        family: which computes it.
        sizes: transformers' defaults of what the family requires.
        other_defaults: its defaults of other settings, where they differ from the family's.
        fixed: what its code does whatever the config states.
        fills: whether the heads have the width of the hidden states, whatever the config states.
    """

    family: str
    sizes: tuple[float | None, ...]
    other_defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fills: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        # Most kinds have no default of the last size, `head_dim`.
        values: dict[str, Any] = {}
        for key, value in zip(_SIZES, self.sizes, strict=False):
            if value is not None:
                values[key] = value
        return values | dict(self.other_defaults)


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "head_dim",
)
_THETA = "rope_theta"
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_NORMALIZED = {"norm_topk_prob": True}
_GLM = {"attention_bias": True}
_QWEN2_VL = _Text(
    "qwen2",
    (8192, 29568, 80, 64, 8, 152064, 32768, 1e-5),
    {_THETA: 1e6, "bos_token_id": 151643, "eos_token_id": 151645},
    fills=True,
)
_TEXTS: dict[str, _Text] = {
    "gemma3_text": _Text(
        "gemma3_text",
        (2304, 9216, 26, 8, 4, 262208, 131072, 1e-6),
        {"bos_token_id": 2, "eos_token_id": 1},
        {"final_logit_softcapping": None},
    ),
    "gemma4_text": _Text(
        "gemma4_text",
        (2304, 9216, 30, 8, 4, 262144, 131072, 1e-6, 256),
        {"bos_token_id": 2, "eos_token_id": 1},
    ),
    "glm4v_text": _Text(
        "glm4",
        (4096, 13696, 40, 32, 2, 151552, 32768, 1e-5),
        {"partial_rotary_factor": 1.0},
        _GLM,
        fills=True,
    ),
    "llama": _Text("llama", (4096, 11008, 32, 32, None, 32000, 2048, 1e-6), _ENDS),
    "llama4_text": _Text("llama4_text", (5120, 8192, 48, 40, 8, 202048, 131072, 1e-5, 128), _ENDS),
    "ministral3": _Text("ministral3", (4096, 14336, 34, 32, 8, 131072, 262144, 1e-5), _ENDS),
    "mistral": _Text("mistral", (4096, 14336, 32, 32, 8, 32000, 131072, 1e-6), _ENDS),
    "qwen2": _Text("qwen2", (4096, 22016, 32, 32, 32, 151936, 32768, 1e-6)),
    "qwen2_5_omni_text": _Text(
        "qwen2", (3584, 18944, 28, 28, 4, 152064, 32768, 1e-6), {_THETA: 1e6}
    ),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _Text("qwen3", (4096, 22016, 32, 32, 32, 151936, 32768, 1e-6, 128)),
    "qwen3_5_moe_text": _Text(
        "qwen3_5_moe_text",
        (2048, None, 40, 16, 2, 248320, 32768, 1e-6, 256),
        {
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3_5_text": _Text("qwen3_5_text", (4096, 12288, 32, 16, 4, 248320, 32768, 1e-6, 256)),
    "qwen3_omni_moe_text": _Text(
        "qwen3_moe",
        (2048, 18944, 28, 28, 4, 3584, 32768, 1e-6),
        {_THETA: 1e6, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
        _NORMALIZED,
    ),
    "qwen3_vl_moe_text": _Text(
        "qwen3_moe",
        (2048, 5632, 24, 16, 16, 151936, 128000, 1e-6),
        {_THETA: 500000.0, "moe_intermediate_size": 1408, "num_experts_per_tok": 4},
        _NORMALIZED,
    ),
    "qwen3_vl_text": _Text(
        "qwen3", (4096, 22016, 32, 32, 32, 151936, 128000, 1e-6, 128), {_THETA: 500000.0}
    ),
}
"""The text parts by ``model_type``."""


def text_family(raw: Mapping[str, Any]) -> str | None:
    """Find the family that computes the text part of a config.json's model with other parts; None
    if there is none.
    """
    has_text_settings = isinstance(raw.get(_PART), dict) or raw.get(_KIND) in _FLAT
    if not has_text_settings or _find_rule(raw) is None:
        return None
    text = _TEXTS.get(_kind(raw))
    if text is None:
        return None
    return text.family


def text_settings(raw: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Build the config.json of the text part of a model that has a `text_family`: with
    transformers' defaults, and without rotary settings that do not concern text.

    Raises:
        UnsupportedError: if its attention is not causal.
        CheckpointError: if a size that others follow from is invalid.
    """
    part_values = _find_text_settings(raw)
    text = _TEXTS[_kind(raw)]
    # Attention of the kind ``vision`` is causal on text.
    if part_values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedError("bidirectional attention is not supported", path=str(path))
    merged = {key: raw[key] for key in (*_IDS, *_OF_FILES) if key in raw}
    for key, value in part_values.items():
        # A null of the text part does not hide the value of the whole model.
        if value is not None or key not in merged:
            merged[key] = value
    for key in _OF_FILES:
        # The tensors of a file are described by the settings of the whole model.
        if raw.get(key) is not None:
            merged[key] = raw[key]
    for key in _ROTARY:
        if isinstance(part_values.get(key), dict):
            merged[key] = _for_text(part_values[key])
    missing = {}
    for key, value in text.defaults.items():
        if key not in part_values and key not in merged:
            missing[key] = value
    for key in _ROTARY:
        # A default outside of the rotary settings would contradict the base inside.
        if isinstance(merged.get(key), dict) and _THETA in merged[key]:
            missing.pop(_THETA, None)
    merged |= {**missing, **text.fixed, _KIND: text.family}
    if text.fills:
        settings = Settings(merged, path)
        heads = settings.integer("num_attention_heads", 1, Limits.heads)
        merged["head_dim"] = settings.integer("hidden_size", 1, Limits.width) // heads
    return merged


def media_tokens(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Collect the tokens of a config.json that stand for images, video or sound in a text."""
    tokens: dict[int, None] = {}
    for kind in ("image", "video", "audio"):
        # Both spellings are in published files.
        for ending in ("id", "index"):
            token = raw.get(f"{kind}_token_{ending}")
            # A boolean is an `int` for `isinstance`.
            if type(token) is int:
                tokens[token] = None
    return tuple(tokens)


@dataclass(frozen=True)
class TextNames:
    """The names of a text part's tensors.

    Attributes:
        model: what those of its decoder begin with on disk.
        head: the same of its head; None if none is stored.
    """

    model: str
    head: str | None

    @classmethod
    def of(cls, names: Iterable[str], path: object) -> TextNames:
        """Find the decoder and the head among tensor names. Raises `CheckpointError` unless there
        is one decoder with an embedding, and at most one head.
        """
        modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
        models = []
        heads = []
        for module in modules:
            last_part = module.rpartition(".")[2]
            # Towers may have embeddings too; a decoder also has a norm next to it.
            if last_part == _EMBEDDING:
                stem = module.removesuffix(_EMBEDDING)
                if f"{stem}{_NORM}" in modules:
                    models.append(stem)
            elif last_part == _HEAD:
                heads.append(module.removesuffix(_HEAD))
        for part, stems, count in (
            ("text decoder", models, len(models)),
            ("output head", heads, len(heads) or 1),
        ):
            if count != 1:
                raise CheckpointError(
                    f"does not have exactly one {part}",
                    path=str(path),
                    found=", ".join(map(repr, stems)) or "none",
                    expected=(
                        f"one module '{_EMBEDDING}' next to a '{_NORM}', and at most one '{_HEAD}'"
                    ),
                )
        return cls(models[0], heads[0] if heads else None)

    def plain(self, name: str) -> str | None:
        """Translate a tensor's name on disk to its name in a folder of the text part alone; None
        for a tensor of another part.
        """
        if self.head is not None and name.startswith(f"{self.head}{_HEAD}."):
            return name.removeprefix(self.head)
        if name.startswith(self.model):
            return f"{_MODEL}.{name.removeprefix(self.model)}"
        return None

    def on_disk(self, tensor: DiskTensor) -> DiskTensor:
        """Rename a tensor of a folder of the text part alone to its name on disk."""
        name = tensor.name
        if name.startswith(f"{_HEAD}."):
            return replace(tensor, name=(self.head or "") + name)
        return replace(tensor, name=self.model + name.removeprefix(f"{_MODEL}."))


def is_tied(raw: Mapping[str, Any], names: TextNames) -> bool:
    """Return whether the head of a text part is its embedding: by config.json, as transformers
    reads it, if none is stored.
    """
    whole = _find_rule(raw)
    assert whole is not None
    rule = whole[1]
    if names.head is not None:
        return False
    if raw.get(_TIED) is True:
        return True
    if rule == "by default":
        return raw.get(_TIED) is None
    return rule == "if either states it" and _find_text_settings(raw).get(_TIED) is True


def _find_rule(raw: Mapping[str, Any]) -> tuple[str, _Tied] | None:
    kind = raw.get(_KIND)
    if isinstance(kind, str):
        return _WHOLES.get(kind)
    return None


def _find_text_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    part_values = raw.get(_PART)
    if isinstance(part_values, dict):
        return part_values
    # The type of a flat file is that of the whole model.
    return {key: value for key, value in raw.items() if key != _KIND}


def _kind(raw: Mapping[str, Any]) -> str:
    """Return the ``model_type`` of the text part, or the default of the whole model's type."""
    kind = _find_text_settings(raw).get(_KIND)
    if kind:
        return str(kind)
    whole = _find_rule(raw)
    return whole[0] if whole else ""


def _for_text(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the rotary settings that distinguish rows and columns of images."""
    text_rotary: dict[str, Any] = {}
    for key, value in rotary.items():
        if key in _SECTIONS:
            continue
        if key in ("type", "rope_type") and value == _WITH_SECTIONS:
            text_rotary[key] = "default"
        else:
            text_rotary[key] = value
    return text_rotary
