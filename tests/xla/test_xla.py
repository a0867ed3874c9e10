"""The decoder through XLA, over virtual CPU devices: what it computes, exchanges and refuses."""

from __future__ import annotations

import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
from architecture_cases import CASES
from command import Capture, run, without_progress
from paths import ROOT
from schemes import any_scheme
from virtual_devices import environment, found_by, require_torchax

import quantkit
from quantkit import xla

pytestmark = pytest.mark.xla

PROMPT = "My fellow citizens"
FEATURES = {
    "gemma2-features": 4,
    "gemma3-features": 2,
    "granite-multipliers": 4,
    "glm4": 2,
    "ministral3-window": 4,
    "phi3-partial": 2,
}
"""Cases of `test_architectures`, on so many devices."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one process; by the folder's name."""
    require_torchax()
    home = tmp_path_factory.mktemp("xla")
    small = {"num_hidden_layers": 2, "vocab_size": 99, "eos_token_id": None}
    source = oracle.save(oracle.make("llama", num_key_value_heads=4, **small), home / "float32")
    for scheme in ("int8", "int4-g32", "int4-g16-asym"):
        quantkit.quantize(
            source,
            home / scheme,
            any_scheme(scheme),
            method="rtn",
            keep=["*.layers.1.mlp.up_proj"],
            embedding="int8" if scheme == "int8" else None,
            accept_quality_loss=True,
        )
    tied = oracle.save(oracle.make("qwen2", tie_word_embeddings=True, **small), home / "qwen2")
    quantkit.quantize(
        tied,
        home / "tied-int8",
        "int4-g32",
        method="rtn",
        embedding="int8",
        accept_quality_loss=True,
    )
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    oracle.save(oracle.make("qwen3", **window, **small), home / "qwen3")
    devices = {
        "float32": 8,
        "int8": 8,
        "int4-g32": 8,
        "int4-g16-asym": 8,
        "qwen2": 1,
        "tied-int8": 2,
        "qwen3": 4,
    }
    for case, count in FEATURES.items():
        kind, changes = CASES[case]
        own = {**changes, **small, "num_key_value_heads": 4, "eos_token_id": 98}
        if "layer_types" in own:
            own["layer_types"] = ["sliding_attention", "full_attention"]
        oracle.save(oracle.make(kind, **own), home / case)
        devices[case] = count
    return found_by("xla_cases", devices, home)


