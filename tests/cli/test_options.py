"""One habit for all commands: options of one name have one spelling, one meaning and one
default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from command import Capture, run
from error_parts import raises

import quantkit
from quantkit.cli.main import quantkit as root
from quantkit.cli.options import parse_file_size, parse_memory
from quantkit.cli.output import note
from quantkit.cli.quantize import may_need_gptq
from quantkit.errors import RequestError
from quantkit.evals.bench import bench
from quantkit.evals.evaluate import evaluate
from quantkit.model.device import to_torch_dtype
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme


def _commands() -> dict[str, click.Command]:
    """All commands by name, those of groups too."""
    commands: dict[str, click.Command] = {}
    for name, command in root.commands.items():
        if isinstance(command, click.Group):
            for inner_name, inner in command.commands.items():
                commands[f"{name} {inner_name}"] = inner
        else:
            commands[name] = command
    return commands


COMMANDS = _commands()
WITH_JSON = set(COMMANDS) - {"generate", "chat", "serve", "completion"}


def _options(name: str) -> dict[str, click.Option]:
    """The options of that name, by command."""
    return {
        command: option
        for command, of in COMMANDS.items()
        for option in of.params
        if isinstance(option, click.Option) and f"--{name}" in option.opts
    }


@pytest.mark.parametrize(
    "name", ["weights", "device", "dtype", "json", "compile", "resume", "table"]
)
def test_what_has_one_name_is_reported_once(name: str) -> None:
    options = _options(name)
    assert len(options) > 1
    assert (
        len({(option.help, str(option.type), repr(option.default)) for option in options.values()})
        == 1
    )


def test_json_takes_a_path_in_every_command_that_finds_something() -> None:
    options = _options("json")
    assert set(options) == WITH_JSON
    assert not any(option.is_flag for option in options.values())


def test_a_device_is_a_gpu_if_there_is_one_wherever_one_is_chosen() -> None:
    options = _options("device")
    assert set(options) == {
        "plan quantize",
        "quantize",
        "plan refine",
        "refine",
        "eval",
        "generate",
        "chat",
        "serve",
        "bench",
    }
    assert all("a GPU if available" in (option.help or "") for option in options.values())


def test_every_command_and_every_option_says_what_it_is(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["plan"]):
        listing = run(capfd, *group, "--help")[1].split("Commands:")[1].split("Exit codes")[0]
        assert "..." not in listing
        assert all(
            re.fullmatch(r"  [\w-]+ +[A-Z].*\.", line)
            for line in listing.splitlines()
            if line.strip()
        ), listing
    for name, command in COMMANDS.items():
        silent = [
            p.name
            for p in command.params
            if isinstance(p, click.Option) and not (p.help or p.hidden)
        ]
        assert not silent, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a GPU would be used")
def test_without_a_device_a_gpu_is_requested_where_torch_sees_one(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Capture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    text = tmp_path / "text.txt"
    text.write_text("The people of the United States. " * 100)
    with raises(RequestError, "device", found="cuda"):
        quantkit.load(demo_model)
    quantkit.load(demo_model, device="cpu")
    with raises(RequestError, "device", found="cuda"):
        quantkit.quantize(demo_model, tmp_path / "out", "int8", method="gptq", calibration=text)
    with raises(RequestError, "device", found="cuda"):
        evaluate([demo_model], texts=[text], window=64, speed=True)
    with raises(RequestError, "device", found="cuda"):
        evaluate([demo_model], tasks=["winogrande"])
    assert (
        evaluate([demo_model], texts=[text], window=64).device == "cpu"
    )  # perplexity is always computed there
    code, _, err = run(capfd, "generate", demo_model, "--prompt", "x")
    assert code == 2
    assert "found cuda" in err


def test_each_measurement_of_bench_requests_the_same(demo_model: Path) -> None:
    with raises(RequestError, "device", found="nonsense"):
        bench(demo_model, prompt_lengths=(4,), batches=(), runs=1, device="nonsense")


def test_a_device_without_use_is_refused(demo_model: Path, capfd: Capture) -> None:
    code, out, err = run(capfd, "eval", demo_model, "--device", "cuda")
    assert (code, out) == (2, "")
    assert all(name in err for name in ("device", "tasks", "speed"))


@pytest.mark.parametrize("spelled", ["fp32", "float32", torch.float32])
def test_float_types_are_spelled_as_one_likes(spelled: str | torch.dtype, demo_model: Path) -> None:
    assert quantkit.load(demo_model, device="cpu", dtype=spelled)[0].dtype is torch.float32


@pytest.mark.parametrize("spelled", ["fp8", "int8", "", torch.int8, 32])
def test_another_float_type_is_refused(spelled: object) -> None:
    with raises(RequestError, found=repr(spelled)):
        to_torch_dtype(spelled)  # type: ignore[arg-type]


def test_a_size_of_a_file_has_a_unit_or_is_in_bytes() -> None:
    assert parse_file_size("2GiB") == 2**31
    assert parse_file_size("2622336") == 2622336
    for spelled in ("1.5", "2.", "GB", "-5", ""):
        with raises(RequestError, "size", found=repr(spelled)):
            parse_file_size(spelled)


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        ("4GB", 4 * 10**9),
        ("512MB", 512 * 10**6),
        ("2GiB", 2**31),
        ("1.5 gb", 15 * 10**8),
        (".5T", 5 * 10**11),
        ("64k", 64000),
        ("100B", 100),
        ("0B", 0),
    ],
)
def test_memory_is_spelled_with_its_unit(spelled: str, expected: int, capfd: Capture) -> None:
    assert parse_memory(spelled) == expected
    assert capfd.readouterr().err == ""


def test_what_is_no_memory_is_refused() -> None:
    for spelled in ("lots", "", "GB", "-1GB", "nan", "inf", "4XB", "4GBs", "1e9", "4"):
        with raises(RequestError, "memory", found=repr(spelled)):
            parse_memory(spelled)


def test_the_command_hands_on_bytes(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: dict[str, object] = {}

    def planned(**arguments: object) -> quantkit.Estimate:
        received.update(arguments)
        raise RequestError("seen")

    monkeypatch.setattr(quantkit.plan, "quantize", planned)
    run(
        capfd,
        "plan",
        "quantize",
        demo_model,
        tmp_path / "o",
        "--scheme",
        "int8",
        "--activation-memory",
        "2GB",
    )
    assert received["activation_memory"] == 2 * 10**9


@pytest.mark.parametrize("spelled", ["bf16", "bfloat16"])
def test_the_command_takes_long_names_of_float_types(
    spelled: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    assert run(capfd, "plan", "convert", demo_model, tmp_path / "o", "--dtype", spelled)[0] == 0
    assert "[bf16|fp16|fp32]" in run(capfd, "convert", "--help")[1]


def test_of_several_processes_the_first_has_notes(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        note(f"from {rank}")
    assert capfd.readouterr().err == "quantkit: note: from 0\n"


INT4, INT8 = QuantScheme.parse("int4-g128"), QuantScheme.parse("int8")


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ({"scheme": INT8}, False),
        ({"scheme": INT4}, True),
        ({"scheme": QuantScheme.parse("q6_k")}, True),
        ({"scheme": INT8, "head": "int4-g128"}, True),
        ({"scheme": INT8, "head": "int8", "embedding": "int8"}, False),
        ({"scheme": INT8, "embedding": "q6_k"}, True),
        ({"scheme": Recipe(INT8, (Override("*.0.*", QuantScheme.parse("q5_k")),))}, True),
        ({"scheme": Recipe(INT8, (Override("*.0.*", None),)), "embedding": "int8"}, False),
        ({"scheme": "q4_k_m"}, True),
        ({"scheme": None}, True),
        ({"scheme": INT4, "method": "rtn"}, False),
        ({"scheme": INT8, "method": "gptq"}, True),
    ],
    ids=repr,
)
def test_processes_share_all_that_the_job_may_solve(
    arguments: dict[str, Any], needed: bool
) -> None:
    default: dict[str, Any] = {"method": None, "head": None, "embedding": None}
    assert may_need_gptq(default | arguments) == needed
