"""Linears whose weights several layers share: Zamba 2's transformer blocks."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import tiny_architectures
import torch
from solved_streams import CPU, record_hessians
from torch import Tensor

import quantkit
from quantkit.calibration.effort import EFFORTS
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.sample_streams import Batches, SampleStreams
from quantkit.distributed.group import SINGLE
from quantkit.formats.detect import open_checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.passage import Passage
from quantkit.tensors.scheme import QuantScheme
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites

SCHEME = QuantScheme.parse("int4-g32")
SHARED = "model.layers.0.shared_transformer.feed_forward.down_proj"
LAST = "model.layers.2.linear"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which two layers share a transformer block."""
    path = tmp_path_factory.mktemp("model") / "zamba2"
    values = {
        "layers_block_type": ["hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "num_hidden_layers": 3,
        # Without it transformers ties no weights at all.
        "tie_word_embeddings": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_architectures.ARCHITECTURES, "zamba2", values)
        tiny_architectures.make("zamba2", path)
    return path


def test_later_layers_get_the_quantized_weights_that_they_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = LazyModel(open_checkpoint(folder, tensors_only=True))
    assert len(lazy.same_as(f"{SHARED}.weight")) == 2
    passage, tokens = Passage(lazy, folder), oracle.random_tokens(32, batch=8, vocabulary=2048)
    sites, _ = find_sites(lazy, [SHARED, LAST])
    groups = passage.survey(sites, tokens[:1]).groups
    streams = SampleStreams(
        passage,
        Batches.of(tokens, slice(len(tokens)), 2, EFFORTS["default"], CPU),
        GroupSolver({SHARED: SCHEME, LAST: SCHEME}, torch.float32, SINGLE),
        load_stored=lambda module: pytest.fail(module),
        stored=(),
    )
    hessians = record_hessians(monkeypatch)
    results: dict[str, Result] = {}
    for _, solved in streams.solve_groups(groups, ActivationStore()):
        results |= solved
    assert list(results) == [SHARED, LAST]

    def measure_inputs(model: torch.nn.Module) -> Tensor:
        inputs: list[Tensor] = []
        linear = model.get_submodule(LAST)
        handle = linear.register_forward_pre_hook(
            lambda _, args: inputs.append(args[0].flatten(0, 1))
        )
        oracle.logits(model, tokens)
        handle.remove()
        return inputs[0].t() @ inputs[0]

    model = oracle.load(folder)
    of_floats = measure_inputs(model)
    # transformers ties the parameters, so this changes all layers that share it.
    with torch.no_grad():
        model.get_parameter(f"{SHARED}.weight").copy_(results[SHARED].weight.dequantize())
    of_quantized = measure_inputs(model)
    torch.testing.assert_close(hessians[-1], of_quantized, rtol=1e-4, atol=1e-4)
    distance = (hessians[-1] - of_quantized).norm()
    assert distance < 0.01 * (of_floats - of_quantized).norm()


@pytest.mark.slow
def test_a_note_names_linears_that_several_layers_share(folder: Path, tmp_path: Path) -> None:
    result = quantkit.quantize(
        folder,
        tmp_path / "out",
        "int4-g32",
        method="gptq",
        samples=8,
        length=32,
        keep=["*self_attn*", "*mamba*"],
        source_check=False,
        accept_quality_loss=True,
    )
    notes = [note for note in result.notes if "other layers share" in note]
    assert len(notes) == 1
    assert SHARED in notes[0]
    assert LAST not in notes[0]
