"""Write a quantized model again, in its format, with some tensors changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.errors import NonFiniteError, NotRepresentableError, QuantkitError, RequestError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView, require_runnable, schemes
from quantkit.formats.codecs.codec import Reason
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.registry import GGUF
from quantkit.jobs.convert.carried_codes import with_scales
from quantkit.jobs.convert.conversion import Conversion, plan_conversion
from quantkit.jobs.convert.options import ConvertOptions
from quantkit.jobs.output.writer import Writer, content_hash, source_hashes
from quantkit.quality.changed_tensors import tensor_hash
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.tensors.finite import all_finite
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice

_TRIED = 1.001  # times a scale
_CARRIED = (
    "model",
    "run_by",
    "recipe",
    "method",
    "calibration",
    "effort",
    "scheme",
    "head",
    "embedding",
    "activations",
    "modules",
    "schemes",
    "lora",
    "bit_allocation",
)


def plan_rewriting(
    src: Path, dst: Path, *, resume: bool = False, source_check: bool = True
) -> Conversion:
    """Return how to write a quantized model again in the format that it has.

    Raises:
        QuantkitError: as `convert` does before it writes; also if it is not quantized, or of an
            architecture that has no decoder here.
    """
    to = None
    if dst.suffix == f".{GGUF.name}" or src.suffix == f".{GGUF.name}":
        to = GGUF.name
        if dst.suffix != src.suffix:
            if src.suffix == f".{GGUF.name}":
                expected = "a name in .gguf"
            else:
                expected = "a folder"
            raise RequestError("the format of the source is kept", found=dst, expected=expected)
    plan = plan_conversion(
        ConvertOptions(src, dst, to=to, resume=resume, source_check=source_check)  # type: ignore[arg-type]
    )
    source = plan.work.source
    require_runnable(source)
    if not schemes(source):
        raise RequestError(
            "the source is not quantized", path=source.path, hint="quantize it with `refine=True`"
        )
    return plan


class InOutputTypes(CheckpointView):
    """A quantized model whose scales have the types in which they are written."""

    def __init__(self, plan: Conversion) -> None:
        super().__init__(plan.work.source)
        self._types = {
            spec.name: spec.dtype for spec in plan.work.encoder.planned if spec.scheme is not None
        }

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        value = self._source.load(name, part)
        if isinstance(value, QuantTensor) and (dtype := self._types.get(name)) is not None:
            return with_scales(value, dtype) or value
        return value


def require_scales_change(plan: Conversion, names: tuple[str, ...]) -> None:
    """Raise `NotRepresentableError` if the format cannot hold other scales for a weight than it
    has.
    """
    codes = plan.target.codes
    tried = set()
    assert codes is not None
    for name in names:
        value = plan.work.source.load(name)
        assert isinstance(value, QuantTensor)
        if value.scheme in tried:
            continue
        tried.add(value.scheme)
        codec = codes.codec(value.scheme)
        scale = (value.scale.float() * _TRIED).to(value.scale.dtype)
        if isinstance(codec, Reason):
            found = codec
        else:
            found = codec.encode(replace(value, scale=scale))
        if isinstance(found, Reason):
            raise NotRepresentableError(
                f"tensor '{name}' cannot get other scales in {plan.target.name}: {found.problem}",
                path=plan.work.source.path,
                found=found.found,
                expected=found.expected,
                hint=(
                    "convert it to another format first: quantkit convert,"
                    ' `to="compressed-tensors"`'
                ),
            )


def put_all(
    writer: Writer, changed: Checkpoint, records: Mapping[str, Mapping[str, object]]
) -> StoredCheckpoint:
    """Write all tensors of a model, with the records of some; the result, opened. Raises
    `NonFiniteError` if a scale is NaN or Inf.
    """
    writer.report_progress()
    for spec in writer.missing:
        value = changed.load(spec.name)
        if isinstance(value, QuantTensor):
            floats = [value.scale, value.minimum]
        else:
            floats = [value]
        if not all(one is None or all_finite(one) for one in floats):
            raise NonFiniteError(f"tensor '{spec.name}' holds NaN or Inf", path=changed.path)
        writer.put(spec.name, value, records.get(spec.name))
    return writer.seal()


def require_written(changed: Checkpoint, result: Checkpoint, codes_of: Checkpoint | None) -> None:
    """Compare a result, as it is read back, with what was to be written, and its codes with those
    of another model.

    Raises:
        QuantkitError: if a tensor differs: quantkit, or the disk, has changed it.
    """
    for name in result.names():
        found = result.load(name)
        expected = changed.load(name)
        if isinstance(found, QuantTensor) and isinstance(expected, QuantTensor):
            same = equal_as_numbers(found, expected)
            if codes_of is not None:
                before = codes_of.load(name)
                assert isinstance(before, QuantTensor)
                same = same and before.codes.equal(expected.codes)
        else:
            same = (
                isinstance(found, Tensor)
                and isinstance(expected, Tensor)
                and bool((found == expected).all())
            )
        if not same or tensor_hash(found) != tensor_hash(expected):
            raise QuantkitError(
                f"tensor '{name}' is not what was to be written, as it is read back",
                path=result.path,
                hint="a bug in quantkit, or a disk that fails",
            )


def read_quantization_details(model: Path) -> dict[str, Any]:
    """Return what a model's manifest says of how it was quantized; empty if it has none."""
    made = manifest_or_empty(model)
    return {key: made[key] for key in _CARRIED if key in made}


def base_hashes(source: StoredCheckpoint) -> dict[str, str]:
    """Return the sha256 of the files of a model: weights, settings, tokenizer. Files of GGUF go by
    their number, as users rename them.

    Raises:
        CheckpointError: if one cannot be read.
    """
    found = source_hashes(source).result()
    if not source.path.is_dir():
        result: dict[str, str] = {}
        for number, (_, digest) in enumerate(sorted(found.items())):
            result[f"file {number}"] = digest
        return result
    settings = source.path / "generation_config.json"
    if not settings.is_file():
        return found
    return {**found, settings.name: content_hash(settings)}
