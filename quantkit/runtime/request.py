"""Requests to a model, checked before anything is computed, and their completions; without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import as_integer, as_strings, as_token_rows, require_instance
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.runtime.slots import FEW_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.runtime.constraint import ConstraintFactory
    from quantkit.text.tokenizer import Tokenizer

MAX_NEW_TOKENS = 100
"""The maximum number of new tokens by default."""

BATCH_SIZE = 8
"""Prompts that run together by default."""

TokenIds: TypeAlias = "Sequence[int] | Tensor"
"""A prompt as a model takes it: a list of ids, or a tensor of integers, [T] or [1, T]."""

DRAFT_TOKENS = 8
"""The number of tokens that are proposed at a time at most, by default."""

MAX_DRAFT_TOKENS = FEW_ROWS - 1
"""A step that verifies proposals also has a row of the last token. Up to `FEW_ROWS` rows of a
sequence, each row has the numbers that it has alone.
"""

# The likeliest tokens whose log-probabilities can be requested at each position.
MAX_LOGPROBS = 100
# Continuations of one prompt.
MAX_SAMPLES = 4096

BEAM_SEARCH = {"num_beams", "beams", "beam_size", "beam_width", "best_of", "use_beam_search"}
"""The names of its options in other libraries."""

MIN_ROOM = 16
"""If a prompt leaves room for at least this many new tokens, the error suggests fewer new tokens
instead of a shorter prompt.
"""

FinishReason = Literal["stop", "length"]
"""An end token or stop string, or the maximum number of new tokens."""

_SHOW_HOW = (
    "tokenizer.encode(text) gives them, and quantkit.stream(model, tokenizer, text) takes the text"
    " itself"
)


class PromptLengthError(RequestError):
    """A prompt and its new tokens exceed the model's context."""


@dataclass(frozen=True)
class Request:
    """A prompt and the options of its continuations.

    Attributes:
        prompt: token ids, not empty.
        max_new_tokens: the maximum number; 0 where only the prompt is scored.
        samples: continuations, each drawn separately; a seed is increased by 1 for each.
        logprobs: return the log-probability of each token drawn, and of this many of the likeliest
            tokens; None is of none at all.
        echo: whether to return the same for the prompt's tokens.
        end_ids: tokens that end it, besides those that end any text of the model.
        draft_tokens: that are proposed at a time at most; None is the engine's number, and 0
            proposes none.
        spelled: special tokens that the text shows, with their spellings.
        constraint: makes for each continuation what restricts its tokens; not for XLA. None allows
            all.
    """

    prompt: list[int]
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    samples: int = 1
    logprobs: int | None = None
    echo: bool = False
    end_ids: tuple[int, ...] = ()
    draft_tokens: int | None = None
    spelled: Mapping[int, str] = field(default_factory=dict)
    constraint: ConstraintFactory | None = None

    @property
    def length(self) -> int:
        """Count the tokens of the prompt and a continuation together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def scores_prompt(self) -> bool:
        """Tell whether log-probabilities of the prompt's tokens are requested."""
        return self.echo and self.logprobs is not None


