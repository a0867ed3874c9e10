"""What a folder's generation_config.json says of end tokens and sampling."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import torch
from virtual_devices import environment, require_torchax

import quantkit
from quantkit.errors import CheckpointError
from quantkit.runtime.sampling import compute_probabilities
from quantkit.runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def plain(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generation") / "hf"
    quantkit.convert(demo_model, path, source_check=False)
    return path


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return oracle.copy(plain, tmp_path / "hf")


def _say(folder: Path, **settings: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))


def test_a_text_ends_at_the_tokens_of_either_file(folder: Path) -> None:
    model, tokenizer = quantkit.load(folder)
    ids = tokenizer.encode("The people of the United States")
    whole = list(quantkit.generate(model, ids, max_new_tokens=20))
    end = next(
        token for place, token in enumerate(whole) if place > 2 and token not in whole[:place]
    )
    _say(folder, eos_token_id=[5, end])
    again, _ = quantkit.load(folder)
    assert again.config.eos_token_ids == (*model.config.eos_token_ids, 5, end)
    assert list(quantkit.generate(again, ids, max_new_tokens=20)) == whole[: whole.index(end)]
    (batched,) = quantkit.generate_batch(again, [ids], max_new_tokens=20)
    assert (batched.token_ids, batched.finish_reason) == (whole[: whole.index(end)], "stop")


@pytest.mark.slow
def test_a_text_on_devices_ends_at_the_tokens_of_either_file(folder: Path, tmp_path: Path) -> None:
    require_torchax()
    _say(folder, eos_token_id=[5, 7])
    code = (
        "import sys\nfrom quantkit.jobs.inference.load import load_xla\n"
        "print(*load_xla(sys.argv[1], devices=1)[0].config.eos_token_ids)"
    )
    found = subprocess.run(
        forked.command("-c", code, folder),
        env=environment(1, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert {5, 7} < set(map(int, found.stdout.split())), found.stderr


def test_what_is_written_keeps_what_each_file_says(folder: Path, tmp_path: Path) -> None:
    _say(folder, eos_token_id=[2, 9], do_sample=True)
    quantkit.convert(folder, tmp_path / "out", source_check=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())[
        "eos_token_id"
    ] == [2, 9]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.95,
                "top_k": 20,
                "min_p": 0,
                "repetition_penalty": None,
            },
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
        ),
        (
            {"do_sample": True, "top_k": -1, "top_p": 1},
            {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        ),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        ({"do_sample": True, "top_k": 50.0}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_p": 0}, {"temperature": 1.0, "top_p": 1e-9}),
    ],
)
def test_sampling_is_what_the_file_says(
    settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    _say(tmp_path, **settings)
    assert quantkit.sampling_defaults(tmp_path) == expected


def test_no_share_of_the_probabilities_is_the_likeliest_token(tmp_path: Path) -> None:
    _say(tmp_path, do_sample=True, temperature=5.0, top_p=0)
    params = SamplingParams(seed=1, **quantkit.sampling_defaults(tmp_path))
    logits = torch.tensor([[1.0, 3.0, 2.999, 0.0]])
    assert compute_probabilities(logits, params).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_a_folder_without_the_file_is_greedy(tmp_path: Path) -> None:
    assert quantkit.sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"do_sample": "yes"}, "wrong type for 'do_sample'"),
        ({"do_sample": True, "temperature": "hot"}, "wrong type for 'temperature'"),
        ({"do_sample": True, "temperature": -1}, "'temperature' is out of range"),
        ({"do_sample": True, "top_k": 2.5}, "wrong type for 'top_k'"),
        ({"do_sample": True, "top_p": 1.5}, "'top_p' is out of range"),
        ({"do_sample": True, "top_k": -2}, "'top_k' is out of range"),
        ({"do_sample": True, "top_k": True}, "wrong type for 'top_k'"),
        ({"repetition_penalty": 0}, "repetition_penalty must lie in"),
        ({"num_beams": True}, "wrong type for 'num_beams'"),
        ({"repetition_penalty": float("inf")}, "not finite"),
    ],
)
def test_a_value_that_makes_no_sense_names_the_file(
    settings: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    _say(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{reported}"):
        quantkit.sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("ends", "reported"),
    [
        ("2", "wrong type"),
        ([2, -1], "wrong type"),
        ([2, True], "wrong type"),
        (10**6, "vocabulary"),
    ],
)
def test_end_tokens_that_are_none_are_refused(ends: Any, reported: str, folder: Path) -> None:
    _say(folder, eos_token_id=ends)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{reported}"):
        quantkit.load(folder)


def test_beams_are_noted_and_not_searched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _say(tmp_path, num_beams=4)
    with caplog.at_level(logging.INFO, logger="quantkit"):
        assert quantkit.sampling_defaults(tmp_path) == {}
    assert "requests beam search, which is not supported" in caplog.text


def test_settings_that_quantkit_does_not_apply_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _say(
        tmp_path,
        suppress_tokens=[5],
        bad_words_ids=[[6]],
        max_length=64,
        typical_p=1.0,
        no_repeat_ngram_size=0,
    )
    with caplog.at_level(logging.INFO, logger="quantkit"):
        assert quantkit.sampling_defaults(tmp_path) == {}
    (note,) = [record.getMessage() for record in caplog.records]
    assert "bad_words_ids, suppress_tokens" in note
    assert "max_length" not in note
    assert "typical_p" not in note
