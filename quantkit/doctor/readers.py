"""Rules about what each runtime loads: kinds of folders, methods of quantization, and their schemes."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.doctor.claims import Claim
from quantkit.doctor.findings import Finding, Rule, Runtime
from quantkit.doctor.folder import Folder
from quantkit.doctor.modules import Coded
from quantkit.doctor.view import View

_TITLES = {"vllm": "vLLM", "transformers": "transformers", "llama.cpp": "llama.cpp", "mlx": "mlx-lm"}
_CONTAINERS: dict[Runtime, tuple[str, ...]] = {
    "vllm": ("safetensors", "bin", "mistral"), "transformers": ("safetensors", "bin", "gguf"), "llama.cpp": ("gguf",),
    "mlx": ("safetensors",),
}  # fmt: skip
_METHODS: dict[Runtime, frozenset[str]] = {
    "vllm": frozenset(
        {
            "compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "torchao", "modelopt", "quark",
            "auto-round", "fp_quant",
        }
    ),
    "transformers": frozenset(
        {
            "compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "torchao", "bitsandbytes",
            "aqlm", "quanto", "quark", "fp_quant", "eetq", "higgs", "hqq", "bitnet", "vptq", "spqr", "nvfp4",
            "auto-round",
        }
    ),
    "mlx": frozenset({"mlx", "awq", "gptq", "mxfp4", "bitnet", "modelopt"}),
}  # fmt: skip
_SEEN = "seen in vLLM 0.32, transformers 5.23, mlx-lm 0.32, llama.cpp"
_FAST_GROUPS = (None, 32, 64, 128)
_VLLM_BITS = {"packed": (2, 3, 4, 5, 6, 7, 8), "gptq": (4, 8), "awq": (4,)}

OTHER_CONTAINER = Rule(
    "other-container", "error", "the runtime reads another kind of folder or file",
    'convert it: `to="gguf"` for llama.cpp, `to="hf"` or `to="mlx"` for others', _SEEN,
)  # fmt: skip
OTHER_METHOD = Rule(
    "other-method", "error", "the runtime does not know this method of quantization",
    "convert it to a method that the runtime reads (`to`)", _SEEN,
)  # fmt: skip
OTHER_SCHEME = Rule(
    "other-scheme", "error", "the runtime does not take these bits, or this module, quantized in this method",
    "quantize again in another scheme, or convert it to another method (`to`)", "vLLM 0.32, mlx-lm 0.32",
)  # fmt: skip
GPTQ_ZEROS = Rule(
    "gptq-zeros", "error", "vLLM takes GPTQ without zero points only", 'convert it: `to="compressed-tensors"`',
    "vLLM 0.32's AutoGPTQConfig",
)  # fmt: skip
GPTQ_ORDER = Rule(
    "gptq-order", "error", "vLLM has dropped GPTQ with act-order (desc_act) in groups",
    "quantize again with desc_act false, or static_groups", "vLLM 0.32's gptq_utils",
)  # fmt: skip
SLOW_GROUPS = Rule(
    "slow-groups", "note", "vLLM's Marlin kernels take rows, and groups of 32, 64 and 128; others go slower ways",
    "quantize again in such groups where speed counts", "vLLM's marlin_utils",
)  # fmt: skip
PACKED_ZEROS = Rule(
    "packed-zeros", "error", "transformers refuses packed zero points of compressed-tensors",
    "quantize symmetrically, or load it in vLLM", "formats.md: seen in transformers 5.23 with compressed-tensors 0.20",
)  # fmt: skip
COLUMN_GROUPS = Rule(
    "column-groups", "error", "mlx-lm refuses folders that list the group of each column", 'convert it: `to="mlx"`',
    "mlx-lm 0.32",
)  # fmt: skip
NO_CPU_KERNEL = Rule(
    "no-cpu-kernel", "note", "vLLM has no CPU kernel for 8-bit weights with float activations; its GPU kernels do",
    "on a CPU use int4, or int8 with 8-bit activations", "seen in vLLM 0.32",
)  # fmt: skip
UNKNOWN_FAMILY = Rule(
    "unknown-family", "note", "whether the runtime knows this architecture is not known here", "try it there",
    "config.json",
)  # fmt: skip

RULES = (
    OTHER_CONTAINER, OTHER_METHOD, OTHER_SCHEME, GPTQ_ZEROS, GPTQ_ORDER, SLOW_GROUPS, PACKED_ZEROS, COLUMN_GROUPS,
    NO_CPU_KERNEL, UNKNOWN_FAMILY,
)  # fmt: skip


def check_container(folder: Folder, runtime: Runtime) -> Iterator[Finding]:
    """Whether a runtime reads such a folder at all."""
    if folder.kind and folder.kind not in _CONTAINERS[runtime]:
        what = "a file" if folder.kind == "file" else f"{folder.kind} weights"
        yield Finding(OTHER_CONTAINER, folder.path.name, f"{what}; {_TITLES[runtime]} reads {_read(runtime)}")


def check(view: View, runtime: Runtime) -> Iterator[Finding]:
    """What a runtime minds of a Hugging Face folder."""
    if view.folder.kind not in _CONTAINERS[runtime]:
        return
    method = view.folder.method
    if method is not None and method not in _METHODS[runtime]:
        yield Finding(OTHER_METHOD, "quantization_config", f"{method}; {_TITLES[runtime]} does not read it")
        return
    if view.config is None and view.folder.config:
        yield Finding(UNKNOWN_FAMILY, "config.json", f"model_type {view.folder.config.get('model_type')!r:.60}")
    for module in view.coded:
        yield from _module(view, module, runtime)


def _module(view: View, module: str, runtime: Runtime) -> Iterator[Finding]:
    claim, coded = view.claims.modules.get(module), view.coded[module]
    if claim is None:
        return
    if runtime == "vllm" and coded.kind in _VLLM_BITS:
        yield from _vllm(view, coded, claim)
    if runtime == "transformers" and coded.kind == "packed" and claim.symmetric is False:
        yield Finding(PACKED_ZEROS, module, "asymmetric")
    if runtime == "mlx" and coded.kind in ("gptq", "awq"):
        if claim.bits != 4:
            yield Finding(OTHER_SCHEME, module, f"{claim.bits} bits; mlx-lm takes 4 of {coded.kind}")
        if "g_idx" in coded.leaves:
            yield Finding(COLUMN_GROUPS, module, "has g_idx")


def _vllm(view: View, coded: Coded, claim: Claim) -> Iterator[Finding]:
    module, kind = coded.module, coded.kind
    if claim.bits not in _VLLM_BITS[kind] or (view.is_embedding(module) and kind != "packed"):
        yield Finding(OTHER_SCHEME, module, f"{claim.bits} bits of {kind}")
    elif kind == "packed" and claim.bits == 8 and not claim.activations:
        yield Finding(NO_CPU_KERNEL, module, "8 bits, activations in floats")
    if claim.group not in _FAST_GROUPS:
        yield Finding(SLOW_GROUPS, module, f"groups of {claim.group}")
    if kind == "gptq" and claim.symmetric is False:
        yield Finding(GPTQ_ZEROS, module, "sym is false")
    if kind == "gptq" and claim.order == "group" and claim.group is not None:
        yield Finding(GPTQ_ORDER, module, "desc_act is true")


def _read(runtime: Runtime) -> str:
    told = {
        "safetensors": "folders with safetensors", "bin": "with pytorch_model*.bin", "gguf": "*.gguf",
        "mistral": "consolidated*.safetensors",
    }  # fmt: skip
    return ", ".join(told[one] for one in _CONTAINERS[runtime])