@dataclass
class Logprobs:
    """Natural logarithms of probabilities, as the model gives them before any sampling option.

    Attributes:
        tokens: of each token; None for the first of a prompt, which follows nothing.
        top: the likeliest tokens in the place of each, by id, the likeliest first.
    """

    tokens: list[float | None] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)

    def add(self, tokens: Sequence[float | None], top: Sequence[dict[int, float]]) -> None:
        self.tokens += tokens
        self.top += top

    def cut(self, stop: int, *, start: int = 0) -> Logprobs:
        """Copy the log-probabilities of the tokens from `start` to `stop`."""
        return Logprobs(self.tokens[start:stop], self.top[start:stop])


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        prompt: the number of the prompt, from 0.
        sample: the number of the continuation among those of the prompt, from 0.
        token_ids: new tokens, without an end token; after the prompt's, where that is echoed.
        text: the same as text, without what a stop string cut off; None without a tokenizer.
        finish_reason: ``stop`` for an end token or a stop string, ``length`` for the maximum number
            of new tokens.
        stop: the stop string that was found.
        prompt_tokens: of the prompt.
        logprobs: of `token_ids`, if requested.
        end_token: the token that ended it, which is not among `token_ids`; None if something else
            ended it.
        end_logprobs: of `end_token`, if requested.
    """

    prompt: int
    sample: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stop: str | None
    prompt_tokens: int
    logprobs: Logprobs | None = None
    end_token: int | None = None
    end_logprobs: Logprobs | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values; log-probabilities only if requested."""
        values: dict[str, Any] = {
            "prompt": self.prompt,
            "sample": self.sample,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop": self.stop,
            "prompt_tokens": self.prompt_tokens,
            "token_ids": self.token_ids,
        }
        if self.logprobs is not None:
            # Pairs, because keys of JSON objects are strings.
            top: list[list[list[float]]] = []
            for logprobs in self.logprobs.top:
                top.append([[token, logprob] for token, logprob in logprobs.items()])
            values["logprobs"] = {"tokens": self.logprobs.tokens, "top": top}
        return values


@dataclass(frozen=True)
class Delta:
    """The part of a continuation that one step added.

    Attributes:
        sample: the number of the continuation, among those of its prompt.
        text: new text; may be empty, because text that may begin a stop string is withheld.
        token_ids: new tokens.
        logprobs: of `token_ids`, if requested.
        completion: all of it, once it has ended.
        prompt: the number of the prompt.
        prompt_logprobs: of the prompt's tokens, if requested, with what is delivered first.
    """

    sample: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    completion: Completion | None = None
    prompt: int = 0
    prompt_logprobs: Logprobs | None = None


def require_model(name: str, model: object, kinds: type | tuple[type, ...]) -> None:
    """Raise an error if an argument is not a model, but a path or the pair of `quantkit.load`."""
    require_instance(
        name, model, kinds, "a model; model, tokenizer = quantkit.load(path) gives one"
    )


def prompt_ids(
    prompt: str | TokenIds, tokenizer: Tokenizer | None = None, *, specials: bool = False
) -> list[int]:
    """Convert a prompt to a list of token ids; a string is encoded by `text_ids`.

    Raises `RequestError` if it is a string without a tokenizer, not integers, or several prompts.
    """
    if isinstance(prompt, str) and tokenizer is not None:
        return text_ids(tokenizer, prompt, specials=specials)
    if isinstance(prompt, (str, bytes)):
        raise RequestError(
            "the prompt is a string",
            found=format_value(prompt),
            expected="token ids",
            hint=_SHOW_HOW,
        )
    try:
        rows = as_token_rows(prompt)
    except TypeError as error:
        raise RequestError(
            "the prompt is not a list of token ids",
            found=type(prompt).__name__,
            expected="integers in a list, or a tensor [T] or [1, T]",
            hint=_SHOW_HOW,
        ) from error
    if len(rows) > 1:
        raise RequestError(
            "one prompt at a time", found=f"{len(rows)} prompts", expected="ids [T] or [1, T]"
        )
    return rows[0]


def check_max_new_tokens(max_new_tokens: object) -> int:
    """Check the maximum number of new tokens, which is at least 1."""
    count = as_integer("max_new_tokens", max_new_tokens)
    if count < 1:
        raise RequestError(
            "nothing to generate",
            found=f"{count} new tokens",
            expected="at least 1",
            argument="max_new_tokens",
        )
    return count


def check_stop_strings(stop: object, tokenizer: Tokenizer | None) -> list[str]:
    """Check stop strings as `stop_strings` does, and that there is a tokenizer to find them with.

    Raises `RequestError` for both.
    """
    stops = stop_strings(stop)
    if stops and tokenizer is None:
        raise RequestError("stop strings require a tokenizer", hint="pass `tokenizer`")
    return stops


