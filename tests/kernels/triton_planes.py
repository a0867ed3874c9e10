"""The Triton kernels on llama.cpp's block types against the gguf package and float64: through
Triton's interpreter, or on a GPU where there is one; see `triton_products`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from block_bytes import dequantize, draw_blocks
from torch import Tensor
from triton_quick import quicken

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.files.gguf_types import GgmlType
from quantkit.formats.codecs.ggml import CODED_TYPES
from quantkit.formats.detect import open_checkpoint
from quantkit.kernels import triton_plane_linear
from quantkit.kernels.dispatch import list_allowed_backends, self_test
from quantkit.kernels.triton_backend import TRITON
from quantkit.kernels.triton_layout import PLANE_FIELDS, find_layout, require_layout
from quantkit.kernels.triton_plane_linear import plane_product
from quantkit.kernels.triton_planes import BASE, PlaneWeight
from quantkit.kernels.triton_tiles import TileConfig
from quantkit.kernels.triton_words import INTERPRETED
from quantkit.model.decoder import Decoder
from quantkit.model.linear import QuantEmbedding, QuantLinear
from quantkit.model.load import measure_run_memory
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import FIELDS, QuantTensor
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec

quicken()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
KINDS = [kind for kind in CODED_TYPES if find_layout(CODED_TYPES[kind].scheme) is not None]
NAMED = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
COLUMNS = (32, 256, 576, 640, 896, 1280, 4864)
"""Widths of models among them; those that a type's blocks divide are taken."""

CONFIGS = (
    (1, torch.float16, TileConfig("skinny", 8, 16, 1, split=2, warps=1)),
    (3, torch.bfloat16, TileConfig("skinny", 8, 16, 2, warps=1)),
    (16, torch.float16, TileConfig("skinny", 16, 32, 1, split=3, warps=1)),
    (17, torch.float16, TileConfig("gemm", 16, 32, 2, split=2)),
    (33, torch.bfloat16, TileConfig("gemm", 64, 64, 1)),
    (5, torch.float32, TileConfig("gemm", 16, 16, 1, split=2)),
    (9, torch.float32, TileConfig("matmul", 1, 16, 2)),
    (9, torch.float16, TileConfig("matmul", 1, 16, 4)),
)
"""Numbers of tokens, and tile configs that leave tiles half empty for them."""

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"
)


def test_all_types_but_those_in_words_and_small_floats_are_here() -> None:
    missing = {kind.value for kind in CODED_TYPES} - {kind.value for kind in KINDS}
    assert missing == {"Q4_0", "MXFP4"}


def _columns_of(kind: GgmlType) -> list[int]:
    return [columns for columns in COLUMNS if columns % kind.block == 0]


def _packed(prepared: dict[str, Tensor]) -> PlaneWeight:
    return PlaneWeight(**{name: prepared.get(name) for name in PLANE_FIELDS})


def _multiply(x: Tensor, weight: QuantTensor, bias: Tensor | None, config: TileConfig) -> Tensor:
    prepared = TRITON.prepare(weight.to(DEVICE))
    layout = require_layout(weight.scheme)
    bias = None if bias is None else bias.to(DEVICE)
    arrived = prepared["arrived"]
    product = plane_product(x.to(DEVICE), _packed(prepared), layout, bias, config, arrived)
    assert not arrived.any()
    return product.cpu()


