"""What went wrong with a request to a server with OpenAI's API, in one line. Whatever the server
sent is shown without control characters.
"""

from __future__ import annotations

import http.client
import json
import ssl
import textwrap
from http.client import HTTPResponse

from quantkit.base.json_values import format_value, printable
from quantkit.errors import RequestError, UnreachableError

# Characters of a server's message.
_MESSAGE = 500
_BODY_BYTES = 1 << 16


class ContextLengthError(RequestError):
    """A conversation is too long for the server's context."""


def refusal(url: str, response: HTTPResponse, *, with_key: bool) -> RequestError:
    """Return the error for a response whose status is not 200.

    Args:
        url: the server's address.
        with_key: whether the request had a key.
    """
    status = response.status
    message, code = server_message(response.read(_BODY_BYTES))
    answered = message or f"status {status} {printable(response.reason)}".rstrip()
    if 300 <= status < 400:
        problem = f"{url} redirects, which is not followed"
        place = response.headers.get("Location", "")
        return RequestError(
            problem, found=format_value(place), hint="give that address if you trust it"
        )
    if status in (401, 403):
        if with_key:
            problem = "does not accept the API key"
        else:
            problem = "needs an API key"
        return RequestError(
            f"{url} {problem}: {answered}", hint="check `api_key`" if with_key else "give `api_key`"
        )
    if status == 404:
        model = code == "model_not_found"
        if model:
            hint = "`model` selects one that it has"
        else:
            hint = "check the address, which often ends in /v1"
        return RequestError(
            f"{url} does not have {'this model' if model else 'this path'}: {answered}", hint=hint
        )
    if status == 429:
        after = response.headers.get("Retry-After", "")
        if after.isdecimal() and len(after) < 6:
            hint = f"try again in {int(after)} s"
        else:
            hint = "try again later"
        return UnreachableError(f"{url} has too many requests: {answered}", hint=hint)
    if status >= 500:
        found = f"status {status}" if message else None
        return UnreachableError(
            f"{url} has failed: {answered}", found=found, hint="try again later"
        )
    kind = ContextLengthError if code == "context_length_exceeded" else RequestError
    return kind(f"{url} refuses the request: {answered}")


def other_api(url: str, answer: object) -> RequestError:
    """Return the error for an answer that is not of OpenAI's API."""
    hint = "check the address, which often ends in /v1"
    return RequestError(
        f"{url} does not answer with OpenAI's API", found=format_value(answer), hint=hint
    )


def unreachable(url: str, error: Exception) -> UnreachableError:
    """Return the error for a connection that cannot be opened."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message
    else:
        reason = _reason(error)
    return UnreachableError(
        f"{url} cannot be reached: {reason}", hint="check the address, and whether the server runs"
    )


def lost(url: str, error: Exception | None = None) -> RequestError:
    """Return the error for a connection that ended before the answer did."""
    if isinstance(error, http.client.HTTPException) and not isinstance(
        error, OSError | http.client.IncompleteRead
    ):
        return other_api(url, "no HTTP")
    early = error is None or isinstance(error, http.client.IncompleteRead)
    if early:
        reason = "it was closed"
    else:
        reason = _reason(error)
    return UnreachableError(
        f"{url} lost the connection before the answer ended: {reason}", hint="try again"
    )


def server_message(content: bytes) -> tuple[str, str | None]:
    """Return the message and the code in the body of an error; an empty message if there is
    none.
    """
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError):
        return "", None
    if isinstance(value, dict):
        found = value.get("error", value)
    else:
        found = None
    if isinstance(found, dict):
        text = found.get("message", found.get("detail"))
    else:
        text = found
    if isinstance(found, dict):
        code = found.get("code")
    else:
        code = None
    return _short(text) if isinstance(text, str) else "", code if isinstance(code, str) else None


def _reason(error: Exception | None) -> str:
    return _short(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _short(text: str) -> str:
    """In one line, and without the backquotes that stand around arguments in our own messages."""
    return printable(textwrap.shorten(text, _MESSAGE, placeholder=" ...")).replace("`", "'")
