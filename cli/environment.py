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
# Other variables may contain secrets, and users paste this report into public issues.
_SETTINGS = re.compile("OMP_|MKL_|CXX$|QUANTKIT_(BLOCKS|CACHE|CPU|DECODE|TUNE)$")
_WIDTH = 100


def environment_lines() -> list[str]:
    """Collect the report, in aligned lines, without the user's name and home folder.

    Imports torch, and compiles nothing.
    """
    settings = []
    for name, value in sorted(os.environ.items()):
        if _SETTINGS.match(name):
            settings.append(f"{name}={value}")
    limit = quota_threads()
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        reason = "from the environment"
    elif limit is not None:
        reason = f"the CPU limit rounded up to {limit}"
    else:
        reason = "torch's default"
    # As a command that computes does before it imports torch, so the report shows its threads.
    set_threads(None)

    import torch

    from quantkit.kernels.library import describe_kernels

    system = [platform.system(), platform.release(), platform.machine(), *platform.libc_ver()]
    rows = {
        "quantkit": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "libraries": ", ".join(_iter_library_versions()),
        "system": " ".join(system),
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
    """Yield the name and version of each installed library."""
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _processors() -> str:
    """Describe how many processors there are, and how many of them this process may use."""
    usable = len(logical_processors())
    quota = cpu_quota()
    parts = [f"{os.cpu_count()} logical", f"{usable} usable on {physical_cores()} physical cores"]
    if quota is None:
        parts.append("no CPU limit")
    else:
        parts.append(f"CPU limit {quota:g}")
    return ", ".join(parts)


def _memory() -> str:
    """Describe the machine's memory, the limit of this process and what is available."""
    machine = memory.machine_bytes()
    limit = memory.total_bytes()
    if limit < machine:
        limit_text = f"limit {size_text(limit)}"
    else:
        limit_text = "no limit"
    return f"{size_text(machine)}, {limit_text}, {size_text(memory.available_bytes())} available"


def _gpus() -> Iterator[str]:
    """Yield a description of each GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        # torch for AMD's GPUs has the API of CUDA, and a version of HIP instead.
        toolkit_version = torch.version.cuda or torch.version.hip
        yield f"{gpu.name} ({size_text(gpu.total_memory)}, CUDA {toolkit_version})"


def _caches() -> Iterator[str]:
    """Yield each folder of a cache, with its size and whether it can be written."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from quantkit.kernels.build import cache_folder

    for folder in (cache_folder(), Path(HF_HUB_CACHE)):
        num_bytes = 0
        for path, _, names in os.walk(folder):
            for name in names:
                file = Path(path, name)
                # Another process may remove files of the cache at the same time. Links of the hub's
                # cache are not followed, so each blob counts once.
                if os.path.lexists(file):
                    num_bytes += file.lstat().st_size
        # A cache that does not exist yet is created in the first of its parents that exists.
        existing_folder = folder
        while not existing_folder.exists():
            existing_folder = existing_folder.absolute().parent
        access = "writable" if os.access(existing_folder, os.W_OK) else "not writable"
        yield f"{folder} ({size_text(num_bytes)}, {access})"


def _without_user(text: str) -> str:
    """Replace the home folder in a text with ``~``, and the user's name in other paths with
    ``USER``.
    """
    home = os.path.expanduser("~")
    # The home folder is unknown, or a service's: "/" would match in every path.
    if home in ("~", "/"):
        return text
    text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    return re.sub(rf"(?<=/){re.escape(os.path.basename(home))}(?=/|\W|$)", "USER", text)
