"""Prove that two checkpoints are the same model, or measure their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.base.arguments import as_path, require_flags, wrong_type
from quantkit.base.json_values import format_value
from quantkit.base.progress import Progress, in_phase, skip_repeated_reports
from quantkit.data.files import gate_texts
from quantkit.errors import CheckpointError, QualityError, RequestError, UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name, schemes
from quantkit.formats.container import describe_format
from quantkit.formats.detect import with_codes
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.formats.kv_scales import layer_scales
from quantkit.formats.registry import CONTAINERS
from quantkit.model.layerwise import Batch
from quantkit.quality.bounds import (
    BOUNDS,
    Bound,
    build_gate_windows,
    coarser,
    coarsest,
    exceeds,
    with_inputs,
)
from quantkit.quality.changed_tensors import Change, read_changes, tensor_hash
from quantkit.quality.compared_settings import find_setting_differences
from quantkit.quality.figures import Estimate, manifest_or_empty, read_module_records
from quantkit.quality.manifest_check import (
    FolderReport,
    describe_certificate_failure,
    neither_true_nor_false,
    read_input_roundings,
    verify_model,
)
from quantkit.quality.measures import Divergence, compare_batches
from quantkit.quality.transcoded import TensorDifference, tensor_difference
from quantkit.quality.weights_only import (
    COMPARED,
    error_problem,
    read_weight_errors,
    summary_problems,
)
from quantkit.runtime.generation_config import end_tokens
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import ROUNDED, QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.text.chat_template import ChatTemplates
from quantkit.text.compare import first_difference
from quantkit.text.special_tokens import tokens_of_config_alone
from quantkit.via_transformers.forward import open_pair_to_compare, run_by_transformers, why_not_run

_RANDOM_TOKENS = 64


class _NotGiven(Enum):
    """Stands for an omitted argument, since None is refused."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "<not given>"


class Verdict(Enum):
    """The result of `verify`; the value is the exit code of the command if equality is asked for.
    Otherwise, `SAME` and `WITHIN_BOUND` are both success.
    """

    SAME = 0
    WITHIN_BOUND = 10
    DIFFERENT = 11
    BEYOND_CERTIFICATE = QualityError.exit_code


_VERDICTS = {
    Verdict.SAME: "the same model",
    Verdict.WITHIN_BOUND: "within the bound of the scheme",
    Verdict.DIFFERENT: "DIFFERENT",
    Verdict.BEYOND_CERTIFICATE: "BEYOND THE BOUND of a certificate for long contexts",
}


@dataclass(frozen=True)
class Probe:
    """The difference of the logits on some tokens, and its bound.

    Attributes:
        divergence: of the logits.
        perplexity_ratio: perplexity of the changed model over that of its reference; None for
            random tokens.
        ratio_error: its standard error; None for too few tokens.
        bound: on KL and, for texts, on that ratio; None if any finite figures are allowed.
        within: whether the figures are within the bound.
    """

    divergence: Divergence
    perplexity_ratio: float | None
    ratio_error: float | None
    bound: Bound | None
    within: bool

    def line(self, name: str) -> str:
        """Describe the probe in a line, with the name of its tokens."""
        divergence = self.divergence
        ratio = self.perplexity_ratio
        if divergence.largest_logit_difference == 0:
            return f"{name}: equal"
        line = f"{name}: KL {Estimate(divergence.kl, divergence.kl_error)}"
        if ratio is not None:
            line += f", perplexity x {Estimate(ratio, self.ratio_error)}"
        line += (
            f", same top token {divergence.top1_agreement:.1%}, largest difference"
            f" {divergence.largest_logit_difference:.3g}"
        )
        if self.within:
            return line
        return f"{line}; beyond the bound"


