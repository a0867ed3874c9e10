"""Single tokens on a page: made visible, as data for its script, and those where models diverge
most.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from markupsafe import Markup, escape

from quantkit.evals.html.heatmap import ColorScale, log_scale
from quantkit.evals.results import EvaluationData
from quantkit.evals.samples import Guess, TextSample
from quantkit.evals.table import Table
from quantkit.quality.figures import significant

_NUM_WORST = 10
# Tokens shown before each of the worst.
_CONTEXT = 6


def token_scale(evaluation: EvaluationData) -> ColorScale:
    """Build the color scale of all tokens of a page."""
    kls = []
    for details in evaluation.details.values():
        for sample in details.samples:
            for predictions in sample.models.values():
                for prediction in predictions:
                    if prediction is not None:
                        kls.append(prediction.kl)
    return log_scale(kls)


def script_data(evaluation: EvaluationData) -> str:
    """Write the tokens and predictions as JSON that is safe within a ``script`` element.

    A prediction is a flat list: five times a token and its probability in thousandths, then the
    probability of the token in the text; a model's prediction begins with its KL.
    """
    # Each token's text is written once, and referred to by its number: texts repeat tokens, and
    # every position has several predictions.
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
        values = []
        for token, share in zip(prediction.tokens, prediction.probabilities, strict=True):
            values += [number(sample, token), round(1000 * share)]
        return [*values, round(1000 * prediction.right)]

    def divergence(sample: TextSample, prediction: Guess | None) -> list[str | int]:
        if prediction is None:
            return []
        return [significant(prediction.kl, 2), *guess(sample, prediction)]

    def convert_sample(sample: TextSample) -> dict[str, list[Any]]:
        tokens = [number(sample, token) for token in sample.tokens]
        reference = [guess(sample, prediction) for prediction in sample.reference]
        models = []
        for predictions in sample.models.values():
            models.append([divergence(sample, prediction) for prediction in predictions])
        return {"tokens": tokens, "reference": reference, "models": models}

    texts = []
    for details in evaluation.details.values():
        texts.append([convert_sample(sample) for sample in details.samples])
    # Samples have a reference, which is the first row.
    model_names = [row.name for row in evaluation.rows[1:]]
    data = {
        "reference": evaluation.reference,
        "models": model_names,
        "pieces": pieces,
        "texts": texts,
    }
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # These characters could end the script or one of its lines.
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return encoded


def worst_tokens(evaluation: EvaluationData, text: str, model: str) -> Table:
    """List the tokens where a model diverges most: for print, and for readers who cannot point at a
    token.
    """
    predictions = []
    for sample in evaluation.details[text].samples:
        guesses = zip(sample.models[model], sample.reference, strict=True)
        for place, (guess, reference_guess) in enumerate(guesses):
            # The first token of a window has no prediction.
            if guess is not None and reference_guess is not None:
                predictions.append((guess, reference_guess, sample, place))
    worst_predictions = sorted(predictions, key=lambda prediction: -prediction[0].kl)[:_NUM_WORST]
    rows: list[tuple[str, ...]] = []
    for guess, reference_guess, sample, place in worst_predictions:
        before = ""
        for token in sample.tokens[max(0, place - _CONTEXT) : place]:
            before += in_list(sample.pieces[token])
        row = (
            in_list(sample.pieces[sample.tokens[place]]),
            # Several words in a row are easier to read with spaces.
            f"…{before}".replace("·", " "),
            significant(guess.kl, 2),
            _likeliest(sample, reference_guess),
            _likeliest(sample, guess),
            _percent(reference_guess.right),
            _percent(guess.right),
        )
        rows.append(row)
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
    """Write a probability in the script's format."""
    # The script has probabilities in thousandths: both must round alike.
    thousandths = round(1000 * share)
    if thousandths:
        return f"{thousandths / 10:.1f} %"
    return "< 0.1 %"


_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "·"}
# Unicode's categories of control, format, unassigned, private and surrogate characters, and of
# separators.
_INVISIBLE = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
# The zero-width joiner and non-joiner are part of emoji and of Persian words: within a longer token
# they stay as they are.
_JOINERS = "\u200d\u200c"


def in_text(piece: bytes | str) -> Markup:
    """Make a token visible within a text: spaces next to words stay as they are."""
    text = _decode_piece(piece)
    if text is None:
        return _sign(_spell_piece(piece))
    only_spaces = not text.strip(" ")
    parts: list[str] = []
    for character in text:
        if character == "\n":
            # The line break itself stays, so that the page has the lines of the text.
            parts += [_sign(_SIGNS[character]), "\n"]
        elif _is_invisible(character, text) and (character != " " or only_spaces):
            parts.append(_sign(_visible(character)))
        else:
            parts.append(escape(character))
    return Markup("").join(parts)


def in_list(piece: bytes | str) -> str:
    """Write a token of a list as plain text, with all white space visible."""
    text = _decode_piece(piece)
    if text is None:
        return f"⟨{_spell_piece(piece)}⟩"
    parts = []
    for index, character in enumerate(text):
        # A mark at the beginning would combine with the character before the token.
        is_loose_mark = index == 0 and unicodedata.category(character).startswith("M")
        if is_loose_mark or _is_invisible(character, text):
            parts.append(_visible(character))
        else:
            parts.append(character)
    return "".join(parts)


def _decode_piece(piece: bytes | str) -> str | None:
    """Decode the text of a token; None for incomplete characters and for special tokens, which have
    only a name.
    """
    if isinstance(piece, str):
        return None
    try:
        return piece.decode()
    # A token can have some of a character's bytes.
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
