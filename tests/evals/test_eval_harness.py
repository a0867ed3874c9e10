"""quantkit beside lm-evaluation-harness: one checkpoint in its own model class, and in ours
behind its interface.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_parts import raises
from fake_hub import Hostile, hub

import quantkit
from quantkit.data.files import excerpt
from quantkit.errors import CheckpointError, NonFiniteError, RequestError
from quantkit.evals import tasks
from quantkit.evals.harness import as_lm
from quantkit.evals.models import open_models
from quantkit.evals.tasks import open_tasks, run_tasks
from quantkit.evals.texts import measuring_tokenizer, read_text, score_documents
from quantkit.formats.detect import open_checkpoint

pytest.importorskip("lm_eval")
CONTEXT = 256
ENDINGS = [
    "the peace of the world.",
    "a horse, a horse!",
    "of of of of of of",
    "and the Congress will act.",
]


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    target = tmp_path_factory.mktemp("harness") / "mini"
    quantkit.convert(demo_model, target, dtype="fp32")
    return target


@pytest.fixture(scope="module")
def ours(folder: Path) -> Any:
    return as_lm(*open_models([folder], None, CONTEXT))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        return HFLM(str(folder), max_length=CONTEXT, batch_size=1, device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for tasks, in the fields that these want, made from the excerpt."""
    target = tmp_path_factory.mktemp("data")
    lines = [line for line in excerpt().splitlines() if len(line.split()) > 30][:8]
    pages = [
        f" = Speech {i} = \n \n {line.replace(',', ' ,').replace('-', ' @-@ ')} <unk> .\n"
        for i, line in enumerate(lines)
    ]
    (target / "wikitext.txt").write_text("".join(pages))
    requested = [
        {
            "activity_label": "Speaking",
            "ctx_a": " ".join(line.split()[:20]),
            "ctx_b": "we need",
            "endings": ENDINGS,
            "label": str(i % 4),
        }
        for i, line in enumerate(lines)
    ]
    (target / "hellaswag.jsonl").write_text("\n".join(json.dumps(one) for one in requested))
    blanks = [
        {
            "sentence": f"{' '.join(line.split()[:9])} _ of the people.",
            "option1": "peace",
            "option2": "horse",
            "answer": str(i % 2 + 1),
        }
        for i, line in enumerate(lines)
    ]
    (target / "winogrande.json").write_text(json.dumps(blanks))
    return target


@pytest.mark.slow
def test_word_perplexity_is_the_harness_s_to_four_digits(
    folder: Path, ours: Any, theirs: Any, data: Path
) -> None:
    checkpoint = open_checkpoint(folder)
    text = read_text(data / "wikitext.txt")
    alone = score_documents(checkpoint, measuring_tokenizer(checkpoint), text, CONTEXT)
    for lm in (ours, theirs):
        with open_tasks(["wikitext"], data) as loaded:
            found = run_tasks(loaded, lm)["wikitext"]
        assert found.documents == len(text.documents) == 8
        assert found.metrics["word_perplexity,none"] == pytest.approx(
            alone.word_perplexity, rel=1e-5
        )
        assert found.metrics["byte_perplexity,none"] == pytest.approx(
            alone.byte_perplexity, rel=1e-5
        )
        assert found.metrics["bits_per_byte,none"] == pytest.approx(alone.bits_per_byte, rel=1e-5)


@pytest.mark.slow
def test_trequests_with_choices_give_the_same(ours: Any, theirs: Any, data: Path) -> None:
    scores = []
    for lm in (ours, theirs):
        with open_tasks(["hellaswag", "winogrande"], data) as loaded:
            scores.append(run_tasks(loaded, lm))
    assert scores[0] == scores[1]
    assert scores[0]["hellaswag"].metric == "acc_norm"
    assert scores[0]["winogrande"].metric == "acc"
    assert scores[0]["winogrande"].documents == 8
    assert 0 < scores[0]["hellaswag"].value < 1
    share, error = scores[0]["hellaswag"].value, scores[0]["hellaswag"].error
    assert error == pytest.approx((share * (1 - share) / 7) ** 0.5)  # of a mean over 8 questions
    assert (
        set(scores[0]["hellaswag"].errors)
        == set(scores[0]["hellaswag"].metrics)
        == {"acc,none", "acc_norm,none"}
    )


def test_an_error_without_a_formula_is_from_samples_drawn_anew_here(
    ours: Any, tmp_path: Path, capfd: Any
) -> None:
    """The harness would start a process a core for it, and say so on stdout."""
    lines = [line for line in excerpt().splitlines() if len(line.split()) > 30][:6]
    (tmp_path / "lambada_openai.jsonl").write_text(
        "\n".join(json.dumps({"text": " ".join(line.split()[:20])}) for line in lines)
    )
    with open_tasks(["lambada_openai"], tmp_path) as loaded:
        capfd.readouterr()
        found = run_tasks(loaded, ours)["lambada_openai"]
    assert capfd.readouterr().out == ""
    assert found.errors["perplexity,none"] > 0
    assert "DISABLE_MULTIPROC" not in os.environ


