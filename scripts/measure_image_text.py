"""Quantize tiny models of the architectures that read images and text, and compare the results with the sources.

    python scripts/measure_image_text.py [NAME ...] [--method gptq] [--scheme int4-g32] [--json FILE]

Prints for each how many linears are quantized, which of those that text passes are not, which parameters without text
changed, how the result is loaded, and how far its logits are from those of its dequantized weights; or why it does not
work.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measure_architectures import changed_tensors
from safetensors.torch import load_file
from tiny_image_text import ARCHITECTURES, NEEDS_IMAGE, make
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

import quantkit
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.text.tokenizer import load_tokenizer

_LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[name for name in ARCHITECTURES if name not in NEEDS_IMAGE])
    parser.add_argument("--scheme", default="int4-g32")
    parser.add_argument("--method", choices=("gptq", "rtn"), default="gptq")
    parser.add_argument("--samples", type=int, default=16, help="of GPTQ")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ids = load_tokenizer(DEMO_MODEL).encode(excerpt())
    texts = torch.tensor(ids[: len(ids) // _LENGTH * _LENGTH]).view(-1, _LENGTH)[:4]
    found = {}
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = measure(name, Path(folder), texts, options)
            except Exception as error:  # of any architecture; it is reported
                at = traceback.extract_tb(error.__traceback__)[-1]
                message = " ".join(str(error).split())[:300]
                found[name] = {"error": f"{type(error).__name__}: {message}", "at": f"{at.filename}:{at.lineno}"}
        print(name, found[name], flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


def measure(name: str, folder: Path, texts: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """What became of the linears, the tensors and the logits of one architecture."""
    source, result, floats = (folder / one for one in ("source", "result", "floats"))
    make(name, source)
    given: dict[str, Any] = {"samples": options.samples} if options.method == "gptq" else {}
    made = quantkit.quantize(
        source,
        result,
        options.scheme,
        method=options.method,
        via="transformers",
        source_check=False,
        accept_quality_loss=True,
        **given,
    )
    found: dict[str, Any] = {"linears": sum(made.schemes.values())}
    found["changed"] = changed_tensors(source, result)
    quantkit.convert(result, floats, dequantize=True)
    before, after = _load(source)[0], _load(floats)
    reached = _reached(before, texts)
    found["missing"] = after[1]
    own = after[0].state_dict()
    different = [one for one, value in before.state_dict().items() if not torch.equal(value, own[one])]
    found["outside"] = [one for one in different if one.rpartition(".")[0] not in reached]
    linears = {one for one, module in before.named_modules() if isinstance(module, nn.Linear)}
    kept = sorted(one for one in linears & reached if f"{one}.weight" not in different)
    found["kept"] = dict(Counter(re.sub(r"\d+", "*", one) for one in kept))
    packed = CompressedTensorsConfig(dequantize=True)
    try:
        model, missing = _load(result, quantization_config=packed)
        found["loaded"] = f"{len(missing)} missing, such as {missing[0]}" if missing else "packed"
    except Exception as error:  # of transformers' own loader
        found["loaded"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if found["loaded"] == "packed":
        found["logits"] = float((_logits(model, texts) - _logits(after[0], texts)).abs().max())
    tensors = load_file(next(result.glob("*.safetensors")))
    found["names"] = dict(Counter(re.sub(r"\d+", "*", one) for one in tensors if one.endswith("_packed")))
    found["finite"] = bool(_logits(after[0], texts).isfinite().all())
    return found


def _load(folder: Path, **settings: Any) -> tuple[Any, list[str]]:
    """The model, and the names of the tensors that it does not find."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **settings
    )
    return model.eval(), sorted(info["missing_keys"])


def _logits(model: Any, texts: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=texts, use_cache=False).logits
    return logits


def _reached(model: nn.Module, texts: Tensor) -> set[str]:
    """The names of the modules that tokens pass."""
    found: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: found.add(name)) for name, module in model.named_modules()
    ]
    _logits(model, texts)
    for handle in handles:
        handle.remove()
    return found


if __name__ == "__main__":
    main()
