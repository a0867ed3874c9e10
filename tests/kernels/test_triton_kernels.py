"""The Triton backend without a GPU: kernels in the compiler, what torch compiles around them,
what it refuses.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

from quantkit.data.files import DEMO_MODEL
from quantkit.formats.detect import open_checkpoint
from quantkit.kernels import triton_tiles
from quantkit.kernels.backend import (
    AttentionWeights,
    BlockSettings,
    BlockStep,
    BlockWeights,
    PreparedLinear,
)
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.kernels.triton_tiles import (
    GpuSpec,
    default_config,
    gemm_config,
    gemv_config,
)
from quantkit.model.cache import KVCache
from quantkit.model.decoder import DecoderOps
from quantkit.model.install_kernels import _wrap_kernel
from quantkit.model.load import load_model
from quantkit.runtime.captured import greedy_step
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.gpu_kernels

CUDA = torch.device("cuda", 0)
LARGE, SMALL = GpuSpec("large", 132, 232448), GpuSpec("small", 84, 1 << 16)
TARGETS = {"cuda": (90, 32, "bf16"), "hip": ("gfx942", 64, "fp16")}

pytest.importorskip("triton")


def _compiled(
    kernel: Any,
    constants: dict[str, Any],
    target: str,
    cached: str | None = None,
    others: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The stages of a kernel compiled for a GPU that need not be there.

    Args:
        cached: the type of a cache's rows.
        others: the types of what is none of these.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arch, lanes, dtype = TARGETS[target]
    pointers = {
        "x": dtype,
        "words": "i32",
        "scale": "fp16",
        "zero": "u8",
        "bias": dtype,
        "out": dtype,
    }
    pointers |= {"queries": dtype, "keys": cached or dtype, "values": cached or dtype}
    pointers |= {
        "positions": "i64",
        "slots": "i64",
        "sinks": dtype,
        "places": "i32",
        "experts": "i32",
    }
    pointers |= dict.fromkeys(
        ("mixed", "largest", "total", "parts", "key_scales", "value_scales"), "fp32"
    )
    pointers |= {"arrived": "i32"}
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    names = kernel.arg_names
    types = {
        name: "constexpr"
        if name in constants
        else f"*{pointers[name]}"
        if name in pointers
        else "i32"
        for name in names
    } | (others or {})
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants
    }
    source = ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    stages: dict[str, Any] = triton.compile(
        source, target=GPUTarget(target, arch, lanes), options=options
    ).asm
    return stages


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_for_single_products_compile_for_gpus_that_are_not_here(
    bits: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels.triton_linear import gemv

    config = gemv_config(bits, 1, 4096, 4096, SMALL)
    group = {"GROUP": 64, "SYMMETRIC": False} if bits == 4 else {"GROUP": 0, "SYMMETRIC": True}
    stages = _compiled(gemv, {"BIAS": True, **group, **config.constants()}, target)
    assert stages["cubin" if target == "cuda" else "hsaco"]
    if target == "cuda":
        assert "ld.global.v4" in stages["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("group", "symmetric"), [(0, True), (32, False), (128, True)])
@pytest.mark.parametrize("tokens", [32, 128])
def test_weights_are_multiplied_in_the_registers_that_they_are_loaded_into(
    tokens: int, group: int, symmetric: bool, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels.triton_gemm import gemm

    config = gemm_config(
        4 if group else 8, tokens, 4096, 4096, LARGE if target == "cuda" else SMALL
    )
    constants = {"GROUP": group, "SYMMETRIC": symmetric, "BIAS": True, **config.constants()}
    stages = _compiled(gemm, constants, target, others={"scale": f"*{TARGETS[target][2]}"})
    assert stages["cubin" if target == "cuda" else "hsaco"]
    if target == "cuda":
        first, last = (at(stages["ptx"], "wgmma.mma_async") for at in (str.index, str.rindex))
        assert stages["ptx"].count("wgmma.mma_async") == 8  # of 16 columns each
        assert "wait_group.sync.aligned 0" not in stages["ptx"][first:last]
        loop = stages["ptx"][:last].rsplit("$L__BB", 1)[1]
        assert "ld.shared.v4" in loop
        assert "ld.global" in loop or not group
        assert "cp.async.cg.shared.global" in stages["ptx"]
        assert not [
            word
            for word in ("st.shared", "ldmatrix", "shfl", "st.local", "cvt.rn.bf16")
            if word in loop
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "symmetric"), [(0, True), (32, False)])
def test_float32_has_no_tensor_cores_and_compiles_as_well(
    group: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels.triton_gemm import gemm

    config = gemm_config(4 if group else 8, 32, 4096, 4096, LARGE, wide=True)
    constants = {"GROUP": group, "SYMMETRIC": symmetric, "BIAS": True, **config.constants()}
    assert _compiled(gemm, constants, "cuda", others=dict.fromkeys(("x", "bias", "out"), "*fp32"))[
        "cubin"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stages", [1, 3])
def test_kernels_for_few_tokens_compile_for_gpus_that_are_not_here(
    bits: int, stages: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels import triton_skinny

    config = replace(default_config(bits, 8, 4096, 4096, False, LARGE), stages=stages)
    assert config.path == "skinny"
    assert config.split > 1
    grouped = {"GROUP": 64 if bits == 4 else 0, "SYMMETRIC": False}
    flags = {"BIAS": True, "JOINED": True, "WHOLE": True, **grouped}
    stages_of_it = _compiled(triton_skinny.skinny, {**flags, **config.constants()}, target)
    assert stages_of_it["cubin" if target == "cuda" else "hsaco"]
    if target == "cuda":
        ptx = stages_of_it["ptx"]
        assert "mma.sync" in ptx
        assert "ld.global.v4" in ptx if stages == 1 else "cp.async" in ptx
        assert (
            ptx.count("shfl") <= 1
        )  # which distinguishes warps: each thread multiplies the words that it has loaded
        assert "st.local" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_for_few_tokens_compile_for_one(
    bits: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes a constant of an argument that is 1."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels import triton_skinny

    config = default_config(bits, 1, 4096, 4096, False, LARGE)
    flags = {
        "m": 1,
        "GROUP": 64 if bits == 4 else 0,
        "SYMMETRIC": False,
        "BIAS": True,
        "JOINED": joined,
        "WHOLE": True,
    }
    assert _compiled(triton_skinny.skinny, {**flags, **config.constants()}, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("places", [8, 4096])
def test_kernels_for_experts_compile_for_gpus_that_are_not_here(
    bits: int, places: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels import triton_experts

    config = triton_experts.choose_experts_config(bits, places, 128, 1536, 2048, False, SMALL)
    kernel = getattr(triton_experts, f"grouped_{config.path}")
    constants = {
        "GROUP": 64 if bits == 4 else 0,
        "SYMMETRIC": False,
        "BIAS": True,
        **config.constants(),
    }
    assert _compiled(kernel, constants, target)["cubin" if target == "cuda" else "hsaco"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cached", [None, "i8"])
@pytest.mark.parametrize(
    ("slots", "softcap"), [(False, 0.0), (True, 50.0)], ids=["plain", "slots, capped"]
)
@pytest.mark.parametrize(("rows", "size"), [(4, 128), (64, 80), (16, 256)])
def test_attention_compiles_for_gpus_that_are_not_here(
    rows: int,
    size: int,
    slots: bool,
    softcap: float,
    cached: str | None,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels.triton_attention import (
        attend_and_join,
        attend_span,
        choose_tile,
        join_spans,
    )

    tile = choose_tile(rows, size, torch.bfloat16, LARGE if target == "cuda" else SMALL)
    constants = {
        "SIZE": size,
        "TOKENS": 1,
        "SPANS": 33,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": tile.block_d,
    }
    launch = {"BLOCK_M": tile.block_m, "num_warps": 4, "num_stages": tile.stages}
    spans = {"SCALE": 0.1, "SOFTCAP": softcap, "SLOTS": slots} | launch
    join = {"SINKS": softcap > 0, "BLOCK_S": 64, "num_warps": 4, "num_stages": 1}
    stages = _compiled(attend_span, constants | spans, target, cached)
    assert _compiled(join_spans, constants | join, target)
    if slots and size == 128:
        assert _compiled(attend_and_join, constants | join | spans, target, cached)
    if target == "cuda":
        assert "mma" in stages["ptx"]
        assert "cp.async" in stages["ptx"]  # tiles of the cache come while others are multiplied
        assert "st.local" not in stages["ptx"]
        copies = re.findall(
            r"cp\.async\.c\w+\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+),", stages["ptx"]
        )
        assert set(copies) == {"10", "4"} if cached else {"10"}  # bytes; four of scales alone
        assert "cvt.rn.f32.s" not in stages["ptx"].replace(
            "cvt.rn.f32.s32", ""
        )  # codes become bfloat16 at once


BLOCK_TYPES = {
    "states": "*bf16",
    "weighted": "*bf16",
    "queries": "*bf16",
    "norm": "*fp32",
    "norms": "*fp32",
    "squares": "*fp32",
    "cosine": "*fp32",
    "sine": "*fp32",
    "query_scale": "*fp32",
    "growth": "fp32",
}
ENDS: dict[str, dict[str, Any]] = {
    "project_heads": {
        "NORMS": True,
        "ROTARY": True,
        "QUERY_SCALE": False,
        "SLOTS": True,
        "CLIP": 0.0,
        "EPS": 1e-5,
        "SIZE": 128,
        "HALF": 64,
        "EACH": 1,
    },
    "add_product": {"MULTIPLIER": 1.0},
    "gate_product": {"ACTIVATION": 0, "LIMIT": 0.0, "ALPHA": 1.702, "EPS": 1e-5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "bits", "cached"), [("cuda", 4, "i8"), ("cuda", 8, None), ("hip", 4, None)], ids=str
)
@pytest.mark.parametrize("name", ENDS)
def test_the_launches_of_a_block_compile_for_gpus_that_are_not_here(
    name: str, target: str, bits: int, cached: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels import triton_projections, triton_qkv

    config = replace(default_config(bits, 1, 4096, 4096, False, LARGE), block_n=32, stages=3)
    tile = {
        "GROUP": 128 if bits == 4 else 0,
        "SYMMETRIC": False,
        "BIAS": True,
        "WHOLE": True,
        "TOKENS": 1,
    }
    kernel = getattr(triton_qkv if name == "project_heads" else triton_projections, name)
    once = {argument: 1 for argument in ("m", "tokens") if argument in kernel.arg_names}
    types = {
        argument: kind for argument, kind in BLOCK_TYPES.items() if argument in kernel.arg_names
    }
    if target == "hip":
        types = {argument: kind.replace("bf16", "fp16") for argument, kind in types.items()}
    stages = _compiled(
        kernel,
        {**once, **tile, **ENDS[name], "SPLIT": 8, **config.constants()},
        target,
        cached,
        types,
    )
    assert stages["cubin" if target == "cuda" else "hsaco"]
    if target == "cuda":
        assert "mma.sync" in stages["ptx"]
        assert "cp.async" in stages["ptx"]
        assert "atom" in stages["ptx"]
        assert "st.local" not in stages["ptx"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("codes", ["symmetric", "asymmetric", "table"])
@pytest.mark.parametrize("descend", [True, False])
def test_columns_are_rounded_without_a_word_between_threads(
    descend: bool, codes: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from quantkit.kernels.triton_gptq import round_columns

    tensors = ("start", "target", "ratios", "inverse", "scale", "zero", "values", "bounds")
    types = dict.fromkeys((*tensors, "codes", "errors"), "*fp32") | {"columns": "*i64"}
    constants = {
        "IN_TABLE": codes == "table",
        "SYMMETRIC": codes != "asymmetric",
        "DESCEND": descend,
        "ROWS": 32,
        "num_warps": 1,
        "num_stages": 1,
    }
    stages = _compiled(round_columns, constants, target, others=types)
    assert stages["cubin" if target == "cuda" else "hsaco"]
    if target == "cuda":
        assert "div.rn.f32" in stages["ptx"]
        assert not [
            word
            for word in ("st.local", "shfl", "st.shared", "ld.global.nc")
            if word in stages["ptx"]
        ]


class _Driver:
    """Says for which GPU to compile, where there is none."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _graph_of(
    function: Callable[..., Tensor], operands: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> torch.fx.Graph:
    """What a compiler makes of ``function(*operands) + 1`` for a GPU that need not be there."""
    import triton

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        given = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        values = [node.meta["val"] for node in given]
        return lambda *arguments: [torch.zeros(value.shape, dtype=value.dtype) for value in values]

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, keep_inference_input_mutations=True, decompositions=select_decomp_table()
    )
    with torch.no_grad():
        torch.compile(lambda *given: function(*given) + 1, backend=backend, fullgraph=True)(
            *operands
        )
    assert not [node for node in graphs[0].graph.nodes if "quantkit" in str(node.target)]
    return graphs[0].graph


