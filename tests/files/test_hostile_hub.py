"""A hub whose answers are not as they should be: each ends in one line, and nothing is written
outside the cache.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
from fake_hub import COMMIT, Hostile, git_name, hub

from quantkit.data.files import DEMO_MODEL
from quantkit.errors import CheckpointError
from quantkit.files.hub_answers import HubFile, validate_hub_answers
from quantkit.files.hub_cache import CachedModel

pytestmark = pytest.mark.processes

FILES = {path.name: path.read_bytes() for path in Path(DEMO_MODEL).iterdir() if path.is_file()}
OTHER = "2" * 40
DEEP = "a/b/c/d/home"
"""Where the cache lies below the test's folder: a path that climbs out of the cache stays in the
folder.
"""

# Runs a command for each name of a model or a dataset: its exit code, what it prints, and which
# files that makes.
SCRIPT = """
import contextlib, io, json, os, re, sys
from pathlib import Path
from quantkit.cli.main import main

OURS = "hub/(.locks/)?(model|dataset)s--case--[^/]+(/|$)|hub(/.locks|/CACHEDIR.TAG)?$"  # of any: their threads go on
QUANTIZE = "--scheme int8 --method gptq --samples 2 --length 32 --calibration".split()
root, cache = Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2], "hub")
results = {}

def paths(folder):
    return [os.path.join(at, name) for at, folders, files in os.walk(folder) for name in folders + files]

for name in sys.argv[4:]:
    known = set(paths(root))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["inspect", name] if name.startswith("hf:") else ["quantize", sys.argv[3], name[5:], *QUANTIZE, name])
            code = None
        except SystemExit as stop:
            code = stop.code
    kind = "models--" if name.startswith("hf:") else "datasets--"
    folder = kind + name.removeprefix("hf:").split("@")[0].replace("/", "--")
    inside = [os.path.relpath(path, cache / folder) for path in paths(cache / folder)]
    new = [os.path.relpath(path, cache.parent) for path in set(paths(root)) - known]
    found = [path for path in new if not re.match(OURS, path)]
    results[name] = code, out.getvalue(), err.getvalue(), found, inside
print(json.dumps(results))
"""  # noqa: E501


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    outside: list[str]
    """Files that are new outside the folders of models and datasets in the cache."""
    inside: list[str]
    """What lies in the repository's folder in the cache, relative to it."""


def _run(root: Path, address: str, *names: str, **environment: str) -> dict[str, Run]:
    env = {
        **os.environ,
        "HF_HOME": str(root / DEEP),
        "HF_ENDPOINT": address,
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
        **environment,
    }
    (root / DEEP).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        forked.command("-c", SCRIPT, root, DEEP, DEMO_MODEL, *names),
        capture_output=True,
        text=True,
        env=env,
        check=False,
        cwd=root / DEEP,
    )
    assert done.returncode == 0, done.stderr
    return {name: Run(*result) for name, result in json.loads(done.stdout).items()}


def _info(**changes: object) -> Hostile:
    return Hostile(info=lambda info: {**info, **changes})


def _without(key: str) -> Hostile:
    return Hostile(info=lambda info: {name: value for name, value in info.items() if name != key})


def _of(file: str, **changes: object) -> Hostile:
    """What is announced of a file is changed; None leaves it out."""

    def changed(info: Any) -> object:
        siblings = [
            (
                {key: value for key, value in {**one, **changes}.items() if value is not None}
                if one["rfilename"] == file
                else one
            )
            for one in info["siblings"]
        ]
        return {**info, "siblings": siblings}

    return Hostile(info=changed)


def _lfs(file: str, **changes: object) -> Hostile:
    """What is announced of a file in LFS is changed."""

    def changed(info: Any) -> object:
        for one in info["siblings"]:
            if one["rfilename"] == file:
                one["lfs"].update(changes)
        return info

    return Hostile(info=changed)


def _more(*siblings: object) -> Hostile:
    return Hostile(info=lambda info: {**info, "siblings": [*info["siblings"], *siblings]})


def _file(name: object) -> Hostile:
    return _more({"rfilename": name, "size": 1, "blobId": git_name(b"x")})


def _headers(**changes: str | None) -> Hostile:
    """Headers of every file are changed; None leaves one out."""
    given = {key.replace("_", "-"): value for key, value in changes.items()}

    def changed(path: str, headers: dict[str, str]) -> Mapping[str, str]:
        return {key: value for key, value in {**headers, **given}.items() if value is not None}

    return Hostile(headers=changed)