def stop_strings(stop: object) -> list[str]:
    """Check one stop string or several, and return a list.

    Raises `RequestError` if they are not strings, or one is empty or invalid Unicode.
    """
    stops = as_strings("stop", stop)
    # The empty string is in every text, so nothing would be generated.
    if "" in stops:
        raise RequestError("a stop string is empty", argument="stop")
    for stop_string in stops:
        # A lone surrogate never occurs in decoded text.
        try:
            stop_string.encode()
        except UnicodeEncodeError as error:
            invalid_character = f"{stop_string[error.start]!r}"
            raise RequestError(
                "a stop string is not valid Unicode", found=invalid_character, argument="stop"
            ) from error
    return stops


def text_ids(tokenizer: Tokenizer, text: str, *, specials: bool) -> list[int]:
    """Encode a prompt that is a string; raises `RequestError` if it is empty or invalid Unicode."""
    if not text:
        raise RequestError("the prompt is empty")
    return tokenizer.encode(text, specials=specials)


def truncate_prompt(
    ids: list[int], max_tokens: int, max_new_tokens: int, bos: int | None
) -> list[int]:
    """Remove the beginning of a prompt that is too long together with its new tokens; keep BOS."""
    max_prompt_tokens = max(1, max_tokens - max_new_tokens)
    if len(ids) <= max_prompt_tokens:
        return ids
    # Models are trained with BOS at the beginning of every text. A single token is better the
    # last one of the prompt.
    if ids[0] == bos and max_prompt_tokens > 1:
        return [ids[0], *ids[len(ids) - max_prompt_tokens + 1 :]]
    return ids[len(ids) - max_prompt_tokens :]


def create_request(
    config: ModelConfig,
    ids: list[int],
    max_new_tokens: object,
    sampling: SamplingOptions,
    *,
    samples: object = 1,
    logprobs: object = None,
    echo: bool = False,
) -> Request:
    """Create a request and check it against a model.

    Raises the errors of `create_promptless_request` and `with_prompt`.
    """
    request = create_promptless_request(
        max_new_tokens, sampling, samples=samples, logprobs=logprobs, echo=echo
    )
    return with_prompt(config, request, ids)


def create_promptless_request(
    max_new_tokens: object,
    sampling: SamplingOptions,
    *,
    samples: object = 1,
    logprobs: object = None,
    echo: bool = False,
    draft_tokens: object = None,
) -> Request:
    """Create a request without its prompt, checked as far as possible without a model.

    Raises `RequestError` for numbers out of range or options that exclude each other.
    """
    unknown = set(sampling) - set(SamplingOptions.__annotations__)
    beam_options = unknown & BEAM_SEARCH
    if beam_options:
        raise create_beam_search_error(min(beam_options))
    # As Python does for an unknown argument; the name is chosen in a fixed order.
    if unknown:
        raise TypeError(f"unexpected keyword argument '{min(unknown)}'")
    params = SamplingParams(**sampling)
    count = as_integer("n", samples, 1)
    top = None if logprobs is None else as_integer("logprobs", logprobs)
    if count > MAX_SAMPLES:
        raise RequestError(
            "n is out of range",
            found=format_value(count),
            expected=f"1 to {MAX_SAMPLES}",
            argument="n",
        )
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        expected = f"0 to {MAX_LOGPROBS}"
        raise RequestError(
            "logprobs is out of range", found=top, expected=expected, argument="logprobs"
        )
    new_tokens = as_integer("max_new_tokens", max_new_tokens)
    # One of the two options suggests that the prompt is to be scored, which needs both.
    if new_tokens == 0 and echo != (top is not None):
        hint = Message(
            "scoring a prompt requires both ", Option("echo"), " and ", Option("logprobs")
        )
        raise RequestError(
            "nothing to generate", found="0 new tokens", hint=hint, argument="max_new_tokens"
        )
    if new_tokens != 0 or not echo:
        new_tokens = check_max_new_tokens(new_tokens)
    elif count > 1:
        raise RequestError(
            "a prompt that is only scored has one result", found=f"n = {count}", argument="n"
        )
    drafts = None if draft_tokens is None else check_draft_tokens(draft_tokens)
    return Request(
        prompt=[],
        max_new_tokens=new_tokens,
        sampling=params,
        samples=count,
        logprobs=top,
        echo=echo,
        draft_tokens=drafts,
    )


