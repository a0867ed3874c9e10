"""The options of a prompt's continuations, by their names in prompt files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.base.arguments import require_flags
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.runtime.request import Request, create_promptless_request, stop_strings
from quantkit.runtime.sampling_params import SamplingOptions

if TYPE_CHECKING:
    from quantkit.base import strict_json
else:
    strict_json = LateModule("quantkit.base.strict_json")

SHARED_OPTIONS = frozenset({"n", "stop", "draft_tokens", *SamplingOptions.__annotations__})
"""The options that have the same name and the same values in OpenAI's API."""

OPTIONS = SHARED_OPTIONS | {"max_new_tokens", "logprobs", "echo"}
"""All options of a prompt's continuations."""

# Integers of 64 bits have at most 20 digits.
_NUMBER = re.compile(r"-?\d{1,20}", re.ASCII)


def parse_request_options(options: Mapping[str, Any]) -> tuple[Request, list[str]]:
    """Convert options to a request without its prompt, and the strings at which its text ends.

    Raises:
        RequestError: for a value of the wrong type or out of its range.
    """
    stop = stop_strings(options.get("stop", ()))
    sampling: Any = {}
    for key in SamplingOptions.__annotations__:
        if key in options:
            sampling[key] = options[key]
    if isinstance(sampling.get("logit_bias"), dict):
        sampling["logit_bias"] = _parse_bias(sampling["logit_bias"])
    echo = options.get("echo", False)
    require_flags(echo=echo)
    request = create_promptless_request(
        options["max_new_tokens"],
        sampling,
        samples=options.get("n", 1),
        logprobs=options.get("logprobs"),
        echo=echo,
        draft_tokens=options.get("draft_tokens"),
    )
    return request, stop


def _parse_bias(bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """Parse the token ids of biases. Raises `RequestError` for a token that occurs twice."""
    tokens = [_parse_token(key) for key in bias]
    # Spellings such as "7" and "07" differ as keys of JSON, but name one token.
    duplicate = strict_json.find_duplicate(tokens)
    if duplicate is not None:
        raise RequestError(
            Message(Option("logit_bias"), " names a token twice"),
            found=duplicate,
            argument="logit_bias",
        )
    return dict(zip(tokens, bias.values(), strict=True))


def _parse_token(key: Any) -> Any:
    """Parse a token id, which JSON spells as a string."""
    if isinstance(key, str) and _NUMBER.fullmatch(key):
        return int(key)
    return key
