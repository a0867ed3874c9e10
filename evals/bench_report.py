"""The figures of `bench` as tables, with warnings and notes, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

from quantkit.evals.bench_result import Bench
from quantkit.evals.plot import new_figure, picture_bytes, shorten, style_axes
from quantkit.evals.table import NONE, Table
from quantkit.evals.timing import CONTEXT_NEW, PROMPT, Rate, prefill_rates

_WIDE_SPREAD = 0.3  # of runs: beyond it a median says little
# Times as fast: smaller factors may be chance.
_FASTER = 1.1


def build_tables(benches: Sequence[Bench]) -> list[Table]:
    """Speed, start and memory, and the use of memory bandwidth; decoding and prefill with long
    contexts; with a price the cost of tokens.
    """
    return [
        *_build_model_tables(benches),
        *(
            [_build_decode_table(benches), _build_prefill_table(benches)]
            if _has_contexts(benches)
            else []
        ),
    ]


def build_sheet(benches: Sequence[Bench]) -> Table:
    """Return all tables as one, for programs: a row for each model, or with contexts for each
    context and number of sequences.
    """
    first, *others = _build_model_tables(benches)
    head = first.head
    rows = first.rows
    for table in others:
        head += table.head[1:]
        rows = [(*row, *more[1:]) for row, more in zip(rows, table.rows, strict=True)]
    if not _has_contexts(benches):
        return Table(None, head, rows)
    decoding = _build_decode_table(benches)
    prefill = _build_prefill_table(benches)
    longer = []
    for one, row in zip(benches, rows, strict=True):
        prefills = {context: cells for _, context, *cells in _build_prefill_table([one]).rows}
        longer += [
            (*cells, *prefills[cells[1]], *row[1:]) for cells in _build_decode_table([one]).rows
        ]
        if not one.at_contexts:
            longer.append(
                (one.name, *[NONE] * (len(decoding.head) + len(prefill.head) - 3), *row[1:])
            )
    return Table(
        None, (*decoding.head, *(f"prefill {name}" for name in prefill.head[2:]), *head[1:]), longer
    )


def _build_model_tables(benches: Sequence[Bench]) -> list[Table]:
    """Tables with a row for each model."""
    rates = [_rates(one) for one in benches]
    speed = Table(
        "Tokens a second, median ± furthest run. prefill N: a prompt of N tokens; decode N: N"
        " sequences",
        ("model", *rates[0]),
        [(one.name, *map(_rate, of.values())) for one, of in zip(benches, rates, strict=True)],
    )
    start = Table(
        f"Loading, and from a prompt of {PROMPT} tokens to its first new token: the first time, and"
        " later",
        ("model", "load s", "first token ms", "later ms", "peak memory MB", "threads", "device"),
        [
            (
                one.name,
                _digits(one.load_seconds),
                *(
                    _digits(1000 * first_token_second)
                    for first_token_second in one.first_token_seconds
                ),
                _digits(one.peak_bytes / 1e6),
                str(one.threads),
                one.device,
            )
            for one in benches
        ],
    )
    memory = Table(
        "Weights read for each token when decoding one sequence, against what memory can give",
        (
            "model",
            "MB a token",
            "memory GB/s",
            "share of memory bandwidth",
            "float type",
            "kernels",
        ),
        [
            (
                one.name,
                _digits(one.weight_bytes / 1e6),
                _digits(one.bandwidth / 1e9),
                NONE if one.share_of_bandwidth is None else f"{one.share_of_bandwidth:.0%}",
                (
                    one.dtype
                    if one.cache_dtype == one.dtype
                    else f"{one.dtype}, cache {one.cache_dtype}"
                ),
                ", ".join(one.backends) or "torch",
            )
            for one in benches
        ],
    )
    if not _has_price(benches):
        return [speed, start, memory]
    cost = Table(
        f"{_cost_title(benches)} tokens: of a prompt (prefill), new (decode)",
        ("model", *(f"{name} cost" for name in rates[0])),
        [
            (one.name, *(_format_cost(one, rate) for rate in of.values()))
            for one, of in zip(benches, rates, strict=True)
        ],
    )
    return [speed, start, memory, cost]


def _build_decode_table(benches: Sequence[Bench]) -> Table:
    """Return a row for each context and number of sequences."""
    table = Table(
        f"Decoding the last {CONTEXT_NEW} tokens of a context: tokens a second for each sequence"
        " and together, median ± furthest run; memory",
        ("model", "context", "sequences", "each", "together", "weights MB", "cache MB", "peak MB"),
        [
            (
                one.name,
                str(at.context),
                str(at.batch),
                _digits(at.sequence_rate),
                _rate(at.together),
                _digits(one.loaded_bytes / 1e6),
                _digits(at.cache_bytes / 1e6),
                NONE if at.peak_bytes is None else _digits(at.peak_bytes / 1e6),
            )
            for one in benches
            for at in one.at_contexts
        ],
    )
    return _add_costs(
        table,
        benches,
        "new tokens",
        [(one, at.together) for one in benches for at in one.at_contexts],
    )


def _build_prefill_table(benches: Sequence[Bench]) -> Table:
    """Return a row for each context."""
    rates = []
    for one in benches:
        for of in prefill_rates(one.at_contexts).items():
            rates.append((one, *of))
    table = Table(
        f"Prefill of these contexts but for their last {CONTEXT_NEW} tokens",
        ("model", "context", "tokens a second", "seconds"),
        [
            (one.name, str(context), _rate(rate), _digits((context - CONTEXT_NEW) / rate.median))
            for one, context, rate in rates
        ],
    )
    return _add_costs(table, benches, "tokens of a prompt", [(one, rate) for one, _, rate in rates])


def _add_costs(
    table: Table, benches: Sequence[Bench], token_kind: str, rates: Sequence[tuple[Bench, Rate]]
) -> Table:
    """Return a table with a column of costs, if there is a price."""
    if not _has_price(benches):
        return table
    rows = []
    for row, (one, rate) in zip(table.rows, rates, strict=True):
        rows.append((*row, _format_cost(one, rate)))
    return Table(f"{table.title}. {_cost_title(benches)} {token_kind}", (*table.head, "cost"), rows)


def _cost_title(benches: Sequence[Bench]) -> str:
    return f"Cost, where an hour costs {benches[0].price_per_hour:.12g}, of a thousand"


def _has_contexts(benches: Sequence[Bench]) -> bool:
    return any(one.at_contexts for one in benches)


def _has_price(benches: Sequence[Bench]) -> bool:
    return benches[0].price_per_hour is not None


def warnings(benches: Sequence[Bench]) -> list[str]:
    """Reasons to doubt figures, and models that quantization made slower."""
    lines = []
    if loads := [
        (one.other_load, one.cores) for one in benches if one.busy and one.other_load is not None
    ]:
        load, cores = max(loads)
        lines = [
            f"the machine is busy: other processes used {load:.1f} of its {cores} cores; figures"
            " are low"
        ]
    spreads = []
    for one in benches:
        at_contexts = {}
        for at in one.at_contexts:
            at_contexts[f"context {at.context}, decode {at.batch}"] = at.together
        prefill = {}
        for context, rate in prefill_rates(one.at_contexts).items():
            prefill[f"context {context}, prefill"] = rate
        rates = _rates(one) | at_contexts | prefill
        spreads += [(rate.spread, f"{what} of {one.name}") for what, rate in rates.items()]
    if wide := [one for one in spreads if one[0] > _WIDE_SPREAD]:
        spread, what = max(wide)
        few = f"a figure spreads by {spread:.0%}"
        if len(wide) == 1:
            few = few
        else:
            few = f"{len(wide)} figures spread by up to {spread:.0%}"
        lines.append(f"{few} ({what}): measure again on a quiet machine, or with more `runs`")
    decoded = [(one, one.decode[1].median) for one in benches if 1 in one.decode]
    return lines + [
        f"{one.name} decodes slower than {other.name}, which is not quantized"
        for (one, speed), (other, other_speed) in product(decoded, decoded)
        if one.quantized and not other.quantized and speed < other_speed
    ]


def notes(benches: Sequence[Bench]) -> list[str]:
    """Return a line for each model that one thread decodes faster than several, and for each
    omitted measurement.
    """
    return [
        f"one thread decodes {one.name} faster ({_digits(one.one_thread.median)} tokens a second,"
        f" not {_digits(one.decode[1].median)}): try `threads=1`"
        for one in benches
        if one.one_thread is not None and one.one_thread.median > _FASTER * one.decode[1].median
    ] + [f"{one.name} is not measured at {line}" for one in benches for line in one.left_out]


def _rates(bench: Bench) -> dict[str, Rate]:
    """Rates of short prompts, by the heads of their columns."""
    prefill = {f"prefill {length}": rate for length, rate in bench.prefill.items()}
    return prefill | {f"decode {batch}": rate for batch, rate in bench.decode.items()}


def _rate(rate: Rate) -> str:
    if rate.least == rate.most:  # of one run
        return _digits(rate.median)
    return f"{_digits(rate.median)} ± {rate.spread:.0%}"


def _format_cost(bench: Bench, rate: Rate) -> str:
    if (cost := bench.cost(rate.median)) is None:
        return NONE
    # three significant digits, no exponent
    return f"{cost:.{max(0, 2 - math.floor(math.log10(cost)))}f}"


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{float(f'{value:.3g}'):.12g}"


# inches
_PANEL_WIDTH = 4.6
_PANEL_HEIGHT = 3.8
# characters that fit below a panel, and the width of a name's key
_LEGEND_WIDTH = 55
_LEGEND_KEY = 8
_MAX_COLUMNS = 3
# Distinct without colors too.
_LINES = list(zip(("-", "--", "-.", ":") * 3, "os^vDX" * 2, strict=True))
_MAX_TITLE = 36  # characters


def picture(benches: Sequence[Bench], kind: str = "png") -> bytes:
    """Bars of decoding by batch and of prefill by length; below them, for each model measured with
    long contexts, decoding by batch with a line for each context.

    `kind` is ``png``, ``pdf`` or ``svg``. Raises `RequestError` if matplotlib is not installed.
    """
    decoding = "decoding", "sequences at once", [one.decode for one in benches]
    prefill = "prefill", "tokens of the prompt", [one.prefill for one in benches]
    panels = [panel for panel in (decoding, prefill) if panel[2][0]]
    with_contexts = [one for one in benches if one.at_contexts]
    columns = min(len(with_contexts), _MAX_COLUMNS)
    rows = -(-len(with_contexts) // _MAX_COLUMNS)
    figure = new_figure(_PANEL_WIDTH * max(len(panels), columns), _PANEL_HEIGHT * (1 + rows))
    heights = [1, rows] if with_contexts else [1]
    upper, *lower = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, label, rates) in zip(
        upper.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _bars(axes, [one.name for one in benches], rates)
        _titles(axes, title, label)
    per_row = max(
        1, _LEGEND_WIDTH * len(panels) // max(len(one.name) + _LEGEND_KEY for one in benches)
    )
    upper.legend(
        *upper.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=per_row,
        frameon=False,
        fontsize=9,
    )
    if with_contexts:
        grid = lower[0].subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axes, with_context in zip(grid, with_contexts, strict=False):
            _contexts(axes, with_context)
        for axes in grid[len(with_contexts) :]:
            axes.set_visible(False)
    return picture_bytes(figure, kind)


def _bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Groups of bars, one for each model, with the range of the runs."""
    width = 0.8 / len(names)
    for index, (name, by_key) in enumerate(zip(names, rates, strict=True)):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(by_key))]
        bars = list(by_key.values())
        axes.bar(
            places,
            [rate.median for rate in bars],
            width * 0.9,
            yerr=_range(bars),
            label=name,
            color=f"C{index}",
            error_kw={"linewidth": 0.8},
        )
    axes.set_xticks(range(len(rates[0])), [str(key) for key in rates[0]])


