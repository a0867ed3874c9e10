"""Prompts in a file of JSON lines, read and checked before a model is loaded, without torch.

Each line is an object with one of

    prompt       a string, which is continued
    messages     a conversation, which is answered: objects with a role and a content, as chat
                 templates take them
    token_ids    the prompt as a list of token ids

and may have

    id           any JSON, which comes with the result
    max_new_tokens, stop, n, logprobs, echo, temperature, top_p, top_k, min_p, repetition_penalty,
    presence_penalty, frequency_penalty, logit_bias, seed
                 how it is continued, in place of the options for all lines
    draft_tokens how many tokens are proposed at a time at most; 0 to 15
    response_format
                 the form of the answer, as in OpenAI's API: {"type": "json_schema", "json_schema":
                 {"name": "...", "schema": {...}}}, or {"type": "json_object"}
    specials     true: spellings of special tokens in the prompt, such as <|eot_id|>, mean those
                 tokens
    tools        that may be called in an answer to messages, as JSON schemas
    chat_template_kwargs
                 variables for the chat template

A line with ``body`` is a request in OpenAI's batch format; see
`quantkit.jobs.inference.openai_batch`.

Null is as good as absent. Other keys are refused, and so are keys that are there twice and numbers
that would not come back as they are: of no value in 64 bits, and in an ``id`` of more digits than
those hold.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.answers.form import AnswerForm, tool_grammar
from quantkit.answers.reasoning import reasoning_of
from quantkit.answers.syntaxes import syntax_of
from quantkit.answers.tools import Tools, check_tools
from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import require_flags, wrong_type
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.grammar.response_format import response_grammar
from quantkit.jobs.inference.json_lines import (
    EXPECTED,
    find_duplicate,
    name_argument_in_errors,
    parse_objects,
    report_errors_at,
)
from quantkit.jobs.inference.openai_batch import (
    OF_TOOLS,
    BatchRequest,
    from_batch_line,
    is_batch_line,
    split_prompts,
)
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.runtime.request import (
    BEAM_SEARCH,
    Request,
    create_beam_search_error,
    create_prompt_logprobs_error,
    create_promptless_request,
    prompt_ids,
    stop_strings,
    text_ids,
    truncate_prompt,
    with_prompt,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.text.chat import Chat, TemplateChat, chat_format
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quantkit.grammar.grammars import Grammars

_log = logging.getLogger(__name__)

STDIN = "-"
OPTIONS = {
    "max_new_tokens",
    "stop",
    "n",
    "logprobs",
    "echo",
    "draft_tokens",
    *SamplingOptions.__annotations__,
}
"""How prompts are continued: of all lines, or of one."""

_PROMPTS = ("prompt", "messages", "token_ids")
_OF_MESSAGES = ("tools", "chat_template_kwargs")
_KEYS = {*_PROMPTS, *_OF_MESSAGES, *OPTIONS, "id", "specials", "response_format"}
# Names in quantkit, and arguments of transformers' `apply_chat_template`: they would not reach the
# template as such.
_NO_VARIABLES = {"messages", "tools", "self", "budget", "chat_template", "tokenize"}
# Names of the same options in other programs, for hints.
_ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "text": "prompt",
    "input": "prompt",
    "conversation": "messages",
    "conversations": "messages",
    "custom_id": "id",
    "prompt_token_ids": "token_ids",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}
# Samples, as in OpenAI's API: each needs memory.
_MAX_CONSTRAINED = 128
# Integers of 64 bits have at most 20 digits.
_NUMBER = re.compile(r"-?\d{1,20}", re.ASCII)


@dataclass(frozen=True)
class Prompt:
    """A line that was found sound.

    Attributes:
        request: how it is continued.
        stop: strings at which the text ends.
        known_by: its ``id``, if it has one.
        messages: whether it is a conversation.
        token_ids: whether it was given as such.
        continued: whether the last message is continued, instead of answered.
        truncated: whether its beginning was cut off.
        grammar: of the new text, for `Grammars`; None allows any.
        form: how the answer to a request in OpenAI's format is split into reasoning, content and
            calls; None for text.
        batch: what the answer repeats of a line in OpenAI's batch format.
    """

    request: Request
    stop: list[str]
    known_by: dict[str, Any]
    messages: bool
    token_ids: bool
    truncated: bool
    grammar: str | None = None
    form: AnswerForm | None = None
    batch: BatchRequest | None = None
    continued: bool = False

    @property
    def begins_answer(self) -> bool:
        """Return whether the new text is an answer from its first character."""
        return self.messages and not self.continued and not self.request.echo

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


class PromptReader:
    """Makes requests to one model of lines."""

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
            options: how lines are continued that say nothing else, of `OPTIONS`.
            max_tokens: maximum length of a prompt with its continuation.
            template: for conversations; see `chat_format`.
            truncate: cut too long a prompt at its beginning, instead of refusing it.
            prompt_logprobs: whether the runner returns log-probabilities of prompts.
            grammars: of the model; None where its runner does not restrict answers, which is XLA's.
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

    def read(self, content: bytes, name: str) -> list[list[Prompt]]:
        """Read the prompts of each line of a file: one, or those of a request in OpenAI's format.

        Args:
            name: of the file, for messages.

        Raises:
            RequestError: for a file of another kind, or a line that makes no sense, with its
                number.
            CheckpointError: if the model's chat template or generation_config.json is damaged.
        """
        lines: list[list[Prompt]] = []
        line_numbers: dict[str, int] = {}
        other_models = set[str]()
        for number, values in parse_objects(content, name):
            batch = None
            with report_errors_at(f"{name}:{number}"):
                if is_batch_line(values):
                    batch, values = from_batch_line(values, self._folder.name)
                    # Callers find an answer by its `custom_id`.
                    first_number = line_numbers.setdefault(batch.custom_id, number)
                    if first_number != number:
                        raise RequestError(
                            f"'custom_id' is the same as in line {first_number}",
                            found=format_value(batch.custom_id),
                        )
                    if batch.model is not None and batch.model != self._folder.name:
                        other_models.add(batch.model)
                line_values = {key: value for key, value in values.items() if value is not None}
                known_keys = _KEYS | {*OF_TOOLS} if batch else _KEYS
                _require_known(values, known_keys)
                kind = _find_prompt_key(line_values)
            if kind == "messages":
                self._load_chat_format()
            with report_errors_at(f"{name}:{number}", batch.names if batch else {}):
                if "id" in values:
                    known_by = {"id": values["id"]}
                else:
                    known_by = {}
                lines.append(self._build_prompts(line_values, known_by, batch))
        # No error: files made for another name of the same model can be used as they are.
        if other_models:
            _log.warning(
                "%s: the requests name %s; %s answers them",
                name,
                ", ".join(sorted(other_models)),
                self._folder.name,
            )
        return lines

    def read_request(self, url: str, number: str, body: Mapping[str, Any]) -> list[Prompt]:
        """Read the prompts of a request to OpenAI's API.

        Args:
            url: the path of the API.
            number: the request's identifier.

        Raises:
            RequestError, CheckpointError: as `read`.
        """
        batch, values = from_batch_line(
            {"custom_id": number, "url": url, "body": body}, self._folder.name
        )
        line_values = {key: value for key, value in values.items() if value is not None}
        kind = _find_prompt_key(line_values)
        if kind == "messages":
            self._load_chat_format()
        with report_errors_at(None, batch.names):
            return self._build_prompts(line_values, {}, batch)

    def _load_chat_format(self) -> None:
        """Load the chat format and the sampling defaults outside of `report_errors_at`: an error in
        the model's folder is not one of the line.
        """
        _ = self._chat
        _ = self._chat_defaults

    def _build_prompts(
        self, line_values: Mapping[str, Any], known_by: dict[str, Any], batch: BatchRequest | None
    ) -> list[Prompt]:
        """Build the prompts of one line, of which only a request in OpenAI's format has several."""
        lines = [line_values] if batch is None else split_prompts(line_values)
        prompts: list[Prompt] = []
        for number, line in enumerate(lines):
            place = number if len(lines) > 1 else None
            prompt = self._build_prompt(
                _find_prompt_key(line), line, known_by, api=batch is not None, place=place
            )
            prompts.append(replace(prompt, batch=batch))
            self._require_few_constrained(prompt, len(lines))
        return prompts

    def _build_prompt(
        self,
        kind: str,
        line_values: Mapping[str, Any],
        known_by: dict[str, Any],
        *,
        api: bool,
        place: int | None,
    ) -> Prompt:
        """Build a prompt of a line; `place` is its number among several."""
        tools = None
        if api and kind == "messages":
            with name_argument_in_errors("tools"):
                tool_options = [line_values.get(key) for key in OF_TOOLS]
                tools = check_tools(*tool_options)
            # With "tool_choice": "none" there are no tools, and the template must not show them.
            definitions = None if tools is None else tools.definitions
            line_values = {**line_values, "tools": definitions}
        # The sampling options in generation_config.json are meant for conversations. Other prompts
        # are continued greedily by default, as by `quantkit.generate`.
        if kind == "messages":
            defaults = self._chat_defaults
        else:
            defaults = {}
        line_options = {key: line_values[key] for key in OPTIONS & line_values.keys()}
        chosen = {**defaults, **self._options, **line_options}
        # Without a number, the answer may fill the context. The length of the prompt, which that
        # depends on, is not known before the options are checked.
        fills = chosen.get("max_new_tokens") is None
        if fills:
            chosen["max_new_tokens"] = 1
        request, stop = parse_request_options(chosen)
        if request.scores_prompt and not self._prompt_logprobs:
            raise create_prompt_logprobs_error("echo" if "echo" in line_values else "logprobs")
        with name_argument_in_errors(kind, place):
            ids = self._encode_prompt(kind, line_values)
        if kind == "messages":
            request = replace(request, end_ids=self._chat.end_ids)
        cut = ids
        if self._truncate and ids:
            cut = truncate_prompt(
                ids, self._max_tokens, request.max_new_tokens, self._config.bos_token_id
            )
        if fills:
            request = replace(request, max_new_tokens=max(1, self._max_tokens - len(cut)))
        with name_argument_in_errors(kind, place):
            request = with_prompt(self._config, request, cut, self._max_tokens)
        response_format = line_values.get("response_format")
        grammar = None
        form = None
        if response_format is not None:
            with name_argument_in_errors("response_format"):
                grammar = response_grammar(response_format)
        if api and kind == "messages":
            with name_argument_in_errors("tools"):
                form, calls = self._form(tools, ids)
            if grammar is not None and tools is not None:
                raise RequestError(
                    "'response_format' and 'tools' cannot be combined",
                    hint='leave one of them out, or use "tool_choice": "none"',
                    argument="response_format",
                )
            grammar = grammar or calls
            # Special tokens leave no text. Those that mark the parts of an answer are spelled out
            # for its parser.
            spelled = {} if form is None else form.find_hidden_marks(self._tokenizer)
            request = replace(request, spelled=spelled)
        result = Prompt(
            request=request,
            stop=stop,
            known_by=known_by,
            messages=kind == "messages",
            token_ids=kind == "token_ids",
            truncated=len(cut) < len(ids),
            grammar=grammar,
            form=form,
        )
        if kind == "messages":
            variables = line_values.get("chat_template_kwargs", {})
            if variables.get("continue_final_message"):
                result = replace(result, continued=True)
        if grammar is not None:
            if response_format is not None:
                name = "response_format"
            else:
                name = "tool_choice"
            with name_argument_in_errors(name):
                self._require_compiled(result, name)
        return result

    def _form(self, tools: Tools | None, ids: list[int]) -> tuple[AnswerForm | None, str | None]:
        """Find the form of an answer, and the grammar of the calls that it must have."""
        # A template may print the mark that begins the reasoning, so the prompt matters.
        reasoning = reasoning_of(self._tokenizer, ids)
        if tools is None:
            if reasoning is None:
                return None, None
            return AnswerForm(reasoning=reasoning), None
        # Other formats have refused the tools while the prompt was encoded.
        assert isinstance(self._chat, TemplateChat)
        special_tokens = self._tokenizer.special_tokens or {}
        syntax = syntax_of(self._chat.source(with_tools=True), special_tokens)
        if syntax is None:
            raise RequestError(
                "the tool call format of this model is unknown",
                hint='leave out the tools, or use "tool_choice": "none"',
            )
        form = AnswerForm(syntax, tuple(tools.parameters), tools.parallel, reasoning)
        return form, tool_grammar(tools, syntax, self._tokenizer)

    def _require_compiled(self, prompt: Prompt, name: str) -> None:
        """Raise a `RequestError` if the grammar of a prompt is not supported."""
        if self._grammars is None:
            raise RequestError(
                "XLA does not support constrained answers", hint=f"leave out '{name}'"
            )
        samples = prompt.request.samples
        if samples > _MAX_CONSTRAINED:
            expected = f"at most {_MAX_CONSTRAINED} with a {name}"
            raise RequestError("n is out of range", found=samples, expected=expected, argument="n")
        # The result is dropped. A grammar that cannot be compiled is reported here, before the
        # request is run.
        prompt.bind_grammar(self._grammars)

    def _require_few_constrained(self, prompt: Prompt, count: int) -> None:
        """Raise a `RequestError` if there are too many answers with a grammar to `count` prompts
        such as this one.
        """
        answers = prompt.request.samples * count
        if prompt.grammar is not None and answers > _MAX_CONSTRAINED:
            raise RequestError(
                "too many answers with a response_format in one request",
                found=answers,
                expected=f"at most {_MAX_CONSTRAINED}",
                argument="prompt",
            )

    def _encode_prompt(self, kind: str, line_values: Mapping[str, Any]) -> list[int]:
        value = line_values[kind]
        if kind == "token_ids":
            if not isinstance(value, list) or not all(type(item) is int for item in value):
                raise wrong_type("token_ids", value, "a list of token ids")
            return prompt_ids(value)
        if kind == "prompt":
            if not isinstance(value, str):
                raise wrong_type("prompt", value, "a string")
            require_flags(specials=line_values.get("specials", False))
            return text_ids(self._tokenizer, value, specials=line_values.get("specials", False))
        tools = line_values.get("tools")
        variables = line_values.get("chat_template_kwargs", {})
        if not isinstance(value, list):
            raise wrong_type("messages", value, "a list of objects with a role and a content")
        if tools is not None and not _is_list_of_objects(tools):
            raise wrong_type("tools", tools, "a list of objects")
        if not isinstance(variables, dict):
            raise wrong_type("chat_template_kwargs", variables, "an object")
        reserved = variables.keys() & _NO_VARIABLES
        if reserved:
            problem = f"'{min(reserved)}' is reserved, and cannot be a variable of the template"
            raise RequestError(problem, argument="chat_template_kwargs")
        return self._chat.encode(value, tools=tools, **variables)

    @cached_property
    def _chat(self) -> Chat:
        return chat_format(self._folder, self._tokenizer, self._template)

    @cached_property
    def _chat_defaults(self) -> SamplingOptions:
        return sampling_defaults(self._folder)


