"""Solve linears of a small model for samples that pass through quantkit's decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration.effort import EFFORTS, Effort, batch_samples
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.calibration.sample_streams import Batches, SampleStreams
from quantkit.distributed.group import SINGLE
from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Passage
from quantkit.tensors.scheme import QuantScheme

CPU = torch.device("cpu")


def solve_streams(
    source: Checkpoint,
    tokens: Tensor,
    schemes: dict[str, QuantScheme],
    *,
    effort: Effort = EFFORTS["default"],
    store: ActivationStore | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Result]:
    """Solve the linears that have a scheme, for tokens [N, T]; return the results by module."""
    parts = DecoderParts(source, tokens.shape[1], CPU)
    size = batch_samples(source.config, tokens.shape[1])
    streams = SampleStreams(
        Passage(parts, source.path),
        Batches.of(tokens, slice(len(tokens)), size, effort, CPU),
        GroupSolver(schemes, torch.float32, SINGLE),
        load_stored=lambda module: pytest.fail(module),
        stored=(),
        compute_dtype=compute_dtype,
    )
    results: dict[str, Result] = {}
    for _, solved in streams.solve_groups(parts.list_groups(), store or ActivationStore()):
        results |= solved
    return results


def record_hessians(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list to which the Hessian of each group that is solved is added."""
    hessians: list[Tensor] = []
    release = HessianAccumulator.release

    def watched(self: HessianAccumulator, group: Any) -> Any:
        hessian, paired, *others = release(self, group)
        hessians.append((paired if hessian is None else hessian).clone())
        return hessian, paired, *others

    monkeypatch.setattr(HessianAccumulator, "release", watched)
    return hessians
