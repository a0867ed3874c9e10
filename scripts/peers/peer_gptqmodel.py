r"""GPTQ and AWQ folders made and read by gptqmodel, to be compared with what quantkit reads of
them.

    PEER scripts/peers/peer_gptqmodel.py make MODEL OUT --bits 4 --group-size 32 --layout gptq \
        [--asym] [--act-order] [--tokens FILE] PEER scripts/peers/peer_gptqmodel.py weights FOLDER \
        FILE
    python scripts/peers/peer_gptqmodel.py compare FOLDER FILE

PEER has gptqmodel and not quantkit; on two cores it wants GPTQMODEL_CPU_WORKERS=2, and
OMP_NUM_THREADS not set. `make` quantizes a Hugging Face folder of floats on a few random samples,
or on those of a safetensors file whose `tokens` are [N, T] int64; `weights` writes the weights and
logits that gptqmodel takes a folder's tensors for, dequantized in float32, and `compare`, with
quantkit, says how far they are from ours, in one line of JSON: the exit status is 1 where a weight
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYOUTS = ("gptq", "gptq_v2", "awq")


def make(options: argparse.Namespace) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    awq = options.layout == "awq"
    method: dict[str, Any] = (
        {"method": "awq", "format": "gemm"}
        if awq
        else {
            "method": "gptq",
            "format": options.layout,
            "desc_act": options.act_order,
            "static_groups": False,
            "act_group_aware": False,
        }
    )
    config = QuantizeConfig(
        bits=options.bits,
        group_size=options.group_size,
        sym=not options.asym,
        device="cpu",
        **method,
    )
    model = GPTQModel.load(str(options.model), config)
    vocabulary = model.model.config.vocab_size
    if options.tokens is None:
        samples = [torch.randint(3, vocabulary, (128,)).tolist() for _ in range(32)]
    else:
        samples = load_file(options.tokens)["tokens"].tolist()
    ids = [{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in samples]
    model.quantize(ids, batch_size=4)
    model.save(str(options.out))


@torch.inference_mode()
def weights(options: argparse.Namespace) -> None:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    method = json.loads((options.folder / "config.json").read_text())["quantization_config"][
        "quant_method"
    ]
    backend = BACKEND.AWQ_TORCH if method == "awq" else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(str(options.folder), device="cpu", backend=backend, dtype=torch.float16)
    found = {}
    for name, module in model.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        module.scales = module.scales.float()
        if method == "awq":
            size = module.in_features if module.group_size == -1 else module.group_size
            weight = dequantize_gemm(
                module.qweight, module.qzeros, module.scales, module.bits, size
            )
        else:
            weight = module.dequantize_weight()
        found[f"{name}.weight"] = weight.t().contiguous().float()
        module.scales = module.scales.half()
    tokens = torch.arange(3, 67).unsqueeze(0)
    found["logits"] = model.model(tokens).logits[0].float()
    save_file(found, options.file)


def compare(options: argparse.Namespace) -> None:
    from quantkit.formats.checkpoint import list_uncarried_weights, schemes
    from quantkit.formats.detect import open_checkpoint
    from quantkit.tensors.qtensor import QuantTensor

    checkpoint, theirs = open_checkpoint(options.folder), load_file(options.file)
    equal, farthest = 0, 0.0
    names = [name for name in theirs if name != "logits"]
    for name in names:
        value = checkpoint.load(name)
        coded = isinstance(value, QuantTensor)
        ours = value.dequantize() if coded else value.float()
        # Floats are rounded once.
        wanted = theirs[name] if coded else theirs[name].to(value.dtype).float()
        equal += torch.equal(ours, wanted)
        farthest = max(farthest, (ours - wanted).abs().max().item())
    found = {str(scheme) for scheme in schemes(checkpoint).values()} | set(
        list_uncarried_weights(checkpoint).values()
    )
    print(
        json.dumps(
            {
                "folder": options.folder.name,
                "schemes": sorted(found),
                "weights": len(names),
                "equal": equal,
                "farthest": farthest,
                "notes": checkpoint.notes,
            }
        )
    )
    if equal < len(names) or not names:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = parser.add_subparsers(dest="job", required=True)
    made = jobs.add_parser("make")
    made.add_argument("model", type=Path)
    made.add_argument("out", type=Path)
    made.add_argument("--tokens", type=Path)
    made.add_argument("--bits", type=int, choices=(4, 8), default=4)
    made.add_argument("--group-size", type=int, default=32)
    made.add_argument("--layout", choices=LAYOUTS, default="gptq")
    made.add_argument("--asym", action="store_true")
    made.add_argument("--act-order", action="store_true")
    for name in ("weights", "compare"):
        job = jobs.add_parser(name)
        job.add_argument("folder", type=Path)
        job.add_argument("file", type=Path)
    options = parser.parse_args()
    {"make": make, "weights": weights, "compare": compare}[options.job](options)


if __name__ == "__main__":
    main()
