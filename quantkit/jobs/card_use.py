"""What a model card says of use: what loads the folder, and how."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import unread_experts
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.codecs.compressed_tensors import read_here_alone
from quantkit.jobs.markdown import wrapped
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.jobs.target import NATIVE
from quantkit.tensors.scheme import QuantScheme
from quantkit.version import __version__


def use_section(config: ModelConfig, method: QuantMethod, scheme_map: SchemeMap, folder: str) -> list[str]:
    """How to load it, in what can."""
    schemes = scheme_map.schemes
    if not config.runnable:
        return _use_of_tensors(schemes, folder)
    if method.name == NATIVE:
        return _use_of_native(config, schemes, folder, embedding=scheme_map.embedding is not None)
    readers = f"quantkit {__version__} loads it; so should {method.readers(scheme_map.assigned)}."
    if read_here_alone(method, scheme_map.assigned, tied=config.tied_embeddings):
        readers = f"quantkit {__version__} loads it; no other reader was found that does."
    python = ["```python", "import quantkit", "", f'model, tokenizer = quantkit.load("{folder}")', "```"]
    return ["## Use", "", *wrapped(readers), "", *python]


def _use_of_native(
    config: ModelConfig, schemes: Mapping[str, QuantScheme], folder: str, *, embedding: bool
) -> list[str]:  # fmt: skip
    """How to load it, in what can; as tried."""
    unread = "packed zero points" if any(not one.symmetric for one in schemes.values()) else None
    unread = "a packed embedding" if embedding else unread or unread_experts(config, schemes)
    no_int8, dense = all(one.bits == 4 for one in schemes.values()), config.experts is None
    transformers = "yes" if unread is None else f"no: it does not load {unread}"
    vllm = "yes" if dense else "not tried with experts"
    vllm = (
        vllm
        if no_int8
        else f"no: it has no CPU kernel for {'packed embeddings' if embedding else '8-bit weights alone'}"
    )
    lines = [
        "## Use", "", "| | tried |", "|---|---|",
        f"| quantkit {__version__} | yes |",
        f"| transformers 5.23 with compressed-tensors 0.20 | {transformers} |",
        f"| vLLM 0.32 on a CPU with AVX-512 | {vllm} |", "",
        "```python", "import quantkit", "", f'model, tokenizer = quantkit.load("{folder}")', "```",
    ]  # fmt: skip
    if unread is None:
        lines += [
            "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            f'model = AutoModelForCausalLM.from_pretrained("{folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")', "```",
        ]  # fmt: skip
    if no_int8 and dense:
        lines += ["", "```", f"vllm serve {folder}", "```"]
        if unread is None:
            lines += [
                "", "Scales may be negative: leave vLLM's option of 8-bit activations under Marlin off"
                " (vllm-project/vllm#48905).",
            ]  # fmt: skip
    return lines


def _use_of_tensors(schemes: Mapping[str, QuantScheme], folder: str) -> list[str]:
    """How to load what was not run."""
    readers, loading = "such as transformers or vLLM", " Loading was not tried; transformers may need"
    loading += " `quantization_config=CompressedTensorsConfig(dequantize=True)`."
    if not all(scheme.symmetric for scheme in schemes.values()):
        readers, loading = "with packed zero points", " Loading was not tried."
    told = (
        "The model was taken by its tensors only: quantkit does not run it. Load it in what runs its source and reads"
        f" compressed-tensors, {readers}, and try it before it is used: no logits were compared.{loading}"
    )
    return ["## Use", "", *wrapped(told), "", "```", f"quantkit inspect {folder}", "```"]
