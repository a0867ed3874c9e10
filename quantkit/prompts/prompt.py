"""A prompt before and after it is encoded for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from quantkit.answers.form import AnswerForm
from quantkit.answers.tools import Tools
from quantkit.runtime.request import Completion, Request
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quantkit.grammar.grammars import Grammars

PromptKind: TypeAlias = Literal["prompt", "messages", "token_ids"]
"""A text that is continued, a conversation that is answered, or token ids that are continued."""


@dataclass(frozen=True)
class PromptFields:
    """The fields of a prompt, as a protocol's parser found them; the builder checks their values.

    Attributes:
        kind: of the prompt.
        value: the text, the messages or the token ids.
        options: how it is continued, by the names of `quantkit.prompts.options.OPTIONS`.
        place: the number of the prompt among several ones of a request, for errors; None for a
            single one.
        specials: whether the spellings of special tokens in a text mean these tokens.
        definitions: the tools that the chat template shows, as JSON schemas.
        variables: further variables of the chat template.
        grammar: of the new text, for `Grammars`; None allows any.
        is_split: whether the answer to a conversation is split into reasoning, content and calls.
        tools: the tools that a split answer may call.
    """

    kind: PromptKind
    value: object
    options: Mapping[str, Any] = field(default_factory=dict)
    place: int | None = None
    specials: object = False
    definitions: object = None
    variables: object = field(default_factory=dict)
    grammar: str | None = None
    is_split: bool = False
    tools: Tools | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt that is encoded and checked against a model.

    Attributes:
        kind: as it was given.
        request: how it is continued.
        stop: strings at which the text ends.
        is_continued: whether the last message is continued, instead of answered.
        is_truncated: whether its beginning was cut off.
        grammar: of the new text, for `Grammars`; None allows any.
        form: how the answer is split into reasoning, content and calls; None for text.
    """

    kind: PromptKind
    request: Request
    stop: list[str]
    is_continued: bool = False
    is_truncated: bool = False
    grammar: str | None = None
    form: AnswerForm | None = None

    @property
    def begins_answer(self) -> bool:
        """Tell whether the new text is an answer from its first character."""
        return self.kind == "messages" and not self.is_continued and not self.request.echo

    def bind_grammar(self, grammars: Grammars) -> Request:
        """Compile the grammar of the request into a `Constraint`, which cannot be sent to other
        processes.
        """
        if self.grammar is None:
            return self.request
        if self.form is None:
            reasoning = None
        else:
            reasoning = self.form.reasoning
        return replace(
            self.request,
            constraint=grammars.constraint(self.grammar, self.request.end_ids, reasoning),
        )

    def read_text(self, completion: Completion, tokenizer: Tokenizer) -> str:
        """Return the text of a completion, without the space that sentencepiece puts before the
        first word of an answer.
        """
        text = completion.text or ""
        if self.begins_answer and not tokenizer.byte_level:
            return text.removeprefix(" ")
        return text

    def get_new_tokens(self, completion: Completion) -> list[int]:
        """Return the tokens of a completion without those of an echoed prompt."""
        if self.request.echo:
            return completion.token_ids[len(self.request.prompt) :]
        return completion.token_ids
