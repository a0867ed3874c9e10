"""Measure models side by side: perplexity, divergence from a reference, tasks, speed."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.base.arguments import (
    as_integer,
    as_path,
    as_paths,
    as_string,
    as_strings,
    is_several,
    require_flags,
    require_instance,
)
from quantkit.base.progress import Progress, in_phase, skip_repeated_reports
from quantkit.calibration.conversations import ModelChat, model_chat
from quantkit.calibration.documents import TextSource
from quantkit.data.files import EXCERPT, excerpt
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals.harness import as_lm
from quantkit.evals.models import FIXED_WINDOW, Model, StateCache, open_models, streams
from quantkit.evals.results import Evaluation, Row, TextFacts, TextMeasures
from quantkit.evals.samples import Predictions, TextDetails, text_details
from quantkit.evals.table import short_names
from quantkit.evals.tasks import TaskScore, open_tasks, require_tasks, run_tasks
from quantkit.evals.texts import Text, prefix_token, read_text, score_documents, token_ids
from quantkit.evals.timing import Speed, decoding_speed
from quantkit.jobs.inspect import inspect
from quantkit.kernels.dispatch import list_allowed_backends
from quantkit.model.device import usable_device
from quantkit.model.load import choose_default_dtype, require_kernels
from quantkit.quality.figures import Estimate, layer_errors, method_of
from quantkit.quality.measures import Divergence, Hidden, Listener, compare, perplexity_estimates
from quantkit.quality.position_divergence import divergence_by_position, position_windows
from quantkit.quality.positions import PositionDivergence
from quantkit.text.tokenizer import prompt_start
from quantkit.via_transformers import VIAS, Via, require_no_code
from quantkit.via_transformers.forward import final_hidden


def evaluate(
    paths: str | Path | Sequence[str | Path],
    *,
    texts: str | Path | Sequence[str | Path] | Mapping[str, TextSource] = (),
    text_column: str | None = None,
    tasks: str | Sequence[str] = (),
    task_data: str | Path | None = None,
    against: str | Path | None = None,
    window: int | None = None,
    positions: int | None = None,
    position_windows: int | None = None,
    cache_logits: str | Path | None = None,
    speed: bool = False,
    details: bool = False,
    backend: Via | None = None,
    trust_remote_code: bool = False,
    device: str | torch.device | None = None,
    allow_slow: bool = False,
    group: ProcessGroup = SINGLE,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure checkpoints, each by itself and, if there is a reference, by the divergence from it.

    All but `speed` runs in float32, and perplexity and divergence on the CPU. With neither texts
    nor tasks, the excerpt that ships with quantkit is the text.

    Args:
        paths: a Meta or Hugging Face folder, or several; ``NAME=PATH`` gives one a name in the
            tables.
        texts: a file of UTF-8, JSON lines or Parquet, a folder that ``Dataset.save_to_disk`` wrote,
            or several. Conversations are rendered through the chat template of the reference, or of
            the first model. The result calls each by its name without the suffix (``wiki`` for
            ``data/wiki.txt``) or, if two would be called the same, all by the shortest distinct
            ends of their paths (``a/wiki.txt`` and ``b/wiki.txt``). Or a mapping of names to texts,
            of which each is a path, a ``datasets.Dataset`` or ``IterableDataset``, or an iterable
            of strings or rows: ``{"notes": ["a string", ...]}``.
        text_column: the column or key of the texts, as in `quantize`.
        tasks: a name of lm-evaluation-harness, or several.
        task_data: a folder with tasks' data: TASK.jsonl, .json, .parquet or .txt.
        against: the reference's folder, or ``NAME=PATH``.
        window: tokens of a window; by default a model's context, at most 2048 for fixed and 8192
            for rolling windows.
        positions: also measure the divergence from the reference by position, in windows of this
            many tokens, with keys and values in a float and in an int8 cache; a text, or context,
            that is shorter is measured to its end.
        position_windows: how many of each text, at most; by default as many as hold 32768 tokens,
            and one at least.
        cache_logits: a folder that keeps the reference's final hidden states, from which its logits
            are computed.
        speed: also let each model generate.
        details: also keep stretches of the texts with the tokens that models expect there, for
            `to_html()`; they need a reference.
        backend: what runs the models: ``own`` or ``transformers``. None is own where the family is
            known, or else transformers, if it is installed and knows the architecture. It computes
            perplexity and divergence only, in one process.
        trust_remote_code: where transformers runs a model, run the code in its folder that
            config.json's ``auto_map`` names.
        device: where tasks are answered and speed is measured, as torch spells it; None is a GPU if
            there is one, or the CPU for a group.
        allow_slow: for tasks and speed, as for `quantkit.load`.
        group: the processes that share the models; all make the same call and get the same result.
        progress: called for every layer and question; None reports nothing.

    Returns:
        The figures of each model, in the order of `paths` and after the reference's; `to_json()`
        has all of them.

    Raises:
        QuantkitError: for invalid arguments or models, before a model runs where possible.

    Example:
        >>> found = quantkit.evaluate("model-int4", against="model", texts="wiki.txt")
        >>> found.rows[1].texts["wiki"].divergence.kl
    """
    folders = as_paths("paths", paths)
    files = _sources(texts)
    tasks = as_strings("tasks", tasks)
    if not folders:
        raise RequestError("there is no model to measure: `paths` is empty")
    if against is None:
        against = None
    else:
        against = as_path("against", against)
    if task_data is None:
        data = None
    else:
        data = as_path("task_data", task_data)
    if cache_logits is None:
        kept = None
    else:
        kept = as_path("cache_logits", cache_logits)
    if window is None:
        window = None
    else:
        window = as_integer("window", window)
    if text_column is not None:
        as_string("text_column", text_column)
        if not files:
            raise RequestError("`text_column` goes with `texts`")
    require_flags(
        speed=speed, details=details, allow_slow=allow_slow, trust_remote_code=trust_remote_code
    )
    require_instance("group", group, ProcessGroup, "a ProcessGroup")
    progress = skip_repeated_reports(progress)
    by_positions = _validate_positions(positions, position_windows, against=against is not None)
    if data is not None and not tasks:
        raise RequestError("task data needs tasks, and none are named")
    if kept is not None and against is None:
        raise RequestError("only the logits of a reference are cached, and no reference is given")
    if kept is not None and group.size > 1:
        raise RequestError("several processes cannot cache the logits of a reference")
    where = _device(None if device is None else str(device), group, used=bool(tasks) or speed)
    if tasks:
        require_tasks(tasks)
    if backend is not None and as_string("backend", backend) not in VIAS:
        raise RequestError("unknown value of `backend`", found=backend, expected=" or ".join(VIAS))
    if backend == "own":
        require_no_code(trust_remote_code, '`backend="own"`')
    models = open_models(
        folders, against, window, group, backend, trust_remote_code=trust_remote_code
    )
    by_others = [model for model in models if model.checkpoint.config.run_by is not None]
    for name, value in (("tasks", tasks), ("speed", speed), ("positions", by_positions)):
        if value and by_others:
            path = by_others[0].checkpoint.path
            run_by = by_others[0].checkpoint.config.run_by
            raise RequestError(
                f"`{name}` needs a model that quantkit runs itself",
                path=path,
                found=f"run by {run_by}",
            )
    for checkpoint in (model.checkpoint for model in models):
        dtypes = [
            *([torch.float32] if tasks else []),
            *([choose_default_dtype(checkpoint)] if speed else []),
        ]
        for dtype in dtypes:
            require_kernels(checkpoint, where, dtype, list_allowed_backends(allow_slow=allow_slow))
    chat = partial(model_chat, models[0].checkpoint.path, models[0].tokenizer)
    chosen = _texts(files, text_column, chat, use_excerpt=not tasks)
    notes = [f"{model.name}: run by {model.checkpoint.config.run_by}" for model in by_others]
    notes += [note for model in by_others for note in model.checkpoint.notes]
    notes += [note for text in chosen for note in text.notes]
    notes += [text.note for text in chosen if text.note is not None]
    group.require_same({f"text {text.name}": text.sha256 for text in chosen})
    length = window or min(FIXED_WINDOW, *(model.checkpoint.config.max_context for model in models))
    read = [streams(models, text, length, same_tokens=against is not None) for text in chosen]
    if kept is None:
        hidden: Hidden = final_hidden
    else:
        hidden = StateCache(kept)
    measures: list[dict[str, TextMeasures]] = [{} for _ in models]
    closer: dict[str, TextDetails] = {}
    with open_tasks(tasks, data, progress=progress) as questions:
        for text, cut in zip(chosen, read, strict=True):
            if details and against is not None:
                listeners = {model.name: Predictions() for model in models[1:]}
            else:
                listeners = {}
            states = None if against is None else hidden
            windows = [own for _, own in cut]
            found = _over_fixed_windows(
                models, windows, states, list(listeners.values()), group, progress
            )
            if listeners:
                closer[text.name] = text_details(listeners, windows[0], models[0].tokenizer)
            buckets, more = _by_position(models, text, by_positions, hidden, group, progress)
            notes += more
            for measured, model, (tokens, _), figures, bucket in zip(
                measures, models, cut, found, buckets, strict=True
            ):
                perplexity, divergence, ratio_error = figures
                documents = score_documents(
                    model.checkpoint,
                    model.tokenizer,
                    text,
                    model.rolling_window,
                    group=group,
                    progress=in_phase(progress, f"{model.name}: word perplexity"),
                )
                measured[text.name] = TextMeasures(
                    tokens,
                    documents,
                    perplexity.value,
                    divergence,
                    perplexity.error,
                    ratio_error,
                    bucket,
                )
        placed = where, allow_slow, group
        answers = [
            _answers(model, questions, *placed, progress) if tasks else ({}, []) for model in models
        ]
    paces: list[Speed | None] = [None for _ in models]
    for index, model in enumerate(models if speed else []):
        progress("speed", index, len(models), "models")
        paces[index] = decoding_speed(model.checkpoint, *placed)
    errors, kind = layer_errors([model.checkpoint.path for model in models])
    packages = (
        "quantkit",
        "torch",
        *(["lm_eval"] if tasks else []),
        *(["transformers"] if by_others else []),
    )
    return Evaluation(
        rows=[_row(*one) for one in zip(models, measures, answers, paces, errors, strict=True)],
        reference=None if against is None else models[0].name,
        texts={text.name: _facts(text) for text in chosen},
        window=length if chosen else None,
        layer_error=kind,
        device=where.type,
        versions={name: importlib.metadata.version(name) for name in packages},
        notes=notes,
        details=closer,
    )


