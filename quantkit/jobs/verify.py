"""Prove that two checkpoints are the same model, or say how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from quantkit import manifest
from quantkit.config import ModelConfig
from quantkit.data.files import excerpt
from quantkit.errors import CheckpointError
from quantkit.formats.checkpoint import DTYPE_NAMES, Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import checked_tokenizer
from quantkit.jobs.gate import recheck
from quantkit.model.blockwise import Batch
from quantkit.naming import entries
from quantkit.progress import Progress, silent
from quantkit.qtensor import QuantTensor, float_rows, frobenius, row_chunks
from quantkit.quality import Divergence, divergence

_TEXT_TOKENS = 128
_RANDOM_TOKENS = 64
_WEIGHT_FILES = {".safetensors", ".pth", ".bin", ".gguf"}
_CONFIGS = {"config.json", "params.json", "model.safetensors.index.json"}


@dataclass(frozen=True)
class Bound:
    """What a difference may amount to: relative weight error and mean KL per token, in nats."""

    weight_error: float
    kl: float


BOUNDS = {
    "float16": Bound(2**-10, 1e-3),
    "bfloat16": Bound(2**-8, 1e-3),
    "int8": Bound(0.05, 0.01),
    "int4": Bound(0.5, 0.1),
}
"""By the coarser of two tensors' types. A float type's weight bound is its rounding."""


class Verdict(Enum):
    """What `verify` found; the value is the command's exit code."""

    SAME = 0
    WITHIN_BOUND = 10
    DIFFERENT = 11


@dataclass(frozen=True)
class TensorDifference:
    """How far one tensor is from its counterpart: Frobenius norms, and the largest element."""

    name: str
    relative_error: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        return self.relative_error <= self.bound

    @property
    def excess(self) -> float:
        """The error in units of its bound; infinite where none is allowed, or it is NaN."""
        if math.isnan(self.relative_error) or not self.bound:
            return math.inf
        return self.relative_error / self.bound


@dataclass(frozen=True)
class VerifyReport:
    """All that two checkpoints differ in.

    Attributes:
        verdict: same, within the scheme's bound, or different.
        problems: differences no bound allows: of configs, names, shapes, tokenizers.
        tensors: how many were compared.
        differing: those that are not bit-equal, worst first.
        probes: logits on text, on random tokens and on spread-out positions.
        kl_bound: the bound on each probe's mean KL.
    """

    verdict: Verdict
    problems: list[str]
    tensors: int
    differing: list[TensorDifference]
    probes: dict[str, Divergence]
    kl_bound: float

    def lines(self) -> list[str]:
        """The report for people."""
        out = [f"problem: {problem}" for problem in self.problems]
        out.append(f"tensors: {self.tensors - len(self.differing)} of {self.tensors} bit-equal")
        if self.differing:
            worst = self.differing[0]
            out.append(
                f"worst tensor: {worst.name}, relative error {worst.relative_error:.3g}"
                f" (bound {worst.bound:.3g}), largest difference {worst.largest:.3g}"
            )
        for name, probe in self.probes.items():
            out.append(
                f"logits on {name}: {probe.tokens} tokens, largest difference {probe.largest_logit_difference:.3g},"
                f" KL {probe.kl:.3g} (bound {self.kl_bound:.3g}), same top token {probe.top1_agreement:.2%}"
            )
        words = {
            Verdict.SAME: "the same model",
            Verdict.WITHIN_BOUND: "within the bound of the scheme",
            Verdict.DIFFERENT: "DIFFERENT",
        }
        return [*out, f"verdict: {words[self.verdict]}"]


def verify(a: str | Path, b: str | Path, *, progress: Progress = silent) -> VerifyReport:
    """Compare configs, tokenizers, names, shapes, dequantized tensors and logits.

    Logits are computed in float32, one block in memory at a time: on a text, on random
    tokens, and on positions spread up to the end of the context, where a rope scaling
    that was lost would show.

    Args:
        a: the reference.
        b: what is held against it.
        progress: told of every tensor and layer.

    Raises:
        QuantkitError: if either cannot be read.
    """
    reference, other = open_checkpoint(a), open_checkpoint(b)
    problems = _config_problems(reference.config, other.config)
    problems += _tokenizer_problems(reference, other)
    names = [e.name for e in entries(_untied(reference.config))]
    differing: list[TensorDifference] = []
    probes: dict[str, Divergence] = {}
    bound = BOUNDS["float16"].kl
    if not any(problem.startswith("config") for problem in problems):
        for index, name in enumerate(names):
            progress(index, len(names), name)
            difference, kl_bound = _compare(reference, other, name)
            bound = max(bound, kl_bound)
            if difference is not None:
                differing.append(difference)
        differing.sort(key=lambda difference: -difference.excess)
        batches = _probes(reference)
        values = divergence(reference, other, list(batches.values()), progress=progress)
        probes = dict(zip(batches, values, strict=True))
    verdict = _judge(problems, differing, probes, bound)
    return VerifyReport(verdict, problems, len(names), differing, probes, bound)


