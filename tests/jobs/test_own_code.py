"""Folders with code that transformers does not have, which is run if it is trusted, and never
else.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import own_code
import pytest
import torch
import transformers
from command import Capture, run
from transformers import dynamic_module_utils

import quantkit
from quantkit.data.files import DEMO_MODEL, excerpt
from quantkit.errors import CheckpointError, QuantkitError, RequestError, UnsupportedError
from quantkit.jobs.inference.load import load_by_transformers
from quantkit.text.tokenizer import load_tokenizer
from quantkit.via_transformers.packed_loading import loading_problem

Tiny = Callable[[str], Path]
PLAIN = f"transformers {transformers.__version__}"
RUN_BY = f"{PLAIN} with the folder's own code"
TRUST: dict[str, Any] = {"trust_remote_code": True}
MODELING = "modeling_own.py"


@pytest.fixture(scope="module", autouse=True)
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that exists once the code was run; modules go to a temporary cache."""
    file, cache = tmp_path_factory.mktemp("ran") / "ran", tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(own_code.RAN, str(file))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
        patch.setattr(sys, "path", list(sys.path))
        yield file
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def src(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_code.with_code(tiny_model("llama"), tmp_path_factory.mktemp("own") / "src")


@pytest.fixture(scope="module")
def made(src: Path, tmp_path_factory: pytest.TempPathFactory) -> quantkit.QuantizeResult:
    return _quantize(src, tmp_path_factory.mktemp("made") / "dst", **TRUST)


def _quantize(source: Path, dst: Path, **options: Any) -> quantkit.QuantizeResult:
    given: dict[str, Any] = {"samples": 32, "length": 128, "source_check": False, **options}
    return quantkit.quantize(source, dst, "int4-g32", **given)


def _trusted(folder: Path, **options: Any) -> Any:
    """A folder as a user of transformers loads it with its code."""
    with warnings.catch_warnings(action="ignore"):
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **TRUST, **options
        )
    return made.eval()


@pytest.mark.slow
def test_trusted_code_is_solved_and_measured_as_the_same_model_of_transformers(
    src: Path, made: quantkit.QuantizeResult, tmp_path: Path
) -> None:
    same = own_code.same_as_llama(src, tmp_path / "src")
    expected = _quantize(same, tmp_path / "dst", via="transformers")
    found, wanted = (one.manifest["quality"]["texts"] for one in (made, expected))
    for one, other in zip(found, wanted, strict=True):
        assert one["source_perplexity"] == pytest.approx(other["source_perplexity"], rel=1e-4)
        assert one["kl"] == pytest.approx(other["kl"], rel=0.05)
    assert made.schemes == expected.schemes
    assert made.manifest["run_by"] == RUN_BY
    assert made.manifest["linears_by"] == "the modules of the folder's OwnForCausalLM"
    assert any(note.endswith(f"run by {RUN_BY}") for note in made.notes)
    assert not any("not copied" in note or "not run" in note for note in made.notes)


def test_the_result_has_the_code_and_transformers_loads_it(
    src: Path, made: quantkit.QuantizeResult
) -> None:
    for name in own_code.FILES:
        assert (made.path / name).read_bytes() == (src / name).read_bytes()
        assert made.manifest["files"].keys() >= {name}
        assert made.manifest["source"]["sha256"].keys() >= {name}
    assert json.loads((made.path / "config.json").read_text())["auto_map"] == own_code.AUTO_MAP
    settings = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    source, model = _trusted(src), _trusted(made.path, **settings)
    tokens = torch.tensor([load_tokenizer(DEMO_MODEL).encode(excerpt())[:128]])
    p, q = (oracle.logits(one, tokens).log_softmax(-1) for one in (source, model))
    assert 0 < float((p.exp() * (p - q)).sum(-1).mean()) < 0.05


