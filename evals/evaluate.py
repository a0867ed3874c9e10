"""Measure models side by side: perplexity, distance from a reference, tasks, speed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.data.files import EXCERPT, excerpt
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import CheckpointError, RequestError
from quantkit.evals.cache import StateCache
from quantkit.evals.harness import as_lm
from quantkit.evals.models import Model, Stream, fixed_window, open_models, streams
from quantkit.evals.results import Evaluation, Row, TextFacts, TextMeasures
from quantkit.evals.rolling import score_documents
from quantkit.evals.tasks import TaskScore, open_tasks, run_tasks
from quantkit.evals.texts import Text, prefix_token, read_text, token_ids
from quantkit.evals.timing import Speed, decoding_speed
from quantkit.formats import manifest
from quantkit.jobs.inspect import inspect
from quantkit.model.device import usable_device
from quantkit.model.layerwise import layerwise_hidden
from quantkit.progress import Progress, in_phase, silent
from quantkit.quality.measures import Divergence, Hidden, compare, token_perplexity


def evaluate(
    paths: str | Path | Sequence[str | Path],
    *,
    texts: str | Path | Sequence[str | Path] = (),
    tasks: str | Sequence[str] = (),
    task_data: str | Path | None = None,
    against: str | Path | None = None,
    window: int | None = None,
    cache_logits: str | Path | None = None,
    speed: bool = False,
    device: str | torch.device | None = None,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> Evaluation:
    """Measure checkpoints, each by itself and, given a reference, by the distance from it.

    All but `speed` runs in float32, and perplexity and divergence on the CPU. With neither texts nor tasks, the
    excerpt that ships with quantkit is the text.

    Args:
        paths: a Meta or Hugging Face folder, or several.
        texts: a file of UTF-8, or several.
        tasks: a name of lm-evaluation-harness, or several.
        task_data: a folder with tasks' data, see `open_tasks`.
        against: the reference's folder.
        window: tokens of a window; by default a model's context, at most `FIXED_WINDOW`
            for fixed and `ROLLING_WINDOW` for rolling windows.
        cache_logits: a folder that keeps what the reference's logits follow from.
        speed: also let each model generate.
        device: where tasks are answered and speed is measured, as torch spells it; None is a GPU if there is one,
            or the CPU for a group.
        group: the processes that share the models; all call this alike and get the same.
        progress: told of every layer and question.

    Returns:
        The figures of each model, in the order of `paths` and after the reference's; `to_json()` has all of them.

    Raises:
        QuantkitError: of the kind that says what is wrong, before a model runs where
            that can be known.

    Example:
        >>> found = quantkit.evaluate("model-int4", against="model", texts="wiki.txt")
        >>> found.rows[1].texts["wiki"].divergence.kl
    """
    folders, files = _several(paths), _several(texts)
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if task_data is not None and not tasks:
        raise RequestError("data of tasks go with tasks, and none are named")
    if cache_logits is not None and against is None:
        raise RequestError("only a reference's logits are kept, and none is given")
    if cache_logits is not None and group.size > 1:
        raise RequestError("a reference's logits are kept by one process alone")
    where = _device(None if device is None else str(device), group, used=bool(tasks) or speed)
    models = open_models(folders, None if against is None else Path(against), window, group)
    chosen, notes = _texts(files, use_excerpt=not tasks)
    group.require_same({f"text {text.name}": text.sha256 for text in chosen})
    length = fixed_window(models, window)
    read = [streams(models, text, length, alike=against is not None) for text in chosen]
    hidden = layerwise_hidden if cache_logits is None else StateCache(Path(cache_logits))
    loaded: contextlib.AbstractContextManager[list[Any]] = (
        open_tasks(tasks, None if task_data is None else Path(task_data), progress=progress)
        if tasks
        else contextlib.nullcontext([])
    )
    measures: list[dict[str, TextMeasures]] = [{} for _ in models]
    with loaded as questions:
        for text, cut in zip(chosen, read, strict=True):
            if against is None:
                found = _alone(models, cut, group, progress)
            else:
                found = _held_against(models, cut, hidden, group, progress)
            for measured, model, stream, (perplexity, apart) in zip(measures, models, cut, found, strict=True):
                documents = score_documents(
                    model.checkpoint, model.tokenizer, text, model.rolling_window, group=group,
                    progress=in_phase(progress, f"{model.name}: word perplexity"),
                )  # fmt: skip
                measured[text.name] = TextMeasures(stream.tokens, documents, perplexity, apart)
        answers = [_ask(model, questions, where, group, progress) if tasks else ({}, []) for model in models]
    prompt = chosen[0].raw if chosen else excerpt()
    paces: list[Speed | None] = [None for _ in models]
    for index, model in enumerate(models if speed else []):
        progress("speed", index, len(models), "models")
        paces[index] = decoding_speed(model.checkpoint, model.tokenizer, prompt, where, group)
    errors, kind = _layer_errors(models[-1].checkpoint.path)
    packages = ("quantkit", "torch", *(["lm_eval"] if tasks else []))
    return Evaluation(
        rows=[_row(*one) for one in zip(models, measures, answers, paces, strict=True)],
        reference=None if against is None else models[0].name,
        texts={text.name: _facts(text) for text in chosen},
        window=length if chosen else None,
        layer_errors=errors,
        layer_error=kind,
        device=where.type,
        versions={name: importlib.metadata.version(name) for name in packages},
        notes=notes,
    )


def _several(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several."""
    return [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]


