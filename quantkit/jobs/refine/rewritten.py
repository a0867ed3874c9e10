"""Write a quantized model again, in its format, with some tensors changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.base.messages import Message, Option
from quantkit.errors import NonFiniteError, NotRepresentableError, QuantkitError, RequestError
from quantkit.formats.checkpoint import Checkpoint, CheckpointView, schemes
from quantkit.formats.codecs.codec import Reason, choose_codec
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.registry import GGUF
from quantkit.jobs.convert.carried_codes import convert_scales_exactly
from quantkit.jobs.convert.conversion import Conversion, describe_floats, plan_conversion
from quantkit.jobs.convert.options import ConvertOptions
from quantkit.jobs.output.writer import Writer, content_hash, start_source_hashes
from quantkit.quality.changed_tensors import tensor_hash
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.quality.weights_only import describe_unquantized_tensors
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import all_finite
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.via_transformers.forward import run_by_transformers

# A factor on scales, to try whether a format can represent other ones. MLX stores zero points as
# offsets, which a float type may not represent exactly for other scales.
_TRIAL_FACTOR = 1.001
# Entries of a manifest on the quantization, which remain true after refining.
_CARRIED = (
    "model",
    "linears_by",
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


_TRAINED = "trained"


def plan_rewriting(
    src: Path,
    dst: Path,
    *,
    resume: bool = False,
    source_check: bool = True,
    by_transformers: bool = False,
    code: Path | None = None,
) -> Conversion:
    """Plan to write a quantized model again in its own format.

    Args:
        by_transformers: as in `plan_refinement`.
        code: see `run_by_transformers`, which runs models of other architectures.

    Raises:
        QuantkitError: as `convert` does before it writes; also if it is not quantized, or of an
            architecture that neither quantkit nor transformers runs.
    """
    to = None
    if dst.suffix == f".{GGUF.name}" or src.suffix == f".{GGUF.name}":
        to = GGUF.name
        if dst.suffix != src.suffix:
            if src.suffix == f".{GGUF.name}":
                expected = "a name in .gguf"
            else:
                expected = "a folder"
            raise RequestError(
                "the format of the source cannot be changed", found=dst, expected=expected
            )
    plan = plan_conversion(
        ConvertOptions(
            src,
            dst,
            to=to,  # type: ignore[arg-type]
            tensors_only=by_transformers,
            resume=resume,
            source_check=source_check,
        )
    )
    source = plan.work.source
    if not source.config.runnable:
        run_by_transformers(source, code=code)
    if not schemes(source):
        raise RequestError(
            "the source has no codes whose scales could be trained",
            path=source.path,
            found=describe_floats(source),
            expected="int4 or int8",
            hint=Message("create it with ", Option("refine", value=True, job="quantize")),
        )
    return plan


class CheckpointInOutputTypes(CheckpointView):
    """A quantized model whose scales have the types in which they are written."""

    def __init__(self, plan: Conversion) -> None:
        super().__init__(plan.work.source)
        types: dict[str, DType] = {}
        for spec in plan.work.encoder.planned:
            if spec.scheme is not None:
                types[spec.name] = spec.dtype
        self._types = types

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        """Load a tensor; a quantized one with its scales in the type in which they are written."""
        value = self._source.load(name, part)
        dtype = self._types.get(name)
        if isinstance(value, QuantTensor) and dtype is not None:
            # None: the type cannot represent these scales exactly.
            return convert_scales_exactly(value, dtype) or value
        return value


def require_scales_change(plan: Conversion, names: tuple[str, ...]) -> None:
    """Encode a weight of each scheme with slightly other scales. Raises `NotRepresentableError` if
    the format cannot represent them.
    """
    codes = plan.target.codes
    tried_schemes = set()
    assert codes is not None
    for name in names:
        value = plan.work.source.load(name)
        assert isinstance(value, QuantTensor)
        # Weights of a scheme are encoded in the same way: one of them is enough.
        if value.scheme in tried_schemes:
            continue
        tried_schemes.add(value.scheme)
        codec = choose_codec(codes, value.scheme, is_carried=True)
        scale = (value.scale.float() * _TRIAL_FACTOR).to(value.scale.dtype)
        if isinstance(codec, Reason):
            encoded = codec
        else:
            encoded = codec.encode(replace(value, scale=scale))
        if isinstance(encoded, Reason):
            raise NotRepresentableError(
                f"tensor '{name}' cannot store trained scales in {plan.target.name}:"
                f" {encoded.problem}",
                path=plan.work.source.path,
                found=encoded.found,
                expected=encoded.expected,
                hint=(
                    Message(
                        "convert it to another format first: quantkit convert, ",
                        Option("to", value="compressed-tensors"),
                    )
                ),
            )


def put_all(
    writer: Writer, changed: Checkpoint, records: Mapping[str, Mapping[str, object]]
) -> StoredCheckpoint:
    """Write all tensors of a model, with the records of some, and open the result, to be run as the
    model is. Raises `NonFiniteError` if a scale is NaN or Inf.
    """
    writer.report_progress()
    for spec in writer.missing:
        value = changed.load(spec.name)
        if isinstance(value, QuantTensor):
            floats = [value.scale, value.minimum]
        else:
            floats = [value]
        for tensor in floats:
            if tensor is not None and not all_finite(tensor):
                raise NonFiniteError(f"tensor '{spec.name}' contains NaN or Inf", path=changed.path)
        writer.put(spec.name, value, records.get(spec.name))
    result = writer.seal()
    if not changed.config.runnable:
        result = run_by_transformers(result, code=changed.config.code)
    return result


def require_written(changed: Checkpoint, result: Checkpoint, codes_of: Checkpoint | None) -> None:
    """Compare a result, as it is read back, with what was to be written, and its codes with those
    of another model.

    Raises:
        QuantkitError: if a tensor differs: quantkit, or the disk, has changed it.
    """
    for name in result.names():
        written = result.load(name)
        expected = changed.load(name)
        if isinstance(written, QuantTensor) and isinstance(expected, QuantTensor):
            is_equal = equal_as_numbers(written, expected)
            if codes_of is not None:
                before = codes_of.load(name)
                assert isinstance(before, QuantTensor)
                is_equal = is_equal and before.codes.equal(expected.codes)
        elif isinstance(written, Tensor) and isinstance(expected, Tensor):
            is_equal = bool((written == expected).all())
        else:
            is_equal = False
        # The manifest and deltas identify tensors by these hashes, which must agree as well.
        if not is_equal or tensor_hash(written) != tensor_hash(expected):
            raise QuantkitError(
                f"tensor '{name}' differs from what was written when it is read back",
                path=result.path,
                hint="this is a bug in quantkit, or the disk fails",
            )


def describe_quantization(
    source: StoredCheckpoint, result: Checkpoint, changed: Collection[str]
) -> dict[str, Any]:
    """Write the manifest's entries on the quantization of a model that is written again, with some
    tensors changed.
    """
    manifest = manifest_or_empty(source.path)
    details = {key: manifest[key] for key in _CARRIED if key in manifest}
    if not source.config.runnable:
        details["tensors_only"] = True
        carried = describe_unquantized_tensors(source, result)
        # The manifest compares with the float model.
        carried.update(manifest.get("carried", {}))
        details["carried"] = mark_trained(carried, changed)
    return details


def mark_trained(carried: Mapping[str, str], changed: Collection[str]) -> dict[str, str]:
    """Describe how each tensor that is not quantized was stored, if some have changed."""
    descriptions: dict[str, str] = {}
    for name, description in carried.items():
        descriptions[name] = _TRAINED if name in changed else description
    return descriptions


def base_hashes(source: StoredCheckpoint) -> dict[str, str]:
    """Compute the sha256 of the files of a model: weights, settings, tokenizer. Files of GGUF are
    listed by their number, as users rename them.

    Raises:
        CheckpointError: if one cannot be read.
    """
    hashes = start_source_hashes(source).result()
    if not source.path.is_dir():
        numbered_hashes: dict[str, str] = {}
        for number, (_, digest) in enumerate(sorted(hashes.items())):
            numbered_hashes[f"file {number}"] = digest
        return numbered_hashes
    settings = source.path / "generation_config.json"
    # `source_hashes` leaves this file out, but it determines what the model generates.
    if not settings.is_file():
        return hashes
    return {**hashes, settings.name: content_hash(settings)}