def test_the_card_states_the_code_and_its_commands_run_it(
    made: quantkit.QuantizeResult, tmp_path: Path, capfd: Capture
) -> None:
    card = " ".join((made.path / "README.md").read_text().split())
    assert f"{RUN_BY} ran it for the figures above" in card
    assert card.count('from_pretrained("src-int4-g32", trust_remote_code=True)') == 2
    assert '"Once upon a time" --backend transformers --trust-remote-code' in card
    assert "quantkit eval src-int4-g32 --trust-remote-code" in card
    command = next(
        line
        for line in (made.path / "README.md").read_text().splitlines()
        if "quantkit quantize" in line
    )
    assert "--trust-remote-code" in command
    arguments = [
        "generate",
        made.path,
        "Once upon",
        "--backend",
        "transformers",
        "--max-new-tokens",
        "2",
    ]
    assert run(capfd, *arguments, "--trust-remote-code")[0] == 0
    assert run(capfd, *arguments)[0] == 2
    assert quantkit.inspect(made.path).run_by == RUN_BY


@pytest.mark.slow
def test_verify_and_evaluate_run_it(
    src: Path, made: quantkit.QuantizeResult, capfd: Capture
) -> None:
    alone = quantkit.verify(made.path, **TRUST)
    assert alone.run_by == RUN_BY
    assert alone.texts
    pair = quantkit.verify(src, made.path, **TRUST)
    assert pair.run_by == RUN_BY
    assert 0 < pair.probes["speech"].divergence.kl < 0.1
    found = quantkit.evaluate(made.path, against=src, window=256, **TRUST)
    assert any(RUN_BY in note for note in found.notes)
    code, out, _ = run(capfd, "verify", made.path, "--trust-remote-code")
    assert (code, f"run by {RUN_BY}" in out) == (0, True)
    code, _, err = run(capfd, "eval", made.path, "--window", "256", "--trust-remote-code")
    assert (code, f"run by {RUN_BY}" in err) == (0, True)


@pytest.mark.slow
def test_a_resumed_or_repeated_run_has_the_same_code(
    src: Path, made: quantkit.QuantizeResult, tmp_path: Path
) -> None:
    assert _quantize(src, made.path, if_exists="skip", **TRUST).skipped
    other = oracle.copy(src, tmp_path / "src")
    (other / "scaled_own.py").write_text("FACTOR = 4.0  # again\n")
    with pytest.raises(QuantkitError, match=r"changed .*scaled_own\.py"):
        _quantize(other, made.path, if_exists="skip", **TRUST)


@pytest.mark.slow
def test_cached_logits_are_those_of_the_code(
    src: Path, made: quantkit.QuantizeResult, tmp_path: Path
) -> None:
    other = oracle.copy(src, tmp_path / "src")
    given: dict[str, Any] = {
        "against": other,
        "window": 256,
        "cache_logits": tmp_path / "cache",
        **TRUST,
    }
    before = quantkit.evaluate(made.path, **given)
    (other / "scaled_own.py").write_text("FACTOR = 2.0\n")
    after = quantkit.evaluate(made.path, **given)
    one, two = (found.rows[1].texts for found in (before, after))
    assert all(two[name].divergence.kl > 2 * one[name].divergence.kl for name in one)


def test_the_cache_of_modules_has_no_name_of_a_folder_under_construction(
    made: quantkit.QuantizeResult,
) -> None:
    cache = Path(dynamic_module_utils.HF_MODULES_CACHE) / "transformers_modules"
    assert (cache / "src").is_dir()
    assert not [path for path in cache.iterdir() if "partial" in path.name]
    assert not list(made.path.glob("__pycache__"))


def _untrusted(src: Path, made: Path, out: Path) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("quantize", lambda: _quantize(src, out)),
        ("quantize via", lambda: _quantize(src, out, via="transformers")),
        ("plan", lambda: quantkit.plan.quantize(src, out, "int4-g32")),
        ("evaluate", lambda: quantkit.evaluate(made)),
    ]


