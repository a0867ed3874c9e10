"""Models that transformers runs, quantized: what transformers makes of the results."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import transformers
from partial import contents, partial
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from quantkit.calibration import effort
from quantkit.calibration.group_solver import GroupSolver
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.output.staging import SCRATCH
from quantkit.jobs.output.writer import Writer
from quantkit.text.tokenizer import load_tokenizer

Tiny = Callable[[str], Path]
Made = Callable[..., quantkit.QuantizeResult]
KINDS = ("mixtral", "qwen3_next", "gemma3_text", "opt", "deepseek_v3")
RUN_BY = f"transformers {transformers.__version__}"
EXTRA = r"pip install 'quantkit\[transformers\]'"


def _quantize(
    source: Path, dst: Path, method: str = "gptq", **options: Any
) -> quantkit.QuantizeResult:
    samples = {"samples": 40, "length": 128} if method == "gptq" else {}
    given: dict[str, Any] = {"source_check": False, "method": method, **samples, **options}
    return quantkit.quantize(source, dst, "int4-g32", **given)


@pytest.fixture(autouse=True, scope="module")
def _small_batches() -> Iterator[None]:
    """Batches of four samples: more than those that go through the float model too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effort, "BATCH_TOKENS", 512)
        yield


@pytest.fixture(scope="module")
def texts() -> Tensor:
    """Text that calibration does not see."""
    return torch.tensor(load_tokenizer(DEMO_MODEL).encode(excerpt())[: 8 * 128]).view(8, 128)


