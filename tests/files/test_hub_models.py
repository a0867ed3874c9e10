"""Models named ``hf:owner/name``, downloaded from a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import forked
import pytest
from fake_hub import COMMIT, hub

import quantkit
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import RequestError
from quantkit.files.hub import select_download_files
from quantkit.files.hub_names import HubModel, parse_hub_name, read_origin
from quantkit.files.source import SourceFile

pytestmark = pytest.mark.processes

MODEL = HubModel("some/model")
FILES = {path.name: path.read_bytes() for path in Path(DEMO_MODEL).iterdir() if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def _run(
    home: Path, address: str, *arguments: str | Path, offline: bool = False
) -> tuple[int, str, str]:
    env = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": address,
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": str(int(offline)),
    }
    command = forked.quantkit(*arguments)
    home.mkdir(exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_what_is_needed_is_downloaded_once_and_its_commit_recorded(
    home: Path, tmp_path: Path
) -> None:
    more = {"model-Q4_0.gguf": b"GGUF", "pictures/one.png": b"png", "onnx/model.onnx": b"onnx"}
    with hub({"some/model": {**FILES, **more}}) as (address, sent):
        code, _, err = _run(home, address, "convert", "hf:some/model", tmp_path / "out")
        assert (code, sorted(sent)) == (0, sorted(FILES)), err
        sent.clear()
        code, out, _ = _run(home, address, "inspect", "hf:some/model@main")
        assert (code, sent) == (0, [])
        assert out.startswith("hf:some/model@main: meta (2 shards)")
    source = json.loads((tmp_path / "out" / "quantkit.json").read_text())["source"]
    assert source["hub"] == {"name": "some/model", "commit": COMMIT}
    assert source["sha256"] == {
        name: SourceFile(Path(DEMO_MODEL) / name).sha256() for name in source["sha256"]
    }
    for offline in (True, False):  # the hub is gone: what the cache holds
        assert _run(home, address, "inspect", "hf:some/model", offline=offline)[0] == 0


@pytest.mark.slow
def test_what_cannot_be_downloaded_is_reported_in_one_line(home: Path) -> None:
    with hub({"some/model": FILES}) as (address, _):
        runs = {
            name: _run(home, address, "inspect", name)
            for name in ("hf:some/other", "hf:some/model@v2")
        }
        bare = _run(home, address, "inspect", "some/model")
    runs |= {"gone": _run(home, address, "inspect", "hf:some/model")}
    runs |= {"offline": _run(home, address, "inspect", "hf:some/model", offline=True)}
    problems = {
        "hf:some/other": "no such model",
        "hf:some/model@v2": "no such revision",
        "gone": "cannot be reached",
        "offline": "HF_HUB_OFFLINE",
    }
    for name, (code, out, err) in runs.items():
        assert (code, out, err.count("\n")) == (2, "", 1), name
        assert problems[name] in err
    assert (bare[0], bare[2].count("\n")) == (2, 1)
    assert "if it is a model of the Hugging Face hub: hf:some/model" in bare[2]
    for name in ("https://huggingface.co/some/model", "HF:some/model"):
        with pytest.raises(RequestError, match="the Hugging Face hub: hf:some/model"):
            quantkit.inspect(name)


@pytest.mark.slow
def test_what_the_cache_holds_in_part_is_not_taken(home: Path) -> None:
    """A download that broke off: all but one file are there."""
    with hub({"some/model": FILES}) as (address, _):
        assert _run(home, address, "inspect", "hf:some/model")[0] == 0
    for record in home.glob("hub/models--some--model/quantkit/*.json"):
        files = json.loads(record.read_text())
        record.write_text(
            json.dumps({**files, "chat_template.jinja": {"size": 9, "digest": COMMIT}})
        )
    next(home.glob("hub/models--some--model/snapshots/*/tokenizer.model")).unlink()
    for offline in (True, False):
        code, _, err = _run(home, address, "inspect", "hf:some/model", offline=offline)
        assert (code, err.count("\n")) == (2, 1)


def test_what_another_program_downloaded_is_used_without_network(home: Path) -> None:
    """The library listed the files of the repository, and quantkit recorded none."""
    script = """
