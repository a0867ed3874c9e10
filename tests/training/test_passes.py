"""Gradients block by block, compared with those that torch computes through the whole model of
transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.base.progress import silent
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch, layerwise_hidden
from quantkit.passes.activation_store import ActivationStore
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.blockwise import Blockwise
from quantkit.training.decoder import make_decoder_engine
from quantkit.training.optimizer import Optimizer, Schedule
from quantkit.training.trained import TrainedCheckpoint, TrainedNames, factor_gradient, with_factors
from quantkit.training.training import Samples

CPU = torch.device("cpu")
NAMES = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.3.self_attn.o_proj.weight",
    "model.layers.2.post_attention_layernorm.weight",
    "model.norm.weight",
)


@pytest.fixture(scope="module")
def models(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float model, and the same quantized, both in float32."""
    folder = tmp_path_factory.mktemp("models")
    quantkit.convert(demo_model, folder / "floats", dtype="fp32", source_check=False)
    quantkit.quantize(
        folder / "floats", folder / "int4", "int4-g32-asym", method="rtn", source_check=False
    )
    return folder / "floats", folder / "int4"


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(2048, (3, 24), generator=torch.Generator().manual_seed(3))


def by_transformers(
    models: tuple[Path, Path], tokens: Tensor, folder: Path
) -> tuple[float, dict[str, Tensor]]:
    """The mean KL from the float model, and its gradients by the weights of the quantized one."""
    from transformers import AutoModelForCausalLM

    quantkit.convert(models[1], folder / "dequantized", dequantize=True, source_check=False)
    floats, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (models[0], folder / "dequantized")
    )
    with torch.no_grad():
        expected = floats(tokens).logits.log_softmax(-1)
    loss = (expected.exp() * (expected - other(tokens).logits.log_softmax(-1))).sum(-1).mean()
    loss.backward()
    return loss.item(), {
        name: found.grad for name in NAMES if (found := other.get_parameter(name)).grad is not None
    }


def make_engine(
    models: tuple[Path, Path],
    tokens: Tensor,
    store: ActivationStore,
    names: TrainedNames,
    changed: dict[str, QuantTensor] | None = None,
) -> Blockwise:
    """The engine of a model, of which some weights may be replaced."""
    reference, quantized = map(open_checkpoint, models)
    model = Changed(quantized, names, store, changed or {})
    samples = Samples(tokens, ActivationStore(), len(tokens))
    samples.compute_targets(
        lambda tokens, progress: layerwise_hidden(reference, [Batch.from_start(tokens)])[0], silent
    )
    return make_decoder_engine(model, reference, samples, Schedule(8), CPU)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The gradients that reach the optimizer, which changes nothing."""
    found: dict[str, Tensor] = {}

    def record(optimizer: Optimizer, step: int, name: str, gradient: Tensor | None) -> None:
        assert name not in found
        assert gradient is not None
        found[name] = gradient

    monkeypatch.setattr(Optimizer, "update", record)
    return found


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_whole_model(
    models: tuple[Path, Path],
    tokens: Tensor,
    gradients: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the samples of a step go through a block, and through the head, in parts."""
    monkeypatch.setattr("quantkit.training.decoder.TOKENS_THROUGH_THE_HEAD", 40)
    monkeypatch.setattr("quantkit.training.blockwise.batch_samples", lambda config, length: 2)
    loss, expected = by_transformers(models, tokens, tmp_path)
    names = TrainedNames(NAMES[:3], NAMES[3:], codes=False)
    engine = make_engine(models, tokens, ActivationStore(), names)
    numbers = torch.arange(len(tokens))
    assert engine.step(0, numbers) == pytest.approx(loss, rel=1e-4)
    assert engine.loss(numbers) == pytest.approx(loss, rel=1e-4)
    assert gradients.keys() == expected.keys() == set(NAMES)
    for name in NAMES:
        scale = expected[name].abs().max().item()
        assert torch.allclose(gradients[name], expected[name], rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize(
    "place", [(5, 2), (0, 5, 2), (1, 5, 2)], ids=["scale", "scale with minima", "minimum"]
)
def test_gradients_by_factors_are_those_of_the_loss(
    models: tuple[Path, Path],
    tokens: Tensor,
    place: tuple[int, ...],
    gradients: dict[str, Tensor],
) -> None:
    """The change of the loss if one factor is a little larger."""
    name = "model.layers.1.mlp.down_proj.weight"
    numbers = torch.arange(len(tokens))
    names = TrainedNames((name,), (), codes=False)
    make_engine(models, tokens, ActivationStore(), names).step(0, numbers)
    quantized = open_checkpoint(models[1])
    value = quantized.load(name)
    assert isinstance(value, QuantTensor)
    if len(place) == 3:  # the same weight with minima
        size = value.shape[1] // value.scale.shape[1]
        minima = QuantScheme(4, size, False, Scales.BLOCKS)
        assert value.zero is not None
        value = QuantTensor(
            codes=value.codes,
            scale=value.scale,
            zero=None,
            scheme=minima,
            minimum=value.scale * value.zero,
        )
    gradient = factor_gradient(value, value, gradients[name])[place].item()
    losses, change = [], 0.05
    for sign in (1, -1):
        factors = torch.zeros((2,) * (len(place) - 2) + value.scale.shape)
        factors[place] = sign * change
        nothing = TrainedNames((), (), codes=False)
        changed = {name: with_factors(value, factors)}
        engine = make_engine(models, tokens, ActivationStore(), nothing, changed)
        losses.append(engine.loss(numbers))
    assert (losses[0] - losses[1]) / (2 * change) == pytest.approx(gradient, rel=0.05)


class Changed(TrainedCheckpoint):
    """A model of which some weights are replaced."""

    def __init__(
        self,
        source: Checkpoint,
        names: TrainedNames,
        store: ActivationStore,
        changed: dict[str, QuantTensor],
    ) -> None:
        super().__init__(source, names, store, 0)
        self._changed = changed

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        return self._changed.get(name) or super().load(name, part)
