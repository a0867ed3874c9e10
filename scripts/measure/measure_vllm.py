r"""Quantize tiny models of the architectures that transformers knows, and compare what vLLM's
loader makes of the folders with what the model card, `inspect` and `doctor` say.

    python scripts/measure/measure_vllm.py --vllm PYTHON [NAME ...] [--folders DIR] [--json FILE] \
        [--update-docs]

PYTHON has vLLM, see `peer_vllm_loader.py`. Each architecture is quantized by rounding to
compressed-tensors, and if quantkit has a decoder for it to GPTQ and AWQ too: all linears in one
scheme, with a layer in floats, with several schemes, and with linears in floats that vLLM fuses
with others. Prints what differs. `--update-docs` judges all architectures and writes the table of
docs/models.md. With `--json` a run that was interrupted continues; with `--folders` the folders
stay.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import architecture_table
import tiny_architectures
import tiny_image_text
import vllm_table
from safetensors.torch import load_file, save_file

import quantkit
import quantkit.errors
from quantkit import Override, QuantScheme, Recipe
from quantkit.architectures.families import FAMILIES

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import PEERS, Worker, WorkerEndedError
from shared.results import add_docs_options, load_results, parse_docs_options, save_results

_INT4, _INT8 = QuantScheme.parse("int4-g32"), QuantScheme.parse("int8")
_BLOCK = re.compile(r".*?\.\d+(?=\.)")
_REFUSED = "vLLM 0.32 does not load it"
_FORMATS = ("compressed-tensors", "gptq", "awq")

# vLLM has no separate output head for these, as in the published models.
_TIED = frozenset({"bloom", "gemma2", "gemma3n_text"})
# What the published config.json states, vLLM needs and transformers does not write. A key with a
# dot is in a part. Towers whose tensors have these names in published models, and which
# transformers writes without the last part.
_TOWER = ("vision_tower.", "vision_tower.vision_model.")
_TOWERS_RENAMED = frozenset(
    {
        "gemma3",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "paligemma",
    }
)
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 16},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "gpt_oss": {"rope_parameters.beta_fast": 32.0, "rope_parameters.beta_slow": 1.0},
    "glm4v_moe": {"text_config.head_dim": 16, "text_config.use_qk_norm": False},
    "lfm2": {
        "block_dim": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "conv_dim": 64,
        "conv_dim_out": 64,
    },
}


class Judge:
    """A process of vLLM's loader, started again after it died."""

    def __init__(self, python: str) -> None:
        self._command = [python, PEERS / "peer_vllm_loader.py"]
        self._worker: Worker | None = None

    def judge(self, folder: Path) -> dict[str, str]:
        """Return the outcome of loading a folder and its reason."""
        if self._worker is None:
            self._worker = Worker(self._command, name="vLLM", quiet=True)
        try:
            answer = json.loads(self._worker.ask(str(folder)))
        except WorkerEndedError:
            self._worker = None
            return {"outcome": "fails", "reason": "vLLM's process died"}
        return {
            "outcome": answer["outcome"],
            "reason": answer["reason"].replace(str(folder), "DST"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the Python that has vLLM")
    parser.add_argument("--folders", type=Path, help="where to keep the folders")
    add_docs_options(parser)
    options = parse_docs_options(parser)
    results = load_results(options.json)
    judge = Judge(options.vllm)
    for name in options.names or [*architecture_table.TEXT, *architecture_table.IMAGE_TEXT]:
        if name in results:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = measure(name, (options.folders or Path(scratch)) / name, judge)
        print(name, *vllm_table.describe(results[name]), sep="\n    ", flush=True)
        save_results(options.json, results)
    differing = [name for name in results if vllm_table.differences(results[name])]
    print(f"{len(results)} architectures; differences in {len(differing)}: {', '.join(differing)}")
    if options.update_docs:
        vllm_table.update(results)
    sys.exit(bool(differing))


def measure(name: str, folder: Path, judge: Judge) -> dict[str, Any]:
    """What vLLM makes of the float model of an architecture, and of each quantized folder.

    Args:
        name: the architecture, a `model_type`.
        folder: where to write the models.
        judge: vLLM's loader.
    """
    source = folder / "source"
    if not source.exists():
        make_source(name, source)
    result: dict[str, Any] = {"source": judge.judge(source), "folders": {}}
    if result["source"]["outcome"] != "loads":
        return result
    for form in _FORMATS if name in FAMILIES and FAMILIES[name].runs else _FORMATS[:1]:
        for kind, recipe in recipes(folder / f"{_FORMATS[0]}-plain"):
            result["folders"][f"{form} {kind}"] = judge_folder(
                source, folder / f"{form}-{kind}", form, recipe, judge
            )
    return result


def make_source(name: str, folder: Path) -> None:
    """Write the float model of an architecture, as vLLM reads it."""
    if name in _TIED:
        tiny_architectures.ARCHITECTURES[name]["tie_word_embeddings"] = True
    maker = tiny_image_text if name in architecture_table.IMAGE_TEXT else tiny_architectures
    maker.make(name, folder)
    if name in _TOWERS_RENAMED:
        rename_tensors(folder, *_TOWER)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in _PUBLISHED.get(name, {}).items():
        part, _, last = key.rpartition(".")
        (config[part] if part else config)[last] = value
    path.write_text(json.dumps(config, indent=2))


def rename_tensors(folder: Path, beginning: str, replacement: str) -> None:
    """Replace the beginning of names of tensors in the files of a folder."""
    for path in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            renamed = (
                replacement + name.removeprefix(beginning) if name.startswith(beginning) else name
            )
            tensors[renamed] = tensor
        save_file(tensors, path, metadata={"format": "pt"})


def recipes(plain: Path) -> Iterator[tuple[str, Recipe]]:
    """The recipes by name; those after the first need the folder of the first.

    Args:
        plain: the folder in which all linears have one scheme.
    """
    yield "plain", Recipe(_INT4)
    if not plain.exists():
        return
    modules: Mapping[str, Any] = json.loads((plain / "quantkit.json").read_text())["modules"]
    quantized = [module for module, facts in modules.items() if facts["scheme"] is not None]
    blocks = list(
        dict.fromkeys(match[0] for module in quantized if (match := _BLOCK.match(module)))
    )
    first, last = (module.rpartition(".")[2] for module in (quantized[0], quantized[-1]))
    if len(blocks) > 1:
        yield "kept-layer", Recipe(_INT4, (Override(f"{blocks[0]}.*", None),))
        yield "mixed-layers", Recipe(_INT4, (Override(f"{blocks[-1]}.*", _INT8),))
    if first != last:
        yield "mixed-linears", Recipe(_INT4, (Override(f"*.{last}", _INT8),))
        yield "kept-linears", Recipe(_INT4, (Override(f"*.{first}", None),))


def judge_folder(
    source: Path, folder: Path, form: str, recipe: Recipe, judge: Judge
) -> dict[str, Any]:
    """Quantize a model, and return vLLM's outcome with what quantkit says of the folder; `refused`
    is quantkit's error.
    """
    notes: list[str] = []
    if not folder.exists():
        try:
            made = quantkit.quantize(
                source,
                folder,
                recipe,
                to=form,
                method="rtn",
                source_check=False,
                accept_quality_loss=True,
            )
        except quantkit.errors.QuantkitError as error:
            return {"refused": f"{type(error).__name__}: {error}".replace(str(source), "SRC")}
        notes = list(made.notes)
    inspection = quantkit.inspect(folder)
    diagnosis = quantkit.diagnose(folder, runtime="vllm")
    named = {
        finding.rule.name: finding.message
        for finding in diagnosis.findings
        if diagnosis.severity(finding) == "error"
    }
    return {
        **judge.judge(folder),
        "doctor": named,
        "inspect": _REFUSED not in (inspection.readers_note or ""),
        "named by inspect": any(reader.startswith("vLLM") for reader in inspection.readers),
        "card": _REFUSED not in (folder / "README.md").read_text(),
        "note": not any(_REFUSED in note for note in notes),
    }


if __name__ == "__main__":
    main()
