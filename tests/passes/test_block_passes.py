"""Gradients that go back block by block are those of autograd through the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny_architectures
import torch
from error_parts import raises
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from quantkit.errors import UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.block_calls import CallRecorder, begin_graph
from quantkit.passes.block_passes import BlockPasses
from quantkit.passes.passage import Passage
from quantkit.via_transformers.experts import use_experts
from quantkit.via_transformers.lazy_model import LazyModel

Tiny = Callable[[str], Path]
KINDS = (
    # Dense, with experts, with latent attention.
    "llama",
    "mixtral",
    "deepseek_v3",
    # Linear attention, state spaces, shared blocks.
    "qwen3_next",
    "mamba2",
    "zamba2",
    # Inputs of each layer that the embedding makes, and scaled, capped logits.
    "gemma4_text",
    "gemma2",
    "granite",
    # Code between blocks computes something from their outputs.
    "inkling2_text",
    # Makes a cache whatever `use_cache` is, and has several lists of modules instead of blocks.
    "xlm",
    # Blocks are called several times, some without gradients.
    "hrm_text",
)
SHARED_KEYS = {
    "num_kv_shared_layers": 1,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LENGTH = 24
TOKENS = oracle.random_tokens(LENGTH, 3, 2000)
TARGETS = oracle.random_tokens(LENGTH + 1, 3, 2000)[:, 1:]


class Whole:
    """The whole model of a folder, with the gradients by its parameters, and those by the outputs
    of linears, batch after batch.
    """

    def __init__(self, folder: Path) -> None:
        self.model = oracle.load(folder)
        use_experts(self.model)
        self.model.requires_grad_(True)
        self.outputs: dict[str, list[Tensor]] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(record_output(self.outputs, name))
        for tokens, targets in zip(TOKENS.split(2), TARGETS.split(2), strict=True):
            logits = self.model(input_ids=tokens, use_cache=False).logits
            cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()


def record_output(outputs: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    """A hook on a linear that adds the gradients by its outputs to a list."""

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: outputs.setdefault(name, []).append(gradient))  # type: ignore[no-untyped-call]

    return record


def make_passage(folder: Path) -> Passage[LazyModel]:
    return Passage(LazyModel(open_checkpoint(folder, tensors_only=True)), folder)


def turn(passage: Passage[LazyModel], passes: BlockPasses, states: list[Tensor]) -> None:
    """Begin the backward pass, with a few tokens in the head at a time."""
    gradients: list[Tensor] = []
    with passage.open_head() as compute_logits:
        for batch, targets in zip(states, TARGETS.split(2), strict=True):
            gradient = torch.empty_like(batch)
            for sample in range(len(batch)):
                for rows in torch.arange(LENGTH).split(7):  # type: ignore[no-untyped-call]
                    leaf = batch[sample, rows].clone().requires_grad_()
                    logits = compute_logits(leaf)
                    cross_entropy(logits, targets[sample, rows], reduction="sum").backward()
                    gradient[sample, rows] = leaf.grad
            gradients.append(gradient)
    passes.turn(gradients)


class Blocks:
    """The gradients of a model by parameters, and by outputs of linears, block by block."""

    def __init__(
        self,
        passage: Passage[LazyModel],
        trained_parts: set[str] | None = None,
        dtype: torch.dtype = torch.float32,
        store: ActivationStore | None = None,
    ) -> None:
        self.model = passage.partwise.model
        self.outputs: dict[str, list[Tensor]] = {}
        self.by_name: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.passage = passage
        vectors = []
        for name, parameter in self.model.named_parameters():
            part = passage.partwise.part_of(name.rpartition(".")[0])
            if parameter.dim() == 1 and not passage.partwise.is_listed(part or ""):
                vectors.append(name)
        passes = BlockPasses(passage, TOKENS.split(2), store=store, dtype=dtype)
        states = passes.forward(trained_parts, vectors)
        turn(passage, passes, states)
        self.by_name |= passes.backward(self.open_block)

    @contextmanager
    def open_block(self, part: str) -> Iterator[None]:
        self.order.append(part)
        assert self.passage.partwise.loaded == {part}
        block = self.model.get_submodule(part)
        handles = []
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                hook = record_output(self.outputs, f"{part}.{name}")
                handles.append(module.register_forward_hook(hook))
        block.requires_grad_(True)
        yield
        for handle in handles:
            handle.remove()
        for name, parameter in block.named_parameters():
            if parameter.grad is not None:
                before = self.by_name.get(f"{part}.{name}", 0)
                self.by_name[f"{part}.{name}"] = before + parameter.grad


def compare(whole: Whole, blocks: Blocks) -> None:
    """Check that all gradients by parameters of blocks and by outputs of their linears agree."""
    parameters = dict(whole.model.named_parameters(remove_duplicate=False))
    # Blocks may have parameters in common.
    sums: dict[int, Tensor] = {}
    for name, gradient in blocks.by_name.items():
        key = id(parameters[name])
        sums[key] = sums.get(key, 0) + gradient
    compared = 0
    partwise = blocks.passage.partwise
    largest = 0.0
    for parameter in parameters.values():
        if parameter.grad is not None:
            largest = max(largest, parameter.grad.abs().max().item())
    for name, parameter in parameters.items():
        if parameter.grad is not None and partwise.is_listed(partwise.part_of(name) or ""):
            # The gradient by a bias of keys is zero, and only rounding makes it something else.
            assert_same(sums[id(parameter)], parameter.grad, floor=1e-7 * largest)
            compared += 1
    assert compared > 10
    assert blocks.outputs
    for name, gradients in blocks.outputs.items():
        # Other calls of the same block come in another order.
        for gradient, expected in zip(gradients, whole.outputs[name], strict=True):
            if len(gradients) == 2:
                assert_same(gradient, expected)


def assert_same(gradient: Tensor, expected: Tensor, *, floor: float = 1e-12) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * scale + floor)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_whole_model(kind: str, tiny_model: Tiny) -> None:
    passage = make_passage(tiny_model(kind))
    hooks_before = count_hooks(passage.partwise.model)
    compare(Whole(tiny_model(kind)), Blocks(passage))
    assert all(parameter.is_meta for parameter in passage.partwise.model.parameters())
    for module in passage.partwise.model.modules():
        assert "forward" not in vars(module) or type(module).__name__.endswith("Experts")
    assert count_hooks(passage.partwise.model) == hooks_before


def count_hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_gradients_pass_through_keys_that_layers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = copy.deepcopy(tiny_architectures.ARCHITECTURES)
    overrides["gemma4_text"] = {**overrides["gemma4_text"], **SHARED_KEYS}
    monkeypatch.setattr(tiny_architectures, "ARCHITECTURES", overrides)
    tiny_architectures.make("gemma4_text", tmp_path / "model")
    whole = Whole(tmp_path / "model")
    blocks = Blocks(make_passage(tmp_path / "model"))
    compare(whole, blocks)
    # The last layer has no keys of its own.
    assert "model.layers.3.self_attn.k_proj" not in blocks.outputs
    assert "model.layers.1.self_attn.k_proj" in blocks.outputs
    norm = whole.model.model.per_layer_projection_norm.weight.grad
    assert_same(blocks.by_name["model.per_layer_projection_norm.weight"], norm)


def test_the_pass_ends_at_the_first_trained_block(tiny_model: Tiny) -> None:
    blocks = Blocks(make_passage(tiny_model("llama")), {"model.layers.1"})
    assert blocks.order == ["model.layers.1"]
    expected = Whole(tiny_model("llama")).model.get_parameter("model.layers.1.mlp.up_proj.weight")
    assert_same(blocks.by_name["model.layers.1.mlp.up_proj.weight"], expected.grad)
    # A norm after all blocks.
    assert "model.norm.weight" in blocks.by_name


def test_states_are_kept_in_few_bits_and_freed(tiny_model: Tiny) -> None:
    dtypes: list[torch.dtype] = []

    class Observed(ActivationStore):
        def put(self, key: Any, value: Tensor, *, to_file: bool = False) -> None:
            dtypes.append(value.dtype)
            super().put(key, value, to_file=to_file)

    store = Observed()
    blocks = Blocks(make_passage(tiny_model("llama")), dtype=torch.bfloat16, store=store)
    # The first batch shows whether blocks do the same again.
    assert dtypes == [torch.float32, torch.bfloat16]
    assert not store._tensors
    expected = Whole(tiny_model("llama")).outputs["model.layers.0.mlp.up_proj"][1]
    gradient = blocks.outputs["model.layers.0.mlp.up_proj"][1]
    difference = (gradient - expected).norm() / expected.norm()
    assert 1e-5 < difference < 1e-2


class Noisy(nn.Module):
    """A layer that adds noise."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + torch.rand(())


