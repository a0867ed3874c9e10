"""Describe the checkpoint in a folder, from headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.architectures.rope import RopeConfig
from quantkit.architectures.text_part import text_family
from quantkit.base.arguments import as_path, require_flags
from quantkit.base.messages import Message
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import (
    Checkpoint,
    active_parameter_count,
    count_text,
    parameter_count,
)
from quantkit.formats.container import StoredCheckpoint, weight_size
from quantkit.formats.detect import (
    WeightKind,
    open_checkpoint,
    was_written_tensors_only,
    with_codes,
)
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.kv_cache import cache_text
from quantkit.model.run_memory import (
    NOT_RUN,
    RunMemory,
    count_cache_bytes_per_token,
    count_state_bytes,
    count_weight_bytes,
    measure_by_transformers,
)
from quantkit.model.stored_codes import keep_runnable_codes, runs_on_cpu
from quantkit.quality.figures import manifest_or_empty
from quantkit.quality.positions import PositionCertificate
from quantkit.tensors.dtypes import DType
from quantkit.text.tokenizer import Tokenizer

# Keys of the manifest.
_OF_MAKER = ("quantkit_version", "job", "method", "effort")
_OF_TOKENIZER = ("kind", "vocab_size", "bos_id")


@dataclass(frozen=True)
class Inspection:
    """What `quantkit.inspect` finds.

    Attributes:
        path: the folder.
        format: its layout on disk: Meta, or Hugging Face, with which kind of weights.
        architecture: as its config calls it.
        layers, hidden_size, heads, kv_heads, vocabulary: sizes.
        context: tokens that it can take at most.
        rope, window_rope: rotary embeddings, and those of layers with a window if they differ; None
            if unknown.
        tied_embeddings: whether the embedding is the output head too.
        experts, experts_per_token: in a layer that has some, and those that a token is sent to; 0
            where none has.
        parameters: weights, as if all were floats; tied ones counted once.
        active_parameters: of these what one token meets.
        weight_bytes: what the tensors occupy on disk.
        bits_per_weight: their average over all parameters.
        run_bytes: what the weights take in memory on a CPU: codes that kernels run as they are
            stored, others as floats, all in float32 where transformers runs them; 0 where nothing
            does.
        cache_bytes_per_token: of keys and values in the model's type, in one sequence; 0 where
            there is no decoder.
        state_bytes_per_sequence: of layers that keep states in place of keys and values.
        tensors: number of tensors by float type or scheme; where codes run as floats, with the type
            of these, such as ``NF4 as bfloat16``.
        tokenizer: its ``kind``, ``vocab_size`` and ``bos_id``; None where there is none.
        made_by: ``quantkit_version`` and ``job`` that wrote it, ``method`` and ``effort`` of a
            quantization; None if unknown.
        schemes_chosen: for which ``target_bits`` or ``max_size``, and ``estimated_kl``; None if
            they were given.
        readers: the programs that load the folder.
        readers_note: on programs that do not; None for none.
        notes: what one should know though it is no error.
        runnable: whether there is a decoder for it here; of a model known by its tensors only sizes
            are what its config says, 0 where it does not.
        run_by: of a model known by its tensors only, what ran it when it was made, such as
            ``transformers 5.23.0``; None if nothing did.
        positions: what it lost by position, where it was made with a certificate for long contexts.
        kv_cache: of a quantized key/value cache the ``scheme``, and how many ``layers`` have
            scales; None for none.
    """

    path: str
    format: str
    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    rope: RopeConfig | None
    window_rope: RopeConfig | None
    tied_embeddings: bool
    experts: int
    experts_per_token: int
    parameters: int
    active_parameters: int
    weight_bytes: int
    bits_per_weight: float
    run_bytes: int
    cache_bytes_per_token: int
    state_bytes_per_sequence: int
    tensors: dict[str, int]
    tokenizer: dict[str, Any] | None
    made_by: dict[str, Any] | None
    readers: list[str]
    readers_note: str | None
    notes: list[str]
    runnable: bool = True
    run_by: str | None = None
    schemes_chosen: dict[str, Any] | None = None
    positions: PositionCertificate | None = None
    kv_cache: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert the inspection to plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Write the report for people."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.tensors.items())
        ropes = []
        for rope in (self.rope, self.window_rope):
            if rope is not None:
                ropes.append(_rope_text(rope))
        made_by = self.made_by
        cache = self.kv_cache
        sizes = (
            f"  layers {self.layers}, hidden {self.hidden_size}, heads {self.heads}"
            f" ({self.kv_heads} KV), vocabulary {self.vocabulary}, context {self.context}, rope"
            f" {'; '.join(ropes)}"
            + " in a window" * (len(ropes) > 1)
            + (", tied embeddings" if self.tied_embeddings else "")
        )
        experts = (
            f"  experts: {self.experts} in a layer, {self.experts_per_token} for a token, which"
            f" meets {count_text(self.active_parameters)} parameters"
        )
        if not self.runnable:
            if self.run_by:
                sizes = f"  run by {self.run_by}"
            else:
                sizes = "  known by its tensors only: not run here"
        lines = [
            (
                f"{self.path}: {self.format}, {self.architecture}, {count_text(self.parameters)}"
                f" parameters, {self.weight_bytes / 1e6:.1f} MB, {self.bits_per_weight:.2f} bits"
                " per weight"
            ),
            sizes,
        ]
        if self.experts:
            lines.append(experts)
        lines.append(f"  tensors: {kinds}")
        if self.run_bytes:
            memory = RunMemory(
                self.run_bytes, self.cache_bytes_per_token, self.state_bytes_per_sequence
            )
            lines.append(f"  memory to run: {memory.text(self.context)}")
        # Without a decoder nothing uses the tokenizer.
        if self.runnable or self.run_by:
            lines.append(f"  tokenizer: {_describe_tokenizer(self.tokenizer)}")
        if cache:
            cache_line = cache_text(cache["scheme"], cache["layers"], self.layers)
            lines.append(f"  KV cache: {cache_line}")
        loads_in = f"  loads in: {', '.join(self.readers)}"
        if self.readers_note:
            loads_in += f"; {self.readers_note}"
        lines.append(loads_in)
        if made_by:
            lines.append(f"  made by: {_maker(**made_by)}")
        if self.schemes_chosen:
            lines.append(f"  schemes: {_describe_allocation(self.schemes_chosen)}")
        if self.positions is not None:
            for line in self.positions.lines():
                lines.append(f"  {line}")
        for note in self.notes:
            lines.append(Message("  note: ", note))
        return lines


def inspect(
    path: str | Path, *, weights: WeightKind | None = None, tensors_only: bool = False
) -> Inspection:
    """Look at a checkpoint without reading its weights.

    Args:
        path: a Meta or Hugging Face folder.
        weights: picks one of several sets of weights in the folder: ``meta``, ``safetensors``,
            ``bin``, ``gpt-fast`` or ``gpt-fast-int8``.
        tensors_only: take the tensors as they are, of whatever architecture; of a folder that was
            made so always.

    Returns:
        Architecture, sizes, float types and schemes, tokenizer, and who can load it.

    Raises:
        QuantkitError: of the kind that says what is wrong with it.

    Example:
        >>> print(*quantkit.inspect("model-int4").lines(), sep="\\n")
    """
    require_flags(tensors_only=tensors_only)
    path = as_path("path", path)
    checkpoint = _open_for_inspection(
        path, weights, tensors_only=tensors_only or was_written_tensors_only(path)
    )
    manifest = manifest_or_empty(checkpoint.path)
    run_by = manifest.get("run_by")
    # A model known by its tensors has no decoder here; its manifest tells what ran it.
    if not checkpoint.config.runnable and isinstance(run_by, str):
        checkpoint.config = replace(checkpoint.config, run_by=run_by)
    config = checkpoint.config
    tokenizer, notes = load_checked_tokenizer(checkpoint)
    if not config.runnable:
        family = text_family(checkpoint.extra_config)
        if family is not None:
            notes.append(
                f"{path}: generate, chat and bench run its text part as {family}, without images"
            )
    size, bits_per_weight = weight_size(checkpoint)
    # As the CPU kernels run it.
    run = keep_runnable_codes(checkpoint, runs_on_cpu)
    memory = _measure_run_memory(checkpoint, run)
    coded = with_codes(checkpoint)
    kinds = _count_kinds(checkpoint, coded, run)
    # Notes on weights that are read as floats are not true of one whose codes all run.
    runs_all_codes = not any(" as " in kind for kind in kinds)
    cache = checkpoint.kv_cache
    if cache is None:
        kv_cache = None
    else:
        kv_cache = {"scheme": cache.scheme, "layers": cache.layers_with_scales}
    readers, _, readers_note = checkpoint.readers().partition("; ")
    if config.experts is None:
        num_experts = 0
        experts_per_token = 0
    else:
        num_experts = config.experts.count
        experts_per_token = config.experts.per_token
    if manifest.get("positions") is None:
        positions = None
    else:
        positions = PositionCertificate.from_json(manifest["positions"], path)
    return Inspection(
        path=str(path),
        format=checkpoint.layout,
        architecture=config.architecture,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        vocabulary=config.vocab_size,
        context=config.max_context,
        rope=config.rope if config.runnable else None,
        window_rope=config.window_rope if config.runnable else None,
        tied_embeddings=config.tied_embeddings,
        experts=num_experts,
        experts_per_token=experts_per_token,
        parameters=parameter_count(checkpoint),
        active_parameters=active_parameter_count(checkpoint),
        weight_bytes=size,
        bits_per_weight=bits_per_weight,
        run_bytes=memory.weight_bytes,
        cache_bytes_per_token=memory.cache_bytes_per_token,
        state_bytes_per_sequence=memory.state_bytes,
        tensors=dict(kinds.most_common()),
        tokenizer=_read_tokenizer_facts(tokenizer),
        made_by=_read_maker(manifest),
        readers=readers.split(", "),
        readers_note=readers_note or None,
        notes=[*(coded.notes if runs_all_codes else checkpoint.notes), *notes],
        runnable=config.runnable,
        run_by=config.run_by,
        schemes_chosen=_read_allocation(manifest),
        kv_cache=kv_cache,
        positions=positions,
    )


def _measure_run_memory(checkpoint: StoredCheckpoint, run: Checkpoint) -> RunMemory:
    """State what a CPU takes to run a checkpoint that is read as `run`; zeros if nothing here runs
    it.
    """
    config = checkpoint.config
    if not config.measurable:
        return NOT_RUN
    if not config.runnable:
        return measure_by_transformers(checkpoint)
    dtype = DType(config.dtype)
    return RunMemory(
        count_weight_bytes(map(run.info, run.names()), dtype),
        count_cache_bytes_per_token(config, dtype),
        count_state_bytes(config),
    )


def _read_tokenizer_facts(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    return {name: getattr(tokenizer, name) for name in _OF_TOKENIZER}


def _read_maker(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Select the manifest's facts on what wrote the model; None without a manifest."""
    if not manifest:
        return None
    return {name: manifest[name] for name in _OF_MAKER if name in manifest}


