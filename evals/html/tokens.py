"""Single tokens on a page: made visible, as data for its script, and those where models diverge
most.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from markupsafe import Markup, escape

from quantkit.evals.html.heatmap import ColorScale, log_scale
from quantkit.evals.results import Evaluation
from quantkit.evals.samples import Guess, TextSample
from quantkit.evals.table import Table
from quantkit.quality.figures import significant

_NUM_WORST = 10
# Tokens shown before each of the worst.
_CONTEXT = 6


def token_scale(evaluation: Evaluation) -> ColorScale:
    """Return the color scale of all tokens of a page."""
    samples = (sample for details in evaluation.details.values() for sample in details.samples)
    tokens = (
        token for sample in samples for of_model in sample.models.values() for token in of_model
    )
    return log_scale(token.kl for token in tokens if token is not None)


def script_data(evaluation: Evaluation) -> str:
    """Return the tokens and predictions as JSON that is safe within a ``script`` element.

    A prediction is a flat list: five times a token and its probability in thousandths, then the
    probability of the token in the text; a model's prediction begins with its KL.
    """
    numbers: dict[int, int] = {}
    pieces: list[str] = []

    def number(sample: TextSample, token: int) -> int:
        if token not in numbers:
            numbers[token] = len(pieces)
            pieces.append(in_list(sample.pieces[token]))
        return numbers[token]

    def guess(sample: TextSample, prediction: Guess | None) -> list[int]:
        if prediction is None:
            return []
        pairs = zip(prediction.tokens, prediction.probabilities, strict=True)
        flat = []
        for token, share in pairs:
            for value in (number(sample, token), round(1000 * share)):
                flat.append(value)
        return [*flat, round(1000 * prediction.right)]

    def divergence(sample: TextSample, prediction: Guess | None) -> list[str | int]:
        if prediction is None:
            return []
        return [significant(prediction.kl, 2), *guess(sample, prediction)]

    def plain(sample: TextSample) -> dict[str, list[Any]]:
        return {
            "tokens": [number(sample, token) for token in sample.tokens],
            "reference": [guess(sample, one) for one in sample.reference],
            "models": [
                [divergence(sample, token) for token in tokens] for tokens in sample.models.values()
            ],
        }

    texts = []
    for details in evaluation.details.values():
        texts.append([plain(sample) for sample in details.samples])
    models = [row.name for row in evaluation.rows[1:]]
    value = {"reference": evaluation.reference, "models": models, "pieces": pieces, "texts": texts}
    encoded = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Which could end the script or one of its lines.
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return encoded


def worst_tokens(evaluation: Evaluation, text: str, model: str) -> Table:
    """Return the tokens where a model diverges most: for print, and for readers who cannot point at
    a token.
    """
    tokens = [
        (one, expected, sample, place)
        for sample in evaluation.details[text].samples
        for place, (one, expected) in enumerate(
            zip(sample.models[model], sample.reference, strict=True)
        )
        if one is not None and expected is not None
    ]
    rows: list[tuple[str, ...]] = []
    for one, expected, sample, place in sorted(tokens, key=lambda item: -item[0].kl)[:_NUM_WORST]:
        before = "".join(
            in_list(sample.pieces[token])
            for token in sample.tokens[max(0, place - _CONTEXT) : place]
        )
        rows.append(
            (
                in_list(sample.pieces[sample.tokens[place]]),
                f"…{before}".replace("·", " "),
                significant(one.kl, 2),
                _likeliest(sample, expected),
                _likeliest(sample, one),
                _percent(expected.right),
                _percent(one.right),
            )
        )
    reference = evaluation.reference
    head = (
        "token",
        "after",
        "KL, nats",
        f"likeliest in {reference}",
        f"likeliest in {model}",
        f"P(token), {reference}",
        f"P(token), {model}",
    )
    return Table(None, head, rows)


def _likeliest(sample: TextSample, guess: Guess) -> str:
    return f"{in_list(sample.pieces[guess.tokens[0]])} {_percent(guess.probabilities[0])}"


def _percent(share: float) -> str:
    """Return a probability in the script's format."""
    thousandths = round(1000 * share)
    if thousandths:
        return f"{thousandths / 10:.1f} %"
    return "< 0.1 %"


_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "·"}
_INVISIBLE = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
# Part of emoji and of Persian words.
_JOINERS = "\u200d\u200c"


def in_text(piece: bytes | str) -> Markup:
    """Return a token within a text: spaces next to words stay as they are."""
    text = _decode_piece(piece)
    if text is None:
        return _sign(_spell_piece(piece))
    spaces = not text.strip(" ")
    parts: list[str] = []
    for character in text:
        if character == "\n":
            parts += [_sign(_SIGNS[character]), "\n"]
        elif _is_invisible(character, text) and (character != " " or spaces):
            parts.append(_sign(_visible(character)))
        else:
            parts.append(escape(character))
    return Markup("").join(parts)


def in_list(piece: bytes | str) -> str:
    """Return a token in a list, as plain text with all white space visible."""
    text = _decode_piece(piece)
    if text is None:
        return f"⟨{_spell_piece(piece)}⟩"
    # Would combine with the character before it.
    combining = unicodedata.category(text[0]).startswith("M")
    return "".join(
        _visible(character)
        if _is_invisible(character, text) or (combining and index == 0)
        else character
        for index, character in enumerate(text)
    )


def _decode_piece(piece: bytes | str) -> str | None:
    """Return the text of a token; None for incomplete characters and for special tokens, which have
    only a name.
    """
    try:
        if isinstance(piece, str):
            return None
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _spell_piece(piece: bytes | str) -> str:
    if isinstance(piece, bytes):
        return piece.hex(" ").upper()
    return piece


def _is_invisible(character: str, text: str) -> bool:
    if character in _JOINERS:
        return len(text) == 1
    return unicodedata.category(character) in _INVISIBLE


def _visible(character: str) -> str:
    return _SIGNS.get(character) or f"⟨U+{ord(character):04X}⟩"


def _sign(text: str) -> Markup:
    return Markup("<b>{}</b>").format(text)
