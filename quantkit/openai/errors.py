"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from quantkit.base.json_values import spell_control_characters
from quantkit.errors import QuantkitError

# Characters of an error: it may quote a request of any size.
_MAX_MESSAGE = 1000


def error_to_json(
    error: QuantkitError | str, *, kind: str = "invalid_request_error", code: str | None = None
) -> dict[str, Any]:
    """Convert an error to JSON: on one short line, whatever the request contains, with the field
    that is wrong.
    """
    field_name = None
    if isinstance(error, QuantkitError):
        field_name = error.argument
        # Clients need not know where the model is.
        error = error.restate(path=None)
    message = spell_control_characters(str(error))
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} ..."
    return {"error": {"message": message, "type": kind, "param": field_name, "code": code}}