def _kernels_in(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]


def _kernels_seen(
    function: Callable[..., Tensor], operands: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> list[torch.fx.Node]:
    """The kernels in what a compiler makes of ``function(*operands) + 1`` for a GPU that need
    not be there.
    """
    return _kernels_in(_graph_of(function, operands, monkeypatch))


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_a_compiler_sees_the_kernels_and_that_they_only_write_the_product(
    text: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, backend = QuantScheme.parse(text), TritonBackend()
    prepared = backend.prepare(quantize_rtn(torch.randn(40, 96), scheme, torch.float16))
    x = torch.randn(tokens, 96, dtype=torch.bfloat16)
    (kernel,) = _kernels_seen(
        lambda x: backend.linear(x, prepared, scheme, 40, None), (x,), monkeypatch
    )
    assert kernel.kwargs["tensors_to_clone"] == ["out"]


@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_a_compiler_sees_that_programs_that_share_rows_write_parts_and_counters(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiles, "INTERPRETER", LARGE)
    triton_tiles.gpu_spec.cache_clear()
    scheme, backend = QuantScheme.parse(text), TritonBackend()
    prepared = backend.prepare(quantize_rtn(torch.randn(40, 1024), scheme, torch.float16))
    x = torch.randn(2, 1024, dtype=torch.bfloat16)
    try:
        (kernel,) = _kernels_seen(
            lambda x: backend.linear(x, prepared, scheme, 40, None), (x,), monkeypatch
        )
    finally:
        triton_tiles.gpu_spec.cache_clear()
    assert sorted(kernel.kwargs["tensors_to_clone"]) == ["arrived", "out", "parts"]
    reinplace_inplaceable_ops_core(kernel.graph)
    assert kernel.kwargs["tensors_to_clone"] == []


@pytest.mark.slow
@pytest.mark.parametrize("text", ["int8", "int4-g32-asym"])
def test_a_compiler_sees_a_kernel_for_each_part_of_a_large_weight(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.kernels import triton_linear

    monkeypatch.setattr(triton_linear, "FLOAT_BYTES", 1)
    scheme, backend = QuantScheme.parse(text), TritonBackend()
    prepared = backend.prepare(quantize_rtn(torch.randn(300, 96), scheme, torch.float16))
    x, bias = torch.randn(600, 96, dtype=torch.bfloat16), torch.randn(300, dtype=torch.bfloat16)
    kernels = _kernels_seen(
        lambda x: backend.linear(x, prepared, scheme, 300, bias), (x,), monkeypatch
    )
    assert [kernel.kwargs["tensors_to_clone"] for kernel in kernels] == [["out"]] * 3


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8], ids=str)
def test_a_compiler_sees_that_attention_leaves_the_cache_alone(
    cached: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = TritonBackend().offer_kernels().cached_attention
    assert attention is not None
    keys, values = (to_cached_rows(torch.zeros(1, 2, 300, 64), cached) for _ in range(2))
    operands = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16), keys, values, torch.tensor([7])
    spans, join = _kernels_seen(lambda *given: attention(*given, None, None), operands, monkeypatch)
    assert sorted(spans.kwargs["tensors_to_clone"]) == ["largest", "mixed", "total"]
    assert join.kwargs["tensors_to_clone"] == ["out"]


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8], ids=str)
def test_a_compiler_stores_into_the_cache_without_copying_it(
    cached: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = TritonBackend().offer_kernels().cached_attention
    assert attention is not None
    config = replace(open_checkpoint(DEMO_MODEL).config, num_kv_heads=2, head_dim=64)
    cache = KVCache(config, 1, 300, cached, "cpu")

    def step(queries: Tensor, new: Tensor, positions: Tensor) -> Tensor:
        return attention(queries, *cache.update(0, positions, new, new), positions, None, None)

    new = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16)
    graph = _graph_of(step, (torch.cat([new, new], 1), new, torch.tensor([7])), monkeypatch)
    reinplace_inplaceable_ops_core(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("aten.index_put_.default") == (4 if cached == torch.int8 else 2)
    assert not {"aten.index_put.default", "aten.copy_.default"} & set(targets)
    assert [kernel.kwargs["tensors_to_clone"] for kernel in _kernels_in(graph)] == [[], []]


@pytest.mark.slow
def test_a_compiler_sees_five_launches_a_block_and_no_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quantkit.kernels.triton_block import prepare_blocks

    scheme, backend, dtype = QuantScheme.parse("int4-g32-asym"), TritonBackend(), torch.bfloat16
    norm = torch.ones(64)

    def linear(rows: int, columns: int) -> PreparedLinear:
        prepared = backend.prepare(quantize_rtn(torch.randn(rows, columns), scheme, torch.float16))
        return PreparedLinear(prepared, scheme, None)

    def weights() -> BlockWeights:
        qkv, out, gate_up, down = (
            linear(*shape) for shape in ((128, 64), (64, 64), (192, 64), (64, 96))
        )
        return BlockWeights(
            input_norm=norm,
            mixer=AttentionWeights(qkv=(qkv,), q_norm=None, k_norm=None, sinks=None, out=out),
            mixer_output_norm=None,
            mlp_norm=norm,
            gate_up=(gate_up,),
            down=down,
            mlp_output_norm=None,
            experts=None,
        )

    settings = BlockSettings(
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        window=None,
        chunk=None,
        rotary=True,
        attention_scale=None,
        attention_softcap=None,
        clip_qkv=None,
        attention_gate=False,
        qk_norm_after_rotary=False,
        activation="silu",
        activation_limit=None,
        activation_alpha=1.702,
        norm_eps=1e-5,
        centered_norms=False,
        residual_multiplier=1.0,
        parallel_branches=False,
    )
    run = prepare_blocks([(weights(), settings), (weights(), settings)], dtype)
    assert run is not None
    rows = [torch.zeros(1, 1, 300, 32, dtype=torch.int8) for _ in range(4)]
    scales = [torch.zeros(1, 1, 300) for _ in range(4)]

    def step(x: Tensor, positions: Tensor, angle: Tensor, *cache: Tensor) -> Tensor:
        stored = [CachedRows(*pair) for pair in zip(cache[:4], cache[4:], strict=True)]
        cached = list(zip(stored[:2], stored[2:], strict=True))
        return run(
            x,
            BlockStep(
                positions=positions,
                slots=None,
                query_scales=[None, None],
                is_prefill=False,
                angles=[(angle, angle)] * 2,
                cached=cached,
            ),
        )

    operands = (
        torch.randn(1, 3, 64, dtype=dtype),
        torch.tensor([7, 8, 9]),
        torch.zeros(3, 32),
        *rows,
        *scales,
    )
    graph = _graph_of(step, operands, monkeypatch)
    assert len(_kernels_in(graph)) == 1 + 2 * 5
    reinplace_inplaceable_ops_core(graph)
    assert all(kernel.kwargs["tensors_to_clone"] == [] for kernel in _kernels_in(graph))
    calls = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    others = {
        call for call in calls if "triton_kernel_wrapper" not in call and "getitem" not in call
    }
    assert others <= {
        "aten.empty.memory_format",
        "aten.view.default",
        "aten.add.Tensor",
    }  # which adds 1 at the end


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8], ids=str)
def test_a_step_from_token_to_token_stores_into_the_cache_without_copying_it(
    cached: torch.dtype, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attention = (
        load_model(DEMO_MODEL, dtype=torch.bfloat16),
        TritonBackend().offer_kernels().cached_attention,
    )
    assert attention is not None
    model.model.layers = model.model.layers[:1]
    model.ops = DecoderOps(cached_attention=_wrap_kernel(attention))
    cache = KVCache(model.config, slots, 300, cached, "cpu")

    def step(rows: Tensor, last: Tensor, drawn: Tensor) -> Tensor:
        greedy_step(model, rows, last, drawn, cache, slots == 1)
        return drawn

    operands = tuple(
        torch.zeros(shape, dtype=torch.long) for shape in ((3, slots), slots + 1, slots)
    )
    graph = _graph_of(step, operands, monkeypatch)
    reinplace_inplaceable_ops_core(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("aten.index_put_.default") > 2
    assert not {"aten.index_put.default", "aten.index_copy.default"} & set(targets)
    copied = [
        node.args[0].meta["val"] for node in graph.nodes if str(node.target) == "aten.copy_.default"
    ]
    assert all(tensor.numel() <= 3 * slots for tensor in copied)


def _unsupported_reason(
    dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA
) -> str | None:
    return TritonBackend().explain_unsupported(QuantScheme(8, None), device, dtype)


def test_what_is_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device in ("cpu", "meta"):
        assert "GPU" in (_unsupported_reason(device=torch.device(device)) or "")


@pytest.mark.parametrize(
    ("capability", "dtype", "names"),
    [
        ((7, 5), torch.bfloat16, ["torch.bfloat16", "8.0", "7.5"]),
        ((7, 0), torch.float16, ["torch.float16", "7.5", "7.0"]),
    ],
)
def test_old_gpus_are_refused(
    capability: tuple[int, int],
    dtype: torch.dtype,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = _unsupported_reason(dtype) or ""
    assert all(name in reason for name in names)


def test_without_triton_there_is_a_unsupported_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton" in (_unsupported_reason() or "")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tune_triton", "measure_gpu"])
def test_the_scripts_say_what_they_do_without_a_gpu(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/measure" / f"{script}.py"), "--help"]
    assert "GPU at hand" in " ".join(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
