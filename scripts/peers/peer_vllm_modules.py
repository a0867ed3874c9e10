r"""Find out how vLLM names the linears of models, and write the table that quantkit's doctor and
writer read.

    PYTHON scripts/peers/peer_vllm_modules.py FOLDER ... > \
        quantkit/formats/codecs/vllm_modules.toml

PYTHON has vLLM, see `peer_vllm_loader.py`, and the folders are float models, named by their
`model_type`, which `measure_vllm.py --folders` makes. vLLM builds each with settings that name all
of its tensors as not quantized, and loads its weights; meanwhile it is written down which module
takes which tensor, by which name that module looked for its settings, and what became of the names
in the settings. What `vllm_modules.py` does not know by its rules is printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer_vllm_loader as loader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from quantkit.architectures.families.opaque import ROUTERS
from quantkit.formats.codecs.vllm_modules import FUSED, VllmNames

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_EXPERT = re.compile(r".*\bexperts\.\d+\..*")
_LAYER = re.compile(r".*?\blayers\.(\d+)\.")
_HEADER = """\
# How vLLM 0.32 names the linears of models by `model_type`, where it is not as `vllm_modules.py` says.
# Written by scripts/peers/peer_vllm_modules.py.
#
# mapped: beginnings of names in settings, and what vLLM makes of them before it compares them.
# modules: beginnings of names on disk, or whole names, and the modules for whose settings vLLM looks.
# unlisted: fused linears for whose parts vLLM does not look. listed: others, and their parts.
# floats: linears, by their names on disk, that vLLM never quantizes.
# * is a number, + one that counts on from the number of layers.
"""  # noqa: E501
_SETTINGS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {},
}


@dataclass
class Observation:
    """What vLLM does with one model.

    Attributes:
        linears: the names of tensors that may be weights of linears, without ``.weight``.
        mapped: what became of each name in the settings.
        modules: by which name the module that takes a tensor looked for its settings; None if it
            did not, and is never quantized.
        shards: the names for whose settings vLLM also looks, by the name of the module.
    """

    linears: list[str]
    mapped: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str | None] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    loader.prepare()
    observe = watch()
    print(_HEADER, file=answers)
    for folder in sorted(map(Path, sys.argv[1:]), key=lambda path: path.parent.name):
        observation = observe(folder)
        name = str(json.loads((folder / "config.json").read_text())["model_type"])
        if rows := find_exceptions(observation):
            print(format_table(name, rows), file=answers, flush=True)
            for linear, expected, derived in mismatches(observation, rows):
                print(
                    f"# {name}: {linear} is in {expected}, and by the table in {derived}",
                    file=sys.stderr,
                )


def watch() -> Any:
    """Have vLLM's classes report what they do, and return a function that observes one folder."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    observed = Observation([])
    current_tensor = ""

    def record_loads(owner: type, method: str) -> None:
        load = vars(owner)[method]

        def load_and_record(self: Any, *arguments: Any, **options: Any) -> Any:
            observed.modules.setdefault(current_tensor, getattr(self, "looked_up", None))
            return load(self, *arguments, **options)

        setattr(owner, method, load_and_record)

    for owner in (*vars(linear).values(), RoutedExperts):
        for method in ("weight_loader", "weight_loader_v2", "load_weights"):
            if isinstance(owner, type) and callable(vars(owner).get(method)):
                record_loads(owner, method)

    find_method = CompressedTensorsConfig.get_quant_method

    def find_and_record(self: Any, layer: Any, prefix: str) -> Any:
        layer.looked_up = prefix or ""
        last = layer.looked_up.rpartition(".")[2]
        observed.shards[layer.looked_up] = list(self.packed_modules_mapping.get(last, ()))
        return find_method(self, layer, prefix)

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        ignored = get_current_vllm_config().quant_config.ignore
        if len(ignored) == len(observed.linears):
            observed.mapped = dict(zip(observed.linears, ignored, strict=True))

        def tensors() -> Iterator[tuple[str, Any]]:
            nonlocal current_tensor
            for name, tensor in self.get_all_weights(model_config, model):
                current_tensor = name.removesuffix(".weight")
                yield name, tensor

        model.load_weights(tensors())
        raise loader.WeightsLoaded

    CompressedTensorsConfig.get_quant_method = find_and_record
    DefaultModelLoader.load_weights = load_weights

    def observe(folder: Path) -> Observation:
        nonlocal observed
        observed = Observation(linear_names(folder))
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "model"
            shutil.copytree(folder, copy)
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = {**_SETTINGS, "ignore": observed.linears}
            (copy / "config.json").write_text(json.dumps(config))
            outcome, reason = loader.judge(str(copy))
        known = set(observed.linears)
        observed.modules = {
            name: module for name, module in observed.modules.items() if name in known
        }
        if outcome != "loads":  # then only what became of the names in the settings is sure
            print(f"# {folder}: {reason}", file=sys.stderr)
            observed.modules = {}
        return observed

    return observe


def linear_names(folder: Path) -> list[str]:
    """The names of the matrices of a folder, without ``.weight``."""
    from safetensors import safe_open

    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                if name.endswith(".weight") and len(file.get_slice(name).get_shape()) == 2:
                    found.append(name.removesuffix(".weight"))
    return found


