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
    if text.strip(" ") and not isinstance(piece, str):
        return _seen(text, spaces=False)
    return _seen(text, spaces=True) if isinstance(piece, bytes) else _sign(text)


def by_itself(piece: bytes | str) -> str:
    """A token in a list, as plain text: all white space is seen."""
    text = _text(piece)
    if text is None or isinstance(piece, str):
        return f"⟨{_spelled(piece)}⟩"
    return "".join(_shown(sign) if _unseen(sign, text) else sign for sign in text)


def _text(piece: bytes | str) -> str | None:
    if isinstance(piece, str):
        return piece
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _spelled(piece: bytes | str) -> str:
    return piece.hex(" ").upper() if isinstance(piece, bytes) else piece


def _seen(text: str, *, spaces: bool) -> Markup:
    parts: list[str] = []
    for sign in text:
        if sign == "\n":
            parts += [_sign("↵"), Markup("\n")]
        elif (sign != " " or spaces) and _unseen(sign, text):
            parts.append(_sign(_shown(sign)))
        else:
            parts.append(sign)
    return joined(*parts)


def _unseen(sign: str, text: str) -> bool:
    if sign in _JOINERS:
        return len(text) == 1
    return unicodedata.category(sign) in _UNSEEN


def _shown(sign: str) -> str:
    return _SIGNS.get(sign) or f"⟨U+{ord(sign):04X}⟩"


def _sign(text: str) -> Markup:
    """What stands for something that cannot be seen."""
    return element("b", None, text)
