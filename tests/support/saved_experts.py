"""Models of experts in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import torch
from architecture_cases import CASES

from quantkit.data.files import DEMO_MODEL

NEVER, STARVED = 5, 4


def save_experts(case: str, folder: Path, **changes: Any) -> Path:
    """A model of a case, with the demo's tokenizer; where it has experts one gets few tokens,
    another none.
    """
    kind, settings = CASES[case]
    model = oracle.make(kind, **{**settings, "vocab_size": 2048, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter[:, 0] = 0.3  # a state that all tokens share, and no layer adds to
            elif name.endswith(
                ("o_proj.weight", "mlp.down_proj.weight", "shared_expert.down_proj.weight")
            ):
                parameter[0] = 0.0
            elif name.endswith("experts.down_proj"):
                parameter[:, 0] = 0.0
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter[NEVER], parameter[:, 0] = 0.0, 0.0
                parameter[NEVER, 0], parameter[STARVED, 0] = -50.0, -1.0
    oracle.save(model, folder)
    (folder / "tokenizer.model").write_bytes((DEMO_MODEL / "tokenizer.model").read_bytes())
    return folder
