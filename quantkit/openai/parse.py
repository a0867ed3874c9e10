"""Parse requests of all of OpenAI's APIs that are supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.openai.chat import parse_chat
from quantkit.openai.completions import parse_completion
from quantkit.openai.request import CHAT, COMPLETIONS, ApiRequest

PARSERS: Mapping[str, Callable[[Mapping[str, Any]], ApiRequest]] = {
    CHAT: parse_chat,
    COMPLETIONS: parse_completion,
}
"""The parser of each API's requests, by the API's path."""


def parse_request(url: str, body: Mapping[str, Any]) -> ApiRequest:
    """Parse a request of the API with a path of `PARSERS`.

    Raises:
        RequestError: for a request that is invalid or not supported.
    """
    return PARSERS[url](body)
