"""`if_exists="skip"`: an output of an earlier run is accepted if this run would write it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from partial import contents, interrupted, partial

import quantkit
from quantkit.errors import DestinationError, InterruptedRunError, RequestError
from quantkit.jobs.output import machine as machine_module
from quantkit.jobs.quantize import run as quantize_run

GPTQ: dict[str, Any] = {"samples": 4, "length": 64}


@pytest.fixture(scope="module")
def source(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests may copy and change."""
    return Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("source") / "model"))


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantkit.convert(source, tmp_path_factory.mktemp("converted") / "out").path


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantkit.quantize(
        source, tmp_path_factory.mktemp("quantized") / "out", "int4-g64", **GPTQ
    ).path


@pytest.fixture(scope="module")
def in_gguf(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantkit.quantize(source, tmp_path_factory.mktemp("gguf") / "out.gguf", "int8").path


def _copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def test_a_conversion_is_not_repeated(
    source: Path, converted: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst = _copy(converted, tmp_path)
    (dst / "notes.txt").write_text("a file that no reader loads")
    before = contents(dst)
    made = quantkit.convert(source, dst, if_exists="skip")
    assert (made.skipped, made.manifest, made.weight_bytes > 0) == (
        True,
        json.loads(before["quantkit.json"]),
        True,
    )
    code, out, err = run(
        capfd, "convert", source, dst, "--if-exists", "skip", "--json", tmp_path / "found.json"
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"{dst} exists already, from the same inputs and options: ")
    assert json.loads((tmp_path / "found.json").read_text())["skipped"] is True
    assert contents(dst) == before


def test_without_it_an_output_is_refused(source: Path, converted: Path) -> None:
    for given in ({}, {"if_exists": "fail"}, {"resume": True}):
        with pytest.raises(DestinationError, match="exists already; nothing is overwritten"):
            quantkit.convert(source, converted, **given)


@pytest.mark.parametrize("value", ["overwrite", None])
def test_an_unknown_value_is_refused(value: Any, source: Path, tmp_path: Path) -> None:
    for job in (quantkit.convert, quantkit.quantize, quantkit.plan.convert, quantkit.plan.quantize):
        with pytest.raises(RequestError, match="if_exists"):
            job(source, tmp_path / "out", if_exists=value)


@pytest.mark.slow
def test_gptq_is_not_repeated(
    source: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(quantized)
    monkeypatch.setattr(quantize_run, "quantizer_of", None)
    made = quantkit.quantize(
        source, quantized, "int4-g64", **GPTQ, effort="default", if_exists="skip"
    )
    assert made.effort == "default"
    assert (made.skipped, made.manifest) == (True, json.loads(before["quantkit.json"]))
    assert made.quality.to_json() == made.manifest["quality"]
    assert contents(quantized) == before


@pytest.mark.slow
def test_an_option_in_another_spelling_is_the_same(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    dst = quantkit.quantize(source, tmp_path / "out", "int4-g64", **GPTQ, thorough=True).path
    assert quantkit.quantize(
        source, dst, "int4-g64", **GPTQ, effort="thorough", if_exists="skip"
    ).skipped
    assert " --effort thorough --samples 4 --length 64\n" in (dst / "README.md").read_text()
    assert quantkit.convert(source, converted, dtype="bf16", if_exists="skip").skipped


@pytest.mark.slow
def test_schemes_for_a_size_are_not_chosen_again(
    source: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "out"
    first = quantkit.quantize(source, dst, target_bits=5.5, **GPTQ, if_exists="skip")
    monkeypatch.setattr("quantkit.bit_allocation.fit.Fit.choose_allocation", None)
    again = quantkit.quantize(source, dst, target_bits=5.5, **GPTQ, if_exists="skip")
    assert (first.skipped, again.skipped, again.allocation) == (False, True, first.allocation)
    for size, there in (
        ({"target_bits": 6}, dst),
        ({"max_size": 1 << 20}, dst),
        ({"target_bits": 5.5}, quantized),
    ):
        with pytest.raises(DestinationError, match=r"\(found changed bit_allocation\)"):
            quantkit.quantize(source, there, **size, **GPTQ, if_exists="skip")
    with pytest.raises(DestinationError, match="found changed recipe"):
        quantkit.quantize(source, dst, "int4-g64", **GPTQ, if_exists="skip")


def test_what_differs_in_a_conversion_is_named(source: Path, converted: Path) -> None:
    for given, named in (
        ({"dtype": "fp16"}, r"model \(dtype\), options \(dtype\)"),
        ({"to": "meta"}, r"options \(to\)"),
        ({"source_check": False}, "source_check"),
    ):
        with pytest.raises(DestinationError, match=rf"\(found changed {named}\)"):
            quantkit.convert(source, converted, **given, if_exists="skip")
    with pytest.raises(DestinationError, match=r"\(found changed .*job, method, recipe"):
        quantkit.quantize(source, converted, "int8", if_exists="skip")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"scheme": "int4-g32"}, "recipe (default)"),
        ({"seed": 1}, "calibration ("),
        ({"samples": 5}, "calibration ("),
        ({"calibration": ["The people of the United States. " * 99]}, "calibration ("),
        ({"thorough": True}, "effort"),
        ({"license": "mit"}, "file README.md (license, base model, or SRC's name or README)"),
        ({"accept_quality_loss": True}, "quality (accepted)"),
        ({"certify_positions": 64}, "certify_positions"),
        ({"split_max_size": 1 << 20}, "split_max_size"),
        ({"to": "gptq"}, "to"),
        ({"method": "rtn", "samples": None, "length": None}, "method"),
    ],
    ids=str,
)
def test_what_differs_in_a_quantization_is_named(
    given: dict[str, Any], named: str, source: Path, quantized: Path
) -> None:
    with pytest.raises(DestinationError) as caught:
        quantkit.quantize(
            source, quantized, **{"scheme": "int4-g64", **GPTQ, **given}, if_exists="skip"
        )
    assert f"from other inputs or options; nothing is overwritten (found changed {named}" in str(
        caught.value
    )


def test_another_machine_differs(
    source: Path, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "1.0")
    monkeypatch.setattr(machine_module, "kernels_name", lambda _: "other")
    with pytest.raises(
        DestinationError, match=r"found changed computed_by \(column kernels, torch\)"
    ):
        quantkit.quantize(source, quantized, "int4-g64", **GPTQ, if_exists="skip")


@pytest.mark.slow
def test_calibration_text_is_compared_by_its_content(source: Path, tmp_path: Path) -> None:
    text, dst = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("The people of the United States, and of the world. " * 200)
    given: dict[str, Any] = {
        "calibration": text,
        "length": 32,
        "samples": 2,
        "accept_quality_loss": True,
    }
    quantkit.quantize(source, dst, "int4-g64", **given)
    assert quantkit.quantize(source, dst, "int4-g64", **given, if_exists="skip").skipped
    for changed, named in (
        ({"accept_quality_loss": False}, r"quality \(accepted\)"),
        (
            {"calibration": iter([text.read_text()])},
            r"computed_by \(calibration samples\)|calibration \(",
        ),
    ):
        with pytest.raises(DestinationError, match=f"found changed {named}"):
            quantkit.quantize(source, dst, "int4-g64", **{**given, **changed}, if_exists="skip")
    text.write_text(text.read_text().replace("world", "earth"))
    with pytest.raises(DestinationError, match=r"found changed calibration \(sha256\)"):
        quantkit.quantize(source, dst, "int4-g64", **given, if_exists="skip")


def test_a_certificate_is_compared(source: Path, tmp_path: Path) -> None:
    text, dst = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("The people of the United States, and of the world. " * 20)
    given: dict[str, Any] = {"certify_positions": 64, "certify_text": text, "if_exists": "skip"}
    made = [quantkit.quantize(source, dst, "int8", **given) for _ in range(2)]
    assert [one.skipped for one in made] == [False, True]
    assert made[0].positions == made[1].positions
    for changed, named in (
        ({"certify_positions": 32}, r"positions \(asked\)"),
        ({"certify_text": None}, r"positions \(sha256, text\)"),
        ({"certify_positions": None, "certify_text": None}, "certify_positions"),
    ):
        with pytest.raises(DestinationError, match=rf"found changed {named}\)"):
            quantkit.quantize(source, dst, "int8", **{**given, **changed})


@pytest.mark.slow
def test_files_in_gguf_are_compared(source: Path, in_gguf: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert quantkit.quantize(source, in_gguf, "int8", if_exists="skip").skipped
    with pytest.raises(DestinationError, match=r"found changed file out\.gguf"):
        quantkit.quantize(source, in_gguf, "int8", base_model="someone/other", if_exists="skip")
    dst = tmp_path / "parts.gguf"
    given: dict[str, Any] = {
        "split_max_size": 1 << 20,
        "template": str(template),
        "if_exists": "skip",
    }
    made = [quantkit.quantize(source, dst, "int8", **given) for _ in range(2)]
    assert ([one.skipped for one in made], dst.exists()) == ([False, True], False)
    assert made[0].weight_bytes == made[1].weight_bytes
    template.write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(DestinationError, match=r"found changed file parts-00001-of-"):
        quantkit.quantize(source, dst, "int8", **given)
    template.write_text("{{ messages[0]['content'] }}")
    shutil.copy(in_gguf, dst)  # readers would open it; the manifest is that of the parts
    with pytest.raises(DestinationError, match=r"found changed file parts\.gguf"):
        quantkit.quantize(source, dst, "int8", **given)


def test_a_model_known_by_its_tensors_is_compared(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    given: dict[str, Any] = {"tensors_only": True, "source_check": False, "if_exists": "skip"}
    assert [quantkit.quantize(converted, dst, "int8", **given).skipped for _ in range(2)] == [
        False,
        True,
    ]
    with pytest.raises(DestinationError, match="found changed"):
        quantkit.quantize(converted, dst, "int8", source_check=False, if_exists="skip")


def test_a_dequantized_source_is_compared(quantized: Path, tmp_path: Path) -> None:
    dst, given = tmp_path / "out", {"dequantize": True, "if_exists": "skip"}
    for job, more in (quantkit.convert, {}), (quantkit.quantize, {"scheme": "int8"}):
        assert [job(quantized, dst / job.__name__, **given, **more).skipped for _ in range(2)] == [
            False,
            True,
        ]
    with pytest.raises(DestinationError, match=r"found changed options \(to\)"):
        quantkit.convert(quantized, dst / "convert", if_exists="skip")


def test_codes_that_were_carried_are_compared(quantized: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    made = [quantkit.convert(quantized, dst, to="gptq", if_exists="skip") for _ in range(2)]
    assert ([one.skipped for one in made], made[0].exact) == ([False, True], made[1].exact)


CHANGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "another source": (
        lambda source, _: oracle.edit_json(source / "params.json", norm_eps=1e-6),
        "changed source (sha256 (params.json))",
    ),
    "another version": (
        lambda _, dst: oracle.edit_json(dst / "quantkit.json", quantkit_version="0"),
        "changed quantkit_version",
    ),
    "another job": (
        lambda _, dst: oracle.edit_json(dst / "quantkit.json", job="quantize"),
        "changed job",
    ),
    "another option": (
        lambda _, dst: oracle.edit_json(dst / "quantkit.json", new=True),
        "changed new",
    ),
    "no source": (
        lambda _, dst: oracle.edit_json(dst / "quantkit.json", source=None),
        "changed source",
    ),
    "a source that was not checked": (
        lambda _, dst: oracle.edit_json(dst / "quantkit.json", source_check="skipped as requested"),
        "changed source_check",
    ),
    "a new file next to the source": (
        lambda source, _: (source / "LICENSE").write_text("MIT"),
        "changed file LICENSE",
    ),
    "a changed file": (
        lambda _, dst: (dst / "config.json").write_text("{}"),
        "has changed since quantkit wrote it: the file has changed since quantkit wrote it",
    ),
    "a changed weight": (
        lambda _, dst: _flip_last_byte(dst / "model.safetensors"),
        "the file has changed since quantkit wrote it",
    ),
    "a missing file": (
        lambda _, dst: (dst / "tokenizer.json").unlink(),
        "the manifest lists this file, but it is missing",
    ),
    "a template that was added": (
        lambda _, dst: (dst / "chat_template.jinja").write_text("{{ messages }}"),
        "does not list this file",
    ),
    "no manifest": (
        lambda _, dst: (dst / "quantkit.json").unlink(),
        "has changed since quantkit wrote it",
    ),
    "an empty folder": (
        lambda _, dst: [path.unlink() for path in dst.iterdir()],
        "has changed since quantkit wrote it",
    ),
}


def _flip_last_byte(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


@pytest.mark.parametrize("change", CHANGES)
def test_another_output_is_refused(
    change: str, source: Path, converted: Path, tmp_path: Path
) -> None:
    src, dst = _copy(source, tmp_path), _copy(converted, tmp_path)
    edit, named = CHANGES[change]
    edit(src, dst)
    before = contents(dst)
    with pytest.raises(DestinationError) as caught:
        quantkit.convert(src, dst, if_exists="skip")
    assert named in str(caught.value)
    assert contents(dst) == before


def test_a_side_file_that_the_source_no_longer_has_is_noticed(source: Path, tmp_path: Path) -> None:
    src, dst = _copy(source, tmp_path), tmp_path / "out"
    (src / "LICENSE").write_text("MIT")
    quantkit.convert(src, dst)
    (src / "LICENSE").unlink()
    with pytest.raises(DestinationError, match="found changed file LICENSE"):
        quantkit.convert(src, dst, if_exists="skip")


def _quality(dst: Path, **changes: object) -> None:
    quality = json.loads((dst / "quantkit.json").read_text())["quality"]
    quality["texts"][0]["kl"] = 9.0
    oracle.edit_json(dst / "quantkit.json", quality={**quality, **changes})


QUANTIZED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an edited model card": (
        lambda dst: (dst / "README.md").write_text("mine"),
        "changed file README.md",
    ),
    "unknown samples": (
        lambda dst: oracle.edit_json(dst / "quantkit.json", computed_by=None),
        "changed computed_by",
    ),
    "a loss beyond the bound": (lambda dst: _quality(dst), "changed quality (passed)"),
    "a loss that was not accepted": (
        lambda dst: _quality(dst, passed=False),
        "changed quality (passed)",
    ),
    "a loss that was accepted": (
        lambda dst: _quality(dst, passed=False, accepted=True),
        "changed quality (accepted)",
    ),
    "no quality": (
        lambda dst: oracle.edit_json(dst / "quantkit.json", quality=None),
        "does not state",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", QUANTIZED)
def test_another_quantization_is_refused(
    change: str, source: Path, quantized: Path, tmp_path: Path
) -> None:
    dst = _copy(quantized, tmp_path)
    edit, named = QUANTIZED[change]
    edit(dst)
    with pytest.raises(DestinationError) as caught:
        quantkit.quantize(source, dst, "int4-g64", **GPTQ, if_exists="skip")
    assert named in str(caught.value)


def test_an_interrupted_run_is_not_an_output(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    interrupted(quantkit.convert, source, dst)
    with pytest.raises(InterruptedRunError):
        quantkit.convert(source, dst, if_exists="skip")
    again: dict[str, Any] = {"source_check": False, "resume": True, "if_exists": "skip"}
    assert [quantkit.convert(source, dst, **again).skipped for _ in range(2)] == [False, True]
    assert not partial(dst).exists()


def test_an_unfinished_output_next_to_a_finished_one_is_named(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    dst = _copy(converted, tmp_path)
    interrupted(quantkit.convert, source, tmp_path / "other").rename(partial(dst))
    said = (
        f"{partial(dst)}: is unfinished, and {dst} exists already; nothing is overwritten; remove"
    )
    for resume in (False, True):
        with pytest.raises(DestinationError) as caught:
            quantkit.convert(source, dst, resume=resume, if_exists="skip")
        assert said in str(caught.value)


def test_an_output_that_is_being_placed_is_not_finished(
    source: Path, in_gguf: Path, tmp_path: Path
) -> None:
    dst = tmp_path / in_gguf.name
    shutil.copy(f"{in_gguf}.quantkit.json", f"{dst}.quantkit.json")
    partial(dst).mkdir()
    with pytest.raises(InterruptedRunError):
        quantkit.quantize(source, dst, "int8", if_exists="skip")


def test_a_plan_says_that_an_output_would_be_compared(
    source: Path, converted: Path, quantized: Path
) -> None:
    said = "exists already; it would only be compared"
    assert (
        quantkit.plan.convert(source, converted, if_exists="skip").notes[-1]
        == f"{converted}: {said}"
    )
    assert (
        quantkit.plan.quantize(source, quantized, "int8", if_exists="skip").notes[-1]
        == f"{quantized}: {said}"
    )
    with pytest.raises(DestinationError):
        quantkit.plan.convert(source, converted)
