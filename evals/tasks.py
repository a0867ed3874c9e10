"""Tasks of lm-evaluation-harness, on data from the hub or from local files."""

from __future__ import annotations

import bisect
import contextlib
import difflib
import io
import logging
import math
import os
import random
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.evals import optional
from quantkit.evals.texts import articles
from quantkit.files.hub_answers import validate_hub_answers
from quantkit.quality.figures import Estimate

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_SPLIT = "test"
_HUB = "https://huggingface.co"
_HUB_SECONDS = 5
# The harness reads this variable of the environment.
_NO_POOL = "DISABLE_MULTIPROC"
_RESAMPLES = 1000
"""Bootstrap samples for errors without a formula; the harness has one for means."""


@dataclass(frozen=True)
class TaskScore:
    """A model's scores in one task.

    Attributes:
        metric: the one for tables: ``acc_norm`` where the task has it, else its first.
        value: that metric's.
        metrics: all of them, under the harness's names (``acc,none``).
        shots: examples shown before each question; None in a group where they differ.
        documents: questions answered; None for a group.
        error: the value's standard error by the harness; None if there is none.
        errors: those of all metrics that have one, under the metrics' names.
    """

    metric: str
    value: float
    metrics: dict[str, float]
    shots: int | None
    documents: int | None
    error: float | None = None
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def estimate(self) -> Estimate:
        """Combine the value with its standard error."""
        return Estimate(self.value, self.error)


def require_tasks(names: Sequence[str]) -> None:
    """Check that the harness is installed, and knows all tasks. Raises `RequestError` if not; the
    message suggests similar names.
    """
    optional("lm_eval")
    index = _manager().task_index
    for name in names:
        if name in index:
            continue
        similar_names = difflib.get_close_matches(name, index, 3)
        if similar_names:
            hint = f"did you mean {' or '.join(similar_names)}?"
        else:
            hint = "python -m lm_eval ls tasks lists all of them"
        raise RequestError("unknown task", found=name[:60], hint=hint)


@contextlib.contextmanager
def open_tasks(
    names: Sequence[str], data: Path | None, *, progress: Progress = silent
) -> Iterator[list[Any]]:
    """Load tasks by name, with their data, for `run_tasks` within the context.

    Random numbers are seeded as in the harness; the caller's state is restored afterwards.

    Args:
        data: a folder with files named for tasks, ``hellaswag.jsonl`` and the like, in
            the fields that the task expects. Others come from the hub or its cache.

    Raises:
        RequestError: if the harness is not installed, a task is unknown, or its data are missing or
            do not fit it.
    """
    if not names:
        yield []
        return
    require_tasks(names)
    local = _local_files(names, data)
    absent = [name for name in names if name not in local]
    # Checked first, so that a machine without a network fails at once.
    if absent and not _hub_answers():
        hint = Message(
            f"put it in a file {absent[0]}.jsonl, in the folder of ", Option("task_data")
        )
        raise RequestError(
            f"the data of task '{absent[0]}' is not local, and the hub is unreachable", hint=hint
        )
    with tempfile.TemporaryDirectory(prefix="quantkit-tasks-") as scratch, _fix_seeds():
        loaded = []
        for index, name in enumerate(names):
            progress("data of tasks", index, len(names), "tasks")
            loaded += _load(name, local.get(name), scratch)
        yield loaded


def run_tasks(tasks: Sequence[Any], lm: Any) -> dict[str, TaskScore]:
    """Let a model (`harness.as_lm`) answer all questions of the tasks, and score it by task name.
    Raises `RequestError` if the harness fails, as with fewer documents than it needs examples, and
    `NonFiniteError` if the model's logits are NaN or Inf.
    """
    evaluator = optional("lm_eval.evaluator")
    seeds = optional("lm_eval.defaults")
    loaded = _manager().load(list(tasks))
    for task in loaded["tasks"].values():
        # `simple_evaluate` of the harness does the same before it calls `evaluate`.
        task.set_fewshot_seed(seeds.DEFAULT_OTHER_SEED)
        if task.config.num_fewshot is None:
            task.set_config("num_fewshot", 0)
    try:
        with _suppress_output(), _one_process():
            results = evaluator.evaluate(lm, loaded, bootstrap_iters=_RESAMPLES, log_samples=False)
    except QuantkitError:
        raise
    # The harness and a task's own code can raise any type.
    except Exception as error:
        for task in loaded["tasks"].values():
            unusable = _find_unusable_line(task)
            if unusable is not None:
                path, line = unusable
                raise RequestError(
                    f"is not valid data for the task: {error!r}", path=path, found=line
                ) from error
        raise RequestError(f"the harness cannot run these tasks: {error!r}") from error
    values = {**results["results"], **results.get("groups", {})}
    shots = results["n-shot"]
    samples = results["n-samples"]
    scores: dict[str, TaskScore] = {}
    for task in tasks:
        # A group of the harness has a `name` in the place of `task_name`.
        name = task.task_name if hasattr(task, "task_name") else task.name
        scores[name] = _score(values[name], shots.get(name), samples.get(name))
    return scores


