"""Quantize tiny models of the architectures that transformers knows, by GPTQ and by rounding, and compare both with the
source in transformers.

    python scripts/measure_architectures.py [NAME ...] [--scheme int4-g32] [--samples 32] [--json FILE]

Prints for each the KL of both, on text that calibration does not see, or why it does not work.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_architectures import ARCHITECTURES, make
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import quantkit
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.quality.figures import mean_estimate
from quantkit.text.tokenizer import load_tokenizer

_LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--scheme", default="int4-g32")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ids = load_tokenizer(DEMO_MODEL).encode(excerpt())
    texts = torch.tensor(ids[: len(ids) // _LENGTH * _LENGTH]).view(-1, _LENGTH)[:16]
    found = {}
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = measure(name, Path(folder), texts, options.scheme, options.samples)
            except Exception as error:  # of any architecture; it is reported
                found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(name, found[name], flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    print(summary(found.values()))


def summary(found: Collection[dict[str, Any]]) -> str:
    """How many architectures work, and how the KL of GPTQ compares with that of rounding."""
    worked = [one for one in found if "error" not in one]
    errors = [2 * math.hypot(one["gptq_error"], one["rtn_error"]) for one in worked]
    apart = [one for one, error in zip(worked, errors, strict=True) if abs(one["gptq"] - one["rtn"]) > error]
    lower = sum(one["gptq"] < one["rtn"] for one in apart)
    ratio = statistics.median(one["gptq"] / one["rtn"] for one in worked) if worked else math.nan
    return (
        f"{len(worked)} of {len(found)} work; the KL of GPTQ is {ratio:.2f} of that of rounding in the median, and"
        f" lower in {lower} of {len(apart)} that differ by more than two standard errors"
    )


def measure(name: str, folder: Path, texts: Tensor, scheme: str, samples: int) -> dict[str, Any]:
    """KL and its standard error of GPTQ and of rounding, and how many linears each quantized."""
    source = folder / "source"
    make(name, source)
    reference = logits(source, texts)
    found: dict[str, Any] = {}
    for method in ("gptq", "rtn"):
        given: dict[str, Any] = {"samples": samples} if method == "gptq" else {"accept_quality_loss": True}
        made = quantkit.quantize(
            source, folder / method, scheme, method=method, via="transformers", source_check=False, **given
        )
        found[f"{method}_linears"] = sum(made.schemes.values())
        changed = changed_tensors(source, folder / method)
        if changed:
            found[f"{method}_changed"] = changed
        try:
            own = logits(folder / method, texts)
        except NotLoadedError:
            quantkit.convert(folder / method, folder / f"{method}-floats", dequantize=True)
            own, found["loaded"] = logits(folder / f"{method}-floats", texts), "dequantized"
        kl = (reference.exp() * (reference - own)).sum(-1).flatten().double()
        estimate = mean_estimate(kl)
        found[method], found[f"{method}_error"] = estimate.value, estimate.error
    return found


class NotLoadedError(Exception):
    """transformers does not load a folder as it is."""


def logits(folder: Path, texts: Tensor) -> Tensor:
    """Logarithms of probabilities [W, T, V]."""
    packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    settings = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **settings
        )
    except RuntimeError as error:  # of transformers' own loader, which does not read packed weights of every class
        raise NotLoadedError from error
    if info["missing_keys"]:  # which it fills with random numbers
        raise NotLoadedError
    model.eval()
    with torch.inference_mode():
        return torch.cat([model(some, use_cache=False).logits.float().log_softmax(-1) for some in texts.split(4)])


def changed_tensors(source: Path, result: Path) -> list[str]:
    """The tensors that are not quantized and differ from the source's."""
    before, after = (
        {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
        for folder in (source, result)
    )
    packed = {name.rpartition(".weight_")[0] for name in after if ".weight_" in name}
    experts = {name for name, value in before.items() if value.dim() == 3 and name not in after}  # one by one now
    return [
        name
        for name, value in before.items()
        if name not in experts
        and name.removesuffix(".weight") not in packed
        and not (name in after and torch.equal(after[name], value))
    ]


if __name__ == "__main__":
    main()
