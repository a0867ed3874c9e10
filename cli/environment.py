"""``quantkit --version --verbose``: versions, the machine and settings, for bug reports."""

from __future__ import annotations

import os
import platform
import re
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quantkit.base import memory
from quantkit.base.cgroups import cpu_quota
from quantkit.base.memory import size_text
from quantkit.base.processors import (
    cpu_features,
    logical_processors,
    physical_cores,
    processor_name,
    quota_threads,
    set_threads,
)
from quantkit.version import __version__

_LIBRARIES = (
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "compressed-tensors",
    "datasets",
    "huggingface-hub",
    "sentencepiece",
    "tiktoken",
    "gguf",
    "lm-eval",
    "triton",
    "jax",
    "jaxlib",
    "torchax",
    "libtpu",
)
# Others may be secrets.
_SETTINGS = re.compile("OMP_|MKL_|CXX$|QUANTKIT_(BLOCKS|CACHE|CPU|DECODE|TUNE)$")
_WIDTH = 100


def environment_lines() -> list[str]:
    """Return the report in aligned lines, without the user's name and home folder.

    Imports torch, and compiles nothing.
    """
    settings = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if _SETTINGS.match(name)
    ]
    if (limit := quota_threads()) is None:
        reason = "torch's default"
    else:
        reason = f"the CPU limit rounded up to {limit}"
    if any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        reason = "from the environment"
    set_threads(None)  # as a command that computes

    import torch

    from quantkit.kernels.library import describe_kernels

    rows = {
        "quantkit": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "libraries": ", ".join(_iter_library_versions()),
        "system": " ".join(
            [platform.system(), platform.release(), platform.machine(), *platform.libc_ver()]
        ),
        "processor": ", ".join([processor_name(), *sorted(cpu_features())]),
        "processors": _processors(),
        "memory": _memory(),
        "kernels": describe_kernels(),
        "threads": f"{torch.get_num_threads()}, {reason}",
        "GPUs": ", ".join(_gpus()) or "none",
        "caches": "; ".join(_caches()),
        "settings": ", ".join(settings) or "none",
    }
    width = max(map(len, rows)) + 2
    lines = []
    for name, value in rows.items():
        lines += textwrap.wrap(
            _without_user(value),
            _WIDTH,
            initial_indent=name.ljust(width),
            subsequent_indent=" " * width,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _iter_library_versions() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _processors() -> str:
    usable = len(logical_processors())
    quota = cpu_quota()
    parts = [f"{os.cpu_count()} logical", f"{usable} usable on {physical_cores()} physical cores"]
    return ", ".join([*parts, "no CPU limit" if quota is None else f"CPU limit {quota:g}"])


def _memory() -> str:
    machine = memory.machine_bytes()
    limit = memory.total_bytes()
    if limit < machine:
        limited = f"limit {size_text(limit)}"
    else:
        limited = "no limit"
    return f"{size_text(machine)}, {limited}, {size_text(memory.available_bytes())} available"


def _gpus() -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        return
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield (
            f"{gpu.name} ({size_text(gpu.total_memory)}, CUDA"
            f" {torch.version.cuda or torch.version.hip})"
        )


def _caches() -> Iterator[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from quantkit.kernels.build import cache_folder

    for folder in (cache_folder(), Path(HF_HUB_CACHE)):
        files = []
        for path, _, names in os.walk(folder):
            for name in names:
                files.append(Path(path, name))
        size = size_text(sum(file.lstat().st_size for file in files if os.path.lexists(file)))
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        yield f"{folder} ({size}, {'writable' if os.access(there, os.W_OK) else 'not writable'})"


def _without_user(text: str) -> str:
    """Return a text in which ``~`` stands for the home folder, and ``USER`` for the user's name in
    other paths.
    """
    home = os.path.expanduser("~")
    # Unknown, or that of a service.
    if home in ("~", "/"):
        return text
    text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    return re.sub(rf"(?<=/){re.escape(os.path.basename(home))}(?=/|\W|$)", "USER", text)