def _score(values: Mapping[str, Any], shots: Any, samples: Mapping[str, int] | None) -> TaskScore:
    figures = {}
    for key, value in values.items():
        # Others are texts, such as the task's alias.
        if isinstance(value, float):
            # The floats of numpy are a subclass, and print otherwise than plain ones.
            figures[key] = float(value)
    metrics = {key: value for key, value in figures.items() if "_stderr" not in key}
    errors = {}
    for key in metrics:
        # The error of ``acc,none`` has the key ``acc_stderr,none``: the filter comes last.
        name, comma, filter_name = key.partition(",")
        error = figures.get(f"{name}_stderr{comma}{filter_name}", math.nan)
        if math.isfinite(error):
            errors[key] = error
    # This accuracy is normalized by the answers' lengths, so long answers have no disadvantage.
    metric = next(iter(metrics))
    for key in metrics:
        if key.startswith("acc_norm,"):
            metric = key
            break
    return TaskScore(
        metric=metric.removesuffix(",none"),
        value=metrics[metric],
        metrics=metrics,
        shots=shots if isinstance(shots, int) else None,
        documents=samples["effective"] if samples else None,
        error=errors.get(metric),
        errors=errors,
    )


@cache
def _manager() -> Any:
    # Its index reads the definitions of thousands of tasks, so it is made once.
    return optional("lm_eval.tasks").TaskManager()


def _local_files(names: Sequence[str], data: Path | None) -> dict[str, Path]:
    if data is None:
        return {}
    if not data.is_dir():
        raise RequestError("is not a folder of task data", path=data)
    files = {}
    for name in names:
        for suffix in _READERS:
            path = data / (name + suffix)
            if path.is_file():
                files[name] = path
                break
    return files


