"""`verify` and `inspect`: what they call the same, close, or different."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

import quantkit
from quantkit.errors import CheckpointError, RequestError
from quantkit.files.source import SourceFile
from quantkit.quality.verify import Verdict, verify

CLEAN_UP = "clean_up_tokenization_spaces"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save(oracle.make("llama"), tmp_path_factory.mktemp("models") / "source")


def _changed(source: Path, target: Path, name: str, change: float) -> Path:
    """A copy of a folder with one weight of one tensor moved."""
    oracle.copy(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[3] += change
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_conversion_is_the_same_model(source: Path, tmp_path: Path) -> None:
    quantkit.convert(source, tmp_path / "meta", to="meta", mp=2)
    report = verify(source, tmp_path / "meta")
    assert report.verdict is Verdict.SAME
    assert report.differing == []
    assert all(probe.divergence.largest_logit_difference == 0 for probe in report.probes.values())
    assert "30 of 30" in report.lines()[0]


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym"])
def test_a_quantized_model_is_within_its_bound(scheme: str, source: Path, tmp_path: Path) -> None:
    quantkit.quantize(source, tmp_path / "q", scheme, method="rtn")
    report = verify(source, tmp_path / "q")
    assert report.verdict is Verdict.WITHIN_BOUND
    assert len(report.differing) == 21
    assert all(probe.within and probe.divergence.kl > 0 for probe in report.probes.values())


@pytest.mark.parametrize(
    ("dtype", "verdict"), [("fp32", Verdict.SAME), ("bf16", Verdict.WITHIN_BOUND)]
)
def test_another_float_type_is_judged_by_its_rounding(
    dtype: str, verdict: Verdict, source: Path, tmp_path: Path
) -> None:
    quantkit.convert(source, tmp_path / "out", dtype=dtype)
    assert verify(source, tmp_path / "out").verdict is verdict


@pytest.mark.parametrize("change", [1e-6, 3.0])
def test_one_changed_weight_is_named(change: float, source: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    report = verify(source, _changed(source, tmp_path / "changed", name, change))
    assert report.verdict is Verdict.DIFFERENT
    assert [difference.name for difference in report.differing] == [name]
    assert report.differing[0].largest == pytest.approx(change, rel=0.1)
    assert name in "\n".join(report.lines())


def test_a_nan_is_a_difference(source: Path, tmp_path: Path) -> None:
    broken = _changed(source, tmp_path / "nan", "model.norm.weight", float("nan"))
    assert verify(source, broken).verdict is Verdict.DIFFERENT
    assert verify(broken, broken).verdict is Verdict.DIFFERENT


def test_a_damaged_quantized_layer_is_beyond_the_bound(source: Path, tmp_path: Path) -> None:
    quantkit.quantize(source, tmp_path / "q", "int8")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    packed = tensors["model.layers.0.self_attn.q_proj.weight_packed"]
    tensors["model.layers.0.self_attn.q_proj.weight_packed"] = packed.flip(0)
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    report = verify(source, tmp_path / "q")
    assert report.verdict is Verdict.DIFFERENT
    assert report.differing[0].name == "model.layers.0.self_attn.q_proj.weight"


def test_a_lost_rope_scaling_is_a_difference_though_all_tensors_are_equal(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    model = oracle.make("llama", rope_parameters=rope, max_position_embeddings=128)
    scaled = oracle.save(model, tmp_path / "scaled")
    oracle.copy(scaled, tmp_path / "lost")
    oracle.edit_json(
        tmp_path / "lost" / "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    report = verify(scaled, tmp_path / "lost")
    assert report.verdict is Verdict.DIFFERENT
    assert "rope" in report.problems[0]


def test_a_tied_head_equals_one_stored_apart(tmp_path: Path) -> None:
    tied = oracle.save(oracle.make("llama", tie_word_embeddings=True), tmp_path / "tied")
    apart = oracle.copy(tied, tmp_path / "apart")
    tensors = load_file(apart / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, apart / "model.safetensors", metadata={"format": "pt"})
    oracle.edit_json(apart / "config.json", tie_word_embeddings=False)
    assert verify(tied, apart).verdict is Verdict.SAME


def test_files_are_held_against_the_manifest(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "q", "int8")
    count = len(list((tmp_path / "q").iterdir())) - 1
    assert f" {count} files" in verify(tmp_path / "q").lines()[0]
    with (tmp_path / "q" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with raises(CheckpointError, "sha256", path=tmp_path / "q" / "model.safetensors"):
        verify(tmp_path / "q")
    (tmp_path / "q" / "model.safetensors").unlink()
    with raises(CheckpointError, path=tmp_path / "q" / "model.safetensors") as caught:
        verify(tmp_path / "q")
    assert caught.value.found is None


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_model_card_may_be_edited_and_nothing_else(
    change: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    folder = tmp_path / "q"
    quantkit.quantize(demo_model, folder, "int8")
    report = verify(folder)
    assert (report.is_same, report.ok, report.edited) == (True, True, {})
    if change == "edited":
        (folder / "README.md").write_text("# Mine\n")
    else:
        (folder / "README.md").unlink()
    report = verify(folder)
    assert (report.is_same, report.ok) == (False, True)
    assert report.to_json()["edited"] == {"README.md": change}
    files = len(report.manifest["files"])
    counted, card = report.lines()[:2]
    assert f"{files - 1} of {files} files" in counted
    assert "README.md" in card
    assert change in card
    code, out, _ = run(capfd, "verify", folder)
    assert (code, out.splitlines()) == (0, report.lines())
    listed = {**report.manifest["files"], "LICENSE": SourceFile(folder / "config.json").sha256()}
    oracle.edit_json(folder / "quantkit.json", files=listed)
    with raises(CheckpointError, path=folder / "LICENSE") as caught:
        verify(folder)
    assert caught.value.found is None
    (folder / "LICENSE").write_text("mine")
    with raises(CheckpointError, "sha256", path=folder / "LICENSE"):
        verify(folder)


def test_a_model_that_quantkit_did_not_make_is_reported(source: Path, tmp_path: Path) -> None:
    with raises(CheckpointError, "quantkit.json", path=source):
        verify(source)
    with raises(RequestError, path=tmp_path / "nowhere"):
        verify(tmp_path / "nowhere")


def test_a_report_is_neither_true_nor_false(source: Path, tmp_path: Path) -> None:
    quantkit.convert(source, tmp_path / "same")
    alone, pair = quantkit.verify(tmp_path / "same"), quantkit.verify(source, tmp_path / "same")
    assert (alone.is_same, alone.ok, pair.is_same, pair.ok) == (True, True, True, True)
    for report in (alone, pair):
        with pytest.raises(TypeError):
            bool(report)
        assert json.loads(json.dumps(report.to_json()))["same"] is True
    quantkit.convert(source, tmp_path / "rounded", dtype="bf16")
    rounded = verify(source, tmp_path / "rounded")
    assert (rounded.is_same, rounded.ok) == (False, True)
    broken = verify(source, _changed(source, tmp_path / "broken", "model.norm.weight", 1.0))
    assert (broken.is_same, broken.ok, broken.to_json()["ok"]) == (False, False, False)


def test_models_of_two_configs_are_not_compared_tensor_by_tensor(
    source: Path, tmp_path: Path, capfd: Capture
) -> None:
    other = oracle.save(
        oracle.make("qwen2", num_hidden_layers=2, hidden_size=128), tmp_path / "other"
    )
    code, out, _ = run(capfd, "verify", source, other)
    assert code == 11
    assert "hidden_size 64 against 128\n" in out
    assert "num_layers 3 against 2\n" in out
    assert out.endswith("\nverdict: DIFFERENT\n")
    assert "None" not in out
    assert "bit-equal" not in out


def test_a_script_may_require_equality(source: Path, tmp_path: Path, capfd: Capture) -> None:
    quantkit.convert(source, tmp_path / "rounded", dtype="bf16")
    broken = _changed(source, tmp_path / "broken", "model.norm.weight", 1.0)
    pairs = {10: tmp_path / "rounded", 0: source, 11: broken}
    for code, other in pairs.items():
        assert run(capfd, "verify", source, other, "--strict")[0] == code
        assert run(capfd, "verify", source, other)[0] == {10: 0}.get(code, code)
    code, _, err = run(capfd, "verify", source, "--strict")
    assert code == 2
    assert "--strict" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("generation_config.json", {"do_sample": True, "temperature": 0.7}),
        ("generation_config.json", {"repetition_penalty": 1.2}),
        ("generation_config.json", {"max_new_tokens": 5}),
        ("tokenizer_config.json", {"add_bos_token": False}),
        ("tokenizer_config.json", {"add_eos_token": True}),
        (
            "tokenizer_config.json",
            {f"{CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output": True, CLEAN_UP: True},
        ),
    ],
)
def test_settings_alone_make_two_models_differ(
    file: str, changes: dict[str, object], demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    oracle.edit_json(other / file, **changes)
    report = verify(tmp_path / "a", other)
    assert report.verdict is Verdict.DIFFERENT
    assert (report.problems, report.only_settings_differ, len(report.settings)) == ([], True, 1)
    assert list(changes)[-1] in report.settings[0]
    assert run(capfd, "verify", tmp_path / "a", other)[0] == 11


@pytest.mark.parametrize("top_k", [0, 50])
def test_a_stated_top_k_differs_from_none(top_k: int, demo_model: Path, tmp_path: Path) -> None:
    """Without one, transformers samples from 50 tokens, vLLM from all."""
    quantkit.convert(demo_model, tmp_path / "a")
    oracle.edit_json(tmp_path / "a" / "generation_config.json", do_sample=True)
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    oracle.edit_json(other / "generation_config.json", top_k=top_k)
    assert verify(tmp_path / "a", other).only_settings_differ


def test_settings_that_change_nothing_are_no_difference(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    oracle.edit_json(
        other / "generation_config.json",
        do_sample=False,
        temperature=0.7,
        top_k=50,
        max_length=None,
    )
    oracle.edit_json(other / "tokenizer_config.json", add_bos_token=True, add_eos_token=False)
    report = verify(tmp_path / "a", other)
    assert (report.verdict, report.settings) == (Verdict.SAME, [])


@pytest.mark.parametrize("anyway", [False, True])
def test_cleaning_text_up_counts_where_transformers_does_it(
    anyway: bool, real_shape: Callable[[str], Path], tmp_path: Path
) -> None:
    first = oracle.copy(real_shape("smollm"), tmp_path / "a")
    second = oracle.copy(first, tmp_path / "b")
    oracle.edit_json(first / "tokenizer_config.json", **{CLEAN_UP: False})
    oracle.edit_json(
        second / "tokenizer_config.json",
        **{CLEAN_UP: True, f"{CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output": anyway},
    )
    text = "one . two , three"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (first, second)]
    texts = [tokenizer.decode(tokenizer.encode(text)) for tokenizer in tokenizers]
    differs = texts[0] != texts[1]
    assert differs == anyway
    assert (verify(first, second).verdict is Verdict.DIFFERENT) == differs


def test_defaults_of_transformers_are_no_difference(demo_model: Path, tmp_path: Path) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    other = oracle.copy(tmp_path / "a", tmp_path / "b")
    defaults = GenerationConfig._get_default_generation_params()
    changed = {name: value for name, value in defaults.items() if name != "do_sample"}
    oracle.edit_json(other / "generation_config.json", **changed)
    assert verify(tmp_path / "a", other).settings == []


@pytest.mark.slow
def test_sampling_of_a_gguf_file_is_compared_with_its_source(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "a")
    oracle.edit_json(
        tmp_path / "a" / "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.0,
        suppress_tokens=[9, 7],
    )
    oracle.edit_json(tmp_path / "a" / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    quantkit.convert(tmp_path / "a", tmp_path / "a.gguf")
    assert verify(tmp_path / "a", tmp_path / "a.gguf").verdict is Verdict.SAME
    for change in ({"top_k": 21}, {"top_k": 20, "suppress_tokens": [9]}):
        oracle.edit_json(tmp_path / "a" / "generation_config.json", **change)
        report = verify(tmp_path / "a", tmp_path / "a.gguf")
        assert (report.verdict, report.only_settings_differ) == (Verdict.DIFFERENT, True)


def test_a_folder_taken_for_the_path_of_json_is_reported(source: Path, capfd: Capture) -> None:
    code, _, err = run(capfd, "verify", "--json", source, source)
    assert code == 5
    assert err.startswith(f"quantkit: error: {source}: ")
    assert "--json" in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "params.json",
        "added_tokens.json",
        "vocab.json",
        "chat_template.jinja",
    ],
)
def test_a_file_with_a_say_that_the_manifest_does_not_list_is_refused(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(demo_model, tmp_path / "q", "int8")
    (tmp_path / "q" / "notes.txt").write_text("mine")
    verify(tmp_path / "q")
    (tmp_path / "q" / name).write_bytes(b"{}")
    with raises(CheckpointError, path=tmp_path / "q" / name):
        verify(tmp_path / "q")


def test_a_manifest_that_lists_nothing_is_refused(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "q", "int8")
    oracle.edit_json(tmp_path / "q" / "quantkit.json", files={})
    with raises(CheckpointError, path=tmp_path / "q" / "config.json"):
        verify(tmp_path / "q")


def test_a_manifest_whose_files_have_no_hashes_is_refused(demo_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "q", "int8")
    for digest in (None, 1, {"a": 1}):
        oracle.edit_json(tmp_path / "q" / "quantkit.json", files={"README.md": digest})
        with raises(CheckpointError, path=tmp_path / "q" / "quantkit.json"):
            verify(tmp_path / "q")


def test_inspect_counts_what_is_there(source: Path, tmp_path: Path) -> None:
    model = oracle.load(source)
    quantkit.quantize(source, tmp_path / "q", "int4-g32", method="rtn", keep=["model.layers.0.*"])
    before, after = quantkit.inspect(source), quantkit.inspect(tmp_path / "q")
    assert before.parameters == after.parameters == sum(p.numel() for p in model.parameters())
    assert before.bits_per_weight == 32
    assert before.tensors == {"float32": 30}
    assert after.tensors == {"float32": 16, "int4-g32": 14}
    assert after.weight_bytes < before.weight_bytes
    assert json.loads(json.dumps(after.to_json()))["made_by"] == {
        "quantkit_version": quantkit.__version__,
        "job": "quantize",
        "method": "rtn",
    }
    assert f"  made by: quantkit {quantkit.__version__} (quantize, method rtn)" in after.lines()
    quantkit.convert(source, tmp_path / "c")
    assert (
        f"  made by: quantkit {quantkit.__version__} (convert)"
        in quantkit.inspect(tmp_path / "c").lines()
    )


def test_inspect_says_who_can_load_it(source: Path, tmp_path: Path) -> None:
    quantkit.quantize(source, tmp_path / "sym", "int4-g32", method="rtn")
    quantkit.quantize(source, tmp_path / "asym", "int4-g32-asym", method="rtn")
    assert "transformers" in quantkit.inspect(source).readers
    assert "transformers with compressed-tensors" in quantkit.inspect(tmp_path / "sym").readers
    inspected = quantkit.inspect(tmp_path / "asym")
    assert inspected.readers == ["quantkit", "compressed-tensors' own decompressor", "vLLM"]
    assert inspected.readers_note is not None
    readers = ", ".join(inspected.readers)
    (line,) = [line for line in inspected.lines() if readers in line]
    assert line.endswith(inspected.readers_note)


def test_inspect_reads_headers_only(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.formats.containers.hf_checkpoint import HFCheckpoint

    def forbidden(self: HFCheckpoint, name: str) -> torch.Tensor:
        raise AssertionError(name)

    monkeypatch.setattr(HFCheckpoint, "load", forbidden)
    assert quantkit.inspect(source).layers == 3