def check_draft_tokens(value: object) -> int:
    """Check the number of tokens that may be proposed at a time."""
    count = as_integer("draft_tokens", value)
    if not 0 <= count <= MAX_DRAFT_TOKENS:
        raise RequestError(
            Message(Option("draft_tokens"), " is out of range"),
            found=count,
            expected=f"0 to {MAX_DRAFT_TOKENS}",
            argument="draft_tokens",
        )
    return count


def with_prompt(
    config: ModelConfig, request: Request, ids: list[int], max_tokens: int | None = None
) -> Request:
    """Set the prompt of a request and check both against a model.

    Raises `RequestError` as `check_total_length`, or if a bias is of unknown tokens.
    """
    request.sampling.require_vocabulary(config.vocab_size)
    check_total_length(config, ids, request.max_new_tokens, max_tokens)
    return replace(request, prompt=ids)


def create_beam_search_error(name: str) -> RequestError:
    """Create the error for an option of beam search."""
    hint = Message("draw several samples with ", Option("n"))
    return RequestError("beam search is not supported", found=name, hint=hint, argument=name)


def create_prompt_logprobs_error(name: str) -> RequestError:
    """Create the error for log-probabilities of prompts if XLA runs the model; `name` is the
    argument to leave out.
    """
    problem = "XLA does not support log-probabilities of prompts"
    return RequestError(problem, hint=Message("leave out ", Option(name)), argument=name)


def check_total_length(
    config: ModelConfig, ids: Sequence[int], max_new_tokens: int, max_tokens: int | None = None
) -> int:
    """Check a prompt, and count its tokens together with the new ones.

    The sum is at most `max_tokens`; None is the model's context. Raises `RequestError` if it is
    larger, or if the prompt is empty or contains unknown ids or those of images.
    """
    if not ids:
        raise RequestError("the prompt is empty")
    # An embedding lookup beyond the vocabulary is undefined on some devices.
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        valid_ids = f"0 to {config.vocab_size - 1}"
        raise RequestError(
            "the prompt contains token ids outside the vocabulary", expected=valid_ids
        )
    # The embeddings of such tokens are placeholders for the output of an encoder.
    media = set(ids).intersection(config.media_tokens)
    if media:
        raise RequestError(
            "the prompt contains a placeholder token for an image, video or sound, which is not"
            " supported here",
            found=f"token {min(media)}",
            expected="text",
        )
    length = len(ids) + max_new_tokens
    if max_tokens is None:
        max_tokens = config.max_positions
    if length > max_tokens:
        room = max_tokens - len(ids)
        min_new_tokens = min(max_new_tokens, MIN_ROOM)
        if max_tokens == config.max_positions:
            exceeded = "the model's context"
        elif max_tokens == config.rope_switch:
            exceeded = "the length at which rotary positions switch"
        else:
            exceeded = "the length of a sequence here"
        raise PromptLengthError(
            f"prompt and new tokens exceed {exceeded}",
            found=length,
            expected=f"at most {max_tokens}",
            # Fewer new tokens help only if the prompt leaves room for enough of them.
            hint="use a shorter prompt"
            if room < min_new_tokens
            else Message("lower ", Option("max_new_tokens")),
        )
    return length


def describe_warm_up(num_steps: int) -> str:
    """Write a note on the number of steps that an engine has compiled."""
    if num_steps == 0:
        return "nothing is compiled: the steps are eager"
    plural = "" if num_steps == 1 else "s"
    return f"{num_steps} step{plural} compiled"
