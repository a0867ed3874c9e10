"""Errors of the hub's library, as users read them."""

from __future__ import annotations

import errno
import textwrap
from typing import Any

from quantkit.errors import (
    CheckpointError,
    NoSpaceError,
    QuantkitError,
    RequestError,
    UnreachableError,
)

_RETRYABLE = (408, 429, *range(500, 600))  # HTTP statuses
_LOG_IN = "log in: hf auth login; or correct HF_TOKEN"


def short(error: Exception) -> str:
    """Return the message of a library's error, in one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def read_failure(
    error: Exception,
    path: str,
    repository_kind: str = "model",
    hint: str = "try again, or pass a path",
) -> Exception:
    """Return the typed form of an error of a request that reads.

    Args:
        path: the repository.
        what: its kind.
        hint: what to do if the hub cannot be reached.
    """
    import huggingface_hub.utils

    errors: Any = huggingface_hub.utils
    if type(error) is ValueError or isinstance(
        error, LookupError | TypeError | AttributeError | RecursionError
    ):
        problem = f"the hub's answer cannot be read: {short(error)}"
        return CheckpointError(problem, path=path, hint="try again")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return RequestError(
            "HF_HUB_OFFLINE forbids requests to the hub", path=path, hint="unset it, or pass a path"
        )
    if isinstance(error, errors.GatedRepoError):
        return RequestError(
            "access to it on the hub is restricted", path=path, hint="log in: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError("the hub knows no such revision of it", path=path)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        again = "check the spelling; for a private one, log in: hf auth login"
        return RequestError(f"the hub knows no such {repository_kind}", path=path, hint=again)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NoSpaceError("the disk of the hub's cache is full", path=path)
    if isinstance(error, OSError) and error.filename is not None:
        problem = f"the hub's cache cannot be written: {error.strerror}"
        return RequestError(problem, path=error.filename, hint="HF_HOME chooses another")
    status = _status(error)
    if status == 401:
        return RequestError("the hub does not accept the access token", path=path, hint=_LOG_IN)
    kind = UnreachableError if status is None or status in _RETRYABLE else RequestError
    if status is None:
        reason = short(error)
    else:
        reason = f"status {status}"
    return kind(
        f"the hub cannot be reached for a {repository_kind}: {reason}", path=path, hint=hint
    )


def write_failure(error: Exception, path: str, doing: str) -> Exception:
    """Return the typed form of an error of a request that writes.

    Args:
        path: the repository.
        doing: what the request does, such as ``create the repository``.
    """
    import huggingface_hub.utils

    errors: Any = huggingface_hub.utils
    # Around errors of one file.
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, QuantkitError):
        return error
    status = _status(error)
    if isinstance(error, errors.OfflineModeIsEnabled) or status == 401:
        return read_failure(error, path)
    if status is None:
        malformed = isinstance(
            error, ValueError | LookupError | TypeError | AttributeError | RecursionError
        )
        if malformed and not isinstance(error, OSError):
            problem = f"cannot {doing}: the hub's answer cannot be read: {short(error)}"
            return CheckpointError(problem, path=path, hint="repeat the command")
        problem = f"cannot {doing}: the hub cannot be reached: {short(error)}"
        return UnreachableError(problem, path=path, hint="repeat the command")
    said = f"status {status}, {_server_message(error)}"
    if status == 429:
        hint = "wait some minutes, and repeat the command"
        return UnreachableError(
            f"cannot {doing}: the hub limits the number of requests", path=path, hint=hint
        )
    if status in _RETRYABLE:
        problem = f"cannot {doing}: the hub is overloaded or has failed"
        return UnreachableError(problem, path=path, found=said, hint="repeat the command later")
    if status == 412:
        problem = f"cannot {doing}: the repository has changed since it was read"
        return UnreachableError(problem, path=path, hint="repeat the command")
    if status == 409:
        hint = "choose another name, or use a token that may read it"
        return RequestError(f"cannot {doing}: the name is in use", path=path, found=said, hint=hint)
    if status in (403, 404):
        hint = "use a token with write access to it: https://huggingface.co/settings/tokens"
        return RequestError(f"the access token may not {doing}", path=path, found=said, hint=hint)
    return RequestError(f"cannot {doing}: the hub refuses it", path=path, found=said)


def _status(error: Exception) -> int | None:
    """Return the HTTP status of the hub's answer; None if there was none."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    return None


def _server_message(error: Exception) -> str:
    """Return what the hub states as the reason, in one line."""
    message = getattr(error, "server_message", None)
    if isinstance(message, str) and message:
        return textwrap.shorten(message, 200, placeholder=" ...")
    return "no reason"
