"""Divergence from the reference by position: measured on a text's first windows, and as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quantkit.arguments import as_whole
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals.models import Model
from quantkit.evals.results import Evaluation, Row
from quantkit.evals.table import NONE, Table
from quantkit.evals.texts import Text, token_ids
from quantkit.progress import Progress, in_phase
from quantkit.quality.measures import Hidden
from quantkit.quality.position_divergence import divergence_by_position, position_windows
from quantkit.quality.positions import CACHES, FLOAT, PositionDivergence, cut_short, rise

_Column = tuple[str, Callable[[Row], str]]
_MIN_LENGTH = 2


def checked_positions(positions: object, windows: object, *, against: bool) -> tuple[int, int | None] | None:
    """The tokens of a window and how many windows, checked; None where no positions are requested.

    Raises:
        RequestError: if they are out of range, there is no reference, or windows are requested without positions.
    """
    if positions is None:
        if windows is not None:
            raise RequestError("`position_windows` goes with `positions`")
        return None
    length, count = as_whole("positions", positions), None if windows is None else as_whole("position_windows", windows)
    for name, value, minimum in (("positions", length, _MIN_LENGTH), ("position_windows", count, 1)):
        if value is not None and value < minimum:
            raise RequestError(f"`{name}` must be at least {minimum}", found=value)
    if not against:
        raise RequestError("divergence by position is from a reference, and none is given")
    return length, count


def by_position(
    models: Sequence[Model], text: Text, requested: tuple[int, int | None] | None, hidden: Hidden, group: ProcessGroup,
    progress: Progress,
) -> tuple[list[dict[str, list[PositionDivergence]]], list[str]]:  # fmt: skip
    """The buckets of each model, none of the reference, which is the first; and notes.

    Args:
        requested: from `checked_positions`.
        hidden: gives the reference's hidden states.

    Raises:
        RequestError: if the text has less than two tokens.
        NonFiniteError: if a model's logits are NaN or Inf.
    """
    if requested is None:
        return [{} for _ in models], []
    reference, *others = (model.checkpoint for model in models)
    tokenizer, (length, count) = models[0].tokenizer, requested
    context = min(model.checkpoint.config.max_positions for model in models)
    ids = token_ids(tokenizer, text.raw)
    windows = position_windows(ids, tokenizer.bos_id, length, context, count)
    report = in_phase(progress, f"{text.name}: divergence by position")
    found = divergence_by_position(reference, others, windows, reference_hidden=hidden, group=group, progress=report)
    notes = [] if windows.shape[1] == length else [cut_short(text.name, windows.shape[1], length, context)]
    if count is not None and len(windows) < count:
        notes.append(f"'{text.name}' has {len(windows)} of the {count} windows that were requested by position")
    return [{}, *found], notes


def position_tables(found: Evaluation) -> dict[str, Table]:
    """A table by text: a row per model and bucket, and one that says how divergence changes with the position."""
    return {text: _table(found, text, *extent) for text, extent in windows_by_position(found).items()}


def _table(found: Evaluation, text: str, length: int, windows: int) -> Table:
    rows = []
    for row in found.rows:
        if caches := row.texts[text].positions:
            for buckets in zip(*(caches[cache] for cache in CACHES), strict=True):
                cells = [cell for one in buckets for cell in (str(one.estimate), f"{100 * one.top1_agreement:.1f}")]
                rows.append((row.name, buckets[0].name, str(buckets[0].tokens), *cells))
            rises = [NONE if (ratio := rise(caches[cache])) is None else str(ratio) for cache in CACHES]
            rows.append((row.name, "last / first", NONE, rises[0], NONE, rises[1], NONE))
    title = (
        f"By position, against {found.reference}, on {text} ({windows} x {length} tokens):"
        f" KL({found.reference} || model) in nats/token, and tokens whose likeliest is the same, with keys and values"
        f" in a float and in an int8 cache ({found.reference}'s are floats). last / first is the KL of the last"
        " positions over that of the first: above 1, divergence rises with the position."
    )
    heads = [head for cache in CACHES for head in (f"KL, {cache} cache", "top-1, %")]
    return Table(title, ("model", "positions", "tokens", *heads), rows)


def position_columns(found: Evaluation, text: str) -> list[_Column]:
    """For programs, columns for each bucket and cache of all texts; cells of a text without the bucket are empty."""
    buckets = {
        (one.start, one.stop): one.name
        for row in found.rows
        for measures in row.texts.values()
        for one in measures.positions.get(FLOAT, [])
    }

    def cell(cache: str, name: str, field: str, row: Row) -> str:
        own = row.texts[text].positions.get(cache, [])
        return next((str(getattr(one, field)) for one in own if one.name == name), NONE)

    return [
        (f"{head} {name} {cache}", partial(cell, cache, name, field))
        for _, name in sorted(buckets.items())
        for cache in CACHES
        for head, field in (("KL", "estimate"), ("top1", "top1_agreement"))
    ]


def windows_by_position(found: Evaluation) -> dict[str, tuple[int, int]]:
    """The windows' length and number, for each text measured by position."""
    found_windows = {}
    for text in found.texts:
        for row in found.rows:
            if buckets := row.texts[text].positions.get(FLOAT):
                found_windows[text] = buckets[-1].stop, buckets[0].tokens // buckets[0].stop
    return found_windows
