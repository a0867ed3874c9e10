"""The model card: ``README.md`` of a quantized folder, as model hubs expect it.

Equal inputs give an equal card: it tells no time, no path, and not what the folder is called; of the source and of the
calibration text it tells the last part of their paths.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from quantkit.architectures.disk import unread_experts
from quantkit.bit_allocation.allocation import Allocation
from quantkit.bit_allocation.picture import NAME as PICTURE
from quantkit.bit_allocation.picture import picture
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.codecs.compressed_tensors import read_here_alone
from quantkit.jobs.card_facts import Made, facts
from quantkit.jobs.card_use import use_section
from quantkit.jobs.certificate import model_card_section
from quantkit.jobs.command import quantize_command
from quantkit.jobs.labels import base_model, model_name
from quantkit.jobs.markdown import table, wrapped
from quantkit.jobs.result import growth_text
from quantkit.jobs.target import NATIVE
from quantkit.quality.bounds import BOUNDS, coarser
from quantkit.quality.figures import significant
from quantkit.quality.gate import FLOOR, SLACK, Gate
from quantkit.quality.positions import PositionCertificate
from quantkit.quality.weights_only import WeightsOnly
from quantkit.quality.windows import RANDOM, WINDOW
from quantkit.tensors.recipe import Recipe
from quantkit.version import __version__

NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language", "datasets")


def model_card_files(
    source: Checkpoint, made: Made, gate: Gate | WeightsOnly, certificate: PositionCertificate | None = None
) -> dict[str, bytes]:
    """The card, and the picture that it shows of schemes chosen for a size, by the names of the files.

    Args:
        source: what was quantized.
        made: what became of it.
        gate: what the result lost; of a model that cannot be run, what became of its tensors.
        certificate: what it lost by position, where that was asked for.
    """
    base = made.labels.base_model or base_model(source)
    name = model_name(source, base)
    schemes = made.scheme_map.counts()
    told, short = " and ".join(schemes), next(iter(schemes))
    if made.allocation is not None:
        told, short = f"{made.allocation.bits:.4g} bits a weight", f"{made.allocation.bits:.4g}bit"
    folder = f"{name}-{short}"
    lines = [
        "---", yaml.safe_dump(_head(source, made, base), sort_keys=False, allow_unicode=True).strip(), "---", "",
        f"# {name}, {told}", "",
        f"{_linked(base) or name}, quantized by quantkit {__version__}.", "",
        *facts(source, made), "",
        *([] if made.allocation is None else _choice(made.allocation)),
        *(_quality(gate, made) if isinstance(gate, Gate) else ["## Quality", "", *wrapped(f"{gate.line()}.")]), "",
        *([] if certificate is None else [*model_card_section(certificate), ""]),
        *use_section(source.config, made.method, made.scheme_map, folder), "",
        *_command(made, name, folder, runnable=source.config.runnable),
    ]  # fmt: skip
    files = {NAME: ("\n".join(lines) + "\n").encode()}
    if made.allocation is not None:
        files[PICTURE] = picture(made.allocation).encode()
    return files


def _head(source: Checkpoint, made: Made, base: str | None) -> dict[str, Any]:
    """What hubs read, in YAML."""
    before = _front_matter(source.path / NAME)
    carried = {key: before[key] for key in _CARRIED if key in before}
    if made.labels.license is not None and made.labels.license != carried.get("license"):
        carried = {"license": made.labels.license} | {k: v for k, v in carried.items() if not k.startswith("license")}
    schemes = made.scheme_map.schemes
    loads = all(one.symmetric for one in schemes.values()) and made.scheme_map.embedding is None
    loads = loads and unread_experts(source.config, schemes) is None
    loads = loads if made.method.name == NATIVE else "transformers" in made.method.readers(made.scheme_map.assigned)
    loads = loads and not read_here_alone(made.method, made.scheme_map.assigned, tied=source.config.tied_embeddings)
    tag = {key: before[key] for key in ("pipeline_tag",) if key in before}
    tag = {"pipeline_tag": "text-generation"} if source.config.runnable else tag
    return {
        **carried,
        **({"base_model": base, "base_model_relation": "quantized"} if base else {}),
        **({"library_name": "transformers"} if loads else {}),
        **tag,
        "tags": ["quantkit", made.method.name, *made.scheme_map.counts()],
    }


def _choice(found: Allocation) -> list[str]:
    """How the schemes were chosen for a size."""
    head, *rows = found.table()
    told = (
        f"They were chosen to lose least within {found.target}. The linear layers have {found.bits:.4g} bits a weight,"
        f" and the files of weights {found.weight_bytes} bytes. From the calibration samples a KL of"
        f" {significant(found.kl)} was estimated; the last column tells each layer's share."
    )
    return [
        "## Schemes", "", *wrapped(told), "",
        *table(head, rows), "",
        f"![Schemes by layer]({PICTURE})", "",
    ]  # fmt: skip


def _quality(gate: Gate, made: Made) -> list[str]:
    """The table of what was lost, and what its columns mean."""
    highest = coarser(BOUNDS[f"int{scheme.bits}"] for scheme in made.scheme_map.schemes.values()).kl
    bound = f"is {highest:g} for its bits"
    beside_rounding = any(one.rounding_kl is not None for one in gate.texts)
    if beside_rounding:
        bound += (
            f", or {100 * (SLACK - 1):.2g} % above the KL of rounding to nearest in the same schemes where that is less"
            f" (but never below {FLOOR:g})"
        )
    measured_on = "texts that come with it and are not for calibration"
    if any(one.text == RANDOM for one in gate.texts):
        measured_on = "random tokens, for want of a tokenizer"
    heads = [
        "text", "tokens", "source's perplexity", "this model's perplexity", "change of it", "KL", "most KL allowed",
        *(["KL of rounding"] if beside_rounding else []), "KL, 99th percentile", "same likeliest token",
    ]  # fmt: skip
    rows = [
        [
            one.text, f"{one.tokens}", f"{one.source_perplexity:.4g}", f"{one.perplexity:.4g}",
            growth_text(one.perplexity_ratio), f"{one.kl_estimate}", f"{one.kl_bound:.3g}",
            *(["" if one.rounding_kl is None else f"{one.rounding_kl:.3g}"] if beside_rounding else []),
            f"{one.kl_p99:.3g}", f"{one.top1_agreement:.1%}",
        ]
        for one in gate.texts
    ]  # fmt: skip
    lines = [
        "## Quality", "",
        *wrapped(
            f"Measured by quantkit against the source, in float32, on {measured_on}, in windows of {WINDOW} tokens:"
        ), "",
        *table(heads, rows), "",
        *wrapped(
            "Perplexity is per token, and so is KL, the mean of KL(source ‖ this model) in nats; ± is one"
            f" standard error. The most KL allowed, this model's bound, {bound}. Unless told to, quantkit finishes no"
            f" model beyond its bound, nor one with more than {gate.perplexity_ratio_bound:g} times its source's"
            " perplexity."
        ),
    ]  # fmt: skip
    problem = gate.problem()
    return lines if problem is None else [*lines, "", f"**Not within its bound: {problem[0]}; {problem[1]}.**"]


def _command(made: Made, name: str, folder: str, *, runnable: bool) -> list[str]:
    options = {**made.options, **asdict(made.labels)}
    asked = made.scheme_map.recipe
    if made.allocation is not None:
        asked = Recipe(asked.default, asked.overrides[len(made.allocation.recipe().overrides) :])
    command, recipe = quantize_command(
        name, folder, asked, made.settings, made.drawn, options,
        None if made.allocation is None else made.allocation.target,
    )  # fmt: skip
    lines = ["## How it was made", "", "```", command, "```"]
    if recipe is not None:
        lines += ["", "with this recipe:", "", "```json", recipe, "```"]
    checks = (
        "`quantkit.json` holds the sha256 of each file here and of the source, the scheme of each layer and the figures"
        f" above. `quantkit verify {folder}` checks them"
        + (" and measures the perplexities again." if runnable else f"; with `{name}` it measures the errors again.")
    )
    return [*lines, "", *wrapped(checks)]


def _linked(base: str | None) -> str | None:
    return f"[{base}](https://huggingface.co/{base})" if base and "/" in base else base


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML head of a card; empty if there is none."""
    try:
        found = re.match(r"---\n(.*?)\n---\n", path.read_text(encoding="utf-8"), re.DOTALL)
        head = None if found is None else yaml.safe_load(found[1])
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # ValueError: a date that is none
        return {}
    return head if isinstance(head, dict) else {}
