"""Schemes chosen for a size: what `quantize` does with `target_bits` and `max_size`, once the samples are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantkit.architectures.topology import linear_columns
from quantkit.bit_allocation.allocation import Allocation, units
from quantkit.bit_allocation.fit import Fit
from quantkit.calibration.data import Calibration
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.output.staging import interrupted_fingerprint
from quantkit.jobs.output import option_key
from quantkit.jobs.prepare import Prepared, reassigned
from quantkit.progress import Progress
from quantkit.tensors.scheme import QuantScheme

OPTION = "bit_allocation"
"""The key of the choice in the manifest, and in the journal of an interrupted run."""


def size_fit(prepared: Prepared) -> Fit | None:
    """What chooses the schemes; None if they were given.

    Raises:
        RequestError: if no choice has the size.
        UnsupportedError: if the format does not hold several schemes.
    """
    size, target = prepared.options.size, prepared.target
    if size is None:
        return None

    def total_bytes(schemes: Mapping[str, QuantScheme]) -> int:
        """Of all files of weights, given the scheme of each module that gets one."""
        return replace(prepared, scheme_map=replace(prepared.scheme_map, schemes=dict(schemes))).encoder.total_bytes()

    assert target.codes is not None
    return Fit(prepared.source, size, target.codes, target.method, _settled(prepared), total_bytes)


def choose_schemes(
    prepared: Prepared, fit: Fit, drawn: Calibration, *, group: ProcessGroup, progress: Progress
) -> Prepared:
    """The source with the schemes chosen on samples; a resumed run keeps the choice of the interrupted one.

    Raises:
        QuantkitError: as `quantize` does.
    """
    settings = prepared.settings
    assert settings is not None  # a size goes with GPTQ only
    allocation = group.broadcast_from_rank0(_of_interrupted(prepared, drawn) if prepared.options.resume else None)
    if allocation is None:
        allocation = fit.chosen(
            drawn.tokens, device=settings.device, memory_bytes=settings.memory_bytes, group=group, progress=progress
        )
    return reassigned(prepared, allocation)


def _of_interrupted(prepared: Prepared, drawn: Calibration) -> Allocation | None:
    """The choice of an interrupted run for the same size and samples; the writer compares all other options."""
    fingerprint = interrupted_fingerprint(prepared.dst)
    found, calibration = fingerprint.get(option_key(OPTION)), fingerprint.get(option_key("calibration"))
    if not isinstance(found, dict) or calibration != drawn.to_json():
        return None
    allocation = Allocation.from_json(found)
    return allocation if allocation.target == prepared.options.size else None


def _settled(prepared: Prepared) -> dict[str, QuantScheme | None]:
    """The modules whose schemes are not chosen: named ones, and linears of blocks that keep their floats."""
    source, schemes = prepared.source, prepared.scheme_map.schemes
    free = {module for unit in units(source.config) for module in unit.modules}
    kept = [module for module in linear_columns(source.config) if module in free and module not in schemes]
    named = {module: scheme for module, scheme in schemes.items() if module not in free}
    return {**named, **dict.fromkeys(kept)}
