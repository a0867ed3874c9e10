"""`quantkit push`: what a hub on this machine holds afterwards, byte by byte, and what is
refused before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from command import Capture, run
from upload_hub import READ, WRITE, Hub, upload_hub

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, RequestError, UnreachableError

NAME = "me/model"
README = "README.md"
NO_COMMIT = b'{"commitUrl": "https://huggingface.co/me/model/commit/zz", "commitOid": "zz"}'


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in int8 with its card."""
    return quantkit.quantize(
        demo_model, tmp_path_factory.mktemp("push") / "int8", "int8", license="apache-2.0"
    ).path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the library uses, with an access token."""
    for name, value in (("HF_TOKEN", WRITE), ("NO_PROXY", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with upload_hub() as (address, hub):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        yield hub


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to change."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def _content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _pushed(hub: Hub, branch: str = "main") -> dict[str, bytes]:
    return {
        name: one for name, one in hub.repos[NAME].files(branch).items() if name != ".gitattributes"
    }


def _writes(hub: Hub) -> list[str]:
    return [one for one in hub.requests if not one.startswith("GET") and "validate-yaml" not in one]


def _error(status: int, message: str = "no") -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps({"error": message}).encode(), {"X-Error-Message": message}


# What arrives


def test_the_hub_holds_the_bytes_in_one_commit(hub: Hub, model: Path) -> None:
    result = quantkit.push(model, NAME)
    assert _pushed(hub) == _content(model)
    assert hub.repos[NAME].private
    assert hub.repos[NAME].messages == ["initial commit", f"Upload {NAME} with quantkit"]
    assert (result.created, result.private, result.commit) == (
        True,
        True,
        hub.repos[NAME].heads["main"],
    )
    hub.requests.clear()
    again = quantkit.push(model, NAME)
    assert (again.created, again.commit, _writes(hub)) == (False, result.commit, [])
    assert {file.state for file in again.files} == {"same"}


def test_only_what_differs_is_sent_and_other_files_stay(hub: Hub, copy: Path) -> None:
    quantkit.push(copy, NAME)
    (copy / "notes.txt").write_text("")
    (copy / "inner folder").mkdir()
    (copy / "inner folder" / "a b.txt").write_text("x")
    hub.repos[NAME].commit("main", {**hub.repos[NAME].files(), "picture.png": b"png"}, "by hand")
    hub.puts.clear()
    result = quantkit.push(copy, NAME, message="more")
    assert [file.name for file in result.files if file.state != "same"] == [
        "inner folder/a b.txt",
        "notes.txt",
    ]
    assert result.kept == ["picture.png"]
    assert hub.puts == []
    assert _pushed(hub) == {**_content(copy), "picture.png": b"png"}
    assert hub.repos[NAME].messages[-1] == "more"


def test_a_branch_is_made_and_others_stay_as_they_are(hub: Hub, model: Path) -> None:
    hub.create(NAME, {"config.json": b"{}"}, private=False)
    result = quantkit.push(model, NAME, revision="int8")
    assert (_pushed(hub, "int8"), _pushed(hub)) == (_content(model), {"config.json": b"{}"})
    assert result.branch == "int8"
    assert any(f"{NAME} exists and is public" in note for note in result.notes)
    assert quantkit.push(model, NAME, revision="int8").commit == result.commit


def test_a_new_branch_with_nothing_to_send_is_made(hub: Hub, model: Path) -> None:
    quantkit.push(model, NAME)
    quantkit.push(model, NAME, revision="v1")
    assert _pushed(hub, "v1") == _content(model)


def test_an_existing_repository_keeps_its_visibility(hub: Hub, model: Path) -> None:
    hub.create(NAME)
    result = quantkit.push(model, NAME, public=True)
    assert hub.repos[NAME].private
    assert any("stays private" in note for note in result.notes)
    quantkit.push(model, "me/other", public=True)
    assert not hub.repos["me/other"].private


def test_files_of_another_model_are_not_left_among_the_models(hub: Hub, model: Path) -> None:
    old = {
        "model-00001-of-00002.safetensors": b"x",
        "model.safetensors.index.json": b"{}",
        "old.gguf": b"GGUF",
    }
    hub.create(NAME, {**old, "notes.txt": b"x"})
    with pytest.raises(
        RequestError, match=r"would load with this model \(found model-00001-of-00002.saf"
    ):
        quantkit.push(model, NAME)
    assert _writes(hub) == []
    result = quantkit.push(model, NAME, delete_others=True)
    assert _pushed(hub) == _content(model)
    assert result.deleted == sorted([*old, "notes.txt"])


def test_a_gguf_file_is_sent_with_its_parts_and_a_short_card(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    quantkit.convert(model, tmp_path / "model.gguf", split_max_size=1_000_000)
    (tmp_path / "other.txt").write_text("not of the model")
    hub.create(NAME, {"Q8_0.gguf": b"GGUF"})
    result = quantkit.push(tmp_path / "model.gguf", NAME, license="mit", base_model="some/base")
    pushed = _pushed(hub)
    card = huggingface_hub.ModelCard(pushed.pop(README).decode())
    expected = {
        name: content for name, content in _content(tmp_path).items() if name.startswith("model")
    }
    assert pushed == {**expected, "Q8_0.gguf": b"GGUF"}
    assert len(expected) > 2
    assert card.data.to_dict() == {
        "base_model": "some/base",
        "base_model_relation": "quantized",
        "license": "mit",
        "model_name": model.name,
        "pipeline_tag": "text-generation",
        "tags": ["quantkit", "gguf"],
    }
    assert result.kept == ["Q8_0.gguf"]
    hub.repos[NAME].commit("main", {**hub.repos[NAME].files(), README: b"by hand"}, "by hand")
    quantkit.push(tmp_path / "model.gguf", NAME)
    assert _pushed(hub)[README] == b"by hand"


def test_hidden_files_are_not_sent_and_links_to_files_are(
    hub: Hub, copy: Path, tmp_path: Path
) -> None:
    expected = _content(copy)
    (copy / ".git").mkdir()
    (copy / ".git" / "config").write_text("secret")
    (copy / ".env").write_text("secret")
    (copy / "__pycache__").mkdir()
    shutil.move(copy / "model.safetensors", tmp_path / "blob")
    (copy / "model.safetensors").symlink_to(tmp_path / "blob")
    result = quantkit.push(copy, NAME)
    assert _pushed(hub) == expected
    assert "hidden files are not sent: .env, .git, __pycache__" in result.notes


def test_a_gguf_file_of_a_folder_is_compared_with_the_manifest_of_that(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    folder = quantkit.convert(model, tmp_path / "out", to="gguf").path
    result = quantkit.push(folder / "model.gguf", NAME, license="mit")
    assert set(_pushed(hub)) == {"model.gguf", README}
    assert any("quantkit.json is of the whole folder" in note for note in result.notes)
    data = bytearray((folder / "model.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since quantkit wrote it"):
        quantkit.push(folder / "model.gguf", NAME)


@pytest.mark.slow
def test_each_gguf_model_of_a_folder_is_checked(hub: Hub, model: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        quantkit.convert(model, tmp_path / name)
    quantkit.push(tmp_path, NAME)
    assert len(hub.puts) == 2  # parts of one of the two, which are the same
    assert {**_pushed(hub), README: b""} == {**_content(tmp_path), README: b""}
    data = (tmp_path / "b.gguf").read_bytes()
    for change, problem in (
        (data[:-1] + b"x", "has changed since quantkit wrote it"),
        (data[:-100], "b.gguf: is truncated"),
    ):
        (tmp_path / "b.gguf").write_bytes(change)
        with pytest.raises(CheckpointError, match=problem):
            quantkit.push(tmp_path, NAME)
    for path in tmp_path.glob("b.*"):
        path.unlink()
    quantkit.convert(model, tmp_path / "b.gguf", split_max_size=1_000_000)
    last = max(tmp_path.glob("b-*.gguf"))
    for path in (last, tmp_path / "b.gguf.quantkit.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"b-00001-of-\d+.gguf: .*{last.name}"):
        quantkit.push(tmp_path, NAME)


def test_files_go_to_xet_storage_where_the_library_uses_it(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own code as far as hf_xet, which is replaced."""
    hf_xet = pytest.importorskip("hf_xet")

    class Commit:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> Commit:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def start_upload_file(self, path: str, sha256: str) -> None:
            hub.lfs[sha256] = Path(path).read_bytes()

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(hf_xet, "XetSession", lambda: SimpleNamespace(new_upload_commit=Commit))
    quantkit.push(model, NAME)
    assert _pushed(hub) == _content(model)
    assert hub.puts == []