class Writing(nn.Module):
    """A layer that writes to its input, and returns it."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states.mul_(2)


def test_a_block_that_does_something_else_again_is_refused(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    passage = make_passage(tiny_model("llama"))
    block = passage.partwise.model.get_submodule("model.layers.1")
    monkeypatch.setattr(block, "forward", Noisy().forward)
    with raises(UnsupportedError, "'model.layers.1'"):
        Blocks(passage)
    assert not passage.partwise.loaded


def test_a_block_may_write_to_its_inputs(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    passage = make_passage(tiny_model("llama"))
    expected = Blocks(passage).outputs["model.layers.0.mlp.up_proj"]
    block = passage.partwise.model.get_submodule("model.layers.1")
    gradients: list[list[Tensor]] = []
    for forward in (lambda hidden_states, **kwargs: hidden_states * 2, Writing().forward):
        with monkeypatch.context() as patch:
            patch.setattr(block, "forward", forward)
            gradients.append(Blocks(passage).outputs["model.layers.0.mlp.up_proj"])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not torch.equal(gradients[0][0], expected[0])


def test_an_output_with_the_identity_of_an_input_that_is_gone_is_an_output() -> None:
    def run_block(states: list[Tensor]) -> Tensor:
        state = states.pop()
        identity = id(state)
        values = state.detach().numpy().copy()
        del state
        # Python uses the memory of the freed object again.
        others: list[Tensor] = []
        while id(output := torch.from_numpy(values.copy())) != identity and len(others) < 1000:
            others.append(output)
        return output

    recorder = CallRecorder(0, ActivationStore(), torch.float32, check=False)
    states = [torch.ones(3)]
    # Inputs that need no gradients are held.
    begin_graph(states)
    recorder.run("block", run_block, (states,), {}, has_gradients=True)
    assert recorder.calls[0].places == [0]


def test_a_model_that_calls_modules_of_a_block_is_refused(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    passage = make_passage(tiny_model("llama"))
    block = passage.partwise.model.get_submodule("model.layers.1")
    monkeypatch.setattr(
        type(block), "__call__", lambda self, states, **kwargs: self.mlp(states), raising=False
    )
    passes = BlockPasses(passage, TOKENS.split(2))
    with raises(UnsupportedError, "'model.layers.0'"):
        passes.forward()
