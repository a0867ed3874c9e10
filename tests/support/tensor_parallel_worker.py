"""What one process of a group finds out about models; its findings go to files that the tests read.

    torchrun --nproc-per-node N tensor_parallel_worker.py CASES.json OUT

CASES lists models: ``{"name", "folder", "dtype", "backend", "draft", "engine"}``, with the
compiler's backend or null, the folder of a draft model or null, and whether the compiled engine
runs as well. OUT/RANK.json has the findings by name, OUT/NAME.pt the first process's logits.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from drafts import speculate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import quantkit
from quantkit.distributed.group import ProcessGroup, join_processes
from quantkit.evals.models import backend_names
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine

PROMPT = [1, 7, 30, 4, 55, 18, 9, 77]
NEW = 4
COLLECTIVES = torch.ops._c10d_functional


class Calls(TorchDispatchMode):
    """Counts collectives as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.update(_collective(func))
        return func(*args, **(kwargs or {}))


def _collective(target: object) -> list[str]:
    names = (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "all_to_all_single",
    )
    return [
        name
        for name in names
        if target in (getattr(COLLECTIVES, name), getattr(COLLECTIVES, name).default)
    ]


def opened(folder: Path, dtype: torch.dtype | None, group: ProcessGroup) -> Decoder:
    return load_model(
        folder, device="cpu", dtype=dtype, allow_slow=True, group=group
    )  # of 16 columns, on 4 processes


def batch_logits(model: Decoder) -> Tensor:
    """Logits [3, T, V] of three sequences over a cache: a prompt, more tokens, single steps."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (3, 26), generator=generator)
    cache = KVCache(model.config, 3, 26, model.dtype, "cpu")
    pieces = [slice(0, 18), slice(18, 23), *(slice(at, at + 1) for at in range(23, 26))]
    with torch.inference_mode():
        logits = [model(tokens[:, piece], torch.arange(26)[piece], cache) for piece in pieces]
    return torch.cat(logits, 1)


class Step:
    """One step of greedy decoding, as it is compiled."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.cache = KVCache(model.config, 1, len(PROMPT) + NEW, model.dtype, "cpu")

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._model.head(self._model.hidden(tokens, positions, self.cache)[:, -1])


@torch.inference_mode()
def greedy(step: Any) -> list[int]:
    """`NEW` tokens after the prompt, one step for each."""
    tokens, positions, found = torch.tensor([PROMPT]), torch.arange(len(PROMPT)), []
    for _ in range(NEW):
        tokens = step(tokens, positions).argmax(-1, keepdim=True)
        found.append(int(tokens))
        positions = positions[-1:] + 1
    return found


def _compiled(model: Decoder, backend: str) -> dict[str, Any]:
    """The compiled model's tokens, and the collectives of each graph: one of the prompt, one of a
    step.

    A break in a graph is an error here.
    """
    graphs = []

    def watched(graph: Any, inputs: Any) -> Any:
        graphs.append(
            Counter(name for node in graph.graph.nodes for name in _collective(node.target))
        )
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    tokens = greedy(torch.compile(Step(model), fullgraph=True, backend=watched))
    torch.compiler.reset()
    return {"tokens": tokens, "graphs": graphs}


def _speculated(model: Decoder, draft: Path, group: ProcessGroup) -> list[list[int]]:
    """Greedy tokens with a draft model, and drawn ones without a seed."""
    small = opened(draft, model.dtype, group)
    greedy_text = speculate(model, small, PROMPT, max_new_tokens=NEW)
    return [greedy_text, speculate(model, small, PROMPT, max_new_tokens=4 * NEW, temperature=1.5)]


def _findings(case: dict[str, Any], group: ProcessGroup, out: Path) -> dict[str, Any]:
    model = opened(Path(case["folder"]), getattr(torch, case["dtype"]), group)
    with torch.inference_mode(), Calls() as calls:
        Step(model)(torch.tensor([[5]]), torch.tensor([3]))
    logits = batch_logits(model)
    engine_tokens = None
    if case["engine"]:
        engine = Engine(model, len(PROMPT) + NEW, compiled=True)
        engine_tokens = list(quantkit.generate(engine, PROMPT, max_new_tokens=NEW))
    if group.is_rank0:
        torch.save(logits, out / f"{case['name']}.pt")
    return {
        "tokens": list(quantkit.generate(model, PROMPT, max_new_tokens=NEW)),
        "steps": greedy(Step(model)),
        "drawn": list(quantkit.generate(model, PROMPT, max_new_tokens=NEW, temperature=1.5)),
        "speculated": None
        if case["draft"] is None
        else _speculated(model, Path(case["draft"]), group),
        "logits": str(torch.hash_tensor(logits).item()),
        "collectives": calls.counts,
        "compiled": None if case["backend"] is None else _compiled(model, case["backend"]),
        "engine": engine_tokens,
        "bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "kernels": backend_names(model),
        "fused": model.ops.blocks is not None,
    }


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    with join_processes("cpu") as group:
        found = {case["name"]: _findings(case, group, out) for case in cases}
        (out / f"{group.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
