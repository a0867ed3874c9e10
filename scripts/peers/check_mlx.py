"""Hold what quantkit writes for MLX, and reads of it, against mlx-lm.

    python scripts/peers/check_mlx.py PYTHON FOLDER [FAMILY ...]

PYTHON has mlx and mlx-lm (on Linux, ``pip install "mlx[cpu]" mlx-lm``). Random models of
transformers are made in FOLDER, which is not there yet. Of ours, mlx-lm's logits in float32 are
compared with ours; of mlx-lm's own, the weights with what it dequantizes them to, and the logits.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import quantkit
from quantkit.errors import QuantkitError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.load import load_model
from quantkit.tensors.qtensor import QuantTensor

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.processes import run_peer

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 128},
    "qwen3_moe": _EXPERTS,
}
# Of linears, the embedding.
_SCHEMES = (
    ("int4-g32", None),
    ("int4-g128", None),
    ("int8", None),
    ("int4-g64", "int8"),
)
_LAYOUTS = ((4, 64), (8, 32), (6, 64), (3, 128))
_TOKENS = [[1, *(7 * number % 509 + 3 for number in range(199))]]


def main(python: str, folder: Path, families: list[str]) -> None:
    folder.mkdir()
    (folder / "tokens.json").write_text(json.dumps(_TOKENS))
    for kind in families:
        source = folder / kind
        config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **_FAMILIES[kind]})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / f"{kind}-transformers")
        # With keys that mlx-lm knows.
        quantkit.convert(folder / f"{kind}-transformers", source, source_check=False)
        for scheme, embedding in _SCHEMES:
            name = scheme if embedding is None else f"{scheme}-embedding-{embedding}"
            quantized, written = folder / f"{kind}-{name}", folder / f"{kind}-{name}-mlx"
            try:
                quantkit.quantize(
                    source,
                    quantized,
                    scheme,
                    embedding=embedding,
                    method="rtn",
                    source_check=False,
                    accept_quality_loss=True,
                )
                quantkit.convert(quantized, written, to="mlx", source_check=False)
                distance = _compare_logits(python, written, folder)
                print(f"{kind} {name}, ours: logits {distance:.1e} apart", flush=True)
            except QuantkitError as error:
                print(f"{kind} {name}, ours: {error}", flush=True)
        for bits, group_size in _LAYOUTS:
            theirs = folder / f"{kind}-theirs-{bits}-{group_size}"
            run_peer(python, "peer_mlx.py", "quantize", source, theirs, bits, group_size)
            equal, count, codes = _compare_weights(python, theirs, folder)
            distance = _compare_logits(python, theirs, folder)
            print(
                f"{kind} {bits} bits g{group_size}, theirs: {equal} of {count} weights within a"
                f" rounding, {codes} of them codes, logits {distance:.1e}"
                " apart",
                flush=True,
            )


@torch.inference_mode()
def _compare_logits(python: str, model: Path, folder: Path) -> float:
    """Return the largest difference of logits, as a share of their spread."""
    run_peer(
        python,
        "peer_mlx.py",
        "logits",
        model,
        folder / "tokens.json",
        folder / "logits.safetensors",
    )
    theirs = load_file(folder / "logits.safetensors")["logits"]
    tokens = torch.tensor(_TOKENS)
    ours = load_model(model, dtype=torch.float32, backend="reference")(
        tokens, torch.arange(tokens.shape[1])
    )
    return float((ours - theirs).abs().max() / theirs.std())


def _compare_weights(python: str, model: Path, folder: Path) -> tuple[int, int, int]:
    """Return how many weights are within a rounding of float32, of how many, and how many of them
    are codes.
    """
    run_peer(python, "peer_mlx.py", "dequantize", model, folder / "weights.safetensors")
    theirs = {
        name.replace("block_sparse_moe", "mlp"): one
        for name, one in load_file(folder / "weights.safetensors").items()
    }
    config = model / "config.json"  # of floats that are rounded no more
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"dtype": "float32", "torch_dtype": "float32"})
    )
    checkpoint = open_checkpoint(model)
    equal = count = codes = 0
    for name in checkpoint.names():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        own = theirs.get(name if expert is None else name.replace(expert[0], ".switch_mlp."))
        if own is None:
            continue
        value = checkpoint.load(name)
        codes += isinstance(value, QuantTensor)
        found = value.dequantize() if isinstance(value, QuantTensor) else value
        equal += torch.allclose(
            found, own if expert is None else own[int(expert[1])], rtol=2**-22, atol=1e-9
        )
        count += 1
    return equal, count, codes


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(_FAMILIES))
