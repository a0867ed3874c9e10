"""What GGUF stores in place of canonical values: decay rates, and rows and columns in turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from config_cases import config_keys
from error_parts import raises
from gguf_config_cases import CASES

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place
from quantkit.architectures.families import config_from_hf
from quantkit.errors import CheckpointError
from quantkit.formats.gguf.names import gguf_tensors
from quantkit.formats.gguf.stored_form import (
    can_move_columns,
    decode_values,
    encode_values,
    rearrange,
    restore,
)
from quantkit.quality.bounds import same_rates
from quantkit.quality.transcoded import same_in_gguf
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, quantize_rtn
from quantkit.tensors.scheme import Q4_K, QuantScheme

_LOG_RATES = "blk.0.ssm_a"


def _config() -> ModelConfig:
    kind, changes = CASES["qwen3-5"]
    return config_from_hf(config_keys(kind, **changes), "config.json")


def _tensor(config: ModelConfig, name: str) -> DiskTensor:
    return next(tensor for tensor in gguf_tensors(config) if tensor.name == name)


def _uniform(low: float, high: float, count: int) -> torch.Tensor:
    return torch.empty(count).uniform_(low, high, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logarithms_of_16_bits_come_back_exactly(dtype: torch.dtype) -> None:
    config = _config()
    tensor = _tensor(config, _LOG_RATES)
    logarithms = _uniform(-6, 4, 2000).to(dtype)
    stored = encode_values(config, tensor, logarithms)
    torch.testing.assert_close(stored, -logarithms.float().exp())
    # Another writer's exponential may differ in its last bit.
    nudged = torch.nextafter(stored, torch.zeros(()))
    for rates in (stored, nudged):
        decoded = decode_values(config, tensor, rates, "a.gguf")
        assert decoded.dtype == torch.float32
        assert torch.equal(decoded, logarithms.float())


def test_logarithms_of_32_bits_come_back_as_the_same_rates() -> None:
    config = _config()
    tensor = _tensor(config, _LOG_RATES)
    logarithms = _uniform(-6, 4, 2000)
    stored = encode_values(config, tensor, logarithms)
    decoded = decode_values(config, tensor, stored, "a.gguf")
    assert not torch.equal(decoded, logarithms)
    name = "model.layers.0.linear_attn.A_log"
    assert same_in_gguf(config, name, logarithms, decoded, ())
    other = decoded.clone()
    other[7] += 1e-5
    assert not same_in_gguf(config, name, logarithms, other, ())
    assert not same_rates(logarithms, torch.full_like(logarithms, float("nan")))
    assert not same_rates(logarithms, logarithms[:5])
    assert same_rates(logarithms, logarithms.bfloat16().float(), [DType.BFLOAT16])


@pytest.mark.parametrize("rate", [0.5, float("nan")])
def test_rates_with_which_states_would_grow_are_refused(rate: float) -> None:
    config = _config()
    tensor = _tensor(config, _LOG_RATES)
    with raises(CheckpointError, _LOG_RATES, path=Path("a.gguf")):
        decode_values(config, tensor, torch.tensor([-1.0, rate]), "a.gguf")


@pytest.mark.parametrize(
    "scheme", [QuantScheme(8, None), QuantScheme(4, 32), QuantScheme(4, 64), QuantScheme(4, 16)]
)
def test_columns_of_codes_are_moved_with_their_scales(scheme: QuantScheme) -> None:
    weight = torch.randn(8, 192, generator=torch.Generator().manual_seed(0))
    order = (32, 96, 160, 0, 64, 128)
    place = Place("a", (8, 192), column_ranges=tuple((first, first + 32) for first in order))
    value = quantize_rtn(weight, scheme, torch.float16)
    moved = rearrange(value, place)
    assert isinstance(moved, QuantTensor)
    columns = [column for first in order for column in range(first, first + 32)]
    assert torch.equal(moved.dequantize(), value.dequantize()[:, columns])
    back = restore([place], [moved], DType.FLOAT32)
    assert isinstance(back, QuantTensor)
    assert torch.equal(back.dequantize(), value.dequantize())
    assert can_move_columns(place, QuantScheme(4, 32))
    assert not can_move_columns(place, Q4_K)


def test_several_tensors_are_one() -> None:
    weight = torch.arange(12.0).view(6, 2)
    places = [
        Place("a", (6, 2), row_ranges=((4, 6), (0, 1))),
        Place("a", (6, 2), row_ranges=((1, 4),)),
    ]
    stored = [rearrange(weight, place) for place in places]
    assert isinstance(stored[0], torch.Tensor)
    assert stored[0].tolist() == weight[[4, 5, 0]].tolist()
    restored = restore(places, [stored[0].bfloat16(), stored[1]], DType.FLOAT32)
    assert isinstance(restored, torch.Tensor)
    assert torch.equal(restored, weight)
