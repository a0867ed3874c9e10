r"""Measure the quantized products on the GPU at hand against bfloat16 and against peers.

    python scripts/measure/measure_gpu.py [--schemes int8,int4-g128] \
        [--models llama-2-7b,llama-3.1-8b] [--tokens 1,16] [--json FILE] [--plot FILE.png] \
        [--seconds 500] [--dry-run]

For every linear shape, q/k/v and gate/up joined, and every number of tokens: the median time of one
product with a cold L2 cache, from CUDA graphs over operands that are together twice its size.
Prints Markdown: microseconds of bfloat16 `F.linear`, and for each scheme and peer the speed
relative to it; for one token also the weight's bytes a second as a share of what a copy moves in
the same run. Peers are those that can be imported: torchao, gemlite, and ``F.linear(x,
w.to(x.dtype)) * s`` under torch.compile. Nothing new is begun after --seconds. A dry run takes a
tiny shape through Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tune_triton import SHAPES

from quantkit.kernels.dispatch import list_allowed_backends
from quantkit.kernels.triton_tiles import TOKENS
from quantkit.kernels.triton_tune import copies_beyond_cache, seconds_each
from quantkit.kernels.triton_words import INTERPRETED
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import QuantScheme

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
Linear = Callable[[Tensor], Tensor]
"""One product; a maker gives the bytes of its weight and as many as the cache takes, with own
operands.
"""


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(1 << (16 if INTERPRETED else 30), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_each([lambda: target.copy_(source)] * 4)


def ours(weight: Tensor, text: str) -> tuple[int, list[Linear]]:
    from quantkit.model.linear import QuantLinear

    quantized = quantize_rtn(weight, QuantScheme.parse(text), torch.bfloat16)
    first = QuantLinear(
        quantized, None, weight.device, torch.bfloat16, list_allowed_backends("triton")
    )
    size = sum(buffer.nbytes for buffer in first.buffers())
    others = (
        QuantLinear(quantized, None, weight.device, torch.bfloat16, list_allowed_backends("triton"))
        for _ in range(copies_beyond_cache(size, weight.device) - 1)
    )
    return size, [first, *others]


def bfloat16(weight: Tensor) -> tuple[int, list[Linear]]:
    copies = [weight.clone() for _ in range(copies_beyond_cache(weight.nbytes, weight.device))]
    return weight.nbytes, [partial(_linear, weight=copy) for copy in copies]


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def plain_int8(weight: Tensor) -> tuple[int, list[Linear]]:
    quantized = quantize_rtn(weight, QuantScheme(8, None), torch.bfloat16)
    codes, scale = (quantized.codes.int() - 128).to(torch.int8), quantized.scale.squeeze(1)
    compiled = torch.compile(lambda x, w, s: F.linear(x, w.to(x.dtype)) * s)
    count = copies_beyond_cache(codes.nbytes, weight.device)
    return codes.nbytes, [partial(compiled, w=codes.clone(), s=scale.clone()) for _ in range(count)]


def torchao(weight: Tensor, bits: int) -> tuple[int, list[Linear]]:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    packing = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}
    config = Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(**packing)
    size = weight.numel() * bits // 8
    layers = [_module(weight) for _ in range(copies_beyond_cache(size, weight.device))]
    for layer in layers:
        quantize_(layer, config)
    return size, [torch.compile(layer) for layer in layers]


def gemlite(weight: Tensor, bits: int) -> tuple[int, list[Linear]]:
    from gemlite.helper import A16W8

    if bits != 8:
        raise ImportError("its int4 takes weights quantized by hqq")
    size = weight.numel()
    make = A16W8(device="cuda:0", dtype=torch.bfloat16)
    return size, [
        make.from_linear(_module(weight)) for _ in range(copies_beyond_cache(size, weight.device))
    ]


def _module(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


PEERS: dict[str, Callable[[Tensor], tuple[int, list[Linear]]]] = {
    "int8, compiled": plain_int8,
    "torchao int8": partial(torchao, bits=8),
    "torchao int4-g128": partial(torchao, bits=4),
    "gemlite int8": partial(gemlite, bits=8),
}


def rows(
    shapes: list[tuple[int, int]],
    makers: dict[str, Any],
    tokens: list[int],
    copied: float,
    deadline: float,
) -> Iterator[Any]:
    """One result a shape, kind of weight and number of tokens."""
    for out, columns in shapes:
        weight = torch.randn(out, columns, device=DEVICE, dtype=torch.bfloat16) / columns**0.5
        for name, make in makers.items():
            if time.monotonic() > deadline:
                print(f"- {name}, {out} x {columns}: time is up")
                continue
            try:
                size, linears = make(weight)
                for count in tokens:
                    x = torch.randn(count, columns, device=DEVICE, dtype=torch.bfloat16)
                    [linear(x) for linear in linears]
                    seconds = seconds_each([partial(linear, x) for linear in linears])
                    yield {
                        "shape": [out, columns],
                        "weight": name,
                        "tokens": count,
                        "us": seconds * 1e6,
                        "of_copy": size / seconds / copied,
                    }
            except Exception as error:  # a peer that is not there, or that can't
                print(
                    f"- {name}, {out} x {columns}: {type(error).__name__}:"
                    f" {str(error).splitlines()[:1]}"
                )


def table(found: list[Any], names: list[str]) -> Iterator[str]:
    """Markdown: microseconds of bfloat16, then speed relative to it."""
    times = {(*one["shape"], one["weight"], one["tokens"]): one for one in found}
    yield f"| O x I | tokens | bf16, us | {' | '.join(names)} |\n|" + "---|" * (3 + len(names))
    for out, columns, tokens in dict.fromkeys((*one["shape"], one["tokens"]) for one in found):
        base = times[out, columns, "bf16", tokens]["us"]
        cells = [times.get((out, columns, name, tokens)) for name in names]
        shares = (f" ({one['of_copy']:.0%})" if one and tokens == 1 else "" for one in cells)
        text = (
            f"{base / one['us']:.2f}{share}" if one else ""
            for one, share in zip(cells, shares, strict=True)
        )
        yield f"| {out} x {columns} | {tokens} | {base:.1f} | {' | '.join(text)} |"


def plot(found: list[Any], path: Path) -> None:
    """Speed relative to bfloat16 by number of tokens, a panel a shape."""
    from quantkit.evals.drawing import new_figure, picture_bytes, style_axes

    shapes = list(dict.fromkeys(tuple(one["shape"]) for one in found))
    figure = new_figure(5 * len(shapes), 4)
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        here = [one for one in found if tuple(one["shape"]) == shape]
        base = {one["tokens"]: one["us"] for one in here if one["weight"] == "bf16"}
        for name in dict.fromkeys(one["weight"] for one in here):
            line = [
                (one["tokens"], base[one["tokens"]] / one["us"])
                for one in here
                if one["weight"] == name
            ]
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
        axes.set(
            title=f"{shape[0]} x {shape[1]}",
            xlabel="tokens",
            ylabel="speed, bf16 = 1",
            xscale="log",
        )
        style_axes(axes, "both")
    axes.legend()
    path.write_bytes(picture_bytes(figure, path.suffix.removeprefix(".")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default="int8,int4-g32,int4-g128,int4-g128-asym")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    # An error only after the measurements would lose them.
    if options.plot and options.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error("--plot takes a .png, .pdf or .svg file")
    deadline = time.monotonic() + options.seconds
    schemes, tokens = (
        options.schemes.split(","),
        [int(count) for count in options.tokens.split(",")],
    )
    shapes = sorted({shape for model in options.models.split(",") for shape in SHAPES[model]})
    if options.dry_run:
        shapes, tokens = [(48, 128)], [1, 17]
    torch._dynamo.config.recompile_limit = 1024
    copied = copy_bandwidth()
    name = "Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name()
    gpu = f"{name}, torch {torch.__version__}, copies {copied / 1e9:.0f} GB/s"
    print(f"{gpu}\n")
    peers = {} if options.dry_run else PEERS
    makers = {"bf16": bfloat16, **{text: partial(ours, text=text) for text in schemes}, **peers}
    found = []
    with torch.inference_mode():
        for one in rows(shapes, makers, tokens, copied, deadline):
            found.append(one)
            print(
                f"{one['shape']}, {one['weight']}, {one['tokens']} tokens: {one['us']:.1f} us",
                flush=True,
            )
            if options.json:
                options.json.write_text(
                    json.dumps({"gpu": gpu, "copied": copied, "products": found}, indent=1)
                )
    print("\n" + "\n".join(table(found, [name for name in makers if name != "bf16"])))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
