"""Tokens' bytes as one can see them: half characters, white space, what is invisible or turns a line around."""

from __future__ import annotations

import unicodedata

from quantkit.evals.html.elements import Markup, element, joined

_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "·"}
_UNSEEN = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
_JOINERS = "\u200d\u200c"  # within emoji and Persian words; alone they are shown


def in_a_text(piece: bytes | str) -> Markup:
    """A token where it stands in a text: spaces beside words stay as they are."""
    text = _text(piece)
    if text is None:
        return _sign(_spelled(piece))
    spaces = not text.strip(" ")
    parts: list[str] = []
    for sign in text:
        if sign == "\n":
            parts += [_sign(_SIGNS[sign]), Markup("\n")]
        elif _is_unseen(sign, text) and (sign != " " or spaces):
            parts.append(_sign(_shown(sign)))
        else:
            parts.append(sign)
    return joined(*parts)


def by_itself(piece: bytes | str) -> str:
    """A token in a list, as plain text: all white space is seen."""
    text = _text(piece)
    if text is None:
        return f"⟨{_spelled(piece)}⟩"
    alone = unicodedata.category(text[0]).startswith("M")  # it would stand on what is before it
    return "".join(
        _shown(sign) if _is_unseen(sign, text) or (alone and place == 0) else sign for place, sign in enumerate(text)
    )


def _text(piece: bytes | str) -> str | None:
    """What a token spells; None of half characters, and of those that have only a name."""
    try:
        return None if isinstance(piece, str) else piece.decode()
    except UnicodeDecodeError:
        return None


def _spelled(piece: bytes | str) -> str:
    return piece.hex(" ").upper() if isinstance(piece, bytes) else piece


def _is_unseen(sign: str, text: str) -> bool:
    if sign in _JOINERS:
        return len(text) == 1
    return unicodedata.category(sign) in _UNSEEN


def _shown(sign: str) -> str:
    return _SIGNS.get(sign) or f"⟨U+{ord(sign):04X}⟩"


def _sign(text: str) -> Markup:
    """What stands for something that cannot be seen."""
    return element("b", None, text)
