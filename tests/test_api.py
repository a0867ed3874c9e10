"""`import quantkit`: what a script sees, and how it is told."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pydoc
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

import quantkit
from quantkit import errors
from quantkit.errors import QuantkitError, RequestError
from quantkit.formats.detect import WeightKind
from quantkit.formats.registry import CONTAINERS
from quantkit.jobs.quantize.options import Method
from quantkit.kernels import BackendName
from quantkit.kernels.dispatch import BACKENDS
from quantkit.tensors.dtypes import FLOAT_NAMES, FloatName, float_name
from quantkit.text.tokenizer import JsonTokenizer, SentencePieceTokenizer, TiktokenTokenizer

FUNCTIONS = (
    "bench",
    "convert",
    "evaluate",
    "generate",
    "generate_batch",
    "inspect",
    "load",
    "open_checkpoint",
    "push",
    "quantize",
    "stream",
    "verify",
)
REPORTS = (
    "Bench",
    "ConvertResult",
    "Estimate",
    "Evaluation",
    "FolderReport",
    "Gate",
    "Inspection",
    "PushResult",
    "QuantizeResult",
    "VerifyReport",
)


@pytest.mark.slow
def test_everything_is_there_and_torch_is_not_until_it_is_used() -> None:
    code = (
        "import sys, quantkit\n"
        "names = dir(quantkit)\n"
        "quantkit.errors.RequestError, quantkit.Progress, quantkit.QuantScheme\n"
        "assert 'torch' not in sys.modules\n"
        "print(*names)\n"
        "print(*(getattr(quantkit, name) is not None for name in names))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    names, found = out.splitlines()
    assert {
        *FUNCTIONS,
        *REPORTS,
        "errors",
        "plan",
        "Progress",
        "Tokenizer",
        "Recipe",
        "Verdict",
    } <= set(names.split())
    assert set(found.split()) == {"True"}
    assert sorted(dir(quantkit)) == names.split()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'quantkit' has no attribute 'quantise'"):
        _ = quantkit.quantise  # type: ignore[attr-defined]


def test_the_stub_names_the_module_that_defines_each_name() -> None:
    """Type checkers and `import quantkit` read the same stub."""
    stub = Path(str(quantkit.__file__)).with_suffix(".pyi").read_text()
    for name in set(dir(quantkit)) - {"__version__"}:
        value = getattr(quantkit, name)
        path = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{name}"
        home, _, defined_name = path.rpartition(".")
        assert f"from {home} import {defined_name} as {defined_name}\n" in stub, name


def test_help_reads_as_a_reference() -> None:
    page = pydoc.render_doc(quantkit, renderer=pydoc.plaintext)
    overview, _, functions = page.partition("\nFUNCTIONS")
    for name in FUNCTIONS:
        assert f"\n    {name}(" in functions, name
        assert f"\n        {name} " in overview, name
    assert "0x" not in page
    assert "\n        plan.quantize " in overview


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_gives_and_raises(name: str) -> None:
    _require_reported(getattr(quantkit, name))


@pytest.mark.parametrize("method", ["build", "generate", "text_completion", "chat_completion"])
def test_metas_interface_says_what_it_takes_gives_and_raises(method: str) -> None:
    _require_reported(getattr(quantkit.Llama, method))


def test_metas_interface_has_metas_arguments() -> None:
    """In its order and with its defaults, for calls without names."""
    build = (
        "ckpt_dir, tokenizer_path, max_seq_len, max_batch_size, model_parallel_size=None, seed=1"
    )
    drawn = "temperature=0.6, top_p=0.9"
    for method, expected in {
        "build": build,
        "generate": f"self, prompt_tokens, max_gen_len, {drawn}, logprobs=False, echo=False",
        "text_completion": f"self, prompts, {drawn}, max_gen_len=None, logprobs=False, echo=False",
        "chat_completion": f"self, dialogs, {drawn}, max_gen_len=None, logprobs=False",
    }.items():
        parameters = inspect.signature(getattr(quantkit.Llama, method)).parameters.values()
        by_place = [
            one.replace(annotation=inspect.Parameter.empty)
            for one in parameters
            if one.kind != one.KEYWORD_ONLY
        ]
        assert ", ".join(map(str, by_place)) == expected


@pytest.mark.parametrize("name", ["convert", "generate", "quantize"])
def test_every_plan_says_what_it_takes_gives_and_raises(name: str) -> None:
    function = getattr(quantkit.plan, name)
    text = inspect.getdoc(function) or ""
    assert "Returns:\n" in text
    assert "Raises:\n" in text
    if name != "generate":  # it has arguments of its own
        real = inspect.signature(getattr(quantkit, name)).parameters
        planned = inspect.signature(function).parameters
        assert list(planned) == [
            one for one in real if one not in ("group", "on_estimate", "on_note", "progress")
        ]
        assert all(real[one].default == planned[one].default for one in planned)


@pytest.mark.parametrize("kind", [SentencePieceTokenizer, TiktokenTokenizer, JsonTokenizer])
@pytest.mark.parametrize("method", ["encode", "decode"])
def test_tokenizers_say_what_they_take_give_and_raise(kind: type, method: str) -> None:
    _require_reported(getattr(kind, method))


def _require_reported(function: Any) -> None:
    text = inspect.getdoc(function) or ""
    reported, _, result = text.partition("Returns:\n")
    assert result, "nothing is said of what it returns"
    assert "Raises:\n" in result
    for parameter in set(inspect.signature(function).parameters) - {"self"}:
        assert f"{parameter}:" in reported or f"{parameter}," in reported, parameter


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_has_plain_values_for_json(name: str) -> None:
    report = getattr(quantkit, name)
    assert dataclasses.is_dataclass(report)
    arguments = list(inspect.signature(report.to_json).parameters.values())[1:]
    assert all(one.default is not inspect.Parameter.empty for one in arguments)


def test_reports_are_json(demo_model: Path, tmp_path: Path) -> None:
    for report in (
        quantkit.inspect(str(demo_model)),
        quantkit.plan.convert(str(demo_model), str(tmp_path / "out"), dtype="float32"),
        quantkit.plan.quantize(demo_model, tmp_path / "out", "int8"),
    ):
        assert json.loads(json.dumps(report.to_json()))
        assert report.lines()
    found = quantkit.inspect(demo_model).to_json()
    assert (found["rope"]["theta"], found["rope"]["type"], found["window_rope"]) == (
        10000.0,
        "default",
        None,
    )
    assert found["tokenizer"] == {
        "kind": "sentencepiece",
        "vocab_size": found["vocabulary"],
        "bos_id": 1,
    }


def test_every_field_of_an_inspection_is_reported() -> None:
    reported = (inspect.getdoc(quantkit.Inspection) or "").partition("Attributes:")[2]
    assert not [
        one.name for one in dataclasses.fields(quantkit.Inspection) if one.name not in reported
    ]


def test_docs_name_the_errors_that_are_worth_another_try() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    kinds = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, QuantkitError)
    ]
    worth_it = {one for one in kinds if one.retryable}
    assert worth_it == {errors.BeingWrittenError, errors.NoSpaceError, errors.UnreachableError}
    for kind in {*worth_it, errors.InterruptedRunError}:
        again = "yes" if kind.retryable else "no"
        assert (
            f"| `{kind.__name__}`, a `{kind.__mro__[1].__name__}` | {kind.exit_code} | {again} |"
            in page
        )


def test_evaluate_takes_one_path_or_several_as_text_or_paths(
    demo_model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The people of the United States. " * 40)
    one = quantkit.evaluate(str(demo_model), texts=str(text), window=64, device=torch.device("cpu"))
    assert one.to_json() == quantkit.evaluate([demo_model], texts=[text], window=64).to_json()


def test_a_model_and_its_tokenizer_can_be_called(demo_model: Path) -> None:
    model, tokenizer = quantkit.load(demo_model, device="cpu")
    ids = tokenizer("My fellow citizens")
    assert ids == tokenizer.encode("My fellow citizens")
    assert ids[0] == tokenizer.bos_id
    rows = torch.tensor([ids, ids[::-1]])
    expected = model(rows, torch.arange(len(ids)))
    assert expected.shape == (2, len(ids), model.config.vocab_size)
    assert torch.equal(model(rows), expected)
    for one in (ids, rows[0]):
        torch.testing.assert_close(model(one), expected[0])


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (
            [10**7],
            (
                r"outside the vocabulary \(found 10000000, expected token ids from 0 to 2047, \[T\]"
                r" or \[B, T\]\)"
            ),
        ),
        (torch.tensor([[1, -1]]), r"outside the vocabulary \(found -1, "),
        ("hi", r"`tokens` is of the wrong type \(found 'hi', expected token ids from 0 to 2047"),
        ([2**70], "wrong type"),
        ([1.5], "wrong type"),
        ([[1], [1, 2]], "wrong type"),
        (3, "wrong type"),
        (None, "wrong type"),
    ],
)
def test_a_model_is_called_with_ids_of_its_vocabulary(
    tokens: Any, problem: str, demo_model: Path
) -> None:
    with pytest.raises(RequestError, match=problem):
        quantkit.load(demo_model, device="cpu")[0](tokens)


def test_choices_are_those_there_are() -> None:
    assert set(typing.get_args(FloatName)) == set(FLOAT_NAMES)
    assert set(typing.get_args(BackendName)) == {backend.name for backend in BACKENDS}
    kinds = {kind for container in CONTAINERS.values() for kind in container.weights}
    assert set(typing.get_args(WeightKind)) == kinds - {"gpt-fast-int4"}  # which is never read
    assert typing.get_args(Method) == ("rtn", "gptq")


@pytest.mark.parametrize("spelled", ["bf16", "BF16", "bfloat16", torch.bfloat16])
def test_a_float_type_is_taken_by_any_of_its_names_everywhere(
    spelled: Any, demo_model: Path, tmp_path: Path
) -> None:
    source = quantkit.convert(demo_model, tmp_path / "source", dtype="fp16").path
    assert quantkit.load(source, device="cpu", dtype=spelled)[0].dtype is torch.bfloat16
    planned = quantkit.plan.convert(source, tmp_path / "out", dtype=spelled)
    quantkit.convert(source, tmp_path / "out", dtype=spelled)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["options"]["dtype"] == "bf16"
    assert quantkit.inspect(tmp_path / "out").tensors.keys() == {"bfloat16"}
    assert planned.disk_bytes == pytest.approx(
        quantkit.inspect(tmp_path / "out").weight_bytes, rel=0.2
    )


@pytest.mark.parametrize("spelled", ["fp8", "", "half", torch.int8, torch.float64, 32])
def test_another_float_type_is_refused_everywhere(
    spelled: Any, demo_model: Path, tmp_path: Path
) -> None:
    for job in (
        lambda: float_name(spelled),
        lambda: quantkit.load(demo_model, dtype=spelled),
        lambda: quantkit.convert(demo_model, tmp_path / "out", dtype=spelled),
        lambda: quantkit.plan.convert(demo_model, tmp_path / "out", dtype=spelled),
        lambda: quantkit.plan.generate(demo_model, "v5e-4", dtype=spelled),
    ):
        with pytest.raises(RequestError, match=r"unknown float type .*expected bf16, fp16, fp32"):
            job()


@pytest.mark.parametrize("memory", ["4GB", -1, float("nan")])
def test_memory_is_a_number_of_bytes(memory: Any, demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        QuantkitError, match=r"not a valid number of bytes .*expected such as 4_000_000_000"
    ):
        quantkit.plan.quantize(
            demo_model,
            tmp_path / "out",
            "int8",
            method="gptq",
            calibration="x",
            activation_memory=memory,
        )