def test_the_progress_of_all_files_is_reported(hub: Hub, model: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    quantkit.push(
        model, NAME, progress=lambda phase, done, total, unit: seen.append((phase, done, total))
    )
    uploaded = [(done, total) for phase, done, total in seen if phase == "upload"]
    assert uploaded == sorted(uploaded)
    assert (uploaded[0][0], uploaded[-1][0]) == (0, uploaded[-1][1])
    assert seen[-1] == ("commit", 1, 1)


# Interrupted


def _killed(hub: Hub, model: Path, when: Callable[[str, int], bool]) -> None:
    """Push in another process, and kill it once `when` holds for a request and the content
    received so far.
    """
    env = {
        **os.environ,
        "HF_ENDPOINT": huggingface_hub.constants.ENDPOINT,
        "HF_HUB_DISABLE_XET": "1",
    }
    killed = []

    def check(request: str, total: int = 0) -> None:
        if not killed and when(request, hub.total):
            killed.append(request)
            process.kill()

    hub.received, hub.answer = check, check
    command = [sys.executable, "-m", "quantkit.cli", "push", str(model), NAME]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd="/"
    )
    process.communicate(timeout=60)
    hub.received, hub.answer = lambda path, total: None, lambda request: None
    assert killed
    hub.total = 0


@pytest.mark.slow
def test_what_was_killed_three_times_continues_and_holds_the_same_bytes(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    """While a file is sent, between two files, and just before the commit."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    big = os.urandom(3 << 20)
    (copy / "extra.bin").write_bytes(big)
    (copy / "quantkit.json").unlink()  # extra.bin is not in it
    _killed(hub, copy, lambda request, total: total > 500_000)
    assert (hub.repos[NAME].messages, big in hub.lfs.values()) == (["initial commit"], False)
    _killed(hub, copy, lambda request, total: big in hub.lfs.values())
    _killed(hub, copy, lambda request, total: "/commit/" in request)
    stored, sent = set(hub.lfs), len(hub.puts)
    assert _pushed(hub) in (
        {},
        _content(copy),
    )  # the request may arrive whole before its sender ends
    result = quantkit.push(copy, NAME)
    assert _pushed(hub) == _content(copy)
    assert (set(hub.lfs), len(hub.puts)) == (stored, sent)
    assert not result.created
    assert len(hub.repos[NAME].messages) == 2


def test_an_interrupted_call_ends_at_once_and_sends_nothing_more(hub: Hub, model: Path) -> None:
    """Also while the hub does not answer."""

    # In a process of its own: a signal here could reach pytest, wherever it is.
    code = "import sys, quantkit; quantkit.push(sys.argv[1], sys.argv[2])"
    started, goes_on, answered = threading.Event(), threading.Event(), list[str]()

    def answer(request: str) -> None:
        if request.startswith("PUT"):
            started.set()
            goes_on.wait(60)
            answered.append(request)

    hub.answer = answer
    address = huggingface_hub.constants.ENDPOINT
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(model), NAME], stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            assert started.wait(60)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            assert answered == []
        finally:
            goes_on.set()
            process.kill()
    assert process.returncode == -signal.SIGINT, errors
    assert not any("/commit/" in one for one in hub.requests)


def test_a_repository_that_changes_meanwhile_is_not_overwritten(hub: Hub, model: Path) -> None:
    def answer(request: str) -> None:
        if "/commit/" in request:
            hub.repos[NAME].commit("main", {"theirs": b"x"}, "theirs")

    hub.create(NAME)
    hub.answer = answer
    with pytest.raises(
        UnreachableError, match="the repository has changed since it was read; repeat the command"
    ):
        quantkit.push(model, NAME)
    assert _pushed(hub) == {"theirs": b"x"}


# Refused before anything is sent


def _damage_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-7])


def _change_weights(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def _nested(folder: Path, name: str, content: bytes) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / name).write_bytes(content)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (_damage_weights, "model.safetensors"),
    "another byte": (
        _change_weights,
        "model.safetensors: the file has changed since quantkit wrote it",
    ),
    "missing": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "tokenizer.json: the manifest lists this file, but it is miss",
    ),
    "partial": (lambda folder: (folder / "x.partial").mkdir(), "x.partial: is unfinished"),
    "download": (lambda folder: (folder / "x.incomplete").touch(), "x.incomplete: is unfinished"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe: is not a regular file"),
    "broken link": (
        lambda folder: (folder / "link").symlink_to("nowhere"),
        "link: is a link to a file that is miss",
    ),
    "link out of the folder": (
        lambda folder: (folder / "NOTICE").symlink_to("/etc/hostname"),
        "NOTICE: is a link to a file outside the fol",
    ),
    "link out for weights": (
        lambda folder: (folder / "extra.bin").symlink_to("/etc/hostname"),
        "extra.bin: is a link to a file outside",
    ),
    "link to folder": (
        lambda folder: (folder / "link").symlink_to("/"),
        "link: is a link to a folder",
    ),
    "inner weights": (
        lambda folder: _nested(folder, "x.safetensors", b"x" * 20),
        "inner/x.safetensors: ",
    ),
    "pointer": (
        lambda folder: _nested(folder, "x.txt", b"version https://git-lfs.github.com/spec/v1\n"),
        "a git-lfs pointer",
    ),
    "name": (lambda folder: (folder / "a\nb").touch(), "has a name that the hub does not accept"),
    "card is binary": (
        lambda folder: (folder / README).write_bytes(b"\xff\xfe"),
        "README.md: is not plain text",
    ),
    "card": (
        lambda folder: (folder / README).write_text("---\na: [\n---\n"),
        "README.md: its metadata cannot be read",
    ),
    "card, open": (
        lambda folder: (folder / README).write_text("---\nlicense: mit\n"),
        "metadata is not terminated",
    ),
    "card is a list": (
        lambda folder: (folder / README).write_text("---\n- a\n---\n"),
        "metadata cannot be read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_model_is_not_sent(case: str, hub: Hub, copy: Path) -> None:
    change, problem = REFUSED[case]
    change(copy)
    with pytest.raises(QuantkitError) as caught:
        quantkit.push(copy, NAME)
    assert problem in str(caught.value)
    assert caught.value.exit_code in (2, 3)
    assert (_writes(hub), hub.repos) == ([], {})


def test_an_unfinished_model_or_another_file_is_not_sent(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    left = Path(shutil.copytree(model, tmp_path / "out.partial"))
    for path, problem in (
        (left, "is unfinished"),
        (model / "model.safetensors", "is only one file of a model"),
        (tmp_path, "weights"),
        ("hf:some/model", "is a repository on the hub"),
        (tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(QuantkitError, match=problem):
            quantkit.push(path, NAME)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "model"}, "expected owner/name"),
        ({"name": "datasets/me/model"}, "expected owner/name"),
        ({"name": "me/a--b"}, "is not the name of a repository"),
        ({"name": "me/a b"}, "expected owner/name"),
        ({"license": "a b"}, "`license` is not in the form"),
        ({"base_model": "Llama"}, "`base_model` has no owner"),
        ({"revision": "1" * 40}, "is a commit"),
        ({"revision": "a/../b"}, "`revision` is not in the form"),
        ({"message": " "}, "`message` is empty"),
        ({"public": "no"}, "True or False"),
    ],
)
def test_an_invalid_request_is_refused_first(
    arguments: dict[str, str], problem: str, hub: Hub, model: Path
) -> None:
    with pytest.raises(RequestError, match=problem):
        quantkit.push(**{"path": model, "name": NAME, **arguments})  # type: ignore[arg-type]
    assert hub.requests == []


def test_a_public_model_has_a_licence(hub: Hub, copy: Path) -> None:
    (copy / README).write_text("# mine\n")
    with pytest.raises(RequestError, match=r"the model card has no license .*`license` adds it"):
        quantkit.push(copy, NAME, public=True)
    assert _writes(hub) == []
    assert any("has no license" in note for note in quantkit.push(copy, NAME).notes)
    with pytest.raises(RequestError, match="the hub refuses the metadata of the model card"):
        quantkit.push(copy, "me/other", public=True, license="nonsense")
    assert list(hub.repos) == [NAME]


def test_a_repository_that_is_not_private_as_requested_gets_no_file(hub: Hub, model: Path) -> None:
    def answer(request: str) -> tuple[int, bytes, dict[str, str]] | None:
        if "repos/create" not in request:
            return None
        hub.create(NAME, private=False)
        return 200, b'{"url": "https://huggingface.co/me/model"}', {}

    hub.answer = answer
    with pytest.raises(
        RequestError, match="the hub has created a public repository; `public=True`"
    ):
        quantkit.push(model, NAME)
    assert _pushed(hub) == {}


# The hub refuses, or is not there


@pytest.mark.parametrize(
    ("token", "name", "problem"),
    [
        (None, NAME, "there is no access token for the hub"),
        ("hf_wrong", NAME, "does not accept the access token"),
        (READ, NAME, "the access token may not create the repository"),
        ("hf_\u00e9", NAME, "contains invalid characters"),
        (READ, "me/there", "the access token may not write to the repository"),
        (WRITE, "them/model", "the access token may not create the repository"),
    ],
)
def test_who_may_not_write_is_refused_in_one_line(
    token: str | None,
    name: str,
    problem: str,
    hub: Hub,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
) -> None:
    hub.create("me/there")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    code, out, err = run(capfd, "push", model, name)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"quantkit: error: hf:{name}: ")
    assert problem in last
    assert token is None or token not in err
    assert hub.puts == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("part", "answer", "kind", "problem"),
    [
        ("GET /api/models", _error(429), UnreachableError, "status 429"),
        ("GET /api/models", (200, b"<html>", {}), QuantkitError, "the hub"),
        (
            "GET /api/models",
            (200, b'{"id": "me/new", "sha": "", "siblings": []}', {}),
            RequestError,
            "another name",
        ),
        ("GET /api/models", (200, b"[]", {}), CheckpointError, "cannot be read"),
        ("validate-yaml", _error(500), UnreachableError, "overloaded"),
        ("repos/create", _error(429), UnreachableError, "limits the number of requests; wait"),
        ("repos/create", _error(409, "exists"), RequestError, "the name is in use"),
        (
            "preupload",
            (200, b'{"files": 3}', {}),
            CheckpointError,
            "the hub's answer cannot be read",
        ),
        (
            "/lfs/",
            _error(403, "storage limit"),
            RequestError,
            "may not write to the repository .*storage limit",
        ),
        ("/objects/batch", (200, b"{}", {}), CheckpointError, "the hub's answer cannot be read"),
        ("/commit/", _error(503), UnreachableError, "overloaded"),
        ("/commit/", _error(400, "too large"), RequestError, "refuses it .*too large"),
        ("/commit/", (200, NO_COMMIT, {}), CheckpointError, "does not name a commit"),
        ("/commit/", (200, b"{}", {}), CheckpointError, "cannot be read"),
    ],
)
def test_an_answer_that_is_none_is_an_error_in_one_line(
    part: str,
    answer: tuple[int, bytes, dict[str, str]],
    kind: type[QuantkitError],
    problem: str,
    hub: Hub,
    model: Path,
) -> None:
    hub.answer = lambda request: answer if part in request else None
    with pytest.raises(kind, match=problem) as caught:
        quantkit.push(model, NAME)
    assert "\n" not in str(caught.value)
    hub.answer = lambda request: None
    quantkit.push(model, NAME)
    assert _pushed(hub) == _content(model)


@pytest.mark.parametrize("change", [lambda name, old: old + b"x", lambda name, old: None])
def test_what_the_hub_does_not_hold_as_sent_is_an_error(
    change: Callable[[str, bytes], bytes | None], hub: Hub, model: Path
) -> None:
    def committed(files: dict[str, bytes]) -> dict[str, bytes]:
        changed = {
            name: change(name, old) if name == "model.safetensors" else old
            for name, old in files.items()
        }
        return {name: content for name, content in changed.items() if content is not None}

    hub.committed = committed
    with pytest.raises(
        CheckpointError,
        match=r"'model.safetensors' on the hub differs from what was sent, at commit \w{12} ",
    ):
        quantkit.push(model, NAME)


def test_a_file_that_the_repository_ignores_is_sent(hub: Hub, model: Path) -> None:
    ignored = b"model.safetensors\n"
    hub.create(NAME, {".gitignore": ignored})
    quantkit.push(model, NAME)
    assert _pushed(hub) == {**_content(model), ".gitignore": ignored}


def test_a_file_that_changes_while_it_is_sent_is_an_error(hub: Hub, copy: Path) -> None:
    def answer(request: str) -> None:
        if "preupload" in request:
            (copy / "config.json").write_text("{}")

    hub.answer = answer
    with pytest.raises(CheckpointError, match=r"config.json: changed while it was sent"):
        quantkit.push(copy, NAME)
    assert not any("/commit/" in one for one in hub.requests)


def test_without_a_network_it_is_worth_another_try(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="the hub cannot be reached"):
        quantkit.push(model, NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE forbids"):
        quantkit.push(model, NAME)


# A dry run, and the command


def test_a_dry_run_lists_the_files_and_sends_nothing(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    code, out, err = run(capfd, "push", model, NAME, "--dry-run", "--json", tmp_path / "out.json")
    assert (code, _writes(hub)) == (0, [])
    head, *rows, total, last = out.splitlines()
    assert head.startswith("would create http://127.0.0.1:")
    assert head.endswith("/me/model (private)")
    assert {row.split()[1]: row.split()[0] for row in rows} == dict.fromkeys(_content(model), "new")
    assert (total.partition(",")[0], last) == (f"{len(rows)} files", "nothing was sent")
    assert "note: the model card has no base model: --base-model adds it" in err
    found = json.loads((tmp_path / "out.json").read_text())
    assert {one["name"]: one["size"] for one in found["files"]} == {
        n: len(c) for n, c in _content(model).items()
    }
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "not compared with the hub" in quantkit.push(model, NAME, dry_run=True).notes[0]


def test_a_dry_run_lists_what_would_be_deleted_and_what_stays(hub: Hub, model: Path) -> None:
    quantkit.push(model, NAME)
    hub.repos[NAME].commit(
        "main", {**hub.repos[NAME].files(), "old.txt": b"x", "config.json": b"{}"}, "by hand"
    )
    hub.requests.clear()
    for delete, last in ((True, "1 file deleted"), (False, "1 other file stays: old.txt")):
        lines = quantkit.push(model, NAME, delete_others=delete, dry_run=True).lines()
        assert ("  delete  old.txt" in lines) == delete
        assert [line.split()[1] for line in lines if line.startswith("  changed")] == [
            "config.json"
        ]
        assert lines[-2].endswith(f"to send; 7 files there already; {last}")
    assert _writes(hub) == []


def test_what_the_doctor_warns_of_is_reported_and_sent(
    hub: Hub, copy: Path, capfd: Capture
) -> None:
    for path in [copy / "quantkit.json", *copy.glob("tokenizer*")]:
        path.unlink()
    code, _, err = run(capfd, "push", copy, NAME)
    assert code == 0
    assert f"quantkit: warning: {copy}: no-tokenizer: " in err
    assert f"quantkit: note: {copy} has no manifest of quantkit to compare its files with" in err


def test_the_command_reports_its_progress_and_changes_no_file(
    hub: Hub, copy: Path, capfd: Capture
) -> None:
    before = _content(copy)
    for path in copy.iterdir():
        path.chmod(0o444)
    copy.chmod(0o555)
    try:
        code, out, err = run(
            capfd, "push", copy, f"hf:{NAME}", "--license", "mit", "--base-model", "some/base"
        )
    finally:
        copy.chmod(0o755)
    assert (code, _content(copy)) == (0, before)
    assert f"/{NAME} (private): created, commit {hub.repos[NAME].heads['main']}\n" in out
    assert "base_model, base_model_relation and license added; the folder is not changed" in err
    pushed = _pushed(hub)
    assert {**pushed, README: b""} == {**before, README: b""}
    card, old = (huggingface_hub.ModelCard(one[README].decode()) for one in (pushed, before))
    assert card.text == old.text
    more = {"license": "mit", "base_model": "some/base", "base_model_relation": "quantized"}
    assert card.data.to_dict() == {**old.data.to_dict(), **more}
