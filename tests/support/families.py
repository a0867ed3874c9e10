"""Tiny models of transformers in the folders of their families, for tests of what lies on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
from topology_cases import CASES, ENDS

from quantkit.architectures.families import FAMILIES
from quantkit.formats.containers.hf_checkpoint import HFCheckpoint
from quantkit.formats.registry import HF

__all__ = ["CASES", "let_run", "make", "opened"]


def make(case: str, **changes: Any) -> Any:
    """A random model of a case."""
    kind, settings = CASES[case]
    return oracle.make(kind, **{**ENDS, **settings, **changes})


def let_run(monkeypatch: pytest.MonkeyPatch, kind: str, **changes: Any) -> None:
    """Have folders of a family read though its models are not run yet, or with another layout on
    disk.
    """
    monkeypatch.setitem(FAMILIES, kind, replace(FAMILIES[kind], runs=True, **changes))


def opened(folder: Path) -> HFCheckpoint:
    """The checkpoint in a folder."""
    return HF.open(folder, "safetensors")