def _contexts(axes: Any, bench: Bench) -> None:
    """A line for each context, by the number of sequences; both axes from 0."""
    batches = sorted({at.batch for at in bench.at_contexts})
    for context, (style, mark) in zip(
        dict.fromkeys(at.context for at in bench.at_contexts), cycle(_LINES), strict=False
    ):
        line = sorted((at.batch, at.together) for at in bench.at_contexts if at.context == context)
        axes.errorbar(
            [batch for batch, _ in line],
            [rate.median for _, rate in line],
            yerr=_range([rate for _, rate in line]),
            linestyle=style,
            marker=mark,
            markersize=5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            label=f"{context:,}",
        )
    _titles(axes, f"decoding, {shorten(bench.name, _MAX_TITLE)}", "sequences at once")
    axes.set_xlim(0, 1.06 * batches[-1])
    axes.set_ylim(0)
    axes.set_ylabel("tokens a second, together")
    axes.set_xticks(batches)
    axes.yaxis.set_tick_params(labelleft=True)
    axes.legend(title="context", frameon=False, fontsize=9, title_fontsize=9, loc="best")


def _range(rates: Sequence[Rate]) -> list[list[float]]:
    """Distances from the median to the slowest and to the fastest run."""
    return [
        [rate.median - rate.least for rate in rates],
        [rate.most - rate.median for rate in rates],
    ]


def _titles(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens a second")
    axes.yaxis.set_major_formatter("{x:,g}")
    style_axes(axes, "y")