def _require_right(
    product: Tensor, x: Tensor, wide: Tensor, bias: Tensor | None, offsets: Tensor | None = None
) -> None:
    """Require each product to be within the rounding of weights to 16 bits, of the result, and of
    float32 sums in any order; what minima cancel is rounded too.
    """
    expected = x.double() @ wide.double().t()
    sizes = wide.double().abs()
    rounding = torch.finfo(x.dtype).eps
    if x.dtype == torch.float32:
        bound = torch.finfo(torch.float32).eps * x.shape[1] / 4 * (x.double().abs() @ sizes.t())
    else:
        if offsets is not None:
            sizes += offsets.abs().repeat_interleave(wide.shape[1] // offsets.shape[1], 1) / 64
        # The interpreter truncates to bfloat16.
        steps = 1.0 if INTERPRETED and x.dtype == torch.bfloat16 else 0.5
        bound = (rounding * steps + 2**-22 * x.shape[1]) * (x.double().abs() @ sizes.t())
    if bias is not None:
        expected += bias.double()
    bound += rounding * expected.abs()
    assert product.dtype == x.dtype
    assert product.shape == expected.shape
    assert ((product.double() - expected).abs() <= bound + 1e-30).all()


@NAMED
def test_rows_are_those_of_gguf_bit_for_bit_and_take_what_is_stated(kind: GgmlType) -> None:
    for columns, rows in itertools.product(_columns_of(kind), (1, 19)):
        blocks = draw_blocks(kind, rows, columns)
        weight = CODED_TYPES[kind].decode(blocks)
        prepared = TRITON.prepare(weight.to(DEVICE))
        index = torch.arange(rows).flip(0)
        found = TRITON.dequantize_rows(prepared, weight.scheme, columns, index.to(DEVICE))
        assert torch.equal(found.cpu(), dequantize(kind, blocks)[index]), (rows, columns)
        held = sum(
            tensor.nbytes for name, tensor in prepared.items() if name not in ("arrived", "table")
        )
        spec = TensorSpec("weight", (rows, columns), DType.of(weight.scale.dtype), weight.scheme)
        assert TRITON.count_bytes(spec) == held, (rows, columns)
        # Of a last unit of columns that is not full, the rest is stored too.
        if columns % 128 == 0:
            assert held <= 1.05 * blocks.nbytes, columns


@NAMED
def test_weights_are_exact_in_float32(kind: GgmlType) -> None:
    columns = 768 if kind.block == 256 else 608
    blocks = draw_blocks(kind, 19, columns)
    weight = CODED_TYPES[kind].decode(blocks)
    for config in (TileConfig("gemm", 1024 if INTERPRETED else 64, 32, 1), CONFIGS[-2][2]):
        found = _multiply(torch.eye(columns), weight, None, config)
        assert torch.equal(found.t(), dequantize(kind, blocks)), config


@NAMED
def test_every_path_is_right(kind: GgmlType) -> None:
    columns = itertools.cycle(_columns_of(kind))
    for tokens, dtype, config in CONFIGS:
        width = next(columns)
        rows = 19 if width < 1000 else 5
        blocks = draw_blocks(kind, rows, width, size=0.1)
        weight = CODED_TYPES[kind].decode(blocks)
        x = torch.randn(tokens, width).to(dtype)
        bias = None if tokens == 3 else torch.randn(rows).to(dtype)
        product = _multiply(x, weight, bias, config)
        offsets = None if weight.block_scales is None else weight.block_scales.offsets
        _require_right(product, x, dequantize(kind, blocks), bias, offsets)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_minima_of_mlx_are_subtracted(bits: int) -> None:
    """In groups of several pairs, with scales in any dtype."""
    for (group, scale_dtype), (tokens, dtype, config) in zip(
        itertools.product((32, 64, 128), (torch.float16, torch.bfloat16, torch.float32)),
        (*CONFIGS, CONFIGS[0]),
        strict=True,
    ):
        scheme = QuantScheme(bits, group, False, Scales.BLOCKS)
        rows, columns = 21, 3 * group
        codes = torch.randint(scheme.levels, (rows, columns), dtype=torch.uint8)
        scales, minima = (torch.rand(2, rows, 3) / 50).to(scale_dtype)
        weight = QuantTensor.of_blocks(codes, BlockScales(scales, minima, None, None), scheme)
        x = torch.randn(tokens, columns).to(dtype)
        product = _multiply(x, weight, None, config)
        # Code 0 is below all others: what is subtracted is no larger than the largest code.
        offsets = scales.float() * scheme.levels
        _require_right(product, x, weight.dequantize(), None, offsets)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_bytes_in_groups_are_multiplied(group: int) -> None:
    scheme = QuantScheme(8, group)
    for tokens, dtype, config in CONFIGS:
        rows, columns = 7, 5 * group
        codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
        weight = QuantTensor(codes, torch.rand(rows, 5) / 50, None, scheme)
        x = torch.randn(tokens, columns).to(dtype)
        _require_right(_multiply(x, weight, None, config), x, weight.dequantize(), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [GgmlType.Q6_K, GgmlType.Q5_0], ids=lambda kind: kind.value)
def test_a_layer_takes_any_number_of_tokens(kind: GgmlType, dtype: torch.dtype) -> None:
    blocks = draw_blocks(kind, 33, 256, size=0.1)
    weight = CODED_TYPES[kind].decode(blocks)
    layer = QuantLinear(weight, torch.randn(33), DEVICE, dtype, list_allowed_backends("triton"))
    assert layer.backend is TRITON
    bias = layer.bias.detach().cpu()
    for tokens in (1, 2, 15, 16, 17, 33, 600):
        x = torch.randn(tokens, 256).to(dtype)
        _require_right(layer(x.to(DEVICE)).cpu(), x, dequantize(kind, blocks), bias)
    assert layer(x[:0].to(DEVICE)).shape == (0, 33)
    assert layer(x[:6].to(DEVICE).unflatten(0, (2, 3))).shape == (2, 3, 33)


@pytest.mark.parametrize("path", ["skinny", "gemm"])
def test_what_is_not_finite_stays_with_its_token(path: str) -> None:
    weight = CODED_TYPES[GgmlType.Q5_1].decode(draw_blocks(GgmlType.Q5_1, 20, 160))
    x = torch.randn(3, 160, dtype=torch.float16)
    x[1, 40] = torch.nan
    found = _multiply(x, weight, None, TileConfig(path, {"skinny": 8, "gemm": 16}[path], 32, 1))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_the_operator_passes_torchs_own_checks() -> None:
    for kind in (GgmlType.Q4_K, GgmlType.IQ4_NL):
        weight = CODED_TYPES[kind].decode(draw_blocks(kind, 20, 256)).to(DEVICE)
        prepared = TRITON.prepare(weight)
        layout = require_layout(weight.scheme)
        tensors = [prepared.get(name) for name in PLANE_FIELDS]
        x = torch.randn(2, 256, device=DEVICE)
        operands = (
            x,
            *tensors,
            None,
            layout.low_bits,
            layout.high_bits,
            layout.group,
            "q4_k",
            prepared["arrived"],
        )
        operator = torch.ops.quantkit_triton.plane_linear.default
        torch.library.opcheck(operator, operands)
        assert not [one.name for one in operator._schema.arguments if one.has_default_value()]


@pytest.mark.parametrize("kind", [GgmlType.Q3_K, GgmlType.IQ4_XS], ids=lambda kind: kind.value)
def test_an_embedding_and_its_head_compile_into_one_graph(kind: GgmlType) -> None:
    weight = CODED_TYPES[kind].decode(draw_blocks(kind, 20, 256, size=0.1))
    head = QuantLinear(weight, None, DEVICE, torch.bfloat16, list_allowed_backends("triton"))
    embedding = QuantEmbedding(weight, DEVICE, torch.bfloat16, head)
    # The rows are those of the head, which holds the only copy.
    assert embedding.head is head

    def step(tokens: Tensor) -> Tensor:
        return head(torch.relu(embedding(tokens))) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    tokens = torch.tensor([3, 19, 0], device=DEVICE)
    with torch.inference_mode():
        assert torch.equal(compiled(tokens), step(tokens))
        wide = weight.dequantize().bfloat16()
        assert torch.equal(embedding(tokens).cpu(), wide[tokens.cpu()])


@pytest.mark.parametrize("path", ["plane_skinny", "plane_gemm", "plane_floats"])
def test_a_kernel_that_multiplies_wrongly_is_found_out_at_load(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = getattr(triton_plane_linear, path)
    wrap = triton_plane_linear.wrap_triton

    class Misled:
        """The kernel, with a bit of its arguments turned."""

        def __getitem__(self, grid: Any) -> Any:
            def launch(*operands: Any, **constants: Any) -> Any:
                turned = []
                for operand in operands:
                    is_base = isinstance(operand, int) and operand == BASE
                    turned.append(operand ^ 1 << 18 if is_base else operand)
                return wrap(wrong)[grid](*turned, **constants)

            return launch

    # Of blocks of 256, the test has too few tokens for the third kernel on a CPU.
    scheme = CODED_TYPES[GgmlType.Q5_1].scheme
    case = (TRITON, scheme, DEVICE, torch.bfloat16, torch.float16)
    self_test.cache_clear()
    assert self_test(*case) is None
    monkeypatch.setattr(
        triton_plane_linear,
        "wrap_triton",
        lambda kernel: Misled() if kernel is wrong else wrap(kernel),
    )
    self_test.cache_clear()
    reason = self_test(*case)
    self_test.cache_clear()
    assert reason is not None
    assert "tokens" in reason


@NAMED
def test_every_type_passes_the_test_at_load(kind: GgmlType) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert self_test(TRITON, CODED_TYPES[kind].scheme, DEVICE, dtype, torch.float16) is None


def _count_held_bytes(model: Decoder) -> int:
    """Count the bytes of the weights of a model, each once, without what kernels need besides."""
    held: dict[int, int] = {}
    tensors = itertools.chain(model.named_parameters(), model.model.named_buffers())
    head = [] if model.lm_head is None else model.lm_head.named_buffers()
    for name, tensor in itertools.chain(tensors, head):
        if name.rpartition(".")[2] in (*FIELDS, *PLANE_FIELDS, "words", "weight", "bias"):
            held[tensor.data_ptr()] = tensor.nbytes if not name.endswith("table") else 0
    return sum(held.values())


@pytest.mark.parametrize("text", ["q5_0", "iq4_nl", "q8_0"])
def test_a_file_runs_as_it_is_stored(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("model") / f"{text}.gguf"
    quantkit.quantize(DEMO_MODEL, path, text, to="gguf", method="rtn", accept_quality_loss=True)
    said = []
    for backend in ("triton", "reference"):
        model, tokenizer = quantkit.load(path, device=DEVICE, dtype=torch.float32, backend=backend)
        if backend == "triton":
            layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
            assert {layer.backend for layer in layers} == {TRITON}
            assert str(layers[0].scheme) == str(QuantScheme.parse(text))
            assert "codes" in layers[0].backend_tensors
            stated = measure_run_memory(
                open_checkpoint(path), device=DEVICE, dtype=torch.float32, backend=backend
            )
            assert stated.weight_bytes == _count_held_bytes(model)
        prompt = tokenizer.encode("The first time")
        said.append(list(quantkit.generate(model, prompt, max_new_tokens=2)))
    assert said[0] == said[1]
    assert len(said[0]) == 2
