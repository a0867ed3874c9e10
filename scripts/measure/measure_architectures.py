r"""Quantize tiny models of the architectures that transformers knows, by GPTQ and by rounding, and
compare both with the source in transformers.

    python scripts/measure/measure_architectures.py [NAME ...] [--scheme int4-g32] [--samples 32] \
        [--json FILE] [--update-docs]

Prints for each architecture and both methods the KL on text that calibration does not see, how many
linears are quantized, which of those that tokens pass are not, which other tensors changed, and how
transformers loads the packed result; or why it does not work. `--update-docs` measures all and
writes the table of docs/models.md, in about half an hour. With `--json` a run that was interrupted
continues: what FILE has is not measured again.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import architecture_table
import tiny_architectures
import tiny_image_text
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CompressedTensorsConfig

import quantkit
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.quality.figures import mean_estimate
from quantkit.text.tokenizer import load_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.results import add_docs_options, load_results, parse_docs_options, save_results

_LENGTH = 128
_METHODS: dict[str, dict[str, Any]] = {"gptq": {}, "rtn": {"accept_quality_loss": True}}
_SAME = 1e-3  # of logarithms of probabilities, which a different order of sums changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="int4-g32")
    parser.add_argument("--samples", type=int, default=32, help="of GPTQ")
    add_docs_options(parser)
    options = parse_docs_options(parser)
    ids = load_tokenizer(DEMO_MODEL).encode(excerpt())
    texts = torch.tensor(ids[: len(ids) // _LENGTH * _LENGTH]).view(-1, _LENGTH)[:16]
    results = load_results(options.json)
    for name in options.names or [*architecture_table.TEXT, *architecture_table.IMAGE_TEXT]:
        if name not in results:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = _try_to_measure(name, Path(folder), texts, options)
        print(name, results[name], flush=True)
        save_results(options.json, results)
    print(architecture_table.counts(results))
    if options.update_docs:
        architecture_table.update(results)


def _try_to_measure(
    name: str, folder: Path, texts: Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what `measure` finds, or the error that it raises and where."""
    try:
        return measure(name, folder, texts, options.scheme, options.samples)
    except Exception as error:  # of any architecture; it is reported
        at = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(re.sub(rf"{folder}/[\w-]+: ", "", str(error)).split())
        return {
            "error": f"{type(error).__name__}: {message[:300]}",
            "at": f"{at.filename}:{at.lineno}",
        }


def measure(name: str, folder: Path, texts: Tensor, scheme: str, samples: int) -> dict[str, Any]:
    """What GPTQ and rounding make of a tiny model of an architecture; a dictionary for each method.

    Args:
        name: the architecture, a `model_type`.
        folder: where to write the models.
        texts: tokens [W, T] to compare logits on.
        scheme: of the linears.
        samples: of calibration.
    """
    source = folder / "source"
    has_images = name in architecture_table.IMAGE_TEXT
    (tiny_image_text if has_images else tiny_architectures).make(name, source)
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    before = load(source, kind)
    reached = _find_reached(before, texts)
    reference = log_probs(before, texts)
    found = {}
    for method, given in _METHODS.items():
        settings: dict[str, Any] = {**given, **({"samples": samples} if method == "gptq" else {})}
        made = quantkit.quantize(
            source,
            folder / method,
            scheme,
            method=method,
            via="transformers",
            source_check=False,
            **settings,
        )
        floats = quantkit.convert(
            made.path, folder / f"{method}-floats", dequantize=True, source_check=False
        ).path
        after = load(floats, kind)
        own = log_probs(after, texts)
        kl = mean_estimate((reference.exp() * (reference - own)).sum(-1).flatten().double())
        parameters = after.state_dict()
        different = {
            one
            for one, value in before.state_dict().items()
            if not torch.equal(value, parameters[one])
        }
        linears = {
            f"{one}.weight" for one in reached if isinstance(before.get_submodule(one), nn.Linear)
        }
        found[method] = {
            "kl": kl.value,
            "kl_error": kl.error,
            "finite": bool(own.isfinite().all()),
            "linears": sum(made.schemes.values()),
            "kept": _count_names(linears - different),
            "changed": changed_tensors(source, made.path),
            "outside": _count_names(
                one for one in different if one.rpartition(".")[0] not in reached
            ),
            "loaded": _find_loader(made.path, kind, texts, own),
            "noted": any("does not load the packed weights" in note for note in made.notes),
        }
    return found


class NotLoadedError(Exception):
    """transformers does not find all tensors of a model in a folder."""


def load(folder: Path, kind: Any = AutoModelForCausalLM, *, dequantize: bool = False) -> Any:
    """Load a folder in float32 as a class of transformers does.

    Args:
        folder: the model's.
        kind: the class.
        dequantize: whether packed weights become floats as they are read.

    Raises:
        NotLoadedError: if it does not find all tensors; it fills those with random numbers.
    """
    settings = {}
    if dequantize:
        settings["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **settings
    )
    if missing := sorted(info["missing_keys"]):
        raise NotLoadedError(f"{len(missing)} missing, such as {missing[0]}")
    return model.eval()


def log_probs(model: Any, texts: Tensor) -> Tensor:
    """Logarithms of probabilities [W, T, V]."""
    with torch.inference_mode():
        logits = [model(input_ids=some, use_cache=False).logits for some in texts.split(4)]
    return torch.cat([one.float().log_softmax(-1) for one in logits])


def changed_tensors(source: Path, result: Path) -> list[str]:
    """The tensors that are not quantized and differ from the source's."""
    before, after = (
        {
            name: value
            for path in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(path).items()
        }
        for folder in (source, result)
    )
    packed = {name.rpartition(".weight_")[0] for name in after if ".weight_" in name}
    # One by one now.
    experts = {
        name
        for name, value in before.items()
        if name not in after and (value.dim() == 3 or ".experts." in name)
    }
    return [
        name
        for name, value in before.items()
        if name not in experts
        and name.removesuffix(".weight") not in packed
        and not (name in after and torch.equal(after[name], value))
    ]


def _find_loader(folder: Path, kind: Any, texts: Tensor, expected: Tensor) -> str:
    """How transformers loads the packed weights so that they have the expected logits: `as it is`,
    `dequantized` as they are read, or the reason why it does not.
    """
    reason = ""
    for how, dequantize in {"as it is": False, "dequantized": True}.items():
        try:
            difference = float(
                (log_probs(load(folder, kind, dequantize=dequantize), texts) - expected).abs().max()
            )
        except Exception as error:  # of transformers' own loader
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        if difference < _SAME:
            return how
        reason = f"other logits, by {difference:.2g}"
    return reason


def _find_reached(model: nn.Module, texts: Tensor) -> set[str]:
    """The names of the modules that tokens pass."""
    found: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: found.add(name))
        for name, module in model.named_modules()
    ]
    log_probs(model, texts[:1])
    for handle in handles:
        handle.remove()
    return found


def _count_names(names: Iterable[str]) -> dict[str, int]:
    """How many names there are, those that differ only in their numbers as one."""
    return dict(Counter(re.sub(r"\d+", "*", one) for one in sorted(names)))


if __name__ == "__main__":
    main()
