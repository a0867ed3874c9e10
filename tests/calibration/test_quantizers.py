"""How the tensors of a quantized model are found: in the writer's order, and few of them in
memory at a time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.architectures.topology import input_groups
from quantkit.base.progress import silent
from quantkit.calibration.data import Calibration
from quantkit.calibration.effort import EFFORTS
from quantkit.calibration.gptq_quantizer import GptqQuantizer
from quantkit.calibration.quantizers import RtnQuantizer
from quantkit.data.files import EXCERPT
from quantkit.distributed.group import SINGLE
from quantkit.errors import NonFiniteError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.container import Output, Written
from quantkit.formats.containers.hf_encoder import SafetensorsEncoder
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.kv_scales import layer_scales
from quantkit.formats.registry import HF, target
from quantkit.jobs.output.writer import Work, open_writer
from quantkit.jobs.quantize.formats import tensor_blocks
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Passage
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec

GPTQ: dict[str, Any] = {"method": "gptq", "calibration": EXCERPT, "samples": 12, "length": 64}


class Watched:
    """A checkpoint that knows which of the tensors that it gave are still in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._given: list[weakref.ref[Tensor]] = []
        self.path, self.format, self.config = checkpoint.path, checkpoint.format, checkpoint.config
        self.extra_config, self.kv_cache, self.notes = (
            checkpoint.extra_config,
            checkpoint.kv_cache,
            checkpoint.notes,
        )
        self.names, self.info, self.files = checkpoint.names, checkpoint.info, checkpoint.files

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._given)

    def load(self, name: str, part: Any = None) -> Tensor | QuantTensor:
        value = self._checkpoint.load(name, part)
        assert isinstance(value, Tensor)
        assert self.alive == 0, f"{name} is read before the last tensor is let go"
        self._given.append(weakref.ref(value))
        return value