@dataclass(frozen=True)
class VerifyReport:
    """All differences of two checkpoints. It is neither true nor false: use `is_same` or `ok`.

    Attributes:
        verdict: same, within the scheme's bound, different; or beyond the bound of a certificate
            for long contexts.
        problems: differences no bound allows: of configs, end tokens, names, shapes, tokenizers.
        settings: differences of sampling settings and of the tokenizer's flags, which no bound
            allows either.
        formats: of the two, with the schemes of their quantized tensors.
        tensors: how many were compared; none, and no logits, where the configs differ.
        on_codes: how many of them are quantized in both, and were compared as exact numbers.
        differing: those that are not equal, worst first.
        probes: logits on the texts of the gate, on random tokens and on spread-out positions.
        bound: on the probes: on all between float types, on the gate's where a model is quantized.
        kv_cache: the one of the two that alone has scales or a scheme of a quantized key/value
            cache, and the other; the weights may be the same nevertheless. Scales that differ are a
            problem.
        run_by: what ran the models, such as ``transformers 5.23.0``; None for our decoder, and if
            nothing did.
        not_run: of models known by their tensors only, why transformers did not run them.
        weights_only: whether the models were not run, so that there are no probes.
        not_certified: of models that were kept though they did not pass their certificate for long
            contexts, why.
    """

    verdict: Verdict
    problems: list[str]
    formats: tuple[str, str]
    tensors: int
    on_codes: int
    differing: list[TensorDifference]
    probes: dict[str, Probe]
    bound: Bound
    weights_only: bool = False
    not_certified: list[str] = field(default_factory=list)
    kv_cache: tuple[Path, Path] | None = None
    run_by: str | None = None
    not_run: str | None = None
    settings: list[str] = field(default_factory=list)

    __bool__ = neither_true_nor_false

    @property
    def is_same(self) -> bool:
        """Return whether the two are the same model: all tensors and all logits are equal, and no
        certificate was failed.
        """
        return self.verdict is Verdict.SAME

    @property
    def only_settings_differ(self) -> bool:
        """Return whether the two are different by their settings alone: `settings` lists them."""
        if not self.settings or self.problems:
            return False
        return _are_within(self.differing, self.probes)

    @property
    def ok(self) -> bool:
        """Return whether the two are the same model, or differ by no more than the change of type
        between them explains.
        """
        return self.verdict in (Verdict.SAME, Verdict.WITHIN_BOUND)

    def to_json(self) -> dict[str, Any]:
        """Return everything found; the verdict in lower case."""
        kv_cache = None
        if self.kv_cache is not None:
            has, lacks = self.kv_cache
            kv_cache = {"has": str(has), "lacks": str(lacks)}
        differing: list[dict[str, Any]] = []
        for difference in self.differing:
            differing.append({**asdict(difference), "within": difference.within})
        return {
            "verdict": self.verdict.name.lower(),
            "same": self.is_same,
            "ok": self.ok,
            "problems": self.problems,
            "settings": self.settings,
            "only_settings_differ": self.only_settings_differ,
            "not_certified": self.not_certified,
            "formats": list(self.formats),
            "tensors": self.tensors,
            "on_codes": self.on_codes,
            "differing": differing,
            "probes": {name: asdict(probe) for name, probe in self.probes.items()},
            "bound": asdict(self.bound),
            "weights_only": self.weights_only,
            "run_by": self.run_by,
            "not_run": self.not_run,
            "kv_cache": kv_cache,
        }

    def lines(self) -> list[str]:
        """Format the report as lines of text."""
        out = []
        for problem in [*self.problems, *self.settings, *self.not_certified]:
            out.append(f"problem: {problem}")
        equal = f"{self.tensors - len(self.differing)} of {self.tensors} bit-equal"
        if self.on_codes:
            equal = (
                f"{equal.removesuffix('bit-equal')}equal, {self.on_codes} of them compared on their"
                " codes"
            )
        # Two float models need no line on their formats.
        if any("int" in format_ for format_ in self.formats):
            out.append(f"formats: {' and '.join(self.formats)}")
        out.append(f"tensors: {equal if self.tensors else 'not compared, the configs differ'}")
        if self.differing:
            worst = self.differing[0]
            if worst.bound:
                allowed = f"at most {worst.bound:.3g}"
            else:
                allowed = "none is allowed"
            error = f"relative error {worst.relative_error:.3g} ({allowed})"
            out.append(
                f"worst tensor: {worst.name}, {error}, largest difference {worst.largest:.3g}"
            )
        if self.kv_cache is not None:
            has, lacks = self.kv_cache
            out.append(
                f"KV cache: {has} has scales or a scheme of a quantized KV cache, {lacks} has none"
            )
        if self.weights_only:
            out.append(COMPARED + (f": {self.not_run}" if self.not_run else ""))
        elif self.probes:
            if all(probe.bound for probe in self.probes.values()):
                scope = ""
            else:
                scope = " on texts"
            bounds = (
                f"at most {self.bound.kl:g}{scope}; perplexity at most x"
                f" {self.bound.perplexity_ratio:g}"
            )
            if self.run_by is None:
                logits = "logits"
            else:
                logits = f"logits, run by {self.run_by}"
            if _do_logits_differ(self.probes):
                out.append(f"{logits}: KL in nats a token, {bounds}")
                for name, probe in self.probes.items():
                    out.append(f"  {probe.line(name)}")
            else:
                out.append(f"{logits}: equal")
        verdict = _VERDICTS[self.verdict]
        if self.only_settings_differ:
            verdict += " in settings only: tokens, tensors and logits are the same model's"
        return [*out, f"verdict: {verdict}"]


