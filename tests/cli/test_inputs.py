"""What users really feed in: damaged, incomplete, ambiguous or foreign folders, through the real
command.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.errors import CheckpointError
from quantkit.files.safetensors_io import open_file
from quantkit.tensors.dtypes import DType
from quantkit.text.tokenizer import load_tokenizer

State = dict[str, Tensor]
Header = dict[str, Any]

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 13477000000\n"
TIKTOKEN_SIZE = 256 + 4 + 256
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def refused(
    capfd: Capture, code: int, src: Path, *words: object, by: tuple[str, ...] = ("convert",)
) -> str:
    """Require that a command refuses `src` in one line with these words, and leaves nothing
    behind; return the line.
    """
    dst = src.parent / "out"
    exit_code, out, err = run(capfd, by[0], src, dst, *by[1:])
    assert exit_code == code, err
    assert err.startswith("quantkit: error: ")
    assert err.count("\n") == 1
    assert out == ""
    for word in words:
        assert str(word) in err
    assert not dst.exists()
    assert not dst.with_name("out.partial").exists()
    return err


def accepted(capfd: Capture, src: Path, *options: str, by: str = "convert") -> tuple[Path, str]:
    """The folder that a command makes of `src`, and its notes."""
    dst = src.parent / "out"
    code, out, err = run(capfd, by, src, dst, *options)
    assert code == 0, err
    assert out.startswith(f"wrote {dst}: ")
    assert out.count("\n") == 1
    return dst, err


def weights_of(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, change: Callable[[State], Any]) -> None:
    """Change the tensors of a folder's only safetensors file."""
    state = weights_of(folder)
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def tamper(
    path: Path, change: Callable[[Header], Any], data: Callable[[bytes], bytes] = bytes
) -> None:
    """Change the header and the data of a safetensors file past what its library would write."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data(raw[8 + length :]))


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Query or key rows in Meta's order, the inverse of what transformers' converter does."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def meta_state(model: Any) -> State:
    """A transformers Llama in Meta's names and layout."""
    config, weights = model.config, model.state_dict()
    state = {
        "tok_embeddings.weight": weights[EMBEDDING],
        "norm.weight": weights["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, other, heads in (
            ("attention.wq", "self_attn.q_proj", config.num_attention_heads),
            ("attention.wk", "self_attn.k_proj", config.num_key_value_heads),
        ):
            state[f"{ours}{name}.weight"] = interleaved(weights[f"{theirs}{other}.weight"], heads)
        for name, other in (
            ("attention.wv", "self_attn.v_proj"),
            ("attention.wo", "self_attn.o_proj"),
            ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("feed_forward.w3", "mlp.up_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            state[f"{ours}{name}.weight"] = weights[f"{theirs}{other}.weight"]
    state["output.weight"] = weights[HEAD]
    return state


def save_meta(
    model: Any,
    folder: Path,
    shards: int = 1,
    embedding_axis: int = 1,
    change: Callable[[State], Any] = lambda shard: None,
    **params: Any,
) -> Path:
    """Write a Meta folder with `torch.save`, with no tokenizer; `change` works on each shard."""
    folder.mkdir()
    for rank in range(shards):
        shard: State = {}
        for name, tensor in meta_state(model).items():
            if "norm" in name:
                shard[name] = tensor.clone()
                continue
            axis = 1 if re.search("wo|w2", name) else embedding_axis if "tok_emb" in name else 0
            shard[name] = tensor.chunk(shards, axis)[rank].clone()
        change(shard)
        torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
    config = model.config
    known = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
    }
    (folder / "params.json").write_text(json.dumps({**known, **params}))
    return folder


def save_tiktoken(folder: Path) -> None:
    """A Llama 3 tokenizer of `TIKTOKEN_SIZE` tokens under the name it is shipped with."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"he", b"the", b" the"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))


def edit_shards(folder: Path, change: Callable[[State], Any]) -> None:
    """Change the tensors of every Meta shard."""
    for path in sorted(folder.glob("*.pth")):
        shard = torch.load(path, weights_only=True)
        change(shard)
        torch.save(shard, path)


@pytest.fixture(scope="module")
def model() -> Any:
    return oracle.make("llama")


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as one safetensors file, in shards with an index, and as one ``.bin``."""
    root = tmp_path_factory.mktemp("saved")
    oracle.save(model, root / "safetensors")
    oracle.save(model, root / "sharded", max_shard_size="150KB")
    oracle.copy(root / "safetensors", root / "bin")
    (root / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), root / "bin" / "pytorch_model.bin")
    return root


@pytest.fixture
def hf(saved: Path, tmp_path: Path) -> Path:
    return oracle.copy(saved / "safetensors", tmp_path / "hf")


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return oracle.copy(saved / "sharded", tmp_path / "sharded")


@pytest.fixture
def pickled(saved: Path, tmp_path: Path) -> Path:
    return oracle.copy(saved / "bin", tmp_path / "bin")


@pytest.fixture
def meta(demo_model: Path, tmp_path: Path) -> Path:
    return oracle.copy(demo_model, tmp_path / "meta")


# Files that are not weights


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LFS, (f"found {len(LFS)} bytes", "git lfs pull")),
        (b"\n<!DOCTYPE html><html><head><title>403</title>", ("HTML",)),
        (b"<HTML>\n<body>not found", ("HTML",)),
        (
            b'{"error":"Access to this model is restricted"}',
            ("server",),
        ),
        (b"Invalid username or password.", ("server",)),
        (b"", ("found 0 bytes",)),
    ],
    ids=["lfs", "html", "html-upper", "json", "text", "empty"],
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "consolidated.01.pth"])
def test_a_stand_in_for_weights_is_named(
    content: bytes,
    words: tuple[str, ...],
    file: str,
    hf: Path,
    pickled: Path,
    meta: Path,
    capfd: Capture,
) -> None:
    src = {"model.safetensors": hf, "pytorch_model.bin": pickled, "consolidated.01.pth": meta}[file]
    (src / file).write_bytes(content)
    refused(capfd, 3, src, src / file, *words)


def test_a_stand_in_for_the_tokenizer_is_named(meta: Path, capfd: Capture) -> None:
    (meta / "tokenizer.model").write_bytes(LFS)
    refused(capfd, 3, meta, meta / "tokenizer.model")


def test_a_folder_without_weights_says_what_it_looked_for(hf: Path, capfd: Capture) -> None:
    (hf / "model.safetensors").unlink()
    refused(
        capfd, 3, hf, f"{hf}: has no weights", "expected consolidated.00.pth, model.safetensors"
    )