def _facts(text: Text) -> TextFacts:
    return TextFacts(
        text.sha256, text.is_wikitext, text.in_template, len(text.documents), text.words, text.bytes
    )


def _device(name: str | None, group: ProcessGroup, *, used: bool) -> torch.device:
    """Return the device for tasks and speed."""
    if name is not None and name != "cpu" and not used:
        raise RequestError(
            "a device goes with tasks or speed; perplexity is computed on the CPU", found=name
        )
    if group.size > 1 and name not in (None, "cpu"):
        raise RequestError("processes that share a model measure it on the CPU", found=name)
    if used and group.size == 1:
        return usable_device(name)
    return torch.device("cpu")


_Sources = list[Path] | dict[str, Path | Iterable[object]]


def _sources(texts: object) -> _Sources:
    """Return the paths of the texts, or the texts by name."""
    hint = 'strings and datasets need a name: {"name": ["..."]}'
    if not isinstance(texts, Mapping):
        return as_paths("texts", texts, hint=hint)
    result: dict[str, Path | Iterable[object]] = {}
    for name, text in texts.items():
        documents = is_several(text) and not isinstance(text, str)
        result[as_string("texts", name)] = (
            text if documents else as_path("texts", text, hint="text goes in a list")
        )
    return result


def _texts(
    sources: _Sources, column: str | None, chat: ModelChat, *, use_excerpt: bool
) -> list[Text]:
    """Return the texts by distinct names."""
    if isinstance(sources, dict):
        texts = [read_text(source, column, chat, name) for name, source in sources.items()]
    else:
        texts = [read_text(path, column, chat) for path in sources]
    if not isinstance(sources, dict) and len({text.name for text in texts}) < len(texts):
        names = short_names(sources)
        if twice := [name for index, name in enumerate(names) if name in names[:index]]:
            raise RequestError("the same text is given twice", found=twice[0])
        texts = [replace(text, name=name) for name, text in zip(names, texts, strict=True)]
    if texts or not use_excerpt:
        return texts
    raw = EXCERPT.read_bytes()
    note = (
        f"No text was given: measured on the excerpt that ships with quantkit, {len(raw)} bytes of"
        " speeches."
    )
    return [Text("excerpt", hashlib.sha256(raw).hexdigest(), excerpt(), notes=(note,))]