def _are_within(differing: Sequence[TensorDifference], probes: Mapping[str, Probe]) -> bool:
    """Return whether all tensors and all logits are within their bounds."""
    if not all(difference.within for difference in differing):
        return False
    return all(probe.within for probe in probes.values())


def _do_logits_differ(probes: Mapping[str, Probe]) -> bool:
    # NaN, which is true, counts as a difference.
    return any(probe.divergence.largest_logit_difference for probe in probes.values())


@overload
def verify(
    a: str | Path, *, trust_remote_code: bool = False, progress: Progress | None = None
) -> FolderReport: ...


@overload
def verify(
    a: str | Path,
    b: str | Path,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> VerifyReport: ...


def verify(
    a: str | Path,
    b: str | Path | _NotGiven = _NotGiven.NOT_GIVEN,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> VerifyReport | FolderReport:
    """Report whether two models are the same, or how much they differ; or whether one model is as
    quantkit made it.

    Two models: configs, end tokens, tokenizers, sampling settings, names, shapes, dequantized
    tensors and logits are compared. Tensors that are quantized in both are compared on their codes,
    scales and zero points, as exact numbers, whatever the formats. Logits are computed in float32,
    one block in memory at a time: on the texts of the gate, on random tokens, and on positions
    spread up to the end of the context, where a lost rope scaling would show. If one model is
    quantized and the other has floats, the floats are the reference, in either order; errors are
    relative to the reference, and KL is from it.

    One model: its files are compared with the sha256 in its manifest, and a quantized model with
    the perplexities there.

    Args:
        a, b: the models; for one alone `b` is left out, and None is refused.
        trust_remote_code: where transformers runs the models, run the code in their folders that
            config.json's ``auto_map`` names.
        progress: called for every tensor and layer; None shows nothing.

    Returns:
        A report with `is_same`, `ok`, `lines()` and `to_json()`: a `VerifyReport` of two models, a
        `FolderReport` of one.

    Raises:
        CheckpointError: if a single model has no manifest, or its files are not those that quantkit
            wrote.
        RequestError: if a path is None or empty.
        QualityError: if a single model's perplexity is not what its manifest says, or it was too
            far from its source when it was made.
        QuantkitError: if a folder cannot be read.
    """
    require_flags(trust_remote_code=trust_remote_code)
    first = as_path("a", a)
    progress = skip_repeated_reports(progress)
    if b is None:
        raise wrong_type("b", b, "a path", hint="leave it out to check one model alone")
    if isinstance(b, _NotGiven):
        return verify_model(first, trust_remote_code=trust_remote_code, progress=progress)
    return _verify_pair(first, as_path("b", b), progress, trust_remote_code=trust_remote_code)


def _verify_pair(a: Path, b: Path, progress: Progress, *, trust_remote_code: bool) -> VerifyReport:
    reference, other = map(with_codes, open_pair_to_compare(a, b))
    formats = describe_format(reference), describe_format(other)
    not_certified: list[str] = []
    for model in (reference, other):
        failure = describe_certificate_failure(model.path)
        if failure is not None:
            not_certified.append(failure)
    # A tied head may be stored separately in one of the two.
    reference_config = replace(reference.config, tied_embeddings=False)
    other_config = replace(other.config, tied_embeddings=False)
    problems: list[str] = []
    for difference in reference_config.differences(other_config):
        problems.append(f"the configs differ: {difference}")
    comparable = not problems
    runnable = reference.config.runnable
    kv_cache = None
    if reference.kv_cache is not None and other.kv_cache is not None:
        cache_difference = reference.kv_cache.difference(other.kv_cache)
        if cache_difference is not None:
            problems.append(cache_difference)
    elif reference.kv_cache is not None or other.kv_cache is not None:
        paths = reference.path, other.path
        if other.kv_cache is None:
            kv_cache = paths
        else:
            kv_cache = paths[::-1]
    if runnable:
        problems += _token_problems(reference, other)
    else:
        problems += [*summary_problems(reference), *summary_problems(other)]
    # Only a model that is not run needs the errors in its manifest: logits judge the others.
    reference_errors: dict[str, float] = {}
    other_errors: dict[str, float] = {}
    if not runnable:
        reference_errors = read_weight_errors(reference)
        other_errors = read_weight_errors(other)
    # The source comes first. Of two quantized models it is the one without errors of weights.
    if schemes(other):
        is_swapped = bool(reference_errors) and not other_errors
    else:
        is_swapped = bool(schemes(reference))
    if is_swapped:
        reference, other = other, reference
    names: list[str] = []
    if comparable:
        names = [parameter.name for parameter in parameters(reference_config)]
    differing: list[TensorDifference] = []
    bound = BOUNDS["float16"]
    # One of the two models is run with its cache in 8 bits.
    if kv_cache is not None and (layer_scales(reference) or layer_scales(other)):
        bound = BOUNDS["int8"]
    # Errors of two quantized models are relative to their sources, not to each other.
    if reference_errors and other_errors:
        recorded_errors = {}
    else:
        recorded_errors = reference_errors or other_errors
    compensated = {**_find_compensated_schemes(reference), **_find_compensated_schemes(other)}
    refined = read_changes(reference.path), read_changes(other.path)
    if comparable:
        on_codes = len(schemes(reference).keys() & schemes(other).keys())
    else:
        on_codes = 0
    for index, name in enumerate(names):
        progress("tensors", index, len(names), "tensors")
        first = reference.load(resolve_stored_name(reference, name))
        second = other.load(resolve_stored_name(other, name))
        tensor, allowed = tensor_difference(
            name,
            first,
            second,
            compensated.get(name.removesuffix(".weight")),
            config=reference.config,
            dtypes=[DType(reference.config.dtype), DType(other.config.dtype)],
        )
        problems += _find_refining_problems(name, first, second, refined)
        if tensor is None:
            continue
        if _is_refined(name, first, second, refined):
            # Refining changes a tensor by any amount, and logits judge the result.
            tensor = replace(tensor, bound=max(tensor.bound, tensor.relative_error))
        differing.append(tensor)
        bound = coarser((bound, allowed))
        problem = error_problem(name, tensor.relative_error, recorded_errors.get(name))
        if problem is not None:
            problems.append(problem)
    # The gate adds these bounds too, so that what it lets through is not different here.
    if differing:
        for model in (reference, other):
            rounded_inputs = read_input_roundings(manifest_or_empty(model.path), model, model.path)
            bound = with_inputs(bound, rounded_inputs.values())
    differing.sort(key=lambda difference: -difference.excess)
    probes: dict[str, Probe] = {}
    not_run = None
    if comparable and not runnable:
        try:
            reference_run = run_by_transformers(reference, trust_remote_code=trust_remote_code)
            other_run = run_by_transformers(other, trust_remote_code=trust_remote_code)
            reference = reference_run
            other = other_run
            problems += _token_problems(reference, other)
            probes = _probe_logits(reference, other, bound, progress)
        except (RequestError, CheckpointError, UnsupportedError) as error:
            not_run = why_not_run(error)
    elif comparable:
        probes = _probe_logits(reference, other, bound, progress)
    settings = find_setting_differences(reference, other)
    if problems or settings or not _are_within(differing, probes):
        verdict = Verdict.DIFFERENT
    elif not_certified:
        verdict = Verdict.BEYOND_CERTIFICATE
    elif differing or _do_logits_differ(probes):
        verdict = Verdict.WITHIN_BOUND
    else:
        verdict = Verdict.SAME
    return VerifyReport(
        verdict=verdict,
        problems=problems,
        formats=formats,
        tensors=len(names),
        on_codes=on_codes,
        differing=differing,
        probes=probes,
        bound=bound,
        weights_only=not runnable and not probes,
        not_certified=not_certified,
        kv_cache=kv_cache,
        run_by=reference.config.run_by if probes else None,
        not_run=not_run,
        settings=settings,
    )


def _token_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Find where the two would tokenize a text or a conversation differently, or end a generation
    at other tokens.
    """
    problems: list[str] = []
    # A Meta folder does not state its tokens.
    a_states_tokens = CONTAINERS[a.format].states_tokens
    b_states_tokens = CONTAINERS[b.format].states_tokens
    both_state_tokens = a_states_tokens and b_states_tokens
    begin_a = _begin_tokens(a)
    begin_b = _begin_tokens(b)
    # Of a Meta folder the end tokens are those of its tokenizer, which may be more or fewer than a
    # model uses.
    end_a = set(end_tokens(a.path, a.config))
    end_b = set(end_tokens(b.path, b.config))
    for verb, tokens_a, tokens_b in (("begin", begin_a, begin_b), ("end", end_a, end_b)):
        if both_state_tokens:
            agree = tokens_a == tokens_b
        else:
            agree = tokens_a <= tokens_b or tokens_b <= tokens_a
        if not agree:
            first = ", ".join(map(str, sorted(tokens_a))) or "none"
            second = ", ".join(map(str, sorted(tokens_b))) or "none"
            problems.append(f"the tokens that {verb} a text differ: {first} against {second}")
    tokenizer_a = load_checked_tokenizer(a)[0]
    tokenizer_b = load_checked_tokenizer(b)[0]
    if tokenizer_a is None or tokenizer_b is None:
        if tokenizer_a is not tokenizer_b:
            problems.append(f"{(a if tokenizer_a is None else b).path} has no tokenizer")
    else:
        difference = first_difference(tokenizer_a, tokenizer_b, gate_texts().values())
        if difference is not None:
            problems.append(f"tokenizers differ on {difference}")
        problems += _config_token_problems(a, b)
    templates_a = ChatTemplates(a.path).sources
    templates_b = ChatTemplates(b.path).sources
    # Templates of a format that states none are not compared.
    if not templates_a and templates_b:
        if a_states_tokens:
            problems.append(f"{a.path} has no chat template, the other has")
        return problems
    if not templates_b and templates_a:
        if b_states_tokens:
            problems.append(f"{b.path} has no chat template, the other has")
        return problems
    differing: list[str] = []
    for name in sorted({*templates_a, *templates_b}):
        if templates_a.get(name) != templates_b.get(name):
            differing.append(name)
    if differing:
        problems.append(f"the chat templates differ: {', '.join(differing)}")
    return problems


def _begin_tokens(checkpoint: Checkpoint) -> set[int]:
    token = checkpoint.config.bos_token_id
    if token is None:
        return set()
    return {token}


def _config_token_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Compare the tokens that only tokenizer_config.json states, up to the first difference."""
    # Some readers of tokenizer.json ignore tokenizer_config.json.
    for folder in (a, b):
        if not (folder.path / "tokenizer.json").is_file():
            return []
    tokens_a = tokens_of_config_alone(a.path)
    tokens_b = tokens_of_config_alone(b.path)
    for key in sorted({*tokens_a, *tokens_b}):
        if tokens_a.get(key) != tokens_b.get(key):
            values = f"{format_value(tokens_a.get(key))} against {format_value(tokens_b.get(key))}"
            return [f"tokenizer_config.json differs: {key} {values}"]
    return []


def _find_compensated_schemes(checkpoint: Checkpoint) -> dict[str, QuantScheme]:
    """Find for each quantized module the coarsest scheme whose losses its weight may compensate:
    its own if the manifest says that it was rounded, else that of any module.
    """
    assigned = schemes(checkpoint)
    if not assigned:
        return {}
    records = read_module_records(manifest_or_empty(checkpoint.path))
    rounded = set()
    for module, record in records.items():
        if record.get("solver") in ROUNDED:
            rounded.add(module)
    worst = coarsest(assigned.values())
    result: dict[str, QuantScheme] = {}
    for module, scheme in assigned.items():
        result[module] = scheme if module in rounded else worst
    return result


def _find_refining_problems(
    name: str,
    first: Tensor | QuantTensor,
    second: Tensor | QuantTensor,
    recorded: tuple[Mapping[str, Change], ...],
) -> list[str]:
    """Compare a tensor that a manifest lists as refined with the values that were written."""
    for value, changes in zip((first, second), recorded, strict=True):
        change = changes.get(name)
        if change is not None and tensor_hash(value) != change.after:
            return [f"tensor '{name}' is not as refining wrote it"]
    return []


def _is_refined(
    name: str,
    first: Tensor | QuantTensor,
    second: Tensor | QuantTensor,
    recorded: tuple[Mapping[str, Change], ...],
) -> bool:
    """Return whether one of two tensors is the other one as refining has changed it, so that the
    logits judge it: a norm of the model that it was refined against, or a quantized weight. Its
    values must be those that were written.
    """
    for refined, other, changes in ((first, second, recorded[0]), (second, first, recorded[1])):
        change = changes.get(name)
        if change is not None and tensor_hash(refined) == change.after:
            # The other model need not have the codes from before a quantized weight was refined.
            return isinstance(refined, QuantTensor) or tensor_hash(other) == change.before
    return False


def _probe_logits(
    reference: Checkpoint, other: Checkpoint, bound: Bound, progress: Progress
) -> dict[str, Probe]:
    """Compare the logits with the bound.

    Quantized models are not made for random tokens and far positions: there the figures are shown,
    and only between float types they have a bound.
    """
    texts: dict[str, Batch] = {}
    for name, (_, windows) in build_gate_windows(reference).items():
        texts[name] = Batch.from_start(windows)
    batches = {**texts, **_build_probe_batches(reference)}
    # All batches in one pass, so that each weight is read once.
    qualities = compare_batches(
        reference, other, list(batches.values()), progress=in_phase(progress, "logits")
    )
    strict = not (schemes(reference) or schemes(other))
    probes: dict[str, Probe] = {}
    for name, quality in zip(batches, qualities, strict=True):
        divergence = quality.divergence
        if name in texts:
            ratio = quality.perplexity / quality.reference_perplexity
            is_within = not exceeds(quality, bound)
            probes[name] = Probe(
                divergence=divergence,
                perplexity_ratio=ratio,
                ratio_error=quality.ratio_error,
                bound=bound,
                within=is_within,
            )
        elif strict:
            probes[name] = Probe(
                divergence=divergence,
                perplexity_ratio=None,
                ratio_error=None,
                bound=bound,
                within=divergence.kl <= bound.kl,
            )
        else:
            probes[name] = Probe(
                divergence=divergence,
                perplexity_ratio=None,
                ratio_error=None,
                bound=None,
                within=math.isfinite(divergence.kl),
            )
    return probes


def _build_probe_batches(checkpoint: Checkpoint) -> dict[str, Batch]:
    """Choose fixed tokens on which logits are compared in addition to those of texts: random ones,
    and for models that quantkit runs, some at positions spread over the context.
    """
    config = checkpoint.config
    generator = torch.Generator().manual_seed(1)
    count = min(_RANDOM_TOKENS, config.max_context)
    random_tokens = torch.randint(config.vocab_size, (1, count), generator=generator)
    result = {"other random tokens": Batch.from_start(random_tokens)}
    if config.runnable:
        spread_tokens = torch.randint(config.vocab_size, (1, count), generator=generator)
        # A lost rope scaling shows only at late positions.
        positions = torch.linspace(0, config.max_positions - 1, count).long()
        result["positions spread over the context"] = Batch(spread_tokens, positions)
    return result