def read_input(file: str | Path, description: str) -> bytes:
    """Read the content of a file, or of stdin for ``-``.

    Args:
        description: of the content, for the error.

    Raises:
        RequestError: if it cannot be read.
    """
    name = str(file)
    try:
        # Descriptor 0 is stdin, which stays open for others.
        is_stdin = name == STDIN
        with open(0 if is_stdin else file, "rb", closefd=not is_stdin) as source:
            return source.read()
    except OSError as error:
        raise RequestError(
            f"the {description} cannot be read: {error.strerror}", path=name
        ) from error


def parse_request_options(chosen: Mapping[str, Any]) -> tuple[Request, list[str]]:
    """Convert options to a request without its prompt, and the strings at which its text ends.
    Raises `RequestError` for a value of the wrong type or out of its range.
    """
    stop = stop_strings(chosen.get("stop", ()))
    sampling: Any = {}
    for key in SamplingOptions.__annotations__:
        if key in chosen:
            sampling[key] = chosen[key]
    bias = sampling.get("logit_bias")
    if isinstance(bias, dict):
        tokens = [_as_token(key) for key in bias]
        # Spellings such as "7" and "07" differ as keys of JSON, but name one token.
        duplicate = find_duplicate(tokens)
        if duplicate is not None:
            raise RequestError(
                Message(Option("logit_bias"), " names a token twice"),
                found=duplicate,
                argument="logit_bias",
            )
        sampling["logit_bias"] = dict(zip(tokens, bias.values(), strict=True))
    echo = chosen.get("echo", False)
    require_flags(echo=echo)
    request = create_promptless_request(
        chosen["max_new_tokens"],
        sampling,
        samples=chosen.get("n", 1),
        logprobs=chosen.get("logprobs"),
        echo=echo,
        draft_tokens=chosen.get("draft_tokens"),
    )
    return request, stop