def _hub_answers() -> bool:
    """Check whether a download can be tried; with the hub declared offline, only its cache is
    read.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "0").upper() in ("1", "TRUE"):
            return True
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT", _HUB), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS):
            return True
    # Even a refusal comes from a server that can be reached.
    except urllib.error.HTTPError as error:
        error.close()
        return True
    # A certificate that is unknown here may be known to the hub's client, which has its own.
    except OSError as error:
        return isinstance(getattr(error, "reason", error), ssl.SSLError)


def _load(name: str, file: Path | None, scratch: str) -> list[Any]:
    """Load a task or group of the harness; for a tag, all its tasks."""
    spec: Any = name
    if file is not None:
        if _manager().task_index[name].kind.name != "TASK":
            raise RequestError(f"'{name}' is a group; local data requires single tasks", path=file)
        spec = {"group": "local data", "task": [_local_task(name, file, scratch)]}
    try:
        with _suppress_output(), validate_hub_answers(name):
            loaded = _manager().load([spec])
    except CheckpointError:
        raise
    # The harness, a task's own code and the data's reader can raise any type.
    except Exception as error:
        if file is not None:
            # `datasets` wraps the error of its reader, which says more.
            cause = error.__cause__ or error
            if isinstance(cause, RequestError):
                raise RequestError(
                    cause.problem,
                    path=file,
                    found=cause.found,
                    expected=cause.expected,
                    hint=cause.hint,
                ) from error
            line = _first_bad_line(name, file, scratch)
            raise RequestError(
                f"is not valid data for the task: {cause!r}", path=file, found=line
            ) from error
        hint = Message(f"put it in a file {name}.jsonl, in the folder of ", Option("task_data"))
        raise RequestError(
            f"the data of task '{name}' cannot be loaded: {error!r}", hint=hint
        ) from error
    if name in loaded.get("groups", {}):
        return [loaded["groups"][name]]
    return list(loaded["tasks"].values())


def _local_task(name: str, file: Path, scratch: str) -> dict[str, Any]:
    """Configure a task of the harness that takes its data from one file instead."""
    files: dict[str, Any] = {"data_files": {_SPLIT: str(file)}, "cache_dir": scratch}
    # Examples come from the same file: the harness leaves out the question itself.
    splits = {
        "training_split": None,
        "validation_split": None,
        "test_split": _SPLIT,
        "fewshot_split": _SPLIT,
    }
    task = {"task": name, "dataset_path": _READERS[file.suffix], "dataset_name": None, **splits}
    if name == "wikitext" and file.suffix == ".txt":
        # By default, each line would be a row; an article has many lines.
        return {
            **task,
            "dataset_kwargs": {**files, "sample_by": "document"},
            "process_docs": _pages,
        }
    return {**task, "dataset_kwargs": files}


def _first_bad_line(name: str, file: Path, scratch: str) -> str | None:
    """Find the first line of a file that its task cannot load, by bisection; None if no single line
    is the cause.
    """
    if file.suffix != ".jsonl":
        return None
    # Bytes, since a line need not be valid UTF-8.
    lines = file.read_bytes().split(b"\n")

    def loads(start: int, end: int) -> bool:
        part = Path(scratch) / f"{name}-{start}-{end}.jsonl"
        part.write_bytes(b"\n".join(lines[start:end]))
        task = _local_task(name, part, scratch)
        try:
            with _suppress_output():
                _manager().load([{"group": "local data", "task": [task]}])
        # Any type, as in `_load`.
        except Exception:
            return False
        return True

    # A file of the first lines fails from the bad line on, which makes the results sorted.
    counts = range(1, len(lines))
    bad_line = 1 + bisect.bisect_left(counts, True, key=lambda count: not loads(0, count))
    # Lines can also contradict each other, for example in the types of their fields.
    if loads(bad_line - 1, bad_line):
        return None
    return f"line {bad_line}"


def _find_unusable_line(task: Any) -> tuple[Path, str] | None:
    """Find the first line of a task's file that does not form a question."""
    files = (task.config.dataset_kwargs or {}).get("data_files", {})
    if not str(files.get(_SPLIT, "")).endswith(".jsonl"):
        return None
    make_parts = [task.doc_to_text]
    # The methods of settings that a task does not have would fail for every document.
    if task.config.doc_to_choice is not None:
        make_parts.append(task.doc_to_choice)
    if task.config.doc_to_target is not None:
        make_parts.append(task.doc_to_target)
    for number, document in enumerate(task.eval_docs, 1):
        try:
            for make_part in make_parts:
                make_part(document)
        # A task's own code can raise any type.
        except Exception:
            return Path(files[_SPLIT]), f"line {number}"
    return None


def _pages(data: Any) -> Any:
    pages = []
    for row in data:
        for page in articles(row["text"]):
            # The field that the harness's task reads.
            pages.append({"page": page})
    return optional("datasets").Dataset.from_list(pages)


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress warnings and progress bars of the harness and of `datasets`, and its errors about
    bad files.
    """
    with contextlib.ExitStack() as undo:
        for name, level in (("lm_eval", logging.ERROR), ("datasets", logging.CRITICAL)):
            logger = logging.getLogger(name)
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        # Progress bars are written to stderr.
        undo.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Let the harness compute bootstrap errors in this process, without output on stdout."""
    previous_value = os.environ.get(_NO_POOL)
    os.environ[_NO_POOL] = "1"
    try:
        # stdout may be for the JSON of a command.
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if previous_value is None:
            del os.environ[_NO_POOL]
        else:
            os.environ[_NO_POOL] = previous_value


@contextlib.contextmanager
def _fix_seeds() -> Iterator[None]:
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    seeds = optional("lm_eval.defaults")
    random.seed(seeds.DEFAULT_RANDOM_SEED)
    np.random.seed(seeds.DEFAULT_OTHER_SEED)
    try:
        # No devices: only the state of the CPU's generator is saved, and no GPU is initialized.
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
