"""The figures of `bench` as tables, with warnings and notes, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

from quantkit.base.messages import Message, Option
from quantkit.evals.bench_result import Bench
from quantkit.evals.drawing import new_figure, picture_bytes, shorten, style_axes
from quantkit.evals.table import NONE, Table
from quantkit.evals.timing import CONTEXT_NEW, PROMPT, AtContext, Rate, prefill_rates

# Of runs, as a share of the median: beyond it a median says little.
_WIDE_SPREAD = 0.3
# Times as fast: smaller factors may be chance.
_FASTER = 1.1


def build_tables(benches: Sequence[Bench]) -> list[Table]:
    """Build the tables of speed, start and memory, and of the use of memory bandwidth; of decoding
    and prefill with long contexts; with a price, also of the cost of tokens.
    """
    tables = _build_model_tables(benches)
    if _has_contexts(benches):
        tables += [_build_decode_table(benches), _build_prefill_table(benches)]
    return tables


def build_sheet(benches: Sequence[Bench]) -> Table:
    """Join all tables to one for programs, with a row for each model, or with contexts for each
    context and number of sequences.
    """
    speed, *other_tables = _build_model_tables(benches)
    head = speed.head
    rows = speed.rows
    for table in other_tables:
        # The first column of every table is the model's name, which one column repeats enough.
        head += table.head[1:]
        wider_rows = []
        for row, other_row in zip(rows, table.rows, strict=True):
            wider_rows.append((*row, *other_row[1:]))
        rows = wider_rows
    if not _has_contexts(benches):
        return Table(None, head, rows)
    decoding = _build_decode_table(benches)
    prefill = _build_prefill_table(benches)
    prefill_head = tuple(f"prefill {name}" for name in prefill.head[2:])
    context_rows: list[tuple[str, ...]] = []
    for model_bench, row in zip(benches, rows, strict=True):
        prefill_cells_by_context = {}
        for _, context, *prefill_cells in _build_prefill_table([model_bench]).rows:
            prefill_cells_by_context[context] = prefill_cells
        for cells in _build_decode_table([model_bench]).rows:
            context_rows.append((*cells, *prefill_cells_by_context[cells[1]], *row[1:]))
        if not model_bench.at_contexts:
            # All columns of decoding and prefill at contexts but the model's name.
            num_missing = len(decoding.head) - 1 + len(prefill_head)
            context_rows.append((model_bench.name, *[NONE] * num_missing, *row[1:]))
    return Table(None, (*decoding.head, *prefill_head, *head[1:]), context_rows)


def _build_model_tables(benches: Sequence[Bench]) -> list[Table]:
    """Build the tables with a row for each model."""
    tables = [
        _build_speed_table(benches),
        _build_start_table(benches),
        _build_bandwidth_table(benches),
    ]
    if _has_price(benches):
        tables.append(_build_cost_table(benches))
    return tables


def _build_speed_table(benches: Sequence[Bench]) -> Table:
    rows: list[tuple[str, ...]] = []
    for model_bench in benches:
        rows.append((model_bench.name, *map(_format_rate, _rates(model_bench).values())))
    return Table(
        "Tokens a second, median ± furthest run. prefill N: a prompt of N tokens; decode N: N"
        " sequences",
        ("model", *_rates(benches[0])),
        rows,
    )


def _build_start_table(benches: Sequence[Bench]) -> Table:
    rows: list[tuple[str, ...]] = []
    for model_bench in benches:
        first_seconds, later_seconds = model_bench.first_token_seconds
        row = (
            model_bench.name,
            _format_digits(model_bench.load_seconds),
            _format_digits(1000 * first_seconds),
            _format_digits(1000 * later_seconds),
            _format_digits(model_bench.peak_bytes / 1e6),
            str(model_bench.threads),
            model_bench.device,
        )
        rows.append(row)
    return Table(
        f"Loading, and from a prompt of {PROMPT} tokens to its first new token: the first time, and"
        " later",
        ("model", "load s", "first token ms", "later ms", "peak memory MB", "threads", "device"),
        rows,
    )


def _build_bandwidth_table(benches: Sequence[Bench]) -> Table:
    rows: list[tuple[str, ...]] = []
    for model_bench in benches:
        share = NONE
        if model_bench.share_of_bandwidth is not None:
            share = f"{model_bench.share_of_bandwidth:.0%}"
        float_type = model_bench.dtype
        if model_bench.cache_dtype != model_bench.dtype:
            float_type = f"{model_bench.dtype}, cache {model_bench.cache_dtype}"
        row = (
            model_bench.name,
            _format_digits(model_bench.weight_bytes / 1e6),
            _format_digits(model_bench.bandwidth / 1e9),
            share,
            float_type,
            # Without quantized layers, all products are torch's.
            ", ".join(model_bench.backends) or "torch",
        )
        rows.append(row)
    return Table(
        "Weights read for each token when decoding one sequence, against what memory can give",
        (
            "model",
            "MB a token",
            "memory GB/s",
            "share of memory bandwidth",
            "float type",
            "kernels",
        ),
        rows,
    )


def _build_cost_table(benches: Sequence[Bench]) -> Table:
    rows: list[tuple[str, ...]] = []
    for model_bench in benches:
        cells = [model_bench.name]
        for rate in _rates(model_bench).values():
            cells.append(_format_cost(model_bench, rate))
        rows.append(tuple(cells))
    head = ["model"]
    for name in _rates(benches[0]):
        head.append(f"{name} cost")
    title = f"{_cost_title(benches)} tokens: of a prompt (prefill), new (decode)"
    return Table(title, tuple(head), rows)


def _build_decode_table(benches: Sequence[Bench]) -> Table:
    """Build the table with a row for each context and number of sequences."""
    rows: list[tuple[str, ...]] = []
    rates = []
    for model_bench in benches:
        for at_context in model_bench.at_contexts:
            peak = NONE
            if at_context.peak_bytes is not None:
                peak = _format_digits(at_context.peak_bytes / 1e6)
            row = (
                model_bench.name,
                str(at_context.context),
                str(at_context.batch),
                _format_digits(at_context.sequence_rate),
                _format_rate(at_context.together),
                _format_digits(model_bench.loaded_bytes / 1e6),
                _format_digits(at_context.cache_bytes / 1e6),
                peak,
            )
            rows.append(row)
            rates.append((model_bench, at_context.together))
    table = Table(
        f"Decoding the last {CONTEXT_NEW} tokens of a context: tokens a second for each sequence"
        " and together, median ± furthest run; memory",
        ("model", "context", "sequences", "each", "together", "weights MB", "cache MB", "peak MB"),
        rows,
    )
    return _add_costs(table, benches, "new tokens", rates)


def _build_prefill_table(benches: Sequence[Bench]) -> Table:
    """Build the table with a row for each context."""
    rows: list[tuple[str, ...]] = []
    rates = []
    for model_bench in benches:
        for context, rate in prefill_rates(model_bench.at_contexts).items():
            # The last tokens of a context are decoded, not read.
            seconds = (context - CONTEXT_NEW) / rate.median
            rows.append(
                (model_bench.name, str(context), _format_rate(rate), _format_digits(seconds))
            )
            rates.append((model_bench, rate))
    table = Table(
        f"Prefill of these contexts but for their last {CONTEXT_NEW} tokens",
        ("model", "context", "tokens a second", "seconds"),
        rows,
    )
    return _add_costs(table, benches, "tokens of a prompt", rates)


def _add_costs(
    table: Table, benches: Sequence[Bench], token_kind: str, rates: Sequence[tuple[Bench, Rate]]
) -> Table:
    """Add a column of costs to a table, if there is a price."""
    if not _has_price(benches):
        return table
    rows = []
    for row, (model_bench, rate) in zip(table.rows, rates, strict=True):
        rows.append((*row, _format_cost(model_bench, rate)))
    return Table(f"{table.title}. {_cost_title(benches)} {token_kind}", (*table.head, "cost"), rows)


def _cost_title(benches: Sequence[Bench]) -> str:
    return f"Cost, where an hour costs {benches[0].price_per_hour:.12g}, of a thousand"


def _has_contexts(benches: Sequence[Bench]) -> bool:
    return any(model_bench.at_contexts for model_bench in benches)


def _has_price(benches: Sequence[Bench]) -> bool:
    # All models of a call have the same price.
    return benches[0].price_per_hour is not None


def list_warnings(benches: Sequence[Bench]) -> list[str]:
    """List reasons to doubt figures, and models that quantization made slower."""
    lines = []
    loads = []
    for model_bench in benches:
        if model_bench.busy and model_bench.other_load is not None:
            loads.append((model_bench.other_load, model_bench.cores))
    if loads:
        load, cores = max(loads)
        lines.append(
            f"the machine is busy: other processes used {load:.1f} of its {cores} cores; figures"
            " are low"
        )
    wide_spreads = []
    for model_bench in benches:
        rates = _rates(model_bench)
        for at_context in model_bench.at_contexts:
            rates[f"context {at_context.context}, decode {at_context.batch}"] = at_context.together
        for context, rate in prefill_rates(model_bench.at_contexts).items():
            rates[f"context {context}, prefill"] = rate
        for figure, rate in rates.items():
            if rate.spread > _WIDE_SPREAD:
                wide_spreads.append((rate.spread, f"{figure} of {model_bench.name}"))
    if wide_spreads:
        spread, figure = max(wide_spreads)
        if len(wide_spreads) == 1:
            extent = f"a figure spreads by {spread:.0%}"
        else:
            extent = f"{len(wide_spreads)} figures spread by up to {spread:.0%}"
        lines.append(
            Message(
                f"{extent} ({figure}): measure again on a quiet machine, or with more ",
                Option("runs"),
            )
        )
    # One sequence is the case that quantization is expected to make faster, since reading the
    # weights limits it.
    speeds = []
    for model_bench in benches:
        if 1 in model_bench.decode:
            speeds.append((model_bench, model_bench.decode[1].median))
    for (model_bench, speed), (other, other_speed) in product(speeds, speeds):
        if model_bench.quantized and not other.quantized and speed < other_speed:
            lines.append(
                f"{model_bench.name} decodes slower than {other.name}, which is not quantized"
            )
    return lines


def list_notes(benches: Sequence[Bench]) -> list[str]:
    """List each model that one thread decodes faster than several, and each omitted
    measurement.
    """
    lines: list[str] = []
    for model_bench in benches:
        one_thread = model_bench.one_thread
        if one_thread is None:
            continue
        # `bench` tries one thread only if it measured one sequence with several.
        speed = model_bench.decode[1].median
        if one_thread.median > _FASTER * speed:
            lines.append(
                Message(
                    f"one thread decodes {model_bench.name} faster"
                    f" ({_format_digits(one_thread.median)}"
                    f" tokens a second, not {_format_digits(speed)}): try ",
                    Option("threads", value=1),
                )
            )
    for model_bench in benches:
        for left_out in model_bench.left_out:
            lines.append(f"{model_bench.name} is not measured at {left_out}")
    return lines


def _rates(bench: Bench) -> dict[str, Rate]:
    """Collect the rates of short prompts, by the heads of their columns."""
    rates = {}
    for length, rate in bench.prefill.items():
        rates[f"prefill {length}"] = rate
    for batch, rate in bench.decode.items():
        rates[f"decode {batch}"] = rate
    return rates


def _format_rate(rate: Rate) -> str:
    # A single run has no spread.
    if rate.least == rate.most:
        return _format_digits(rate.median)
    return f"{_format_digits(rate.median)} ± {rate.spread:.0%}"


def _format_cost(bench: Bench, rate: Rate) -> str:
    cost = bench.cost(rate.median)
    if cost is None:
        return NONE
    # Three significant digits without an exponent, which `g` would write for small costs.
    decimals = max(0, 2 - math.floor(math.log10(cost)))
    return f"{cost:.{decimals}f}"


def _format_digits(value: float) -> str:
    """Write three significant digits."""
    # The first format rounds; the second avoids the exponent that `.3g` has from 1000 on.
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
# in average letters
_MAX_TITLE = 36


def picture(benches: Sequence[Bench], kind: str = "png") -> bytes:
    """Draw bars of decoding by batch and of prefill by length; below them, for each model measured
    with long contexts, decoding by batch with a line for each context.

    `kind` is ``png``, ``pdf`` or ``svg``. Raises `RequestError` if matplotlib is not installed.
    """
    names = []
    decode_rates = []
    prompt_rates = []
    with_contexts = []
    for bench in benches:
        names.append(bench.name)
        decode_rates.append(bench.decode)
        prompt_rates.append(bench.prefill)
        if bench.at_contexts:
            with_contexts.append(bench)
    # Every model has the same lengths and batches, so the first one tells what was measured.
    panels = []
    if decode_rates[0]:
        panels.append(("decoding", "sequences at once", decode_rates))
    if prompt_rates[0]:
        panels.append(("prefill", "tokens of the prompt", prompt_rates))
    columns = min(len(with_contexts), _MAX_COLUMNS)
    # Rounded up.
    rows = -(-len(with_contexts) // _MAX_COLUMNS)
    figure = new_figure(_PANEL_WIDTH * max(len(panels), columns), _PANEL_HEIGHT * (1 + rows))
    heights = [1]
    if with_contexts:
        heights.append(rows)
    upper, *lower = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    panel_axes = upper.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, label, rates) in zip(panel_axes, panels, strict=True):
        _draw_bars(axes, names, rates)
        _set_titles(axes, title, label)
    widest_name = max(map(len, names)) + _LEGEND_KEY
    names_per_row = max(1, _LEGEND_WIDTH * len(panels) // widest_name)
    # Both panels have the same names: one legend is for both.
    upper.legend(
        *upper.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=names_per_row,
        frameon=False,
        fontsize=9,
    )
    if with_contexts:
        # A common vertical axis lets models be compared.
        grid = lower[0].subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axes, with_context in zip(grid, with_contexts, strict=False):
            _draw_contexts(axes, with_context)
        for axes in grid[len(with_contexts) :]:
            axes.set_visible(False)
    return picture_bytes(figure, kind)


def _draw_bars(axes: Any, names: Sequence[str], rates: Sequence[dict[int, Rate]]) -> None:
    """Draw groups of bars, one bar for each model, with the range of the runs."""
    # A fifth of the distance between groups stays empty.
    width = 0.8 / len(names)
    for index, (name, rates_by_key) in enumerate(zip(names, rates, strict=True)):
        places = []
        medians = []
        for place, rate in enumerate(rates_by_key.values()):
            places.append(place - 0.4 + (index + 0.5) * width)
            medians.append(rate.median)
        axes.bar(
            places,
            medians,
            width * 0.9,
            yerr=_error_bars(list(rates_by_key.values())),
            label=name,
            color=f"C{index}",
            error_kw={"linewidth": 0.8},
        )
    axes.set_xticks(range(len(rates[0])), [str(key) for key in rates[0]])


def _draw_contexts(axes: Any, bench: Bench) -> None:
    """Draw a line for each context, by the number of sequences; both axes begin at 0."""
    measurements: dict[int, list[AtContext]] = {}
    for at_context in bench.at_contexts:
        measurements.setdefault(at_context.context, []).append(at_context)
    for (context, at_batches), (style, mark) in zip(
        measurements.items(), cycle(_LINES), strict=False
    ):
        at_batches.sort(key=lambda at_batch: at_batch.batch)
        line_batches = []
        rates = []
        medians = []
        for at_batch in at_batches:
            line_batches.append(at_batch.batch)
            rates.append(at_batch.together)
            medians.append(at_batch.together.median)
        axes.errorbar(
            line_batches,
            medians,
            yerr=_error_bars(rates),
            linestyle=style,
            marker=mark,
            markersize=5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
            label=f"{context:,}",
        )
    _set_titles(axes, f"decoding, {shorten(bench.name, _MAX_TITLE)}", "sequences at once")
    batches = sorted({at_context.batch for at_context in bench.at_contexts})
    axes.set_xlim(0, 1.06 * batches[-1])
    axes.set_ylim(0)
    axes.set_ylabel("tokens a second, together")
    axes.set_xticks(batches)
    # A shared axis shows its labels only in the first column.
    axes.yaxis.set_tick_params(labelleft=True)
    axes.legend(title="context", frameon=False, fontsize=9, title_fontsize=9, loc="best")


def _error_bars(rates: Sequence[Rate]) -> list[list[float]]:
    """Measure the distances from each median to the slowest and to the fastest run."""
    below = []
    above = []
    for rate in rates:
        below.append(rate.median - rate.least)
        above.append(rate.most - rate.median)
    return [below, above]


def _set_titles(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens a second")
    axes.yaxis.set_major_formatter("{x:,g}")
    style_axes(axes, "y")