def _missing(commit: str) -> Hostile:
    """A file is announced and not there, and the answer that says so names this commit."""

    def changed(path: str, headers: dict[str, str]) -> Mapping[str, str]:
        return headers if path in FILES else {**headers, "X-Repo-Commit": commit}

    return Hostile(_file("gone.json").info, changed)


_COMMIT, _NAME = "does not name a commit", "a file with an invalid name"
_ETAG = "the wrong ETag"
_SIZE, _HASH = "does not state the size", "does not state the hash"
HOSTILE: dict[str, tuple[Hostile, str]] = {
    "sha_climbs": (_info(sha="../../../EVIL"), _COMMIT),
    "sha_climbs_far": (_info(sha="../" * 7 + "EVIL"), _COMMIT),
    "sha_missing": (_without("sha"), _COMMIT),
    "sha_null": (_info(sha=None), _COMMIT),
    "sha_short": (_info(sha="1" * 39), _COMMIT),
    "sha_long": (_info(sha="1" * 41), _COMMIT),
    "sha_line": (_info(sha=COMMIT + "\n"), _COMMIT),
    "sha_upper": (_info(sha="A" * 40), _COMMIT),
    "sha_number": (_info(sha=int(COMMIT)), _COMMIT),
    "sha_list": (_info(sha=[COMMIT]), _COMMIT),
    "sha_other": (_info(sha=OTHER), "names the wrong commit"),
    "etag_climbs": (_headers(ETag='"../../../../EVIL"'), _ETAG),
    "etag_absolute": (_headers(ETag='"ROOT/EVIL"'), _ETAG),
    "etag_empty": (_headers(ETag='""'), _ETAG),
    "etag_dots": (_headers(ETag='".."'), _ETAG),
    "etag_other": (_headers(ETag=f'"{"0" * 64}"'), _ETAG),
    "etag_missing": (_headers(ETag=None), _ETAG),
    "etag_linked": (_headers(X_Linked_Etag='"../../../../EVIL"'), _ETAG),
    "commit_climbs": (_headers(X_Repo_Commit="../../../EVIL"), _COMMIT),
    "commit_other": (_headers(X_Repo_Commit=OTHER), "names the wrong commit"),
    "commit_missing": (_headers(X_Repo_Commit=None), _COMMIT),
    "commit_of_missing": (_missing("../../../../EVIL"), _COMMIT),
    "other_commit_of_missing": (_missing(OTHER), "names the wrong commit"),
    "linked_size": (_headers(X_Linked_Size="7"), "the wrong size"),
    "linked_size_negative": (_headers(X_Linked_Size="-7"), "the wrong size"),
    "name_number": (_file(7), _NAME),
    "name_null": (_file(None), _NAME),
    "name_list": (_file(["a"]), _NAME),
    "name_missing": (_more({"size": 1}), "cannot be read"),
    "name_absolute": (_file("ROOT/EVIL.json"), _NAME),
    "name_climbs": (_file("../EVIL.json"), _NAME),
    "name_climbs_within": (_file("a/../../EVIL.json"), _NAME),
    "name_backslash": (_file("..\\EVIL.json"), _NAME),
    "name_empty": (_file(""), _NAME),
    "name_line": (_file("a\n.json"), _NAME),
    "name_surrogate": (_file("\ud800.json"), _NAME),
    "size_text": (_of("params.json", size="7"), _SIZE),
    "size_negative": (_of("params.json", size=-1), _SIZE),
    "size_huge": (_of("params.json", size=10**40), _SIZE),
    "size_boolean": (_of("params.json", size=True), _SIZE),
    "size_float": (_of("params.json", size=7.0), _SIZE),
    "size_missing": (_of("params.json", size=None), _SIZE),
    "size_other": (_of("params.json", size=7), "the wrong size"),
    "size_lfs_text": (_lfs("tokenizer.model", size="7"), "states two sizes"),
    "size_lfs_other": (_lfs("tokenizer.model", size=7), "states two sizes"),
    "blob_missing": (_of("params.json", blobId=None), _HASH),
    "blob_climbs": (_of("params.json", blobId="../../../../EVIL"), _HASH),
    "blob_number": (_of("params.json", blobId=int(COMMIT)), _HASH),
    "blob_short": (_of("params.json", blobId="1" * 39), _HASH),
    "sha256_climbs": (_lfs("tokenizer.model", sha256="../../../../EVIL"), _HASH),
    "sha256_null": (_lfs("tokenizer.model", sha256=None), _HASH),
    "sha256_short": (_lfs("tokenizer.model", sha256="1" * 40), _HASH),
    "lfs_text": (_of("tokenizer.model", lfs="x"), "cannot be read"),
    "siblings_null": (_info(siblings=None), "does not list files"),
    "siblings_missing": (_without("siblings"), "does not list files"),
    "siblings_number": (_info(siblings=7), "cannot be read"),
    "siblings_text": (_info(siblings="params.json"), "cannot be read"),
    "siblings_object": (_info(siblings={"params.json": 7}), "cannot be read"),
    "siblings_numbers": (_info(siblings=[7]), "cannot be read"),
    "answer_list": (Hostile(info=lambda info: [info]), "cannot be read"),
    "answer_null": (Hostile(info=lambda info: None), "cannot be read"),
}


