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
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, in_phase, skip_repeated_reports
from quantkit.calibration.conversations import ModelChat, model_chat
from quantkit.calibration.documents import TextSource
from quantkit.data.files import EXCERPT, excerpt
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals.evaluation import Evaluation
from quantkit.evals.harness import as_lm
from quantkit.evals.models import FIXED_WINDOW, Model, StateCache, open_models, tokenize_streams
from quantkit.evals.results import Row, TextFacts, TextMeasures
from quantkit.evals.samples import Predictions, TextDetails, text_details
from quantkit.evals.table import short_names
from quantkit.evals.tasks import TaskScore, open_tasks, require_tasks, run_tasks
from quantkit.evals.texts import Text, prefix_token, read_text, score_documents, token_ids
from quantkit.evals.timing import Speed, decoding_speed
from quantkit.jobs.inspect import inspect
from quantkit.kernels.dispatch import list_allowed_backends
from quantkit.model.device import resolve_device
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
            many tokens, with keys and values in a float cache and, if quantkit's decoder runs all
            models, in an int8 cache; a text, or context, that is shorter is measured to its end.
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
    files = _validate_sources(texts)
    tasks = as_strings("tasks", tasks)
    if not folders:
        raise RequestError("there is no model to measure: `paths` is empty")
    if against is not None:
        against = as_path("against", against)
    data_folder = None if task_data is None else as_path("task_data", task_data)
    cache_folder = None if cache_logits is None else as_path("cache_logits", cache_logits)
    if window is not None:
        window = as_integer("window", window)
    if text_column is not None:
        as_string("text_column", text_column)
        if not files:
            raise RequestError(Message(Option("text_column"), " requires ", Option("texts")))
    require_flags(
        speed=speed, details=details, allow_slow=allow_slow, trust_remote_code=trust_remote_code
    )
    require_instance("group", group, ProcessGroup, "a ProcessGroup")
    progress = skip_repeated_reports(progress)
    has_reference = against is not None
    position_limits = _validate_positions(positions, position_windows, against=has_reference)
    if data_folder is not None and not tasks:
        raise RequestError("task data requires tasks, and none are named")
    if cache_folder is not None and not has_reference:
        raise RequestError("caching logits requires a reference model, and none is given")
    if cache_folder is not None and group.size > 1:
        raise RequestError("several processes cannot cache the logits of the reference model")
    device_name = None if device is None else str(device)
    run_device = _choose_device(device_name, group, used=bool(tasks) or speed)
    # The harness is asked before any model is opened: an unknown task is then an error at once.
    if tasks:
        require_tasks(tasks)
    if backend is not None and as_string("backend", backend) not in VIAS:
        raise RequestError(
            Message("unknown value of ", Option("backend")),
            found=backend,
            expected=" or ".join(VIAS),
        )
    if backend == "own":
        require_no_code(trust_remote_code, Message(Option("backend", value="own")))
    models = open_models(
        folders, against, window, group, backend, trust_remote_code=trust_remote_code
    )
    run_by_others = []
    contexts = []
    for model in models:
        contexts.append(model.checkpoint.config.max_context)
        if model.checkpoint.config.run_by is not None:
            run_by_others.append(model)
    for name, value in (("tasks", tasks), ("speed", speed)):
        if value and run_by_others:
            path = run_by_others[0].checkpoint.path
            run_by = run_by_others[0].checkpoint.config.run_by
            raise RequestError(
                Message(Option(name), " requires a model that quantkit runs itself"),
                path=path,
                found=f"run by {run_by}",
            )
    for model in models:
        # Tasks run in float32, as perplexity does; speed is measured in the model's own dtype.
        dtypes = []
        if tasks:
            dtypes.append(torch.float32)
        if speed:
            dtypes.append(choose_default_dtype(model.checkpoint))
        for dtype in dtypes:
            backends = list_allowed_backends(allow_slow=allow_slow)
            require_kernels(model.checkpoint, run_device, dtype, backends)
    # One chat template for all models, since they must read the same text.
    chat = partial(model_chat, models[0].checkpoint.path, models[0].tokenizer)
    selected_texts = _read_texts(files, text_column, chat, use_excerpt=not tasks)
    notes = _collect_notes(run_by_others, selected_texts)
    facts_by_text = {}
    hashes = {}
    for text in selected_texts:
        facts_by_text[text.name] = _facts(text)
        hashes[f"text {text.name}"] = text.sha256
    group.require_same(hashes)
    length = window or min(FIXED_WINDOW, *contexts)
    # All texts are read before a model runs, so that one that is too short is an error at once.
    streams_by_text = []
    for text in selected_texts:
        streams_by_text.append(tokenize_streams(models, text, length, same_tokens=has_reference))
    if cache_folder is None:
        hidden: Hidden = final_hidden
    else:
        hidden = StateCache(cache_folder)
    measures: list[dict[str, TextMeasures]] = [{} for _ in models]
    details_by_text: dict[str, TextDetails] = {}
    # The data of tasks load before the texts are measured, which can take hours.
    with open_tasks(tasks, data_folder, progress=progress) as questions:
        for text, text_streams in zip(selected_texts, streams_by_text, strict=True):
            listeners: dict[str, Predictions] = {}
            # The divergence's passes compute what a page shows: no pass is repeated for it.
            if details and has_reference:
                for model in models[1:]:
                    listeners[model.name] = Predictions()
            reference_hidden = hidden if has_reference else None
            windows = [model_windows for _, model_windows in text_streams]
            figures_by_model = _over_fixed_windows(
                models, windows, reference_hidden, list(listeners.values()), group, progress
            )
            if listeners:
                # With a reference, the windows of all models are equal.
                details_by_text[text.name] = text_details(
                    listeners, windows[0], models[0].tokenizer
                )
            position_buckets, position_notes = _measure_by_position(
                models, text, position_limits, hidden, group, progress
            )
            notes += position_notes
            for model_measures, model, (tokens, _), figures, buckets in zip(
                measures, models, text_streams, figures_by_model, position_buckets, strict=True
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
                model_measures[text.name] = TextMeasures(
                    tokens=tokens,
                    documents=documents,
                    token_perplexity=perplexity.value,
                    divergence=divergence,
                    token_perplexity_error=perplexity.error,
                    perplexity_ratio_error=ratio_error,
                    positions=buckets,
                )
        answers: list[_Answers] = []
        for model in models:
            if tasks:
                answers.append(
                    _score_tasks(model, questions, run_device, allow_slow, group, progress)
                )
            else:
                answers.append(({}, []))
    speeds: list[Speed | None] = [None for _ in models]
    if speed:
        for index, model in enumerate(models):
            progress("speed", index, len(models), "models")
            speeds[index] = decoding_speed(model.checkpoint, run_device, allow_slow, group)
    errors, error_kind = layer_errors([model.checkpoint.path for model in models])
    rows = []
    for facts in zip(models, measures, answers, speeds, errors, strict=True):
        rows.append(_row(*facts))
    # Figures are reproducible only with the versions of what computed them.
    packages = ["quantkit", "torch"]
    if tasks:
        packages.append("lm_eval")
    if run_by_others:
        packages.append("transformers")
    versions = {}
    for package in packages:
        versions[package] = importlib.metadata.version(package)
    return Evaluation(
        rows=rows,
        reference=models[0].name if has_reference else None,
        texts=facts_by_text,
        window=length if selected_texts else None,
        layer_error=error_kind,
        device=run_device.type,
        versions=versions,
        notes=notes,
        details=details_by_text,
    )


def _collect_notes(run_by_others: Sequence[Model], texts: Sequence[Text]) -> list[str]:
    """Collect the remarks on models that another library runs, and on the texts."""
    notes = []
    for model in run_by_others:
        notes.append(f"{model.name}: run by {model.checkpoint.config.run_by}")
    for model in run_by_others:
        notes += model.checkpoint.notes
    for text in texts:
        notes += text.notes
    for text in texts:
        if text.note is not None:
            notes.append(text.note)
    return notes


def _facts(text: Text) -> TextFacts:
    return TextFacts(
        sha256=text.sha256,
        is_wikitext=text.is_wikitext,
        in_template=text.in_template,
        documents=len(text.documents),
        words=text.words,
        bytes=text.bytes,
    )


def _choose_device(name: str | None, group: ProcessGroup, *, used: bool) -> torch.device:
    """Choose the device for tasks and speed."""
    if name is not None and name != "cpu" and not used:
        raise RequestError(
            "a device requires tasks or speed; perplexity is computed on the CPU", found=name
        )
    if group.size > 1 and name not in (None, "cpu"):
        raise RequestError("several processes can only measure a model on the CPU", found=name)
    # Without a use for it, a GPU is not even looked for.
    if used and group.size == 1:
        return resolve_device(name)
    return torch.device("cpu")


_Sources = list[Path] | dict[str, Path | Iterable[object]]


def _validate_sources(texts: object) -> _Sources:
    """Validate the paths of the texts, or the texts by name."""
    hint = 'strings and datasets need a name: {"name": ["..."]}'
    if not isinstance(texts, Mapping):
        return as_paths("texts", texts, hint=hint)
    sources: dict[str, Path | Iterable[object]] = {}
    for name, text in texts.items():
        source_name = as_string("texts", name)
        # A string is the path of a text, not the text itself.
        if is_several(text) and not isinstance(text, str):
            sources[source_name] = text
        else:
            sources[source_name] = as_path("texts", text, hint="text goes in a list")
    return sources


def _read_texts(
    sources: _Sources, column: str | None, chat: ModelChat, *, use_excerpt: bool
) -> list[Text]:
    """Read the texts, under distinct names."""
    texts: list[Text] = []
    if isinstance(sources, dict):
        for name, source in sources.items():
            texts.append(read_text(source, column, chat, name))
    else:
        for path in sources:
            texts.append(read_text(path, column, chat))
        # The names of files are not distinct: the ends of their paths are, unless one is repeated.
        if len({text.name for text in texts}) < len(texts):
            texts = _rename_texts(texts, short_names(sources))
    if texts or not use_excerpt:
        return texts
    raw = EXCERPT.read_bytes()
    note = (
        f"No text was given: measured on the excerpt that ships with quantkit, {len(raw)} bytes of"
        " speeches."
    )
    return [Text("excerpt", hashlib.sha256(raw).hexdigest(), excerpt(), notes=(note,))]


def _rename_texts(texts: Sequence[Text], names: Sequence[str]) -> list[Text]:
    """Give texts these names. Raises `RequestError` if two are the same."""
    renamed_texts: list[Text] = []
    used_names = set()
    for name, text in zip(names, texts, strict=True):
        if name in used_names:
            raise RequestError("the same text is given twice", found=name)
        used_names.add(name)
        renamed_texts.append(replace(text, name=name))
    return renamed_texts


def _over_fixed_windows(
    models: Sequence[Model],
    windows: Sequence[Tensor],
    hidden: Hidden | None,
    listeners: Sequence[Listener],
    group: ProcessGroup,
    progress: Progress,
) -> list[tuple[Estimate, Divergence | None, float | None]]:
    """Measure each model's token perplexity; with `hidden`, of all but the first also the
    divergence from the first, and the error of the ratio of perplexities.
    """
    figures: list[tuple[Estimate, Divergence | None, float | None]] = []
    if hidden is None:
        for model, model_windows in zip(models, windows, strict=True):
            report = in_phase(progress, f"{model.name}: token perplexity")
            estimates = perplexity_estimates(
                model.checkpoint, [model_windows], group=group, progress=report
            )
            for estimate in estimates:
                figures.append((estimate, None, None))
        return figures
    # Perplexities come from the passes that measure the divergence: each model runs once.
    reference, *compared = (model.checkpoint for model in models)
    comparisons = compare(
        reference,
        compared,
        windows[0],
        reference_hidden=hidden,
        listeners=listeners,
        group=group,
        progress=in_phase(progress, f"divergence from {models[0].name}"),
    )
    reference_perplexity = Estimate(
        comparisons[0].reference_perplexity, comparisons[0].reference_perplexity_error
    )
    figures.append((reference_perplexity, None, None))
    for comparison in comparisons:
        perplexity = Estimate(comparison.perplexity, comparison.perplexity_error)
        figures.append((perplexity, comparison.divergence, comparison.ratio_error))
    return figures


_Answers = tuple[dict[str, TaskScore], list[str]]


def _score_tasks(
    model: Model,
    questions: Sequence[Any],
    device: torch.device,
    allow_slow: bool,
    group: ProcessGroup,
    progress: Progress,
) -> _Answers:
    """Score a model in the tasks, and list the backends of its quantized layers there. The model's
    weights are freed on return, since nothing else refers to the `lm`.
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
    # A model that transformers runs has no decoder here: only its tensors can be inspected.
    size = inspect(model.checkpoint.path, tensors_only=not model.checkpoint.config.runnable)
    return Row(
        name=model.name,
        megabytes=size.weight_bytes / 1e6,
        bits_per_weight=size.bits_per_weight,
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
    """Validate the tokens of a window and the number of windows; None if no positions are
    requested.
    """
    if positions is None:
        if windows is not None:
            raise RequestError(
                Message(Option("position_windows"), " requires ", Option("positions"))
            )
        return None
    length = as_integer("positions", positions, 2)
    count = None if windows is None else as_integer("position_windows", windows, 1)
    if not against:
        raise RequestError("divergence by position requires a reference model, and none is given")
    return length, count


def _measure_by_position(
    models: Sequence[Model],
    text: Text,
    requested: tuple[int, int | None] | None,
    hidden: Hidden,
    group: ProcessGroup,
    progress: Progress,
) -> tuple[list[dict[str, list[PositionDivergence]]], list[str]]:
    """Measure the divergence by position of each model from the first one, the reference, whose
    figures are empty; and write notes.
    """
    if requested is None:
        return [{} for _ in models], []
    reference, *compared = (model.checkpoint for model in models)
    tokenizer = models[0].tokenizer
    length, count = requested
    # Dynamic rotary scaling grows with the length, beyond the trained context.
    context = min(model.checkpoint.config.max_positions for model in models)
    ids = token_ids(tokenizer, text.raw)
    windows, notes = position_windows(
        text.name, ids, prompt_start(tokenizer), length, context, count
    )
    report = in_phase(progress, f"{text.name}: divergence by position")
    divergences = divergence_by_position(
        reference, compared, windows, reference_hidden=hidden, group=group, progress=report
    )
    if count is not None and len(windows) < count:
        notes.append(
            f"'{text.name}' has {len(windows)} of the {count} windows that were requested by"
            " position"
        )
    return [{}, *divergences], notes
