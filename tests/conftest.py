"""Settings and fixtures that many tests share."""

from __future__ import annotations

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


# On matrices as small as these, threads cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small trained Meta checkpoint that ships with the package."""
    from quantkit.data.files import DEMO_MODEL

    return DEMO_MODEL