def _over_fixed_windows(
    models: Sequence[Model],
    windows: Sequence[Tensor],
    hidden: Hidden | None,
    listeners: Sequence[Listener],
    group: ProcessGroup,
    progress: Progress,
) -> list[tuple[Estimate, Divergence | None, float | None]]:
    """Return each model's token perplexity; with `hidden`, of all but the first also the divergence
    from the first, and the error of the ratio of perplexities.
    """
    if hidden is None:
        alone = []
        for model, window in zip(models, windows, strict=True):
            report = in_phase(progress, f"{model.name}: token perplexity")
            alone += perplexity_estimates(model.checkpoint, [window], group=group, progress=report)
        return [(one, None, None) for one in alone]
    reference, *others = (model.checkpoint for model in models)
    found = compare(
        reference,
        others,
        windows[0],
        reference_hidden=hidden,
        listeners=listeners,
        group=group,
        progress=in_phase(progress, f"divergence from {models[0].name}"),
    )
    first = Estimate(found[0].reference_perplexity, found[0].reference_perplexity_error)
    rest = (
        (Estimate(one.perplexity, one.perplexity_error), one.divergence, one.ratio_error)
        for one in found
    )
    return [(first, None, None), *rest]


_Answers = tuple[dict[str, TaskScore], list[str]]


