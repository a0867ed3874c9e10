"""Models of all families shared by processes: experts, sinks, norms over whole widths; the same
tokens as from one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import tensor_parallel_worker as worker
import torch
from architecture_cases import CASES as ARCHITECTURES

import quantkit
from quantkit.distributed.group import SINGLE
from quantkit.model.decoder import Decoder

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Case:
    """A case of `test_architectures`, rounded or not, and how often its processes meet in a
    step.
    """

    architecture: str
    sums: int
    scheme: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)


_WIDE = {"num_key_value_heads": 2, "intermediate_size": 128}
CASES = {
    "qwen3-moe": Case("qwen3-moe-dense-layer", 7),
    "qwen3-moe-int4": Case("qwen3-moe", 7, "int4-g32", {"moe_intermediate_size": 128}),
    "qwen2-moe": Case("qwen2-moe", 7),
    "qwen2-moe-int8": Case("qwen2-moe-step-window", 7, "int8"),
    "mixtral-int4": Case("mixtral-window", 7, "int4-g32", {"intermediate_size": 128}),
    "olmoe": Case("olmoe-clip", 10),
    "olmoe-int4": Case("olmoe", 10, "int4-g32", _WIDE),
    "gpt-oss": Case("gpt-oss", 7),
    "cohere2": Case("cohere2-features", 7),
    "exaone4": Case("exaone4-features", 7),
    "hunyuan-dense": Case("hunyuan-dense-features", 7),
    "gemma4-small": Case("gemma4-small", 11),
    "gemma4": Case("gemma4-features", 7),
    # Both the chosen experts and the feed-forward for every token are added up before a norm.
    "gemma4-experts": Case("gemma4-experts", 10),
    "llama4": Case("llama4-features", 7),
    "gemma2": Case("gemma2-features", 7),
    "gemma3": Case("gemma3-features", 7),
    "olmo2": Case("olmo2-bias", 10),
    "olmo3": Case("olmo3-features", 10),
    "granite": Case("granite-multipliers", 7),
    # The short convolutions are on each process: one sum less for each.
    "lfm2": Case("lfm2", 5),
    "qwen3-5": Case("qwen3-5-features", 5),
    "bamba": Case("bamba-features", 5),
    # A sum for each layer that is not Mamba-2, and that of the embedding.
    "nemotron-h": Case("nemotron-h-features", 4),
    "nemotron-h-moe": Case("nemotron-h-moe-latent", 4),
    "granitemoehybrid-moe": Case("granitemoehybrid-moe", 5),
    "qwen3-next": Case("qwen3-next-features", 5),
    "lfm2-moe-int4": Case("lfm2-moe", 5, "int4-g32", {"moe_intermediate_size": 128}),
    "gpt-oss-int4": Case("gpt-oss", 7, "int4-g32", {"intermediate_size": 128}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    found = {}
    for name, case in CASES.items():
        kind, settings = ARCHITECTURES[case.architecture]
        folder = found[name] = oracle.save(
            oracle.make(kind, **{**settings, **case.changes}), base / name
        )
        if case.scheme is not None:
            found[name] = base / f"{name}-rounded"
            quantkit.quantize(
                folder, found[name], case.scheme, method="rtn", accept_quality_loss=True
            )
    return found


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Decoder]:
    return {name: worker.opened(folder, torch.float32, SINGLE) for name, folder in folders.items()}


_AMONG_FOUR = ("qwen3-moe-int4", "qwen2-moe", "gpt-oss", "gemma2", "olmo2")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "names"), [(2, tuple(CASES)), (4, _AMONG_FOUR)], ids=["2", "4"])
def test_the_tokens_and_logits_are_those_of_one_process(
    count: int,
    names: tuple[str, ...],
    folders: dict[str, Path],
    alone: dict[str, Decoder],
    tmp_path: Path,
) -> None:
    cases = [
        {
            "name": name,
            "folder": str(folders[name]),
            "dtype": "float32",
            "backend": None,
            "draft": None,
            "engine": False,
        }
        for name in names
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    code = "import tensor_parallel_worker; tensor_parallel_worker.main()"
    for done in forked.group(count, code, tmp_path / "cases.json", tmp_path):
        assert done.returncode == 0, done.stderr
    each = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    for name, case in ((name, CASES[name]) for name in names):
        expected = worker.greedy(worker.Step(alone[name]))
        for process in each:
            assert process[name]["steps"] == expected, name
            assert process[name]["collectives"] == {
                "all_reduce": case.sums,
                "all_gather_into_tensor": 1,
            }, name
            assert process[name]["logits"] == each[0][name]["logits"]
        logits = worker.batch_logits(alone[name])
        close = 1e-4 if case.scheme is None else 3e-3
        assert (torch.load(tmp_path / f"{name}.pt") - logits).abs().max() < close, name
        whole = sum(tensor.nbytes for tensor in (*alone[name].parameters(), *alone[name].buffers()))
        assert max(process[name]["bytes"] for process in each) < 1.5 * whole / count, name
