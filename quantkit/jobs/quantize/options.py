"""The options of `quantize`, which the command, the Python call, the plan, the manifest and the
model card read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from quantkit.base.arguments import as_integer, as_path, as_seed, as_string, as_strings, is_several
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.base.option_fields import (
    ADAPTERS,
    ADAPTERS_HELP,
    COLUMN_HELP,
    OTHER,
    TEXT_HELP,
    IfExists,
    find_option_fields,
    option,
    require_valid,
)
from quantkit.bit_allocation.size_target import SizeTarget, size_target
from quantkit.calibration.effort import (
    ACTIVATION_MEMORY,
    EFFORTS,
    MAX_LENGTH,
    SAMPLES,
    SEED,
    EffortName,
)
from quantkit.errors import RequestError
from quantkit.formats.authorship import HUB_NAME, LICENSE
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.kv_scales import KV_CACHES, KvCacheName
from quantkit.formats.lora.requested import Requested, spell_adapters
from quantkit.formats.registry import GGUF
from quantkit.formats.target_names import TargetName
from quantkit.jobs.output.target import NATIVE, choose_quantized_targets
from quantkit.jobs.refine.options import EPOCHS
from quantkit.tensors.activations import Activations, ActivationsName
from quantkit.tensors.mix import find_mix
from quantkit.tensors.scheme import FLOAT_SCHEMES, SPELLINGS, QuantScheme
from quantkit.via_transformers import VIAS, Via, require_no_code

if TYPE_CHECKING:
    import torch

    from quantkit.formats.detect import WeightKind
    from quantkit.formats.registry import Target
    from quantkit.tensors.recipe import Recipe

Method = Literal["rtn", "gptq"]
METHODS = get_args(Method)

SCHEMES = "Schemes"
METHOD = "Method"
CALIBRATION = Message("Calibration, with ", Option("method", value="gptq"))
REFINEMENT = "Refinement"
CHECKS = "Checks"
MODEL_CARD = "Model card"
OUTPUT = "Output"

# GPTQ solves schemes of at most so many bits unless another method is requested; layers of more
# bits are rounded.
_SOLVED_BITS = 6


def is_solved_by_default(scheme: QuantScheme) -> bool:
    """Check whether GPTQ solves a scheme if no method is requested."""
    return scheme.bits <= _SOLVED_BITS


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of `quantize`; None and False where nothing was requested.

    Attributes:
        src: a model of floats; one in FP8 or MXFP4 counts as such; a quantized one with
            `dequantize`.
        dst: the folder to make, or a file ``*.gguf``; it must not exist.
        scheme: its name, such as ``int8``, ``int4-g128`` or ``fp8``; for GGUF also one of
            llama.cpp's mixes, such as ``q4_k_m``; a `QuantScheme`; or a `Recipe` with overrides.
        target_bits: instead of a scheme: the average number of bits of each weight of the decoder
            linears, such as 4.5. Codes, scales and zero points count, and the head if it has a
            scheme. Each linear gets int4 in groups of 128, 64 or 32, int8 or floats, so that the
            loss on GPTQ's samples is as small as possible; linears that runtimes fuse share one
            scheme.
        max_size: the same for the total size of all files of weights, in bytes.
        head: the scheme of the output head, which keeps its floats by default; a recipe names
            ``lm_head`` instead. A head that is tied to the embedding has the scheme of `embedding`.
        embedding: the scheme of the embedding, ``int8``, with one scale for each token; if the head
            is tied to the embedding, it is the head's scheme too. A recipe names
            ``model.embed_tokens`` instead. None quantizes embedding and head to ``int8`` where they
            are more than a quarter of the weights, or of what is read for each token, if the format
            has such embeddings and no recipe is given; ``keep`` never.
        keep: glob, or several, of modules that keep their floats, such as ``*.layers.0.*``.
        activations: the type that readers round the inputs of linears to, each token by itself when
            the model runs: ``none``, ``int8`` or ``fp8``. None is fp8 for the schemes fp8 and
            fp8-block, and none for others. Only what runtimes multiply is accepted; the gate
            measures the model with its inputs rounded.
        kv_cache: ``fp8`` also calibrates the scales of a key/value cache in float8, one for the
            keys and one for the values of a layer, and runs the gate with keys and values rounded
            so. Folders of compressed-tensors have them, of models of our own decoder; vLLM then
            keeps such a cache. None writes none.
        strict: refuse a linear whose shape does not fit its scheme.
        method: ``rtn`` (round to nearest) or ``gptq``; None is gptq if any linear gets fewer than 8
            bits, else rtn.
        imatrix: an importance matrix of llama.cpp's, with which rounding weights errors; by default
            it is measured on a small text. See `imatrix`.
        calibration: a file, a folder that ``Dataset.save_to_disk`` wrote, or a hub dataset as
            ``owner/name:config:split``; a ``datasets.Dataset`` or ``IterableDataset``; or an
            iterable of strings, which is read once; or ``self``, for text that the model of floats
            writes. None is the text that ships with the package.
            This option and those down to `device` are for gptq only.
        text_column: the column or key of `calibration` that has the text or the messages; None is
            ``text``, ``messages`` or ``conversations``, or else the only column of strings.
        effort: how much calibration: ``quick``, ``default`` or ``thorough``. The first two draw as
            many tokens as the width of the model needs; ``thorough`` draws samples of the model's
            context, at most 2048 tokens, and follows the float model on all samples instead of some
            of them. It also measures which errors of outputs cancel out later in the model.
        thorough: the same as ``effort="thorough"``.
        samples, length, seed: the number of calibration samples, 128 by default; the tokens in
            each, which the effort determines by default; and the seed of their positions in the
            text, 0 by default.
        activation_memory: bytes of calibration activations kept in memory, by default
            4_000_000_000, or half of what is available if that is less; the rest goes to the disk
            of `dst`.
        device: where GPTQ computes, as torch spells it; None is a GPU if there is one.
        refine: then train the scales against the logits of `src`, on the same samples; see
            `quantkit.refine`, also for the next three. A result that this does not bring closer to
            `src` is not kept.
        train_codes, train_norms, epochs: as in `quantkit.refine`.
        lora: as in `convert`: adapters are merged before the model is calibrated and quantized.
        source_check: as in `convert`.
        allow_nonfinite: as in `convert`.
        accept_quality_loss: keep a result that is too far from its source.
        certify_positions: also measure the divergence by position, in windows of this many tokens,
            with keys and values in a float and in an int8 cache. With the float cache, no position
            may exceed the gate's bound for the scheme.
        certify_text: a file for that measurement; by default the gate's texts, some 5,000 tokens in
            all. If the text or the context is shorter than the window, it is measured to its end,
            and a note says so.
        base_model, license: for the model card: the source's name on a hub, ``owner/name``, and a
            licence as hubs spell it; by default what the source's own files say.
        to: ``compressed-tensors`` (the default), ``int-quantized``, ``gptq``, ``awq``, ``mlx`` or
            ``gguf``; any of them with any `method`. Several in a list: `dst` gets a folder for
            each, named after the format, with the files that a run in this format alone writes,
            from one calibration.
        split_max_size, template, weights, resume, if_exists: as in `convert`.
        dequantize: accept a `src` that is quantized already: its weights are computed in float32,
            and each is rounded once to the model's type, as `convert` does.
        tensors_only: quantize the tensors as they are, whatever the architecture; for rounding
            only, and no logits are compared.
        via: what runs the model for calibration and for the gate: ``own`` or ``transformers``. None
            is own where the family is known, or else transformers, if it is installed and knows the
            architecture.
        trust_remote_code: where transformers runs the model, run the code in the folder of `src`
            that config.json's ``auto_map`` names, and copy it to `dst`. Without, transformers' own
            class is used, if it has one.
    """

    src: str | Path
    dst: str | Path
    scheme: str | QuantScheme | Recipe | None = option(
        SCHEMES,
        f"{SPELLINGS}; add -asym to int4 for zero points. Or {', '.join(FLOAT_SCHEMES)}; for GGUF"
        " also q4_k_m, q6_k and others.",
        "scheme",
    )
    _: KW_ONLY
    head: str | QuantScheme | None = option(
        SCHEMES,
        "Scheme of an output head that is not tied to the embedding. Default: unquantized.",
        "scheme",
        metavar="SCHEME",
    )
    embedding: str | QuantScheme | None = option(
        SCHEMES,
        "Scheme of the embedding, with one scale per token, and of an output head tied to it; keep"
        " leaves both unquantized. Default: int8 where they are more than a quarter of the model.",
        "scheme",
        metavar="int8|keep",
    )
    target_bits: float | None = option(
        SCHEMES,
        Message(
            "Choose the scheme of each linear for this average number of bits per weight, such as"
            " 4.5, instead of ",
            Option("scheme"),
            ".",
        ),
        float,
        metavar="BITS",
    )
    max_size: int | None = option(
        SCHEMES,
        "Choose the scheme of each linear for this total size of the weight files, such as 5GB.",
        "size",
        metavar="SIZE",
    )
    keep: str | Iterable[str] = option(
        SCHEMES,
        "Glob pattern of linears to leave unquantized; repeatable.",
        "patterns",
        default=(),
        metavar="PATTERN",
    )
    activations: ActivationsName | None = option(
        SCHEMES,
        "Activation dtype at inference. Default: fp8 for the schemes fp8 and fp8-block, else none.",
        choices=get_args(ActivationsName),
    )
    kv_cache: KvCacheName | None = option(
        SCHEMES,
        "Also calibrate scales for an 8-bit KV cache. Default: none.",
        choices=KV_CACHES,
    )
    strict: bool = option(
        SCHEMES,
        "Fail if a linear's shape does not fit the scheme.",
        bool,
        default=False,
        changes_result=False,
    )
    method: Method | None = option(
        METHOD,
        "Round to nearest (rtn) or GPTQ. Default: gptq below 8 bits, else rtn.",
        choices=METHODS,
    )
    imatrix: str | Path | None = option(
        METHOD,
        "llama.cpp importance matrix to weight rounding errors with. Default: measured on a small"
        " text.",
        "file",
        metavar="FILE",
    )
    calibration: str | Path | Iterable[object] | None = option(CALIBRATION, TEXT_HELP, "file")
    text_column: str | None = option(CALIBRATION, COLUMN_HELP, metavar="NAME")
    effort: EffortName | None = option(
        CALIBRATION,
        "Calibration effort; `quantkit plan quantize` shows the time of each. Default: default.",
        choices=tuple(EFFORTS),
    )
    thorough: bool = option(
        CALIBRATION,
        Message("The same as ", Option("effort", value="thorough"), "."),
        bool,
        default=False,
    )
    samples: int | None = option(
        CALIBRATION, f"Number of calibration samples. Default: {SAMPLES}.", int
    )
    length: int | None = option(
        CALIBRATION,
        Message(
            "Number of tokens per sample. Default: by ",
            Option("effort"),
            f", at most {MAX_LENGTH}.",
        ),
        int,
    )
    seed: int | None = option(
        CALIBRATION,
        f"Random seed for the positions of the samples in the text. Default: {SEED}.",
        int,
    )
    activation_memory: int | None = option(
        CALIBRATION,
        "Memory for calibration activations; the rest goes to DST's disk. Default:"
        f" {ACTIVATION_MEMORY / 1e9:g}GB, at most half of what is available.",
        "memory",
        metavar="AMOUNT",
        changes_result=False,
    )
    device: str | torch.device | None = option(CALIBRATION, changes_result=False)
    refine: bool = option(
        REFINEMENT,
        "After quantization, train the scales against SRC's logits.",
        bool,
        default=False,
    )
    train_codes: bool = option(
        REFINEMENT,
        Message("With ", Option("refine", value=True), ", also train the quantized weights."),
        bool,
        default=False,
    )
    train_norms: bool = option(
        REFINEMENT,
        Message("With ", Option("refine", value=True), ", also train the norm weights."),
        bool,
        default=False,
    )
    epochs: int | None = option(REFINEMENT, f"Number of training epochs. Default: {EPOCHS}.", int)
    lora: Requested = option(
        ADAPTERS, ADAPTERS_HELP, "adapters", default=(), metavar="FOLDER[=WEIGHT]"
    )
    source_check: bool = option(CHECKS, default=True, changes_result=False)
    allow_nonfinite: bool = option(CHECKS, default=False)
    accept_quality_loss: bool = option(
        CHECKS, "Keep the result even if it differs too much from SRC.", bool, default=False
    )
    certify_positions: int | None = option(
        CHECKS,
        "Also measure the KL divergence by position, in windows of this many tokens, with a float"
        " and an int8 KV cache.",
        int,
        metavar="TOKENS",
    )
    certify_text: str | Path | None = option(
        CHECKS,
        Message(
            "UTF-8 text for ",
            Option("certify_positions"),
            ". Default: a text of about 5,000 tokens that ships with quantkit.",
        ),
        "path",
        metavar="FILE",
    )
    base_model: str | None = option(MODEL_CARD, "Name of SRC on a hub: owner/name.", metavar="NAME")
    license: str | None = option(
        MODEL_CARD,
        "License identifier on hubs, such as apache-2.0. Default: SRC's own.",
        metavar="ID",
    )
    to: TargetName | Sequence[TargetName] | None = option(OUTPUT)
    split_max_size: int | None = option(OUTPUT)
    template: str | None = option(OUTPUT)
    resume: bool = option(OUTPUT, default=False, changes_result=False)
    if_exists: IfExists = option(OUTPUT, default="fail", changes_result=False)
    weights: WeightKind | None = option(OTHER)
    dequantize: bool = option(OTHER, "Dequantize a quantized SRC first.", bool, default=False)
    tensors_only: bool = option(OTHER, default=False)
    via: Via | None = option(
        OTHER,
        "Code that runs the model. Default: quantkit's own for known families, else transformers.",
        choices=VIAS,
    )
    trust_remote_code: bool = option(OTHER, default=False)

    def __post_init__(self) -> None:
        """Raise a `RequestError` for a value of the wrong type or out of range, and for options
        that exclude each other, as far as this needs no model.
        """
        require_valid(self)
        # The dataclass is frozen. Words in one spelling make equal requests equal in the manifest.
        object.__setattr__(self, "lora", spell_adapters(self.lora))
        if self.to is not None and not isinstance(self.to, str):
            # An iterator is read once.
            names = as_strings("to", self.to)
            object.__setattr__(self, "to", names[0] if len(names) == 1 else tuple(names))
        as_path("dst", self.dst)
        for value, pattern, name, expected in (
            (self.base_model, HUB_NAME, "base_model", "owner/name"),
            (self.license, LICENSE, "license", "apache-2.0, llama3.1, other, ..."),
        ):
            if value is not None and not pattern.fullmatch(as_string(name, value)):
                raise RequestError(
                    Message(Option(name), " is not in the form that hubs accept"),
                    found=format_value(value),
                    expected=expected,
                )
        if self.via is not None and as_string("via", self.via) not in VIAS:
            raise RequestError(
                Message("unknown value of ", Option("via")),
                found=self.via,
                expected=" or ".join(VIAS),
            )
        if self.via is not None and self.tensors_only:
            raise RequestError(
                Message(
                    Option("via"),
                    " and ",
                    Option("tensors_only", value=True),
                    " are mutually exclusive: the latter does not run the model",
                )
            )
        if self.tensors_only:
            require_no_code(self.trust_remote_code, Message(Option("tensors_only", value=True)))
        elif self.via == "own":
            require_no_code(self.trust_remote_code, Message(Option("via", value="own")))
        if self.via == "transformers":
            self.require_run_by_transformers()
        types = tuple(Activations)
        if self.activations is not None and as_string("activations", self.activations) not in types:
            raise RequestError(
                Message("unknown type of ", Option("activations")),
                found=format_value(self.activations),
                expected=" or ".join(Activations),
            )
        if self.kv_cache is not None and as_string("kv_cache", self.kv_cache) not in KV_CACHES:
            raise RequestError(
                Message("unknown value of ", Option("kv_cache")),
                found=self.kv_cache,
                expected=" or ".join(KV_CACHES),
            )
        if len(self.targets) > 1:
            self._check_several()
        mix = find_mix(self.scheme)
        formats = [target.name for target in self.targets]
        if mix is not None and GGUF.name not in formats:
            raise RequestError(
                f"{mix.name} is a mix of GGUF's types",
                found=f"the format {formats[0]}",
                hint=Message(
                    Option("to", value="gguf"), ", or a destination whose name ends in .gguf"
                ),
            )
        # Both properties raise errors of their own.
        _ = self.target, self.size
        self._check_method()
        self._check_refinement()

    @cached_property
    def targets(self) -> list[Target]:
        """Choose the formats of the result, in the order of their names in
        `quantkit.formats.registry.targets`.
        """
        return choose_quantized_targets(self.to, as_path("dst", self.dst))

    @property
    def target(self) -> Target:
        """Return the format of the result; the first of several."""
        first_target = self.targets[0]
        if self.activations is None:
            return first_target
        # Only configs of compressed-tensors can state how readers round inputs.
        for target in self.targets:
            if target.name != NATIVE:
                raise RequestError(
                    Message(
                        Option("activations"),
                        " cannot be combined with ",
                        Option("to", value=target.name),
                    ),
                    expected=Message(Option("to", value=NATIVE)),
                )
        return replace(first_target, method=CompressedTensors(Activations(self.activations)))

    @cached_property
    def size(self) -> SizeTarget | None:
        """Return the size that the schemes are chosen for; None if a scheme was given."""
        return size_target(self.target_bits, self.max_size, self.scheme)

    @property
    def effort_name(self) -> EffortName:
        """Return the effort of GPTQ, with the default."""
        if self.thorough:
            return "thorough"
        return self.effort or "default"

    def list_result_options(self) -> dict[str, Any]:
        """List the values of the options that change the result, by name."""
        values = {}
        for name, info in find_option_fields(QuantizeOptions).items():
            if info.changes_result:
                values[name] = getattr(self, name)
        return values

    def require_no_calibration(self) -> None:
        """Raise a `RequestError` for an option that only GPTQ uses."""
        for name, info in find_option_fields(type(self)).items():
            if info.section != CALIBRATION:
                continue
            value = getattr(self, name)
            if value is not None and value is not False:
                raise RequestError(
                    Message(Option(name), " requires ", Option("method", value="gptq"))
                )

    def _check_several(self) -> None:
        names = ", ".join(target.name for target in self.targets)
        for name in ("target_bits", "max_size"):
            if getattr(self, name) is not None:
                raise RequestError(
                    Message(Option(name), " requires a single format: sizes differ by format"),
                    found=names,
                    hint=(
                        "quantize to this size in one format, and convert the result to the others"
                    ),
                )
        if self.tensors_only:
            raise RequestError(
                Message(
                    Option("tensors_only", value=True),
                    " requires ",
                    Option("to", value=NATIVE),
                    " as the only format",
                ),
                found=names,
            )

    def _check_refinement(self) -> None:
        if self.epochs is not None:
            as_integer("epochs", self.epochs, 1)
        if not self.refine:
            for name in ("train_codes", "train_norms", "epochs"):
                if getattr(self, name):
                    raise RequestError(
                        Message(Option(name), " requires ", Option("refine", value=True))
                    )
            return
        after = "run `quantkit refine` on the result"
        # What is combined, whether it is requested, and what to do instead.
        excluded: list[tuple[str, object, str]] = [
            (
                Message(Option("tensors_only", value=True)),
                self.tensors_only,
                Message("leave ", Option("tensors_only"), " out: training runs the model"),
            ),
            # `quantkit refine` needs the merged or dequantized floats, which this job does not
            # write.
            (Message(Option("lora")), self.lora, _explain_convert_first(Option("lora", job=""))),
            (
                Message(Option("dequantize", value=True)),
                self.dequantize,
                _explain_convert_first(Option("dequantize", value=True, job="")),
            ),
            (
                Message(Option("certify_positions")),
                self.certify_positions,
                "leave it out, and evaluate the result by position",
            ),
            (Message(Option("kv_cache")), self.kv_cache, after),
            (
                Message(Option("if_exists", value="skip")),
                self.if_exists == "skip",
                Message("leave ", Option("if_exists"), " out"),
            ),
            (
                "several formats",
                len(self.targets) > 1,
                "write one, and `quantkit convert` the result to the others",
            ),
            (Message(Option("method", value="rtn")), self.method == "rtn", after),
        ]
        for name, requested, hint in excluded:
            if requested:
                problem = Message(Option("refine", value=True), " cannot be combined with ", name)
                raise RequestError(problem, hint=hint)

    def require_run_by_transformers(self) -> None:
        """Raise a `RequestError` for an option that models run by transformers do not have."""
        for name in ("template",):
            if getattr(self, name) is not None:
                raise RequestError(
                    Message(
                        Option(name),
                        " cannot be combined with ",
                        Option("via", value="transformers"),
                        " yet",
                    )
                )

    def _check_method(self) -> None:
        if self.method is not None and as_string("method", self.method) not in METHODS:
            raise RequestError("unknown method", found=self.method, expected=" or ".join(METHODS))
        if self.effort is not None and as_string("effort", self.effort) not in EFFORTS:
            raise RequestError("unknown effort", found=self.effort, expected=" or ".join(EFFORTS))
        if self.thorough and self.effort not in (None, "thorough"):
            raise RequestError(
                Message(Option("thorough", value=True), " is ", Option("effort", value="thorough")),
                found=Message(Option("effort", value=self.effort)),
            )
        if self.method == "rtn" and self.size is not None:
            raise RequestError(
                "a target size requires GPTQ",
                found=Message(Option("method", value="rtn")),
                expected=Message(Option("method", value="gptq")),
            )
        if self.method == "rtn":
            self.require_no_calibration()
        if self.imatrix is not None and self.method != "rtn":
            as_path("imatrix", self.imatrix)
            raise RequestError(
                Message(
                    Option("imatrix"),
                    " requires ",
                    Option("method", value="rtn"),
                    ": GPTQ measures the inputs itself",
                )
            )
        is_texts = self.calibration is None or is_several(self.calibration)
        if isinstance(self.calibration, str) or not is_texts:
            hint = 'a string is a path or the name of a hub dataset; text goes in a list: ["..."]'
            # A DatasetDict is a mapping from splits to datasets.
            if isinstance(self.calibration, Mapping):
                split = next(iter(self.calibration), "train")
                hint = f'of a `DatasetDict`, pass one split: ds["{split}"]'
            # The string is kept: it may also name a dataset.
            as_path("calibration", self.calibration, hint=hint)
        if self.text_column is not None:
            as_string("text_column", self.text_column)
            if self.calibration is None:
                raise RequestError(
                    Message(Option("text_column"), " requires ", Option("calibration"))
                )
        for name in ("samples", "length"):
            value = getattr(self, name)
            if value is not None:
                as_integer(name, value)
        if self.seed is not None:
            as_seed("seed", self.seed)
        memory = self.activation_memory
        if memory is not None:
            # bool is a subclass of int, and NaN fails both comparisons.
            is_number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
            if not is_number or not 0 <= memory < math.inf:
                raise RequestError(
                    Message(Option("activation_memory"), " is not a valid number of bytes"),
                    found=format_value(memory),
                    expected="such as 4_000_000_000",
                )
        if self.device is not None:
            # Imports torch.
            from quantkit.model.device import resolve_device

            resolve_device(self.device)


def _explain_convert_first(option: Option) -> Message:
    """Explain how to refine a model that only an option of `convert` makes a float model."""
    return Message(
        "write the float model with `quantkit convert` and ",
        option,
        ", for architectures that transformers runs also ",
        Option("tensors_only", value=True, job=""),
        "; then quantize and refine that",
    )
