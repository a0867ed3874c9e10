"""Divergence from the reference by position: measured on a text's first windows, and as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.arguments import as_whole
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals.models import Model
from quantkit.evals.results import Evaluation, Row
from quantkit.evals.table import NONE, Table
from quantkit.evals.texts import Text, token_ids
from quantkit.progress import Progress, in_phase
from quantkit.quality.figures import Estimate
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
    return {text: _table(found, text) for text in found.texts if any(row.texts[text].positions for row in found.rows)}


def _table(found: Evaluation, text: str) -> Table:
    rows = []
    for row in found.rows:
        if caches := row.texts[text].positions:
            for buckets in zip(*(caches[cache] for cache in CACHES), strict=True):
                cells = [cell for one in buckets for cell in (str(one.estimate), f"{100 * one.top1_agreement:.1f}")]
                rows.append((row.name, buckets[0].name, str(buckets[0].tokens), *cells))
            rises = [_shown(rise(caches[cache])) for cache in CACHES]
            rows.append((row.name, "last / first", NONE, rises[0], NONE, rises[1], NONE))
    length, windows = _extent(found, text)
    title = (
        f"By position, against {found.reference}, on {text} ({windows} x {length} tokens):"
        f" KL({found.reference} || model) in nats/token, and tokens whose likeliest is the same, with keys and values"
        f" in a float and in an int8 cache ({found.reference}'s are floats). last / first is the KL of the last"
        " positions over that of the first: above 1, divergence rises with the position."
    )
    heads = [head for cache in CACHES for head in (f"KL, {cache} cache", "top-1, %")]
    return Table(title, ("model", "positions", "tokens", *heads), rows)


def position_columns(found: Evaluation, text: str) -> list[_Column]:
    """For programs, a column for each bucket and cache: those of all texts, with nothing where this one has none."""
    buckets = {
        (one.start, one.stop)
        for row in found.rows
        for measures in row.texts.values()
        for one in measures.positions.get(FLOAT, [])
    }
    return [
        column
        for start, stop in sorted(buckets)
        for cache in CACHES
        for column in (
            (f"KL {start}-{stop - 1} {cache}", _cell(text, cache, start, stop, lambda one: str(one.estimate))),
            (f"top1 {start}-{stop - 1} {cache}", _cell(text, cache, start, stop, lambda one: str(one.top1_agreement))),
        )
    ]


def windows_by_position(found: Evaluation) -> dict[str, tuple[int, int]]:
    """The windows' length and number, for each text measured by position."""
    return {text: _extent(found, text) for text in found.texts if any(row.texts[text].positions for row in found.rows)}


def _extent(found: Evaluation, text: str) -> tuple[int, int]:
    """The length of a text's windows, and how many there were."""
    buckets = next(row.texts[text].positions[FLOAT] for row in found.rows if row.texts[text].positions)
    return buckets[-1].stop, buckets[0].tokens // buckets[0].stop


def _shown(ratio: Estimate | None) -> str:
    return NONE if ratio is None else str(ratio)


def _cell(
    text: str, cache: str, start: int, stop: int, shown: Callable[[PositionDivergence], str]
) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        buckets = row.texts[text].positions.get(cache, [])
        return next((shown(one) for one in buckets if (one.start, one.stop) == (start, stop)), NONE)

    return cell