def test_a_source_that_does_not_exist_is_named(tmp_path: Path, capfd: Capture) -> None:
    refused(capfd, 2, tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: does not exist")


NAMING = [
    "inspect WRONG",
    "doctor WRONG",
    "doctor SRC --against WRONG",
    "verify WRONG",
    "verify SRC WRONG",
    "eval WRONG",
    "bench WRONG",
    "chat WRONG",
    "generate WRONG text",
    "generate SRC text --draft WRONG",
    "convert WRONG DST",
    "quantize WRONG DST --scheme int8",
    "plan convert WRONG DST",
    "plan quantize WRONG DST --scheme int8",
    "plan generate WRONG --target v5e-1",
    "push WRONG me/model",
]


def test_a_similar_name_next_to_a_model_that_does_not_exist_is_named(
    hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    for command in NAMING:
        wrong = hf.with_name(hf.name + "x")
        places = {"SRC": hf, "WRONG": wrong, "DST": tmp_path / "new"}
        code, out, err = run(capfd, *(places.get(word, word) for word in command.split()))
        assert (code, out, err.count("\n")) == (2, "", 1), command
        assert err.startswith(f"quantkit: error: {wrong}: "), command
        assert f" {hf}?" in err, command


EMPTY = ["inspect", "verify", "chat", "generate", "convert", "quantize", "plan generate", "push"]


@pytest.mark.parametrize("command", EMPTY)
def test_an_empty_path_is_not_the_current_folder(
    command: str, hf: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hf)
    arguments = {
        "generate": ["text"],
        "convert": [tmp_path / "new"],
        "quantize": [tmp_path / "new", "--scheme", "int8"],
        "plan generate": ["--target", "v5e-1"],
    }
    code, out, err = run(capfd, *command.split(), "", *arguments.get(command, []))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith(" (expected a path)\n")


def test_an_unfinished_model_of_the_name_is_named_first(
    hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    wrong = hf.with_name(hf.name + "x")
    hf.with_name(f"{wrong.name}.partial").mkdir()
    code, out, err = run(capfd, "inspect", wrong)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"quantkit: error: {wrong}: ")
    assert f"{wrong}.partial" in err
    assert "--resume" in err


@pytest.mark.parametrize(
    "command", ["convert SRC DST", "quantize SRC DST --scheme int8", "chat SRC"]
)
def test_a_template_that_does_not_exist_is_an_invalid_request(
    command: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    places = {"SRC": demo_model, "DST": tmp_path / "new"}
    arguments = [places.get(word, word) for word in command.split()]
    code, out, err = run(capfd, *arguments, "--template", tmp_path / "nope.jinja")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"quantkit: error: {tmp_path / 'nope.jinja'}: ")


def test_a_weight_file_in_place_of_its_folder_is_refused(hf: Path, capfd: Capture) -> None:
    refused(capfd, 3, hf / "model.safetensors", "expected the folder")


def test_the_meta_folder_inside_a_download_is_pointed_at(
    meta: Path, tmp_path: Path, capfd: Capture
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    meta.rename(outer / "original")
    refused(capfd, 3, outer, outer / "original")


# Damaged safetensors


def _overlap(header: Header) -> None:
    names = sorted(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )
    begin, end = header[names[1]]["data_offsets"]
    header[names[1]]["data_offsets"] = [begin - 64, end - 64]


def _hole(header: Header) -> None:
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] > 0:
            entry["data_offsets"] = [offset + 64 for offset in entry["data_offsets"]]


@pytest.mark.parametrize(
    ("change", "data", "words"),
    [
        (_overlap, bytes, ("overlap",)),
        (_hole, lambda d: d + bytes(64), ("gap",)),
        (lambda h: None, lambda d: d + bytes(10), ("last tensor",)),
        (
            lambda h: h[QUERY].update(dtype="Q4"),
            bytes,
            (QUERY, "found Q4"),
        ),
        (
            lambda h: h[QUERY].update(shape=[64, 63]),
            bytes,
            (QUERY, "expected 16128"),
        ),
        (lambda h: h[QUERY].pop("shape"), bytes, ("shape",)),
        (lambda h: h.update({QUERY: 7}), bytes, ()),
        (lambda h: h.update(__metadata__={"epoch": 3}), bytes, ("model.safetensors", "header")),
    ],
    ids=["overlap", "hole", "trailing", "dtype", "size", "no-shape", "no-entry", "metadata"],
)
def test_a_safetensors_header_that_lies_is_refused(
    change: Callable[[Header], Any],
    data: Callable[[bytes], bytes],
    words: tuple[str, ...],
    hf: Path,
    capfd: Capture,
) -> None:
    path = hf / "model.safetensors"
    tamper(path, change, data)
    refused(capfd, 3, hf, path, *words)


def test_a_truncated_safetensors_file_reports_expected_and_found_bytes(
    hf: Path, capfd: Capture
) -> None:
    path = hf / "model.safetensors"
    raw = path.read_bytes()
    data = len(raw) - 8 - struct.unpack("<Q", raw[:8])[0]
    path.write_bytes(raw[:-1000])
    refused(capfd, 3, hf, path, f"found {data - 1000} bytes", f"expected {data}")


@pytest.mark.parametrize("kept", [4, 200], ids=["in-the-length", "in-the-header"])
def test_a_safetensors_file_cut_in_its_header_is_refused(
    kept: int, hf: Path, capfd: Capture
) -> None:
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(capfd, 3, hf, path, f"in a file of {kept}")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param(b"not JSON", id="text"),
        pytest.param(b"[1, 2]", id="list"),
    ],
)
def test_a_safetensors_header_that_is_no_object_is_refused(
    content: bytes, hf: Path, capfd: Capture
) -> None:
    path = hf / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    refused(capfd, 3, hf, path)


