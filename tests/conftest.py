"""Settings and fixtures that many tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parent.parent
# The checkout's bare folders must not stand in for other packages of their names.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# A background shell ignores SIGINT, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On matrices as small as these, threads cost more than they bring; also in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["QUANTKIT_BF16"] = "0"  # results that do not depend on the processor

LONGEST = (
    "triton_interpreter", "xla", "tensor_parallel", "triton_kernels", "architectures", "readme", "plan", "fuzz",
    "cpu_kernels", "xla_batch", "engine", "batch", "fused", "chat_command", "resume", "gate", "captured",
)  # fmt: skip
"""Files that begin first: where files run at the same time, none of these is then left to run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Spare the collector of garbage the modules, which are most objects and stay: a tenth of all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small trained Meta checkpoint that ships with the package."""
    from quantkit.data.files import DEMO_MODEL

    return DEMO_MODEL
