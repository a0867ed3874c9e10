"""Texts with their tokens coloured by divergence, and what the models expect at each, for the page's script."""

from __future__ import annotations

import json
from collections.abc import Iterator

from quantkit.evals.html.elements import Markup, element, figures
from quantkit.evals.html.pieces import by_itself, in_a_text
from quantkit.evals.html.scale import Scale, logarithmic
from quantkit.evals.results import Evaluation
from quantkit.evals.samples import Guess, TextSample, TokenDivergence
from quantkit.evals.table import Table
from quantkit.quality.figures import significant

_WORST = 10
_BEFORE = 6  # tokens shown before one of the worst


def token_scale(found: Evaluation) -> Scale:
    """The colours of all tokens of a page."""
    return logarithmic(
        one.kl
        for details in found.details.values()
        for sample in details.samples
        for of_model in sample.models.values()
        for one in of_model
        if one is not None
    )


def coloured_text(found: Evaluation, name: str, number: int, scale: Scale, chosen: str) -> Markup:
    """A text's stretches, of which one model's are shown at a time.

    Args:
        number: of the text on its page.
        chosen: the model that is shown at first.
    """
    samples = found.details[name].samples
    models = list(samples[0].models)
    choice: list[Markup] = []
    for index, model in enumerate(models):
        key = f"t{number}m{index}"
        checked = "" if model == chosen else None
        choice.append(
            element(
                "input", {"type": "radio", "name": f"t{number}", "id": key, "class": f"m{index}", "checked": checked}
            )
        )
        choice.append(element("label", {"for": key}, model))
    panels = [
        element("div", {"class": f"panel m{index}", "data-model": index}, *_stretches(samples, model, scale),
                _worst(samples, model, found.reference or "", name))
        for index, model in enumerate(models)
    ]  # fmt: skip
    panel = element("aside", {"class": "guess", "aria-live": "polite", "aria-label": "what the models expect"})
    return element(
        "div", {"class": "tokens", "data-text": number}, *choice,
        element("div", {"class": "panels"}, *panels), panel,
    )  # fmt: skip


def shown_when_chosen(found: Evaluation) -> str:
    """The rules of style that show the panel of the model that is chosen."""
    most = max((len(sample.models) for details in found.details.values() for sample in details.samples), default=0)
    return "".join(f".tokens>input.m{index}:checked~.panels>.m{index}{{display:block}}" for index in range(most))


def script_data(found: Evaluation) -> str:
    """All that is shown of single tokens, as JSON that a page may hold.

    A guess is a flat list: a token and its probability in thousandths, five times, then that of the token that stands
    there; a model's begins with its KL.
    """
    numbers: dict[int, int] = {}
    pieces: list[str] = []

    def number(sample: TextSample, token: int) -> int:
        if token not in numbers:
            numbers[token] = len(pieces)
            pieces.append(by_itself(sample.pieces[token]))
        return numbers[token]

    def guess(sample: TextSample, one: Guess | None) -> list[int]:
        if one is None:
            return []
        pairs = zip(one.tokens, one.probabilities, strict=True)
        flat = [value for token, share in pairs for value in (number(sample, token), round(1000 * share))]
        return [*flat, round(1000 * one.right)]

    def divergence(sample: TextSample, one: TokenDivergence | None) -> list[str | int]:
        return [] if one is None else [significant(one.kl, 2), *guess(sample, one.guess)]

    texts = [
        [
            {
                "tokens": [number(sample, token) for token in sample.tokens],
                "reference": [guess(sample, one) for one in sample.reference],
                "models": [[divergence(sample, one) for one in of_model] for of_model in sample.models.values()],
            }
            for sample in details.samples
        ]
        for details in found.details.values()
    ]
    models = [row.name for row in found.rows[1:]]
    value = {"reference": found.reference, "models": models, "pieces": pieces, "texts": texts}
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":  # which end a script, or a line of one
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return plain


def _stretches(samples: list[TextSample], model: str, scale: Scale) -> Iterator[Markup]:
    for index, sample in enumerate(samples):
        last = sample.start + len(sample.tokens) - 1
        what = "From the beginning" if index == 0 else "Where the models diverge most after that"
        yield element("h4", None, what, element("small", None, f" tokens {sample.start} to {last}"))
        tokens = [
            element("i", {"class": None if one is None else f"k{scale.step(one.kl)}"}, in_a_text(sample.pieces[token]))
            for token, one in zip(sample.tokens, sample.models[model], strict=True)
        ]
        yield element("p", {"class": "stretch", "data-stretch": index}, *tokens)


def _worst(samples: list[TextSample], model: str, reference: str, text: str) -> Markup:
    """The tokens that diverge most, as a table: for print, and for those who cannot point at one."""
    listed = [
        (one, expected, sample, place)
        for sample in samples
        for place, (one, expected) in enumerate(zip(sample.models[model], sample.reference, strict=True))
        if one is not None and expected is not None
    ]
    rows: list[tuple[str, ...]] = []
    for one, expected, sample, place in sorted(listed, key=lambda item: -item[0].kl)[:_WORST]:
        before = "".join(by_itself(sample.pieces[token]) for token in sample.tokens[max(0, place - _BEFORE) : place])
        rows.append((
            by_itself(sample.pieces[sample.tokens[place]]), f"…{before}".replace("·", " "), significant(one.kl, 2),
            _likeliest(sample, expected), _likeliest(sample, one.guess), _percent(expected.right),
            _percent(one.guess.right),
        ))  # fmt: skip
    head = ("token", "after", "KL, nats", f"likeliest in {reference}", f"likeliest in {model}",
            f"P(token), {reference}", f"P(token), {model}")  # fmt: skip
    table = figures(Table(None, head, rows), f"tokens of {text} at which {model} diverges most")
    return element("details", {"class": "worst"}, element("summary", None, f"The {len(rows)} that diverge most"), table)


def _likeliest(sample: TextSample, guess: Guess) -> str:
    return f"{by_itself(sample.pieces[guess.tokens[0]])} {_percent(guess.probabilities[0])}"


def _percent(share: float) -> str:
    """A probability as the script shows it too."""
    thousandths = round(1000 * share)
    return f"{thousandths / 10:.1f} %" if thousandths else "< 0.1 %"