def test_code_that_is_not_trusted_is_not_run(
    src: Path, made: quantkit.QuantizeResult, ran: Path, tmp_path: Path, capfd: Capture
) -> None:
    ran.unlink()
    pattern = (
        rf"not run unless you trust it \(found {MODELING}\); read the code, then pass"
        r" `trust_remote_code=True`"
    )
    for name, call in _untrusted(src, made.path, tmp_path / "out"):
        with pytest.raises(RequestError, match=pattern) as caught:
            call()
        assert caught.value.exit_code == 2, name
    code, _, err = run(capfd, "quantize", src, tmp_path / "out", "--scheme", "int8")
    assert (code, "then pass --trust-remote-code" in err) == (2, True)
    with pytest.raises(UnsupportedError, match="architecture is not supported"):
        _quantize(src, tmp_path / "out", via="own")
    assert run(capfd, "doctor", made.path, "--deep")[0] in (0, 12)
    assert quantkit.inspect(src, tensors_only=True).run_by is None
    for report in (quantkit.verify(made.path), quantkit.verify(src, made.path)):
        assert "`trust_remote_code=True`" in (report.not_run or "")
        assert report.ok
    floats = quantkit.convert(made.path, tmp_path / "floats", dequantize=True)
    assert any(MODELING in note for note in floats.notes if "not copied" in note)
    rounded = _quantize(
        src, tmp_path / "rounded", method="rtn", tensors_only=True, samples=None, length=None
    )
    assert any(MODELING in note for note in rounded.notes if "not copied" in note)
    assert not list(rounded.path.glob("*.py"))
    assert not ran.exists()


@pytest.mark.slow
def test_where_transformers_has_a_class_the_code_is_not_run(
    tiny_model: Tiny, ran: Path, tmp_path: Path
) -> None:
    ran.unlink(missing_ok=True)
    source = own_code.with_code(tiny_model("mixtral"), tmp_path / "src", "mixtral")
    plain = _quantize(tiny_model("mixtral"), tmp_path / "plain", via="transformers")
    made = _quantize(source, tmp_path / "dst", via="transformers")
    assert made.manifest["run_by"] == PLAIN
    assert made.manifest["quality"]["texts"] == plain.manifest["quality"]["texts"]
    note = (
        f"its code ({MODELING}) is not run: transformers' own MixtralForCausalLM for 'mixtral' is"
        " used"
    )
    assert f"{source}: {note}" in made.notes
    assert not list(made.path.glob("*.py"))
    assert loading_problem(made.path) is None
    assert f"{source}: {note}" in quantkit.evaluate(source, backend="transformers").notes
    assert not ran.exists()


@pytest.mark.slow
def test_what_has_no_own_decoder_runs_by_default_and_its_code_not(
    tiny_model: Tiny, ran: Path, tmp_path: Path
) -> None:
    ran.unlink(missing_ok=True)
    source = own_code.with_code(tiny_model("gpt_neox"), tmp_path / "src", "gpt_neox")
    assert _quantize(source, tmp_path / "dst").manifest["run_by"] == PLAIN
    assert not ran.exists()


@pytest.mark.slow
def test_the_code_of_a_known_type_is_run_if_it_is_trusted_as_transformers_does(
    tiny_model: Tiny, src: Path, tmp_path: Path
) -> None:
    own = own_code.with_code(tiny_model("llama"), tmp_path / "own", "llama")
    assert type(_trusted(own)).__name__ == "OwnForCausalLM"
    model, _ = load_by_transformers(own, **TRUST)
    assert type(model._lazy.model).__name__ == "OwnForCausalLM"
    model, _ = load_by_transformers(own)
    assert type(model._lazy.model) is type(oracle.load(own))
    with pytest.raises(
        RequestError,
        match=r"quantkit runs this model itself.*modeling_own.py.*`via=\"transformers\"`",
    ):
        _quantize(own, tmp_path / "dst", **TRUST)  # which has a decoder here
    made = _quantize(tiny_model("llama"), tmp_path / "plain", **TRUST)
    assert any(
        "`trust_remote_code=True` has no effect: quantkit runs the model itself" in note
        for note in made.notes
    )