def _placed(hostile: Hostile, root: Path, name: str) -> Hostile:
    """ROOT in an answer stands for the folder of the test, EVIL for a name that no other case
    has.
    """

    def placed(answer: object) -> Any:
        return json.loads(
            json.dumps(answer).replace("ROOT", str(root)).replace("EVIL", f"evil-{name}")
        )

    return Hostile(
        lambda info: placed(hostile.info(info)),
        lambda path, headers: placed(dict(hostile.headers(path, headers))),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("hostile")
    hostile = {f"case/{name}": _placed(case, root, name) for name, (case, _) in HOSTILE.items()}
    hostile["case/sound"] = Hostile()
    with hub(dict.fromkeys(hostile, FILES), hostile=hostile) as (address, _):
        found = _run(root, address, *(f"hf:{name}" for name in hostile))
    return {name.removeprefix("hf:case/"): run for name, run in found.items()}


@pytest.mark.slow
def test_a_sound_answer_is_taken(runs: dict[str, Run]) -> None:
    run = runs["sound"]
    assert (run.code, run.err, run.outside) == (0, "", [])
    assert f"snapshots/{COMMIT}/params.json" in run.inside


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_refused(runs: dict[str, Run], name: str) -> None:
    """In one line that says what is wrong, and nothing is written outside the folders of models
    in the cache.
    """
    run = runs[name]
    assert (run.code, run.out, run.outside) == (3, "", [])
    assert run.err.startswith(f"quantkit: error: hf:case/{name}")
    assert run.err.count("\n") == 1
    assert HOSTILE[name][1] in run.err, run.err
    assert not any("evil" in path or OTHER in path for path in run.inside)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["params.json", "tokenizer.model"])
def test_content_with_another_hash_is_removed(file: str, tmp_path: Path) -> None:
    """What comes has the size that was announced, and is named for the hash that was announced."""
    digest = "0" * (64 if file == "tokenizer.model" else 40)
    announced = _lfs(file, sha256=digest) if file == "tokenizer.model" else _of(file, blobId=digest)
    lie = Hostile(
        announced.info,
        lambda path, headers: {**headers, "ETag": f'"{digest}"'} if path == file else headers,
    )
    name = "hf:case/content"
    with hub({"case/content": FILES}, hostile={"case/content": lie}) as (address, _):
        run = _run(tmp_path, address, name)[name]
    assert (run.code, run.err.count("\n")) == (3, 1)
    assert f"{file}: is not what the hub announced" in run.err
    assert f"expected {digest}); it was removed from the cache; try again" in run.err
    assert f"blobs/{digest}" not in run.inside
    with hub({"case/content": FILES}) as (address, sent):
        assert _run(tmp_path, address, name)[name].code == 0
    assert file in sent


def _cached(root: Path) -> Path:
    return root / DEEP / "hub" / "models--case--cached"


@pytest.mark.slow
def test_what_the_cache_holds_is_checked_once(tmp_path: Path) -> None:
    """As another program left it there, without a record of ours."""
    name = "hf:case/cached"
    with hub({"case/cached": FILES}) as (address, sent):
        assert _run(tmp_path, address, name)[name].code == 0
        (record,) = _cached(tmp_path).glob("quantkit/*")
        before = json.loads(record.read_bytes())
        assert before["params.json"] == {
            "size": len(FILES["params.json"]),
            "digest": git_name(FILES["params.json"]),
        }
        record.unlink()
        sent.clear()
        assert _run(tmp_path, address, name)[name].code == 0
        assert (sent, json.loads(record.read_bytes())) == ([], before)
        record.unlink()
        blob = _cached(tmp_path) / "snapshots" / COMMIT / "consolidated.01.pth"
        _damage(blob)
        run = _run(tmp_path, address, name)[name]
        assert (run.code, run.err.count("\n"), record.exists()) == (3, 1, False)
        assert "consolidated.01.pth: is not what the hub announced" in run.err
        assert _run(tmp_path, address, name)[name].code == 0
        assert sent == ["consolidated.01.pth"]


