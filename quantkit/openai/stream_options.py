"""``stream`` and ``stream_options`` of requests."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from quantkit.base.arguments import require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.openai.fields import require_keys

# OpenAI's obfuscation pads chunks; the option has no effect here.
_KEYS = {"include_usage", "include_obfuscation", "continuous_usage_stats"}


@dataclass(frozen=True)
class StreamOptions:
    """The options of a streamed response.

    Attributes:
        include_usage: whether the last chunk counts tokens.
    """

    include_usage: bool = False


def pop_stream_options(body: MutableMapping[str, Any]) -> StreamOptions | None:
    """Remove the fields of streams from a request, and parse them; None if the response is not
    streamed.

    Raises:
        RequestError: for a value of the wrong type, and for options that are unknown, not
            supported, or without a stream.
    """
    is_streamed = body.pop("stream", None)
    options = body.pop("stream_options", None)
    # Null means the default in OpenAI's API.
    if is_streamed is None:
        is_streamed = False
    if options is None:
        options = {}
    require_flags(stream=is_streamed)
    if not isinstance(options, Mapping):
        raise RequestError(
            "'stream_options' is of the wrong type",
            found=format_value(options),
            expected="an object",
            argument="stream_options",
        )
    if options and not is_streamed:
        raise RequestError("'stream_options' requires 'stream'", argument="stream_options")
    require_keys(options, _KEYS)
    flags = {key: value for key, value in options.items() if value is not None}
    require_flags(**flags)
    if flags.get("continuous_usage_stats", False):
        problem = "'continuous_usage_stats' is not supported"
        raise RequestError(problem, hint="leave it out", argument="stream_options")
    if not is_streamed:
        return None
    return StreamOptions(include_usage=flags.get("include_usage", False))
