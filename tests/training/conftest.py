"""A float model, and the same quantized."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantkit


@pytest.fixture(scope="session")
def floats(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats") / "floats"
    quantkit.convert(demo_model, folder, dtype="bf16", source_check=False)
    return folder


@pytest.fixture(scope="session")
def int4(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int4") / "int4"
    quantkit.quantize(floats, folder, "int4-g32", method="rtn", source_check=False)
    return folder
