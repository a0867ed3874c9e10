"""Peak memory of GPTQ on a mixture of experts: of models of one width, but of more and more layers.

    python scripts/measure_expert_memory.py [--layers 2 16] [--samples 4] [--length 256] [--keep
    PATTERN]

Each model is in the shape of Qwen3-MoE: 2048 wide, 64 experts of 384, of which 8 take a token; 16
layers have 2.7 G parameters. Its weights are random. Prints a table in Markdown: the peak of each
phase of `quantize`, and what `quantkit plan` says. Memory bounded by one block does not grow with
the layers in the column "quantize"; the pages of the source's files, which the system may take back
at any time, are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantkit.architectures.families import config_from_hf
from quantkit.architectures.topology import parameters
from quantkit.data.files import DEMO_MODEL, EXCERPT

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 384,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MEASURED = """
import json, sys, threading, time
from pathlib import Path
import quantkit
src, dst, samples, length, keep = sys.argv[1:]
options = dict(method="gptq", calibration=sys.stdin.read(), samples=int(samples), length=int(length),
               keep=keep or (), source_check=False, accept_quality_loss=True)
options["calibration"] = Path(options["calibration"].strip())
planned = quantkit.plan.quantize(src, dst, "int4-g128", **options)
peaks, phase, done = {}, "", threading.Event()

def held():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def watch():
    while not done.wait(0.02):
        peaks[phase] = max(peaks.get(phase, 0), held())

def report(name, *rest):
    global phase
    phase = name

threading.Thread(target=watch, daemon=True).start()
began = time.monotonic()
quantkit.quantize(src, dst, "int4-g128", **options, progress=report)
done.set()
print(json.dumps([peaks, planned.memory_bytes, planned.seconds, time.monotonic() - began]))
"""  # noqa: E501


def make(folder: Path, layers: int) -> int:
    """A folder of random weights, one file a layer; how many there are."""
    folder.mkdir()
    raw = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    found = parameters(config_from_hf(raw, folder))
    index = {}
    for at, parameter in enumerate(found):
        name = f"model-{parameter.layer}.safetensors"
        value = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(
            0, 0.02, generator=generator
        )
        files.setdefault(name, {})[parameter.name] = (
            torch.ones_like(value) if len(parameter.shape) == 1 else value
        )
        index[parameter.name] = name
        last = at + 1 == len(found) or (
            parameter.layer is not None and found[at + 1].layer != parameter.layer
        )
        if parameter.layer is not None and last:
            save_file(files.pop(name), folder / name, metadata={"format": "pt"})
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return sum(torch.Size(parameter.shape).numel() for parameter in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--keep", default="", help="Layers to keep as floats, a glob: to be done sooner."
    )
    options = parser.parse_args()
    print("| layers | parameters | quantize | gate | plan | time |\n|---|---|---|---|---|---|")
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "source"
            count = make(source, layers)
            arguments = [
                source,
                Path(scratch) / "out",
                options.samples,
                options.length,
                options.keep,
            ]
            done = subprocess.run(
                [sys.executable, "-c", MEASURED, *map(str, arguments)],
                input=str(EXCERPT),
                text=True,
                check=True,
                stdout=subprocess.PIPE,
            )
            peaks, planned, _, seconds = json.loads(done.stdout.splitlines()[-1])
            figures = [
                f"{size / 1e6:.0f} MB" for size in (peaks["quantize"], peaks["gate"], planned)
            ]
            print(
                f"| {layers} | {count / 1e9:.2f} G | {' | '.join(figures)} | {seconds:.0f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
