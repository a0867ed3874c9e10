r"""Folders that AutoRound quantizes and writes, and the weights it takes them for, to be compared
with quantkit's.

    PEER scripts/peers/peer_autoround.py make MODEL OUT ROUNDED --format auto_gptq --group-size 32 \
        [--asym] [--positive]
    PEER scripts/peers/peer_autoround.py weights OUT READ
    PEER scripts/peers/peer_autoround.py tune MODEL OUT TOKENS --iterations 200 --group-size 128
    python scripts/peers/compare_with_owner.py OUT ROUNDED
    python scripts/peers/compare_with_owner.py OUT READ

PEER has auto-round and not quantkit. `make` quantizes MODEL, a Hugging Face folder of floats, on a
few random samples into OUT, and writes the float32 weights that AutoRound rounded to, before it
packed them; `weights` writes those that its own linears make of what is packed. With `--positive`
no weight in the first group of a row is negative, so that its zero point is 0, which GPTQ's version
1 does not hold as AutoRound packs it: there ROUNDED differs, and READ does not.
`scripts/peers/peer_gptqmodel.py` prints what gptqmodel makes of OUT.

`tune` quantizes MODEL on samples, a safetensors file whose `tokens` are [N, T] int64, into OUT, a
folder of the floats that it rounded to, and prints one line of JSON with the `seconds` of that
alone; `scripts/measure/measure_accuracy.py` runs it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

FORMATS = (
    "auto_gptq",
    "auto_awq",
    "auto_round",
    "auto_round:auto_gptq",
    "auto_round:gptqmodel",
    "auto_round:auto_awq",
)


def create_rounder(
    options: argparse.Namespace,
    model: torch.nn.Module,
    samples: Tensor,
    *,
    iterations: int,
    symmetric: bool = True,
) -> AutoRound:
    """Return AutoRound for int4 of a model, on samples [N, T]."""
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in samples]
    return AutoRound(
        model,
        AutoTokenizer.from_pretrained(options.model),
        bits=4,
        group_size=options.group_size,
        sym=symmetric,
        iters=iterations,
        dataset=torch.utils.data.DataLoader(rows, batch_size=8),
        seqlen=samples.shape[1],
        nsamples=len(samples),
        batch_size=8,
        amp=False,
        enable_torch_compile=False,
        device_map="cpu",
    )


def make(options: argparse.Namespace) -> None:
    """Quantize on random samples into a folder, and write the weights that were rounded to."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.positive:
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data[:, : options.group_size].abs_()
    samples = torch.randint(3, model.config.vocab_size, (16, 64))
    rounder = create_rounder(options, model, samples, symmetric=not options.asym, iterations=2)
    rounded, *_ = rounder.quantize()
    linears = {name: module for name, module in rounded.named_modules() if hasattr(module, "scale")}
    weights = {
        f"{name}.weight": linear.weight.data.float().contiguous()
        for name, linear in linears.items()
    }
    save_file(weights, options.file)
    zeros = torch.cat([torch.as_tensor(linear.zp).flatten() for linear in linears.values()])
    print("zero points from", int(zeros.min()), "to", int(zeros.max()))
    rounder.save_quantized(options.out, format=options.format, inplace=False)


def weights(options: argparse.Namespace) -> None:
    """Write the weights that AutoRound's linears make of what is packed."""
    settings = json.loads((options.out / "config.json").read_text())["quantization_config"]
    layout = settings.get("packing_format", settings["quant_method"])
    modules: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for file in options.out.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module, _, leaf = name.rpartition(".")
            modules[module][leaf] = tensor
    found = {}
    for module, own in modules.items():
        if "qweight" not in own:
            continue
        scales, bits, size = own["scales"].float(), settings["bits"], settings["group_size"]
        if layout.endswith("awq"):
            weight = dequantize_gemm(own["qweight"], own["qzeros"], scales, bits, size)
        else:
            kind = LessOne if layout.endswith("gptq") else Plain
            inputs, outputs = own["qweight"].shape[0] * 32 // bits, own["qweight"].shape[1]
            linear = kind(bits, size, inputs, outputs, False)
            linear.qweight, linear.qzeros, linear.scales = own["qweight"], own["qzeros"], scales
            weight = linear(torch.eye(inputs))
        found[f"{module}.weight"] = weight.t().contiguous()
    save_file(found, options.file)


def tune(options: argparse.Namespace) -> None:
    """Quantize on samples of a file, and print the seconds of that alone."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    samples = load_file(options.file)["tokens"]
    rounder = create_rounder(options, model, samples, iterations=options.iterations)
    started = time.monotonic()
    rounder.quantize()
    seconds = time.monotonic() - started
    rounder.save_quantized(options.out, format="fake")
    print(json.dumps({"seconds": round(seconds, 1)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = parser.add_subparsers(dest="job", required=True)
    made, read, tuned = jobs.add_parser("make"), jobs.add_parser("weights"), jobs.add_parser("tune")
    for job in (made, tuned):
        job.add_argument("model", type=Path)
    for job in (made, read, tuned):
        job.add_argument("out", type=Path)
        job.add_argument("file", type=Path)
    for job in (made, tuned):
        job.add_argument("--group-size", type=int, default=32)
    tuned.add_argument("--iterations", type=int, default=200)
    made.add_argument("--format", choices=FORMATS, default="auto_gptq")
    made.add_argument("--asym", action="store_true")
    made.add_argument("--positive", action="store_true")
    options = parser.parse_args()
    {"make": make, "weights": weights, "tune": tune}[options.job](options)


if __name__ == "__main__":
    main()