import sys
from huggingface_hub import snapshot_download
snapshot_download("some/model", cache_dir=sys.argv[1] + "/hub", ignore_patterns="picture.png")
"""
    with hub({"some/model": {**FILES, "picture.png": b"png"}}) as (address, _):
        env = {**os.environ, "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
        subprocess.run(forked.command("-c", script, home), env=env, check=True)
    assert _run(home, address, "inspect", "hf:some/model", offline=True)[0] == 0
    next(home.glob("hub/models--some--model/snapshots/*/tokenizer.model")).unlink()
    assert _run(home, address, "inspect", "hf:some/model", offline=True)[0] == 2


@pytest.mark.slow
def test_a_model_in_a_folder_of_a_repository_is_one_file(home: Path) -> None:
    parts = {f"Q4/m-0000{number}-of-00002.gguf": b"GGUF%d" % number for number in (1, 2)}
    with hub({"some/model": parts}) as (address, sent):
        _, _, err = _run(home, address, "inspect", "hf:some/model")
    assert sorted(sent) == sorted(parts)
    assert "Q4/m-00001-of-00002.gguf: has an invalid GGUF header" in err


@pytest.mark.slow
def test_ctrl_c_ends_a_download(home: Path) -> None:
    """Two of the files never come."""
    never = threading.Event()
    with hub(
        {"some/model": FILES}, before=lambda path: never.wait(60) if path.endswith(".pth") else None
    ) as found:
        address, sent = found
        home.mkdir()
        env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": address, "NO_PROXY": "127.0.0.1"}
        command = forked.quantkit("inspect", "hf:some/model")
        process = subprocess.Popen(command, env=env, cwd=home, stderr=subprocess.PIPE, text=True)
        while "tokenizer.model" not in sent:  # the others are waited for then
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=50)
        never.set()
    assert (process.returncode, err) == (130, "quantkit: interrupted\n")


def test_a_destination_is_no_name_on_a_hub(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the destination is the name of a hub repository"):
        quantkit.convert(DEMO_MODEL, "hf:some/model")


@pytest.mark.slow
def test_a_file_that_is_cut_short_is_not_taken(home: Path) -> None:
    with hub({"some/model": FILES}) as (address, _):
        assert _run(home, address, "inspect", "hf:some/model")[0] == 0
        blob = next(home.glob("hub/models--some--model/snapshots/*/consolidated.00.pth")).resolve()
        blob.write_bytes(blob.read_bytes()[:-1])
        code, _, err = _run(home, address, "inspect", "hf:some/model")
    assert code == 3
    assert "is not what the hub announced" in err


def test_the_disk_is_looked_at_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quantkit.errors import NoSpaceError
    from quantkit.files import hub as module

    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 1)
    )
    with pytest.raises(
        NoSpaceError, match="the disk of the hub's cache has too little space for hf:some/model"
    ):
        module._require_space(10, MODEL)


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name("hf:some/model") == MODEL
    assert parse_hub_name("some/model") is None
    (tmp_path / "hf:some" / "model").mkdir(parents=True)
    assert parse_hub_name("hf:some/model") is None


NO_NAMES = (
    "",
    "a",
    "a/",
    "a/b@",
    "a/b/c",
    "../a",
    "a/b c",
    "a/b@x y",
    "a/b@v/c.gguf",
    "a/b@../x",
    "a/b@x/../../y",
    "a/b@/x",
    "a/b@x//y",
    "a/b@x/",
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:a/b@refs/pr/1", HubModel("a/b", None, "refs/pr/1")),
        ("hf:a/b/sub/c.GGUF@v1", HubModel("a/b", "sub/c.GGUF", "v1")),
        *((f"hf:{text}", None) for text in NO_NAMES),
    ],
)
def test_how_a_model_is_spelled(name: str, expected: HubModel | None) -> None:
    if expected is not None:
        assert parse_hub_name(name) == expected
        assert str(expected) == name
        return
    with pytest.raises(RequestError, match="is not the name of a model on the hub"):
        parse_hub_name(name)


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (
            (
                "config.json",
                "model-00001-of-00001.safetensors",
                "model.safetensors.index.json",
                "LICENSE",
            ),
            (
                "pytorch_model.bin",
                "pytorch_model.bin.index.json",
                "consolidated.safetensors",
                "a.gguf",
                "original/x.pth",
            ),
        ),
        (
            ("config.json", "pytorch_model.bin"),
            ("consolidated.00.pth", "training_args.bin", "tf_model.h5"),
        ),
        (("params.json", "tokenizer.model", "consolidated.00.pth"), ("checklist.chk",)),
        (("q-00001-of-00002.gguf", "q-00002-of-00002.gguf", "config.json"), ("picture.png",)),
        (("adapter_config.json",), ("picture.png",)),
    ],
)
def test_which_files_are_needed(names: tuple[str, ...], left_out: tuple[str, ...]) -> None:
    assert sorted(select_download_files(dict.fromkeys((*names, *left_out), 1), MODEL)) == sorted(
        names
    )


def test_which_of_several_gguf_models_is_requested() -> None:
    sizes = dict.fromkeys(
        ("a-Q4_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "config.json"), 1
    )
    with pytest.raises(RequestError, match=r"several GGUF models .* hf:some/model/a-Q4_0.gguf"):
        select_download_files(sizes, MODEL)
    chosen = HubModel("some/model", "b-00001-of-00002.gguf")
    assert select_download_files(sizes, chosen) == [
        "b-00001-of-00002.gguf",
        "b-00002-of-00002.gguf",
    ]
    with pytest.raises(RequestError, match="no weights"):
        select_download_files({"config.json": 1}, MODEL)
    with pytest.raises(RequestError, match="no such file"):
        select_download_files(sizes, HubModel("some/model", "c.gguf"))


def test_where_a_path_comes_from(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    assert read_origin(Path(f"/x/models--a--b-c/snapshots/{COMMIT}/model.gguf")) == {
        "name": "a/b-c",
        "commit": COMMIT,
    }