@pytest.fixture(scope="module")
def made(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Quantizes a tiny model; with the same options once."""
    folder = tmp_path_factory.mktemp("made")

    @functools.cache
    def quantized(kind: str, method: str, via: str) -> quantkit.QuantizeResult:
        return _quantize(tiny_model(kind), folder / f"{kind}-{method}-{via}", method, via=via)

    return lambda kind, method="gptq", via="transformers": quantized(kind, method, via)


def _loaded(folder: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):
        settings = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **settings
        )
    model, info = made
    assert not any(info.values()), info
    return model.eval()


def _kl(source: Path, result: Path, texts: Tensor) -> float:
    reference, own = (
        oracle.logits(one, texts).log_softmax(-1) for one in (oracle.load(source), _loaded(result))
    )
    return float((reference.exp() * (reference - own)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_result_and_it_loses_less_than_rounding(
    kind: str, tiny_model: Tiny, made: Made, texts: Tensor
) -> None:
    solved, rounded = (
        _kl(tiny_model(kind), made(kind, method).path, texts) for method in ("gptq", "rtn")
    )
    assert 0 < solved < rounded
    assert made(kind).schemes == made(kind, "rtn").schemes
    one, other = (made(kind, method).manifest["quality"]["texts"] for method in ("gptq", "rtn"))
    assert [text["source_perplexity"] for text in one] == [
        text["source_perplexity"] for text in other
    ]


@pytest.mark.slow
def test_linears_that_are_used_several_times_lose_less_than_by_rounding(
    tiny_model: Tiny, tmp_path: Path, texts: Tensor
) -> None:
    source = tiny_model("hrm_text")
    reference = oracle.logits(oracle.load(source), texts).log_softmax(-1)
    kls: list[float] = []
    for method in ("gptq", "rtn"):
        made = _quantize(source, tmp_path / method, method, via="transformers")
        floats = tmp_path / f"{method}-floats"
        quantkit.convert(made.path, floats, dequantize=True, source_check=False)
        result = oracle.logits(oracle.load(floats), texts).log_softmax(-1)
        kls.append(float((reference.exp() * (reference - result)).sum(-1).mean()))
    assert 0 < kls[0] < kls[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_quantized_stays_bit_for_bit_and_what_ran_it_is_recorded(
    kind: str, tiny_model: Tiny, made: Made
) -> None:
    result = made(kind)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_model(kind), result.path)
    )
    packed = {name.rpartition(".weight_")[0] for name in after if ".weight_" in name}
    assert len(packed) == sum(result.schemes.values()) > 0
    kept = {
        name: value for name, value in before.items() if name.removesuffix(".weight") not in packed
    }
    assert kept.keys() == {name for name in after if ".weight_" not in name}
    for name, value in kept.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(
            after[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        ), name
    manifest = json.loads((result.path / "quantkit.json").read_text())
    assert manifest["run_by"] == RUN_BY
    assert manifest["quality"]["passed"]
    assert any(note.endswith(f"run by {RUN_BY}") for note in result.notes)
    assert {one["solver"] for one in manifest["modules"].values() if one["scheme"]} == {"gptq"}


@pytest.mark.slow
def test_a_family_with_a_decoder_loses_as_much_through_either(
    tiny_model: Tiny, made: Made, texts: Tensor
) -> None:
    own, other = (
        _kl(tiny_model("llama"), made("llama", via=via).path, texts)
        for via in ("own", "transformers")
    )
    assert other == pytest.approx(own, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("written", "left"), [(1, {"0", "1"}), (2, {"1"}), (3, set())])
def test_an_interrupted_run_solves_the_blocks_that_are_left_and_gets_the_same_bytes(
    written: int,
    left: set[str],
    tiny_model: Tiny,
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, solve, dst, solved = (
        Writer.record_safe_point,
        GroupSolver.solve,
        tmp_path / "out",
        list[str](),
    )
    count = itertools.count(1)

    def stopped(self: Writer) -> None:
        checkpoint(self)
        if next(count) == written:  # the first time after the embedding, then after each block
            raise KeyboardInterrupt

    def watched(self: GroupSolver, linears: Any, *arguments: Any, **options: Any) -> Any:
        solved.extend(linears)
        return solve(self, linears, *arguments, **options)

    monkeypatch.setattr(Writer, "record_safe_point", stopped)
    with pytest.raises(KeyboardInterrupt):
        _quantize(tiny_model("mixtral"), dst, via="transformers")
    assert not dst.exists()
    monkeypatch.undo()
    monkeypatch.setattr(GroupSolver, "solve", watched)
    _quantize(tiny_model("mixtral"), dst, via="transformers", resume=True)
    assert {name.split(".")[2] for name in solved} == left
    assert contents(dst) == contents(made("mixtral").path)


@pytest.mark.slow
def test_spilling_everything_changes_no_byte(tiny_model: Tiny, made: Made, tmp_path: Path) -> None:
    # Of the first process.
    scratch, files = partial(tmp_path / "out") / f"{SCRATCH}-0", [0]
    given: dict[str, Any] = {
        "progress": lambda *_: files.append(len(list(scratch.glob("*")))),
        "activation_memory": 0,
    }
    _quantize(tiny_model("mixtral"), tmp_path / "out", via="transformers", **given)
    assert max(files) > 1
    assert contents(tmp_path / "out") == contents(made("mixtral").path)


@pytest.mark.slow
def test_an_expert_that_gets_no_token_is_solved_for_all(
    tiny_model: Tiny, tmp_path: Path, texts: Tensor
) -> None:
    model, states = oracle.load(tiny_model("deepseek_v3")), list[Tensor]()
    model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[3] = -100
    source = oracle.save(model, tmp_path / "src")
    shutil.copy(DEMO_MODEL / "tokenizer.model", source)
    experts = "model.layers.1.mlp.experts"
    model.get_submodule(experts).register_forward_pre_hook(lambda _, args: states.append(args[0]))
    oracle.logits(model, texts)
    errors = []
    for method in ("gptq", "rtn"):
        options = {"via": "transformers", "keep": ["*.self_attn.*", "*.layers.0.*", "*shared*"]}
        made = _loaded(_quantize(source, tmp_path / method, method, **options).path)
        weights = (
            one.get_parameter(f"{experts}.gate_up_proj").detach()[3] for one in (made, model)
        )
        errors.append((states[0] @ (next(weights) - next(weights)).t()).norm())
    assert errors[0] < errors[1]


@pytest.mark.slow
def test_linears_that_cannot_be_solved_keep_their_floats_with_a_note(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    made = _quantize(tiny_model("bart"), tmp_path / "bart", via="transformers")
    left = [
        one["reason"] for name, one in made.manifest["modules"].items() if "encoder_attn" in name
    ]
    assert left == ["no calibration sample was seen to reach it"] * 8
    assert any(
        "encoder_attn" in note and "and 4 more stay unquantized: no calib" in note
        for note in made.notes
    )
    # Only linears that no sample reaches are left to quantize.
    options: dict[str, Any] = {"via": "transformers", "keep": ["*.self_attn.*", "*.fc?"]}
    with pytest.raises(
        UnsupportedError, match=r'GPTQ cannot quantize any linear.*reach it\); `method="rtn"`'
    ):
        _quantize(tiny_model("bart"), tmp_path / "none", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["bart"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "run_by"), [("llama", None), ("gpt_neox", RUN_BY)])
def test_by_default_transformers_runs_what_no_decoder_does(
    kind: str, run_by: str | None, tiny_model: Tiny, tmp_path: Path
) -> None:
    manifest = _quantize(tiny_model(kind), tmp_path / "dst").manifest
    assert manifest["method"] == "gptq"
    assert manifest.get("run_by") == run_by


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"via": "own", "tensors_only": True}, "`via` and `tensors_only=True` are mutually exclusive"),
    (
        {"via": "transformers", "tensors_only": True},
        "`via` and `tensors_only=True` are mutually exclusive",
    ),
    ({"via": "vllm"}, "unknown value of `via`"),
    (
        {"template": "x"},
        '`template` cannot be combined with `via="transformers"`',
    ),  # by default
]


def test_what_does_not_go_together_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    for options, message in REFUSED:
        with pytest.raises(RequestError, match=message):
            _quantize(tiny_model("gpt_neox"), tmp_path / "dst", **options)
    with pytest.raises(UnsupportedError, match=rf"architecture is not supported.*{EXTRA}"):
        _quantize(tiny_model("gpt_neox"), tmp_path / "dst", via="own")
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_named_with_the_command(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "transformers" else find(name, *args),
    )
    for kind in ("llama", "gpt_neox"):
        with pytest.raises(
            RequestError, match=rf"transformers must be installed .*; {EXTRA}"
        ) as caught:
            _quantize(tiny_model(kind), tmp_path / "dst", via="transformers")
        assert caught.value.exit_code == 2
    with pytest.raises(
        RequestError,
        match=rf"transformers must be installed .*gpt_neox.*{EXTRA}; or `tensors_only=True`",
    ):
        _quantize(tiny_model("gpt_neox"), tmp_path / "dst")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_experts_that_stay_in_one_tensor_are_listed_one_by_one(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    """As runtimes build them, which look there for what is not quantized."""
    made = _quantize(
        tiny_model("gpt_oss"), tmp_path / "dst", "rtn", via="transformers", accept_quality_loss=True
    )
    ignored = json.loads((made.path / "config.json").read_text())["quantization_config"]["ignore"]
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(2) for expert in range(4)
    }
    assert {
        f"{one}.{linear}" for one in experts for linear in ("gate_proj", "up_proj", "down_proj")
    } <= set(ignored)