def _open_for_inspection(
    path: Path, weights: WeightKind | None, *, tensors_only: bool
) -> StoredCheckpoint:
    try:
        return open_checkpoint(path, weights, tensors_only=tensors_only)
    except UnsupportedError:
        # This module imports torch, which takes longer than the whole inspection of a known family.
        from quantkit.via_transformers.forward import open_to_look_at

        checkpoint = open_to_look_at(path, weights)
        if checkpoint is None:
            raise
        return checkpoint


def _maker(quantkit_version: object = None, job: object = None, **how: object) -> str:
    """Describe in words what made a model."""
    words = [str(job)]
    for name, value in how.items():
        words.append(f"{name} {value}")
    return f"quantkit {quantkit_version} ({', '.join(words)})"


def _count_kinds(checkpoint: StoredCheckpoint, coded: Checkpoint, run: Checkpoint) -> Counter[str]:
    """Count the tensors by float type or scheme; weights of codes that run as floats by the codes
    and the type of the floats.

    Args:
        checkpoint: as its container reads it.
        coded: the same with all codes as such.
        run: the same as a CPU runs it.
    """
    kinds: Counter[str] = Counter()
    for name in checkpoint.names():
        spec = run.info(name)
        stored_as = checkpoint.info(name).stored_as or coded.info(name).scheme
        if spec.scheme is not None:
            kind = str(spec.scheme)
        elif stored_as is None:
            kind = str(spec.dtype)
        elif checkpoint.config.runnable:
            kind = f"{stored_as} as {spec.dtype}"
        else:
            # transformers runs all weights in float32, whatever they are.
            kind = str(stored_as)
        kinds[kind] += 1
    return kinds


def _rope_text(rope: RopeConfig) -> str:
    if rope.type == "default":
        return f"theta {rope.theta:g}"
    return f"theta {rope.theta:g}, {rope.type} x{rope.factor:g}"


def _describe_tokenizer(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none"
    return "{kind}, {vocab_size} tokens, BOS {bos_id}".format(**tokenizer)


def _read_allocation(manifest: dict[str, Any]) -> dict[str, Any] | None:
    allocation = manifest.get("bit_allocation")
    if not isinstance(allocation, dict):
        return None
    # `_describe_allocation` unpacks the values in this order.
    return {key: allocation.get(key) for key in ("target_bits", "max_size", "estimated_kl")}


def _describe_allocation(allocation: dict[str, Any]) -> str:
    bits, size, kl = allocation.values()
    if isinstance(bits, float):
        requested = f"{bits:g} bits a weight"
    else:
        requested = f"at most {size} bytes of weights"
    return f"chosen for {requested}" + (f", estimated KL {kl:g}" if isinstance(kl, float) else "")
