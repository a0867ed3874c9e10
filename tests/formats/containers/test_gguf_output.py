"""Models written as GGUF: files with a manifest, folders, in parts; read back, verified,
resumed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
from command import Capture, run
from error_parts import raises
from partial import interrupted, partial

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.errors import CheckpointError, DestinationError, RequestError, UnsupportedError
from quantkit.files.located import locate_model
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.gguf.output import adapt_model_name
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, as a file."""
    file = tmp_path_factory.mktemp("made") / "demo.gguf"
    quantkit.convert(demo_model, file)
    return file


@pytest.mark.slow
def test_a_file_and_its_manifest(made: Path, demo_model: Path, capfd: Capture) -> None:
    assert sorted(path.name for path in made.parent.iterdir()) == [
        "demo.gguf",
        "demo.gguf.quantkit.json",
    ]
    manifest = json.loads((made.parent / "demo.gguf.quantkit.json").read_text())
    assert list(manifest["files"]) == ["demo.gguf"]
    report = verify(demo_model, made)
    assert report.verdict is Verdict.SAME
    assert run(capfd, "verify", made)[0] == 0
    fields = {key: field.contents() for key, field in gguf.GGUFReader(made).fields.items()}
    assert (fields["general.architecture"], fields["general.name"]) == ("llama", demo_model.name)
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    assert len(fields["tokenizer.ggml.tokens"]) == open_checkpoint(made).config.vocab_size


@pytest.mark.slow
def test_the_way_back_is_the_same_model(made: Path, demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(made, tmp_path / "back", to="hf")
    assert verify(demo_model, tmp_path / "back").verdict is Verdict.SAME
    again = tmp_path / "demo.gguf"
    quantkit.convert(tmp_path / "back", again)
    first, second = (
        {
            tensor.name: (tensor.tensor_type, tensor.data.tobytes())
            for tensor in gguf.GGUFReader(path).tensors
        }
        for path in (made, again)
    )
    assert first == second


def test_a_folder_holds_one_file(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "model", to="gguf", source_check=False)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "model.gguf",
        "quantkit.json",
    ]
    assert verify(tmp_path / "model").is_same
    assert verify(tmp_path / "model" / "model.gguf").is_same
    (tmp_path / "model" / "other.gguf").touch()
    with raises(CheckpointError, path=tmp_path / "model" / "other.gguf"):
        verify(tmp_path / "model")


def test_a_missing_manifest_is_an_error(made: Path, tmp_path: Path) -> None:
    shutil.copy(made, tmp_path / "other.gguf")
    with raises(CheckpointError, "other.gguf.quantkit.json", path=tmp_path / "other.gguf"):
        verify(tmp_path / "other.gguf")
    shutil.copy(made.parent / "demo.gguf.quantkit.json", tmp_path / "other.gguf.quantkit.json")
    (tmp_path / "other.gguf").rename(tmp_path / "demo.gguf")
    (tmp_path / "other.gguf.quantkit.json").rename(tmp_path / "demo.gguf.quantkit.json")
    assert verify(tmp_path).is_same, "a folder that holds a file and its manifest"


def test_a_manifest_does_not_speak_for_another_file(made: Path, tmp_path: Path) -> None:
    """A renamed copy, with the original next to it, or without."""
    original = Path(shutil.copy(made, tmp_path / "demo.gguf"))
    copy = tmp_path / "other.gguf"
    data = bytearray(made.read_bytes())
    data[-1000] ^= 0xFF
    copy.write_bytes(data)
    shutil.copy(made.parent / "demo.gguf.quantkit.json", tmp_path / "other.gguf.quantkit.json")
    for _ in range(2):
        with raises(CheckpointError, found="demo.gguf", expected="other.gguf"):
            verify(copy)
        original.unlink(missing_ok=True)