def _answers(
    model: Model,
    questions: Sequence[Any],
    device: torch.device,
    allow_slow: bool,
    group: ProcessGroup,
    progress: Progress,
) -> _Answers:
    """Return a model's scores in the tasks, and the backends of its quantized layers there; frees
    the model.
    """
    report = in_phase(progress, f"{model.name}: tasks")
    report("tasks", 0, len(questions), "tasks")
    lm = as_lm(model, device=device, allow_slow=allow_slow, group=group, progress=report)
    return run_tasks(questions, lm), lm.backends


def _row(
    model: Model,
    texts: dict[str, TextMeasures],
    answers: _Answers,
    speed: Speed | None,
    errors: dict[str, float],
) -> Row:
    found = inspect(model.checkpoint.path, tensors_only=not model.checkpoint.config.runnable)
    return Row(
        name=model.name,
        megabytes=found.weight_bytes / 1e6,
        bits_per_weight=found.bits_per_weight,
        rolling_window=model.rolling_window,
        prefix=prefix_token(model.tokenizer, model.checkpoint),
        adds_bos=prompt_start(model.tokenizer) == [model.tokenizer.bos_id],
        texts=texts,
        tasks=answers[0],
        task_backends=answers[1],
        speed=speed,
        layer_errors=errors,
        method=method_of(model.checkpoint.path),
    )


def _validate_positions(
    positions: object, windows: object, *, against: bool
) -> tuple[int, int | None] | None:
    """Return the validated tokens of a window and number of windows; None if no positions are
    requested.
    """
    if positions is None:
        if windows is not None:
            raise RequestError("`position_windows` goes with `positions`")
        return None
    length = as_integer("positions", positions, 2)
    if windows is None:
        count = None
    else:
        count = as_integer("position_windows", windows, 1)
    if not against:
        raise RequestError("divergence by position is from a reference, and none is given")
    return length, count


def _by_position(
    models: Sequence[Model],
    text: Text,
    requested: tuple[int, int | None] | None,
    hidden: Hidden,
    group: ProcessGroup,
    progress: Progress,
) -> tuple[list[dict[str, list[PositionDivergence]]], list[str]]:
    """Return the divergence by position of each model, none of the reference, which is the first;
    and notes.
    """
    if requested is None:
        return [{} for _ in models], []
    reference, *others = (model.checkpoint for model in models)
    tokenizer = models[0].tokenizer
    (length, count) = requested
    context = min(model.checkpoint.config.max_positions for model in models)
    ids = token_ids(tokenizer, text.raw)
    windows, notes = position_windows(
        text.name, ids, prompt_start(tokenizer), length, context, count
    )
    report = in_phase(progress, f"{text.name}: divergence by position")
    found = divergence_by_position(
        reference, others, windows, reference_hidden=hidden, group=group, progress=report
    )
    if count is not None and len(windows) < count:
        notes.append(
            f"'{text.name}' has {len(windows)} of the {count} windows that were requested by"
            " position"
        )
    return [{}, *found], notes