def test_log_probabilities_are_the_same(ours: Any, theirs: Any) -> None:
    long = excerpt()[:3000]
    pairs = [
        ("My fellow", " citizens"),
        ("The United", " States of America"),
        ("ends in space ", "and goes on"),
        ("", "Mr. Speaker"),
        (long, " and the world"),
        ("the state of the Union", ","),
    ]
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    mine, wanted = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    for (found, greedy), (expected, theirs_greedy) in zip(mine, wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
        assert greedy == theirs_greedy
    assert {greedy for _, greedy in mine} == {True, False}


def test_generated_texts_are_the_same(ours: Any, theirs: Any) -> None:
    settings = {"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False}
    prompts = ["My fellow citizens, the state of the Union", "We shall", excerpt()[:3000]]
    texts = [
        lm.generate_until(
            [SimpleNamespace(args=(prompt, dict(settings))) for prompt in prompts],
            disable_tqdm=True,
        )
        for lm in (ours, theirs)
    ]
    assert texts[0] == texts[1]
    assert any(texts[0])
    assert not any("." in text for text in texts[0])


def test_progress_moves_within_a_batch(folder: Path) -> None:
    reported: list[tuple[str, int, int, str]] = []
    lm = as_lm(*open_models([folder], None, CONTEXT), progress=lambda *now: reported.append(now))
    lm.loglikelihood(
        [SimpleNamespace(args=("The peace of", f" the {ending}")) for ending in ENDINGS]
    )
    assert list(dict.fromkeys(reported)) == [
        ("tasks", done, len(ENDINGS), "requests") for done in range(len(ENDINGS))
    ]


@pytest.mark.parametrize("pair", [("a", excerpt()), ("The Con", "gress")])
def test_an_answer_without_tokens_or_with_too_many_is_refused(
    ours: Any, pair: tuple[str, str]
) -> None:
    with pytest.raises(RequestError, match="an answer has no tokens, or more"):
        ours.loglikelihood([SimpleNamespace(args=pair)])


def test_logits_that_are_not_finite_are_an_error(folder: Path, data: Path) -> None:
    lm = as_lm(*open_models([folder], None, CONTEXT))
    with torch.no_grad():
        lm._model.model.norm.weight[0] = float("nan")
    with (
        open_tasks(["winogrande"], data) as loaded,
        pytest.raises(NonFiniteError, match="mini: the model's logits"),
    ):
        run_tasks(loaded, lm)


def test_random_numbers_are_the_caller_s_again(ours: Any, data: Path) -> None:
    random.seed(5)
    torch.manual_seed(5)
    expected = (
        random.Random(5).random(),
        torch.rand(1, generator=torch.Generator().manual_seed(5)).item(),
    )
    with open_tasks(["winogrande"], data) as loaded:
        run_tasks(loaded, ours)
    assert (random.random(), torch.rand(1).item()) == expected


def test_what_a_task_cannot_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "winogrande.jsonl").write_text('{"question": "What?"}\n')
    with (
        pytest.raises(RequestError, match=r"winogrande\.jsonl: is not valid data for the task"),
        open_tasks(["winogrande"], tmp_path),
    ):
        pass
    (tmp_path / "mmlu.jsonl").write_text('{"question": "What?"}\n')
    with pytest.raises(RequestError, match="'mmlu' is a group"), open_tasks(["mmlu"], tmp_path):
        pass
    with pytest.raises(RequestError, match="not a folder"), open_tasks(["mmlu"], tmp_path / "none"):
        pass


@pytest.mark.parametrize("text", ["", "No title.\n"])
def test_a_text_that_is_not_wikitext_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wikitext.txt"
    path.write_text(text)
    with raises(RequestError, path=path) as caught, open_tasks(["wikitext"], tmp_path):
        pass
    assert caught.value.expected


@pytest.mark.parametrize(
    ("task", "bad"),
    [
        ("hellaswag", {"label": "x"}),
        ("hellaswag", None),
        ("hellaswag", {"ctx_b": None}),
        ("winogrande", {"answer": "3"}),
        ("winogrande", {"sentence": "no gap"}),
    ],
)
def test_a_line_that_a_task_cannot_use_is_reported(
    task: str, bad: dict[str, Any] | None, ours: Any, tmp_path: Path, capfd: Any
) -> None:
    """Whether it fails when it is read, when the task takes it in, or when it is asked."""
    good = (
        {
            "activity_label": "Speaking",
            "ctx_a": "We",
            "ctx_b": "need",
            "endings": ENDINGS,
            "label": "1",
        }
        if task == "hellaswag"
        else {"sentence": "The _ is here.", "option1": "peace", "option2": "horse", "answer": "1"}
    )
    lines = [json.dumps(good)] * 7
    lines[4] = "{torn" if bad is None else json.dumps({**good, **bad})
    (tmp_path / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    capfd.readouterr()
    with (
        pytest.raises(
            RequestError,
            match=rf"{task}\.jsonl: is not valid data for the task: .*\(found line 5\)",
        ),
        open_tasks([task], tmp_path) as loaded,
    ):
        run_tasks(loaded, ours)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_task_is_named_with_those_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_hub_answers", lambda: True)
    with (
        pytest.raises(
            RequestError, match=r"unknown task \(found helaswag\); did you mean hellaswag.*\?$"
        ),
        open_tasks(["helaswag"], None),
    ):
        pass


def test_a_hub_that_writes_outside_its_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the threads that `datasets` downloads with."""
    from huggingface_hub import hf_hub_download

    home = tmp_path / "a" / "b"
    climbs = Hostile(headers=lambda path, headers: {**headers, "ETag": '"../../../../evil"'})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with hub({"some/data": {"a.json": b"{}"}}, hostile={"some/data": climbs}) as (address, _):

        def load(_: object) -> dict[str, Any]:
            options = {"repo_type": "dataset", "cache_dir": home, "endpoint": address}
            with ThreadPoolExecutor(1) as threads:
                threads.submit(hf_hub_download, "some/data", "a.json", **options).result()
            return {"tasks": {}}

        monkeypatch.setattr(
            tasks, "_manager", lambda: SimpleNamespace(task_index={"some": None}, load=load)
        )
        monkeypatch.setattr(tasks, "_hub_answers", lambda: True)
        with (
            pytest.raises(CheckpointError, match="an ETag that is not the name"),
            open_tasks(["some"], None),
        ):
            pass
    assert list(tmp_path.rglob("*evil*")) == []