def find_exceptions(observation: Observation) -> dict[str, Any]:
    """The rows of the table for a model."""
    rows: dict[str, Any] = {}
    mapped = {template(old): template(new) for old, new in observation.mapped.items()}
    if shorter := shorten(mapped):
        rows["mapped"] = shorter
    names = VllmNames.of_table(rows)
    derived = {
        part: module.name for module in names.group(observation.linears) for part in module.parts
    }
    exceptions = {
        name: module
        for name, module in observation.modules.items()
        if module is not None and derived[name] != module
    }
    if exceptions:
        rows["modules"] = shorten_modules(observation, exceptions, derived, rows)
    if floats := {
        template(name): None for name, module in observation.modules.items() if module is None
    }:
        kept = [name for name in floats if ROUTERS.isdisjoint(name.split("."))]
        rows |= {"floats": kept} if kept else {}
    fused = {
        name: parts
        for name, parts in observation.shards.items()
        if name in observation.modules.values()
    }
    rows |= find_listed(fused)
    return rows


def find_listed(shards: Mapping[str, list[str]]) -> dict[str, Any]:
    """Which fused linears vLLM does not list, and which it lists besides the usual ones."""
    shards = {
        name: [part for part in parts if not name.endswith(f".{part}")]
        for name, parts in shards.items()
    }
    is_listed = {name.rpartition(".")[2] for name, parts in shards.items() if parts}
    unlisted: dict[str, None] = {}
    listed: dict[str, list[str]] = {}
    for name, parts in shards.items():
        last = name.rpartition(".")[2]
        if last in FUSED and not parts:
            unlisted[template(name) if last in is_listed else last] = None
        elif parts and parts != list(FUSED.get(last, ())):
            listed[last] = parts
    found = {"unlisted": list(unlisted), "listed": listed}
    return {key: value for key, value in found.items() if value}


def shorten(replacements: Mapping[str, str]) -> dict[str, str]:
    """The beginnings of templates whose replacement says what becomes of all of them."""
    found: dict[str, str] = {}
    for old, new in replacements.items():
        if old == new:
            continue
        beginning = old, new
        shorter = without_last(*beginning)
        while shorter is not None and agrees(*shorter, replacements):
            beginning = shorter
            shorter = without_last(*beginning)
        found[beginning[0]] = beginning[1]
    return found


def shorten_modules(
    observation: Observation,
    exceptions: Mapping[str, str],
    derived: Mapping[str, str],
    rows: Mapping[str, Any],
) -> dict[str, str]:
    """As `shorten`, for the modules that hold linears: by what they would be called if they were
    not fused.
    """
    layers = 1 + max(
        (int(match[1]) for name in observation.linears if (match := _LAYER.match(name))), default=-1
    )
    whole: dict[str, str] = {}
    unfused: dict[str, str] = {}
    for name, module in observation.modules.items():
        if _EXPERT.fullmatch(name) or module is None:
            continue
        target = template_of_module(name, module, layers)
        whole[template(name)] = target
        parent, joint, _ = target.rpartition(".")
        is_usual = module.rpartition(".")[2] == derived[name].rpartition(".")[2]
        unfused[template(name)] = (
            f"{parent}{joint}{name.rpartition('.')[2]}" if is_usual else target
        )
    short = shorten(unfused)
    excepted = {template(name) for name in exceptions if not _EXPERT.fullmatch(name)}
    found = {
        beginning: replacement
        for beginning, replacement in short.items()
        if any(name == beginning or name.startswith(f"{beginning}.") for name in excepted)
    }
    names = VllmNames.of_table({**rows, "modules": found})
    for module in names.group(observation.linears):
        for part in module.parts:
            if (
                part in exceptions
                and not _EXPERT.fullmatch(part)
                and module.name != exceptions[part]
            ):
                found[template(part)] = whole[template(part)]
    return found


def template_of_module(name: str, module: str, layers: int) -> str:
    """The template of a module, with ``+`` for numbers that count on from those of a linear."""
    own, found = ([int(number) for number in _NUMBER.findall(one)] for one in (name, module))
    counts_on = bool(found) and found == [number + layers for number in own[: len(found)]]
    return template(module).replace("*", "+") if counts_on else template(module)


def without_last(old: str, new: str) -> tuple[str, str] | None:
    """Two names without their last parts, if these are equal; None if not, or if nothing is
    left.
    """
    (first, _, last), (second, _, other) = old.rpartition("."), new.rpartition(".")
    return (first, second) if last == other and first and second else None


def agrees(beginning: str, replacement: str, replacements: Mapping[str, str]) -> bool:
    """Whether all that begin so are replaced so."""
    within = {
        old: new
        for old, new in replacements.items()
        if old == beginning or old.startswith(f"{beginning}.")
    }
    return all(new == replacement + old[len(beginning) :] for old, new in within.items())


def mismatches(observation: Observation, rows: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The linears whose module the table does not give: what vLLM has, and what follows from the
    table.
    """
    for module in VllmNames.of_table(rows).group(observation.linears):
        for part in module.parts:
            expected = observation.modules.get(part)
            if expected is not None and expected != module.name:
                yield part, expected, module.name


def template(name: str) -> str:
    return _NUMBER.sub("*", name)


def format_table(name: str, rows: Mapping[str, Any]) -> str:
    """A model's rows as TOML."""
    lines = [f"[{name}]" if re.fullmatch(r"[\w-]+", name) else f"[{json.dumps(name)}]"]
    lines += [f"{key} = {json.dumps(rows[key])}" for key in ("unlisted", "floats") if key in rows]
    for key in ("listed", "mapped", "modules"):
        lines += [
            f"{key}.{json.dumps(old)} = {json.dumps(new)}" for old, new in rows.get(key, {}).items()
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
