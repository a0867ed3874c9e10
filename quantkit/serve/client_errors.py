"""Convert failures of requests to a server with OpenAI's API to errors of one line. Text from the
server is shown without control characters.
"""

from __future__ import annotations

import http.client
import json
import ssl
import textwrap
from http.client import HTTPResponse

from quantkit.base.json_values import format_value, spell_control_characters
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError, UnreachableError

# Characters of a server's message that are shown.
_MESSAGE = 500
# Bytes of the body of an error that are read: it may be a web page of any size.
_BODY_BYTES = 1 << 16


class ContextLengthError(RequestError):
    """A conversation is too long for the server's context."""


def create_refusal_error(url: str, response: HTTPResponse, *, with_key: bool) -> RequestError:
    """Create the error for a response whose status is not 200.

    Args:
        url: the server's address.
        with_key: whether the request had a key.
    """
    status = response.status
    message, code = server_message(response.read(_BODY_BYTES))
    answered = message or f"status {status} {spell_control_characters(response.reason)}".rstrip()
    # A redirect could lead the API key to another host.
    if 300 <= status < 400:
        location = response.headers.get("Location", "")
        return RequestError(
            f"{url} sends a redirect, which is not followed",
            found=format_value(location),
            hint="use that address if you trust it",
        )
    if status in (401, 403):
        if with_key:
            return RequestError(
                f"{url} does not accept the API key: {answered}",
                hint=Message("check ", Option("api_key")),
            )
        return RequestError(
            f"{url} requires an API key: {answered}", hint=Message("set ", Option("api_key"))
        )
    if status == 404:
        if code == "model_not_found":
            return RequestError(
                f"{url} does not have this model: {answered}",
                hint=Message(Option("model"), " selects one that it has"),
            )
        return RequestError(
            f"{url} does not have this path: {answered}",
            hint="check the address, which often ends in /v1",
        )
    if status == 429:
        # The header may also contain a date, or a number of any length.
        after = response.headers.get("Retry-After", "")
        if after.isdecimal() and len(after) < 6:
            hint = f"try again in {int(after)} s"
        else:
            hint = "try again later"
        return UnreachableError(f"{url} is receiving too many requests: {answered}", hint=hint)
    if status >= 500:
        # Without a message, `answered` has the status.
        status_text = f"status {status}" if message else None
        return UnreachableError(
            f"{url} has failed: {answered}", found=status_text, hint="try again later"
        )
    kind = ContextLengthError if code == "context_length_exceeded" else RequestError
    return kind(f"{url} refuses the request: {answered}")


def create_other_api_error(url: str, answer: object) -> RequestError:
    """Create the error for an answer that is not of OpenAI's API."""
    hint = "check the address, which often ends in /v1"
    return RequestError(
        f"{url} does not answer with OpenAI's API", found=format_value(answer), hint=hint
    )


def create_unreachable_error(url: str, error: Exception) -> UnreachableError:
    """Create the error for a connection that cannot be opened."""
    # The text of this error names OpenSSL's source file; the attribute is the reason alone.
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message
    else:
        reason = _reason(error)
    return UnreachableError(
        f"{url} cannot be reached: {reason}",
        hint="check the address, and that the server is running",
    )


def create_lost_error(url: str, error: Exception | None = None) -> RequestError:
    """Create the error for a connection that ended before the answer did."""
    is_incomplete = isinstance(error, http.client.IncompleteRead)
    # `RemoteDisconnected` is both an HTTPException and an OSError.
    is_protocol_error = isinstance(error, http.client.HTTPException) and not isinstance(
        error, OSError
    )
    if is_protocol_error and not is_incomplete:
        return create_other_api_error(url, "not HTTP")
    if error is None or is_incomplete:
        reason = "it was closed"
    else:
        reason = _reason(error)
    return UnreachableError(
        f"{url} lost the connection before the answer ended: {reason}", hint="try again"
    )


def server_message(content: bytes) -> tuple[str, str | None]:
    """Read the message and the code in the body of an error; an empty message if there is none."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(value, dict):
        return "", None
    # Some servers have no object `error`, and some have a string there.
    error = value.get("error", value)
    text = error
    code = None
    if isinstance(error, dict):
        # FastAPI's own errors have a `detail`.
        text = error.get("message", error.get("detail"))
        code = error.get("code")
    message = _short(text) if isinstance(text, str) else ""
    return message, code if isinstance(code, str) else None


def _reason(error: Exception | None) -> str:
    """Describe an error in one line, by its name if it has no text."""
    # `strerror` has no error number in front.
    return _short(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _short(text: str) -> str:
    """Shorten a server's text to one line without control characters."""
    line = spell_control_characters(textwrap.shorten(text, _MESSAGE, placeholder=" ..."))
    # Backquotes mark arguments in quantkit's own messages.
    return line.replace("`", "'")