NAMES = ["float32", "int8", "int4-g32", "int4-g16-asym", "qwen2", "tied-int8", "qwen3", *FEATURES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_torch(name: str, cases: dict[str, Any]) -> None:
    case = cases[name]
    assert case["spread"] > 0.1
    assert max(case["prompt"], case["chunk"]) < 1e-4
    assert case["tokens"][0] == case["tokens"][1]
    assert case["generated"] == [True] * 3


@pytest.mark.slow
def test_what_pads_a_prompt_is_never_seen(cases: dict[str, Any]) -> None:
    for name in NAMES:
        assert cases[name]["padding"] == [True, True], name


def test_a_step_exchanges_twice_a_layer_and_twice_more(cases: dict[str, Any]) -> None:
    for name in set(NAMES) - {"qwen2"}:
        expected = {"all-reduce": 2 * 2 + 1, "all-gather": 1}
        assert cases[name]["collectives"] == expected, name


@pytest.mark.parametrize(
    ("name", "dtype"), [("int8", "int8"), ("int4-g32", "int4"), ("int4-g16-asym", "int4")]
)
def test_weights_stay_quantized(name: str, dtype: str, cases: dict[str, Any]) -> None:
    dtypes = cases[name]["dtypes"]
    linears = [key.removesuffix(".codes") for key in dtypes if key.endswith(".codes")]
    assert len(linears) == 2 * 7 - 1 + (name == "int8")  # whose embedding is
    assert {dtypes[key + ".codes"] for key in linears} == {dtype}
    assert not [key for key in linears if key + ".weight" in dtypes]
    assert ("zero" in "".join(dtypes)) == ("asym" in name)


def test_a_tied_head_has_the_codes_of_the_embedding(cases: dict[str, Any]) -> None:
    dtypes = cases["tied-int8"]["dtypes"]
    assert dtypes["model.embed_tokens.codes"] == "int8"
    assert not [
        name for name in dtypes if name.startswith("lm_head") or name == "model.embed_tokens.weight"
    ]


def test_memory_is_divided(cases: dict[str, Any]) -> None:
    held = cases["float32"]["bytes"]
    hidden, inner, vocabulary, size, layers = 64, 96, 99, 8, 2
    block = hidden * (2 * 8 * size + 2 * 8 * size) + 3 * hidden * inner  # of KV heads 4 become 8
    matrices = layers * block + 2 * (vocabulary + 5) * hidden
    assert len(set(held)) == 1
    assert held[0] == 4 * (matrices // 8 + (2 * layers + 1) * hidden + size // 2)


def test_the_cache_is_donated_and_its_end_is_guarded(cases: dict[str, Any]) -> None:
    assert cases["float32"]["donated"]
    assert cases["float32"]["full"].startswith(
        "RequestError: the texts exceed the cache (found 33, expected at most 32"
    )
    assert cases["clamped"] == [
        4,
        4,
        2,
        2,
    ]  # what would happen without the guard: not at the fourth, before it


def test_tokens_are_drawn_as_requested(cases: dict[str, Any]) -> None:
    first, again, other, narrow, greedy = cases["sampling"]
    assert first == again != other
    assert narrow == greedy
    assert cases["drawn"] == pytest.approx([0.375, 0, 0.625, 0], abs=0.03)


def test_it_stops_at_the_end_token(cases: dict[str, Any]) -> None:
    tokens, stopped, (end,) = cases["end"]
    assert stopped == tokens[: tokens.index(end)]


def test_products_are_those_of_the_weight_as_defined(cases: dict[str, Any]) -> None:
    assert len(cases["products"]) == 12
    assert max(cases["products"]) < 1e-3


def test_attention_of_many_queries_is_that_of_torch(cases: dict[str, Any]) -> None:
    assert cases["attention"] < 1e-5


def test_buckets_are_few(cases: dict[str, Any]) -> None:
    assert cases["buckets"] == [32, 32, 64, 512, 1024, 1024, 1536]


def test_nan_is_no_token(cases: dict[str, Any]) -> None:
    assert cases["nan"].startswith("NonFiniteError: the model's logits are NaN or Inf")


@pytest.mark.slow
def test_the_command_continues_as_torch_does_and_compiles_once(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    require_torchax()
    command = [
        "generate",
        str(demo_model),
        "--prompt",
        PROMPT,
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "25",
    ]
    code, eager, _ = run(capfd, *command)
    assert code == 0
    sharded = forked.quantkit(*command, "--backend", "xla", "--tp", "4")
    found = []
    for _ in range(2):
        done = subprocess.run(
            sharded, env=environment(4, tmp_path), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, without_progress(done.stderr)) == (0, eager, "")
        found.append({file.name for file in (tmp_path / "xla").glob("*-cache")})
    assert found[0] == found[1]
    assert len([name for name in found[0] if name.startswith(("jit_prefill", "jit_chunk"))]) == 2


@pytest.mark.slow
def test_several_hosts_are_one(demo_model: Path, tmp_path: Path) -> None:
    require_torchax()
    command = forked.quantkit(
        "generate",
        demo_model,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "15",
        "--temperature",
        "0.8",
        "--backend",
        "xla",
        "--multi-host",
    )
    place = {"JAX_COORDINATOR_ADDRESS": f"localhost:{_free_port()}", "JAX_NUM_PROCESSES": "2"}
    hosts = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(2, tmp_path, JAX_PROCESS_ID=str(rank), **place),
        )
        for rank in range(2)
    ]
    (first, errors), (second, _) = [host.communicate(timeout=240) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
    assert PROMPT in first
    text = first[
        first.index(PROMPT) :
    ].strip()  # the library that joins CPUs speaks up on stdout too
    assert PROMPT not in second
    assert text.removeprefix(PROMPT).strip().split("\n")[0] not in second


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("installed", "names"),
    [
        ({}, ["jax", "quantkit[tpu]"]),
        ({"jax": "0.10.2"}, ["torchax"]),
        ({"jax": "0.9.0", "torchax": "0.0.13"}, ["jax", "found 0.9.0, expected 0.10.2"]),
        ({"jax": "0.10.2", "torchax": "0.0.13"}, ["libtpu"]),
    ],
)
def test_a_package_that_is_missing_is_named(
    installed: dict[str, str],
    names: list[str],
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
) -> None:
    monkeypatch.setattr(xla, "_find_version", installed.get)
    commands = [
        ["plan", demo_model, "--target", "v5e-16"],
        ["plan", "generate", "llama-2-7b", "--target", "v5e-16"],
    ]
    if len(installed) < 2 or "0.9.0" in installed.values():
        commands.append(["generate", demo_model, "--prompt", "x", "--backend", "xla"])
    for command in commands:
        code, out, errors = run(capfd, *command)
        assert (code, out) == (2, "")
        assert errors.startswith("quantkit: error: ")
        assert all(name in errors for name in names)
        assert errors.count("\n") == 1


def test_the_extra_brings_the_versions_that_are_requested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["tpu"] == [f"{name}=={version}" for name, version in xla.VERSIONS.items()]


def test_devices_without_xla_are_refused(demo_model: Path, capfd: Capture) -> None:
    code, out, errors = run(capfd, "generate", demo_model, "--prompt", "x", "--tp", "2")
    assert (code, out) == (2, "")
    assert errors.startswith("quantkit: error: --tp ")
    assert "--backend xla" in errors


REFUSED = {"3": "found 3 devices", "8": "found 4 of kind cpu, expected 8", "0": "at least 1"}
IN_TURN = """
import sys
from quantkit.cli.main import main
for given in sys.argv[1:]:
    folder, _, count = given.rpartition(":")
    try:
        main(["generate", folder, "--prompt", "x", "--backend", "xla", "--tp", count])
    except SystemExit as stop:
        print(stop.code)
"""


@pytest.fixture(scope="module")
def refused(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], list[str]]:
    """Exit codes and errors of a model with experts, and of the demo model over each number of
    devices, in one process.
    """
    require_torchax()
    home = tmp_path_factory.mktemp("refused")
    oracle.save(oracle.make("mixtral", num_local_experts=4), home / "model")
    command = forked.command(
        "-c", IN_TURN, f"{home / 'model'}:2", *(f"{demo_model}:{count}" for count in REFUSED)
    )
    done = subprocess.run(
        command, env=environment(4, home), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr.splitlines()


@pytest.mark.slow
def test_a_model_that_xla_does_not_run_is_refused(refused: tuple[list[str], list[str]]) -> None:
    codes, errors = refused
    assert codes[0] == "4"
    assert errors[0].startswith("quantkit: error: mixtral ")
    assert "(found experts)" in errors[0]


def test_devices_that_do_not_serve_are_refused(refused: tuple[list[str], list[str]]) -> None:
    codes, errors = refused
    assert codes[1:] == ["2"] * 3
    for reported, line in zip(errors[1:], REFUSED.values(), strict=True):
        assert reported.startswith("quantkit: error: ")
        assert line in reported