class Counted(Watched):
    """A checkpoint that counts how often each tensor is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.reads: Counter[str] = Counter()

    def load(self, name: str, part: Any = None) -> Tensor | QuantTensor:
        self.reads[name] += 1
        return self._checkpoint.load(name, part)


def _encoder(source: Checkpoint, planned: list[TensorSpec]) -> SafetensorsEncoder:
    encoder = HF.encoder(Output(source, source.config, planned, 10**9))
    assert isinstance(encoder, SafetensorsEncoder)
    return encoder


def test_rounding_holds_one_tensor_at_a_time(demo_model: Path, tmp_path: Path) -> None:
    source = Watched(open_checkpoint(demo_model))
    schemes = {
        f"model.layers.1.{name}": QuantScheme.parse("int8")
        for name in ("mlp.up_proj", "self_attn.q_proj")
    }
    blocks = tensor_blocks(source, schemes, target("compressed-tensors"))
    planned = [spec for block in blocks for spec in block.tensors]
    assert [spec.name for spec in planned] == source.names()
    assert [block.layer for block in blocks] == [None, *range(source.config.num_layers), None]
    quantizer = RtnQuantizer(source, allow_nonfinite=False)
    found, already = [], 2
    with quantizer.running(blocks, Written(_encoder(source, planned), tmp_path, already)):
        for block in blocks:
            for name, tensor, record in quantizer.solve(block):
                found.append(name)
                assert (
                    isinstance(tensor, QuantTensor)
                    == (record is not None)
                    == (name[: -len(".weight")] in schemes)
                )
                del tensor
    assert found == source.names()[already:]
    assert source.alive == 0


def test_gptq_reads_each_quantized_weight_once(demo_model: Path, tmp_path: Path) -> None:
    source = Counted(open_checkpoint(demo_model))
    modules = [
        f"model.layers.{layer}.{module}"
        for layer in range(source.config.num_layers)
        for group in input_groups(source.config, layer)
        for module in group.modules
    ]
    schemes = dict.fromkeys(modules, QuantScheme.parse("int8"))
    blocks = tensor_blocks(source, schemes, target("compressed-tensors"))
    planned = [spec for block in blocks for spec in block.tensors]
    tokens = oracle.random_tokens(16, batch=4, vocabulary=2048)
    cpu = torch.device("cpu")
    parts = DecoderParts(source, 16, cpu)
    quantizer = GptqQuantizer(
        source=source,
        calibration=Calibration(tokens, "", 0),
        schemes=schemes,
        passage=Passage(parts, source.path),
        groups=parts.list_groups(),
        recording_cache=parts.recording_cache,
        embedding_parameter=None,
        device=cpu,
        memory_bytes=10**9,
        effort=EFFORTS["default"],
        allow_nonfinite=False,
        group=SINGLE,
    )
    with quantizer.running(blocks, Written(_encoder(source, planned), tmp_path)):
        for block in blocks:
            for name, tensor, record in quantizer.solve(block):
                assert (
                    isinstance(tensor, QuantTensor)
                    == (record is not None)
                    == (name[: -len(".weight")] in schemes)
                )
    assert {source.reads[f"{module}.weight"] for module in modules} == {1}


def test_the_writer_takes_tensors_in_the_encoders_order_only(
    demo_model: Path, tmp_path: Path
) -> None:
    source = open_checkpoint(demo_model)
    (block, *_) = tensor_blocks(source, {}, target("compressed-tensors"))
    value = source.load(block.tensors[0].name)
    work = Work(
        job="quantize",
        source=source,
        encoder=_encoder(source, list(block.tensors)),
        side_files={},
        options={},
    )
    with (
        pytest.raises(RuntimeError, match=r"'model.norm.weight' .*'model.embed_tokens.weight'"),
        open_writer(
            work, tmp_path / "out", resume=False, source_check=False, progress=silent
        ) as writer,
    ):
        writer.put("model.norm.weight", value)


@pytest.fixture
def damaged(demo_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    def damage(name: str) -> Path:
        quantkit.convert(demo_model, tmp_path / "source")
        weights = load_file(tmp_path / "source" / "model.safetensors")
        weights[name].view(-1)[0] = torch.nan
        save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / "source"

    return damage


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "module", ["input_layernorm", "self_attn.q_proj", "post_attention_layernorm", "mlp.down_proj"]
)
@pytest.mark.parametrize("allowed", [True, False])
def test_what_makes_a_block_nonfinite_is_named(
    allowed: bool, module: str, damaged: Callable[[str], Path], tmp_path: Path
) -> None:
    name = f"model.layers.1.{module}.weight"
    source = damaged(name)
    with raises(NonFiniteError, f"'{name}'", path=source):
        quantkit.quantize(
            source,
            tmp_path / "out",
            "int4-g64",
            **GPTQ,
            source_check=False,
            allow_nonfinite=allowed,
        )
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_blocks_behind_the_last_that_is_quantized_are_not_run(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = open_checkpoint(demo_model).config.num_layers
    loaded: list[str] = []
    load = DecoderParts.load

    def watched(self: DecoderParts, part: str) -> None:
        loaded.append(part)
        load(self, part)

    monkeypatch.setattr(DecoderParts, "load", watched)
    kept = [f"model.layers.{layer}.*" for layer in range(1, layers)]
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", **GPTQ, keep=kept)
    assert "model.layers.0.mlp.gate_proj" in loaded
    assert not any(part.startswith("model.layers.1") for part in loaded)


@pytest.mark.parametrize("via", ["own", "transformers"])
@pytest.mark.parametrize(
    "kept",
    [
        ["*layers.0.*"],
        ["*layers.3.*"],
        ["*layers.3.self_attn.o_proj", "*layers.3.mlp.*"],
        ["*layers.3.self_attn.*"],
    ],
)
def test_layers_that_stay_floats_have_scales_of_their_cache(
    kept: list[str], via: Any, demo_model: Path, tmp_path: Path
) -> None:
    folder = quantkit.convert(demo_model, tmp_path / "source").path
    made = quantkit.quantize(
        folder,
        tmp_path / "out",
        "int4-g64",
        **GPTQ,
        keep=kept,
        kv_cache="fp8",
        via=via,
        source_check=False,
    )
    checkpoint = open_checkpoint(made.path)
    scales = layer_scales(checkpoint)
    assert scales is not None
    assert len(scales) == checkpoint.config.num_layers
    assert all(0 < scale != 1 for pair in scales for scale in pair)
