"""The figures of `bench` as tables, with warnings and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantkit.evals.bench import Bench
from quantkit.evals.contexts import NEW, prefill_rates
from quantkit.evals.table import NONE, Table
from quantkit.evals.timing import PROMPT, Rate

_WIDE_SPREAD = 0.3  # of runs: beyond it a median says little
_FASTER = 1.1  # times as fast: smaller factors may be chance


def tables(found: Sequence[Bench]) -> list[Table]:
    """Speed, start and memory, and the use of memory bandwidth; decoding and prefill with long contexts; with a price
    the cost of tokens."""
    return [*_of_models(found), *([_decoding(found), _prefill(found)] if _with_contexts(found) else [])]


def sheet(found: Sequence[Bench]) -> Table:
    """All tables as one, for programs: a row for each model, or with contexts for each context and number of
    sequences."""
    first, *others = _of_models(found)
    head, rows = first.head, first.rows
    for table in others:
        head += table.head[1:]
        rows = [(*row, *more[1:]) for row, more in zip(rows, table.rows, strict=True)]
    if not _with_contexts(found):
        return Table(None, head, rows)
    decoding, prefill, longer = _decoding(found), _prefill(found), []
    for one, row in zip(found, rows, strict=True):
        prefills = {context: cells for _, context, *cells in _prefill([one]).rows}
        longer += [(*cells, *prefills[cells[1]], *row[1:]) for cells in _decoding([one]).rows]
        if not one.at_contexts:
            longer.append((one.name, *[NONE] * (len(decoding.head) + len(prefill.head) - 3), *row[1:]))
    return Table(None, (*decoding.head, *(f"prefill {name}" for name in prefill.head[2:]), *head[1:]), longer)


def _of_models(found: Sequence[Bench]) -> list[Table]:
    """Tables with a row for each model."""
    rates = [_rates(one) for one in found]
    speed = Table(
        "Tokens a second, median ± furthest run. prefill N: a prompt of N tokens; decode N: N sequences",
        ("model", *rates[0]),
        [(one.name, *map(_rate, of.values())) for one, of in zip(found, rates, strict=True)],
    )
    start = Table(
        f"Loading, and from a prompt of {PROMPT} tokens to its first new token: the first time, and later",
        ("model", "load s", "first token ms", "later ms", "peak memory MB", "threads", "device"),
        [
            (one.name, _digits(one.load_seconds), *(_digits(1000 * taken) for taken in one.first_token_seconds),
             _digits(one.peak_bytes / 1e6), str(one.threads), one.device)
            for one in found
        ],
    )  # fmt: skip
    memory = Table(
        "Weights read for each token when decoding one sequence, against what memory can give",
        ("model", "MB a token", "memory GB/s", "share of memory bandwidth", "float type", "kernels"),
        [
            (one.name, _digits(one.weight_bytes / 1e6), _digits(one.bandwidth / 1e9),
             NONE if one.share_of_bandwidth is None else f"{one.share_of_bandwidth:.0%}",
             one.dtype if one.cache_dtype == one.dtype else f"{one.dtype}, cache {one.cache_dtype}",
             ", ".join(one.backends) or "torch")
            for one in found
        ],
    )  # fmt: skip
    if not _priced(found):
        return [speed, start, memory]
    cost = Table(
        f"{_cost_title(found)} tokens: of a prompt (prefill), new (decode)",
        ("model", *(f"{name} cost" for name in rates[0])),
        [
            (one.name, *(_cost(one, rate) for rate in of.values())) for one, of in zip(found, rates, strict=True)
        ],
    )  # fmt: skip
    return [speed, start, memory, cost]


def _decoding(found: Sequence[Bench]) -> Table:
    """A row for each context and number of sequences."""
    table = Table(
        f"Decoding the last {NEW} tokens of a context: tokens a second for each sequence and together, median ±"
        " furthest run; memory",
        ("model", "context", "sequences", "each", "together", "weights MB", "cache MB", "peak MB"),
        [
            (one.name, str(at.context), str(at.batch), _digits(at.each), _rate(at.together),
             _digits(one.loaded_bytes / 1e6), _digits(at.cache_bytes / 1e6),
             NONE if at.peak_bytes is None else _digits(at.peak_bytes / 1e6))
            for one in found for at in one.at_contexts
        ],
    )  # fmt: skip
    if not _priced(found):
        return table
    costs = [_cost(one, at.together) for one in found for at in one.at_contexts]
    return _with_costs(table, f"{_cost_title(found)} new tokens", costs)


def _prefill(found: Sequence[Bench]) -> Table:
    """A row for each context."""
    rates = [(one, *of) for one in found for of in prefill_rates(one.at_contexts).items()]
    table = Table(
        f"Prefill of these contexts but for their last {NEW} tokens",
        ("model", "context", "tokens a second", "seconds"),
        [
            (one.name, str(context), _rate(rate), _digits((context - NEW) / rate.median))
            for one, context, rate in rates
        ],
    )  # fmt: skip
    if not _priced(found):
        return table
    return _with_costs(table, f"{_cost_title(found)} tokens of a prompt", [_cost(one, rate) for one, _, rate in rates])


def _with_costs(table: Table, title: str, costs: Sequence[str]) -> Table:
    rows = [(*row, cost) for row, cost in zip(table.rows, costs, strict=True)]
    return Table(f"{table.title}. {title}", (*table.head, "cost"), rows)


def _cost_title(found: Sequence[Bench]) -> str:
    return f"Cost, where an hour costs {found[0].price_per_hour:.12g}, of a thousand"


def _with_contexts(found: Sequence[Bench]) -> bool:
    return any(one.at_contexts for one in found)


def _priced(found: Sequence[Bench]) -> bool:
    return found[0].price_per_hour is not None


def warnings(found: Sequence[Bench]) -> list[str]:
    """Reasons to doubt figures, and models that quantization made slower."""
    lines = []
    if loads := [(one.other_load, one.cores) for one in found if one.busy and one.other_load is not None]:
        load, cores = max(loads)
        lines = [f"the machine is busy: other processes used {load:.1f} of its {cores} cores; figures are low"]
    spreads = []
    for one in found:
        at_contexts = {f"context {at.context}, decode {at.batch}": at.together for at in one.at_contexts}
        prefill = {f"context {context}, prefill": rate for context, rate in prefill_rates(one.at_contexts).items()}
        rates = _rates(one) | at_contexts | prefill
        spreads += [(rate.spread, f"{what} of {one.name}") for what, rate in rates.items()]
    if wide := [one for one in spreads if one[0] > _WIDE_SPREAD]:
        spread, what = max(wide)
        few = f"a figure spreads by {spread:.0%}"
        few = few if len(wide) == 1 else f"{len(wide)} figures spread by up to {spread:.0%}"
        lines.append(f"{few} ({what}): measure again on a quiet machine, or with more `runs`")
    floats = [one for one in found if not one.quantized and 1 in one.decode]
    return lines + [
        f"{one.name} decodes slower than {other.name}, which is not quantized"
        for one in found
        for other in floats
        if one.quantized and 1 in one.decode and one.decode[1].median < other.decode[1].median
    ]


def notes(found: Sequence[Bench]) -> list[str]:
    """A line for each model that one thread decodes faster than several, and for each omitted measurement."""
    return [
        f"one thread decodes {one.name} faster ({_digits(one.one_thread.median)} tokens a second, not"
        f" {_digits(one.decode[1].median)}): try `threads=1`"
        for one in found
        if one.one_thread is not None and one.one_thread.median > _FASTER * one.decode[1].median
    ] + [f"{one.name} is not measured at {line}" for one in found for line in one.left_out]


def _rates(one: Bench) -> dict[str, Rate]:
    """Rates of short prompts, by the heads of their columns."""
    prefill = {f"prefill {length}": rate for length, rate in one.prefill.items()}
    return prefill | {f"decode {batch}": rate for batch, rate in one.decode.items()}


def _rate(rate: Rate) -> str:
    if rate.least == rate.most:  # of one run
        return _digits(rate.median)
    return f"{_digits(rate.median)} ± {rate.spread:.0%}"


def _cost(one: Bench, rate: Rate) -> str:
    if (cost := one.cost(rate.median)) is None:
        return NONE
    return f"{cost:.{max(0, 2 - math.floor(math.log10(cost)))}f}"  # three significant digits, no exponent


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{float(f'{value:.3g}'):.12g}"
