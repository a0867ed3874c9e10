"""Calibration text from a dataset on a hub: one on this machine, or none that answers."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import socket
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
from error_parts import raises
from fake_hub import hub

from quantkit.calibration.data import load_calibration
from quantkit.calibration.documents import HubId, hub_id
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import RequestError, UnreachableError
from quantkit.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.processes

# Draws from each of the arguments, and prints what came out and what of the libraries' settings is
# not as before.
SCRIPT = f"""
import json, logging, sys, time, warnings
import datasets, huggingface_hub.utils
from quantkit.calibration.data import load_calibration
from quantkit.errors import RequestError
from quantkit.text.tokenizer import load_tokenizer

def settings():
    return [
        logging.getLogger("datasets").level, logging.getLogger("huggingface_hub").level,
        datasets.are_progress_bars_disabled(), huggingface_hub.utils.are_progress_bars_disabled(),
        huggingface_hub.utils.are_progress_bars_disabled("huggingface_hub"),
        datasets.config.STREAMING_READ_MAX_RETRIES, warnings.filters,
    ]

tokenizer = load_tokenizer({str(DEMO_MODEL)!r})
before, results = settings(), dict()
for source in sys.argv[1:]:
    slept = []
    time.sleep = slept.append
    try:
        drawn = load_calibration(source, tokenizer, samples=6, length=50, seed=3)
        results[source] = dict(tokens=drawn.tokens.tolist(), manifest=drawn.to_json())
    except RequestError as error:
        results[source] = dict(error=str(error))
    results[source]["slept"] = sum(slept)