def _is_list_of_objects(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(item, dict) for item in value)


def _as_token(key: Any) -> Any:
    """Parse a token id, which JSON spells as a string."""
    if isinstance(key, str) and _NUMBER.fullmatch(key):
        return int(key)
    return key


def _find_prompt_key(line_values: Mapping[str, Any]) -> str:
    """Find the key of the prompt. Raises `RequestError` unless there is just one, and nothing that
    goes with another.
    """
    kinds = [key for key in _PROMPTS if key in line_values]
    if not kinds:
        raise RequestError(
            "no prompt is given", found=", ".join(line_values) or "no keys", expected=EXPECTED
        )
    if len(kinds) > 1:
        raise RequestError(
            "the prompt is given twice", found=" and ".join(kinds), expected="one of them"
        )
    for key in ("specials", *_OF_MESSAGES):
        if key == "specials":
            required = "prompt"
        else:
            required = "messages"
        if key in line_values and kinds != [required]:
            raise RequestError(
                f"'{key}' requires '{required}'", found=f"'{kinds[0]}'", argument=key
            )
    return kinds[0]


def _require_known(values: Mapping[str, Any], known_keys: Collection[str]) -> None:
    """Raise a `RequestError` for an unknown key."""
    for key in values:
        # These are known and never supported, so a similar name would be no help.
        if key in BEAM_SEARCH:
            raise create_beam_search_error(key)
        if key not in known_keys:
            if key in _ELSEWHERE:
                suggestions = [_ELSEWHERE[key]]
            else:
                suggestions = difflib.get_close_matches(key, known_keys, 1)
            if suggestions:
                hint = f"did you mean '{suggestions[0]}'?"
            else:
                hint = None
            raise RequestError(f"unknown key {format_value(key)}", hint=hint, argument=key)