_OTHER = "owner/model--modeling_own.OwnForCausalLM"
DAMAGES: dict[str, tuple[dict[str, str | None], dict[str, str], type[QuantkitError], str]] = {
    # of files and classes; error, message
    "missing file": (
        {MODELING: None},
        {},
        CheckpointError,
        f"{MODELING}: a code file that config.json names is missing",
    ),
    "missing import": (
        {"scaled_own.py": None},
        {},
        CheckpointError,
        r"scaled_own\.py: a code file that another imports is missing",
    ),
    "missing package": (
        {MODELING: "import no_such_package\n"},
        {},
        RequestError,
        r"cannot be imported.*no_such_package",
    ),
    "failing": (
        {MODELING: "raise SystemExit\n"},
        {},
        UnsupportedError,
        "code in the folder fails .SystemExit",
    ),
    "no class": ({MODELING: "pass\n"}, {}, UnsupportedError, "fails .AttributeError"),
    "other repository": (
        {},
        {"AutoModelForCausalLM": _OTHER},
        RequestError,
        "code of another repository",
    ),
    "outside": (
        {},
        {"AutoModelForCausalLM": "../x.Own"},
        CheckpointError,
        "no class in a file of the folder",
    ),
    "absolute": (
        {},
        {"AutoConfig": "/tmp/x.Own"},
        CheckpointError,
        "no class in a file of the folder",
    ),
    "no name": (
        {},
        {"AutoConfig": "configuration_own"},
        CheckpointError,
        "no class in a file of the folder",
    ),
    "no config": (
        {},
        {"AutoConfig": ""},
        UnsupportedError,
        "does not know 'own', and 'auto_map' has no 'AutoConfig'",
    ),
    "no model": (
        {},
        {"AutoModelForCausalLM": ""},
        UnsupportedError,
        "'auto_map' has no 'AutoModelForCausalLM'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_code_that_cannot_be_run_is_an_error_of_its_kind(
    damage: str, src: Path, tmp_path: Path
) -> None:
    files, classes, kind, message = DAMAGES[damage]
    source = oracle.copy(src, tmp_path / damage.replace(" ", "_"))
    named = {name: value for name, value in {**own_code.AUTO_MAP, **classes}.items() if value}
    oracle.edit_json(source / "config.json", auto_map=named)
    for name, text in files.items():
        (source / name).unlink() if text is None else (source / name).write_text(text)
    with pytest.raises(kind, match=message):
        _quantize(source, tmp_path / "dst", **TRUST)
    assert not (tmp_path / "dst").exists()


def test_a_cache_of_modules_that_cannot_be_written_is_named(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "file" / "modules")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(
        RequestError, match=r"cache of modules cannot be written .*; set .* HF_MODULES_CACHE to"
    ):
        _quantize(src, tmp_path / "dst", **TRUST)


REFUSED: list[dict[str, Any]] = [
    {"via": "own"},
    {"tensors_only": True, "method": "rtn", "samples": None, "length": None},
]


@pytest.mark.parametrize("options", REFUSED)
def test_it_goes_with_models_that_transformers_runs(
    options: dict[str, Any], src: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        RequestError, match="`trust_remote_code=True` requires a model that transformers runs"
    ):
        _quantize(src, tmp_path / "dst", **options, **TRUST)
    with pytest.raises(RequestError, match="requires a model that transformers runs"):
        quantkit.evaluate(src, backend="own", **TRUST)


def test_generate_by_another_backend_does_not_take_it(src: Path, capfd: Capture) -> None:
    code, _, err = run(capfd, "generate", src, "Once", "--trust-remote-code")
    assert (code, "--trust-remote-code requires --backend transformers" in err) == (2, True)


def test_without_transformers_it_is_named_first(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "transformers" else find(name, *args),
    )
    with pytest.raises(
        RequestError,
        match=r"transformers must be installed.*pip install 'quantkit\[transformers\]'",
    ):
        _quantize(src, tmp_path / "dst")
