"""How the answer to a conversation is split, and what restricts it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.answers.calls import CallParser
from quantkit.answers.pieces import Call, Parser, Piece, PlainParser
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

    def create_parser(self) -> Parser:
        """Create a parser for one answer."""
        answer_parser: Parser = PlainParser()
        if self.syntax is not None:
            answer_parser = CallParser(SYNTAXES[self.syntax](), self.names, parallel=self.parallel)
        if self.reasoning is None:
            return answer_parser
        return ReasoningParser(answer_parser, self.reasoning.opened)

    def find_hidden_marks(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Find the special tokens that the parser has to see, and that decoding omits."""
        if self.reasoning is not None:
            marks = [OPENS, CLOSES]
        else:
            marks = []
        if self.syntax is not None:
            marks += SYNTAXES[self.syntax]().marks
        special_tokens = tokenizer.special_tokens or {}
        hidden_marks: dict[int, str] = {}
        for mark in marks:
            if mark in special_tokens and not tokenizer.decode([special_tokens[mark]]):
                hidden_marks[special_tokens[mark]] = mark
        return hidden_marks

    def count_reasoning_tokens(self, tokens: Sequence[int]) -> int:
        """Count the tokens of an answer that are reasoning, with those that begin and end it."""
        if self.reasoning is None:
            return 0
        # Tokens of white space may precede <think>.
        begins_with_reasoning = self.reasoning.opened or self.reasoning.begin in tokens[:4]
        if not begins_with_reasoning:
            return 0
        # An answer that was cut off within its reasoning has no end token.
        if self.reasoning.end in tokens:
            return tokens.index(self.reasoning.end) + 1
        return len(tokens)


@dataclass
class Parts:
    """An answer, assembled from its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append pieces to the content, the reasoning and the calls."""
        for piece in pieces:
            self.content += piece.content
            self.reasoning += piece.reasoning
            if piece.call is not None:
                self.calls.append(piece.call)


def tool_grammar(tools: Tools, syntax: str, tokenizer: Tokenizer) -> str | None:
    """Write the grammar of the answers that tools allow; None if that is any text. Raises
    `RequestError` as `Tools.grammar`.
    """
    token_of_mark: dict[str, int] = {}
    for token, mark in AnswerForm(syntax).find_hidden_marks(tokenizer).items():
        token_of_mark[mark] = token

    def spell_mark(mark: str) -> str:
        # A special token has no text that a grammar could match, so llguidance's syntax for token
        # ids spells it.
        if mark in token_of_mark:
            return f"<[{token_of_mark[mark]}]>"
        return json.dumps(mark)

    return tools.grammar(syntax, spell_mark)