def _damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def test_what_was_checked_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, content = CachedModel("case/cached", None), b"content"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    path = model.snapshot(COMMIT) / "config.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"CONTENT")
    file = HubFile(path.name, len(content), git_name(content))
    model.require_announced(COMMIT, file, checked=True)
    with pytest.raises(CheckpointError, match=re.escape(f"delete {path}, and try again")):
        model.require_announced(COMMIT, file, checked=False)
    assert path.exists()  # it is not named for a hash that it does not have
    path.write_bytes(content)
    model.require_announced(COMMIT, file, checked=False)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="found 6 bytes, expected 7 bytes"):
        model.require_announced(COMMIT, file, checked=True)


def test_a_record_replaces_a_link_and_does_not_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = CachedModel("case/cached", None), HubFile("config.json", 7, COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (model.folder / "quantkit").mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (model.folder / "quantkit" / f"{COMMIT}.json").symlink_to(tmp_path / "mine")
    model.record(COMMIT, [file])
    assert (tmp_path / "mine").read_text() == "mine"
    assert model.read_record(COMMIT) == {file}


@pytest.mark.slow
def test_a_branch_in_the_cache_that_leads_out_of_it_is_not_taken(tmp_path: Path) -> None:
    """As a program that does not check the hub's answers may have written it."""
    name = "hf:case/cached"
    with hub({"case/cached": FILES}) as (address, _):
        assert _run(tmp_path, address, name)[name].code == 0
    cached = _cached(tmp_path)
    (record,) = cached.glob("quantkit/*")
    record.rename(cached / "snapshots" / record.name)
    (cached / "refs" / "main").write_text(f"../snapshots/{COMMIT}")
    run = _run(tmp_path, address, name, HF_HUB_OFFLINE="1")[name]
    assert (run.code, run.err.count("\n")) == (2, 1)


def test_a_body_beyond_its_announced_size_is_not_stored(tmp_path: Path) -> None:
    name = "hf:case/endless"
    more = bytes(1 << 26)
    hostile = {"case/endless": Hostile(body=lambda path, body: body + more)}
    with hub({"case/endless": FILES}, hostile=hostile) as (address, _):
        run = _run(tmp_path, address, name)[name]
    # The library itself would compare the size at the end, and raise another error.
    assert (run.code, run.err.count("\n")) == (CheckpointError.exit_code, 1)


@pytest.mark.parametrize(
    ("file_hash", "route", "problem"),
    [
        ("../../evil", "/api/xet", "does not state the hash of its storage"),
        ("0" * 64, "http://127.0.0.2:1/xet", "redirects to another host for its storage"),
        ("0" * 64, "/api/xet", None),
    ],
)
def test_storage_on_another_host_gets_no_token(
    file_hash: str, route: str, problem: str | None
) -> None:
    headers = {"X-Xet-Hash": file_hash, "X-Xet-Refresh-Route": route}
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    hostile = {"case/xet": Hostile(headers=lambda path, own: {**own, **headers})}
    with hub({"case/xet": FILES}, hostile=hostile) as (address, _):
        headers["X-Xet-Refresh-Route"] = route if route.startswith("http") else address + route
        name = next(iter(FILES))
        url = hf_hub_url("case/xet", name, endpoint=address)
        with validate_hub_answers("hf:case/xet"):
            if problem is None:
                assert get_hf_file_metadata(url, endpoint=address).xet_file_data is not None
                return
            with pytest.raises(CheckpointError, match=problem):
                get_hf_file_metadata(url, endpoint=address)


def test_answers_to_a_new_client_of_the_library_are_checked(tmp_path: Path) -> None:
    """The library makes a new one after some errors."""
    from huggingface_hub import close_session, get_session, hf_hub_download

    hostile = {"case/new": _headers(ETag='"../../evil"')}
    with hub({"case/new": FILES}, hostile=hostile) as found, validate_hub_answers("hf:case/new"):
        client = get_session()
        close_session()
        with pytest.raises(CheckpointError) as caught:
            hf_hub_download("case/new", "params.json", endpoint=found[0], cache_dir=tmp_path)
        assert get_session() is not client
    assert caught.value.path == Path("hf:case/new")
    assert list(tmp_path.rglob("*evil*")) == []


def test_a_commit_that_is_named_is_the_one_that_is_taken(tmp_path: Path) -> None:
    """Whatever the hub answers, and whatever a list of files in the cache says: other programs
    keep it unchecked.
    """
    hash_ = "0" * 64
    listed = {
        "size": 7,
        "blob_id": COMMIT,
        "lfs_sha256": "../../../../evil",
        "lfs_size": 7,
        "xet_hash": hash_,
    }
    trees = _cached(tmp_path) / "trees"
    trees.mkdir(parents=True)
    (trees / f"{COMMIT}.json").write_text(
        json.dumps({"format_version": 1, "files": dict.fromkeys(FILES, listed)})
    )
    names = [f"hf:case/cached@{COMMIT}", f"hf:case/other@{COMMIT}"]
    with hub(
        dict.fromkeys(("case/cached", "case/other"), FILES),
        hostile={"case/other": _info(sha=OTHER)},
    ) as found:
        runs = _run(tmp_path, found[0], *names)
    assert [(run.code, run.outside) for run in runs.values()] == [(0, []), (3, [])], runs
    assert "names the wrong commit" in runs[names[1]].err


def _second_sha(commit: str) -> Hostile:
    """The first answer about a repository is sound; all others name this commit."""
    answers = itertools.chain([COMMIT], itertools.repeat(commit))
    return Hostile(info=lambda info: {**info, "sha": next(answers)})


DATA = {"README.md": b"# Some text", "train.jsonl": b'{"text": "some text"}\n' * 1000}
DATASETS: dict[str, tuple[Hostile, str]] = {
    "sha_climbs": (_info(sha="../../../EVIL"), _COMMIT),
    "sha_missing": (_without("sha"), _COMMIT),
    "sha_number": (_info(sha=7), _COMMIT),
    "second_sha_climbs": (
        _second_sha("../../../../EVIL"),
        "redirects to an address that is not a file's",
    ),
    "second_sha_absolute": (
        _second_sha("ROOT/EVIL"),
        "redirects to an address that is not a file's",
    ),
    "etag_climbs": (_headers(ETag='"../../../../EVIL"'), "an ETag that is not the name"),
    "etag_absolute": (_headers(ETag='"ROOT/EVIL"'), "an ETag that is not the name"),
    "commit_climbs": (_headers(X_Repo_Commit="../../../../EVIL"), _COMMIT),
    "commit_of_missing": (
        Hostile(
            headers=lambda path, headers: {
                **headers,
                "X-Repo-Commit": COMMIT if path in DATA else "../../EVIL",
            }
        ),
        _COMMIT,
    ),
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("datasets")
    hostile = {f"case/{name}": _placed(case, root, name) for name, (case, _) in DATASETS.items()}
    data = {
        name: {"train.jsonl": DATA["train.jsonl"]} if "second" in name else DATA for name in hostile
    }
    with hub(data, hostile=hostile) as (address, _):
        found = _run(root, address, *hostile)
    return {name.removeprefix("case/"): run for name, run in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_a_hostile_answer_about_a_dataset_is_refused(datasets: dict[str, Run], name: str) -> None:
    run = datasets[name]
    (line,) = (line for line in run.err.splitlines() if not line.startswith("quantkit: note: "))
    assert (run.code, run.outside) == (3, [])
    assert line.startswith(f"quantkit: error: case/{name}: the hub's answer ")
    assert DATASETS[name][1] in line
    assert not any("evil" in path for path in run.inside)


@pytest.mark.slow
def test_ctrl_c_ends_the_check_of_a_file(tmp_path: Path) -> None:
    """The cache holds a file of 64 GiB of zeros, which no record says was checked."""
    size, path, requested = 64 << 30, "consolidated.00.pth", threading.Event()

    def headers(of: str, headers: dict[str, str]) -> Mapping[str, str]:
        if of != path:
            return headers
        requested.set()
        return {**headers, "X-Linked-Size": str(size)}

    huge = Hostile(
        lambda info: _lfs(path, size=size).info(_of(path, size=size).info(info)), headers
    )
    name = "hf:case/cached"
    with hub({"case/cached": FILES}) as (address, _):
        assert _run(tmp_path, address, name)[name].code == 0
    with (_cached(tmp_path) / "snapshots" / COMMIT / path).open("r+b") as file:
        file.truncate(size)
    with hub({"case/cached": FILES}, hostile={"case/cached": huge}) as (address, _):
        env = {
            **os.environ,
            "HF_HOME": str(tmp_path / DEEP),
            "HF_ENDPOINT": address,
            "NO_PROXY": "127.0.0.1",
        }
        command = forked.quantkit("inspect", name)
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        assert requested.wait(50)
        time.sleep(0.5)  # it is hashed by then
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (130, "quantkit: interrupted\n")
    assert time.monotonic() - start < 5
