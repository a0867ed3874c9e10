"""Runs in another process, over eight virtual devices: what training over meshes gives, and what
torch gives, as JSON.

python -m xla_training_cases FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec
from transformers import AutoModelForCausalLM

from quantkit.base.progress import silent
from quantkit.evals.synthetic import open_shape_checkpoint
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.tensors.qtensor import QuantTensor
from quantkit.training.blockwise import float_states
from quantkit.training.decoder import make_decoder_engine
from quantkit.training.optimizer import Schedule, adam, corrections
from quantkit.training.trained import TrainedCheckpoint, TrainedNames
from quantkit.training.training import Samples, Training
from quantkit.xla.hlo import count_exchanges
from quantkit.xla.training import engine
from quantkit.xla.training.arrays import load_arrays
from quantkit.xla.training.estimate import find_collective_axes, lower_step
from quantkit.xla.training.model import ROTARY, MeshDecoder
from quantkit.xla.training.partitions import DeviceMesh
from quantkit.xla.training.program import HEAD, TARGET_HEAD, divergence
from quantkit.xla.training.state import select_trained_leaves

warnings.simplefilter("error")
EPOCHS, BATCH, STEPS = 4, 4, 20
MESHES = ("2x4", "4x2")
SLICES = {"2 slices of 2x2": ((2, 2), 2)}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    meshes = {name: DeviceMesh.of(jax.devices(), _shape(name)) for name in MESHES}
    for case in sorted(one.name for one in (folder / "cases").iterdir()):
        tried = meshes if case == "a KV head on all" else {"2x4": meshes["2x4"]}
        found[case] = trained(folder / "cases" / case, folder / "scratch" / case, tried)
    found["slices"] = trained(
        folder / "cases" / "a KV head on all",
        folder / "scratch" / "slices",
        {name: DeviceMesh.of(jax.devices(), *one) for name, one in SLICES.items()},
    )
    found["floats"] = all_floats(folder, meshes["2x4"])
    found["layer"] = {name: of_a_layer(folder, mesh) for name, mesh in meshes.items()}
    found["bytes"] = held_bytes(folder / "cases" / "int8 rows" / "int4", meshes["2x4"])
    return found


def trained(case: Path, scratch: Path, meshes: dict[str, DeviceMesh]) -> dict[str, Any]:
    """The KL after each epoch of torch and of each mesh, and the largest relative difference of
    the scales and norms of a tensor.
    """
    floats, int4 = open_checkpoint(case / "floats"), open_checkpoint(case / "int4")
    names = TrainedNames.of(int4, norms=True, codes=False)
    tokens = torch.randint(3, 60, (12, 7), generator=torch.Generator().manual_seed(0))

    def model(name: str) -> TrainedCheckpoint:
        return TrainedCheckpoint(int4, names, ActivationStore(scratch / name, 1 << 30), 1 << 30)

    def run(name: str, own: TrainedCheckpoint, mesh: DeviceMesh | None) -> list[float]:
        samples = Samples(tokens, ActivationStore(scratch / f"{name} targets", 1 << 30), BATCH)
        schedule = Schedule(EPOCHS * samples.steps)
        if mesh is None:
            samples.compute_targets(float_states(floats, BATCH), silent)
            made: Any = make_decoder_engine(own, floats, samples, schedule, torch.device("cpu"))
        else:
            samples.compute_targets(engine.make_hidden_function(floats, mesh, BATCH), silent)
            made = engine.OnDevices(own, int4, floats, samples, schedule, mesh)
        training = Training(own, samples, made, epochs=EPOCHS, seed=0)
        state = training.run(evaluated=lambda state: None, stepped=lambda state: None)
        made.fetch()
        return [
            value
            for one in state.curve
            for value in (one.held_back, one.training)
            if value is not None
        ]

    expected = model("torch")
    found: dict[str, Any] = {"torch": run("torch", expected, None), "steps": EPOCHS * 2}
    for name, mesh in meshes.items():
        own = model(name)
        found[name] = {"curve": run(name, own, mesh), "apart": max(_apart(expected, own))}
    return found


def _apart(expected: Checkpoint, found: TrainedCheckpoint) -> list[float]:
    """Return the norm of the difference of each tensor that is written, relative to its norm.

    Adam divides a gradient by its own size: where one is nearly zero, its rounding error decides
    a whole step, so that a single element may differ by far more than the others.
    """
    apart = []
    for name in found.factors:
        first, second = (
            tensor.scale.float() if isinstance(tensor, QuantTensor) else tensor.float()
            for tensor in (expected.load(name), found.load(name))
        )
        apart.append(((second - first).norm() / first.norm()).item())
    return apart


def all_floats(folder: Path, mesh: DeviceMesh) -> dict[str, list[float]]:
    """The losses of `STEPS` steps that train all weights of a model, by transformers and over a
    mesh.
    """
    target, start = folder / "cases" / "a KV head on all" / "floats", folder / "other"
    tokens = torch.randint(3, 60, (8, 7), generator=torch.Generator().manual_seed(1))
    models = [
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (target, start)
    ]
    with torch.no_grad():
        expected = models[0](tokens).logits.log_softmax(-1)
        states = models[0].model(tokens).last_hidden_state
    optimizer = torch.optim.Adam(models[1].parameters(), lr=1e-3, eps=1e-15)
    losses = []
    for _ in range(STEPS):
        own = models[1](tokens).logits.log_softmax(-1)
        loss = (expected.exp() * (expected - own)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "transformers": losses,
        "mesh": _all_floats_on(mesh, open_checkpoint(start), target, tokens, states),
    }


def _all_floats_on(
    mesh: DeviceMesh, start: Checkpoint, target: Path, tokens: torch.Tensor, states: torch.Tensor
) -> list[float]:
    decoder, arrays = MeshDecoder(start.config, {}, mesh), load_arrays(start, mesh)
    weights = {name: value for name, value in arrays.items() if not name.startswith(ROTARY)}
    fixed = {name: value for name, value in arrays.items() if name.startswith(ROTARY)}
    fixed[TARGET_HEAD] = load_arrays(open_checkpoint(target), mesh, only=HEAD)[HEAD]
    sharded = weights["0.mlp.up_proj.weight"].sharding
    assert sharded.spec == PartitionSpec(None, "model", "data")

    @jax.jit
    def step(weights: Any, moments: Any, pace: Any) -> Any:
        def mean(weights: Any) -> Any:
            return (
                divergence(decoder, {**weights, **fixed}, tokens.numpy(), states.numpy()).sum()
                / tokens.numel()
            )

        loss, gradients = jax.value_and_grad(mean)(weights)
        new, means = {}, {}
        for name, gradient in gradients.items():
            first, second, change = adam(*moments[name], gradient, pace)
            new[name], means[name] = weights[name] - 1e-3 * change, (first, second)
        return new, means, loss

    moments = {
        name: (jnp.zeros_like(value), jnp.zeros_like(value)) for name, value in weights.items()
    }
    losses = []
    for number in range(STEPS):
        pace = tuple(map(np.float32, corrections(number)))
        weights, moments, loss = step(weights, moments, pace)
        losses.append(float(loss))
    for one in (weights["0.mlp.up_proj.weight"], *moments["0.mlp.up_proj.weight"]):
        assert one.sharding.is_equivalent_to(sharded, 3)  # by propagation
    return losses


def of_a_layer(folder: Path, mesh: DeviceMesh) -> list[list[Any]]:
    """What one layer more adds to the collectives of a step: axis, kind, dtype, shape and count."""
    counts = []
    for layers in (2, 3):
        (folder / f"{layers}").mkdir(exist_ok=True)
        (folder / f"{layers}" / "config.json").write_text(
            json.dumps({**CONFIG, "num_hidden_layers": layers})
        )
        model = open_shape_checkpoint(folder / f"{layers}", "int4-g32")
        names = TrainedNames.of(model, norms=False, codes=False)
        program = (
            lower_step(model, mesh, names, batch=8, length=16, dtype=jnp.float32)
            .compile()
            .as_text()
        )
        found: Counter[Any] = Counter()
        for one, times in count_exchanges(program).items():
            shape = (
                one.shape[1:] if one.shape[:1] == (1,) and len(one.shape) == 3 else one.shape
            )  # of a single layer
            found[find_collective_axes(one, mesh), one.kind, one.dtype, shape] += times
        counts.append(found)
    return [
        [*key, counts[1][key] - counts[0][key]]
        for key in counts[1]
        if counts[1][key] != counts[0][key]
    ]


def held_bytes(folder: Path, mesh: DeviceMesh) -> dict[str, int]:
    """Of weights, trained values and samples on a device: as the plan has them, and as they are."""
    int8 = open_checkpoint(folder)
    names = TrainedNames.of(int8, norms=False, codes=False)
    planned = (
        lower_step(int8, mesh, names, batch=4, length=7, dtype=jnp.float32)
        .compile()
        .memory_analysis()
    )
    arrays, found = load_arrays(int8, mesh), select_trained_leaves(int8, names)
    arrays[TARGET_HEAD] = arrays[HEAD]
    shapes = [(leaf.shape, leaf.spec) for leaf in found] * 3 + [
        ((4, 7), (mesh.samples, None)),
        ((4, 7, int8.config.hidden_size), (mesh.samples, None, "model")),
    ]
    rest = [
        jax.device_put(np.zeros(shape, np.float32), mesh.sharding(spec, shape))
        for shape, spec in shapes
    ]
    held = [one.addressable_shards[0].data for one in (*arrays.values(), *rest)]
    return {
        "planned": planned.argument_size_in_bytes,
        "held": sum(one.on_device_size_in_bytes() for one in held),
    }


def _shape(name: str) -> tuple[int, int]:
    data, model = name.split("x")
    return int(data), int(model)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
