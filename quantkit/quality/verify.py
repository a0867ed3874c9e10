"""Prove that two checkpoints are the same model, or measure their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from quantkit.quality.transcoded import TensorDifference, offset_of, tensor_difference
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
        """Return the probe as text, with the name of its tokens."""
        found = self.divergence
        ratio = self.perplexity_ratio
        if found.largest_logit_difference == 0:
            return f"{name}: equal"
        line = f"{name}: KL {Estimate(found.kl, found.kl_error)}"
        if ratio is None:
            line += ""
        else:
            line += f", perplexity x {Estimate(ratio, self.ratio_error)}"
        line += (
            f", same top token {found.top1_agreement:.1%}, largest difference"
            f" {found.largest_logit_difference:.3g}"
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
        within = all(difference.within for difference in self.differing)
        within = within and all(probe.within for probe in self.probes.values())
        return bool(self.settings) and not self.problems and within

    @property
    def ok(self) -> bool:
        """Return whether the two are the same model, or differ by no more than the change of type
        between them explains.
        """
        return self.verdict in (Verdict.SAME, Verdict.WITHIN_BOUND)

    def to_json(self) -> dict[str, Any]:
        """Everything found; the verdict in lower case."""
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
            "differing": [{**asdict(one), "within": one.within} for one in self.differing],
            "probes": {name: asdict(probe) for name, probe in self.probes.items()},
            "bound": asdict(self.bound),
            "weights_only": self.weights_only,
            "run_by": self.run_by,
            "not_run": self.not_run,
            "kv_cache": (
                self.kv_cache and dict(zip(("has", "lacks"), map(str, self.kv_cache), strict=True))
            ),
        }

    def lines(self) -> list[str]:
        """Return the report as text."""
        out = []
        for problem in [*self.problems, *self.settings, *self.not_certified]:
            out.append(f"problem: {problem}")
        equal = f"{self.tensors - len(self.differing)} of {self.tensors} bit-equal"
        if self.on_codes:
            equal = (
                f"{equal.removesuffix('bit-equal')}equal, {self.on_codes} of them compared on their"
                " codes"
            )
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
                where = ""
            else:
                where = " on texts"
            bounds = (
                f"at most {self.bound.kl:g}{where}; perplexity at most x"
                f" {self.bound.perplexity_ratio:g}"
            )
            of_probes = [f"  {probe.line(name)}" for name, probe in self.probes.items()]
            differ = any(
                probe.divergence.largest_logit_difference for probe in self.probes.values()
            )
            if self.run_by is None:
                logits = "logits"
            else:
                logits = f"logits, run by {self.run_by}"
            if differ:
                out += [f"{logits}: KL in nats a token, {bounds}", *of_probes]
            else:
                out += [f"{logits}: equal"]
        verdict = _VERDICTS[self.verdict]
        if self.only_settings_differ:
            verdict += " in settings only: tokens, tensors and logits are the same model's"
        return [*out, f"verdict: {verdict}"]


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
    not_certified = [
        why
        for one in (reference, other)
        if (why := describe_certificate_failure(one.path)) is not None
    ]
    # a tied head may be separate
    configs = []
    for one in (reference, other):
        configs.append(replace(one.config, tied_embeddings=False))
    problems = [
        f"the configs differ: {difference}" for difference in configs[0].differences(configs[1])
    ]
    comparable = not problems
    runnable = reference.config.runnable
    kv_cache = None
    if reference.kv_cache is not None and other.kv_cache is not None:
        if (found := reference.kv_cache.difference(other.kv_cache)) is not None:
            problems += [found]
        else:
            problems += []
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
    records = []
    for one in (reference, other):
        records.append({} if runnable else read_weight_errors(one))
    if bool(schemes(reference)) > bool(schemes(other)) or (
        schemes(other) and bool(records[0]) > bool(records[1])
    ):
        # The source comes first, which may be quantized itself.
        reference, other = other, reference
    if comparable:
        names = [parameter.name for parameter in parameters(configs[0])]
    else:
        names = []
    differing: list[TensorDifference] = []
    bound = BOUNDS["float16"]
    if kv_cache is not None and any(layer_scales(one) for one in (reference, other)):
        bound = BOUNDS["int8"]  # of the cache, which one of them is run with
    if all(records):
        recorded = {}
    else:
        recorded = records[0] or records[1]
    compensated = {**_find_compensated_schemes(reference), **_find_compensated_schemes(other)}
    refined = read_changes(reference.path), read_changes(other.path)
    if comparable:
        on_codes = len(schemes(reference).keys() & schemes(other).keys())
    else:
        on_codes = 0
    for index, name in enumerate(names):
        progress("tensors", index, len(names), "tensors")
        first, second = (one.load(resolve_stored_name(one, name)) for one in (reference, other))
        difference, allowed = tensor_difference(
            name,
            first,
            second,
            compensated.get(name.removesuffix(".weight")),
            norm_offset=offset_of(reference.config, name),
            dtypes=[DType(model.config.dtype) for model in (reference, other)],
        )
        problems += _not_as_refined(name, first, second, refined)
        if difference is not None and _is_refined(name, first, second, refined):
            difference = replace(difference, bound=max(difference.bound, difference.relative_error))
        if difference is not None:
            differing.append(difference)
            bound = coarser((bound, allowed))
            found = error_problem(name, difference.relative_error, recorded.get(name))
            problems += [] if found is None else [found]
    if differing:  # as in the gate, so that what it lets through is not different
        for model in (reference, other):
            rounded_inputs = read_input_roundings(manifest_or_empty(model.path), model, model.path)
            bound = with_inputs(bound, rounded_inputs.values())
    differing.sort(key=lambda difference: -difference.excess)
    probes: dict[str, Probe] = {}
    not_run = None
    if comparable and not runnable:
        try:
            reference, other = (
                run_by_transformers(one, trust_remote_code=trust_remote_code)
                for one in (reference, other)
            )
            problems += _token_problems(reference, other)
            probes = _probe_logits(reference, other, bound, progress)
        except (RequestError, CheckpointError, UnsupportedError) as error:
            not_run = why_not_run(error)
    elif comparable:
        probes = _probe_logits(reference, other, bound, progress)
    settings = find_setting_differences(reference, other)
    is_within = all(difference.within for difference in differing) and all(
        probe.within for probe in probes.values()
    )
    if problems or settings or not is_within:
        verdict = Verdict.DIFFERENT
    elif not_certified:
        verdict = Verdict.BEYOND_CERTIFICATE
    elif differing or any(probe.divergence.largest_logit_difference for probe in probes.values()):
        verdict = Verdict.WITHIN_BOUND
    else:
        verdict = Verdict.SAME
    return VerifyReport(
        verdict,
        problems,
        formats,
        len(names),
        on_codes,
        differing,
        probes,
        bound,
        not runnable and not probes,
        not_certified,
        kv_cache,
        reference.config.run_by if probes else None,
        not_run,
        settings,
    )


def _token_problems(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return where the two would tokenize a text or a conversation differently, or end a generation
    at other tokens.
    """
    problems = []
    # A Meta folder does not.
    states_tokens = [CONTAINERS[one.format].states_tokens for one in (a, b)]
    begin = [{token for token in (one.config.bos_token_id,) if token is not None} for one in (a, b)]
    # Of a Meta folder the end tokens are those of its tokenizer, which may be more or fewer than a
    # model uses.
    end = [set(end_tokens(one.path, one.config)) for one in (a, b)]
    for what, (own, others) in (("begin", begin), ("end", end)):
        if not (own == others if all(states_tokens) else own <= others or others <= own):
            first, second = (", ".join(map(str, sorted(one))) or "none" for one in (own, others))
            problems.append(f"the tokens that {what} a text differ: {first} against {second}")
    one = load_checked_tokenizer(a)[0]
    other = load_checked_tokenizer(b)[0]
    if one is None or other is None:
        if one is not other:
            problems.append(f"{(a if one is None else b).path} has no tokenizer")
    else:
        difference = first_difference(one, other, gate_texts().values())
        if difference is not None:
            problems.append(f"tokenizers differ on {difference}")
        if all((folder.path / "tokenizer.json").is_file() for folder in (a, b)):
            # Some readers of tokenizer.json ignore tokenizer_config.json.
            stated = tokens_of_config_alone(a.path)
            by_other = tokens_of_config_alone(b.path)
            if keys := sorted(
                key for key in {*stated, *by_other} if stated.get(key) != by_other.get(key)
            ):
                values = (
                    f"{format_value(stated.get(keys[0]))} against"
                    f" {format_value(by_other.get(keys[0]))}"
                )
                problems.append(f"tokenizer_config.json differs: {keys[0]} {values}")
    templates = [ChatTemplates(one.path).sources for one in (a, b)]
    for folder, stated_here, own_templates in zip((a, b), states_tokens, templates, strict=True):
        if not own_templates and any(templates):
            if stated_here:
                return [*problems, f"{folder.path} has no chat template, the other has"]
            return problems
    names = sorted({*templates[0], *templates[1]})
    differing = [name for name in names if templates[0].get(name) != templates[1].get(name)]
    if differing:
        return [*problems, f"the chat templates differ: {', '.join(differing)}"]
    return problems