@pytest.mark.slow
def test_parts_of_a_largest_size(made: Path, demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    quantkit.convert(demo_model, file, split_max_size=600_000, source_check=False)
    parts = sorted(path.name for path in tmp_path.glob("*.gguf"))
    count = len(parts)
    assert count > 2
    assert parts == [f"demo-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    assert max((tmp_path / part).stat().st_size for part in parts) <= 600_000
    assert locate_model(file).name == parts[0]
    for path in (file, tmp_path / parts[1]):
        assert verify(path).is_same
        assert verify(made, path).verdict is Verdict.SAME
    with raises(DestinationError, path=tmp_path / "demo.gguf.quantkit.json"):
        quantkit.convert(demo_model, file, source_check=False)
    (tmp_path / parts[1]).unlink()
    with raises(CheckpointError, path=tmp_path / parts[1]):
        verify(file)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4-g64"])
def test_codes_are_carried(scheme: str, demo_model: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    quantkit.quantize(
        demo_model,
        folder,
        scheme,
        method="rtn",
        keep="*.layers.0.*",
        source_check=False,
        accept_quality_loss=True,
    )
    result = quantkit.convert(folder, file, source_check=False)
    quantkit.convert(file, tmp_path / "back", to="compressed-tensors", source_check=False)
    before, after, back = (open_checkpoint(path) for path in (folder, file, tmp_path / "back"))
    assert result.exact is not None
    assert result.exact.tensors == len(schemes(before)) > 0
    assert schemes(after).keys() == schemes(before).keys() == schemes(back).keys(), (
        "those that were kept are floats"
    )
    assert {*schemes(after).values(), *schemes(back).values()} == {QuantScheme(int(scheme[3]), 32)}
    for module in schemes(before):
        first, second, third = (one.load(f"{module}.weight") for one in (before, after, back))
        assert isinstance(first, QuantTensor)
        assert isinstance(second, QuantTensor)
        assert isinstance(third, QuantTensor)
        assert equal_as_numbers(first, second)
        assert second.codes.equal(third.codes)
        assert second.scale.double().equal(third.scale.double())


@pytest.mark.parametrize("job", ["convert", "gptq"])
def test_an_interrupted_run_goes_on(job: str, demo_model: Path, tmp_path: Path) -> None:
    def make(src: Path, dst: Path, **options: object) -> object:
        if job == "convert":
            return quantkit.convert(src, dst, **options)  # type: ignore[arg-type]
        return quantkit.quantize(
            src,
            dst,
            "int4-g32",
            method="gptq",
            calibration=EXCERPT,
            samples=2,
            length=16,
            accept_quality_loss=True,
            **options,  # type: ignore[arg-type]
        )

    whole, file = tmp_path / "whole.gguf", tmp_path / "file.gguf"
    make(demo_model, whole, source_check=False)
    interrupted(make, demo_model, file)
    assert sorted(path.name for path in tmp_path.glob("file*")) == ["file.gguf.partial"]
    with raises(CheckpointError, path=partial(file)):
        open_checkpoint(partial(file) / "file.gguf")
    make(demo_model, file, source_check=False, resume=True)
    assert file.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("file*")) == [
        "file.gguf",
        "file.gguf.quantkit.json",
    ]


def test_what_it_is_built_with_must_not_change(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.gguf"
    interrupted(quantkit.convert, demo_model, file)
    with pytest.raises(RequestError):
        quantkit.convert(
            demo_model, file, template="none of these", source_check=False, resume=True
        )


@pytest.mark.parametrize(
    ("name", "architecture", "tokens", "expected"),
    [
        (
            "Phi3-mine",
            "llama",
            ["<s>"],
            "Phi 3-mine",
        ),  # llama.cpp would look for tokens that there are not
        ("my-phi-3", "phi3", ["<s>", "</s>"], "my-phi 3"),
        ("Phi-3-mini", "phi3", ["<s>", "</s>", "<unk>", "<|endoftext|>"], "Phi-3-mini"),
        ("mine", "phi3", ["<s>", "</s>", "<unk>", "<|endoftext|>"], "mine (Phi-3)"),
        ("mine", "llama", ["<s>", "</s>", "<unk>", "<|endoftext|>"], "mine"),
    ],
)
def test_llama_cpp_goes_by_the_name_of_a_model(
    name: str, architecture: str, tokens: list[str], expected: str
) -> None:
    assert adapt_model_name(name, architecture, tokens) == expected


def test_a_model_without_a_tokenizer_is_refused(demo_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_model, source, ignore=shutil.ignore_patterns("tokenizer*"))
    with raises(UnsupportedError, path=source):
        quantkit.convert(source, tmp_path / "x.gguf", source_check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
