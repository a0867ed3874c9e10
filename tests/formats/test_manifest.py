"""Manifests of other format versions are refused."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest

import quantkit
from quantkit.errors import CheckpointError
from quantkit.formats import manifest


@pytest.mark.parametrize("version", [1, manifest.FORMAT_VERSION + 1])
def test_another_format_version_is_refused(version: int, demo_model: Path, tmp_path: Path) -> None:
    folder = quantkit.convert(demo_model, tmp_path / "out", source_check=False).path
    assert manifest.read(folder)["format_version"] == manifest.FORMAT_VERSION
    oracle.edit_json(folder / manifest.NAME, format_version=version)
    with pytest.raises(CheckpointError) as failed:
        quantkit.verify(folder)
    assert failed.value.path == folder / manifest.NAME
    assert (failed.value.found, failed.value.expected) == (version, manifest.FORMAT_VERSION)
