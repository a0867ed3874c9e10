"""The options of `convert`: the command, the Python call, the plan and the manifest read them
here.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.base.arguments import as_integer
from quantkit.base.option_fields import (
    ADAPTERS,
    ADAPTERS_HELP,
    OTHER,
    IfExists,
    option,
    require_valid,
)
from quantkit.formats.detect import WeightKind
from quantkit.formats.lora.requested import Requested, spell_adapters
from quantkit.formats.target_names import TargetName
from quantkit.tensors.dtypes import SHORT_NAMES, DType, FloatName, float_name

if TYPE_CHECKING:
    import torch

_SHORT = {dtype: name for name, dtype in SHORT_NAMES.items()}
_TARGET = "Target"
_QUANTIZED = "Quantized models"
_CHECKS = "Checks"


@dataclass(frozen=True)
class ConvertOptions:
    """What `convert` is to do; None and False where nothing was requested.

    Attributes:
        src: a model in any format that quantkit reads.
        dst: the folder to create, or a file ``*.gguf``; it must not exist.
        to: ``compressed-tensors``, ``int-quantized``, ``gptq``, ``awq``, ``mlx`` or ``gguf`` for
            quantized models; ``hf``, ``meta`` or ``gguf`` for floats. By default floats become
            ``hf``. A quantized model keeps its format if quantkit writes it, and else becomes
            ``compressed-tensors``.
        mp: number of Meta model-parallel shards.
        dtype: ``bf16``, ``fp16``, ``fp32``, or torch's; None keeps each tensor's own. A quantized
            model takes it with GGUF, for its float tensors, or with `dequantize`.
        dequantize: write the floats that the codes of a quantized model mean, each rounded once to
            the model's type.
        requantize: change what `to` cannot hold exactly, as little as needed: cast scales to a type
            that it holds and keep codes and zero points, or else round the weight anew. The result
            is compared with the source, and refused if it differs too much.
        split_max_size: bytes of the largest file of weights; by default 2 GiB, and one file for
            GGUF.
        template: a chat template for an instruct model without one: ``llama2`` or ``llama3``, as in
            Meta's code, or a file ``*.jinja``; None keeps the templates of `src`.
        weights: picks one of several sets of weights in `src`: ``meta``, ``safetensors``, ``bin``,
            ``gpt-fast``, ``gpt-fast-int8`` or ``gguf``.
        resume: continue an interrupted run, if there is one.
        if_exists: ``fail``, or ``skip`` to accept a `dst` that this call would write again, after a
            comparison of all hashes of source and output.
        lora: LoRA adapters to merge into `src`, in PEFT's format: the folder of one, a list of
            several, or a mapping from folders to weights. ``FOLDER=0.5`` also states a weight,
            which is 1 otherwise.
        allow_nonfinite: write NaN and Inf, and values that overflow `dtype`, as they are.
        source_check: first check that the source predicts a sample text, if it has a tokenizer.
        tensors_only: copy the tensors as they are, whatever the architecture.
    """

    src: str | Path
    dst: str | Path
    _: KW_ONLY
    to: TargetName | None = option(_TARGET)
    dtype: FloatName | torch.dtype | None = option(_TARGET)
    mp: int = option(_TARGET, default=1)
    split_max_size: int | None = option(_TARGET)
    template: str | None = option(_TARGET)
    dequantize: bool = option(_QUANTIZED, "Dequantize a quantized model.", bool, default=False)
    requantize: bool = option(
        _QUANTIZED,
        "Cast scales or requantize tensors that the target format cannot store exactly.",
        bool,
        default=False,
    )
    lora: Requested = option(
        ADAPTERS, ADAPTERS_HELP, "adapters", default=(), metavar="FOLDER[=WEIGHT]"
    )
    source_check: bool = option(_CHECKS, default=True)
    allow_nonfinite: bool = option(_CHECKS, default=False)
    resume: bool = option("Output", default=False)
    if_exists: IfExists = option("Output", default="fail")
    weights: WeightKind | None = option(OTHER)
    tensors_only: bool = option(OTHER, default=False)

    def __post_init__(self) -> None:
        """Raise a `RequestError` for a value of the wrong type, or an unknown float type."""
        require_valid(self)
        float_name(self.dtype)
        # The dataclass is frozen, and the manifest records the normalized values.
        object.__setattr__(self, "lora", spell_adapters(self.lora))
        object.__setattr__(self, "mp", as_integer("mp", self.mp))

    @property
    def float_type(self) -> DType | None:
        """Return the float type of the output; None keeps each tensor's own."""
        return float_name(self.dtype)

    def to_record(
        self, target: str, *, float_type: DType | None, tensors_only: bool
    ) -> dict[str, object]:
        """Collect what the manifest and the resume fingerprint record: all options that determine
        the bytes of the weights.

        Args:
            target: the name of the target format.
            float_type: the float type, if it changes that of any tensor.
            tensors_only: whether the source is known by its tensors only.
        """
        options: dict[str, object] = {
            "to": target,
            "mp": self.mp,
            "dtype": float_type and _SHORT[float_type],
            "allow_nonfinite": self.allow_nonfinite,
        }
        optional = {
            "dequantize": self.dequantize,
            "requantize": self.requantize,
            "split_max_size": self.split_max_size,
            # Without its folder, so that the manifest is the same on every machine.
            "template": self.template and Path(self.template).name,
            "tensors_only": tensors_only,
        }
        for name, value in optional.items():
            if value:
                options[name] = value
        return options
