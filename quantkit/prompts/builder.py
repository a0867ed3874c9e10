"""Encode prompts for one model, and check them against it; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.answers.form import AnswerForm, tool_grammar
from quantkit.answers.reasoning import find_reasoning
from quantkit.answers.syntaxes import recognize_syntax
from quantkit.answers.tools import Tools
from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import require_flags, wrong_type
from quantkit.errors import RequestError
from quantkit.prompts.errors import name_argument_in_errors
from quantkit.prompts.options import parse_request_options
from quantkit.prompts.prompt import Prompt, PromptFields
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.runtime.request import (
    Request,
    create_prompt_logprobs_error,
    prompt_ids,
    text_ids,
    truncate_prompt,
    with_prompt,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.text.chat import Chat, TemplateChat, chat_format
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quantkit.grammar.grammars import Grammars

MAX_CONSTRAINED = 128
"""The maximum number of answers with a grammar to one request, as in OpenAI's API: each needs
memory.
"""

# Names in quantkit, and arguments of transformers' `apply_chat_template`: they would not reach the
# template as such.
_RESERVED_VARIABLES = {"messages", "tools", "self", "budget", "chat_template", "tokenize"}


class PromptBuilder:
    """Encodes prompts for one model."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        tokenizer: Tokenizer,
        options: Mapping[str, Any],
        *,
        max_tokens: int,
        template: str | None = None,
        truncate: bool = False,
        prompt_logprobs: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        """
        Args:
            folder: of the model.
            options: of prompts that do not have their own, by the names of
                `quantkit.prompts.options.OPTIONS`.
            max_tokens: maximum length of a prompt with its continuation.
            template: for conversations; see `chat_format`.
            truncate: cut off the beginning of a prompt that is too long, instead of failing.
            prompt_logprobs: whether the runner returns log-probabilities of prompts.
            grammars: of the model; None if its runner does not restrict answers, as XLA's.
        """
        self._folder = folder
        self._config = config
        self._tokenizer = tokenizer
        self._options = options
        self._max_tokens = max_tokens
        self._template = template
        self._truncate = truncate
        self._prompt_logprobs = prompt_logprobs
        self._grammars = grammars

    def load_chat_format(self) -> None:
        """Load the chat format and the sampling defaults before the first conversation is built, so
        that an error in the model's folder is not reported as one of the conversation.

        Raises:
            RequestError, CheckpointError: if the chat template or generation_config.json is
                damaged.
        """
        _ = self._chat
        _ = self._chat_defaults

    def build(self, fields: PromptFields) -> Prompt:
        """Encode a prompt, and check it with its options.

        Raises:
            RequestError: for a value of the wrong type or out of range, a prompt that is too long,
                or a grammar that is not supported.
        """
        request, stop, fills_context = self._parse_options(fields)
        with name_argument_in_errors(fields.kind, fields.place):
            ids = self._encode(fields)
        # A chat format may end a turn with another token than the one that ends texts.
        if fields.kind == "messages":
            request = replace(request, end_ids=self._chat.end_ids)
        kept_ids = ids
        if self._truncate and ids:
            kept_ids = truncate_prompt(
                ids, self._max_tokens, request.max_new_tokens, self._config.bos_token_id
            )
        if fills_context:
            request = replace(request, max_new_tokens=max(1, self._max_tokens - len(kept_ids)))
        with name_argument_in_errors(fields.kind, fields.place):
            request = with_prompt(self._config, request, kept_ids, self._max_tokens)
        grammar = fields.grammar
        form = None
        if fields.is_split:
            with name_argument_in_errors("tools"):
                form, call_grammar = self._find_form(fields.tools, ids)
            # A protocol does not allow a format of the answer together with tools.
            grammar = grammar or call_grammar
        if form is not None:
            # Special tokens leave no text. Those that mark the parts of an answer are spelled out
            # for its parser.
            request = replace(request, spelled=form.find_hidden_marks(self._tokenizer))
        prompt = Prompt(
            kind=fields.kind,
            request=request,
            stop=stop,
            is_continued=_is_continued(fields),
            is_truncated=len(kept_ids) < len(ids),
            grammar=grammar,
            form=form,
        )
        if grammar is not None:
            if fields.grammar is not None:
                argument = "response_format"
            else:
                argument = "tool_choice"
            with name_argument_in_errors(argument):
                self._require_compiled(prompt, argument)
        return prompt

    def _parse_options(self, fields: PromptFields) -> tuple[Request, list[str], bool]:
        """Parse the options of a prompt, completed by the defaults.

        Returns:
            The request without its prompt, its stop strings, and whether the continuation may fill
            the context.
        """
        # The sampling options in generation_config.json are meant for conversations. Other prompts
        # are continued greedily by default, as by `quantkit.generate`.
        if fields.kind == "messages":
            defaults = self._chat_defaults
        else:
            defaults = {}
        options = {**defaults, **self._options, **fields.options}
        # Without a number, the answer may fill the context. The length of the prompt, which that
        # depends on, is not known before the options are checked.
        fills_context = options.get("max_new_tokens") is None
        if fills_context:
            options["max_new_tokens"] = 1
        request, stop = parse_request_options(options)
        # The programs compiled for XLA return no log-probabilities of prompts.
        if request.scores_prompt and not self._prompt_logprobs:
            argument = "echo" if "echo" in fields.options else "logprobs"
            raise create_prompt_logprobs_error(argument)
        return request, stop, fills_context

    def _encode(self, fields: PromptFields) -> list[int]:
        """Convert a prompt to token ids."""
        value = fields.value
        if fields.kind == "token_ids":
            # `isinstance` would accept booleans.
            if not isinstance(value, list) or not all(type(item) is int for item in value):
                raise wrong_type("token_ids", value, "a list of token ids")
            return prompt_ids(value)
        if fields.kind == "prompt":
            if not isinstance(value, str):
                raise wrong_type("prompt", value, "a string")
            require_flags(specials=fields.specials)
            return text_ids(self._tokenizer, value, specials=bool(fields.specials))
        variables = fields.variables
        if not isinstance(value, list):
            raise wrong_type("messages", value, "a list of objects with a role and a content")
        tools = None
        if fields.definitions is not None:
            tools = _require_objects("tools", fields.definitions)
        if not isinstance(variables, dict):
            raise wrong_type("chat_template_kwargs", variables, "an object")
        reserved = variables.keys() & _RESERVED_VARIABLES
        if reserved:
            problem = f"'{min(reserved)}' is reserved, and cannot be a variable of the template"
            raise RequestError(problem, argument="chat_template_kwargs")
        return self._chat.encode(value, tools=tools, **variables)

    def _find_form(
        self, tools: Tools | None, ids: list[int]
    ) -> tuple[AnswerForm | None, str | None]:
        """Find the form of an answer, and the grammar of the calls that it must have."""
        # A template may print the mark that begins the reasoning, so the prompt matters.
        reasoning = find_reasoning(self._tokenizer, ids)
        if tools is None:
            if reasoning is None:
                return None, None
            return AnswerForm(reasoning=reasoning), None
        # Other formats have refused the tools while the prompt was encoded.
        assert isinstance(self._chat, TemplateChat)
        special_tokens = self._tokenizer.special_tokens or {}
        syntax = recognize_syntax(self._chat.source(with_tools=True), special_tokens)
        if syntax is None:
            raise RequestError(
                "the tool call format of this model is unknown",
                hint='leave out the tools, or use "tool_choice": "none"',
            )
        form = AnswerForm(syntax, tuple(tools.parameters), tools.parallel, reasoning)
        return form, tool_grammar(tools, syntax, self._tokenizer)

    def _require_compiled(self, prompt: Prompt, argument: str) -> None:
        """Raise a `RequestError` if the grammar of a prompt is not supported."""
        # The programs compiled for XLA take no masks of tokens.
        if self._grammars is None:
            raise RequestError(
                "XLA does not support constrained answers", hint=f"leave out '{argument}'"
            )
        samples = prompt.request.samples
        if samples > MAX_CONSTRAINED:
            expected = f"at most {MAX_CONSTRAINED} with a {argument}"
            raise RequestError("n is out of range", found=samples, expected=expected, argument="n")
        # The result is dropped. A grammar that cannot be compiled is reported here, before the
        # request is run.
        prompt.bind_grammar(self._grammars)

    @cached_property
    def _chat(self) -> Chat:
        return chat_format(self._folder, self._tokenizer, self._template)

    @cached_property
    def _chat_defaults(self) -> SamplingOptions:
        return sampling_defaults(self._folder)


def _require_objects(name: str, value: object) -> list[dict[str, Any]]:
    """Require a list of objects; raise a `RequestError` that names the argument otherwise."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong_type(name, value, "a list of objects")
    return value


def _is_continued(fields: PromptFields) -> bool:
    """Tell whether the last message of a conversation is continued, instead of answered."""
    if fields.kind != "messages" or not isinstance(fields.variables, dict):
        return False
    return bool(fields.variables.get("continue_final_message"))
