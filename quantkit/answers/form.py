"""How the answer to a conversation is split, and what restricts it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.answers.calls import CallParser
from quantkit.answers.pieces import Call, Parser, Piece, Plain
from quantkit.answers.reasoning import CLOSES, OPENS, ReasoningParser
from quantkit.answers.syntaxes import SYNTAXES
from quantkit.answers.tools import Tools
from quantkit.grammar.after_reasoning import Reasoning
from quantkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerForm:
    """What the parts of an answer are.

    Attributes:
        syntax: the name of the model's syntax for calls; None if no tools may be called.
        names: of the tools.
        parallel: whether an answer may have several calls.
        reasoning: how the answer may begin with reasoning, if it may.
    """

    syntax: str | None = None
    names: tuple[str, ...] = ()
    parallel: bool = True
    reasoning: Reasoning | None = None

    def parser(self) -> Parser:
        """Return a parser for one answer."""
        rest: Parser = Plain()
        if self.syntax is not None:
            rest = CallParser(SYNTAXES[self.syntax](), self.names, parallel=self.parallel)
        if self.reasoning is None:
            return rest
        return ReasoningParser(rest, self.reasoning.opened)

    def find_hidden_marks(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Special tokens that the parser has to see, and that texts of tokens do not show."""
        if self.reasoning is not None:
            marks = [OPENS, CLOSES]
        else:
            marks = []
        if self.syntax is not None:
            marks += SYNTAXES[self.syntax]().marks
        known = tokenizer.special_tokens or {}
        result: dict[int, str] = {}
        for mark in marks:
            if mark in known and not tokenizer.decode([known[mark]]):
                result[known[mark]] = mark
        return result

    def reasoning_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of an answer's tokens are reasoning, with those that begin and end it."""
        if self.reasoning is None or not (
            self.reasoning.opened or self.reasoning.begin in tokens[:4]
        ):
            return 0
        if self.reasoning.end in tokens:
            return tokens.index(self.reasoning.end) + 1
        return len(tokens)


@dataclass
class Parts:
    """An answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append more of it."""
        for piece in pieces:
            self.content += piece.content
            self.reasoning += piece.reasoning
            if piece.call is not None:
                self.calls += [piece.call]
            else:
                self.calls += []


def tool_grammar(tools: Tools, syntax: str, tokenizer: Tokenizer) -> str | None:
    """Return the grammar of the answers that tools allow; None if that is any text. Raises
    `RequestError` as `Tools.grammar`.
    """
    hidden: Mapping[str, int] = {
        mark: token for token, mark in AnswerForm(syntax).find_hidden_marks(tokenizer).items()
    }

    def spell_mark(mark: str) -> str:
        if mark in hidden:
            return f"<[{hidden[mark]}]>"
        return json.dumps(mark)

    return tools.grammar(syntax, spell_mark)