def _find_compensated_schemes(checkpoint: Checkpoint) -> dict[str, QuantScheme]:
    """For each quantized module the coarsest scheme whose losses its weight may compensate: its own
    if the manifest says that it was rounded, else that of any module.
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


def _not_as_refined(
    name: str,
    first: Tensor | QuantTensor,
    second: Tensor | QuantTensor,
    recorded: tuple[Mapping[str, Change], ...],
) -> list[str]:
    """Return a problem if a tensor that a manifest lists as refined has other values than were
    written.
    """
    pairs = zip((first, second), recorded, strict=True)
    wrong = any(
        (change := own.get(name)) is not None and tensor_hash(value) != change.after
        for value, own in pairs
    )
    if wrong:
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
    for own, other, changed in ((first, second, recorded[0]), (second, first, recorded[1])):
        if (change := changed.get(name)) is not None and tensor_hash(own) == change.after:
            return isinstance(own, QuantTensor) or tensor_hash(other) == change.before
    return False


def _probe_logits(
    reference: Checkpoint, other: Checkpoint, bound: Bound, progress: Progress
) -> dict[str, Probe]:
    """Compare the logits with the bound.

    Quantized models are not made for random tokens and far positions: there the figures are shown,
    and only between float types they have a bound.
    """
    texts = {
        name: Batch.from_start(windows)
        for name, (_, windows) in build_gate_windows(reference).items()
    }
    batches = {**texts, **_other_tokens(reference)}
    measured = compare_batches(
        reference, other, list(batches.values()), progress=in_phase(progress, "logits")
    )
    strict = not (schemes(reference) or schemes(other))
    probes = {}
    for name, found in zip(batches, measured, strict=True):
        if name in texts:
            ratio = found.perplexity / found.reference_perplexity
            probes[name] = Probe(
                found.divergence, ratio, found.ratio_error, bound, not exceeds(found, bound)
            )
        else:
            kl = found.divergence.kl
            if strict:
                within = kl <= bound.kl
            else:
                within = math.isfinite(kl)
            probes[name] = Probe(found.divergence, None, None, bound if strict else None, within)
    return probes


def _other_tokens(checkpoint: Checkpoint) -> dict[str, Batch]:
    """Return the tokens other than texts on which logits are compared; fixed, so that reports are
    repeatable. Transformers runs tokens at the first positions only.
    """
    config = checkpoint.config
    generator = torch.Generator().manual_seed(1)
    count = min(_RANDOM_TOKENS, config.max_context)
    first, second = (
        torch.randint(config.vocab_size, (1, count), generator=generator) for _ in range(2)
    )
    result = {"other random tokens": Batch.from_start(first)}
    if config.runnable:
        spread = torch.linspace(0, config.max_positions - 1, count).long()
        result["positions spread over the context"] = Batch(second, spread)
    return result