def _device(name: str | None, group: ProcessGroup, *, used: bool) -> torch.device:
    """Where tasks and speed run.

    Raises:
        RequestError: for a device that nothing would use, that a group cannot share, or that cannot be used.
    """
    if name is not None and name != "cpu" and not used:
        raise RequestError("a device goes with tasks or speed; perplexity is computed on the CPU", found=name)
    if group.size > 1 and name not in (None, "cpu"):
        raise RequestError("processes that share a model measure it on the CPU", found=name)
    return usable_device(name) if used and group.size == 1 else torch.device("cpu")


def _texts(paths: Sequence[Path], *, use_excerpt: bool) -> tuple[list[Text], list[str]]:
    """The texts by names that tell them apart, and what to note about them."""
    texts = [read_text(path) for path in paths]
    if len({text.name for text in texts}) < len(texts):
        texts = [Text(str(path), text.sha256, text.raw) for path, text in zip(paths, texts, strict=True)]
    if texts or not use_excerpt:
        return texts, []
    raw = EXCERPT.read_bytes()
    note = f"No text was given: measured on the excerpt that ships with quantkit, {len(raw)} bytes of speeches."
    return [Text("excerpt", hashlib.sha256(raw).hexdigest(), excerpt())], [note]


_Fixed = list[tuple[float, Divergence | None]]


def _alone(models: Sequence[Model], read: Sequence[Stream], group: ProcessGroup, progress: Progress) -> _Fixed:
    """Each model's token perplexity."""
    found: _Fixed = []
    for model, stream in zip(models, read, strict=True):
        told = in_phase(progress, f"{model.name}: token perplexity")
        found.append((token_perplexity(model.checkpoint, stream.windows, group=group, progress=told), None))
    return found


def _held_against(
    models: Sequence[Model], read: Sequence[Stream], hidden: Hidden, group: ProcessGroup, progress: Progress
) -> _Fixed:
    """Each model's token perplexity and, of all but the first, the divergence from the first."""
    reference, *others = (model.checkpoint for model in models)
    found = compare(
        reference,
        others,
        read[0].windows,
        reference_hidden=hidden,
        group=group,
        progress=in_phase(progress, f"divergence from {models[0].name}"),
    )
    return [(found[0].reference_perplexity, None), *((one.perplexity, one.divergence) for one in found)]


_Answers = tuple[dict[str, TaskScore], list[str]]


def _ask(
    model: Model, questions: Sequence[Any], device: torch.device, group: ProcessGroup, progress: Progress
) -> _Answers:
    """A model's scores in the tasks, and the backends of its quantized layers there."""
    told = in_phase(progress, f"{model.name}: tasks")
    told("tasks", 0, len(questions), "tasks")
    lm = as_lm(model.checkpoint, model.tokenizer, model.rolling_window, device=device, group=group, progress=told)
    return run_tasks(questions, lm), lm.backends


def _row(model: Model, texts: dict[str, TextMeasures], answers: _Answers, speed: Speed | None) -> Row:
    found = inspect(model.checkpoint.path)
    return Row(
        name=model.name,
        megabytes=found.weight_bytes / 1e6,
        bits_per_weight=found.bits_per_weight,
        rolling_window=model.rolling_window,
        prefix=prefix_token(model.tokenizer, model.checkpoint),
        adds_bos=token_ids(model.tokenizer, "a")[0] == model.tokenizer.bos_id,
        texts=texts,
        tasks=answers[0],
        task_backends=answers[1],
        speed=speed,
    )


def _facts(text: Text) -> TextFacts:
    kind = "WikiText, detokenized" if text.is_wikitext else "as it is"
    return TextFacts(text.sha256, kind, len(text.documents), text.words, text.bytes)


def _layer_errors(folder: Path) -> tuple[dict[str, float], str]:
    """The errors that a folder's manifest tells of its quantized layers, worst first, and which they are."""
    try:
        listed = manifest.read(folder).get("modules", {})
    except CheckpointError:
        return {}, ""
    for kind in ("output_error", "relative_error"):
        errors = {name: record[kind] for name, record in listed.items() if record.get(kind) is not None}
        if errors:
            return dict(sorted(errors.items(), key=lambda item: -item[1])), kind
    return {}, ""