def verify_files(folder: str | Path, *, progress: Progress = silent) -> list[str]:
    """Hold a folder against its manifest: the sha256 of its files and, if it was quantized, its quality.

    Returns:
        What was found, for people.

    Raises:
        CheckpointError: if there is no manifest, a file is missing or changed, or one of weights or of the
            config was added; see also `recheck`.
        QualityError: see `recheck`.
    """
    folder = Path(folder)
    made = manifest.read(folder)
    listed = made["files"]
    for path in sorted(folder.iterdir()):
        if path.name not in listed and (path.suffix in _WEIGHT_FILES or path.name in _CONFIGS):
            raise CheckpointError(
                "the manifest does not list this file", path=path, hint="what is read must be what was written"
            )
    for name, expected in listed.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError("a file of the manifest is missing", path=path)
        found = manifest.file_sha256(path)
        if found != expected:
            raise CheckpointError(
                "the file is not what quantkit wrote", path=path, found=f"sha256 {found[:12]}", expected=expected[:12],
                hint="copy or make it again",
            )  # fmt: skip
    lines = [f"{folder}: all {len(listed)} files are as quantkit wrote them"]
    if made.get("job") == "quantize" or "quality" in made:
        lines += recheck(folder, made, progress=progress)
    return lines


def _untied(config: ModelConfig) -> ModelConfig:
    return replace(config, tied_embeddings=False)


def _config_problems(a: ModelConfig, b: ModelConfig) -> list[str]:
    differences = _untied(a).differences(replace(_untied(b), max_context=a.max_context))
    return [f"config differs in {difference}" for difference in differences]


def _tokenizer_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    first, second = checked_tokenizer(a)[0], checked_tokenizer(b)[0]
    if first is None or second is None:
        return []
    text = excerpt()[:2000]
    return [] if first.encode(text) == second.encode(text) else ["tokenizers differ on a sample text"]


def _load(checkpoint: Checkpoint, name: str) -> Tensor | QuantTensor:
    if name == "lm_head.weight" and checkpoint.config.tied_embeddings:
        name = "model.embed_tokens.weight"
    return checkpoint.load(name)


def _compare(a: Checkpoint, b: Checkpoint, name: str) -> tuple[TensorDifference | None, float]:
    """The difference of one tensor, None if bit-equal, and the KL bound its types allow."""
    first, second = _load(a, name), _load(b, name)
    bound = _bound_between(first, second)
    error = norm = largest = 0.0
    equal = True
    for x, y in _float_pieces(first, second):
        norm = math.hypot(norm, frobenius(x))
        if torch.equal(x, y):
            continue
        equal = False
        difference = y - x
        largest = _larger(largest, difference.abs().max().item())
        error = math.hypot(error, frobenius(difference))
    if equal:
        return None, bound.kl
    relative = error / norm if norm else math.inf
    return TensorDifference(name, relative, largest, bound.weight_error), bound.kl


def _bound_between(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> Bound:
    """That of the coarser type; none at all between equal float types, where nothing is rounded."""
    names = [f"int{v.scheme.bits}" if isinstance(v, QuantTensor) else DTYPE_NAMES[v.dtype] for v in (a, b)]
    bounds = [BOUNDS[name] for name in names if name in BOUNDS]
    if not bounds or (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype):
        return Bound(0.0, BOUNDS["float16"].kl)
    return max(bounds, key=lambda bound: bound.weight_error)


def _float_pieces(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows, columns = a.shape[0], math.prod(a.shape[1:])
    for start, stop in row_chunks(rows, columns):
        yield float_rows(a, start, stop), float_rows(b, start, stop)


def _larger(a: float, b: float) -> float:
    return b if math.isnan(b) else max(a, b)


def _probes(checkpoint: Checkpoint) -> dict[str, Batch]:
    """What the logits are compared on; fixed, so that reports can be repeated."""
    config = checkpoint.config
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        return torch.randint(config.vocab_size, (1, count), generator=generator)

    probes = {}
    tokenizer, _ = checked_tokenizer(checkpoint)
    if tokenizer is not None:
        ids = tokenizer.encode(excerpt())[: min(_TEXT_TOKENS, config.max_context)]
        probes["text"] = Batch.from_start(torch.tensor([ids]))
    probes["random tokens"] = Batch.from_start(random(min(_RANDOM_TOKENS, config.max_context)))
    reach = config.max_context * (max(config.rope.factor, 1.0) if config.rope.type == "dynamic" else 1)
    count = min(_RANDOM_TOKENS, config.max_context)
    probes["spread positions"] = Batch(random(count), torch.linspace(0, int(reach) - 1, count).long())
    return probes


def _judge(
    problems: list[str], differing: list[TensorDifference], probes: dict[str, Divergence], kl_bound: float
) -> Verdict:
    logits_equal = all(probe.largest_logit_difference == 0 for probe in probes.values())
    if not problems and not differing and logits_equal:
        return Verdict.SAME
    if problems or not all(d.within for d in differing):
        return Verdict.DIFFERENT
    if not all(probe.kl <= kl_bound for probe in probes.values()):
        return Verdict.DIFFERENT
    return Verdict.WITHIN_BOUND