print(json.dumps([results, str(before) == str(settings())]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_text_from_a_file_is_read_without_libraries_for_datasets_and_networks(
    suffix: str, tmp_path: Path
) -> None:
    file = tmp_path / f"text.{suffix}"
    text = "The people of the United States and of the world. " * 200
    file.write_bytes(
        {
            "txt": text.encode(),
            "jsonl": _lines({"text": text}),
            "parquet": _parquet(tmp_path, text),
        }[suffix]
    )
    code = (
        "import sys\n"
        "from quantkit.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "print(sorted({'datasets', 'httpx', 'pandas'} & set(sys.modules)))\n"
    )
    options = [
        "--scheme",
        "int8",
        "--method",
        "gptq",
        "--samples",
        "2",
        "--length",
        "32",
        "--accept-quality-loss",
    ]
    command = ["quantize", DEMO_MODEL, tmp_path / "out", *options, "--calibration", file]
    done = forked.python(code, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def _lines(*rows: dict[str, object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _parquet(folder: Path, *texts: str) -> bytes:
    """A table of texts, each beside a picture that is none."""
    import pyarrow
    from pyarrow.parquet import write_table

    table = pyarrow.table(
        {"text": texts, "picture": [{"bytes": b"not a picture", "path": "a.png"}] * len(texts)}
    )
    kinds = {"text": {"dtype": "string", "_type": "Value"}, "picture": {"_type": "Image"}}
    table = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": kinds}})}
    )
    write_table(table, folder / "table.parquet")
    return (folder / "table.parquet").read_bytes()


DOCUMENTS = [f"Document {i} speaks of {i * i} things, and of nothing else." for i in range(400)]
CONFIGS = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train.jsonl}
  - {split: test, path: en/test.jsonl}
- config_name: de
  data_files: de/train.jsonl
---
"""
MANY_CONFIGS = (
    "---\nconfigs:\n"
    + "".join(f"- {{config_name: config{i}, data_files: a.jsonl}}\n" for i in range(99))
    + "---\n"
)


@dataclass(frozen=True)
class Answers:
    of: dict[str, dict[str, Any]]
    settings_kept: bool
    stderr: str
    sent: list[str]


def _ask(folder: Path, *sources: str, **environment: str) -> Answers:
    """Run the script with a terminal for its stderr, since progress bars are for terminals."""
    ours, its = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(
            forked.command("-c", SCRIPT, *sources),
            stdout=subprocess.PIPE,
            stderr=its,
            check=False,
            cwd=folder,
            timeout=600,
            env={
                **os.environ,
                "HF_HOME": str(folder / "home"),
                "HF_HUB_OFFLINE": "0",
                "NO_PROXY": "127.0.0.1",
                **environment,
            },
        )
        os.write(its, b"\0")
        stderr = terminal.read(2**16).removesuffix(b"\0").decode()
        os.close(its)
    assert done.returncode == 0, stderr
    return Answers(*json.loads(done.stdout), stderr, [])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("hub")
    repositories = {
        "some/lines": {
            "train.jsonl": _lines(*({"text": d, "n": i} for i, d in enumerate(DOCUMENTS)))
        },
        "some/table": {
            "data/train-00000-of-00002.parquet": _parquet(folder, *["Much the same. " * 500] * 700),
            "data/train-00001-of-00002.parquet": _parquet(folder, "Never read."),
        },
        "some/configs": {
            "README.md": CONFIGS.encode(),
            "en/train.jsonl": _lines(*({"text": "the train split"} for _ in range(100))),
            "en/test.jsonl": _lines(*({"text": "the test split"} for _ in range(100))),
            "de/train.jsonl": _lines({"text": "kurz"}),
        },
        "some/many": {"README.md": MANY_CONFIGS.encode(), "a.jsonl": b""},
        "some/other": {"train.jsonl": _lines({"body": "x", "title": "y"})},
        "some/broken": {"train.jsonl": b"{ no JSON"},
        "some/nothing": {"README.md": b"# Data to come"},
    }
    sources = [
        "some/lines",
        "some/table",
        "some/configs",
        "some/configs:en",
        "some/configs:en:test",
        "some/configs:en:none",
        "some/configs:fr",
        "some/configs:de",
        "some/many",
        "some/other",
        "some/broken",
        "some/nothing",
        "some/unknown",
    ]
    with hub(repositories) as (address, sent):
        found = _ask(folder, *sources, HF_ENDPOINT=address)
        return Answers(found.of, found.settings_kept, found.stderr, sent)


@pytest.mark.slow
def test_a_hub_dataset_gives_what_a_file_of_its_text_gives(
    answers: Answers, tmp_path: Path
) -> None:
    text = "\n\n".join(DOCUMENTS)
    (tmp_path / "text.txt").write_text(text)
    expected = load_calibration(
        tmp_path / "text.txt", load_tokenizer(DEMO_MODEL), samples=6, length=50, seed=3
    )
    found = answers.of["some/lines"]
    assert found["tokens"] == expected.tokens.tolist()
    assert found["manifest"] == {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "samples": 6,
        "length": 50,
        "seed": 3,
        "source": "some/lines",
        "documents": 400,
    }


@pytest.mark.slow
def test_no_more_shards_are_read_than_the_samples_need(answers: Answers) -> None:
    text = "\n\n".join(["Much the same. " * 500] * 700)[: 4 * 2**20]
    assert (
        answers.of["some/table"]["manifest"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    )
    assert "data/train-00000-of-00002.parquet" in answers.sent
    assert "data/train-00001-of-00002.parquet" not in answers.sent


@pytest.mark.parametrize(
    ("source", "split"), [("some/configs:en", "train"), ("some/configs:en:test", "test")]
)
def test_config_and_split_are_those_requested(answers: Answers, source: str, split: str) -> None:
    text = "\n\n".join([f"the {split} split"] * 100)
    manifest = answers.of[source]["manifest"]
    assert (manifest["source"], manifest["sha256"]) == (
        source,
        hashlib.sha256(text.encode()).hexdigest(),
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("some/configs", ["['en', 'de']", "owner/name:config:split"]),
        ("some/many", ["'config1', 'config2'", " ...", "owner/name:config:split"]),
        ("some/configs:fr", ["'fr'", "['en', 'de']"]),
        ("some/configs:en:none", ["none", "['train', 'test']"]),
        ("some/configs:de", ["samples, expected at most"]),
        ("some/other", ["found body, title, expected text"]),
        ("some/broken", ["JSON"]),
        ("some/nothing", ["data files"]),
        ("some/unknown", ["hub"]),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said_in_one_line(
    answers: Answers, source: str, words: list[str]
) -> None:
    line = answers.of[source]["error"]
    assert line.startswith(f"{source}: ")
    assert all(word in line for word in words), line
    assert "\n" not in line
    assert len(line) < 500


def test_the_libraries_are_quiet_and_set_as_before(answers: Answers) -> None:
    assert answers.stderr == ""
    assert answers.settings_kept


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
def test_no_network_is_said_at_once(offline: bool, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: who calls is refused
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        answers = _ask(
            tmp_path,
            "some/lines:en",
            HF_ENDPOINT=address,
            HF_HUB_OFFLINE=str(int(offline)),
            HF_HUB_DISABLE_PROGRESS_BARS="0",
        )
    answer = answers.of["some/lines:en"]
    assert answer["error"].startswith("some/lines:en: ")
    assert ("HF_HUB_OFFLINE" in answer["error"]) == offline
    assert answer["slept"] == 0
    assert answers.stderr == ""


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from quantkit.files import hub

    stop, answers = threading.Event(), []

    def silent(*_: object, **__: object) -> None:
        answers.append(stop.wait(30))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", silent)
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    with raises(UnreachableError, path=Path("some/lines")) as caught:
        load_calibration("some/lines", load_tokenizer(DEMO_MODEL), samples=1, length=8, seed=0)
    assert not answers
    stop.set()
    assert caught.value.retryable
    assert caught.value.exit_code == RequestError.exit_code


@pytest.mark.parametrize(("status", "retryable"), [(503, True), (429, True), (403, False)])
def test_only_a_refusal_that_may_pass_is_worth_another_try(
    status: int, retryable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    class Answer:
        status_code = status

    def refuse(*_: object, **__: object) -> None:
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        error.response = Answer()  # type: ignore[assignment]
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with raises(RequestError, str(status), path=Path("some/lines")) as caught:
        load_calibration("some/lines", load_tokenizer(DEMO_MODEL), samples=1, length=8, seed=0)
    assert isinstance(caught.value, UnreachableError) == caught.value.retryable == retryable


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("allenai/c4", HubId("allenai/c4", None, "train")),
        ("allenai/c4:en", HubId("allenai/c4", "en", "train")),
        ("allenai/c4:en:validation", HubId("allenai/c4", "en", "validation")),
        ("a.b/c-d_e::test", HubId("a.b/c-d_e", None, "test")),
    ],
)
def test_hub_ids_are_read_and_spelled(spelling: str, expected: HubId) -> None:
    assert hub_id(spelling) == expected
    assert str(expected) == spelling


def test_other_spellings_are_files() -> None:
    sources = (
        "c4",
        "texts/wiki.txt",
        "texts/wiki.parquet",
        "texts/wiki.JSONL",
        "./texts/wiki",
        "/texts/wiki",
        "a/b/c",
        "a/b:c:d:e",
        "a/b:c/d",
        "",
        Path("allenai/c4"),
    )
    for source in sources:
        assert hub_id(source) is None, source


def test_a_file_goes_before_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id("some/text") is not None
    (tmp_path / "some").mkdir()
    (tmp_path / "some/text").write_text("A file after all.")
    assert hub_id("some/text") is None
