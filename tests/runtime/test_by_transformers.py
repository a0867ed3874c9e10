"""Text by a model that transformers runs: the tokens of transformers' own `generate`, with our
options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run

import quantkit
from quantkit.cli.generate_args import GenerateArgs
from quantkit.cli.prompts import show_continuation
from quantkit.errors import NonFiniteError, RequestError
from quantkit.jobs.inference.load import load_by_transformers
from quantkit.model import device
from quantkit.runtime import by_transformers
from quantkit.text.tokenizer import load_tokenizer

PROMPT = "My fellow citizens"
GENERATE = ("--backend", "transformers", "--max-new-tokens", "8")


def _by_transformers(folder: Path, ids: list[int], **options: Any) -> list[int]:
    """The new tokens of transformers itself."""
    model = oracle.load(folder)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": -1,
        "pad_token_id": 0,
        **options,
    }
    found = model.generate(torch.tensor([ids]), **options)
    return list(found[0, len(ids) :].tolist())


@pytest.mark.slow
def test_tokens_are_those_of_transformers(hybrid: Path, hybrid_int4: Path) -> None:
    for folder in (hybrid, hybrid_int4):
        model, tokenizer = load_by_transformers(folder)
        ids = tokenizer.encode(PROMPT)
        expected = _by_transformers(folder, ids)
        assert list(model.generate(ids, max_new_tokens=8)) == expected
        penalized = _by_transformers(folder, ids, repetition_penalty=3.0)
        assert list(model.generate(ids, max_new_tokens=8, repetition_penalty=3.0)) == penalized
        other = list(model.generate(ids, max_new_tokens=8, logit_bias={expected[0]: -100.0}))
        assert other[0] != expected[0]


@pytest.mark.slow
def test_tokens_are_drawn_by_seed(hybrid: Path) -> None:
    model, tokenizer = load_by_transformers(hybrid)
    drawn = [
        list(model.generate(tokenizer.encode(PROMPT), temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 100


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_text_ends_at_an_end_token(file: str, hybrid: Path, tmp_path: Path) -> None:
    model, tokenizer = load_by_transformers(hybrid)
    ids = tokenizer.encode(PROMPT)
    tokens = list(model.generate(ids, max_new_tokens=8))
    end = next(index for index, token in enumerate(tokens) if index and token not in tokens[:index])
    copy = oracle.copy(hybrid, tmp_path / "copy")
    stated = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**stated, "eos_token_id": [2, tokens[end]]}))
    again, _ = load_by_transformers(copy)
    assert list(again.generate(ids, max_new_tokens=8)) == tokens[:end]


@pytest.mark.slow
def test_the_command_prints_what_a_known_family_generates(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    folder = quantkit.quantize(demo_model, tmp_path / "int4", "int4-g32", method="rtn").path
    ours = run(
        capfd,
        "generate",
        folder,
        PROMPT,
        "--max-new-tokens",
        "8",
        "--dtype",
        "fp32",
        "--backend",
        "reference",
    )
    assert run(capfd, "generate", folder, PROMPT, *GENERATE) == ours
    assert ours[0] == 0
    stopped = run(capfd, "generate", folder, PROMPT, *GENERATE, "--stop", ours[1][len(PROMPT) + 2])
    assert stopped[1] == f"{ours[1][: len(PROMPT) + 2]}\n"


def test_a_long_prompt_is_cut_behind_its_bos(
    hybrid: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "word " * 400
    assert run(capfd, "generate", hybrid, prompt, *GENERATE)[0] == 2
    read: list[list[int]] = []

    def generated(self: object, ids: list[int], **options: object) -> Iterator[int]:
        read.append(ids)
        return iter(())

    monkeypatch.setattr(by_transformers.TransformersModel, "generate", generated)
    assert run(capfd, "generate", hybrid, prompt, *GENERATE, "--truncate")[:2] == (0, f"{prompt}\n")
    ids = load_tokenizer(hybrid).encode(prompt)
    assert read == [[ids[0], *ids[len(ids) - (320 - 8) + 1 :]]]


@pytest.mark.parametrize(
    "options",
    [
        ["--int8-cache"],
        ["--compile"],
        ["--eager"],
        ["--warmup"],
        ["--allow-slow"],
        ["--device", "cpu"],
        ["--dtype", "fp32"],
        ["-n", "2"],
        ["--draft", "DRAFT"],
    ],
    ids=lambda options: options[0],
)
def test_other_options_are_refused_by_name(
    options: list[str], hybrid: Path, capfd: Capture
) -> None:
    words = [str(hybrid) if word == "DRAFT" else word for word in options]
    code, out, err = run(capfd, "generate", hybrid, PROMPT, *GENERATE, *words)
    assert (code, out) == (2, "")
    assert f"{'--n' if options[0] == '-n' else options[0]}" in err
    assert "combined with --backend transformers" in " ".join(err.split())


def test_files_of_prompts_are_refused(hybrid: Path, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    given = ("--prompts", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    code, _, err = run(capfd, "generate", hybrid, *given, *GENERATE)
    assert code == 2
    assert "--prompts" in err


def test_several_processes_are_refused(hybrid: Path) -> None:
    group: Any = SimpleNamespace(size=2)
    with pytest.raises(
        RequestError, match="several processes cannot share a model that transformers runs"
    ):
        show_continuation(GenerateArgs(hybrid, PROMPT, backend="transformers"), group)


def test_what_does_not_fit_in_memory_is_refused(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 10**6)
    with pytest.raises(
        RequestError,
        match=r"does not fit in memory as float32 \(found 1.78 MB, expected at most 1 MB\)",
    ):
        load_by_transformers(hybrid)


def test_logits_that_are_no_numbers_are_an_error(hybrid: Path) -> None:
    model, tokenizer = load_by_transformers(hybrid)
    with torch.no_grad():
        model._lazy.model.lm_head.weight[5] = torch.nan
    with pytest.raises(NonFiniteError):
        list(model.generate(tokenizer.encode(PROMPT)))


def test_a_model_whose_code_fails_is_named(hybrid: Path) -> None:
    model, tokenizer = load_by_transformers(hybrid)
    del model._lazy.model.model.final_layernorm
    with pytest.raises(quantkit.errors.UnsupportedError, match=r"jamba: the model's code fails \("):
        list(model.generate(tokenizer.encode(PROMPT)))
