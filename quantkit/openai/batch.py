"""OpenAI's batch format: a request on each line of a file, and its response on a line of another
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.base.arguments import as_string
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.openai.parse import PARSERS, parse_request
from quantkit.openai.request import ApiRequest

_KEYS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True)
class BatchRequest:
    """A line with a request.

    Attributes:
        custom_id: by which its author finds the response.
    """

    custom_id: str
    request: ApiRequest


def is_batch_line(values: Mapping[str, Any]) -> bool:
    """Tell whether a line is in this format, even if its body is missing."""
    # A request without its body has an error of its own.
    return "body" in values or {"custom_id", "url"} <= values.keys()


def parse_batch_line(values: Mapping[str, Any]) -> BatchRequest:
    """Parse a line in OpenAI's batch format.

    Raises:
        RequestError: for another method or URL, and as `parse_request`.
    """
    body = values.get("body")
    if body is None:
        raise RequestError(
            "'body' is missing", found=", ".join(values), expected="an object with the request"
        )
    unknown_keys = values.keys() - _KEYS
    if unknown_keys:
        raise RequestError(
            f"unknown key {format_value(min(unknown_keys))} next to 'body'",
            expected=", ".join(sorted(_KEYS)),
        )
    custom_id = as_string("custom_id", values.get("custom_id"))
    url = values.get("url")
    if not custom_id:
        raise RequestError("'custom_id' is empty")
    # OpenAI requires the method, although there is only one.
    if values.get("method", "POST") != "POST":
        raise RequestError(
            "'method' is not known", found=format_value(values["method"]), expected="POST"
        )
    if not isinstance(url, str) or url not in PARSERS:
        raise RequestError(
            "'url' is not known", found=format_value(url), expected=" or ".join(PARSERS)
        )
    if not isinstance(body, Mapping):
        raise RequestError(
            "'body' is of the wrong type", found=format_value(body), expected="an object"
        )
    return BatchRequest(custom_id, parse_request(url, body))


def build_batch_line(number: int, custom_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Build the line with the response to a request.

    Args:
        number: of the request in its file, from 0.
        body: the response.
    """
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return {
        "id": f"batch_req_{number}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }


def is_batch_response(line: Mapping[str, Any]) -> bool:
    """Tell whether a line was built by `build_batch_line`."""
    return "response" in line


def read_batch_number(line: Mapping[str, Any]) -> int:
    """Read from a line of `build_batch_line` the number of the request."""
    # The format has no field for the number, which is a part of the identifier.
    return int(line["id"].rpartition("_")[2])