@pytest.mark.parametrize(
    "length", [0, 1 << 63, 200 << 20], ids=["zero", "beyond-the-file", "beyond-the-limit"]
)
def test_an_absurd_header_length_is_refused_before_memory_is_taken(
    length: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{")
    os.truncate(path, 300 << 20)  # sparse
    tracemalloc.start()
    try:
        with raises(CheckpointError, str(length), str(300 << 20), path=path):
            open_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_tensor_that_claims_terabytes_is_refused(hf: Path, capfd: Capture) -> None:
    path = hf / "model.safetensors"
    header = {QUERY: {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(capfd, 3, hf, path, f"expected {1 << 42}")


def test_a_truncated_model_of_our_own_cannot_be_downloaded_again(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    run(capfd, "convert", demo_model, tmp_path / "made")
    path = tmp_path / "made" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    line = refused(
        capfd,
        3,
        tmp_path / "made",
        path,
    )
    assert "download" not in line
    (tmp_path / "made" / "quantkit.json").unlink()
    refused(capfd, 3, tmp_path / "made", path, "download")


# Damaged and hostile pickles


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_pth_reports_expected_and_found_bytes(
    share: float, meta: Path, capfd: Capture
) -> None:
    path = meta / "consolidated.01.pth"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(share * len(raw))])
    line = refused(
        capfd,
        3,
        meta,
        path,
        f"found {int(share * len(raw))} bytes",
    )
    expected = re.search(r"expected at least (\d+) bytes", line)
    assert expected is not None
    assert int(share * len(raw)) < int(expected[1]) <= len(raw)


def test_the_bytes_expected_of_a_truncated_pth_hold_all_its_tensors(
    pickled: Path, capfd: Capture
) -> None:
    path = pickled / "pytorch_model.bin"
    tensors = sum(t.nbytes for t in torch.load(path, weights_only=True).values())
    path.write_bytes(path.read_bytes()[:100_000])
    line = refused(capfd, 3, pickled, path, "found 100000 bytes")
    expected = re.search(r"expected at least (\d+) bytes", line)
    assert expected is not None
    assert int(expected[1]) > tensors


def test_a_legacy_pickle_is_still_read(model: Any, tmp_path: Path, capfd: Capture) -> None:
    src = save_meta(model, tmp_path / "meta")
    path = src / "consolidated.00.pth"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert not path.read_bytes().startswith(b"PK")
    dst, _ = accepted(capfd, src)
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


def test_a_truncated_legacy_pickle_is_refused(model: Any, tmp_path: Path, capfd: Capture) -> None:
    src = save_meta(model, tmp_path / "meta")
    path = src / "consolidated.00.pth"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-1000])
    refused(capfd, 3, src, path)


class _Bomb:
    """Creates a folder when it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
@pytest.mark.parametrize("layout", ["meta", "bin"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    kind: str, layout: str, meta: Path, pickled: Path, tmp_path: Path, capfd: Capture
) -> None:
    src, name = (
        (meta, "consolidated.00.pth") if layout == "meta" else (pickled, "pytorch_model.bin")
    )
    mark, path = tmp_path / "ran", src / name
    value = {"tok_embeddings.weight": torch.zeros(2), "bomb": _Bomb(mark)}
    if kind == "plain":
        path.write_bytes(pickle.dumps({"bomb": _Bomb(mark)}, protocol=2))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    refused(capfd, 3, src, path, "mkdir", "safetensors")
    assert not mark.exists()
    if kind == "plain":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.zeros(2)], ("found list",)),
        ({}, ()),
        (
            {"epoch": 3, "norm.weight": torch.zeros(2)},
            ("entry 'epoch' is not a tensor", "found int"),
        ),
        ({0: torch.zeros(2)}, ("entry 0 is not a tensor",)),
    ],
    ids=["list", "empty", "number", "key"],
)
def test_a_pth_that_is_no_dictionary_of_tensors_is_refused(
    value: object, words: tuple[str, ...], meta: Path, capfd: Capture
) -> None:
    torch.save(value, meta / "consolidated.00.pth")
    refused(capfd, 3, meta, meta / "consolidated.00.pth", *words)


# Missing, stray and foreign files


@pytest.mark.parametrize("missing", [0, 1])
def test_a_gap_in_metas_numbering_names_the_shard(missing: int, meta: Path, capfd: Capture) -> None:
    shutil.copy(meta / "consolidated.01.pth", meta / "consolidated.02.pth")
    (meta / f"consolidated.{missing:02d}.pth").unlink()
    refused(capfd, 3, meta, meta / f"consolidated.{missing:02d}.pth", "found 2 shards")


def test_a_missing_last_meta_shard_is_distinguished_from_the_shapes(
    meta: Path, capfd: Capture
) -> None:
    (meta / "consolidated.01.pth").unlink()
    refused(capfd, 3, meta, "found 1 consolidated.*.pth", "expected 2")


@pytest.mark.parametrize(
    "vocab_size",
    [-1, 96],
)
def test_a_missing_last_shard_of_llama_3_is_distinguished_from_the_shapes(
    vocab_size: int, model: Any, tmp_path: Path, capfd: Capture
) -> None:
    src = save_meta(model, tmp_path / "meta", 2, embedding_axis=0, vocab_size=vocab_size)
    (src / "consolidated.01.pth").unlink()
    refused(capfd, 3, src, "found 1 consolidated.*.pth", "expected 2")


def test_a_stray_third_meta_shard_is_distinguished_from_the_shapes(
    meta: Path, capfd: Capture
) -> None:
    shutil.copy(meta / "consolidated.01.pth", meta / "consolidated.02.pth")
    refused(capfd, 3, meta, "found 3 consolidated.*.pth", "expected 2")


def test_a_missing_shard_of_an_index_is_named(sharded: Path, capfd: Capture) -> None:
    shard = sorted(sharded.glob("model-*"))[1]
    shard.unlink()
    refused(capfd, 3, sharded, shard)


def test_a_missing_part_without_an_index_is_named(sharded: Path, capfd: Capture) -> None:
    parts = sorted(sharded.glob("model-*"))
    (sharded / "model.safetensors.index.json").unlink()
    parts[-1].unlink()
    refused(
        capfd,
        3,
        sharded,
        parts[-1],
        f"found {len(parts) - 1} of {len(parts)}",
    )


def test_all_parts_without_an_index_are_read(sharded: Path, model: Any, capfd: Capture) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    dst, _ = accepted(capfd, sharded)
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


def test_a_stray_part_without_an_index_makes_the_set_ambiguous(
    sharded: Path, capfd: Capture
) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(min(sharded.glob("model-*")), sharded / "model-00001-of-00009.safetensors")
    refused(capfd, 3, sharded, "model-00001-of-00009.safetensors")


def test_an_index_that_names_a_tensor_its_shard_lacks_is_stale(
    sharded: Path, capfd: Capture
) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = weight_map[QUERY]
    oracle.edit_json(index, weight_map={**weight_map, "model.layers.9.norm.weight": shard})
    refused(capfd, 3, sharded, sharded / shard, "'model.layers.9.norm.weight'")


def test_an_index_that_lacks_a_tensor_of_its_shard_is_stale(sharded: Path, capfd: Capture) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = weight_map.pop(QUERY)
    oracle.edit_json(index, weight_map=weight_map)
    refused(capfd, 3, sharded, index, QUERY, shard)


def test_an_index_that_sends_a_tensor_to_another_shard_is_stale(
    sharded: Path, capfd: Capture
) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    wrong = next(file for file in weight_map.values() if file != weight_map[QUERY])
    oracle.edit_json(index, weight_map={**weight_map, QUERY: wrong})
    refused(capfd, 3, sharded, QUERY)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_in_float64_are_read_as_by_transformers(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """numpy and merge tools write float64; phi3's projections are split, and experts are
    stacked.
    """
    base = oracle.save(oracle.make(kind).to(dtype), tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    doubles = {name: value.double() * (1 + 1e-9) for name, value in stored.items()}
    save_file(doubles, base / "model.safetensors", metadata={"format": "pt"})
    converted = quantkit.convert(base, tmp_path / "made", source_check=False)
    expected = oracle.load(base, dtype).state_dict()
    state = oracle.load(converted.path, dtype).state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].equal(value), name
    assert any("float64" in note for note in converted.notes)
    assert not quantkit.diagnose(base).is_broken


def _copy_to_another_shard(sharded: Path, change: float) -> Path:
    """Add a tensor to the last shard that the index puts into another one."""
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    other = sharded / max(file for file in weight_map.values() if file != weight_map[QUERY])
    value = load_file(sharded / weight_map[QUERY])[QUERY]
    save_file({**load_file(other), QUERY: value + change}, other, metadata={"format": "pt"})
    return other


def _load_all(folder: Path) -> State:
    tensors: State = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_equal_copies_of_a_tensor_in_two_shards_are_a_note(sharded: Path, tmp_path: Path) -> None:
    expected = quantkit.convert(sharded, tmp_path / "expected", source_check=False)
    other = _copy_to_another_shard(sharded, 0.0)
    converted = quantkit.convert(sharded, tmp_path / "made", source_check=False)
    assert any(other.name in note and QUERY in note for note in converted.notes)
    expected_tensors = _load_all(expected.path)
    tensors = _load_all(converted.path)
    assert tensors.keys() == expected_tensors.keys()
    for name, value in expected_tensors.items():
        assert tensors[name].equal(value), name


def test_copies_that_differ_are_refused(sharded: Path, capfd: Capture) -> None:
    """transformers takes that of the last file, and readers that follow the index the other one."""
    other = _copy_to_another_shard(sharded, 1.0)
    refused(capfd, 3, sharded, other, QUERY)


def test_a_link_to_itself_is_named(tmp_path: Path, capfd: Capture) -> None:
    link = tmp_path / "loop"
    link.symlink_to("loop")
    code, _, err = run(capfd, "inspect", link)
    assert (code, "did you mean" in err) == (2, False)
    assert err.startswith(f"quantkit: error: {link}: ")


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/hostname", "a/b.safetensors", "..", "", 7]
)
def test_a_weight_map_that_leaves_the_folder_is_refused(
    file: object, sharded: Path, capfd: Capture
) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shutil.copy(sharded / weight_map[QUERY], sharded.parent / "secret.safetensors")
    oracle.edit_json(index, weight_map={**weight_map, QUERY: file})
    refused(capfd, 3, sharded, index, QUERY, repr(file))


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_weight_map_is_refused(
    content: str, sharded: Path, capfd: Capture
) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(content)
    refused(capfd, 3, sharded, index, "'weight_map'")


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.attention_norm.weight"])
def test_meta_shards_of_different_models_are_reported_by_their_norms(
    name: str, meta: Path, capfd: Capture
) -> None:
    path = meta / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    shard[name][0] += 1
    torch.save(shard, path)
    refused(capfd, 3, meta, f"'{name}'")


def test_meta_shards_with_different_tensors_are_refused(meta: Path, capfd: Capture) -> None:
    path = meta / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    del shard["layers.3.attention.wq.weight"]
    torch.save(shard, path)
    refused(capfd, 3, meta, path, "layers.3.attention.wq.weight")


def test_meta_shards_with_different_shapes_are_refused(meta: Path, capfd: Capture) -> None:
    path = meta / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    shard["layers.1.feed_forward.w1.weight"] = shard["layers.1.feed_forward.w1.weight"][:-1].clone()
    torch.save(shard, path)
    refused(
        capfd,
        3,
        meta,
        path,
        "'layers.1.feed_forward.w1.weight'",
    )


def test_a_tensor_missing_from_a_single_file_is_named(hf: Path, capfd: Capture) -> None:
    rewrite(hf, lambda state: state.pop(QUERY))
    refused(capfd, 3, hf, QUERY, "found 29 of 30 tensors")


def test_a_tensor_of_the_wrong_shape_is_named(hf: Path, capfd: Capture) -> None:
    rewrite(hf, lambda state: state.update({QUERY: torch.zeros(64, 32)}))
    refused(capfd, 3, hf, QUERY, "found [64, 32]", "expected [64, 64]")


# Two sets of weights


@pytest.fixture
def both(hf: Path, model: Any, tmp_path: Path) -> Path:
    """Meta weights, twice as large as they are in the Hugging Face set beside them."""
    meta = save_meta(model, tmp_path / "other")
    edit_shards(meta, lambda shard: shard.update({"output.weight": 2 * shard["output.weight"]}))
    for name in ("consolidated.00.pth", "params.json"):
        shutil.copy(meta / name, hf / name)
    return hf


def test_two_sets_without_an_index_are_ambiguous_and_the_flag_is_named(
    both: Path, capfd: Capture
) -> None:
    line = refused(capfd, 3, both, "consolidated.*.pth", "safetensors")
    assert "--weights meta" in line
    assert "--weights safetensors" in line


@pytest.mark.parametrize(("kind", "factor"), [("meta", 2), ("safetensors", 1)])
def test_the_flag_picks_between_two_sets(
    kind: str, factor: int, both: Path, model: Any, capfd: Capture
) -> None:
    dst, _ = accepted(capfd, both, "--weights", kind)
    assert torch.equal(weights_of(dst)[HEAD], factor * model.state_dict()[HEAD])


def test_an_index_decides_between_two_sets(
    both: Path, sharded: Path, model: Any, capfd: Capture
) -> None:
    for name in ("consolidated.00.pth", "params.json"):
        shutil.copy(both / name, sharded / name)
    dst, notes = accepted(capfd, sharded)
    assert "consolidated.*.pth" in notes
    assert torch.equal(weights_of(dst)[HEAD], model.state_dict()[HEAD])


def test_safetensors_win_over_an_indexed_bin_as_in_transformers(
    hf: Path, pickled: Path, model: Any, capfd: Capture
) -> None:
    state = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    name = "pytorch_model-00001-of-00001.bin"
    torch.save({**state, HEAD: 2 * state[HEAD]}, hf / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, name)}
    (hf / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    dst, notes = accepted(capfd, hf)
    assert "pytorch_model*.bin" in notes
    assert torch.equal(weights_of(dst)[HEAD], oracle.load(hf).state_dict()[HEAD])


def test_safetensors_win_over_bin_and_say_so(
    hf: Path, pickled: Path, model: Any, capfd: Capture
) -> None:
    state = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    torch.save({**state, HEAD: 2 * state[HEAD]}, hf / "pytorch_model.bin")
    dst, notes = accepted(capfd, hf)
    assert "pytorch_model*.bin" in notes
    assert torch.equal(weights_of(dst)[HEAD], model.state_dict()[HEAD])
    shutil.rmtree(dst)
    dst, _ = accepted(capfd, hf, "--weights", "bin")
    assert torch.equal(weights_of(dst)[HEAD], 2 * model.state_dict()[HEAD])


def test_a_stray_file_next_to_an_index_is_ignored_and_named(
    sharded: Path, model: Any, capfd: Capture
) -> None:
    (sharded / "model.safetensors").write_bytes(b"an interrupted download")
    dst, notes = accepted(capfd, sharded)
    assert "model.safetensors" in notes
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_single_file_next_to_an_index_must_hold_the_same_weights(
    kind: str, hf: Path, sharded: Path, pickled: Path, model: Any, capfd: Capture
) -> None:
    """transformers loads the single file, other readers what the index lists."""
    if kind == "safetensors":
        folder, single, state = (
            sharded,
            sharded / "model.safetensors",
            load_file(hf / "model.safetensors"),
        )
    else:
        folder, single = pickled, pickled / "pytorch_model.bin"
        state = torch.load(single, weights_only=True)
        shard = "pytorch_model-00001-of-00001.bin"
        torch.save(state, folder / shard)
        index = {"metadata": {}, "weight_map": dict.fromkeys(state, shard)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    def save_single(scale: float) -> None:
        changed = {**state, HEAD: scale * state[HEAD]}
        if kind == "safetensors":
            save_file(changed, single, metadata={"format": "pt"})
        else:
            torch.save(changed, single)

    save_single(2.0)
    assert torch.equal(oracle.load(folder).state_dict()[HEAD], 2 * model.state_dict()[HEAD])
    refused(capfd, 3, folder, single.name, HEAD, "transformers")
    save_single(1.0)
    dst, notes = accepted(capfd, folder)
    assert single.name in notes
    assert torch.equal(weights_of(dst)[HEAD], model.state_dict()[HEAD])


# Config files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ()),
        ('{"dim": 128,', ()),
        ("[]", ("found list",)),
        (
            '{"hidden_size": 128, "model_type": "llama"}',
            ("params.json", "'dim'"),
        ),
        ('{"dim": 128, "n_layers": 4, "norm_eps": 1e-05}', ("'n_heads'",)),
        ('{"dim": 128, "n_layers": 4, "n_heads": 4}', ("'norm_eps'",)),
        (
            '{"dim": 256, "n_layers": 4, "n_heads": 4, "norm_eps": 1e-5}',
            ("found 256", "expected 128"),
        ),
        (
            '{"dim": 128, "n_layers": "four", "n_heads": 4, "norm_eps": 1e-5}',
            ("four",),
        ),
        (
            '{"dim": 128, "n_layers": 4, "n_heads": 0, "norm_eps": 1e-5}',
            ("'n_heads'", "found 0"),
        ),
    ],
    ids=["empty", "invalid", "list", "renamed", "no-heads", "no-eps", "dim", "type", "zero"],
)
def test_a_bad_params_json_is_named(
    content: str, words: tuple[str, ...], meta: Path, capfd: Capture
) -> None:
    (meta / "params.json").write_text(content)
    refused(capfd, 3, meta, meta / "params.json", *words)


def test_a_missing_params_json_is_named(meta: Path, capfd: Capture) -> None:
    (meta / "params.json").unlink()
    refused(capfd, 3, meta, meta / "params.json")


@pytest.mark.parametrize("key", ["moe", "n_experts", "quantization_args"])
def test_a_params_json_of_another_kind_of_model_is_refused(
    key: str, meta: Path, capfd: Capture
) -> None:
    oracle.edit_json(meta / "params.json", **{key: {"a": 1}})
    refused(capfd, 4, meta, meta / "params.json")


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "intermediate_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_a_config_without_a_key_names_the_key(key: str, hf: Path, capfd: Capture) -> None:
    oracle.edit_json(hf / "config.json", **{key: None})
    refused(capfd, 3, hf, hf / "config.json", f"'{key}'")


@pytest.mark.parametrize("content", ["", "{", '"llama"'], ids=["empty", "invalid", "string"])
def test_a_config_that_is_no_json_object_is_refused(content: str, hf: Path, capfd: Capture) -> None:
    (hf / "config.json").write_text(content)
    refused(capfd, 3, hf, hf / "config.json")


def test_a_missing_config_is_named(hf: Path, capfd: Capture) -> None:
    (hf / "config.json").unlink()
    refused(capfd, 3, hf, hf / "config.json")


def test_a_params_json_renamed_to_config_json_is_recognized(
    hf: Path, meta: Path, capfd: Capture
) -> None:
    shutil.copy(meta / "params.json", hf / "config.json")
    refused(capfd, 3, hf, hf / "config.json", "'model_type'", "params.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "wide"}, ("wide",)),
        ({"num_attention_heads": 0}, ("'num_attention_heads'", "found 0")),
        ({"num_attention_heads": 7}, ("found 7 and 2",)),
        ({"num_hidden_layers": -1}, ("'num_hidden_layers'", "found -1")),
        ({"rope_parameters": "linear"}, ("rope",)),
        ({"rope_parameters": {"rope_type": "linear", "factor": "four"}}, ("four",)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, ("config.json",)),
        ({"rope_parameters": {"rope_type": "linear"}}, ("'factor'",)),
        ({"quantization_config": "int8"}, ("quantization_config",)),
        ({"rms_norm_eps": float("nan")}, ("norm_eps",)),
        ({"intermediate_size": 128}, ("expected [128, 64]",)),
        ({"num_hidden_layers": 4}, ("'model.layers.3.",)),
        ({"num_hidden_layers": 2}, ("'model.layers.2.",)),
    ],
)
def test_a_config_with_a_wrong_value_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], hf: Path, capfd: Capture
) -> None:
    oracle.edit_json(hf / "config.json", **changes)
    refused(capfd, 3, hf, hf, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 4.0}},
            ("found proportional", "llama3"),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "scale": 2}},
            ("scale",),
        ),
        ({"partial_rotary_factor": 0.5}, ("found 0.5",)),
        (
            {"model_type": "gpt_neox"},
            ("found gpt_neox", "llama"),
        ),
        ({"hidden_act": "gelu"}, ("found gelu", "expected silu")),
        ({"dtype": "float64"}, ("found float64",)),
    ],
)
def test_a_config_that_requests_other_arithmetic_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], hf: Path, capfd: Capture
) -> None:
    oracle.edit_json(hf / "config.json", **changes)
    refused(capfd, 4, hf, hf / "config.json", *words)


# Sources that are quantized already


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "aqlm", "bits": 2}, "aqlm 2"),
        ({"quant_method": "hqq", "quant_config": {}}, "hqq"),
        ({"nbits": 4}, "an unnamed scheme"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
                    }
                },
            },
            "[4, 'float', None]",
        ),
    ],
)
def test_a_config_of_another_quantizer_names_the_scheme(
    settings: dict[str, Any], named: str, hf: Path, capfd: Capture
) -> None:
    oracle.edit_json(hf / "config.json", quantization_config=settings)
    refused(capfd, 4, hf, hf / "config.json", f"found {named}")


@pytest.mark.parametrize(
    ("suffix", "dtype", "named"),
    [
        ("qweight", torch.int32, "(gptq or awq)"),
        ("g_idx", torch.int32, "(gptq or awq)"),
        ("SCB", torch.float32, "bitsandbytes"),
        ("weight.quant_state.bitsandbytes__nf4", torch.uint8, "bitsandbytes"),
        ("weight.absmax", torch.float32, "bitsandbytes"),
        ("weight_scale_inv", torch.float32, " fp8 "),
        ("weight_packed", torch.int32, "compressed-tensors"),
        ("_weight_qdata", torch.int8, "torchao"),
    ],
)
def test_packed_tensors_without_a_config_name_their_scheme(
    suffix: str, dtype: torch.dtype, named: str, hf: Path, capfd: Capture
) -> None:
    name = QUERY.removesuffix("weight") + suffix
    rewrite(hf, lambda state: state.update({name: torch.ones(8, 8).to(dtype)}))
    refused(capfd, 4, hf, named, f"found '{name}'")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_a_weight_that_is_not_stored_as_floats_is_refused(
    dtype: torch.dtype, hf: Path, capfd: Capture
) -> None:
    rewrite(hf, lambda state: state.update({QUERY: state[QUERY].to(dtype)}))
    refused(
        capfd,
        4,
        hf,
        QUERY,
        f"found {DType.of(dtype)}",
    )


@pytest.mark.parametrize(
    "name", ["layers.0.attention.wq.weight", "layers.2.feed_forward.w2.weight"]
)
def test_a_meta_weight_that_is_not_stored_as_floats_is_refused(
    name: str, meta: Path, capfd: Capture
) -> None:
    edit_shards(meta, lambda shard: shard.update({name: shard[name].to(torch.int8)}))
    refused(capfd, 4, meta, "found int8")


def test_a_damaged_gguf_file_is_named_in_its_folder_and_by_itself(hf: Path, capfd: Capture) -> None:
    (hf / "model.safetensors").unlink()
    gguf = hf / "llama-Q4_K_M.gguf"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00")
    refused(capfd, 3, hf, gguf)
    refused(capfd, 3, gguf, gguf)


def test_a_lora_adapter_alone_is_called_one(tmp_path: Path, capfd: Capture) -> None:
    src = tmp_path / "adapter"
    src.mkdir()
    (src / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file(
        {"base_model.model.layers.0.lora_A.weight": torch.zeros(2)},
        src / "adapter_model.safetensors",
    )
    refused(capfd, 4, src, src, "LoRA")


def test_lora_tensors_under_a_models_name_are_called_an_adapter(hf: Path, capfd: Capture) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(8, 64)}, hf / "model.safetensors", metadata={"format": "pt"})
    refused(capfd, 4, hf, "LoRA", f"found '{name}'")


@pytest.mark.parametrize(
    ("by", "remedy"),
    [
        (("quantize", "--scheme", "int8"), "float"),
        (("convert", "--dtype", "fp16"), "--dequantize"),
        (("convert", "--to", "meta"), "--dequantize"),
    ],
)
def test_a_folder_quantized_by_us_is_not_quantized_or_cast_again(
    by: tuple[str, ...], remedy: str, hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    first, _ = accepted(capfd, hf, "--scheme", "int4-g32", "--method", "rtn", by="quantize")
    src = first.rename(tmp_path / "int4")
    refused(capfd, 4, src, src, "int4-g32", remedy, by=by)


# NaN, Inf and overflow


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", EMBEDDING])
@pytest.mark.parametrize(
    "by", [("convert",), ("quantize", "--scheme", "int8")], ids=["convert", "quantize"]
)
def test_values_that_are_not_finite_name_tensor_and_count(
    value: float, name: str, by: tuple[str, ...], hf: Path, capfd: Capture
) -> None:
    def poison(state: State) -> None:
        state[name].view(-1)[[1, 7, 9]] = value

    rewrite(hf, poison)
    count = weights_of(hf)[name].numel()
    refused(
        capfd,
        7,
        hf,
        name,
        f"found 3 of {count}",
        by=by,
    )


def test_values_of_a_meta_shard_that_are_not_finite_are_refused(meta: Path, capfd: Capture) -> None:
    path = meta / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    shard["layers.3.attention.wq.weight"][0, 0] = float("nan")
    torch.save(shard, path)
    refused(
        capfd,
        7,
        meta,
        "model.layers.3.self_attn.q_proj.weight",
    )


@pytest.fixture
def large(hf: Path) -> Path:
    """A bfloat16 model of which two values exceed float16."""

    def change(state: State) -> None:
        state.update({name: tensor.bfloat16() for name, tensor in state.items()})
        state[QUERY][0, :2] = torch.tensor([1e5, -1e5])

    rewrite(hf, change)
    oracle.edit_json(hf / "config.json", dtype="bfloat16")
    return hf


def test_values_that_overflow_float16_name_tensor_and_count(large: Path, capfd: Capture) -> None:
    words = (
        QUERY,
        "float16",
        "found 2 of 4096",
        "--allow-nonfinite",
    )
    refused(capfd, 7, large, *words, by=("convert", "--dtype", "fp16"))


def test_values_that_overflow_are_written_on_request(large: Path, capfd: Capture) -> None:
    dst, _ = accepted(capfd, large, "--dtype", "fp16", "--allow-nonfinite")
    expected = {name: tensor.half() for name, tensor in weights_of(large).items()}
    assert int(expected[QUERY].isinf().sum()) == 2
    torch.testing.assert_close(weights_of(dst), expected, rtol=0, atol=0)


def test_values_that_are_not_finite_are_written_on_request(hf: Path, capfd: Capture) -> None:
    rewrite(hf, lambda state: state[QUERY].view(-1)[:3].fill_(float("nan")))
    dst, _ = accepted(capfd, hf, "--allow-nonfinite")
    torch.testing.assert_close(weights_of(dst), weights_of(hf), rtol=0, atol=0, equal_nan=True)
    assert int(weights_of(dst)[QUERY].isnan().sum()) == 3


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym"])
def test_scales_that_overflow_are_refused(scheme: str, hf: Path, capfd: Capture) -> None:
    rewrite(hf, lambda state: state[QUERY][0].fill_(1e9))
    oracle.edit_json(hf / "config.json", dtype="float16")
    refused(capfd, 7, hf, f"'{QUERY}'", by=("quantize", "--scheme", scheme, "--method", "rtn"))


# Ties, buffers and views


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return oracle.save(oracle.make("llama", tie_word_embeddings=True), tmp_path / "tied")


def test_a_tied_head_stored_again_is_dropped(tied: Path, capfd: Capture) -> None:
    rewrite(tied, lambda state: state.update({HEAD: state[EMBEDDING].clone()}))
    dst, _ = accepted(capfd, tied)
    assert HEAD not in weights_of(dst)
    tokens = oracle.random_tokens(12)
    assert torch.equal(
        oracle.logits(oracle.load(dst), tokens), oracle.logits(oracle.load(tied), tokens)
    )


def test_a_tied_matrix_may_be_stored_as_the_head_alone(tied: Path, capfd: Capture) -> None:
    """safetensors' save_model keeps one of the two names, and transformers loads either."""
    state = weights_of(tied)
    rewrite(tied, lambda state: state.update({HEAD: state.pop(EMBEDDING)}))
    dst, notes = accepted(capfd, tied)
    assert HEAD in notes
    assert torch.equal(weights_of(dst)[EMBEDDING], state[EMBEDDING])
    tokens = oracle.random_tokens(12)
    assert torch.equal(
        oracle.logits(oracle.load(dst), tokens), oracle.logits(oracle.load(tied), tokens)
    )


def test_a_tied_head_that_differs_is_refused(tied: Path, capfd: Capture) -> None:
    rewrite(tied, lambda state: state.update({HEAD: state[EMBEDDING] + 1}))
    refused(
        capfd,
        3,
        tied,
        tied / "config.json",
        "tie_word_embeddings",
    )


@pytest.mark.parametrize("mp", [1, 2])
def test_a_tied_model_survives_the_way_through_metas_format(
    mp: int, tied: Path, tmp_path: Path, capfd: Capture
) -> None:
    there, _ = accepted(capfd, tied, "--to", "meta", "--mp", str(mp))
    assert "output.weight" in torch.load(there / "consolidated.00.pth", weights_only=True)
    src = there.rename(tmp_path / "meta")
    back, _ = accepted(capfd, src)
    torch.testing.assert_close(weights_of(back), weights_of(tied), rtol=0, atol=0)
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "name", ["rope.freqs", "freqs_cis", "layers.0.attention.inner_attention.rope.freqs"]
)
def test_derived_buffers_of_meta_are_dropped(
    name: str, model: Any, tmp_path: Path, capfd: Capture
) -> None:
    dtype = torch.complex64 if name == "freqs_cis" else torch.bfloat16
    src = save_meta(
        model, tmp_path / "meta", 2, change=lambda s: s.update({name: torch.ones(4, dtype=dtype)})
    )
    dst, _ = accepted(capfd, src)
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "unlisted"])
def test_derived_buffers_of_transformers_are_dropped(
    name: str, listed: bool, sharded: Path, model: Any, capfd: Capture
) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = sharded / weight_map[QUERY]
    save_file({**load_file(shard), name: torch.ones(4)}, shard, metadata={"format": "pt"})
    oracle.edit_json(index, weight_map={**weight_map, name: shard.name} if listed else weight_map)
    dst, _ = accepted(capfd, sharded)
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["model.rope_freqs", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_any_other_extra_tensor_is_an_error(name: str, hf: Path, capfd: Capture) -> None:
    rewrite(hf, lambda state: state.update({name: torch.ones(4)}))
    refused(capfd, 3, hf, f"'{name}'")


def test_any_other_extra_tensor_of_meta_is_an_error(meta: Path, capfd: Capture) -> None:
    edit_shards(meta, lambda shard: shard.update({"layers.0.attention.wqkv.weight": torch.ones(4)}))
    refused(
        capfd,
        3,
        meta,
        meta / "consolidated.00.pth",
        "'layers.0.attention.wqkv.weight'",
    )


def _on_one_storage(shard: State) -> None:
    """Make the tensors views of one storage with a megabyte to spare."""
    storage = torch.zeros(sum(t.numel() for t in shard.values()) + (1 << 18))
    start = 0
    for name, tensor in shard.items():
        view = storage[start : start + tensor.numel()].view(tensor.shape)
        shard[name] = view.copy_(tensor)
        start += tensor.numel()


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_views_of_a_large_storage_cost_no_more_than_themselves(
    to: str, model: Any, tmp_path: Path, capfd: Capture
) -> None:
    src = save_meta(model, tmp_path / "meta", change=_on_one_storage)
    tensors = sum(t.nbytes for t in model.state_dict().values())
    assert (src / "consolidated.00.pth").stat().st_size > tensors + (1 << 20)
    dst, _ = accepted(capfd, src, "--to", to)
    file = dst / ("model.safetensors" if to == "hf" else "consolidated.00.pth")
    assert tensors <= file.stat().st_size < tensors + 20_000
    if to == "hf":
        torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


# Vocabulary and tokenizers


@pytest.mark.parametrize("embedding_axis", [0, 1])
def test_a_vocabulary_of_minus_one_is_taken_from_the_embedding(
    embedding_axis: int, model: Any, tmp_path: Path, capfd: Capture
) -> None:
    src = save_meta(model, tmp_path / "meta", 2, embedding_axis, vocab_size=-1)
    dst, _ = accepted(capfd, src)
    assert json.loads((dst / "config.json").read_text())["vocab_size"] == 96
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)


