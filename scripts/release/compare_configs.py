r"""Random configs of every family: quantkit against transformers, and what `convert` writes against
its source.

    python scripts/release/compare_configs.py [--configs 2000] [--first 0] [--seed 0] \
        [--processes 2] [--show REFUSED]
    python scripts/release/compare_configs.py --only 1234

Each config is drawn from the seed and its number (`fuzzing.configs`). transformers builds a model
of it with random weights, in float32, and saves them; the config lies next to them as it was drawn.
Then either quantkit refuses it, or

- quantkit's logits are those of transformers, and
- transformers gives for the folder that `convert` writes what it gives for the source,

within 1e-4 of the logits' norm, over more tokens than the contexts and windows that are drawn. What
transformers itself cannot build is counted apart: nobody vouches for what quantkit makes of it, so
that it should be little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fuzzing.configs import VOCABULARY, Trial, draw

TOKENS = 56
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What became of one config.

    Attributes:
        what: ``same``, ``refused``, ``only quantkit`` where transformers cannot build it, or
            ``differs``.
        detail: the refusal, their error, or the relative differences.
    """

    trial: Trial
    what: str
    detail: str = ""


def compare(trial: Trial, folder: Path) -> Outcome:
    """Take one config through both libraries.

    Args:
        folder: does not exist yet.
    """
    import quantkit
    from quantkit.architectures.families import config_from_hf
    from quantkit.errors import QuantkitError

    try:
        config_from_hf(trial.raw, "config.json")
    except QuantkitError as error:
        return Outcome(trial, "refused", str(error))
    source = folder / "source"
    source.mkdir(parents=True)
    tokens = torch.randint(
        3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(trial.number)
    )
    try:
        model = build_model(trial.raw, source)
        theirs = _logits(model, tokens)
    except Exception as error:  # of whatever kind: transformers cannot
        return Outcome(trial, "only quantkit", f"{type(error).__name__}: {error}")
    try:
        own = _own_logits(source, tokens)
    except QuantkitError as error:
        return Outcome(trial, "refused", str(error))
    try:
        quantkit.convert(source, folder / "converted")
    except QuantkitError as error:
        return Outcome(trial, "differs", f"quantkit loads it, and convert fails: {error}")
    try:
        converted = _logits(_load(folder / "converted"), tokens)
    except Exception as error:
        return Outcome(
            trial,
            "differs",
            f"transformers cannot load what convert wrote: {type(error).__name__}: {error}",
        )
    found = {"quantkit": _apart(own, theirs), "converted": _apart(converted, theirs)}
    if all(apart <= TOLERANCE for apart in found.values()):
        return Outcome(trial, "same")
    return Outcome(
        trial, "differs", ", ".join(f"{what} {apart:.2g}" for what, apart in found.items())
    )


def build_model(raw: dict[str, Any], folder: Path) -> Any:
    """Build transformers' random model of a config, as `compare` does, and save it to a folder with
    the config as it is.
    """
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    model = _build(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    path.write_text(json.dumps(raw))
    return model


def _build(folder: Path) -> Any:
    """transformers' model of the folder's config with random weights, biases and norms among
    them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        ).eval()
    generator = torch.Generator().manual_seed(1)
    kind = model.config.model_type
    # Gemma's norms add 1, but not Gemma 4's.
    middle = 0 if kind.startswith("gemma") and not kind.startswith("gemma4") else 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                middle + 0.1 * noise
                if "norm" in name
                else 0.4 * noise / parameter.shape[-1] ** 0.25
            )
        for name, buffer in model.named_buffers():
            # Zeros, which would hide a correction that is lost.
            if name.endswith(("expert_bias", "correction_bias")):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            # Ones, for the same reason.
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, use_cache=False).logits
    return found


@torch.inference_mode()
def _own_logits(folder: Path, tokens: Tensor) -> Tensor:
    from quantkit.model.load import load_model

    return load_model(folder, dtype=torch.float32)(tokens, torch.arange(tokens.shape[1]))


def _apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def _begin() -> None:
    """In each process: one thread, and nothing printed by transformers."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def _job(given: tuple[int, int, str]) -> Outcome:
    seed, number, base = given
    folder = Path(base, str(number))
    try:
        return compare(draw(seed, number), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="Number of the first config.")
    parser.add_argument("--only", type=int, help="Repeat one config, and print it.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.configs)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
        print(json.dumps(draw(options.seed, options.only).raw, indent=2))
    with tempfile.TemporaryDirectory(prefix="configs-") as base:
        jobs = [(options.seed, number, base) for number in numbers]
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(options.processes, len(jobs)), _begin) as pool:
            bar = tqdm(total=len(jobs), unit="config", disable=not sys.stderr.isatty())
            outcomes = []
            for outcome in pool.imap_unordered(_job, jobs, chunksize=4):
                outcomes.append(outcome)
                bar.update()
    print("\n".join(report(outcomes)))
    return int(any(outcome.what == "differs" for outcome in outcomes))


def report(outcomes: list[Outcome]) -> list[str]:
    """Counts by family, then each kind of refusal and difference with an example."""
    kinds = ("same", "refused", "only quantkit", "differs")
    lines = [
        f"{len(outcomes)} configs",
        f"{'family':14s}" + "".join(f"{kind:>15s}" for kind in kinds),
    ]
    for family in sorted({outcome.trial.family for outcome in outcomes}):
        counts = Counter(outcome.what for outcome in outcomes if outcome.trial.family == family)
        lines.append(f"{family:14s}" + "".join(f"{counts[kind]:15d}" for kind in kinds))
    totals = Counter(outcome.what for outcome in outcomes)
    lines.append(f"{'all':14s}" + "".join(f"{totals[kind]:15d}" for kind in kinds))
    for kind in kinds[1:]:
        groups: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.what == kind:
                cause = (
                    outcome.detail
                    if kind == "differs"
                    else re.sub(r"\d[\d.e+]*|\[.*\]|\{.*\}", "#", outcome.detail)
                )
                groups.setdefault(cause[:100], []).append(outcome)
        for members in sorted(groups.values(), key=len, reverse=True):
            first = min(members, key=lambda outcome: outcome.trial.number)
            lines.append(
                f"{kind}: {len(members)} x, such as {first.trial.number}: {first.detail[:200]}"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
