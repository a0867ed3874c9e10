"""The page: what came out, in words and numbers, then tables, charts, texts, and how it was measured."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

from quantkit.evals.html.elements import Markup, element, figures
from quantkit.evals.html.heatmap import heat_maps
from quantkit.evals.html.positions import chart, lines
from quantkit.evals.html.scatter import scatter
from quantkit.evals.html.tokens import coloured_text, script_data, shown_when_chosen, token_scale
from quantkit.evals.method import method
from quantkit.evals.positions import position_tables
from quantkit.evals.report import side_by_side
from quantkit.evals.results import Evaluation, Row
from quantkit.quality.figures import Estimate, significant

_HERE = Path(__file__).parent


def page(found: Evaluation) -> str:
    """All of it, in one file that loads nothing."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    style = (_HERE / "style.css").read_text(encoding="utf-8") + shown_when_chosen(found)
    title, summary = headline(found)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    head = element(
        "head", None,
        element("meta", {"charset": "utf-8"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("link", {"rel": "icon", "href": "data:,"}),
        element("title", None, title),
        element("style", None, Markup(style)),
    )  # fmt: skip
    header = element("header", None, element("p", {"class": "kicker"}, "quantkit evaluation"),
                     element("h1", None, title), *summary)  # fmt: skip
    main = element("main", None, header, *_sections(found))
    scripts = [
        element("script", {"type": "application/json", "id": "data"}, Markup(script_data(found))),
        element("script", None, Markup(script)),
    ] if found.details else [element("script", None, Markup(script))]  # fmt: skip
    document = element("html", {"lang": "en"}, head, element("body", None, main, *scripts))
    whole = f"<!doctype html>\n{document}\n"
    return whole.encode(errors="surrogateescape").decode(errors="replace")  # a folder's name may be no Unicode


def headline(found: Evaluation) -> tuple[str, list[Markup]]:
    """What came out, in a line; and of all models, in a few.

    The line is of the smallest model, or of the one of that size that diverges least.
    """
    first = _smallest(found)
    rows = found.rows if found.reference is None else found.rows[1:]
    others = [element("li", None, _said(found, row)) for row in rows if row is not first]
    listed = [element("ul", {"class": "others"}, *others)] if others else []
    if found.reference is None:
        return _said(found, first), listed
    whole = found.rows[0]
    lead = (
        f"Held against {found.reference}: {whole.megabytes:.2f} MB, {significant(whole.bits_per_weight)} bits a weight"
    )
    agreed = [_agreed(found, first)] if found.texts else []
    return _said(found, first), [element("p", {"class": "lead"}, "; ".join([lead, *agreed]) + "."), *listed]


def _smallest(found: Evaluation) -> Row:
    """The smallest model, or of several that diverge differently the best."""
    rows = found.rows if found.reference is None else found.rows[1:]
    return min(rows, key=lambda row: (row.megabytes, _mean_kl(found, row)))


def _said(found: Evaluation, row: Row) -> str:
    if found.reference is None:
        costs = [Estimate(row.texts[text].documents.word_perplexity) for text in found.texts]
        cost = f", word perplexity {_range(costs)}" if costs else ""
        return f"{row.name}: {row.megabytes:.2f} MB, {significant(row.bits_per_weight)} bits a weight{cost}"
    ratio = found.rows[0].megabytes / row.megabytes
    factor = significant(max(ratio, 1 / ratio), 2)
    size = f"{factor}\u00a0× {'smaller' if ratio > 1 else 'larger'}"  # noqa: RUF001
    if factor == "1.0":
        size = f"as large as {found.reference}"
    if not found.texts:
        return f"{row.name} is {size}"
    over = found.over_texts(row)
    measured = [one for text in found.texts if (one := row.texts[text].divergence) is not None]
    kls = [Estimate(one.kl, one.kl_error) for one in measured] if over is None else [over.kl]
    return f"{row.name} is {size}; per token it diverges by {_range(kls)} nats"


def _agreed(found: Evaluation, row: Row) -> str:
    over = found.over_texts(row)
    measured = [one for text in found.texts if (one := row.texts[text].divergence) is not None]
    shares = [Estimate(one.top1_agreement, one.top1_error) for one in measured] if over is None else [
        over.top1_agreement
    ]  # fmt: skip
    return f"{row.name} holds the same token likeliest at {_range([one.times(100) for one in shares])}\u00a0% of places"


def _range(estimates: list[Estimate]) -> str:
    """One figure, or the least and the most: with the digits that the tables have, and without the errors."""
    ordered = sorted(estimates, key=lambda one: one.value)
    return " to ".join(dict.fromkeys(_without_error(str(one)) for one in (ordered[0], ordered[-1])))


def _without_error(spelled: str) -> str:
    """The figure of one that may be spelled ``0.0123 ± 0.0004`` or ``(1.23 ± 0.04)e-05``."""
    value, found, error = spelled.partition(" ± ")
    return value.lstrip("(") + error.partition(")")[2] if found else value


def _mean_kl(found: Evaluation, row: Row) -> float:
    kls = [one.kl for text in found.texts if (one := row.texts[text].divergence) is not None]
    return sum(kls) / len(kls) if kls else 0.0


def _sections(found: Evaluation) -> Iterator[Markup]:
    marks = [
        element("span", {"class": "dot", "style": f"background:var(--m{index % 6})"})
        for index in range(len(found.rows))
    ]
    if found.reference is not None:
        marks[0] = element("span", {"class": "dot whole"})
    by_name = dict(zip((row.name for row in found.rows), marks, strict=True))
    tables = []
    for table in side_by_side(found):
        tables += [element("h3", None, table.title)] if table.title else []
        tables.append(figures(table, table.title or "models", [by_name[row[0]] for row in table.rows]))
    note = (
        "± is one standard error of these tokens as a sample of their text; another text may differ by several times."
    )
    errors = [element("p", {"class": "note"}, note)] if found.reference is not None and found.texts else []
    yield _section("Models", *tables, *errors)
    if charts := list(_charts(found)):
        numbers = [
            element("details", None, element("summary", None, f"By position on {text}, as a table"),
                    element("p", {"class": "note"}, table.title or ""),
                    figures(table, f"divergence by position on {text}"))
            for text, table in position_tables(found).items()
        ]  # fmt: skip
        yield element("section", None, element("div", {"class": "charts"}, *charts), *numbers)
    if maps := heat_maps(found):
        told = (
            "How far quantization changed each linear, as the models' own manifests tell; point at a field, or tap it."
        )
        yield _section(
            "Error by layer", element("p", {"class": "note"}, told), element("div", {"class": "maps"}, *maps)
        )
    if found.details:
        yield _section("Token by token", *_texts(found))
    yield _section("How it was measured", element("ul", {"class": "method"}, *map(_told, method(found))))


def _told(line: str) -> Markup:
    """A line of the method; what it is about stands out."""
    topic, colon, rest = line.removeprefix("- ").partition(": ")
    return element("li", None, *((element("b", None, topic), f": {rest}") if colon and len(topic) < 40 else (topic,)))


def _charts(found: Evaluation) -> Iterator[Markup]:
    if (points := scatter(found)) is not None:
        what = "Size against word perplexity" if found.reference is None else "Size against divergence"
        yield _figure(what, "Further left is smaller, further down is better.", points)
    for text in found.texts:
        what = f"KL from {found.reference} by position, on {text}"
        if (drawn := chart(lines(found, text), what)) is not None:
            told = "Where a token has more text before it. Bars are one standard error."
            yield _figure("Divergence by position" + (f", {text}" if len(found.texts) > 1 else ""), told, drawn)


def _figure(title: str, told: str, drawn: Markup) -> Markup:
    note = element("p", {"class": "note"}, told)
    return element("figure", None, element("figcaption", None, element("h2", None, title), note), drawn)


def _texts(found: Evaluation) -> Iterator[Markup]:
    scale = token_scale(found)
    told = (
        "Each token is coloured by how far the model's expectation in its place is from the reference's."
        " Point at one, tap it, or go through them with the arrow keys, to see what both expected."
    )
    yield element("p", {"class": "note"}, told)
    yield scale.legend("KL in nats, from")
    for number, text in enumerate(found.details):
        name = element("summary", None, element("h3", None, text))
        body = coloured_text(found, text, number, scale, _smallest(found).name)
        yield element("details", {"class": "text", "open": "" if number == 0 else None}, name, body)


def _section(title: str, *content: str) -> Markup:
    return element("section", None, element("h2", None, title), *content)
