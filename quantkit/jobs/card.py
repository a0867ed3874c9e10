"""The model card: ``README.md`` of a quantized folder, as model hubs expect it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from quantkit.formats.checkpoint import Checkpoint
from quantkit.json_values import read_json
from quantkit.quality.gate import Gate
from quantkit.quality.windows import WINDOW
from quantkit.tensors.scheme import QuantScheme

NAME = "README.md"
_CARRIED = ("license", "license_name", "license_link", "language", "datasets")
_TAGS = ("quantkit", "compressed-tensors")


def model_card(source: Checkpoint, schemes: Mapping[str, QuantScheme], details: Mapping[str, Any], gate: Gate) -> bytes:
    """The card's bytes; they do not tell where the folder lies or what it is called.

    Args:
        schemes: by module.
        details: the manifest's own part of the job.
        gate: what the result lost.
    """
    before = _front_matter(source.path / NAME)
    base = base_model(source)
    main = Counter(map(str, schemes.values())).most_common(1)[0][0]
    head = {
        **({"base_model": base, "base_model_relation": "quantized"} if base else {}),
        **{key: before[key] for key in _CARRIED if key in before},
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [*_TAGS, main],
    }
    lines = [
        "---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", "",
        f"# {base or source.config.architecture}, {main}", "",
        f"Quantized by quantkit {_how(main, details)}.",
        "`quantkit.json` holds the sha256 of every file, the scheme of every layer and the figures below;",
        "`quantkit verify` checks them again.", "", *_certificate(gate), "", *_loading(schemes),
    ]  # fmt: skip
    return ("\n".join(lines) + "\n").encode()


def base_model(source: Checkpoint) -> str | None:
    """The source's name on a hub, where its config tells one."""
    config = source.path / "config.json"
    named = read_json(config).get("_name_or_path") if config.is_file() else None
    return named if isinstance(named, str) and named.count("/") == 1 and not named.startswith((".", "/")) else None


def _how(scheme: str, details: Mapping[str, Any]) -> str:
    calibration = details.get("calibration")
    if calibration is None:
        return f"to {scheme} by rounding to nearest"
    return f"to {scheme} with GPTQ, calibrated on {calibration['samples']} samples of {calibration['length']} tokens"


def _certificate(gate: Gate) -> list[str]:
    """The table of what was lost."""
    lines = [
        "## Quality", "",
        f"KL(source || this) and perplexity, per token, in nats and float32, over windows of {WINDOW} tokens.", "",
        "| text | tokens | KL | bound | 99th percentile | same top token | perplexity | of the source |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {one.text} | {one.tokens} | {one.kl:.3g} | {one.kl_bound:.3g} | {one.kl_p99:.3g}"
        f" | {one.top1_agreement:.1%} | {one.perplexity:.4g} | {one.source_perplexity:.4g} |"
        for one in gate.texts
    ]
    problem = gate.problem()
    return lines if problem is None else [*lines, "", f"**Not within its bound: {problem[0]}; {problem[1]}.**"]


def _loading(schemes: Mapping[str, QuantScheme]) -> list[str]:
    """How to load it, in what can; as tried."""
    lines = ["## Use", "", "```python", "import quantkit", "", 'model, tokenizer = quantkit.load("FOLDER")', "```", ""]
    if all(scheme.symmetric for scheme in schemes.values()):
        lines += [
            "With `compressed-tensors` installed:", "", "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")', "```",
        ]  # fmt: skip
    else:
        lines += ["transformers does not load zero points in this format (seen in 5.23)."]
    if any(scheme.bits == 8 for scheme in schemes.values()):
        return [*lines, "", "vLLM 0.32 on a CPU refuses 8-bit weights (it has no kernel for them)."]
    lines += ["", "```", "vllm serve FOLDER", "```", "", "Tried with vLLM 0.32 on a CPU with AVX-512."]
    if all(scheme.symmetric for scheme in schemes.values()):
        lines[-1] += (
            " Scales may be negative: leave vLLM's option of 8-bit activations under Marlin off"
            " (vllm-project/vllm#48905)."
        )
    return lines


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML head of a card; empty if there is none."""
    try:
        found = re.match(r"---\n(.*?)\n---\n", path.read_text(encoding="utf-8"), re.DOTALL)
        head = None if found is None else yaml.safe_load(found[1])
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # ValueError: a date that is none
        return {}
    return head if isinstance(head, dict) else {}
