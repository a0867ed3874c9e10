"""What must hold before a checkpoint is quantized, checked from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.calibration.data import Calibration
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.checkpoint import FLOAT_DTYPES, Checkpoint, schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.encoders import Planned
from quantkit.formats.folder import checked_tokenizer, require_new_names
from quantkit.formats.staging import require_name
from quantkit.jobs.scheme_map import SchemeMap
from quantkit.tensors.scheme import QuantScheme, Recipe
from quantkit.text.tokenizer import Tokenizer


def prepare(
    src: str | Path, dst: Path, plan: str | QuantScheme | Recipe, *, keep: Iterable[str], strict: bool,
    weights: str | None,
) -> tuple[Checkpoint, SchemeMap, Tokenizer | None, list[str]]:  # fmt: skip
    """Open a source of floats and assign the schemes; with notes for the user.

    Raises:
        QuantkitError: as `quantize` does.
    """
    require_name(dst)
    source = open_checkpoint(src, weights)
    require_new_names(source.path, dst)
    tokenizer, notes = checked_tokenizer(source)
    if already := schemes(source):
        raise UnsupportedError(
            "the source is quantized already", path=source.path, found=str(next(iter(already.values()))),
            hint="start from the float model",
        )  # fmt: skip
    assignment = SchemeMap.of(_as_plan(plan).keeping(keep), source.config)
    assigned = assignment.schemes
    misfits = assignment.misfit_lines()
    if misfits and strict:
        raise RequestError(
            f"schemes do not fit: {'; '.join(misfits)} without --strict", path=source.path,
            hint="choose another group size, or leave --strict out",
        )  # fmt: skip
    notes += [f"{source.path}: {line}" for line in misfits]
    if not all(scheme.symmetric for scheme in assigned.values()):
        notes.append(f"{dst}: transformers does not load zero points in this format (seen in 5.23); quantkit does")
    return source, assignment, tokenizer, notes


def planned_tensors(source: Checkpoint, assigned: Mapping[str, QuantScheme]) -> list[Planned]:
    """The tensors of the output in order, scales in the source's dtype."""
    scale_dtype = FLOAT_DTYPES[source.config.dtype]
    return [
        Planned(e.name, e.shape, scale_dtype, assigned[e.module])
        if e.is_linear_weight and e.module in assigned
        else Planned(e.name, e.shape, source.info(e.name).dtype)
        for e in parameters(source.config)
    ]


def _as_plan(plan: str | QuantScheme | Recipe) -> Recipe:
    if isinstance(plan, Recipe):
        return plan
    return Recipe(QuantScheme.parse(plan) if isinstance(plan, str) else plan)


def too_few_tokens(drawn: Calibration, config: ModelConfig) -> list[str]:
    """A note where a Hessian cannot have full rank."""
    tokens, width = drawn.tokens.numel(), max(config.intermediate_size, config.hidden_size)
    if tokens >= width:
        return []
    return [f"{tokens} calibration tokens are fewer than the widest layer's {width} inputs; give more samples"]