def test_a_vocabulary_that_disagrees_with_the_embedding_is_refused(
    model: Any, tmp_path: Path, capfd: Capture
) -> None:
    src = save_meta(model, tmp_path / "meta", vocab_size=100)
    refused(capfd, 3, src, src / "params.json", "found 100", "expected 96")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tiktoken_file_called_tokenizer_model_works(
    shards: int, tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.make("llama", vocab_size=TIKTOKEN_SIZE)
    src = save_meta(
        model,
        tmp_path / "meta",
        shards,
        embedding_axis=0,
        vocab_size=TIKTOKEN_SIZE,
        rope_theta=500000.0,
    )
    save_tiktoken(src)
    dst, notes = accepted(capfd, src, "--no-source-check")
    assert notes == ""
    assert (dst / "tokenizer.json").is_file()
    text = "The other day, the café closed at 12345."
    ids = load_tokenizer(src).encode(text)
    assert ids[0] == 260
    assert {258, 259} & set(ids)  # "the" or " the"
    assert load_tokenizer(dst).encode(text) == ids
    torch.testing.assert_close(weights_of(dst), dict(model.state_dict()), rtol=0, atol=0)
    assert run(capfd, "generate", dst, "--prompt", text, "--max-new-tokens", "3")[0] == 0


def test_a_tokenizer_smaller_than_the_embedding_is_noted(tmp_path: Path, capfd: Capture) -> None:
    src = save_meta(oracle.make("llama", vocab_size=600), tmp_path / "meta")
    save_tiktoken(src)
    _, notes = accepted(capfd, src, "--no-source-check")
    assert notes.startswith(f"quantkit: note: {src}: ")
    assert notes.count("\n") == 1
    assert f" {TIKTOKEN_SIZE} " in notes
    assert " 600 " in notes


@pytest.mark.parametrize("layout", ["meta", "hf"])
def test_a_tokenizer_larger_than_the_embedding_is_refused(
    layout: str, hf: Path, model: Any, tmp_path: Path, capfd: Capture
) -> None:
    src = hf if layout == "hf" else save_meta(model, tmp_path / "meta")
    save_tiktoken(src)
    refused(
        capfd,
        3,
        src,
        src,
        f"found {TIKTOKEN_SIZE} tokens",
        "at most 96",
    )


@pytest.mark.parametrize(
    "content",
    [b"YQ== 0\nYg== two\n", b"YQ== 0\nYg== 2\n", b"\x0a\x05garbage", b""],
    ids=["rank", "gap", "garbage", "empty"],
)
def test_a_damaged_tokenizer_is_refused(content: bytes, meta: Path, capfd: Capture) -> None:
    (meta / "tokenizer.model").write_bytes(content)
    refused(capfd, 3, meta, meta / "tokenizer.model")


def test_a_damaged_tokenizer_json_is_refused(hf: Path, capfd: Capture) -> None:
    (hf / "tokenizer.json").write_text('{"model": {}}')
    refused(capfd, 3, hf, hf / "tokenizer.json")


# Arithmetic that must survive


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kv_heads", [2, 4, 8], ids=lambda n: f"kv{n}")
def test_meta_rows_are_permuted_by_the_config(
    shards: int, kv_heads: int, tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.make("llama", num_key_value_heads=kv_heads)
    dst, _ = accepted(capfd, save_meta(model, tmp_path / "meta", shards))
    tokens = oracle.random_tokens(30)
    assert torch.equal(oracle.logits(oracle.load(dst), tokens), oracle.logits(model, tokens))


def test_llama_1_without_kv_heads_in_its_params_is_read(tmp_path: Path, capfd: Capture) -> None:
    model = oracle.make("llama", num_key_value_heads=8, rms_norm_eps=1e-6)
    src = save_meta(model, tmp_path / "meta", 2)
    oracle.edit_json(src / "params.json", n_kv_heads=None)
    dst, _ = accepted(capfd, src)
    tokens = oracle.random_tokens(30)
    assert torch.equal(oracle.logits(oracle.load(dst), tokens), oracle.logits(model, tokens))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 500000.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_settings_survive_a_conversion(
    rope: dict[str, Any], tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.make("llama", rope_parameters=rope)
    dst, _ = accepted(capfd, oracle.save(model, tmp_path / "hf"))
    tokens = oracle.random_tokens(90)
    assert torch.equal(oracle.logits(oracle.load(dst), tokens), oracle.logits(model, tokens))


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_rope_scaling_that_metas_format_cannot_say_is_refused(
    rope_type: str, tmp_path: Path, capfd: Capture
) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
    src = oracle.save(oracle.make("llama", rope_parameters=rope), tmp_path / "hf")
    refused(
        capfd,
        4,
        src,
        rope_type,
        by=("convert", "--to", "meta"),
    )


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen2", {}, ("biases",)),
        ("qwen3", {}, ("norms", "head size")),
        ("mistral", {"sliding_window": 7}, ("sliding-window",)),
        ("llama", {"attention_bias": True}, ("biases",)),
    ],
)
def test_a_model_that_metas_format_cannot_hold_is_refused(
    kind: str, changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path, capfd: Capture
) -> None:
    src = oracle.save(oracle.make(kind, **changes), tmp_path / "hf")
    refused(capfd, 4, src, *words, by=("convert", "--to", "meta"))


@pytest.mark.parametrize("mp", ["3", "0", "-2"])
def test_a_number_of_shards_that_does_not_divide_is_refused(
    mp: str, hf: Path, capfd: Capture
) -> None:
    refused(
        capfd,
        2,
        hf,
        f"{mp} shards",
        "--mp",
        by=("convert", "--to", "meta", "--mp", mp),
    )


def test_shards_without_metas_format_are_refused(hf: Path, capfd: Capture) -> None:
    refused(capfd, 2, hf, "--mp", "--to meta", by=("convert", "--mp", "2"))


def test_two_conversions_give_equal_bytes(meta: Path, tmp_path: Path, capfd: Capture) -> None:
    first, _ = accepted(capfd, meta)
    first = first.rename(tmp_path / "first")
    torch.manual_seed(1)
    second, _ = accepted(capfd, meta)
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
    assert all(p.read_bytes() == (second / p.name).read_bytes() for p in first.iterdir())


# Rows that the group size does not divide


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    """Rows of 64, and of 72 in down_proj, which 64 and 32 do not divide."""
    return oracle.save(oracle.make("llama", intermediate_size=72), tmp_path / "ragged")


def test_the_policy_for_rows_that_do_not_divide_is_recorded(ragged: Path, capfd: Capture) -> None:
    dst, notes = accepted(capfd, ragged, "--scheme", "int4-g64", "--method", "rtn", by="quantize")
    for name in ("int4-g64", " 3 ", "model.layers.0.mlp.down_proj", "int8"):
        assert name in notes
    tensors = json.loads((dst / "quantkit.json").read_text())["modules"]
    for layer in range(3):
        down = tensors[f"model.layers.{layer}.mlp.down_proj"]
        assert down["scheme"] == "int8"
        assert "int4-g64" in down["reason"]
    other_linears = {n: t for n, t in tensors.items() if "down_proj" not in n and n != "lm_head"}
    assert len(other_linears) == 18
    assert {t["scheme"] for t in other_linears.values()} == {"int4-g64"}
    assert tensors["lm_head"]["scheme"] is None


def test_the_largest_smaller_group_that_divides_is_taken(hf: Path, capfd: Capture) -> None:
    dst, _ = accepted(capfd, hf, "--scheme", "int4-g128-asym", "--method", "rtn", by="quantize")
    tensors = json.loads((dst / "quantkit.json").read_text())["modules"]
    assert tensors["model.layers.1.self_attn.q_proj"]["scheme"] == "int4-g64-asym"
    assert tensors["model.layers.1.mlp.down_proj"]["scheme"] == "int4-g32-asym"
    assert all("reason" in t for t in tensors.values())


def test_strict_fails_where_rows_do_not_divide(ragged: Path, capfd: Capture) -> None:
    by = ("quantize", "--scheme", "int4-g64", "--method", "rtn", "--strict")
    refused(
        capfd,
        2,
        ragged,
        ragged,
        "model.layers.0.mlp.down_proj",
        "--strict",
        by=by,
    )


def test_strict_passes_where_all_rows_divide(ragged: Path, capfd: Capture) -> None:
    options = "--scheme", "int4-g64", "--method", "rtn", "--keep", "*.down_proj", "--strict"
    _, notes = accepted(capfd, ragged, *options, by="quantize")
    assert "int4-g64" not in notes


# Destinations


@pytest.mark.parametrize("content", [None, b"precious"], ids=["empty", "full"])
def test_an_existing_destination_is_left_untouched(
    content: bytes | None, hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    if content is not None:
        (dst / "model.safetensors").write_bytes(content)
    code, _, err = run(capfd, "convert", hf, dst)
    assert code == 5
    assert err.startswith(f"quantkit: error: {dst}: ")
    assert err.count("\n") == 1
    assert [p.read_bytes() for p in dst.iterdir()] == ([] if content is None else [content])
    assert not (tmp_path / "out.partial").exists()


def test_a_dangling_link_as_destination_is_left_untouched(
    hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst = tmp_path / "out"
    dst.symlink_to(tmp_path / "elsewhere")
    code, _, err = run(capfd, "convert", hf, dst)
    assert code == 5
    assert err.startswith(f"quantkit: error: {dst}: ")
    assert dst.is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_as_the_destinations_parent_is_refused(
    hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    parent = tmp_path / "file"
    parent.write_bytes(b"precious")
    code, _, err = run(capfd, "convert", hf, parent / "out")
    assert code == 5
    assert err.startswith(f"quantkit: error: {parent / 'out.partial'}: ")
    assert err.count("\n") == 1
    assert parent.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_parent_is_refused(hf: Path, tmp_path: Path, capfd: Capture) -> None:
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o555)
    code, _, err = run(capfd, "convert", hf, parent / "out")
    assert code == 5
    assert "Permission denied" in err
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("spelling", ["hf", "hf/../hf", "link"])
@pytest.mark.parametrize(
    "by", [("convert",), ("quantize", "--scheme", "int8")], ids=["convert", "quantize"]
)
def test_the_source_as_destination_is_refused(
    spelling: str, by: tuple[str, ...], hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "link").symlink_to(hf)
    before = {p.name: p.read_bytes() for p in hf.iterdir()}
    code, _, err = run(capfd, by[0], hf, tmp_path / spelling, *by[1:])
    assert code == 2
    assert f"found {tmp_path / spelling})" in err
    assert {p.name: p.read_bytes() for p in hf.iterdir()} == before


def test_a_source_under_the_partial_name_of_the_destination_is_left_untouched(
    hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    src = hf.rename(tmp_path / "out.partial")
    before = {p.name: p.read_bytes() for p in src.iterdir()}
    code, _, _ = run(capfd, "convert", src, tmp_path / "out", "--resume")
    assert src.exists()
    assert {p.name: p.read_bytes() for p in src.iterdir()} == before
    assert code != 0


def test_a_foreign_folder_under_the_partial_name_is_left_untouched(
    hf: Path, tmp_path: Path, capfd: Capture
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"precious")
    code, _, err = run(capfd, "convert", hf, tmp_path / "out", "--resume")
    assert code == 6, err
    assert (partial / "model.safetensors").read_bytes() == b"precious"
    assert not (tmp_path / "out").exists()
