"""Rules about what each runtime loads: kinds of folders, methods of quantization, and their
schemes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quantkit.architectures.names import is_embedding
from quantkit.base.json_values import Settings
from quantkit.doctor.findings import Finding, Runtime, finding
from quantkit.doctor.folder import Folder
from quantkit.doctor.side_files import CONFIG
from quantkit.doctor.view import View
from quantkit.formats.codecs.layout import Claim, Description
from quantkit.formats.codecs.layouts import AWQ, G_IDX, GPTQ, PACKED_CODES
from quantkit.formats.codecs.table import METHODS
from quantkit.formats.codecs.vllm import Linears, vllm_problems
from quantkit.formats.containers.hf_settings import SETTINGS

_TITLES = {
    "vllm": "vLLM",
    "transformers": "transformers",
    "llama.cpp": "llama.cpp",
    "mlx": "mlx-lm",
}
_CONTAINERS: dict[Runtime, tuple[str, ...]] = {
    "vllm": ("safetensors", "bin", "mistral"),
    "transformers": ("safetensors", "bin", "gguf"),
    "llama.cpp": ("gguf",),
    "mlx": ("safetensors",),
}
_CONTAINER_TITLES = {
    "safetensors": "folders with safetensors",
    "bin": "with pytorch_model*.bin",
    "gguf": "*.gguf",
    "mistral": "consolidated*.safetensors",
}
_METHODS: dict[str, tuple[Runtime, ...]] = {
    **{name: method.runtimes for name, method in METHODS.items()},
    **dict.fromkeys(("mxfp8", "quark", "fp_quant"), ("vllm", "transformers")),
    "bitnet": ("transformers", "mlx"),
    **dict.fromkeys(
        ("aqlm", "quanto", "eetq", "higgs", "hqq", "vptq", "spqr", "nvfp4"), ("transformers",)
    ),
}
"""The runtimes that load a method of quantization."""
# vLLM's Marlin kernels support rows and these groups.
_FAST_GROUPS = (None, 32, 64, 128)
_VLLM_BITS = {PACKED_CODES: (2, 3, 4, 5, 6, 7, 8), GPTQ: (4, 8), AWQ: (4,)}


def check_container(folder: Folder, runtime: Runtime) -> Iterator[Finding]:
    """Check that a runtime reads such a folder at all."""
    # A folder without weights is reported by rules about files.
    if folder.kind and folder.kind not in _CONTAINERS[runtime]:
        if folder.kind == "file":
            container = "a file"
        else:
            container = f"{folder.kind} weights"
        readable = ", ".join(_CONTAINER_TITLES[kind] for kind in _CONTAINERS[runtime])
        yield finding(
            "other-container",
            folder.path.name,
            f"{container}; {_TITLES[runtime]} reads {readable}",
        )


def check(view: View, runtime: Runtime, reported: Collection[str] = ()) -> Iterator[Finding]:
    """Find what a runtime does not load of a Hugging Face folder, or loads wrongly.

    Args:
        view: the folder.
        runtime: the runtime.
        reported: the rules that have found something, whichever the runtime.
    """
    if view.folder.kind not in _CONTAINERS[runtime]:
        return
    # A runtime without the method refuses the folder, whatever its modules are.
    method = view.folder.method
    if method is not None and runtime not in _METHODS.get(method, ()):
        yield finding(
            "other-method", "quantization_config", f"{method}; {_TITLES[runtime]} does not read it"
        )
        return
    raw = view.folder.config
    if view.config is None and raw and not (runtime == "transformers" and _transformers_knows(raw)):
        yield finding("unknown-family", "config.json", f"model_type {raw.get('model_type')!r:.60}")
    for module in view.coded:
        yield from _module(view, module, runtime)
    if runtime == "vllm" and view.method is not None and view.coded:
        settings = Settings(view.folder.settings or {}, view.folder.root / CONFIG, SETTINGS)
        linears = Linears.of(view.method, settings, view.all_linears(), view.coded, raw)
        for problem in vllm_problems(linears):
            if problem.rule not in reported:
                yield finding(problem.rule, problem.location, problem.description)


def _transformers_knows(raw: Mapping[str, Any]) -> bool:
    """Return whether transformers is installed and has the architecture of a config.json."""
    if importlib.util.find_spec("transformers") is None:
        return False
    # This module imports torch, which a diagnosis from headers does without.
    from quantkit.via_transformers.linears import is_known

    return is_known(raw)


def _module(view: View, module: str, runtime: Runtime) -> Iterator[Finding]:
    claim = view.claims.modules.get(module)
    coded = view.coded[module]
    if claim is None:
        return
    if runtime == "vllm" and coded.layout in _VLLM_BITS:
        yield from _check_vllm_module(coded, claim)
    if runtime == "transformers" and coded.layout is PACKED_CODES and claim.symmetric is False:
        yield finding("packed-zeros", module, "asymmetric")
    if runtime == "mlx" and coded.layout in (GPTQ, AWQ):
        if claim.bits != 4:
            yield finding(
                "other-scheme", module, f"{claim.bits} bits; mlx-lm takes 4 in {coded.title}"
            )
        if G_IDX in coded.tensors:
            yield finding("column-groups", module, "has g_idx")


def _check_vllm_module(coded: Description, claim: Claim) -> Iterator[Finding]:
    module = coded.module
    layout = coded.layout
    assert layout is not None
    if claim.bits not in _VLLM_BITS[layout] or (
        is_embedding(module) and layout is not PACKED_CODES
    ):
        yield finding("other-scheme", module, f"{claim.bits} bits of {layout.title}")
    elif layout is PACKED_CODES and claim.bits == 8 and not claim.activations:
        yield finding("no-cpu-kernel", module, "8 bits, activations in floats")
    if claim.group_size not in _FAST_GROUPS:
        yield finding("slow-groups", module, f"groups of {claim.group_size}")
    if layout is GPTQ and claim.symmetric is False:
        yield finding("gptq-zeros", module, "sym is false")
