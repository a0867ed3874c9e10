"""Tokens made visible: incomplete characters, white space, invisible characters and those that change direction."""

from __future__ import annotations

import unicodedata

from markupsafe import Markup, escape

_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "·"}
_INVISIBLE = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
_JOINERS = "\u200d\u200c"  # part of emoji and of Persian words


def in_text(piece: bytes | str) -> Markup:
    """A token within a text: spaces next to words stay as they are."""
    text = _decoded(piece)
    if text is None:
        return _sign(_spelled(piece))
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
    """A token in a list, as plain text with all white space visible."""
    text = _decoded(piece)
    if text is None:
        return f"⟨{_spelled(piece)}⟩"
    combining = unicodedata.category(text[0]).startswith("M")  # would combine with the character before it
    return "".join(
        _visible(character) if _is_invisible(character, text) or (combining and index == 0) else character
        for index, character in enumerate(text)
    )


def _decoded(piece: bytes | str) -> str | None:
    """The text of a token; None for incomplete characters and for special tokens, which have only a name."""
    try:
        return None if isinstance(piece, str) else piece.decode()
    except UnicodeDecodeError:
        return None


def _spelled(piece: bytes | str) -> str:
    return piece.hex(" ").upper() if isinstance(piece, bytes) else piece


def _is_invisible(character: str, text: str) -> bool:
    if character in _JOINERS:
        return len(text) == 1
    return unicodedata.category(character) in _INVISIBLE


def _visible(character: str) -> str:
    return _SIGNS.get(character) or f"⟨U+{ord(character):04X}⟩"


def _sign(text: str) -> Markup:
    return Markup("<b>{}</b>").format(text)
