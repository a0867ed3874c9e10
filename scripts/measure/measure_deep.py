"""Damage a sound model in ways that leave it well-formed, and see what `quantkit doctor --deep`
finds of each.

    python scripts/measure/measure_deep.py MODEL [--only WORD]

MODEL is a folder in floats that `quantkit convert` wrote. Prints a table in Markdown, a row for
each damage: the perplexity on a packaged text, what is found in the weights and predictions alone,
with quantkit.json, and against the source. The first row is the sound model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.doctor.findings import rules
from quantkit.formats.containers.meta_tensors import to_interleaved

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.tables import print_header, print_row

Tensors = dict[str, Tensor]
Damage = Callable[[Tensors, dict[str, Any]], object]
WEIGHTS = "model.safetensors"
OF_MANIFEST = {"not-as-written", "worse-than-source"}
OF_SOURCE = {rule.name for rule in rules()["Against its source, where it is given"]}


def swap_layers(first: int, second: int) -> Damage:
    """Return what puts two layers in each other's place."""

    def damage(tensors: Tensors, _: dict[str, Any]) -> None:
        one, other = f"model.layers.{first}.", f"model.layers.{second}."
        for name in [name for name in tensors if name.startswith(one)]:
            twin = other + name.removeprefix(one)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return damage


def double_down_proj(layer: int) -> Damage:
    """Return what makes a down_proj twice as large."""
    return lambda tensors, _: tensors[f"model.layers.{layer}.mlp.down_proj.weight"].mul_(2)


def reorder_rows(change: Callable[[Tensor], Tensor]) -> Damage:
    """Return what changes the order of rows of all q_proj and k_proj."""

    def damage(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] = change(tensors[name]).contiguous()

    return damage


def shuffle_rows(rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def rope(factor: float) -> Damage:
    """Return what multiplies the rope base."""

    def damage(_: Tensors, config: dict[str, Any]) -> None:
        for settings in (config, config.get("rope_parameters") or {}):
            if "rope_theta" in settings:
                settings["rope_theta"] *= factor

    return damage


def halve_heads(_: Tensors, config: dict[str, Any]) -> None:
    """Make twice as many heads, half as large."""
    config["head_dim"] //= 2
    config["num_attention_heads"] *= 2
    config["num_key_value_heads"] *= 2


def damages(config: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    """Yield each with its name."""
    layers, size = config["num_hidden_layers"], config["head_dim"]
    middle = layers // 2
    yield "none", lambda _, __: None
    yield "layers 0 and 1 swapped", swap_layers(0, 1)
    yield f"layers {middle - 1} and {middle} swapped", swap_layers(middle - 1, middle)
    yield f"layers 1 and {layers - 2} swapped", swap_layers(1, layers - 2)
    yield "q, k rows shuffled", reorder_rows(shuffle_rows)
    yield "q, k rows in Meta's order", reorder_rows(lambda rows: to_interleaved(rows, size))
    yield from (
        (f"down_proj of layer {layer} doubled", double_down_proj(layer))
        for layer in (0, middle, layers - 1)
    )
    yield "rope base times 100", rope(100)
    yield "twice the heads, half as large", halve_heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default="", help="damages whose name has this word")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    print_header("damage", "perplexity", "alone", "with quantkit.json", "--against")
    for name, damage in dict(damages(config)).items():
        if options.only in name:
            with tempfile.TemporaryDirectory() as scratch:
                cells = measure_damage(options.model, Path(scratch) / "model", damage, config)
            print_row(name, *cells)


def measure_damage(source: Path, folder: Path, damage: Damage, config: dict[str, Any]) -> list[str]:
    """Return the cells of a damage's row."""
    shutil.copytree(source, folder)
    tensors, changed = load_file(source / WEIGHTS), json.loads(json.dumps(config))
    damage(tensors, changed)
    if changed != config:
        (folder / "config.json").write_text(json.dumps(changed))
    if not all(
        torch.equal(tensor, tensors[name]) for name, tensor in load_file(source / WEIGHTS).items()
    ):
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    found = quantkit.diagnose(folder, deep=True, against=source)
    names = list(dict.fromkeys(one.rule.name for one in found.findings))
    alone = [name for name in names if name not in OF_MANIFEST | OF_SOURCE]
    texts = [one for one in found.looked_at if one.startswith("perplexity")]
    texts += [one.message for one in found.findings if one.rule.name == "no-prediction"]
    perplexity = texts[0].partition("perplexity ")[2].split()[0].rstrip(")") if texts else "-"
    groups = (
        alone,
        [name for name in names if name in OF_MANIFEST],
        [name for name in names if name in OF_SOURCE],
    )
    return [perplexity, *(", ".join(f"`{name}`" for name in one) or "-" for one in groups)]


if __name__ == "__main__":
    main()
